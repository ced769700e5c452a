# SPDX-License-Identifier: Apache-2.0
"""GLM-4.5 without its mixtures of experts. Its MTP modules are named as DeepSeek-V3's."""

from collections.abc import Mapping
from typing import Any

from specops.engine.errors import ModelError
from specops.engine.models.config import ModelConfig
from specops.engine.models.families.dense_decoder import dense_decoder
from specops.engine.models.families.family import Family


def read(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads a config.json.

    Raises:
        KeyError: a field is missing.
        ModelError: it has layers with experts, or a field holds what it cannot hold.
    """
    dense, layers = raw.get("first_k_dense_replace", 1), raw["num_hidden_layers"]
    if dense < layers:
        raise ModelError(
            f"architecture {raw['architectures'][0]} is supported with dense layers alone, not "
            f"with mixtures of experts: first_k_dense_replace is {dense} of {layers} layers"
        )
    return dense_decoder(
        raw,
        o_bias=False,
        qk_norm=bool(raw.get("use_qk_norm", False)),
        partial_rotary_factor=0.5,
    )


FAMILY = Family(title="dense GLM-4.5", read={"Glm4MoeForCausalLM": read})
