# SPDX-License-Identifier: Apache-2.0
"""Configuration of DFlash and DSpark; the drafter is in drafters/dflash.py."""

from dataclasses import dataclass

from specops.api.methods.method import Method, WeightOptions


@dataclass(frozen=True, kw_only=True)
class DflashOptions(WeightOptions):
    """The options of a DFlash or DSpark head."""


METHOD = Method(
    name="dflash",
    title="DFlash head",
    short="DFlash",
    drafter="specops.engine.drafters.dflash",
    options=DflashOptions,
    files=("model",),
    aliases=("dspark",),
    needs_weights=True,
    can_draft_trees=True,
    draws=True,
)
