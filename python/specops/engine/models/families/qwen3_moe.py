# SPDX-License-Identifier: Apache-2.0
"""Qwen3 with mixtures of experts."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from specops.api.errors import ModelError
from specops.engine.models.blocks.experts import ExpertsConfig, Routing
from specops.engine.models.blocks.layer import AnyMlpConfig
from specops.engine.models.families.defaults import QWEN3_MOE
from specops.engine.models.families.dense_decoder import dense_decoder, dense_mlp, windows_of_last
from specops.engine.models.families.family import Family
from specops.engine.models.families.fields import count, flag
from specops.engine.models.families.gguf import GgufForm


def mlps(raw: Mapping[str, Any], num_layers: int) -> Sequence[AnyMlpConfig]:
    """Return experts for every decoder_sparse_step-th layer not listed in mlp_only_layers."""
    step = count(raw, "decoder_sparse_step", 1)
    dense = raw.get("mlp_only_layers", [])
    if not isinstance(dense, list):
        raise ModelError(f"mlp_only_layers must be a list of layers, got {dense!r:.60}")
    field = "num_experts" if "num_experts" in raw else "num_local_experts"
    experts = ExpertsConfig(
        num_experts=count(raw, field),
        width=count(raw, "moe_intermediate_size"),
        routing=Routing(
            top_k=count(raw, "num_experts_per_tok"),
            min_sum=0.0 if flag(raw, "norm_topk_prob") else None,
        ),
    )
    has_experts = [layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)]
    return [experts if one else dense_mlp(raw) for one in has_experts]


GGUF_KEYS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
FAMILY = Family(
    title="Qwen3-MoE",
    read={
        "Qwen3MoeForCausalLM": partial(
            dense_decoder,
            windows=windows_of_last,
            qk_norm=True,
            mlps=mlps,
            defaults=QWEN3_MOE,
        )
    },
    gguf=(
        GgufForm(
            "qwen3moe", "Qwen3MoeForCausalLM", keys=GGUF_KEYS, defaults={"norm_topk_prob": True}
        ),
    ),
)
