# SPDX-License-Identifier: Apache-2.0
"""Drafters: what proposes the tokens that the next step verifies."""

import torch

from specops.engine.drafters.base import DraftBatch, Drafter
from specops.engine.drafters.ngram import NgramDrafter

__all__ = ["RUNNABLE_METHODS", "DraftBatch", "Drafter", "NgramDrafter", "make_drafter"]

# The methods this version runs; "naive" is decoding without a drafter.
RUNNABLE_METHODS = ("naive", "ngram")


def make_drafter(method: str, slots: int, device: torch.device) -> Drafter:
    """Returns the drafter of a method, with room for `slots` requests."""
    if method == "ngram":
        return NgramDrafter(slots, device)
    raise ValueError(
        f"method {method!r} cannot run; this model can run {', '.join(RUNNABLE_METHODS)}"
    )
