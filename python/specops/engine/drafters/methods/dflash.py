# SPDX-License-Identifier: Apache-2.0
"""DFlash and DSpark, as the configuration knows them; drafters/dflash.py does it."""

from dataclasses import dataclass

from specops.engine.drafters.methods.method import Method, WeightOptions


@dataclass(frozen=True, kw_only=True)
class DflashOptions(WeightOptions):
    """Which head drafts."""


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
