# SPDX-License-Identifier: Apache-2.0
"""Gemma 4, text only: the large models, and the small ones with shared keys and values."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from specops.api.errors import ModelError
from specops.engine.models.blocks.attention import AttentionConfig
from specops.engine.models.blocks.block import Rope
from specops.engine.models.blocks.experts import ExpertsConfig, Routing
from specops.engine.models.blocks.experts_beside_mlp import ExpertsBesideMlpConfig
from specops.engine.models.blocks.layer import LayerConfig, LayerNames
from specops.engine.models.blocks.mlp import DenseMlpConfig
from specops.engine.models.config import ModelConfig, Place
from specops.engine.models.families.defaults import GEMMA4, GEMMA4_ROPES
from specops.engine.models.families.dense_decoder import scaling_of
from specops.engine.models.families.family import Family
from specops.engine.models.families.fields import (
    FULL,
    SLIDING,
    count,
    dtype_of,
    flag,
    index,
    layer_types,
    mapping,
    number,
    refuse_values,
    text_config,
)
from specops.engine.models.families.gguf import GgufForm, value_of_layers

# Fields that lie outside text_config in multimodal files.
_AROUND = ("tie_word_embeddings", "dtype", "torch_dtype")
_NAMES = LayerNames(
    attention_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    output_norm="post_feedforward_layernorm",
    scale="layer_scalar",
)
_PLACES = (
    Place("model.", "lm_head"),
    Place("model.language_model.", "lm_head"),
    Place("language_model.model.", "language_model.lm_head"),
)
_PERIOD = 6  # without layer_types, every sixth layer has full attention


def read(whole: Mapping[str, Any]) -> ModelConfig:
    """Read a config.json.

    Raises:
        KeyError: a field is missing.
        ModelError: a field has an invalid or unsupported value.
    """
    raw = _fields(whole)
    kinds = _kinds(raw)
    num_own = len(kinds) - index(raw, "num_kv_shared_layers", 0)
    if num_own < 1 or not {*kinds[num_own:]} <= {*kinds[:num_own]}:
        raise ModelError(
            "num_kv_shared_layers must leave a layer with keys and values for each kind of layer, "
            f"got {raw['num_kv_shared_layers']} of {len(kinds)} layers"
        )
    return _read(whole, raw, num_own)


def read_assistant(whole: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of an assistant model, none of whose layers has keys and values.

    Raises:
        KeyError: a field is missing.
        ModelError: a field has an invalid or unsupported value.
    """
    raw = _fields(whole)
    dense = dict.fromkeys(("use_double_wide_mlp", "enable_moe_block"), (False, None))
    refuse_values(raw, {"hidden_size_per_layer_input": (0,), **dense})
    return _read(whole, raw, 0)


def _fields(whole: Mapping[str, Any]) -> dict[str, Any]:
    around = {name: whole[name] for name in _AROUND if name in whole}
    return {**GEMMA4, **around, **text_config(whole)}


def _read(whole: Mapping[str, Any], raw: Mapping[str, Any], num_own: int) -> ModelConfig:
    """Read a configuration; the layers after the first `num_own` have no keys and values."""
    refuse_values(
        raw,
        {
            "hidden_activation": ("gelu_pytorch_tanh", None),
            # With "vision", text is causal.
            "use_bidirectional_attention": (None, "vision"),
        },
    )
    layers = _layers(raw, num_own)
    hidden_size = count(raw, "hidden_size")
    return ModelConfig(
        architecture=whole["architectures"][0],
        vocab_size=count(raw, "vocab_size"),
        hidden_size=hidden_size,
        layers=tuple(layers),
        mtp_layer=replace(layers[num_own - 1], per_layer_width=0) if num_own else None,
        rms_norm_eps=number("rms_norm_eps", raw["rms_norm_eps"], or_zero=True),
        max_model_len=count(raw, "max_position_embeddings"),
        tie_word_embeddings=flag(raw, "tie_word_embeddings"),
        dtype=dtype_of(raw),
        embedding_scale=hidden_size**0.5,
        per_layer_tokens=_per_layer_tokens(raw),
        logit_cap=_logit_cap(raw),
        places=_PLACES,
    )


