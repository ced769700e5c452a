# SPDX-License-Identifier: Apache-2.0
"""Metadata of GGUF files, converted to the fields of a config.json.

Source: docs/gguf.md of github.com/ggml-org/ggml.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specops.api.errors import ModelError
from specops.engine.models.families.fields import count, mapping, number, refuse_values

# Names of config.json fields by GGUF key, without the architecture's prefix.
_FIELDS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "nextn_predict_layers": "num_nextn_predict_layers",
}
# Keys of latent attention.
LATENT_KEYS = {
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.key_length_mla": "key_dim_mla",
    "rope.dimension_count": "qk_rope_head_dim",
}
_SCALING = "rope.scaling."
_SCALING_FIELDS = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
_SCALINGS = {"linear": ("factor",), "yarn": tuple(_SCALING_FIELDS)}
# Keys whose value must equal head_dim, and keys whose value is taken from the tensors instead.
_HEAD_SIZES = ("attention.value_length", "rope.dimension_count")
_ELSEWHERE = ("vocab_size",)
# Keys that have no effect with these values. `layouts` in checkpoints/gguf_names.py handles the
# layout.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "tensor_data_layout": ("reference", "Meta AI original pth"),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "rope.scaling.yarn_beta_fast": (32.0,),
    "rope.scaling.yarn_beta_slow": (1.0,),
}
# Llama 3 RoPE scaling parameters, which files omit: they hold frequency factors instead.
_LLAMA3_LENGTH, _LLAMA3_LOW, _LLAMA3_HIGH = 8192, 1.0, 4.0


def no_fields(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return no additional fields."""
    return {}


def partial_rotary_factor(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fraction of a head that is rotated; files contain the number of elements."""
    head_dim = count(raw, "head_dim")
    return {"partial_rotary_factor": count(raw, "rotary_dim", head_dim) / head_dim}


def value_of_layers(raw: Mapping[str, Any], field: str) -> list[Any]:
    """Return a field that must list a value for each layer.

    Raises:
        KeyError: the field is missing.
        ModelError: the field is no list, or has another length.
    """
    each, num_layers = raw[field], raw["num_hidden_layers"]
    if not isinstance(each, list) or len(each) != num_layers:
        raise ModelError(f"{field} must list block_count={num_layers} values, got {each!s:.60}")
    return each


def llama3_scaling(factors: Sequence[float], theta: float, head_dim: int) -> dict[str, Any]:
    """Return the Llama 3 RoPE scaling parameters that yield these frequency factors.

    Raises:
        ModelError: the factors belong to another kind of scaling.
    """
    factor, pairs = max(factors), head_dim // 2
    for i in range(pairs):
        turns = _LLAMA3_LENGTH * theta ** (-i / pairs) / (2 * math.pi)
        keep = min(max((turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW), 0.0), 1.0)
        expected = 1 / (keep + (1 - keep) / factor)
        if len(factors) != pairs or not math.isclose(factors[i], expected, rel_tol=1e-4):
            raise ModelError(
                "tensor rope_freqs.weight must hold the factors of Llama 3's RoPE scaling"
            )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_LENGTH,
    }


@dataclass(frozen=True)
class GgufForm:
    """Layout of a family's GGUF files.

    Attributes:
        architecture: name in the files' general.architecture.
        read_as: the equivalent architecture of a config.json.
        keys: config.json field of each further metadata key; keys are without the architecture's
            prefix.
        defaults: config.json fields that hold if no key sets them.
        allowed: supported values of keys that set no field; None: the key may be absent.
        ignored: keys whose value follows from others, or from the tensors.
        fields: function that computes further fields from the other fields.
        scaling: function that returns the RoPE scaling of the file's frequency factors, from these,
            the base of the frequencies and the size of a head.
    """

    architecture: str
    read_as: str
    keys: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    allowed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    fields: Callable[[Mapping[str, Any]], Mapping[str, Any]] = no_fields
    scaling: Callable[[Sequence[float], float, int], dict[str, Any]] = llama3_scaling

    def config(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Convert the metadata to the content of a Hugging Face config.json.

        Args:
            raw: config.json of a directory that was made from a GGUF file.

        Raises:
            ModelError: the metadata has an unknown key or an unsupported value.
        """
        prefix = f"{self.architecture}."
        metadata = {
            key.removeprefix(prefix): value
            for key, value in mapping(raw, "gguf").items()
            if key.startswith(prefix) and value not in _NEUTRAL.get(key.removeprefix(prefix), ())
        }
        fields = {**_FIELDS, **self.keys}
        known = {*fields, *_HEAD_SIZES, *_ELSEWHERE, *self.allowed, *self.ignored}
        refuse_values(metadata, self.allowed, prefix)
        for key in metadata:
            if key not in known and not key.startswith(_SCALING):
                raise ModelError(f"{prefix}{key} is not supported, got {metadata[key]}")
        config = {
            **self.defaults,
            **{name: metadata[key] for key, name in fields.items() if key in metadata},
        }
        if config.get("num_nextn_predict_layers"):
            modules = count(config, "num_nextn_predict_layers")
            config["num_hidden_layers"] = count(config, "num_hidden_layers") - modules
        head_dim = config.get("head_dim")
        if head_dim is None:
            head_dim = count(config, "hidden_size") // count(config, "num_attention_heads")
            config["head_dim"] = head_dim
        config.setdefault("num_key_value_heads", count(config, "num_attention_heads"))
        for key in _HEAD_SIZES:
            if key not in {*fields, *self.ignored} and metadata.get(key, head_dim) != head_dim:
                raise ModelError(
                    f"{prefix}{key} must be the head size {head_dim}, got {metadata[key]}"
                )
        scaling = self._scaling({key: one for key, one in metadata.items() if key not in fields})
        if scaling:
            config["rope_scaling"] = scaling
        if raw.get("rope_factors"):
            theta = number("rope_theta", config.get("rope_theta", 10000.0))
            config["rope_scaling"] = self.scaling(raw["rope_factors"], theta, head_dim)
        around = {name: raw[name] for name in raw if name not in ("gguf", "rope_factors")}
        whole = {**around, "architectures": [self.read_as], "dtype": "bfloat16", **config}
        return {**whole, **self.fields(whole)}

    def _scaling(self, metadata: Mapping[str, Any]) -> dict[str, Any] | None:
        own = {
            key.removeprefix(_SCALING): one
            for key, one in metadata.items()
            if key.startswith(_SCALING)
        }
        kind = own.pop("type", "none")
        own.pop("finetuned", None)
        if kind == "none":
            return None
        known = _SCALINGS.get(str(kind), ())
        if not known or not own.keys() <= set(known):
            raise ModelError(
                f"{self.architecture}.{_SCALING}type {kind} is not supported with {own}"
            )
        return {"rope_type": kind, **{_SCALING_FIELDS[key]: own[key] for key in own}}
