# SPDX-License-Identifier: Apache-2.0
"""DFlash and DSpark, as the configuration knows them; drafters/dflash.py does it."""

from dataclasses import dataclass

from specops.engine.methods import checks
from specops.engine.methods.method import Method, Options


@dataclass(frozen=True, kw_only=True)
class DflashOptions(Options):
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
    name="dflash",
    title="DFlash head",
    short="DFlash",
    drafter="specops.engine.drafters.dflash",
    options=DflashOptions,
    files=("model",),
    aliases=("dspark",),
    needs_weights=True,
    can_draft_trees=True,
    draws=True,
)
