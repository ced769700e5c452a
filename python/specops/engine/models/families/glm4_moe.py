# SPDX-License-Identifier: Apache-2.0
"""GLM-4.5, 4.6 and 4.7. Their MTP modules have the tensor names of DeepSeek-V3's."""

from collections.abc import Mapping
from typing import Any

from specops.engine.models.config import ModelConfig
from specops.engine.models.families.defaults import GLM4_MOE
from specops.engine.models.families.dense_decoder import dense_decoder
from specops.engine.models.families.experts_of_groups import (
    GGUF_DEFAULTS,
    GGUF_KEYS,
    GGUF_SIGMOID,
    experts_of_groups,
)
from specops.engine.models.families.family import Family
from specops.engine.models.families.fields import flag
from specops.engine.models.families.gguf import GgufForm, partial_rotary_factor


def read(raw: Mapping[str, Any]) -> ModelConfig:
    """Read a config.json.

    Raises:
        KeyError: a field is missing.
        ModelError: a field has an invalid value.
    """
    return dense_decoder(
        raw,
        o_bias=False,
        qk_norm=flag(raw, "use_qk_norm"),
        partial_rotary_factor=0.5,
        mlps=experts_of_groups,
        defaults=GLM4_MOE,
    )


FAMILY = Family(
    title="GLM-4.5",
    read={"Glm4MoeForCausalLM": read},
    gguf=(
        GgufForm(
            "glm4moe",
            "Glm4MoeForCausalLM",
            keys={**GGUF_KEYS, "rope.dimension_count": "rotary_dim"},
            defaults=GGUF_DEFAULTS,
            allowed={"expert_gating_func": (GGUF_SIGMOID, None)},
            fields=partial_rotary_factor,
        ),
    ),
)
