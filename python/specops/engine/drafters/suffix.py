# SPDX-License-Identifier: Apache-2.0
"""Suffix decoding: what followed the last tokens, here or in other requests, most often."""

import secrets
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specops.engine.drafters.base import HostDraftBatch
from specops.engine.request import Request
from specops.suffix_tree import SuffixCache


class SuffixDrafter:
    """Drafts with `specops.suffix_tree.SuffixCache`, all requests of a step in one call.

    A request is known to the cache from its first slot until it leaves: a preemption takes nothing
    away from it.

    Args:
        slots: requests that run at once.
        cache: of the engine; others may add to it and read from it.
    """

    def __init__(self, slots: int, cache: SuffixCache) -> None:
        self._cache = cache
        self._numbers: NDArray[np.int64] = np.full(slots, -1, dtype=np.int64)  # -1: not here
        self._rows: NDArray[np.int64] = np.empty(slots, dtype=np.int64)
        self._tensors: dict[int, Tensor] = {}  # of the first rows, by how many
        self._started: dict[int, int] = {}  # numbers of requests, by their arrival
        # A response stays in the cache under its request's name, and may be saved and loaded: no
        # later request may have the same.
        self._prefix = secrets.token_hex(8)

    def start(self, request: Request) -> None:
        """Builds the tree of a request's prompt, unless it is here already."""
        number = self._started.get(request.arrival)
        if number is None:
            number = self._cache.start(self._name(request), request.token_ids)
            self._started[request.arrival] = number
        self._numbers[request.slot] = number

    def extend(self, request: Request, token_ids: Sequence[int]) -> None:
        """Appends to a request's tree."""
        self._cache.extend(self._name(request), token_ids)

    def propose(self, batch: HostDraftBatch) -> None:
        """Appends what was emitted to the trees, and fills the drafts, in one call."""
        size = len(batch.slots)
        requests = self._tensors.get(size)
        if requests is None:
            requests = self._tensors[size] = torch.from_numpy(self._rows[:size])
        # Slots are not out of range, and no mode but this writes without a copy.
        np.take(self._numbers, batch.slots, out=self._rows[:size], mode="clip")
        self._cache.step(
            requests,
            batch.token_ids,
            batch.num_tokens,
            batch.max_draft_tokens,
            draft_token_ids=batch.draft_token_ids,
            num_draft_tokens=batch.num_draft_tokens,
            num_given_drafts=batch.num_given_drafts,
        )

    def stop(self, request: Request) -> None:
        """The slot is free; the request's tree stays."""
        self._numbers[request.slot] = -1

    def leave(self, request: Request) -> None:
        """Drops the request's own tree; its response stays in the shared one."""
        if self._started.pop(request.arrival, None) is not None:
            self._cache.stop(self._name(request))

    def _name(self, request: Request) -> str:
        return f"{self._prefix}-{request.arrival}"
