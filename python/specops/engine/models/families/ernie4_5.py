# SPDX-License-Identifier: Apache-2.0
"""ERNIE-4.5 with experts: its decoder does not run yet, its MTP modules do."""

from specops.engine.models.families.family import Family, MtpConvention

FAMILY = Family(
    lacks={"Ernie4_5_MoeForCausalLM": "mixtures of experts"},
    mtp=MtpConvention(
        name="ernie4_5",
        families=("ERNIE-4.5",),
        embed_norm="model.mtp_emb_norm.{index}",
        hidden_norm="model.mtp_hidden_norm.{index}",
        projection="model.mtp_linear_proj.{index}",
        head_norm=None,
        block="model.mtp_block.{index}.",
    ),
)
