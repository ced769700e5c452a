# SPDX-License-Identifier: Apache-2.0
"""Mistral 7B and similar models: Llama with an optional sliding window in all layers."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from specops.engine.models.families.defaults import MISTRAL
from specops.engine.models.families.dense_decoder import dense_decoder, windows_of_all
from specops.engine.models.families.family import Family
from specops.engine.models.families.fields import count, mapping, number
from specops.engine.models.families.gguf import GgufForm


def _gguf_fields(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the RoPE and the context of Ministral 3.

    Queries are scaled by a factor that depends on their position, and is 1 within the context of
    the training. So only this context is supported.
    """
    fields: dict[str, Any] = {}
    rope = mapping(raw, "rope_scaling")
    if rope and "mscale_all_dim" in raw:
        fields["rope_scaling"] = {**rope, "mscale": 1.0, "mscale_all_dim": raw["mscale_all_dim"]}
    if number("temperature_scale", raw.get("temperature_scale", 0.0), or_zero=True):
        lengths = (
            count(raw, "max_position_embeddings"),
            count(rope, "original_max_position_embeddings"),
        )
        fields["max_position_embeddings"] = min(lengths)
    return fields


_GGUF_KEYS = {
    "attention.temperature_scale": "temperature_scale",
    "rope.scaling.yarn_log_multiplier": "mscale_all_dim",
}
FAMILY = Family(
    title="Mistral",
    read={"MistralForCausalLM": partial(dense_decoder, windows=windows_of_all, defaults=MISTRAL)},
    # llama.cpp converts most models of Mistral to the architecture `llama`.
    gguf=(
        GgufForm(
            "mistral3",
            "MistralForCausalLM",
            keys=_GGUF_KEYS,
            defaults={"sliding_window": None},
            fields=_gguf_fields,
        ),
    ),
)
