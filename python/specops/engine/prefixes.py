# SPDX-License-Identifier: Apache-2.0
"""Finds which requests of a step begin with the same pages, so that attention reads these once.

Nobody declares what is shared. Two requests that hold one page (of a system prompt, of examples, of
a prompt with several choices) have it in their page lists, at the same place. Sorted, lists that
begin alike are neighbours, and what neighbours have in common makes a forest of shared runs. It is
a schedule and nothing else: no bit of a result depends on what is found.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from specops.engine.kv_cache import PagePool
from specops.engine.plan import Plan, SharedPrefixes
from specops.engine.request import Request

_MAX_LEVELS = 8  # the members of deeper groups share what the group at this level does
_ENTRY_BYTES = 4  # of a page list


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
        self._forest: Forest | None = None
        self._requests: list[Request] = []
        self._num_changes = -1

    def arrange(self, plan: Plan) -> None:
        """Makes neighbours of the requests that share pages, and notes in the plan what they share.

        What was found stays true while the same requests run and nobody came to or left a shared
        page: what grows at the end of a list is its own request's alone.
        """
        pool, parts = self._pool, plan.parts
        if pool.num_shared_pages:
            requests = [part.request for part in parts]
            if pool.num_sharing_changes != self._num_changes or requests != self._requests:
                self._forest = self._find(requests)
                self._requests, self._num_changes = requests, pool.num_sharing_changes
            if self._forest is not None:
                parts[:] = [parts[index] for index in self._forest.order]
                plan.prefixes = self._forest.prefixes
        if any(part.draft_parents is not None for part in parts):
            self._add_trees(plan)

    def _add_trees(self, plan: Plan) -> None:
        """Goes from parts to their chains, and adds that the chains of a tree share its text.

        What these save is no saving beside plain decoding, and not counted as such.
        """
        parts, prefixes = plan.parts, plan.prefixes
        counts = np.array([part.num_chains for part in parts])
        first = np.cumsum(counts) - counts
        texts = np.array([part.request.num_computed for part in parts])
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
        plan.prefixes = SharedPrefixes(
            leaders=np.repeat(first[leaders], counts, axis=1).astype(np.int32),
            lens=np.repeat(lens, counts, axis=1).astype(np.int32),
            num_saved_tokens=0 if prefixes is None else prefixes.num_saved_tokens,
        )

    def _find(self, requests: Sequence[Request]) -> "Forest | None":
        # A page that is not registered yet is still written to, and so nobody else's.
        pages = [one.pages[: one.num_registered_pages].tobytes() for one in requests]
        forest = find_forest(pages, self._pool.page_size, self._leaf_tokens)
        if forest is None or forest.prefixes.num_saved_tokens < self._least_saved_tokens:
            return None
        return forest


@dataclass(frozen=True, slots=True)
class Forest:
    """Which requests share what.

    Attributes:
        order: of the requests, by the places at which they were given; members of a group are
            neighbours.
        prefixes: the groups, in this order.
    """

    order: list[int]
    prefixes: SharedPrefixes


def find_forest(pages: Sequence[bytes], page_size: int, leaf_tokens: int) -> Forest | None:
    """Finds the groups of requests that begin with the same pages, and the groups within these.

    Args:
        pages: of each request, the ids of its complete pages, as the bytes of int32.
        page_size: tokens of a page.
        leaf_tokens: a group shares whole leaves of so many tokens, and at least one more than the
            group around it.

    Returns:
        The groups; None where no two requests share a leaf.
    """
    order = sorted(range(len(pages)), key=pages.__getitem__)
    leaf_bytes = leaf_tokens // page_size * _ENTRY_BYTES
    common = [0]  # of each with the one before, in leaves
    common += [_common_bytes(pages[a], pages[b]) // leaf_bytes for a, b in pairwise(order)]
    leaders, lens = [], []
    num_saved_leaves = 0
    runs = [(0, len(order), 0)]  # the groups of a level: where they begin and end, their leaves
    for _ in range(_MAX_LEVELS):
        inner_runs = []
        for begin, end, leaves in runs:
            for inner in _runs_within(common, begin, end, leaves):
                inner_runs.append(inner)
                num_saved_leaves += (inner[1] - inner[0] - 1) * (inner[2] - leaves)
        if not inner_runs:
            break
        runs = inner_runs
        leaders.append(list(range(len(order))))
        lens.append([0] * len(order))
        for begin, end, leaves in runs:
            leaders[-1][begin:end] = [begin] * (end - begin)
            lens[-1][begin:end] = [leaves * leaf_tokens] * (end - begin)
    if not leaders:
        return None
    prefixes = SharedPrefixes(
        leaders=np.array(leaders, dtype=np.int32),
        lens=np.array(lens, dtype=np.int32),
        num_saved_tokens=num_saved_leaves * leaf_tokens,
    )
    return Forest(order, prefixes)


def _runs_within(
    common: Sequence[int], begin: int, end: int, leaves: int
) -> Iterator[tuple[int, int, int]]:
    """The longest runs of neighbours with more in common than `leaves`, and how much that is."""
    first, least = begin, 0
    for place in range(begin + 1, end + 1):
        if place < end and common[place] > leaves:
            least = min(least, common[place]) if least else common[place]
        else:
            if least:
                yield first, place, least
            first, least = place, 0


def _common_bytes(left: bytes, right: bytes) -> int:
    """How many bytes two texts begin with alike."""
    size = min(len(left), len(right))
    differ = int.from_bytes(left[:size], "little") ^ int.from_bytes(right[:size], "little")
    return ((differ & -differ).bit_length() - 1) // 8 if differ else size
