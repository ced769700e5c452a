# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3, as the configuration knows it; drafters/eagle3.py does it."""

from dataclasses import dataclass

from specops.engine.methods import checks
from specops.engine.methods.method import Method, Options


@dataclass(frozen=True, kw_only=True)
class Eagle3Options(Options):
    """Which head drafts.

    Attributes:
        model: directory of the head.
        quantization: of its layers' projections and its LM head: "none", "wint8". No token depends
            on it, only how often drafts are right. None: the layers' like the target's.
    """

    model: str | None = None
    quantization: str | None = None

    def __post_init__(self) -> None:
        checks.path("model", self.model)
        if self.quantization is not None:
            checks.choice("quantization", self.quantization, checks.QUANTIZATIONS)


METHOD = Method(
    name="eagle3",
    title="EAGLE-3 head",
    short="EAGLE-3",
    drafter="specops.engine.drafters.eagle3",
    options=Eagle3Options,
    files=("model",),
    needs_weights=True,
    can_draft_trees=True,
    draws=True,
)
