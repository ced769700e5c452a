# SPDX-License-Identifier: Apache-2.0
"""Configuration of a draft model; the drafter is in drafters/draft_model.py."""

from dataclasses import dataclass

from specops.api.methods.method import Method, WeightOptions


@dataclass(frozen=True, kw_only=True)
class DraftModelOptions(WeightOptions):
    """The options of a draft model."""


METHOD = Method(
    name="draft_model",
    title="draft model",
    short="draft model",
    drafter="specops.engine.drafters.draft_model",
    options=DraftModelOptions,
    files=("model",),
    needs_weights=True,
    can_draft_trees=True,
    draws=True,
)
