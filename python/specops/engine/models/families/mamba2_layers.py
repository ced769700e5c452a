# SPDX-License-Identifier: Apache-2.0
"""Fields of Mamba-2 layers that several families have."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specops.api.errors import ModelError
from specops.engine.models.blocks.mamba2 import Mamba2Config
from specops.engine.models.families.fields import count, flag, refuse_values


def refuse_time_steps(raw: Mapping[str, Any]) -> None:
    """Reject limits of the time steps; transformers 5 writes infinity as an object.

    Raises:
        ModelError: there is a limit.
    """
    infinity = {"__float__": "Infinity"}
    unlimited = ([0.0, math.inf], [0.0, infinity], None)
    refuse_values(raw, {"time_step_limit": unlimited})


def mamba2(raw: Mapping[str, Any], inner: int, **more: Any) -> Mamba2Config:
    """Read the fields mamba_*.

    Args:
        raw: content of the file.
        inner: number of outputs of all heads.
        more: further fields of the configuration.

    Raises:
        ModelError: a field has an invalid or unsupported value.
    """
    refuse_values(raw, {"mamba_proj_bias": (False, None)})
    refuse_time_steps(raw)
    heads = count(raw, "mamba_n_heads")
    head_dim = inner // heads if raw["mamba_d_head"] == "auto" else count(raw, "mamba_d_head")
    if heads * head_dim != inner:
        raise ModelError(f"mamba_n_heads * mamba_d_head must be {inner}, got {heads} * {head_dim}")
    config = Mamba2Config(
        num_heads=heads,
        num_groups=count(raw, "mamba_n_groups"),
        head_dim=head_dim,
        state_dim=count(raw, "mamba_d_state"),
        taps=count(raw, "mamba_d_conv"),
        has_conv_bias=flag(raw, "mamba_conv_bias", True),
    )
    if heads % config.num_groups:
        raise ModelError(
            f"mamba_n_heads must be a multiple of mamba_n_groups={config.num_groups}, got {heads}"
        )
    return replace(config, **more)
