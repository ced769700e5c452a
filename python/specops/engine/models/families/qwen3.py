# SPDX-License-Identifier: Apache-2.0
"""Qwen3, dense."""

from functools import partial

from specops.engine.models.families.defaults import QWEN3
from specops.engine.models.families.dense_decoder import (
    dense_decoder,
    windows_of_last,
)
from specops.engine.models.families.family import Family
from specops.engine.models.families.gguf import GgufForm

FAMILY = Family(
    title="Qwen3",
    read={
        "Qwen3ForCausalLM": partial(
            dense_decoder, windows=windows_of_last, qk_norm=True, defaults=QWEN3
        )
    },
    gguf=(GgufForm("qwen3", "Qwen3ForCausalLM"),),
)
