# SPDX-License-Identifier: Apache-2.0
"""MiMo-7B: Qwen2 with MTP modules."""

from functools import partial

from specops.engine.models.families.defaults import QWEN2
from specops.engine.models.families.dense_decoder import (
    dense_decoder,
    windows_of_last,
)
from specops.engine.models.families.family import Family, MtpConvention

FAMILY = Family(
    title="MiMo",
    read={
        "MiMoForCausalLM": partial(
            dense_decoder,
            windows=windows_of_last,
            qkv_bias=True,
            o_bias=False,
            defaults=QWEN2,
        )
    },
    mtp=MtpConvention(
        name="mimo",
        families=("MiMo-7B",),
        embed_norm="model.mtp_layers.{index}.token_layernorm",
        hidden_norm="model.mtp_layers.{index}.hidden_layernorm",
        projection="model.mtp_layers.{index}.input_proj",
        head_norm="model.mtp_layers.{index}.final_layernorm",
        block="model.mtp_layers.{index}.",
        hidden_first=True,
    ),
)
