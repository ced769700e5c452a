# SPDX-License-Identifier: Apache-2.0
"""Decoder of most families: grouped-query attention, a gated MLP and two norms per layer."""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from specops.api.errors import ModelError
from specops.engine.models.blocks.attention import AttentionConfig
from specops.engine.models.blocks.block import Rope
from specops.engine.models.blocks.layer import AnyMlpConfig, LayerConfig
from specops.engine.models.blocks.mlp import DenseMlpConfig
from specops.engine.models.config import ModelConfig
from specops.engine.models.families.defaults import LLAMA
from specops.engine.models.families.fields import (
    SLIDING,
    count,
    dtype_of,
    flag,
    index,
    layer_types,
    mapping,
    number,
    refuse_values,
)

Windows = Sequence[int | None]  # sliding window of each layer
Mlps = Callable[[Mapping[str, Any], int], Sequence[AnyMlpConfig]]  # MLP of each layer


def dense_mlp(raw: Mapping[str, Any]) -> DenseMlpConfig:
    """Read the config of a dense MLP."""
    return DenseMlpConfig(width=count(raw, "intermediate_size"), has_bias=flag(raw, "mlp_bias"))


def no_windows(raw: Mapping[str, Any], num_layers: int) -> Windows:
    """Return no window for any layer."""
    return [None] * num_layers


def windows_of_all(raw: Mapping[str, Any], num_layers: int) -> Windows:
    """Return the file's window for every layer, or for those that layer_types marks as sliding."""
    types = layer_types(raw, num_layers)
    window = None if raw.get("sliding_window") is None else count(raw, "sliding_window")
    if types is not None:
        return [window if one == SLIDING else None for one in types]
    return [window] * num_layers


def windows_of_last(raw: Mapping[str, Any], num_layers: int) -> Windows:
    """Return windows for layers from max_window_layers on, if use_sliding_window is true."""
    windows = windows_of_all(raw, num_layers)
    if not flag(raw, "use_sliding_window"):
        return [None] * num_layers
    if layer_types(raw, num_layers) is not None:
        return windows
    first = index(raw, "max_window_layers", num_layers)
    return [window if layer >= first else None for layer, window in enumerate(windows)]


def dense_decoder(
    raw: Mapping[str, Any],
    *,
    windows: Callable[[Mapping[str, Any], int], Windows] = no_windows,
    qkv_bias: bool | None = None,
    o_bias: bool | None = None,
    qk_norm: bool = False,
    partial_rotary_factor: float = 1.0,
    interleaved: bool = False,
    has_sinks: bool = False,
    has_gate: bool = False,
    mlps: Mlps | None = None,
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> ModelConfig:
    """Read a config.json.

    Args:
        raw: content of the file.
        windows: function that returns the sliding window of each layer.
        qkv_bias: whether q, k and v have biases; None: use attention_bias from the file.
        o_bias: whether the output projection has a bias; None: use attention_bias.
        qk_norm: whether q and k are normed per head.
        partial_rotary_factor: default fraction of a head that is rotated.
        interleaved: whether RoPE rotates adjacent elements, not halves.
        has_sinks: whether each query head has an attention sink, a logit without a value.
        has_gate: whether q_proj also outputs a gate for each head's output.
        mlps: function that returns the MLP config of each layer; None: all are dense.
        defaults: defaults of fields that the family's files may omit; they override Llama's.

    Raises:
        KeyError: a field is missing.
        ModelError: a field has an invalid or unsupported value.
    """
    raw = {**LLAMA, **defaults, **raw}
    refuse_values(raw, {"hidden_act": ("silu", "swish", None)})
    heads, hidden_size = count(raw, "num_attention_heads"), count(raw, "hidden_size")
    head_dim = count(raw, "head_dim") if raw.get("head_dim") else hidden_size // heads
    num_layers = count(raw, "num_hidden_layers")
    has_bias = flag(raw, "attention_bias")
    rope = _rope(raw, head_dim, partial_rotary_factor)
    of_layers = [dense_mlp(raw)] * num_layers if mlps is None else mlps(raw, num_layers)
    layer_types(raw, num_layers)  # called to reject other kinds of attention
    layers = [
        LayerConfig(
            attention=AttentionConfig(
                num_qo_heads=heads,
                num_kv_heads=count(raw, "num_key_value_heads", heads),
                head_dim=head_dim,
                sm_scale=1.0 / math.sqrt(head_dim),
                rope=rope,
                sliding_window=window,
                qkv_bias=has_bias if qkv_bias is None else qkv_bias,
                o_bias=has_bias if o_bias is None else o_bias,
                qk_norm=qk_norm,
                interleaved=interleaved,
                has_sinks=has_sinks,
                has_gate=has_gate,
            ),
            mlp=mlp,
        )
        for window, mlp in zip(windows(raw, num_layers), of_layers, strict=True)
    ]
    return model_config(raw, layers)


def model_config(raw: Mapping[str, Any], layers: Sequence[LayerConfig]) -> ModelConfig:
    """Return a model config with the given layers and all other fields from the file."""
    raw = {**LLAMA, **raw}
    return ModelConfig(
        architecture=raw["architectures"][0],
        vocab_size=count(raw, "vocab_size"),
        hidden_size=count(raw, "hidden_size"),
        layers=tuple(layers),
        rms_norm_eps=number("rms_norm_eps", raw["rms_norm_eps"], or_zero=True),
        max_model_len=count(raw, "max_position_embeddings"),
        tie_word_embeddings=flag(raw, "tie_word_embeddings"),
        dtype=dtype_of(raw),
    )


def _rope(raw: Mapping[str, Any], head_dim: int, partial_rotary_factor: float) -> Rope:
    # Files of transformers 5 have RoPE in one mapping, older files in two fields.
    scaling = mapping(raw, "rope_scaling", "rope_parameters")
    theta = scaling.pop("rope_theta", None) or raw["rope_theta"]
    part = scaling.pop(
        "partial_rotary_factor", raw.get("partial_rotary_factor", partial_rotary_factor)
    )
    part = number("partial_rotary_factor", part)
    if part > 1:
        raise ModelError(f"partial_rotary_factor must be at most 1, got {part}")
    return Rope(
        theta=number("rope_theta", theta),
        scaling=scaling_of(scaling),
        dim=int(head_dim * part),
    )


def scaling_of(rope: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the file's RoPE scaling; None if it has none."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    # These values change no result: whether training used the scaling, and a factor of 1.
    neutral = {"finetuned": (True, False), "attn_factor": (1.0,)}
    return {key: one for key, one in rope.items() if one not in neutral.get(key, ())}
