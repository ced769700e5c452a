# SPDX-License-Identifier: Apache-2.0
"""Experts chosen from groups by sigmoid scores and biases, as in DeepSeek-V3 and GLM-4.5."""

from collections.abc import Mapping, Sequence
from typing import Any

from specops.engine.models.blocks.experts import ExpertsConfig, Routing
from specops.engine.models.blocks.layer import AnyMlpConfig
from specops.engine.models.blocks.mlp import DenseMlpConfig
from specops.engine.models.families.dense_decoder import dense_mlp
from specops.engine.models.families.fields import (
    count,
    flag,
    index,
    number,
    refuse_values,
)

GGUF_KEYS = {
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_shared_count": "n_shared_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
}
# As in llama.cpp, if no key sets them.
GGUF_DEFAULTS = {
    "first_k_dense_replace": 0,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": False,
    "n_group": 1,
    "topk_group": 1,
}
GGUF_SIGMOID = 2  # value of expert_gating_func


def experts_of_groups(raw: Mapping[str, Any], num_layers: int) -> Sequence[AnyMlpConfig]:
    """Return dense MLPs for the first layers, and experts for the others."""
    refuse_values(raw, {"scoring_func": ("sigmoid", None), "topk_method": ("noaux_tc", None)})
    width = count(raw, "moe_intermediate_size")
    shared = index(raw, "n_shared_experts", 1)
    experts = ExpertsConfig(
        num_experts=count(raw, "n_routed_experts"),
        width=width,
        routing=Routing(
            top_k=count(raw, "num_experts_per_tok"),
            scoring="sigmoid",
            num_groups=count(raw, "n_group", 1),
            top_k_groups=count(raw, "topk_group", 1),
            min_sum=1e-20 if flag(raw, "norm_topk_prob", True) else None,
            scale=number("routed_scaling_factor", raw.get("routed_scaling_factor", 1.0)),
            bias="gate.e_score_correction_bias",
        ),
        shared=DenseMlpConfig(width=shared * width) if shared else None,
    )
    dense = index(raw, "first_k_dense_replace", 1)
    return [dense_mlp(raw) if layer < dense else experts for layer in range(num_layers)]
