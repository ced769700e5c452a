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
        quantization: of its projections, its LM head included: "none", "wint8", "wint4" or
            "mix_quant". No token depends on it, only how often drafts are right. None: as of the
            target.
    """

    model: str | None = None
    quantization: str | None = None

    def __post_init__(self) -> None:
        checks.path("model", self.model)
        if self.quantization is not None:
            checks.choice("quantization", self.quantization, checks.QUANTIZATIONS)


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
