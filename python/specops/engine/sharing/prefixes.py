# SPDX-License-Identifier: Apache-2.0
"""What the requests of a step share, so that attention reads it once.

Nobody declares it: `batching.find_shared_prefixes` sees it in the page lists. It is a schedule and
nothing else: no bit of a result depends on what is found.
"""

from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate

import numpy as np
import torch

from specops import batching
from specops.engine.memory.kv_cache import PagePool
from specops.engine.plan import Plan, PrefixGroups
from specops.engine.request import Request

_MAX_LEVELS = 8  # the members of deeper groups share what the group at this level does


class PrefixFinder:
    """Finds what the requests of a step share, from the pages that they hold.

    Args:
        pool: of the pages.
        leaf_tokens: attention shares whole leaves of so many tokens.
        least_saved_tokens: how many tokens of keys and values a step must be spared to pay for what
            declaring costs the device.
    """

    def __init__(self, pool: PagePool, *, leaf_tokens: int, least_saved_tokens: int = 0) -> None:
        self._pool = pool
        self._leaf_tokens = leaf_tokens
        self._least_saved_tokens = least_saved_tokens
        # What was found last, for whom, and what the pool's count of changes was then.
        self._prefixes: PrefixGroups | None = None
        self._order: list[int] = []
        self._requests: list[Request] = []
        self._num_changes = -1
        self._arrays_of = lru_cache(maxsize=64)(_Arrays)  # by the number of requests

    def arrange(self, plan: Plan, at: Mapping[int, Request]) -> None:
        """Makes neighbours of the requests that share pages, and notes in the plan what they share.

        What was found stays true while the same requests run and nobody came to or left a shared
        page: what grows at the end of a list is its own request's alone.

        Args:
            plan: of the step, with all its parts.
            at: requests by slot.
        """
        pool, parts = self._pool, plan.parts
        if pool.num_shared_pages:
            requests = [at[part.slot] for part in parts]
            if pool.num_sharing_changes != self._num_changes or requests != self._requests:
                self._find(requests)
                self._requests, self._num_changes = requests, pool.num_sharing_changes
            if self._prefixes is not None:
                parts[:] = [parts[index] for index in self._order]
                plan.prefixes = self._prefixes
        if any(part.draft_parents is not None for part in parts):
            self._add_trees(plan)

    def _add_trees(self, plan: Plan) -> None:
        """Goes from parts to their chains, and adds that the chains of a tree share its text.

        What these save is no saving beside plain decoding, and not counted as such.
        """
        parts, prefixes = plan.parts, plan.prefixes
        counts = np.array([part.num_chains for part in parts])
        first = np.cumsum(counts) - counts
        texts = np.array([part.begin for part in parts])
        shared = np.where(counts > 1, texts // self._leaf_tokens * self._leaf_tokens, 0)
        leaders, lens = np.empty((0, len(parts)), np.int64), np.empty((0, len(parts)), np.int64)
        if prefixes is not None:
            leaders, lens = prefixes.leaders.astype(np.int64), prefixes.lens.astype(np.int64)
            shared[shared <= lens.max(0)] = 0
        saved = int(((counts - 1) * shared).sum())
        if len(lens) < _MAX_LEVELS and saved >= max(self._least_saved_tokens, 1):
            leaders = np.vstack([leaders, np.arange(len(parts))])
            lens = np.vstack([lens, shared])
        if not len(lens):
            return
        # The chains of a tree are one group on every level. Where their request is alone they share
        # what it shares with others on the levels before: nothing on the first.
        lens = np.maximum.accumulate(lens, axis=0)
        plan.prefixes = PrefixGroups(
            leaders=np.repeat(first[leaders], counts, axis=1).astype(np.int32),
            lens=np.repeat(lens, counts, axis=1).astype(np.int32),
            num_saved_tokens=0 if prefixes is None else prefixes.num_saved_tokens,
        )

    def _find(self, requests: Sequence[Request]) -> None:
        # A page that is not registered yet is still written to, and so nobody else's. Its likes may
        # differ before a page that is shared: of a text's pages some have draft KV of a kind.
        lists = [one.pages[: one.num_registered_pages] for one in requests]
        arrays = self._arrays_of(len(requests))
        levels, num_saved_tokens = arrays.find(lists, self._pool.page_size, self._leaf_tokens)
        self._prefixes = None
        if num_saved_tokens >= max(self._least_saved_tokens, 1):
            self._order = arrays.order.tolist()
            leaders, lens = arrays.of_levels[levels]
            self._prefixes = PrefixGroups(leaders, lens, num_saved_tokens)


class _Arrays:
    """What `find_shared_prefixes` reads and writes for so many requests.

    Kept, with views through which Python reads and writes them: between two steps all else has left
    the CPU's caches, and making tensors takes several times as long as the finding.
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
        """Writes `order` and `of_levels`; how many levels there are, and tokens that they save."""
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
