# SPDX-License-Identifier: Apache-2.0
"""Pages of the KV cache: who holds them, and which hold a prefix that another request can use.

A page is in exactly one of three states: held (reference count > 0), cached (count 0, content
known, least recently used first), or free. Content is identified exactly, not by hash: a page's key
is its parent's identity and its own tokens, so two prefixes can never be taken for one another.
"""

import heapq
from array import array
from collections import OrderedDict
from collections.abc import Sequence

_ROOT = 0  # identity of the empty prefix


class PagePool:
    """Allocates, shares and frees pages of `page_size` tokens."""

    def __init__(self, num_pages: int, page_size: int, *, enable_prefix_caching: bool) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._caching = enable_prefix_caching
        self._refs = [0] * num_pages
        # A heap, because pages in ascending order are read faster than shuffled ones.
        self._free = list(range(num_pages))
        self._cached: OrderedDict[int, None] = OrderedDict()  # count 0, content known
        self._by_key: dict[tuple[int, bytes], int] = {}
        self._key_of: dict[int, tuple[int, bytes]] = {}
        self._identity_of: dict[int, int] = {}  # page -> identity of the prefix that ends with it
        self._next_identity = _ROOT + 1

    @property
    def num_available(self) -> int:
        """Pages that an allocation may take: free ones, and cached ones that nobody holds."""
        return len(self._free) + len(self._cached)

    def match_prefix(self, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        """Takes hold of the cached pages that start `token_ids`, at most `max_tokens` of them."""
        pages: list[int] = []
        if not self._caching:
            return pages
        parent = _ROOT
        for start in range(0, max_tokens - self.page_size + 1, self.page_size):
            key = (parent, _token_bytes(token_ids[start : start + self.page_size]))
            page = self._by_key.get(key)
            if page is None:
                break
            self._hold(page)
            pages.append(page)
            parent = self._identity_of[page]
        return pages

    def allocate(self, count: int) -> list[int] | None:
        """Takes `count` pages, evicting cached ones if need be; None (and no change) if too few."""
        if count > self.num_available:
            return None
        pages = []
        for _ in range(count):
            if self._free:
                page = heapq.heappop(self._free)
            else:
                page, _ = self._cached.popitem(last=False)
                self._forget(page)
            self._refs[page] = 1
            pages.append(page)
        return pages

    def register(self, page: int, parent: int | None, token_ids: Sequence[int]) -> int:
        """Makes a full page findable by content.

        Args:
            page: a page the caller holds and whose keys and values are complete.
            parent: the page before it, whose own content is registered; None for the first page.
            token_ids: the page's tokens, exactly page_size of them.

        Returns:
            The page that stands for this content from now on: `page`, or, when an equal page is
            registered already, that one. The caller swaps to it and hold counts are moved.
        """
        if not self._caching:
            return page
        key = (_ROOT if parent is None else self._identity_of[parent], _token_bytes(token_ids))
        known = self._by_key.get(key)
        if known is not None and known != page:
            self._hold(known)
            self.release([page])
            return known
        if known is None:
            self._by_key[key] = page
            self._key_of[page] = key
            self._identity_of[page] = self._next_identity
            self._next_identity += 1
        return page

    def release(self, pages: Sequence[int]) -> None:
        """Lets go of pages: known content stays findable until it is evicted, the rest is free."""
        # Last page first, so that the tail of a prefix is evicted before its beginning.
        for page in reversed(pages):
            self._refs[page] -= 1
            if self._refs[page] > 0:
                continue
            if page in self._key_of:
                self._cached[page] = None
            else:
                heapq.heappush(self._free, page)

    def check_integrity(self) -> None:
        """Raises AssertionError if a page is lost, counted twice, or findable by a wrong key."""
        free, cached = set(self._free), set(self._cached)
        held = {page for page, refs in enumerate(self._refs) if refs > 0}
        assert len(free) == len(self._free), "a page is free twice"
        assert not (free & cached or free & held or cached & held), "a page is in two states"
        assert len(free) + len(cached) + len(held) == self.num_pages, "a page is lost"
        assert all(self._by_key[key] == page for page, key in self._key_of.items()), "wrong key"
        assert len(self._by_key) == len(self._key_of), "a key without a page"
        assert not (free & set(self._key_of)), "a free page is findable"

    def _hold(self, page: int) -> None:
        if self._refs[page] == 0:
            del self._cached[page]
        self._refs[page] += 1

    def _forget(self, page: int) -> None:
        del self._by_key[self._key_of.pop(page)]
        del self._identity_of[page]


def _token_bytes(token_ids: Sequence[int]) -> bytes:
    return array("i", token_ids).tobytes()
