# SPDX-License-Identifier: Apache-2.0
"""Prefixes that requests of a step share, so that attention reads them only once (cascade).

`batching.find_shared_prefixes` finds them in the page lists. Results have the same bits whether a
shared prefix is found or not.
"""

from array import array
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import numpy as np
import torch

from specops import batching
from specops.engine.memory.kv_cache import PagePool
from specops.engine.plan import Plan, PrefixGroups
from specops.engine.request import Request

_MAX_LEVELS = 8  # groups below this level share the prefix of the enclosing group


class PrefixFinder:
    """Finder of prefixes that requests of a step share, based on the pages they hold.

    Args:
        pool: the page pool.
        leaf_tokens: tokens per leaf of the attention sum; only whole leaves are shared.
        least_saved_tokens: prefixes are shared only if this saves reading the keys and values of
            at least this many tokens, since sharing costs additional launches.
    """

    def __init__(self, pool: PagePool, *, leaf_tokens: int, least_saved_tokens: int = 0) -> None:
        self._pool = pool
        self._leaf_tokens = leaf_tokens
        self._least_saved_tokens = least_saved_tokens
        # The last result, its requests, and the pool's count of changes at that time.
        self._prefixes: PrefixGroups | None = None
        self._order: list[int] = []
        self._requests: list[Request] = []
        self._num_changes = -1
        self._arrays_of = lru_cache(maxsize=64)(_Arrays)  # by number of requests

    def arrange(self, plan: Plan) -> None:
        """Put requests that share pages next to each other, and set the plan's prefixes.

        A result stays valid while the same requests run and no shared page gains or loses a holder:
        pages appended to a list belong to that request only.

        Args:
            plan: the step's plan with all its parts; updated.
        """
        pool, parts = self._pool, plan.parts
        if pool.num_shared_pages:
            requests = [part.request for part in parts]
            if pool.num_sharing_changes != self._num_changes or requests != self._requests:
                self._find(requests)
                self._requests, self._num_changes = requests, pool.num_sharing_changes
            if self._prefixes is not None:
                parts[:] = [parts[index] for index in self._order]
                plan.prefixes = self._prefixes

    def _find(self, requests: Sequence[Request]) -> None:
        # Unregistered pages are still written to, so they are never shared. Requests may hold
        # different pages of equal text before a shared page, because pages differ by draft KV.
        lists = [one.pages[: one.placement.num_registered_pages] for one in requests]
        arrays = self._arrays_of(len(requests))
        levels, num_saved_tokens = arrays.find(lists, self._pool.page_size, self._leaf_tokens)
        self._prefixes = None
        if num_saved_tokens >= max(self._least_saved_tokens, 1):
            self._order = arrays.order.tolist()
            leaders, lens = arrays.of_levels[levels]
            self._prefixes = PrefixGroups(leaders, lens, num_saved_tokens)


class _Arrays:
    """Arguments and results of `find_shared_prefixes` for `batch` requests.

    They are reused in all steps, together with their numpy views: the CPU's caches are cold after a
    step, so creating tensors would take several times as long as the search.
    """

    def __init__(self, batch: int) -> None:
        self._kv_indptr = torch.zeros(batch + 1, dtype=torch.int32)
        self._ends = self._kv_indptr.numpy().data[1:]
        self._make_room(0)
        self._out = batching.SharedPrefixes.empty(batch, max_levels=_MAX_LEVELS)
        self._counts = self._out.counts.numpy().data
        self.order = self._out.order.numpy().data
        leaders, lens = self._out.prefix_leaders.numpy(), self._out.prefix_lens.numpy()
        self.of_levels = [(leaders[:levels], lens[:levels]) for levels in range(_MAX_LEVELS + 1)]

    def _make_room(self, num_bytes: int) -> None:
        self._kv_indices = torch.empty(num_bytes // 4, dtype=torch.int32)
        self._pages = self._kv_indices.numpy().view(np.uint8).data

    def find(
        self, lists: Sequence["array[int]"], page_size: int, leaf_tokens: int
    ) -> tuple[int, int]:
        """Find the prefixes that requests share; write the groups to `order` and `of_levels`.

        Args:
            lists: pages of each request.
            page_size: tokens per page.
            leaf_tokens: tokens per leaf of attention.

        Returns:
            The number of levels of groups, and the number of tokens that a step reads only once.
        """
        self._ends[:] = array("i", accumulate(map(len, lists)))
        pages = bytearray().join(lists)
        if len(pages) > len(self._pages):
            self._make_room(2 * len(pages))
        self._pages[: len(pages)] = pages
        batching.find_shared_prefixes(
            self._kv_indptr,
            self._kv_indices,
            page_size=page_size,
            leaf_tokens=leaf_tokens,
            max_levels=_MAX_LEVELS,
            out=self._out,
        )
        levels, num_saved_tokens = self._counts
        return levels, num_saved_tokens
