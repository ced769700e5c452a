# SPDX-License-Identifier: Apache-2.0
"""Reads the config.json of a Hugging Face directory into the one shape the transformer needs."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specops.engine.errors import ModelError

# What differs between the families: where biases sit, and whether q and k are normalised per head.
# None: the checkpoint's own field decides (attention_bias, use_qk_norm).
_FAMILIES: dict[str, dict[str, bool | None]] = {
    "LlamaForCausalLM": {"qkv_bias": None, "o_bias": None, "qk_norm": False},
    "MistralForCausalLM": {"qkv_bias": None, "o_bias": None, "qk_norm": False},
    "Qwen2ForCausalLM": {"qkv_bias": True, "o_bias": False, "qk_norm": False},
    "Qwen3ForCausalLM": {"qkv_bias": None, "o_bias": None, "qk_norm": True},
    "MiMoForCausalLM": {"qkv_bias": True, "o_bias": False, "qk_norm": False},  # a Qwen2 with MTP
    "Glm4MoeForCausalLM": {"qkv_bias": None, "o_bias": False, "qk_norm": None},  # all layers dense
}

# Families with MTP modules whose naming `mtp.py` knows, and what their own decoders need besides.
_NOT_YET = {
    "DeepseekV3ForCausalLM": "multi-head latent attention and mixtures of experts",
    "Ernie4_5_MoeForCausalLM": "mixtures of experts",
    "Qwen3NextForCausalLM": "linear attention",
    "Qwen3_5ForCausalLM": "linear attention",
    "Qwen3_5ForConditionalGeneration": "linear attention",
    "Qwen3_5MoeForCausalLM": "linear attention and mixtures of experts",
    "Qwen3_5MoeForConditionalGeneration": "linear attention and mixtures of experts",
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The hyperparameters of a Llama-like decoder."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    rotary_dim: int
    max_model_len: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]  # one per layer
    dtype: str  # of the checkpoint: "bfloat16", "float16" or "float32"

    @classmethod
    def from_dir(cls, directory: str | Path) -> "ModelConfig":
        """Reads `directory/config.json`.

        Raises:
            ModelError: the file is missing or unreadable, a field is missing or holds what it
                cannot hold, or the architecture, activation, quantization or adapter it names is
                not supported.
        """
        path = Path(directory) / "config.json"
        if (Path(directory) / "adapter_config.json").exists():
            raise ModelError(
                f"{directory}: LoRA adapters are not supported; merge it into its base"
            )
        raw = read_config(directory)
        try:
            return cls._from_json(raw)
        except KeyError as error:
            raise ModelError(f"{path}: {error} is missing") from error
        except ModelError as error:
            raise ModelError(f"{path}: {error}") from None

    @classmethod
    def _from_json(cls, raw: Mapping[str, Any]) -> "ModelConfig":
        names = raw.get("architectures") or ["none"]
        family = _FAMILIES.get(names[0])
        if names[0] in _NOT_YET:
            raise ModelError(f"architecture {names[0]} is not supported yet: {_NOT_YET[names[0]]}")
        if family is None:
            known = ", ".join(_FAMILIES)
            raise ModelError(f"architecture {names[0]} is not supported; supported: {known}")
        if raw.get("quantization_config"):
            raise ModelError("quantized checkpoints (quantization_config) are not supported")
        if names[0] == "Glm4MoeForCausalLM":
            dense, layers = raw.get("first_k_dense_replace", 1), raw["num_hidden_layers"]
            if dense < layers:
                raise ModelError(
                    f"architecture {names[0]} is supported with dense layers alone, not with "
                    f"mixtures of experts: first_k_dense_replace is {dense} of {layers} layers"
                )
        if raw.get("hidden_act", "silu") != "silu":
            raise ModelError(f"hidden_act must be silu, got {raw['hidden_act']}")
        heads = _count(raw, "num_attention_heads")
        hidden_size = _count(raw, "hidden_size")
        head_dim = _count(raw, "head_dim") if raw.get("head_dim") else hidden_size // heads
        # transformers 5 keeps RoPE in one mapping, older files in two keys.
        rope = _rope(raw)
        theta = rope.pop("rope_theta", None) or raw.get("rope_theta", 10000.0)
        kind = rope.get("rope_type", rope.get("type", "default"))
        default = 0.5 if names[0] == "Glm4MoeForCausalLM" else 1.0
        partial = rope.pop("partial_rotary_factor", raw.get("partial_rotary_factor", default))
        attention_bias = bool(raw.get("attention_bias", False))

        def either(name: str, field: bool) -> bool:
            fixed = family[name]
            return field if fixed is None else fixed

        return cls(
            architecture=names[0],
            vocab_size=_count(raw, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_count(raw, "intermediate_size"),
            num_layers=_count(raw, "num_hidden_layers"),
            num_qo_heads=heads,
            num_kv_heads=_count(raw, "num_key_value_heads", heads),
            head_dim=head_dim,
            rms_norm_eps=_number("rms_norm_eps", raw.get("rms_norm_eps", 1e-6), or_zero=True),
            rope_theta=_number("rope_theta", theta),
            rope_scaling=None if kind == "default" else rope,
            rotary_dim=int(head_dim * _number("partial_rotary_factor", partial)),
            max_model_len=_count(raw, "max_position_embeddings", 2048),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=either("qkv_bias", attention_bias),
            o_bias=either("o_bias", attention_bias),
            mlp_bias=bool(raw.get("mlp_bias", False)),
            qk_norm=either("qk_norm", bool(raw.get("use_qk_norm", False))),
            sliding_windows=_sliding_windows(raw, names[0]),
            dtype=raw.get("dtype") or raw.get("torch_dtype") or "float32",
        )


def read_config(directory: str | Path) -> dict[str, Any]:
    """Returns what `directory/config.json` holds.

    Raises:
        ModelError: the file is missing or not a JSON object.
    """
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise ModelError(f"{directory}: config.json is missing; expected a Hugging Face directory")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path}: expected a JSON object, got {type(raw).__name__}")
    return raw


def _count(raw: Mapping[str, Any], field: str, default: int | None = None) -> int:
    """A field that counts something; absent or null is the default, if there is one."""
    value = raw[field] if default is None else raw.get(field)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{field} must be an integer of at least 1, got {value!r}")
    return value


def _number(field: str, value: Any, *, or_zero: bool = False) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0 or (value == 0 and not or_zero):
        least = "of at least" if or_zero else "above"
        raise ModelError(f"{field} must be a number {least} 0, got {value!r}")
    return float(value)


def _rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    for field in ("rope_parameters", "rope_scaling"):
        value = raw.get(field)
        if value:
            if not isinstance(value, dict):
                raise ModelError(f"{field} must be an object, got {value!r}")
            return dict(value)
    return {}


def _layer_types(raw: Mapping[str, Any], layers: int) -> list[str] | None:
    """What the attention of each layer sees, where the file says so."""
    types = raw.get("layer_types")
    if not types:
        return None
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != layers:
        count = len(types) if isinstance(types, list) else repr(types)
        raise ModelError(f"layer_types must name num_hidden_layers={layers} kinds, got {count}")
    for one in types:
        if one not in known:
            raise ModelError(f"layer_types must hold {' or '.join(known)} alone, got {one!r}")
    return types


def _sliding_windows(raw: Mapping[str, Any], architecture: str) -> tuple[int | None, ...]:
    layers = _count(raw, "num_hidden_layers")
    types = _layer_types(raw, layers)
    window = None if raw.get("sliding_window") is None else _count(raw, "sliding_window")
    like_qwen = architecture.startswith(("Qwen", "MiMo"))
    if like_qwen and not raw.get("use_sliding_window", False):
        window = None
    if architecture.startswith(("Llama", "Glm")):
        window = None
    if window is None:
        return (None,) * layers
    if types is not None:
        return tuple(window if one == "sliding_attention" else None for one in types)
    if like_qwen:
        first = raw.get("max_window_layers", layers)
        return tuple(window if layer >= first else None for layer in range(layers))
    return (window,) * layers
