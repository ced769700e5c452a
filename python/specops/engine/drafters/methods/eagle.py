# SPDX-License-Identifier: Apache-2.0
"""EAGLE-1 and 2, as the configuration knows them; drafters/eagle.py does it."""

from dataclasses import dataclass

from specops.engine.drafters.methods.method import Method, WeightOptions


@dataclass(frozen=True, kw_only=True)
class EagleOptions(WeightOptions):
    """Which head drafts."""


METHOD = Method(
    name="eagle",
    title="EAGLE head",
    short="EAGLE",
    drafter="specops.engine.drafters.eagle",
    options=EagleOptions,
    files=("model",),
    needs_weights=True,
    can_draft_trees=True,
    draws=True,
)
