# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Next and Qwen3.5: layers of linear and of gated attention, with MTP modules."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from specops.api.errors import ModelError
from specops.engine.models.blocks.experts import ExpertsConfig
from specops.engine.models.blocks.layer import AnyMlpConfig, LayerNames
from specops.engine.models.blocks.linear_attention import LinearAttentionConfig
from specops.engine.models.blocks.mlp import DenseMlpConfig
from specops.engine.models.config import ModelConfig, Place
from specops.engine.models.families import qwen3_moe
from specops.engine.models.families.defaults import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from specops.engine.models.families.dense_decoder import Mlps, dense_decoder
from specops.engine.models.families.family import Family, MtpConvention
from specops.engine.models.families.fields import (
    FULL,
    LINEAR,
    count,
    layer_types,
    refuse_values,
    text_config,
)
from specops.engine.models.families.gguf import GgufForm, partial_rotary_factor

# Fields that lie outside text_config in multimodal files.
_AROUND = ("architectures", "tie_word_embeddings", "dtype", "torch_dtype")
_PLACES = (Place("model.", "lm_head"), Place("model.language_model.", "lm_head"))


def read_next(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of a Qwen3-Next model.

    Raises:
        KeyError: a field is missing.
        ModelError: a field has an invalid or unsupported value.
    """
    return _read({**QWEN3_NEXT, **raw}, mlps=mlps)


def read_dense(whole: Mapping[str, Any]) -> ModelConfig:
    """Read the text part of a dense Qwen3.5 config.json; errors as in `read_next`."""
    return replace(_read(_text(whole, QWEN3_5), is_fused=False), places=_PLACES)


def read_experts(whole: Mapping[str, Any]) -> ModelConfig:
    """Read the text part of a Qwen3.5 config.json with experts; errors as in `read_next`.

    Their routing weights are always normalized to sum 1.
    """
    raw = {**_text(whole, QWEN3_5_MOE), "norm_topk_prob": True}
    return replace(_read(raw, mlps=mlps, is_fused=False), places=_PLACES)


def _text(whole: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    around = {name: whole[name] for name in _AROUND if name in whole}
    return {**defaults, **around, **text_config(whole)}


def _read(
    raw: Mapping[str, Any], *, mlps: Mlps | None = None, is_fused: bool = True
) -> ModelConfig:
    refuse_values(raw, {"attn_output_gate": (True, None)})
    num_layers = count(raw, "num_hidden_layers")
    types = layer_types(raw, num_layers, LINEAR) or _types(raw, num_layers)
    if FULL not in types:
        raise ModelError(
            f"layer_types or full_attention_interval must make at least one layer {FULL}, got "
            f"{LINEAR} for all {num_layers}"
        )
    config = dense_decoder(
        {name: one for name, one in raw.items() if name != "layer_types"},
        qk_norm=True,
        has_gate=True,
        partial_rotary_factor=0.25,
        mlps=mlps,
    )
    linear = replace(_linear_attention(raw), is_fused=is_fused)
    layers = [
        replace(layer, attention=linear, names=LayerNames(attention="linear_attn."))
        if kind == LINEAR
        else layer
        for kind, layer in zip(types, config.layers, strict=True)
    ]
    # MTP modules have gated attention, whatever kind the last layer has.
    return replace(config, layers=tuple(layers), mtp_layer=config.layers[-1], norm_offset=1.0)


def _types(raw: Mapping[str, Any], num_layers: int) -> Sequence[str]:
    interval = count(raw, "full_attention_interval", 4)
    return [LINEAR if (layer + 1) % interval else FULL for layer in range(num_layers)]


def _linear_attention(raw: Mapping[str, Any]) -> LinearAttentionConfig:
    key_heads, value_heads = (count(raw, f"linear_num_{one}_heads") for one in ("key", "value"))
    if value_heads % key_heads:
        raise ModelError(
            f"linear_num_value_heads must be a multiple of linear_num_key_heads={key_heads}, got "
            f"{value_heads}"
        )
    return LinearAttentionConfig(
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_dim=count(raw, "linear_key_head_dim"),
        value_dim=count(raw, "linear_value_head_dim"),
        taps=count(raw, "linear_conv_kernel_dim"),
    )


def mlps(raw: Mapping[str, Any], num_layers: int) -> Sequence[AnyMlpConfig]:
    """Return the MLPs of Qwen3-MoE with an additional gated shared expert."""
    shared = DenseMlpConfig(width=count(raw, "shared_expert_intermediate_size"))
    return [
        replace(
            one, shared=shared, shared_name="shared_expert.", shared_gate_name="shared_expert_gate"
        )
        if isinstance(one, ExpertsConfig)
        else one
        for one in qwen3_moe.mlps(raw, num_layers)
    ]


def _gguf_fields(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the size of a value, the rotated part of a head, and the kinds of the layers."""
    heads = count(raw, "linear_num_value_heads")
    fields = {
        "linear_value_head_dim": count(raw, "linear_values") // heads,
        **partial_rotary_factor(raw),
    }
    if "are_linear" in raw:
        if not isinstance(raw["are_linear"], list):
            raise ModelError(
                f"attention.recurrent_layers must be a list of flags, got {raw['are_linear']!r:.60}"
            )
        kinds = [LINEAR if one else FULL for one in raw["are_linear"]]
        fields["layer_types"] = kinds[: count(raw, "num_hidden_layers")]
    return fields


_GGUF_KEYS = {
    **qwen3_moe.GGUF_KEYS,
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "full_attention_interval": "full_attention_interval",
    "attention.recurrent_layers": "are_linear",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "ssm.inner_size": "linear_values",
    "rope.dimension_count": "rotary_dim",
}
_GGUF_ARCHITECTURES = {
    "qwen3next": "Qwen3NextForCausalLM",
    "qwen35": "Qwen3_5ForCausalLM",
    "qwen35moe": "Qwen3_5MoeForCausalLM",
}
FAMILY = Family(
    title="Qwen3-Next and Qwen3.5",
    read={
        "Qwen3NextForCausalLM": read_next,
        "Qwen3_5ForCausalLM": read_dense,
        "Qwen3_5ForConditionalGeneration": read_dense,
        "Qwen3_5MoeForCausalLM": read_experts,
        "Qwen3_5MoeForConditionalGeneration": read_experts,
    },
    mtp=MtpConvention(
        name="qwen3_next",
        families=("Qwen3-Next", "Qwen3.5"),
        count_fields=("mtp_num_hidden_layers", "num_nextn_predict_layers"),
        embed_norm="mtp.pre_fc_norm_embedding",
        hidden_norm="mtp.pre_fc_norm_hidden",
        projection="mtp.fc",
        head_norm="mtp.norm",
        block="mtp.layers.{index}.",
        norm_offset=1.0,
    ),
    gguf=tuple(
        GgufForm(
            architecture,
            read_as,
            keys=_GGUF_KEYS,
            # Sections of positions differ for images only.
            ignored=("rope.dimension_sections",),
            fields=_gguf_fields,
        )
        for architecture, read_as in _GGUF_ARCHITECTURES.items()
    ),
)
