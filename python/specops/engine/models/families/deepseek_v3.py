# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3 and R1: their decoders do not run yet, modules named as theirs do."""

from specops.engine.models.families.family import Family, MtpConvention

FAMILY = Family(
    lacks={"DeepseekV3ForCausalLM": "multi-head latent attention and mixtures of experts"},
    mtp=MtpConvention(
        name="deepseek_v3",
        families=("DeepSeek-V3", "DeepSeek-R1", "GLM-4.5", "the bundled model"),
        embed_norm="model.layers.{layer}.enorm",
        hidden_norm="model.layers.{layer}.hnorm",
        projection="model.layers.{layer}.eh_proj",
        head_norm="model.layers.{layer}.shared_head.norm",
        block="model.layers.{layer}.",
        copies=("model.layers.{layer}.embed_tokens", "model.layers.{layer}.shared_head.head"),
    ),
)
