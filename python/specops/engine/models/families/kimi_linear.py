# SPDX-License-Identifier: Apache-2.0
"""Kimi-Linear: Kimi Delta Attention, latent attention without positions, and experts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import sqrt
from typing import Any

from specops.api.errors import ModelError
from specops.attention import LATENT_DIM
from specops.engine.models.blocks.block import NO_ROPE
from specops.engine.models.blocks.delta_attention import DeltaAttentionConfig
from specops.engine.models.blocks.experts import ExpertsConfig
from specops.engine.models.blocks.latent_attention import LatentAttentionConfig
from specops.engine.models.blocks.layer import (
    AnyAttentionConfig,
    AnyMlpConfig,
    LayerConfig,
    LayerNames,
)
from specops.engine.models.config import ModelConfig
from specops.engine.models.families.defaults import KIMI_LINEAR
from specops.engine.models.families.dense_decoder import dense_mlp, model_config
from specops.engine.models.families.experts_of_groups import (
    GGUF_DEFAULTS,
    GGUF_KEYS,
    GGUF_SIGMOID,
    experts_of_groups,
)
from specops.engine.models.families.family import Family
from specops.engine.models.families.fields import (
    FULL,
    LINEAR,
    count,
    flag,
    layer_types,
    mapping,
    refuse_values,
)
from specops.engine.models.families.gguf import LATENT_KEYS, GgufForm, value_of_layers

# Names of fields: those of DeepSeek-V3, and of transformers for linear_attn_config.
_RENAMED = {
    "model_max_length": "max_position_embeddings",
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "num_expert_group": "n_group",
    "moe_renormalize": "norm_topk_prob",
}
_RENAMED_LINEAR = {
    "num_heads": "linear_num_heads",
    "head_dim": "linear_head_dim",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
_LISTS = {"kda_layers": LINEAR, "full_attn_layers": FULL}


def read(raw: Mapping[str, Any]) -> ModelConfig:
    """Read a config.json.

    Raises:
        KeyError: a field is missing.
        ModelError: a field has an invalid or unsupported value.
    """
    linear = mapping(raw, "linear_attn_config")
    refuse_values(
        linear,
        {"gate_lower_bound": (None,), "use_full_rank_gate": (False, None)},
        "linear_attn_config.",
    )
    raw = {**KIMI_LINEAR, **raw, **_renamed(raw, _RENAMED), **_renamed(linear, _RENAMED_LINEAR)}
    refuse_values(
        raw,
        {
            "hidden_act": ("silu", "swish", None),
            "kv_lora_rank": (LATENT_DIM,),
            "moe_layer_freq": (1, None),
            "moe_router_activation_func": ("sigmoid", None),
            "mla_use_nope": (True, None),
            "mla_use_output_gate": (False, None),
            "attn_res_block_size": (0, None),
            "routed_expert_hidden_size": (None,),
        },
    )
    num_layers = count(raw, "num_hidden_layers")
    nope_dim, rope_dim = count(raw, "qk_nope_head_dim"), count(raw, "qk_rope_head_dim")
    of_kind: dict[str, AnyAttentionConfig] = {
        LINEAR: DeltaAttentionConfig(
            num_heads=count(raw, "linear_num_heads"),
            head_dim=count(raw, "linear_head_dim"),
            taps=count(raw, "linear_conv_kernel_dim"),
        ),
        FULL: LatentAttentionConfig(
            num_qo_heads=count(raw, "num_attention_heads"),
            q_rank=None if raw.get("q_lora_rank") is None else count(raw, "q_lora_rank"),
            nope_dim=nope_dim,
            value_dim=count(raw, "v_head_dim"),
            sm_scale=1.0 / sqrt(nope_dim + rope_dim),
            rope=replace(NO_ROPE, dim=rope_dim),
            has_bias=flag(raw, "attention_bias"),
        ),
    }
    layers = [
        _layer(of_kind[kind], mlp)
        for kind, mlp in zip(_kinds(raw, linear, num_layers), _mlps(raw, num_layers), strict=True)
    ]
    return model_config(raw, layers)


def _renamed(raw: Mapping[str, Any], names: Mapping[str, str]) -> Mapping[str, Any]:
    return {new: raw[old] for old, new in names.items() if old in raw}


def _layer(attention: AnyAttentionConfig, mlp: AnyMlpConfig) -> LayerConfig:
    if not isinstance(mlp, ExpertsConfig):
        return LayerConfig(attention=attention, mlp=mlp)
    return LayerConfig(
        attention=attention,
        mlp=replace(mlp, projections=("w1", "w3", "w2")),
        names=LayerNames(mlp="block_sparse_moe."),
    )


def _kinds(raw: Mapping[str, Any], linear: Mapping[str, Any], num_layers: int) -> Sequence[str]:
    """Return the kind of each layer.

    transformers lists them. Published files have two lists of layer numbers, from 1.
    """
    kinds = layer_types(raw, num_layers, LINEAR)
    if kinds is None and linear:
        kinds = _numbered(linear, num_layers)
    elif kinds is None:  # the default in transformers
        kinds = [LINEAR if not layer or layer % 4 else FULL for layer in range(num_layers)]
    if FULL not in kinds:
        raise ModelError(
            f"layer_types or linear_attn_config must make at least one layer {FULL}, got {LINEAR} "
            f"for all {num_layers}"
        )
    return kinds


def _numbered(linear: Mapping[str, Any], num_layers: int) -> list[str]:
    kinds = [""] * num_layers
    for field, kind in _LISTS.items():
        listed = linear[field]
        if not isinstance(listed, list):
            raise ModelError(f"linear_attn_config.{field} must be a list, got {listed!r:.60}")
        for one in listed:
            is_number = isinstance(one, int) and not isinstance(one, bool)
            if not is_number or not 1 <= one <= num_layers or kinds[one - 1]:
                raise ModelError(
                    f"linear_attn_config.{field} must hold numbers of layers from 1 to "
                    f"{num_layers}, each in one list once, got {one!r:.60}"
                )
            kinds[one - 1] = kind
    if "" in kinds:
        raise ModelError(
            f"linear_attn_config must hold all {num_layers} layers in {' or '.join(_LISTS)}, got "
            f"neither for layer {kinds.index('') + 1}"
        )
    return kinds


def _mlps(raw: Mapping[str, Any], num_layers: int) -> Sequence[AnyMlpConfig]:
    """Return the MLP of each layer; transformers lists their kinds."""
    kinds = raw.get("mlp_layer_types")
    if kinds is None:
        return experts_of_groups(raw, num_layers)
    is_list = isinstance(kinds, list) and len(kinds) == num_layers
    if not is_list or any(one not in ("dense", "sparse") for one in kinds):
        raise ModelError(
            f"mlp_layer_types must list dense or sparse for each of {num_layers} layers, got "
            f"{kinds!r:.60}"
        )
    (experts,) = experts_of_groups({**raw, "first_k_dense_replace": 0}, 1)
    return [experts if kind == "sparse" else dense_mlp(raw) for kind in kinds]


def _gguf_fields(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the kinds of the layers, by their heads of keys, and the sizes of heads."""
    heads = value_of_layers(raw, "num_key_value_heads")
    return {
        "layer_types": [FULL if each else LINEAR for each in heads],
        "linear_num_heads": count(raw, "num_attention_heads"),
        "qk_nope_head_dim": count(raw, "key_dim_mla") - count(raw, "qk_rope_head_dim"),
    }


FAMILY = Family(
    title="Kimi-Linear",
    read={"KimiLinearForCausalLM": read},
    gguf=(
        GgufForm(
            "kimi-linear",
            "KimiLinearForCausalLM",
            keys={
                **GGUF_KEYS,
                **LATENT_KEYS,
                "attention.value_length_mla": "v_head_dim",
                "ssm.conv_kernel": "linear_conv_kernel_dim",
                "kda.head_dim": "linear_head_dim",
            },
            # As in llama.cpp, which always divides the weights of experts by their sum.
            defaults={**GGUF_DEFAULTS, "norm_topk_prob": True},
            allowed={"expert_gating_func": (GGUF_SIGMOID, None)},
            ignored=("attention.value_length",),
            fields=_gguf_fields,
        ),
    ),
)
