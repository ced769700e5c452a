# SPDX-License-Identifier: Apache-2.0
"""Medusa, as the configuration knows it; drafters/medusa.py does it."""

from dataclasses import dataclass

from specops.engine.drafters.methods.method import Method, WeightOptions


@dataclass(frozen=True, kw_only=True)
class MedusaOptions(WeightOptions):
    """Which heads draft."""


METHOD = Method(
    name="medusa",
    title="Medusa heads",
    short="Medusa",
    drafter="specops.engine.drafters.medusa",
    options=MedusaOptions,
    files=("model",),
    needs_weights=True,
    can_draft_trees=True,
    draws=True,
)
