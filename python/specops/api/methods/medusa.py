# SPDX-License-Identifier: Apache-2.0
"""Configuration of Medusa; the drafter is in drafters/medusa.py."""

from dataclasses import dataclass

from specops.api.methods.method import Method, WeightOptions


@dataclass(frozen=True, kw_only=True)
class MedusaOptions(WeightOptions):
    """The options of Medusa heads."""


METHOD = Method(
    name="medusa",
    title="Medusa heads",
    short="Medusa",
    drafter="specops.engine.drafters.medusa",
    options=MedusaOptions,
    files=("model",),
    needs_weights=True,
    draws=True,
)
