# SPDX-License-Identifier: Apache-2.0
"""gpt-oss: experts with clamped gates, attention sinks, a sliding window in every other layer."""

from collections.abc import Mapping, Sequence
from typing import Any

from specops.engine.models.blocks.experts import ExpertsConfig, Routing
from specops.engine.models.blocks.layer import AnyMlpConfig
from specops.engine.models.config import ModelConfig
from specops.engine.models.families.defaults import GPT_OSS, GPT_OSS_ROPE
from specops.engine.models.families.dense_decoder import dense_decoder, windows_of_all
from specops.engine.models.families.family import Family
from specops.engine.models.families.fields import FULL, SLIDING, count, mapping, refuse_values
from specops.engine.models.families.gguf import GgufForm


def read(raw: Mapping[str, Any]) -> ModelConfig:
    """Read a config.json.

    Raises:
        KeyError: a field is missing.
        ModelError: a field has an invalid or unsupported value.
    """
    refuse_values(raw, {"swiglu_limit": (7.0, None), "swiglu_alpha": (1.702, None)})
    types = [FULL if i % 2 else SLIDING for i in range(count(raw, "num_hidden_layers"))]
    defaults = {**GPT_OSS, "layer_types": types}
    if not mapping(raw, "rope_scaling", "rope_parameters"):
        raw = {**raw, "rope_scaling": GPT_OSS_ROPE}
    return dense_decoder(raw, windows=windows_of_all, has_sinks=True, mlps=mlps, defaults=defaults)


def mlps(raw: Mapping[str, Any], num_layers: int) -> Sequence[AnyMlpConfig]:
    """Return experts for every layer, weighted by a softmax over the chosen experts."""
    experts = ExpertsConfig(
        num_experts=count(raw, "num_local_experts"),
        width=count(raw, "intermediate_size"),
        routing=Routing(top_k=count(raw, "num_experts_per_tok"), min_sum=0.0),
        activation="swiglu_oai",
        has_bias=True,
        router_name="router",
    )
    return [experts] * num_layers


def _untruncated(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the RoPE scaling with `truncate`, which GGUF files omit and llama.cpp ignores."""
    return {"rope_scaling": {**GPT_OSS_ROPE, **mapping(raw, "rope_scaling")}}


_GGUF_KEYS = {
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "intermediate_size",
}
FAMILY = Family(
    title="gpt-oss",
    read={"GptOssForCausalLM": read},
    gguf=(GgufForm("gpt-oss", "GptOssForCausalLM", keys=_GGUF_KEYS, fields=_untruncated),),
)
