# SPDX-License-Identifier: Apache-2.0
"""Drafters: what proposes the tokens that the next step verifies."""

import torch

from specops.engine.drafters.base import DraftBatch, Drafter
from specops.engine.drafters.ngram import NgramDrafter
from specops.engine.speculative_config import SpeculativeConfig

__all__ = ["RUNNABLE_METHODS", "DraftBatch", "Drafter", "NgramDrafter", "make_drafter"]

# The methods this version runs; "naive" is decoding without a drafter.
RUNNABLE_METHODS = ("naive", "ngram")


def make_drafter(
    method: str, config: SpeculativeConfig, slots: int, max_len: int, device: torch.device
) -> Drafter:
    """Returns the drafter of a method, with room for `slots` requests.

    Args:
        method: of theirs.
        config: the server's.
        slots: requests that run at once.
        max_len: tokens of the longest request.
        device: where steps run.
    """
    if method == "ngram":
        num_sizes = config.max_ngram_size - config.min_ngram_size + 1
        return NgramDrafter(
            slots, max_len, min(num_sizes, 16), config.max_total_draft_tokens, device
        )
    raise ValueError(
        f"method {method!r} cannot run; this model can run {', '.join(RUNNABLE_METHODS)}"
    )
