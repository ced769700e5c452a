# SPDX-License-Identifier: Apache-2.0
"""arctic-inference's suffix decoding through its public class, as vLLM's proposer drives it.

A step of a batch is a loop over its requests: append what is new, then request a draft after the
last tokens of the sequence. It cannot save to a file and runs nothing in the background.
"""

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from arctic_inference.suffix_decoding import SuffixDecodingCache
from suffix_replay import Batch, Call, Side, Tokens, serve_side


class Arctic(Side):
    """The class, with the parameters that vLLM uses."""

    version = version("arctic-inference")

    def open(self, depth: int, max_cached_requests: int, read_on: bool) -> None:
        if read_on:
            raise ValueError("a draft ends at the depth of the tree")
        self._cache = SuffixDecodingCache(depth, max_cached_requests)
        self._depth = depth

    def start(self, request: int, prompt: Tokens) -> Call:
        return self._cache.start_request, (request, prompt)

    def extend(self, request: int, token_ids: Tokens) -> Call:
        return self._cache.add_active_response, (request, token_ids)

    def speculate(self, request: int, context: Tokens, factor: float) -> Call:
        return self._cache.speculate, (request, context, self._depth, factor, 0.0, 0.1, False)

    def stop(self, request: int) -> Call:
        return self._cache.stop_request, (request,)

    def evict(self, request: int) -> Call:
        return self._cache.evict_cached_response, (request,)

    def wait(self) -> None:
        pass

    def batch(self, requests: Mapping[int, Any]) -> Batch:
        return _Rows(self._cache, list(requests), self._depth)

    def threads(self, count: int) -> None:
        if count != 1:
            raise ValueError("it has no threads")

    def wake(self) -> None:
        pass

    def save(self, path: str) -> None:
        raise ValueError("it has no file")

    def load(self, path: str) -> None:
        raise ValueError("it has no file")


class _Rows(Batch):
    def __init__(self, cache: SuffixDecodingCache, requests: Sequence[int], depth: int) -> None:
        self._cache, self._requests, self._depth = cache, requests, depth
        self._drafts: list[Any] = []

    def prepare(self, new: Sequence[Tokens], contexts: Sequence[Tokens]) -> None:
        self._rows = list(zip(self._requests, new, contexts, strict=True))

    def step(self) -> None:
        extend, speculate = self._cache.add_active_response, self._cache.speculate
        depth, drafts = self._depth, []
        for request, token_ids, context in self._rows:
            extend(request, token_ids)
            drafts.append(speculate(request, context, depth, 1.0, 0.0, 0.1, False))
        self._drafts = drafts

    def drafts(self) -> list[list[int]]:
        return [draft.token_ids for draft in self._drafts]


if __name__ == "__main__":
    serve_side(Arctic())
