# SPDX-License-Identifier: Apache-2.0
"""Drafters: what proposes the tokens that the next step verifies."""

from specops.engine.drafters.base import Drafter, DraftBatch
from specops.engine.drafters.ngram import NgramDrafter

__all__ = ["DraftBatch", "Drafter", "NgramDrafter", "RUNNABLE_METHODS", "make_drafter"]

# The methods this version runs; "naive" is decoding without a drafter.
RUNNABLE_METHODS = ("naive", "ngram")


def make_drafter(method: str) -> Drafter | None:
    """Returns the drafter of a method, or None for "naive"."""
    if method == "naive":
        return None
    if method == "ngram":
        return NgramDrafter()
    raise ValueError(f"method {method!r} cannot run; this model can run {', '.join(RUNNABLE_METHODS)}")
