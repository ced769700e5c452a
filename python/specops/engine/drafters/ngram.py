# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup: what followed where a request's last tokens stood before in its own text."""

import torch

from specops.engine.drafters.base import DraftBatch
from specops.engine.request import Request
from specops.ngram import NgramIndex, ngram_propose


class NgramDrafter:
    """Drafts with `specops.ngram.ngram_propose`, all requests of a step in one call.

    Each slot's tokens are indexed as they come, so a step costs the same at any length. A request
    that comes back after a preemption is indexed anew, a piece a step.

    Args:
        slots: requests that run at once.
        max_len: tokens of the longest request.
        num_sizes: of n-grams that most requests look for; others share the room for so many.
        max_total_draft_tokens: most drafts of a step; None: no limit.
        device: where their tokens are.
    """

    def __init__(
        self,
        slots: int,
        max_len: int,
        num_sizes: int,
        max_total_draft_tokens: int | None,
        device: torch.device,
    ) -> None:
        self._choices = torch.ones((3, slots), dtype=torch.int32, device=device)
        self._min_sizes, self._max_sizes, self._leftmost = self._choices
        self._index = NgramIndex.empty(slots, max_len, num_sizes=num_sizes, device=device)
        self._max_total_draft_tokens = max_total_draft_tokens

    def start(self, request: Request) -> bool:
        """Notes the request's n-gram sizes and its side; what was in the slot is forgotten."""
        config = request.speculative
        choices = [config.min_ngram_size, config.max_ngram_size, config.ngram_match == "leftmost"]
        self._choices[:, request.slot] = torch.tensor(choices, dtype=torch.int32)
        self._index.reset(request.slot)
        return False

    def propose(self, batch: DraftBatch) -> None:
        """Fills the drafts of every request in one call."""
        ngram_propose(
            batch.token_ids,
            batch.lens,
            batch.max_draft_tokens,
            min_ngram_size=self._min_sizes,
            max_ngram_size=self._max_sizes,
            leftmost=self._leftmost,
            draft_token_ids=batch.draft_token_ids,
            num_draft_tokens=batch.num_draft_tokens,
            num_given_drafts=batch.num_given_drafts,
            max_total_draft_tokens=self._max_total_draft_tokens,
            index=self._index,
        )

    def stop(self, request: Request) -> None:
        """Nothing to forget: the next request of the slot starts anew."""
