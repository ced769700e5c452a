# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3 and R1: multi-head latent attention, and experts that are chosen in groups."""

from collections.abc import Mapping
from math import log, sqrt
from typing import Any

from specops.attention import LATENT_DIM
from specops.engine.models.blocks.block import Rope
from specops.engine.models.blocks.latent_attention import LatentAttentionConfig
from specops.engine.models.blocks.layer import LayerConfig
from specops.engine.models.config import ModelConfig
from specops.engine.models.families.defaults import DEEPSEEK_V3, LLAMA
from specops.engine.models.families.dense_decoder import model_config, scaling_of
from specops.engine.models.families.experts_of_groups import (
    GGUF_DEFAULTS,
    GGUF_KEYS,
    GGUF_SIGMOID,
    experts_of_groups,
)
from specops.engine.models.families.family import Family, MtpConvention
from specops.engine.models.families.fields import (
    count,
    flag,
    mapping,
    number,
    refuse_values,
)
from specops.engine.models.families.gguf import LATENT_KEYS, GgufForm


def read(raw: Mapping[str, Any]) -> ModelConfig:
    """Read a config.json.

    Raises:
        KeyError: a field is missing.
        ModelError: a field has an invalid or unsupported value.
    """
    raw = {**DEEPSEEK_V3, **raw}
    refuse_values(
        raw,
        {
            "hidden_act": ("silu", "swish", None),
            "kv_lora_rank": (LATENT_DIM,),
            "moe_layer_freq": (1, None),
        },
    )
    nope_dim, rope_dim = count(raw, "qk_nope_head_dim"), count(raw, "qk_rope_head_dim")
    rope = mapping(raw, "rope_scaling", "rope_parameters")
    theta = number("rope_theta", rope.pop("rope_theta", raw.get("rope_theta", LLAMA["rope_theta"])))
    attention = LatentAttentionConfig(
        num_qo_heads=count(raw, "num_attention_heads"),
        q_rank=None if raw.get("q_lora_rank") is None else count(raw, "q_lora_rank"),
        nope_dim=nope_dim,
        value_dim=count(raw, "v_head_dim"),
        sm_scale=_sharpness(rope) ** 2 / sqrt(nope_dim + rope_dim),
        rope=Rope(theta=theta, scaling=scaling_of(rope), dim=rope_dim),
        interleaved=flag(raw, "rope_interleave", True),
        has_bias=flag(raw, "attention_bias"),
    )
    of_layers = experts_of_groups(raw, count(raw, "num_hidden_layers"))
    return model_config(raw, [LayerConfig(attention=attention, mlp=one) for one in of_layers])


def _sharpness(rope: Mapping[str, Any]) -> float:
    """Return YaRN's factor on queries and keys (mscale)."""
    scaling = scaling_of(rope)
    if scaling is None or not scaling.get("mscale_all_dim"):
        return 1.0
    factor = number("factor of rope_scaling", scaling.get("factor"))
    return 0.1 * number("mscale_all_dim", scaling["mscale_all_dim"]) * log(max(factor, 1)) + 1


def _gguf_fields(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the sizes of a head's parts, and YaRN's factor on queries and keys.

    In files whose kv_b_proj is split into keys and values, the plain keys for a head's sizes
    describe the latent.
    """
    key_dim = count(raw, "key_dim_mla", count(raw, "head_dim"))
    fields: dict[str, Any] = {"qk_nope_head_dim": key_dim - count(raw, "qk_rope_head_dim")}
    if "value_dim_mla" in raw:
        fields["v_head_dim"] = raw["value_dim_mla"]
    rope = mapping(raw, "rope_scaling")
    if rope and "mscale_tenth" in raw:
        # The file holds a tenth of it, rounded to float32.
        sharpness = round(10 * number("mscale_all_dim", raw["mscale_tenth"], or_zero=True), 6)
        fields["rope_scaling"] = {**rope, "mscale": sharpness, "mscale_all_dim": sharpness}
    return fields


_GGUF_KEYS = {
    **GGUF_KEYS,
    **LATENT_KEYS,
    "attention.value_length_mla": "value_dim_mla",
    "attention.value_length": "v_head_dim",
    "rope.scaling.yarn_log_multiplier": "mscale_tenth",
}
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
    gguf=(
        GgufForm(
            "deepseek2",
            "DeepseekV3ForCausalLM",
            keys=_GGUF_KEYS,
            defaults={**GGUF_DEFAULTS, "q_lora_rank": None},
            allowed={"expert_gating_func": (GGUF_SIGMOID,)},
            fields=_gguf_fields,
        ),
    ),
)
