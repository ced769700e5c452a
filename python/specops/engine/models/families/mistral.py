# SPDX-License-Identifier: Apache-2.0
"""Mistral 7B and similar models: Llama with an optional sliding window in all layers."""

from functools import partial

from specops.engine.models.families.defaults import MISTRAL
from specops.engine.models.families.dense_decoder import dense_decoder, windows_of_all
from specops.engine.models.families.family import Family
from specops.engine.models.families.gguf import GgufForm

FAMILY = Family(
    title="Mistral",
    read={"MistralForCausalLM": partial(dense_decoder, windows=windows_of_all, defaults=MISTRAL)},
    # llama.cpp converts most models of Mistral to the architecture `llama`.
    gguf=(GgufForm("mistral3", "MistralForCausalLM", defaults={"sliding_window": None}),),
)
