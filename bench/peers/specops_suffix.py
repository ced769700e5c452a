# SPDX-License-Identifier: Apache-2.0
"""Our own suffix cache in a separate process, so that it is measured as its peer is.

A step of a batch is one call: it reads the tensors that `verify` and `commit` wrote, and writes the
drafts into the tensors of the next step.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import specops
import torch
from specops.dense import silu_mul
from specops.suffix_tree import SuffixCache
from suffix_replay import Batch, Call, Side, Tokens, serve_side


class Specops(Side):
    """`SuffixCache` with its defaults; drafts end at the tree's depth unless `read_on` is set."""

    version = specops.__version__

    def open(self, depth: int, max_cached_requests: int, read_on: bool) -> None:
        torch.set_num_threads(1)
        specops.set_num_threads(1)
        self._options = {
            "max_tree_depth": depth,
            "max_cached_requests": max_cached_requests,
            "read_on": read_on,
        }
        self._depth = depth
        self._some = torch.zeros(64, 4096, dtype=torch.bfloat16)
        self._cache = SuffixCache(**self._options)

    def start(self, request: int, prompt: Tokens) -> Call:
        return self._cache.start, (request, prompt)

    def extend(self, request: int, token_ids: Tokens) -> Call:
        return self._cache.extend, (request, token_ids)

    def speculate(self, request: int, context: Tokens, factor: float) -> Call:
        if factor == 1.0:
            return self._cache.speculate, (request, self._depth)
        return partial(self._cache.speculate, max_spec_factor=factor), (request, self._depth)

    def stop(self, request: int) -> Call:
        return self._cache.stop, (request,)

    def evict(self, request: int) -> Call:
        return self._evict, (request,)

    def wait(self) -> None:
        self._cache.wait()

    def batch(self, requests: Mapping[int, Any]) -> Batch:
        return _Rows(self._cache, list(requests.values()), self._depth)

    def threads(self, count: int) -> None:
        specops.set_num_threads(count)

    def wake(self) -> None:
        silu_mul(self._some)

    def save(self, path: str) -> None:
        self._cache.save(path)

    def load(self, path: str) -> None:
        self._cache = SuffixCache(**self._options)
        self._cache.load(path)

    def _evict(self, request: int) -> None:
        self._cache.evict(request)
        self._cache.reclaim()


class _Rows(Batch):
    def __init__(self, cache: SuffixCache, requests: Sequence[int], depth: int) -> None:
        batch = len(requests)
        self._cache = cache
        self._requests = torch.tensor(requests)
        self._new = torch.zeros(batch, depth + 1, dtype=torch.int32)
        self._num_new = torch.zeros(batch, dtype=torch.int32)
        self._max = torch.full((batch,), depth, dtype=torch.int32)
        self._drafts = torch.full((batch, depth), -1, dtype=torch.int32)
        self._num_drafts = torch.zeros(batch, dtype=torch.int32)

    def prepare(self, new: Sequence[Tokens], contexts: Sequence[Tokens]) -> None:
        for row, token_ids in enumerate(new):
            self._new[row, : len(token_ids)] = torch.from_numpy(token_ids)
            self._num_new[row] = len(token_ids)

    def step(self) -> None:
        self._cache.step(
            self._requests,
            self._new,
            self._num_new,
            self._max,
            draft_token_ids=self._drafts,
            num_draft_tokens=self._num_drafts,
        )

    def drafts(self) -> list[list[int]]:
        return [
            row[:size]
            for row, size in zip(self._drafts.tolist(), self._num_drafts.tolist(), strict=True)
        ]


if __name__ == "__main__":
    serve_side(Specops())
