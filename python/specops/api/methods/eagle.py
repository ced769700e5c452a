# SPDX-License-Identifier: Apache-2.0
"""Configuration of EAGLE-1 and 2; the drafter is in drafters/eagle.py."""

from dataclasses import dataclass

from specops.api.methods.method import Method, WeightOptions


@dataclass(frozen=True, kw_only=True)
class EagleOptions(WeightOptions):
    """The options of an EAGLE head."""


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
