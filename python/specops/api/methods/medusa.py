# SPDX-License-Identifier: Apache-2.0
"""Configuration of Medusa; the drafter is in drafters/medusa.py."""

from dataclasses import dataclass

from specops.api.methods.checks import path
from specops.api.methods.method import Method, WeightOptions


@dataclass(frozen=True, kw_only=True)
class MedusaOptions(WeightOptions):
    """The options of Medusa heads.

    Attributes:
        medusa_choices: a JSON file with the tree of every step, as paths of ranks, for requests
            with `tree`. None: trees consist of the likeliest paths.
    """

    medusa_choices: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        path("medusa_choices", self.medusa_choices)


METHOD = Method(
    name="medusa",
    title="Medusa heads",
    short="Medusa",
    drafter="specops.engine.drafters.medusa",
    options=MedusaOptions,
    files=("model", "medusa_choices"),
    needs_weights=True,
    can_draft_trees=True,
    draws=True,
)
