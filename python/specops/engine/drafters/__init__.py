# SPDX-License-Identifier: Apache-2.0
"""Drafters: what proposes the tokens that the next step verifies."""

import torch

from specops.engine.drafters.base import (
    DraftBatch,
    Drafter,
    HostDraftBatch,
    HostDrafter,
    TargetRows,
)
from specops.engine.drafters.host import HostDrafts
from specops.engine.drafters.mtp import BEGIN_ANEW, CATCH_UP, LONG_REST, MtpDrafter
from specops.engine.drafters.ngram import NgramDrafter
from specops.engine.drafters.suffix import SuffixDrafter
from specops.engine.speculative_config import SpeculativeConfig
from specops.suffix_tree import SuffixCache

__all__ = [
    "BEGIN_ANEW",
    "CATCH_UP",
    "LONG_REST",
    "DraftBatch",
    "Drafter",
    "HostDraftBatch",
    "HostDrafter",
    "HostDrafts",
    "MtpDrafter",
    "NgramDrafter",
    "SuffixDrafter",
    "TargetRows",
    "make_drafter",
    "make_host_drafter",
]


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
    raise ValueError(f"method {method!r} has no drafter of its own on the device")


def make_host_drafter(method: str, slots: int, suffix_cache: SuffixCache) -> HostDrafter:
    """Returns the drafter of a method that drafts on the host, with room for `slots` requests."""
    if method == "suffix":
        return SuffixDrafter(slots, suffix_cache)
    raise ValueError(f"method {method!r} does not draft on the host")
