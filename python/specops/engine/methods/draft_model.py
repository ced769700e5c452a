# SPDX-License-Identifier: Apache-2.0
"""A smaller model that drafts, as the configuration knows it; drafters/draft_model.py does it."""

from dataclasses import dataclass

from specops.engine.methods import checks
from specops.engine.methods.method import Method, Options


@dataclass(frozen=True, kw_only=True)
class DraftModelOptions(Options):
    """Which model drafts.

    Attributes:
        model: directory of the model.
        quantization: of its projections, as `EngineConfig.quantization`. The target's is its own.
    """

    model: str | None = None
    quantization: str = "none"

    def __post_init__(self) -> None:
        checks.path("model", self.model)
        if not isinstance(self.quantization, str):
            raise ValueError(f"quantization must be a text, got {self.quantization!r}")


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
