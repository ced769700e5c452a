# SPDX-License-Identifier: Apache-2.0
"""A smaller model that drafts, as the configuration knows it; drafters/draft_model.py does it."""

from dataclasses import dataclass

from specops.engine.drafters.methods.method import Method, WeightOptions


@dataclass(frozen=True, kw_only=True)
class DraftModelOptions(WeightOptions):
    """Which model drafts."""


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
