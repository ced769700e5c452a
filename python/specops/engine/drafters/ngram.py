# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup: the continuation of the most recent earlier match of the last tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specops.engine.drafters.base import DraftBatch
from specops.engine.request import Request
from specops.suffix_tree import ngram_propose


class NgramDrafter:
    """Drafts with `specops.suffix_tree.ngram_propose`, all requests of a step in one call."""

    def start(self, request: Request) -> None:
        """Nothing to prepare: the engine's token history is all there is."""

    def propose(self, batch: DraftBatch) -> None:
        """Fills the drafts of every request; one call per distinct pair of n-gram sizes."""
        groups: dict[tuple[int, int], list[int]] = {}
        for request in batch.requests:
            config = request.speculative
            sizes = (config.min_ngram_size, config.max_ngram_size)
            groups.setdefault(sizes, []).append(request.slot)
        for (min_size, max_size), slots in groups.items():
            budget = batch.max_draft_tokens
            if len(groups) > 1:
                index = torch.tensor(slots)
                budget = torch.zeros_like(budget).index_copy_(0, index, budget[index])
            drafts, counts = ngram_propose(
                batch.token_ids,
                batch.lens,
                budget,
                min_ngram_size=min_size,
                max_ngram_size=max_size,
                num_draft_columns=batch.draft_token_ids.shape[1],
            )
            if len(groups) == 1:
                batch.draft_token_ids.copy_(drafts)
                batch.num_draft_tokens.copy_(counts)
            else:
                batch.draft_token_ids[index] = drafts[index]
                batch.num_draft_tokens[index] = counts[index]

    def observe(self, requests: Sequence[Request], hidden: Tensor, row_indptr: Sequence[int]) -> None:
        """Nothing to learn from hidden states."""

    def stop(self, request: Request) -> None:
        """Nothing to forget."""
