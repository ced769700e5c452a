# SPDX-License-Identifier: Apache-2.0
"""Hydra, as the configuration knows it; drafters/hydra.py does it."""

from dataclasses import dataclass

from specops.engine.methods import checks
from specops.engine.methods.method import Method, Options


@dataclass(frozen=True, kw_only=True)
class HydraOptions(Options):
    """Which heads draft.

    Attributes:
        model: directory of the heads.
        quantization: of what makes their logits: "none", "wint8". No token depends on it, only how
            often drafts are right. None: as of the target's LM head.
    """

    model: str | None = None
    quantization: str | None = None

    def __post_init__(self) -> None:
        checks.path("model", self.model)
        if self.quantization is not None:
            checks.choice("quantization", self.quantization, checks.QUANTIZATIONS)


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
