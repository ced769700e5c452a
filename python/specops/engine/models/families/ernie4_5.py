# SPDX-License-Identifier: Apache-2.0
"""ERNIE-4.5, dense and with mixtures of experts. MTP modules always have a dense MLP."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from specops.engine.models.blocks.experts import ExpertsConfig, Routing
from specops.engine.models.blocks.layer import AnyMlpConfig
from specops.engine.models.blocks.mlp import DenseMlpConfig
from specops.engine.models.config import ModelConfig
from specops.engine.models.families.defaults import ERNIE4_5, ERNIE4_5_MOE
from specops.engine.models.families.dense_decoder import dense_decoder, dense_mlp
from specops.engine.models.families.family import Family, MtpConvention
from specops.engine.models.families.fields import (
    count,
    flag,
    index,
    number,
    refuse_values,
)
from specops.engine.models.families.gguf import GgufForm


def read_dense(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of a dense model.

    Raises:
        KeyError: a field is missing.
        ModelError: a field has an invalid value.
    """
    has_bias = flag(raw, "use_bias")
    biases = {"attention_bias": has_bias, "mlp_bias": has_bias}
    return dense_decoder({**raw, **biases}, interleaved=True, defaults=ERNIE4_5)


def read_experts(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of a model with experts.

    Raises:
        KeyError: a field is missing.
        ModelError: a field has an invalid or unsupported value.
    """
    refuse_values(raw, {"use_bias": (False, None)})
    raw = {**ERNIE4_5_MOE, **raw}
    config = dense_decoder(raw, qkv_bias=False, o_bias=False, interleaved=True, mlps=mlps)
    module = replace(config.layers[-1], mlp=dense_mlp(raw))
    return replace(config, mtp_layer=module, wint4_is_mixed=True)


def mlps(raw: Mapping[str, Any], num_layers: int) -> Sequence[AnyMlpConfig]:
    """Return experts for every moe_layer_interval-th layer from start to end, else dense MLPs."""
    first = index(raw, "moe_layer_start_index", 1)
    last = raw.get("moe_layer_end_index", -1)
    last = num_layers - 1 if last == -1 else index(raw, "moe_layer_end_index", 0)
    step = count(raw, "moe_layer_interval", 1)
    width = count(raw, "moe_intermediate_size")
    shared = index(raw, "moe_num_shared_experts", 2)
    experts = ExpertsConfig(
        num_experts=count(raw, "moe_num_experts"),
        width=width,
        routing=Routing(
            top_k=count(raw, "moe_k"),
            min_sum=number("moe_norm_min", raw.get("moe_norm_min", 1e-12), or_zero=True),
            bias="moe_statics.e_score_correction_bias",
            bias_shape=(1,),
        ),
        shared=DenseMlpConfig(width=shared * width) if shared else None,
    )
    has_experts = [first <= i <= last and (i + 1) % step == 0 for i in range(num_layers)]
    return [experts if one else dense_mlp(raw) for one in has_experts]


_GGUF_KEYS = {
    "leading_dense_block_count": "moe_layer_start_index",
    "interleave_moe_layer_step": "moe_layer_interval",
    "expert_count": "moe_num_experts",
    "expert_used_count": "moe_k",
    "expert_shared_count": "moe_num_shared_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
}
FAMILY = Family(
    title="ERNIE-4.5",
    read={"Ernie4_5ForCausalLM": read_dense, "Ernie4_5_MoeForCausalLM": read_experts},
    mtp=MtpConvention(
        name="ernie4_5",
        families=("ERNIE-4.5",),
        embed_norm="model.mtp_emb_norm.{index}",
        hidden_norm="model.mtp_hidden_norm.{index}",
        projection="model.mtp_linear_proj.{index}",
        head_norm=None,
        block="model.mtp_block.{index}.",
    ),
    gguf=(
        GgufForm("ernie4_5", "Ernie4_5ForCausalLM"),
        GgufForm(
            "ernie4_5-moe",
            "Ernie4_5_MoeForCausalLM",
            keys=_GGUF_KEYS,
            ignored=("expert_shared_feed_forward_length",),
        ),
    ),
)
