# SPDX-License-Identifier: Apache-2.0
"""Llama 2 and 3."""

from specops.engine.models.families.dense_decoder import dense_decoder
from specops.engine.models.families.family import Family
from specops.engine.models.families.gguf import GgufForm

FAMILY = Family(
    title="Llama",
    read={"LlamaForCausalLM": dense_decoder},
    gguf=(GgufForm("llama", "LlamaForCausalLM"),),
)
