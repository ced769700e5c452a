# SPDX-License-Identifier: Apache-2.0
"""Qwen2 and Qwen2.5."""

from functools import partial

from specops.engine.models.families.defaults import QWEN2
from specops.engine.models.families.dense_decoder import (
    dense_decoder,
    windows_of_last,
)
from specops.engine.models.families.family import Family
from specops.engine.models.families.gguf import GgufForm

FAMILY = Family(
    title="Qwen2",
    read={
        "Qwen2ForCausalLM": partial(
            dense_decoder,
            windows=windows_of_last,
            qkv_bias=True,
            o_bias=False,
            defaults=QWEN2,
        )
    },
    gguf=(GgufForm("qwen2", "Qwen2ForCausalLM"),),
)
