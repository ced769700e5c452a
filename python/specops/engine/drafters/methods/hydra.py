# SPDX-License-Identifier: Apache-2.0
"""Hydra, as the configuration knows it; drafters/hydra.py does it."""

from dataclasses import dataclass

from specops.engine.drafters.methods.method import Method, WeightOptions


@dataclass(frozen=True, kw_only=True)
class HydraOptions(WeightOptions):
    """Which heads draft."""


METHOD = Method(
    name="hydra",
    title="Hydra heads",
    short="Hydra",
    drafter="specops.engine.drafters.hydra",
    options=HydraOptions,
    files=("model",),
    needs_weights=True,
    can_draft_trees=True,
    draws=True,
)
