# SPDX-License-Identifier: Apache-2.0
"""GLM-4.5, 4.6 and 4.7. Their MTP modules are named as DeepSeek-V3's."""

from collections.abc import Mapping, Sequence
from typing import Any

from specops.engine.models.blocks.layer import AnyMlpConfig
from specops.engine.models.config import ModelConfig
from specops.engine.models.families.dense_decoder import dense_decoder
from specops.engine.models.families.experts_of_groups import experts_of_groups
from specops.engine.models.families.family import Family


def read(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads a config.json.

    Raises:
        KeyError: a field is missing.
        ModelError: a field holds what it cannot hold.
    """

    def of_layers(raw: Mapping[str, Any], num_layers: int) -> Sequence[AnyMlpConfig]:
        return experts_of_groups({"first_k_dense_replace": 1, **raw}, num_layers)

    return dense_decoder(
        raw,
        o_bias=False,
        qk_norm=bool(raw.get("use_qk_norm", False)),
        partial_rotary_factor=0.5,
        mlps=of_layers,
    )


FAMILY = Family(title="GLM-4.5", read={"Glm4MoeForCausalLM": read})