def _layers(raw: Mapping[str, Any], num_own: int) -> list[LayerConfig]:
    kinds = _kinds(raw)
    window, has_bias = count(raw, "sliding_window"), flag(raw, "attention_bias")
    width, widens = count(raw, "intermediate_size"), flag(raw, "use_double_wide_mlp")
    values_are_keys = flag(raw, "attention_k_eq_v")
    layers = []
    for layer, (kind, sizes) in enumerate(zip(kinds, _head_sizes(raw, kinds), strict=True)):
        shares_kv = layer >= num_own
        attention = AttentionConfig(
            num_qo_heads=count(raw, "num_attention_heads"),
            num_kv_heads=count(sizes, "num_key_value_heads"),
            head_dim=count(sizes, "head_dim"),
            sm_scale=1.0,
            rope=_rope(raw, kind, count(sizes, "head_dim")),
            sliding_window=window if kind == SLIDING else None,
            qkv_bias=has_bias,
            o_bias=has_bias,
            qk_norm=True,
            v_norm=True,
            values_are_keys=values_are_keys and kind == FULL,
            shares_kv=shares_kv,
        )
        mlp = DenseMlpConfig(
            width=2 * width if widens and shares_kv else width, activation="gelu_tanh"
        )
        own_width = index(raw, "hidden_size_per_layer_input", 0)
        one = LayerConfig(attention=attention, mlp=mlp, names=_NAMES, per_layer_width=own_width)
        if flag(raw, "enable_moe_block"):
            both = ExpertsBesideMlpConfig(mlp=mlp, experts=_experts(raw))
            one = replace(one, mlp=both, names=replace(_NAMES, mlp=""))
        layers.append(one)
    return layers


def _experts(raw: Mapping[str, Any]) -> ExpertsConfig:
    return ExpertsConfig(
        num_experts=count(raw, "num_experts"),
        width=count(raw, "moe_intermediate_size"),
        routing=Routing(
            top_k=count(raw, "top_k_experts"),
            min_sum=0.0,
            norm="router.scale",
            factors="router.per_expert_scale",
        ),
        activation="gelu_tanh",
        router_name="router.proj",
    )


def _kinds(raw: Mapping[str, Any]) -> list[str]:
    """Return each layer's kind of attention; the last layer's is full whatever the file says."""
    num_layers = count(raw, "num_hidden_layers")
    by_period = [FULL if (layer + 1) % _PERIOD == 0 else SLIDING for layer in range(num_layers)]
    return [*(layer_types(raw, num_layers) or by_period)[:-1], FULL]


def _head_sizes(raw: Mapping[str, Any], kinds: Sequence[str]) -> list[dict[str, Any]]:
    """Return the fields head_dim and num_key_value_heads of each layer.

    Published files have other fields for layers with full attention. transformers 5 writes fields
    for each layer instead.
    """
    common = {name: raw.get(name) for name in ("head_dim", "num_key_value_heads")}
    if "per_layer_config" not in raw:
        of_full = {**common, "head_dim": raw["global_head_dim"]}
        if flag(raw, "attention_k_eq_v") and raw.get("num_global_key_value_heads") is not None:
            of_full["num_key_value_heads"] = raw["num_global_key_value_heads"]
        return [of_full if kind == FULL else common for kind in kinds]
    sizes = [common] * len(kinds)
    of_layers = mapping(raw, "per_layer_config")
    layer_of = {str(layer): layer for layer in range(len(kinds))}
    for name in of_layers:
        layer = layer_of.get(name.lstrip("0") or "0")  # numbers may have leading zeros
        own = mapping(of_layers, name)
        if layer is None or not own.keys() <= common.keys():
            raise ModelError(
                f"per_layer_config must set {' and '.join(common)} of layers 0 to "
                f"{len(kinds) - 1} only, got {name!r:.40} with {', '.join(own):.60}"
            )
        sizes[layer] = {**common, **own}
    return sizes


def _rope(raw: Mapping[str, Any], kind: str, head_dim: int) -> Rope:
    rope = mapping(mapping(raw, "rope_parameters"), kind) or dict(GEMMA4_ROPES[kind])
    theta = number("rope_theta", rope.pop("rope_theta", GEMMA4_ROPES[kind]["rope_theta"]))
    scaling = scaling_of(rope)
    if scaling is None:
        refuse_values(rope, {"partial_rotary_factor": (None, 1, 1.0)})
    return Rope(theta=theta, scaling=scaling, dim=head_dim)


