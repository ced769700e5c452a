# SPDX-License-Identifier: Apache-2.0
"""Granite 4: layers of Mamba-2 and of attention, dense MLPs or mixtures of experts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from specops.api.errors import ModelError
from specops.engine.models.blocks.attention import AttentionConfig
from specops.engine.models.blocks.block import NO_ROPE
from specops.engine.models.blocks.experts import ExpertsConfig, Routing
from specops.engine.models.blocks.layer import AnyMlpConfig, LayerConfig, LayerNames
from specops.engine.models.blocks.mlp import DenseMlpConfig
from specops.engine.models.config import ModelConfig
from specops.engine.models.families.defaults import GRANITE_HYBRID
from specops.engine.models.families.dense_decoder import dense_decoder
from specops.engine.models.families.family import Family
from specops.engine.models.families.fields import (
    FULL,
    LINEAR,
    count,
    flag,
    index,
    layer_types,
    number,
)
from specops.engine.models.families.gguf import GgufForm
from specops.engine.models.families.mamba2_layers import mamba2

# Kinds of layers in files of transformers 4.
_KINDS = {"mamba": LINEAR, "attention": FULL}


def read(raw: Mapping[str, Any]) -> ModelConfig:
    """Read a config.json.

    Raises:
        KeyError: a field is missing.
        ModelError: a field has an invalid or unsupported value.
    """
    raw = {**GRANITE_HYBRID, **raw}
    kinds = _kinds(raw, count(raw, "num_hidden_layers"))
    config = dense_decoder(
        {name: one for name, one in raw.items() if name != "layer_types"}, mlps=mlps
    )
    inner = count(raw, "mamba_expand") * count(raw, "hidden_size")
    # Models with attention only may have meaningless fields of Mamba-2.
    mamba = mamba2(raw, inner) if LINEAR in kinds else None
    scale = number("attention_multiplier", raw["attention_multiplier"])
    branch_scale = number("residual_multiplier", raw["residual_multiplier"])
    positions = raw.get("position_embedding_type")
    if positions not in (None, "nope", "rope"):
        raise ModelError(f"position_embedding_type must be nope or rope, got {positions!r:.60}")

    def of_kind(layer: LayerConfig, kind: str) -> LayerConfig:
        names = LayerNames(mlp="shared_mlp." if isinstance(layer.mlp, DenseMlpConfig) else "")
        layer = replace(layer, names=names, branch_scale=branch_scale)
        if kind == LINEAR and mamba is not None:
            return replace(layer, attention=mamba, names=replace(names, attention="mamba."))
        assert isinstance(layer.attention, AttentionConfig)
        rope = layer.attention.rope if positions == "rope" else NO_ROPE
        return replace(layer, attention=replace(layer.attention, sm_scale=scale, rope=rope))

    return replace(
        config,
        layers=tuple(map(of_kind, config.layers, kinds)),
        embedding_scale=number("embedding_multiplier", raw["embedding_multiplier"]),
        logits_divisor=number("logits_scaling", raw["logits_scaling"]),
    )


def _kinds(raw: Mapping[str, Any], num_layers: int) -> Sequence[str]:
    listed = raw.get("layer_types")
    if isinstance(listed, list):
        listed = [_KINDS.get(one, one) if isinstance(one, str) else one for one in listed]
    kinds = layer_types({"layer_types": listed}, num_layers, LINEAR)
    if kinds is None or FULL not in kinds:
        raise ModelError(
            f"layer_types must make at least one layer {FULL}, got {raw.get('layer_types')!s:.60}"
        )
    return kinds


def mlps(raw: Mapping[str, Any], num_layers: int) -> Sequence[AnyMlpConfig]:
    """Return a shared MLP for every layer, beside experts if there are any."""
    shared = DenseMlpConfig(
        width=count(raw, "shared_intermediate_size"),
        gate_up_name="input_linear",
        down_name="output_linear",
    )
    num_experts = index(raw, "num_local_experts", 0)
    if not num_experts:
        return [shared] * num_layers
    experts = ExpertsConfig(
        num_experts=num_experts,
        width=count(raw, "intermediate_size"),
        routing=Routing(top_k=count(raw, "num_experts_per_tok"), min_sum=0.0),
        shared=shared,
        router_name="block_sparse_moe.router.layer",
        experts_name="block_sparse_moe.experts.",
        shared_name="shared_mlp.",
    )
    return [experts] * num_layers


def _gguf_fields(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the kinds of the layers: those without key heads have Mamba-2."""
    key_heads = raw["num_key_value_heads"]
    inner, hidden = count(raw, "mamba_inner"), count(raw, "hidden_size")
    if not isinstance(key_heads, list) or len({*key_heads, 0}) != 2:
        raise ModelError(
            "attention.head_count_kv must be one number of heads for layers with attention, and 0 "
            f"for others, got {key_heads!s:.60}"
        )
    if inner % hidden:
        raise ModelError(f"ssm.inner_size must be a multiple of {hidden}, got {inner}")
    return {
        "layer_types": [FULL if one else LINEAR for one in key_heads],
        "num_key_value_heads": max(key_heads),
        "mamba_expand": inner // hidden,
        "position_embedding_type": "rope" if flag(raw, "is_rotated", True) else "nope",
    }


_GGUF_KEYS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_shared_feed_forward_length": "shared_intermediate_size",
    "rope.scaling.finetuned": "is_rotated",
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.group_count": "mamba_n_groups",
    "ssm.inner_size": "mamba_inner",
    "ssm.time_step_rank": "mamba_n_heads",
}
FAMILY = Family(
    title="Granite 4",
    read={"GraniteMoeHybridForCausalLM": read},
    gguf=(
        GgufForm(
            "granitehybrid",
            "GraniteMoeHybridForCausalLM",
            keys=_GGUF_KEYS,
            defaults={"num_local_experts": 0},
            fields=_gguf_fields,
        ),
    ),
)
