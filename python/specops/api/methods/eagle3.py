# SPDX-License-Identifier: Apache-2.0
"""Configuration of EAGLE-3; the drafter is in drafters/eagle3.py."""

from dataclasses import dataclass

from specops.api.methods.method import Method, WeightOptions


@dataclass(frozen=True, kw_only=True)
class Eagle3Options(WeightOptions):
    """The options of an EAGLE-3 head."""


METHOD = Method(
    name="eagle3",
    title="EAGLE-3 head",
    short="EAGLE-3",
    drafter="specops.engine.drafters.eagle3",
    options=Eagle3Options,
    files=("model",),
    needs_weights=True,
    can_draft_trees=True,
    draws=True,
)
