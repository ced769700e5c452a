# SPDX-License-Identifier: Apache-2.0
"""Pages of the KV cache: who holds them, and which hold a prefix that another request can use.

A page is in exactly one of three states: held (reference count > 0), cached (count 0, content
known, least recently used first), or free. Content is identified exactly, not by hash: prefixes are
a tree whose edges are the tokens of pages, so two can never be taken for one another.

Pages may have draft KV, too: what a drafter computed from the same tokens and, with some drafters,
from those right behind the page. One prefix may therefore have several pages, which differ in what
follows.
"""

import heapq
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class DraftKv:
    """What a drafter keeps on a request's pages, beside the model's own keys and values.

    Attributes:
        owner: the drafter; pages of one are of no use to another.
        lookahead: of a position, how many tokens behind it its draft KV depends on.
        max_drafts: most drafts that this drafter makes for the request in a step.
    """

    owner: str
    lookahead: int
    max_drafts: int

    def key(self, token_ids: Sequence[int], end: int) -> bytes:
        """What tells pages apart that end at `end`: the owner, and the tokens that follow."""
        return self.owner.encode() + b":" + _token_bytes(token_ids[end : end + self.lookahead])

    def num_rows_behind(self, draft_limit: int) -> int:
        """Rows that drafting writes behind those of the step itself."""
        return min(draft_limit, self.max_drafts) - self.lookahead

    def end_of_rows(self, max_len: int) -> int:
        """Return the position before which these rows end.

        Args:
            max_len: the number of tokens at which the request ends.
        """
        return max_len


class Prefix:
    """A prefix that ends with a page, and the pages that hold its end.

    It exists as long as it has pages. They outlive those of longer prefixes: whoever holds a page
    holds one of each shorter prefix as well, and lets go of it later.
    """

    __slots__ = ("children", "pages", "parent", "salt", "tokens")

    def __init__(self, parent: "Prefix | None", tokens: bytes, salt: str | None = None) -> None:
        self.parent = parent  # None: this is the empty prefix
        self.tokens = tokens  # of its last page
        self.salt = salt  # of the empty prefix: the salt whose requests alone find what follows
        self.children: dict[bytes, Prefix] = {}  # by their last page's tokens
        # Oldest first, by the key of their draft KV; None: without draft KV.
        self.pages: dict[bytes | None, int] = {}

    @property
    def youngest(self) -> int | None:
        """Any page would do for the model's own keys and values.

        The youngest, so that a page without draft KV falls out of use when there is one with it.
        """
        return next(reversed(self.pages.values()), None)


class PagePool:
    """Allocates, shares and frees pages of `page_size` tokens.

    Each cache salt has a tree of prefixes of its own, as long as the tree has a page.
    """

    def __init__(self, num_pages: int, page_size: int, *, enable_prefix_caching: bool) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_shared_pages = 0  # that more than one request holds
        self.num_sharing_changes = 0  # how often a holder came to a shared page, or left it
        self._caching = enable_prefix_caching
        self._refs = [0] * num_pages
        # A heap, because pages in ascending order are read faster than shuffled ones.
        self._free = list(range(num_pages))
        self._cached: OrderedDict[int, None] = OrderedDict()  # count 0, content known
        self._roots: dict[str | None, Prefix] = {}  # by salt
        # Of each findable page: its prefix, and its key there.
        self._place_of: dict[int, tuple[Prefix, bytes | None]] = {}

    @property
    def num_available(self) -> int:
        """Pages that an allocation may take: free ones, and cached ones that nobody holds."""
        return len(self._free) + len(self._cached)

    def match_prefix(
        self,
        token_ids: Sequence[int],
        max_tokens: int,
        draft_kv: DraftKv | None = None,
        salt: str | None = None,
    ) -> list[int]:
        """Takes hold of the cached pages that start `token_ids`, at most `max_tokens` of them.

        Args:
            token_ids: a request's tokens.
            max_tokens: how many of them the pages may hold.
            draft_kv: what the pages must have, computed from tokens that all are in `token_ids`;
                None: pages with and without draft KV will do.
            salt: pages are found only if they were registered with the same salt.
        """
        pages: list[int] = []
        prefix = self._roots.get(salt)
        if prefix is None:
            return pages
        size = self.page_size
        if draft_kv is not None:
            max_tokens = min(max_tokens, len(token_ids) - draft_kv.lookahead)
        for end in range(size, min(max_tokens, len(token_ids)) + 1, size):
            child = prefix.children.get(_token_bytes(token_ids[end - size : end]))
            if child is None:
                break
            if draft_kv is None:
                page = child.youngest
            else:
                page = child.pages.get(draft_kv.key(token_ids, end))
            if page is None:
                break
            self._hold(page)
            pages.append(page)
            prefix = child
        return pages

    def prefix_of(self, page: int) -> Prefix:
        """The prefix that ends with a registered page."""
        return self._place_of[page][0]

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

    def register(
        self,
        page: int,
        parent: int | None,
        token_ids: Sequence[int],
        draft_key: bytes | None = None,
        salt: str | None = None,
    ) -> int:
        """Makes a full page findable by content.

        Args:
            page: a page the caller holds, whose keys and values are complete and not registered.
            parent: the page before it, whose own content is registered; None for the first page.
            token_ids: the page's tokens, exactly page_size of them.
            draft_key: `DraftKv.key` of what it has beside; None: it has no draft KV.
            salt: of its request; the same for all pages of a prefix.

        Returns:
            The page that stands for this content from now on: `page`, or, when an equal page is
            registered already, that one. The caller swaps to it and hold counts are moved. A page
            without draft KV is equal to any of its prefix, one with draft KV to its like alone.
        """
        if not self._caching:
            return page
        before = self._root_of(salt) if parent is None else self._place_of[parent][0]
        tokens = _token_bytes(token_ids)
        prefix = before.children.get(tokens)
        if prefix is None:
            prefix = before.children[tokens] = Prefix(before, tokens)
        known = prefix.youngest if draft_key is None else prefix.pages.get(draft_key)
        if known is None:
            prefix.pages[draft_key] = page
            self._place_of[page] = prefix, draft_key
            return page
        if known != page:
            self._hold(known)
            self.release([page])
        return known

    def release(self, pages: Sequence[int]) -> None:
        """Lets go of pages: known content stays findable until it is evicted, the rest is free."""
        # Last page first, so that the tail of a prefix is evicted before its beginning.
        for page in reversed(pages):
            self._refs[page] -= 1
            if self._refs[page] > 0:
                self.num_shared_pages -= self._refs[page] == 1
                self.num_sharing_changes += 1
                continue
            if page in self._place_of:
                self._cached[page] = None
            else:
                heapq.heappush(self._free, page)

    def _hold(self, page: int) -> None:
        if self._refs[page] == 0:
            del self._cached[page]
        else:
            self.num_shared_pages += self._refs[page] == 1
            self.num_sharing_changes += 1
        self._refs[page] += 1

    def _forget(self, page: int) -> None:
        prefix, key = self._place_of.pop(page)
        del prefix.pages[key]
        if not prefix.pages and prefix.parent is not None:
            before = prefix.parent
            del before.children[prefix.tokens]
            if before.parent is None and not before.children:
                del self._roots[before.salt]

    def _root_of(self, salt: str | None) -> Prefix:
        """Return the empty prefix of a salt, which the caller extends."""
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = Prefix(None, b"", salt)
        return root


def _token_bytes(token_ids: Sequence[int]) -> bytes:
    return array("i", token_ids).tobytes()
