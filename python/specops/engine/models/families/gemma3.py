# SPDX-License-Identifier: Apache-2.0
"""Gemma 3, text only."""

from collections.abc import Mapping
from typing import Any

from specops.engine.models.blocks.attention import AttentionConfig
from specops.engine.models.blocks.block import Rope
from specops.engine.models.blocks.layer import LayerConfig, LayerNames
from specops.engine.models.blocks.mlp import DenseMlpConfig
from specops.engine.models.config import ModelConfig, Place
from specops.engine.models.families.defaults import GEMMA3
from specops.engine.models.families.dense_decoder import scaling_of
from specops.engine.models.families.family import Family
from specops.engine.models.families.fields import (
    FULL,
    SLIDING,
    count,
    dtype_of,
    flag,
    layer_types,
    mapping,
    number,
    refuse_values,
    text_config,
)
from specops.engine.models.families.gguf import GgufForm

# Fields that lie outside text_config in multimodal files.
_AROUND = ("tie_word_embeddings", "dtype", "torch_dtype")
_GELU = "gelu_pytorch_tanh"
_NAMES = LayerNames(
    attention_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    output_norm="post_feedforward_layernorm",
)
_PLACES = (
    Place("model.", "lm_head"),
    Place("language_model.model.", "language_model.lm_head"),
    Place("model.language_model.", "lm_head"),
)


def read(whole: Mapping[str, Any]) -> ModelConfig:
    """Read a config.json.

    Raises:
        KeyError: a field is missing.
        ModelError: a field has an invalid or unsupported value.
    """
    around = {name: whole[name] for name in _AROUND if name in whole}
    raw = {**GEMMA3, **around, **text_config(whole)}
    refuse_values(
        raw,
        {
            "hidden_activation": (_GELU, None),
            "hidden_act": (_GELU, None),
            "attn_logit_softcapping": (None,),
            "final_logit_softcapping": (None,),
            "use_bidirectional_attention": (False, None),
        },
    )
    kinds = _kinds(raw, count(raw, "num_hidden_layers"))
    hidden_size = count(raw, "hidden_size")
    head_dim = count(raw, "head_dim", hidden_size // count(raw, "num_attention_heads"))
    ropes = {kind: _rope(raw, kind, head_dim) for kind in (FULL, SLIDING)}
    window = count(raw, "sliding_window")
    has_bias = flag(raw, "attention_bias")
    layers = [
        LayerConfig(
            attention=AttentionConfig(
                num_qo_heads=count(raw, "num_attention_heads"),
                num_kv_heads=count(raw, "num_key_value_heads", count(raw, "num_attention_heads")),
                head_dim=head_dim,
                sm_scale=number("query_pre_attn_scalar", raw["query_pre_attn_scalar"]) ** -0.5,
                rope=ropes[kind],
                sliding_window=window if kind == SLIDING else None,
                qkv_bias=has_bias,
                o_bias=has_bias,
                qk_norm=True,
            ),
            mlp=DenseMlpConfig(width=count(raw, "intermediate_size"), activation="gelu_tanh"),
            names=_NAMES,
        )
        for kind in kinds
    ]
    return ModelConfig(
        architecture=whole["architectures"][0],
        vocab_size=count(raw, "vocab_size"),
        hidden_size=hidden_size,
        layers=tuple(layers),
        rms_norm_eps=number("rms_norm_eps", raw["rms_norm_eps"], or_zero=True),
        max_model_len=count(raw, "max_position_embeddings"),
        tie_word_embeddings=flag(raw, "tie_word_embeddings"),
        dtype=dtype_of(raw),
        norm_offset=1.0,
        embedding_scale=hidden_size**0.5,
        places=_PLACES,
    )


def _kinds(raw: Mapping[str, Any], num_layers: int) -> list[str]:
    """Return each layer's kind of attention, from the file's list or its pattern."""
    pattern = count(raw, "sliding_window_pattern")
    by_pattern = [SLIDING if (layer + 1) % pattern else FULL for layer in range(num_layers)]
    return layer_types(raw, num_layers) or by_pattern


def _rope(raw: Mapping[str, Any], kind: str, head_dim: int) -> Rope:
    """Return the RoPE config of layers of one kind, from new or old config fields."""
    whole = mapping(raw, "rope_parameters")
    rope = mapping(whole, kind)
    if kind == FULL:
        rope = rope or mapping(raw, "rope_scaling")
        default = raw.get("rope_theta", 1_000_000.0)
    else:
        default = raw.get("rope_local_base_freq", 10_000.0)
    theta = rope.pop("rope_theta", None) or default
    return Rope(theta=number("rope_theta", theta), scaling=scaling_of(rope), dim=head_dim)


def _scale_of_queries(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return query_pre_attn_scalar, which GGUF files omit: head_dim, except in the 27B model."""
    if raw["num_hidden_layers"] == 62:
        return {"query_pre_attn_scalar": raw["hidden_size"] // raw["num_attention_heads"]}
    return {"query_pre_attn_scalar": raw["head_dim"]}


_GGUF_KEYS = {
    "rope.freq_base_swa": "rope_local_base_freq",
    "attention.sliding_window_pattern": "sliding_window_pattern",
}
FAMILY = Family(
    title="Gemma 3",
    read={"Gemma3ForCausalLM": read, "Gemma3ForConditionalGeneration": read},
    gguf=(GgufForm("gemma3", "Gemma3ForCausalLM", keys=_GGUF_KEYS, fields=_scale_of_queries),),
)