def _per_layer_tokens(raw: Mapping[str, Any]) -> int:
    """Return the number of tokens with per-layer embeddings; 0 if layers have none."""
    if not index(raw, "hidden_size_per_layer_input", 0):
        return 0
    tokens = count(raw, "vocab_size_per_layer_input")
    if tokens < count(raw, "vocab_size"):
        raise ModelError(
            "vocab_size_per_layer_input must be at least "
            f"vocab_size={raw['vocab_size']}, got {tokens}"
        )
    return tokens


def _logit_cap(raw: Mapping[str, Any]) -> float | None:
    """Return the soft cap on logits, within the range in which it is computed accurately."""
    cap = raw.get("final_logit_softcapping")
    if cap is None:
        return None
    if not 1 <= number("final_logit_softcapping", cap) <= 100:
        raise ModelError(f"final_logit_softcapping must be from 1 to 100, got {cap}")
    return float(cap)


def _proportional(factors: Sequence[float], theta: float, head_dim: int) -> dict[str, Any]:
    """Return the RoPE scaling that a file expresses by factors: huge ones rotate nothing."""
    rotated = sum(one == 1.0 for one in factors)
    if any(one != 1.0 for one in factors[:rotated]) or any(one < 1e29 for one in factors[rotated:]):
        raise ModelError("tensor rope_freqs.weight must only hold ones, and then only 1e30")
    return {"rope_type": "proportional", "partial_rotary_factor": rotated / len(factors)}


def _gguf_fields(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of layers with sliding and with full attention."""
    if "rope_scaling" not in raw:
        raise ModelError("tensor rope_freqs.weight must be in the file")
    for field in ("value_length", "rotary_dim"):
        for prefix in ("", "global_"):
            size = raw[f"{prefix}head_dim"]
            if raw.get(prefix + field, size) != size:
                raise ModelError(
                    f"{prefix}{field} must be the head size {size}, got {raw[prefix + field]}"
                )
    kinds = [SLIDING if one else FULL for one in value_of_layers(raw, "sliding_window_pattern")]
    key_heads = raw["num_key_value_heads"]
    if isinstance(key_heads, list):
        key_heads = value_of_layers(raw, "num_key_value_heads")
    else:
        key_heads = [key_heads] * len(kinds)
    theta = {} if "sliding_theta" not in raw else {"rope_theta": raw["sliding_theta"]}
    return {
        "layer_types": kinds,
        "per_layer_config": {
            str(layer): {
                "head_dim": raw["global_head_dim" if kind == FULL else "head_dim"],
                "num_key_value_heads": heads,
            }
            for layer, (kind, heads) in enumerate(zip(kinds, key_heads, strict=True))
        },
        "rope_parameters": {
            FULL: {**raw["rope_scaling"], "rope_theta": raw["rope_theta"]},
            SLIDING: theta,
        },
        "vocab_size_per_layer_input": raw["vocab_size"],
        "enable_moe_block": "num_experts" in raw,
        **_widths(raw),
    }


def _widths(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the width of MLPs, which may be twice as large in layers that share keys."""
    if not isinstance(raw["intermediate_size"], list):
        return {}
    widths = value_of_layers(raw, "intermediate_size")
    num_shared = index(raw, "num_kv_shared_layers", 0)
    num_own = len(widths) - num_shared
    if len({*widths[:num_own]}) != 1 or widths[num_own:] != [2 * widths[0]] * num_shared:
        raise ModelError(
            "intermediate_size must be the same in all layers with keys and values, and twice as "
            f"large in others, got {widths!s:.60}"
        )
    return {"intermediate_size": widths[0], "use_double_wide_mlp": True}


_GGUF_KEYS = {
    "attention.key_length": "global_head_dim",
    "attention.key_length_swa": "head_dim",
    "attention.value_length": "global_value_length",
    "attention.value_length_swa": "value_length",
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "attention.sliding_window_pattern": "sliding_window_pattern",
    "rope.dimension_count": "global_rotary_dim",
    "rope.dimension_count_swa": "rotary_dim",
    "rope.freq_base_swa": "sliding_theta",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "num_experts",
    "expert_used_count": "top_k_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
}
FAMILY = Family(
    title="Gemma 4",
    read={"Gemma4ForCausalLM": read, "Gemma4ForConditionalGeneration": read},
    gguf=(
        GgufForm(
            "gemma4",
            "Gemma4ForCausalLM",
            keys=_GGUF_KEYS,
            defaults={"hidden_size_per_layer_input": 0},
            fields=_gguf_fields,
            scaling=_proportional,
        ),
    ),
    assistants={"Gemma4AssistantForCausalLM": read_assistant},
)
