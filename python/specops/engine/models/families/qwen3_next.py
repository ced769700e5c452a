# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Next and Qwen3.5: their decoders do not run yet, their MTP modules do."""

from specops.engine.models.families.family import Family, MtpConvention

_LINEAR = "linear attention"
_BOTH = "linear attention and mixtures of experts"

FAMILY = Family(
    lacks={
        "Qwen3NextForCausalLM": _LINEAR,
        "Qwen3_5ForCausalLM": _LINEAR,
        "Qwen3_5ForConditionalGeneration": _LINEAR,
        "Qwen3_5MoeForCausalLM": _BOTH,
        "Qwen3_5MoeForConditionalGeneration": _BOTH,
    },
    mtp=MtpConvention(
        name="qwen3_next",
        families=("Qwen3-Next", "Qwen3.5"),
        count_fields=("mtp_num_hidden_layers", "num_nextn_predict_layers"),
        embed_norm="mtp.pre_fc_norm_embedding",
        hidden_norm="mtp.pre_fc_norm_hidden",
        projection="mtp.fc",
        head_norm="mtp.norm",
        block="mtp.layers.{index}.",
        norm_offset=1.0,
    ),
)
