# SPDX-License-Identifier: Apache-2.0
"""Nemotron-H and Nemotron 3: layers of Mamba-2, attention, an MLP or experts, one of these each."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from specops.api.errors import ModelError
from specops.engine.models.blocks.absent import NoMixingConfig, NoMlpConfig
from specops.engine.models.blocks.attention import AttentionConfig
from specops.engine.models.blocks.block import NO_ROPE
from specops.engine.models.blocks.experts import ExpertsConfig, Routing
from specops.engine.models.blocks.latent_experts import LatentExpertsConfig
from specops.engine.models.blocks.layer import (
    AnyAttentionConfig,
    AnyMlpConfig,
    LayerNames,
)
from specops.engine.models.blocks.mamba2 import Mamba2Config
from specops.engine.models.blocks.mlp import DenseMlpConfig
from specops.engine.models.config import ModelConfig, Place
from specops.engine.models.families.defaults import NEMOTRON_H
from specops.engine.models.families.dense_decoder import dense_decoder
from specops.engine.models.families.family import Family, MtpConvention
from specops.engine.models.families.fields import FULL, LINEAR, count, flag, number, refuse_values
from specops.engine.models.families.gguf import GgufForm, value_of_layers
from specops.engine.models.families.mamba2_layers import refuse_time_steps

_MLP, _EXPERTS = "mlp", "moe"
# Kinds of layers by the letters of a pattern, and in lists of transformers 4.
_LETTERS = {"M": LINEAR, "*": FULL, "-": _MLP, "E": _EXPERTS}
_OLD_KINDS = {"mamba": LINEAR, "attention": FULL}
# Old names of fields.
_OLD = {
    "attention_head_dim": "head_dim",
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_dt_limit": "time_step_limit",
}
_KINDS = [LINEAR, _EXPERTS, FULL, _MLP]  # of files without a list
_NAMES = LayerNames(input_norm="norm", attention="mixer.", mlp_norm="norm", mlp="mixer.")
# Attention and experts of an MTP module are two layers of the checkpoint.
_MTP_NAMES = LayerNames(
    input_norm="0.norm", attention="0.mixer.", mlp_norm="1.norm", mlp="1.mixer."
)
_PLACES = tuple(
    Place(prefix, "lm_head", embedding="embeddings", norm="norm_f")
    for prefix in ("backbone.", "model.")
)


def read(raw: Mapping[str, Any]) -> ModelConfig:
    """Read a config.json.

    Raises:
        KeyError: a field is missing.
        ModelError: a field has an invalid or unsupported value.
    """
    renamed = {new: raw[old] for old, new in _OLD.items() if old in raw}
    raw = {**NEMOTRON_H, **renamed, **raw}
    refuse_values(
        raw,
        {
            "mlp_hidden_act": ("relu2", None),
            "mamba_hidden_act": ("silu", None),
            "attention_bias": (False, None),
            "mlp_bias": (False, None),
            "use_bias": (False, None),
            "mamba_proj_bias": (False, None),
            "residual_in_fp32": (False, None),
            "n_shared_experts": (1, None),
            "sliding_window": (None,),
        },
    )
    refuse_time_steps(raw)
    kinds = _kinds(raw)
    decoder = {
        **{name: one for name, one in raw.items() if name != "layer_types"},
        "num_hidden_layers": len(kinds),
        "rms_norm_eps": raw["layer_norm_epsilon"],
    }
    config = dense_decoder(decoder, mlps=lambda *_: [_mlp(raw, kind) for kind in kinds])
    attention = config.layers[0].attention
    assert isinstance(attention, AttentionConfig)
    blocks: Mapping[str, AnyAttentionConfig] = {
        LINEAR: _mamba(raw),
        FULL: replace(attention, rope=NO_ROPE),
    }
    layers = tuple(
        replace(layer, attention=blocks.get(kind, NoMixingConfig()), names=_NAMES)
        for layer, kind in zip(config.layers, kinds, strict=True)
    )
    module = None
    if _EXPERTS in kinds:
        experts = _mlp(raw, _EXPERTS)
        module = replace(layers[0], attention=blocks[FULL], mlp=experts, names=_MTP_NAMES)
    return replace(config, layers=layers, mtp_layer=module, places=_PLACES)


def _kinds(raw: Mapping[str, Any]) -> Sequence[str]:
    """Return the kind of each layer, from a list or from a pattern of letters."""
    field = next((one for one in ("layers_block_type", "layer_types") if raw.get(one)), None)
    if field is None and "hybrid_override_pattern" in raw:
        field, kinds = "hybrid_override_pattern", _LETTERS
    else:
        field, kinds = field or "layers_block_type", {one: one for one in _LETTERS.values()}
        kinds |= _OLD_KINDS
    listed = raw.get(field, _KINDS)
    if not isinstance(listed, list | str):
        raise ModelError(f"{field} must list the kinds of the layers, got {listed!r:.60}")
    for one in listed:
        if not isinstance(one, str) or one not in kinds:
            raise ModelError(f"{field} must only hold {', '.join(kinds)}, got {one!r:.60}")
    found = [kinds[one] for one in listed]
    if count(raw, "num_hidden_layers", len(found) or 1) != len(found):
        raise ModelError(
            f"{field} must hold num_hidden_layers={raw['num_hidden_layers']} items, "
            f"got {len(found)}"
        )
    if FULL not in found:
        raise ModelError(f"{field} must make at least one layer {FULL}, got {listed!s:.60}")
    return found


def _mamba(raw: Mapping[str, Any]) -> Mamba2Config:
    heads, groups = count(raw, "mamba_num_heads"), count(raw, "n_groups")
    if heads % groups:
        raise ModelError(f"mamba_num_heads must be a multiple of n_groups={groups}, got {heads}")
    return Mamba2Config(
        num_heads=heads,
        num_groups=groups,
        head_dim=count(raw, "mamba_head_dim"),
        state_dim=count(raw, "ssm_state_size"),
        taps=count(raw, "conv_kernel"),
        has_conv_bias=flag(raw, "use_conv_bias", True),
    )


def _mlp(raw: Mapping[str, Any], kind: str) -> AnyMlpConfig:
    if kind == _MLP:
        return DenseMlpConfig(width=count(raw, "intermediate_size"), activation="relu2")
    if kind != _EXPERTS:
        return NoMlpConfig()
    width = count(raw, "moe_shared_expert_intermediate_size")
    shared = DenseMlpConfig(width=width, activation="relu2")
    experts = ExpertsConfig(
        num_experts=count(raw, "n_routed_experts"),
        width=count(raw, "moe_intermediate_size"),
        routing=Routing(
            top_k=count(raw, "num_experts_per_tok"),
            scoring="sigmoid",
            num_groups=count(raw, "n_group"),
            top_k_groups=count(raw, "topk_group"),
            min_sum=1e-20 if flag(raw, "norm_topk_prob", True) else None,
            scale=number("routed_scaling_factor", raw["routed_scaling_factor"]),
            bias="gate.e_score_correction_bias",
        ),
        activation="relu2",
    )
    if raw.get("moe_latent_size") is None:
        return replace(experts, shared=shared)
    return LatentExpertsConfig(experts=experts, width=count(raw, "moe_latent_size"), shared=shared)


def _gguf_fields(raw: Mapping[str, Any], of_widths: str) -> Mapping[str, Any]:
    """Return the kinds of the layers, by their heads of keys and the widths of their MLPs.

    `of_widths` is the kind of a layer with a width.
    """
    fields = ("num_key_value_heads", "intermediate_size")
    key_heads, widths = (value_of_layers(raw, field) for field in fields)
    for field, each in zip(fields, (key_heads, widths), strict=True):
        if len({0, *each}) > 2:
            raise ModelError(f"{field} must be 0 or the same in all layers, got {each!s:.60}")
    heads, inner = count(raw, "mamba_num_heads"), count(raw, "mamba_inner")
    if inner % heads:
        raise ModelError(f"ssm.inner_size must be a multiple of {heads} heads, got {inner}")
    return {
        "layers_block_type": [
            FULL if heads else of_widths if width else LINEAR
            for heads, width in zip(key_heads, widths, strict=True)
        ],
        "num_key_value_heads": max(key_heads),
        "intermediate_size": max(widths),
        "layer_norm_epsilon": raw["rms_norm_eps"],
        "mamba_head_dim": inner // heads,
    }


_GGUF_KEYS = {
    "ssm.conv_kernel": "conv_kernel",
    "ssm.state_size": "ssm_state_size",
    "ssm.group_count": "n_groups",
    "ssm.inner_size": "mamba_inner",
    "ssm.time_step_rank": "mamba_num_heads",
}
_GGUF_KEYS_OF_EXPERTS = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_shared_count": "n_shared_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
    "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "moe_latent_size": "moe_latent_size",
}


def _gguf_form(architecture: str, kind: str, keys: Mapping[str, str]) -> GgufForm:
    return GgufForm(
        architecture,
        "NemotronHForCausalLM",
        keys={**_GGUF_KEYS, **keys},
        allowed={"nextn_predict_layers": (0, None)},
        # The epsilon is also stored as that of other norms, and no layer is rotated.
        ignored=("attention.layer_norm_epsilon", "rope.dimension_count"),
        fields=partial(_gguf_fields, of_widths=kind),
    )


FAMILY = Family(
    title="Nemotron-H",
    read={"NemotronHForCausalLM": read},
    mtp=MtpConvention(
        name="nemotron_h",
        families=("Nemotron 3",),
        embed_norm="mtp.layers.{index}.enorm",
        hidden_norm="mtp.layers.{index}.hnorm",
        projection="mtp.layers.{index}.eh_proj",
        head_norm="mtp.layers.1.final_layernorm",
        block="mtp.layers.",
    ),
    gguf=(
        _gguf_form("nemotron_h", _MLP, {}),
        _gguf_form("nemotron_h_moe", _EXPERTS, _GGUF_KEYS_OF_EXPERTS),
    ),
)
