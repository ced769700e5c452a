# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup: the continuation of the most recent earlier match of the last tokens."""

import torch

from specops.engine.drafters.base import DraftBatch
from specops.engine.request import Request
from specops.ngram import ngram_propose


class NgramDrafter:
    """Drafts with `specops.ngram.ngram_propose`, all requests of a step in one call."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self._min_sizes = torch.ones(slots, dtype=torch.int32, device=device)
        self._max_sizes = torch.ones(slots, dtype=torch.int32, device=device)

    def start(self, request: Request) -> None:
        """Notes the request's n-gram sizes."""
        self._min_sizes[request.slot] = request.speculative.min_ngram_size
        self._max_sizes[request.slot] = request.speculative.max_ngram_size

    def propose(self, batch: DraftBatch) -> None:
        """Fills the drafts of every request in one call."""
        ngram_propose(
            batch.token_ids,
            batch.lens,
            batch.max_draft_tokens,
            min_ngram_size=self._min_sizes,
            max_ngram_size=self._max_sizes,
            draft_token_ids=batch.draft_token_ids,
            num_draft_tokens=batch.num_draft_tokens,
        )

    def stop(self, request: Request) -> None:
        """Nothing to forget: the sizes are overwritten when the slot is used again."""
