# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3 and R1: latent attention, and experts that are chosen in groups."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from specops.attention import LATENT_DIM
from specops.engine.models.blocks.block import Rope
from specops.engine.models.blocks.experts import ExpertsConfig, Routing
from specops.engine.models.blocks.latent_attention import LatentAttentionConfig
from specops.engine.models.blocks.layer import AnyMlpConfig, LayerConfig
from specops.engine.models.blocks.mlp import DenseMlpConfig
from specops.engine.models.config import ModelConfig
from specops.engine.models.families.dense_decoder import dense_mlp, model_config, scaling_of
from specops.engine.models.families.family import Family, MtpConvention
from specops.engine.models.families.fields import count, mapping, number, refuse_values


def mlps(raw: Mapping[str, Any], num_layers: int) -> Sequence[AnyMlpConfig]:
    """The first layers are dense, the others have experts."""
    refuse_values(raw, {"scoring_func": ("sigmoid", None), "topk_method": ("noaux_tc", None)})
    width, shared = count(raw, "moe_intermediate_size"), raw.get("n_shared_experts") or 0
    experts = ExpertsConfig(
        num_experts=count(raw, "n_routed_experts"),
        width=width,
        routing=Routing(
            top_k=count(raw, "num_experts_per_tok"),
            scoring="sigmoid",
            num_groups=count(raw, "n_group", 1),
            top_k_groups=count(raw, "topk_group", 1),
            min_sum=1e-20 if raw.get("norm_topk_prob", True) else None,
            scale=number("routed_scaling_factor", raw.get("routed_scaling_factor", 1.0)),
            bias="gate.e_score_correction_bias",
        ),
        shared=DenseMlpConfig(width=shared * width) if shared else None,
    )
    dense = raw.get("first_k_dense_replace", 0)
    return [dense_mlp(raw) if layer < dense else experts for layer in range(num_layers)]


def read(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads a config.json.

    Raises:
        KeyError: a field is missing.
        ModelError: a field holds what it cannot hold, or what does not run.
    """
    refuse_values(
        raw,
        {
            "hidden_act": ("silu", None),
            "kv_lora_rank": (LATENT_DIM,),
            "moe_layer_freq": (1, None),
        },
    )
    nope_dim, rope_dim = count(raw, "qk_nope_head_dim"), count(raw, "qk_rope_head_dim")
    rope = mapping(raw, "rope_parameters", "rope_scaling")
    theta = number("rope_theta", rope.pop("rope_theta", raw.get("rope_theta", 10000.0)))
    attention = LatentAttentionConfig(
        num_qo_heads=count(raw, "num_attention_heads"),
        q_rank=None if raw.get("q_lora_rank") is None else count(raw, "q_lora_rank"),
        nope_dim=nope_dim,
        value_dim=count(raw, "v_head_dim"),
        sm_scale=_sharpness(rope) ** 2 / math.sqrt(nope_dim + rope_dim),
        rope=Rope(theta=theta, scaling=scaling_of(rope), dim=rope_dim),
        interleaved=bool(raw.get("rope_interleave", True)),
        has_bias=bool(raw.get("attention_bias", False)),
    )
    of_layers = mlps(raw, count(raw, "num_hidden_layers"))
    return model_config(raw, [LayerConfig(attention=attention, mlp=one) for one in of_layers])


def _sharpness(rope: Mapping[str, Any]) -> float:
    """What YaRN multiplies queries and keys with."""
    scaling = scaling_of(rope)
    if scaling is None or not scaling.get("mscale_all_dim"):
        return 1.0
    factor = number("factor of rope_scaling", scaling.get("factor"))
    return 0.1 * number("mscale_all_dim", scaling["mscale_all_dim"]) * math.log(max(factor, 1)) + 1


FAMILY = Family(
    title="DeepSeek-V3",
    read={"DeepseekV3ForCausalLM": read},
    mtp=MtpConvention(
        name="deepseek_v3",
        families=("DeepSeek-V3", "DeepSeek-R1", "GLM-4.5", "the bundled model"),
        embed_norm="model.layers.{layer}.enorm",
        hidden_norm="model.layers.{layer}.hnorm",
        projection="model.layers.{layer}.eh_proj",
        head_norm="model.layers.{layer}.shared_head.norm",
        block="model.layers.{layer}.",
        copies=("model.layers.{layer}.embed_tokens", "model.layers.{layer}.shared_head.head"),
    ),
)
