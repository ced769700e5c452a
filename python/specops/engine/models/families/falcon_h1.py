# SPDX-License-Identifier: Apache-2.0
"""Falcon-H1: every layer has Mamba-2 beside attention, and a dense MLP; factors scale them all."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specops.api.errors import ModelError
from specops.engine.models.blocks.attention import AttentionConfig
from specops.engine.models.blocks.layer import LayerConfig, LayerNames
from specops.engine.models.blocks.mamba2 import Mamba2Config
from specops.engine.models.blocks.mlp import DenseMlpConfig
from specops.engine.models.blocks.parallel_mixing import ParallelConfig
from specops.engine.models.config import ModelConfig, Place
from specops.engine.models.families.defaults import FALCON_H1
from specops.engine.models.families.dense_decoder import dense_decoder
from specops.engine.models.families.family import Family
from specops.engine.models.families.fields import count, flag, number, refuse_values
from specops.engine.models.families.gguf import GgufForm
from specops.engine.models.families.mamba2_layers import mamba2

_NAMES = LayerNames(attention="", mlp_norm="pre_ff_layernorm", mlp="feed_forward.")
_PLACES = (Place("model.", "lm_head", norm="final_layernorm"),)


def read(raw: Mapping[str, Any]) -> ModelConfig:
    """Read a config.json.

    Raises:
        KeyError: a field is missing.
        ModelError: a field has an invalid or unsupported value.
    """
    raw = {**FALCON_H1, **raw}
    refuse_values(
        raw,
        {
            "attn_layer_indices": (None,),
            "attention_bias": (False, None),
            "mlp_bias": (False, None),
            "projectors_bias": (False, None),
        },
    )
    decoder = {name: one for name, one in raw.items() if name != "layer_types"}
    config = dense_decoder(decoder)
    gate_scale, down_scale = _numbers(raw, "mlp_multipliers", 2)
    width = count(raw, "intermediate_size")
    mlp = DenseMlpConfig(width=width, gate_scale=gate_scale, out_scale=down_scale)
    of_input = number("attention_in_multiplier", raw["attention_in_multiplier"])
    of_keys = number("key_multiplier", raw["key_multiplier"])
    of_output = number("attention_out_multiplier", raw["attention_out_multiplier"])
    mamba = _mamba(raw)
    mamba_scale = number("ssm_out_multiplier", raw["ssm_out_multiplier"])

    def both(layer: LayerConfig) -> LayerConfig:
        attention = layer.attention
        assert isinstance(attention, AttentionConfig)
        # Scores are linear in queries and keys, outputs in values: nothing else needs scaling.
        scale = attention.sm_scale * of_input * of_input * of_keys
        mixing = ParallelConfig(
            mamba=mamba,
            attention=replace(attention, sm_scale=scale),
            mamba_scale=mamba_scale,
            attention_scale=of_input * of_output,
        )
        return replace(layer, attention=mixing, mlp=mlp, names=_NAMES)

    return replace(
        config,
        layers=tuple(map(both, config.layers)),
        embedding_scale=number("embedding_multiplier", raw["embedding_multiplier"]),
        logits_divisor=1.0 / number("lm_head_multiplier", raw["lm_head_multiplier"]),
        places=_PLACES,
    )


def _numbers(raw: Mapping[str, Any], field: str, length: int) -> list[float]:
    found = raw.get(field, [1.0] * length)
    if not isinstance(found, list) or len(found) != length:
        raise ModelError(f"{field} must be a list of {length} numbers, got {found!r:.60}")
    return [number(field, one) for one in found]


def _mamba(raw: Mapping[str, Any]) -> Mamba2Config:
    has_norm = flag(raw, "mamba_rms_norm")
    if has_norm and flag(raw, "mamba_norm_before_gate", True):
        raise ModelError("mamba_norm_before_gate must be false if mamba_rms_norm is true, got true")
    of_input = number("ssm_in_multiplier", raw["ssm_in_multiplier"])
    scales = tuple(of_input * one for one in _numbers(raw, "ssm_multipliers", 5))
    own = None if set(scales) == {1.0} else scales
    return mamba2(raw, count(raw, "mamba_d_ssm"), has_norm=has_norm, scales=own)


def _check_head(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Reject files without an LM head; the weights of others include all factors.

    A tied LM head would have the factor of the embedding, not its own.
    """
    if raw["tie_word_embeddings"]:
        raise ModelError("output.weight must be in the file: the embedding has another factor")
    return {}


_GGUF_KEYS = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.group_count": "mamba_n_groups",
    "ssm.inner_size": "mamba_d_ssm",
    "ssm.time_step_rank": "mamba_n_heads",
}
FAMILY = Family(
    title="Falcon-H1",
    read={"FalconH1ForCausalLM": read},
    gguf=(
        GgufForm(
            "falcon-h1",
            "FalconH1ForCausalLM",
            keys=_GGUF_KEYS,
            defaults={"mamba_norm_before_gate": False},
            fields=_check_head,
        ),
    ),
)
