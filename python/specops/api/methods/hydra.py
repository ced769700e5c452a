# SPDX-License-Identifier: Apache-2.0
"""Configuration of Hydra; the drafter is in drafters/hydra.py."""

from dataclasses import dataclass

from specops.api.methods.method import Method, WeightOptions


@dataclass(frozen=True, kw_only=True)
class HydraOptions(WeightOptions):
    """The options of Hydra heads."""


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
