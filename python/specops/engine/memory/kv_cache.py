# SPDX-License-Identifier: Apache-2.0
"""Pages of the KV cache: reference counts, and a prefix tree for sharing pages among requests.

A page is in exactly one of three states: held (reference count > 0), cached (count 0, content
known, least recently used first), or free. Content is identified exactly, not by hash: prefixes
form a tree whose edges are the tokens of pages, so two prefixes are never confused.

A page may also hold draft KV: keys and values of a drafter for the same tokens. With some drafters
they also depend on the tokens right after the page, so one prefix may have several pages, which
differ in the tokens that follow.
"""

import heapq
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


@dataclass(frozen=True)
class DraftKv:
    """Description of the draft KV that a drafter keeps on a request's pages.

    Attributes:
        owner: the drafter; other drafters cannot use its draft KV.
        lookahead: number of tokens after a position on which its draft KV depends.
        max_drafts: maximum number of drafts that this drafter makes for the request in a step.
    """

    owner: str
    lookahead: int
    max_drafts: int

    def key(self, token_ids: Sequence[int], end: int) -> bytes:
        """Return the key of a page that ends at `end`: the owner and the tokens that follow."""
        return self.owner.encode() + b":" + _token_bytes(token_ids[end : end + self.lookahead])

    def num_rows_behind(self, draft_limit: int) -> int:
        """Return how many rows a drafter may write after the rows of the step itself."""
        return min(draft_limit, self.max_drafts) - self.lookahead

    def end_of_rows(self, max_len: int) -> int:
        """Return the end of the positions that a drafter may write to.

        Args:
            max_len: the number of tokens at which the request ends.
        """
        return max_len


class AdaptedSalt(NamedTuple):
    """Salt of requests with a LoRA adapter, whose keys and values differ from the model's own.

    Attributes:
        name: name of the adapter.
        digest: digest of the adapter, since another one may get the same name later.
        salt: cache salt of the request.
    """

    name: str
    digest: str
    salt: str | None


Salt = str | AdaptedSalt | None


def adapted_salt(salt: str | None, adapter: tuple[str, str] | None) -> Salt:
    """Return the salt of a request's pages.

    Args:
        salt: cache salt of the request.
        adapter: name and digest of its LoRA adapter; None: the model alone.
    """
    return salt if adapter is None else AdaptedSalt(*adapter, salt)


class Prefix:
    """Node of the prefix tree: a prefix that ends at a page boundary, and its last pages.

    A prefix exists as long as it has pages. Its pages outlive those of longer prefixes: a request
    that holds a page also holds a page of each shorter prefix, and releases that one later.
    """

    __slots__ = ("children", "pages", "parent", "salt", "tokens")

    def __init__(self, parent: "Prefix | None", tokens: bytes, salt: Salt = None) -> None:
        self.parent = parent  # None for the empty prefix
        self.tokens = tokens  # tokens of the last page
        self.salt = salt  # set for the root only: salt of the requests that use the tree
        self.children: dict[bytes, Prefix] = {}  # by tokens of their last page
        # Pages by the key of their draft KV, oldest first; key None: a page without draft KV.
        self.pages: dict[bytes | None, int] = {}

    @property
    def youngest(self) -> int | None:
        """Youngest page of the prefix, for requests that need no draft KV.

        Any page would do. Using the youngest one lets an older page without draft KV be evicted
        once a page with draft KV exists.
        """
        return next(reversed(self.pages.values()), None)


class PrefixListener(Protocol):
    """Receiver of the changes of a prefix cache, in the thread that makes them."""

    def stored(self, prefix: Prefix, token_ids: Sequence[int], salt: Salt) -> None:
        """Handle a new prefix; `token_ids` are the tokens of its last page."""

    def removed(self, prefix: Prefix) -> None:
        """Handle a prefix whose last page was evicted."""


class PagePool:
    """Pool that allocates, shares and frees pages of `page_size` tokens.

    Each cache salt has its own tree of prefixes, which exists as long as it has a page.

    Args:
        num_pages: number of pages.
        page_size: tokens per page.
        enable_prefix_caching: False: `register` has no effect.
        listener: listener for changes of prefixes, or None.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        enable_prefix_caching: bool,
        listener: PrefixListener | None = None,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._listener = listener
        self.num_shared_pages = 0  # pages that more than one request holds
        self.num_sharing_changes = 0  # how often a shared page gained or lost a request
        self._caching = enable_prefix_caching
        self._refs = [0] * num_pages
        # A heap, because pages in ascending order are read faster than pages in random order.
        self._free = list(range(num_pages))
        self._cached: OrderedDict[int, None] = OrderedDict()  # registered, held by no request
        self._roots: dict[Salt, Prefix] = {}  # by salt
        # The prefix of each registered page, and its key there.
        self._place_of: dict[int, tuple[Prefix, bytes | None]] = {}

    @property
    def num_available(self) -> int:
        """Number of pages that can be allocated: free pages, and cached pages to be evicted."""
        return len(self._free) + len(self._cached)

    def match_prefix(
        self,
        token_ids: Sequence[int],
        max_tokens: int,
        draft_kv: DraftKv | None = None,
        salt: Salt = None,
    ) -> list[int]:
        """Acquire the cached pages of the longest known prefix of `token_ids`.

        Args:
            token_ids: a request's tokens.
            max_tokens: limit on the number of tokens that the pages cover.
            draft_kv: draft KV that the pages must hold, computed only from tokens in `token_ids`;
                None accepts pages with and without draft KV.
            salt: only pages registered with the same salt are found.

        Returns:
            The pages in order. The caller holds them and must release them.
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
        """Return the prefix whose last page is a given registered page."""
        return self._place_of[page][0]

    def allocate(self, count: int) -> list[int] | None:
        """Allocate pages, evicting cached ones if needed; return None if too few are available."""
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
        salt: Salt = None,
    ) -> int:
        """Register a full page by its content, so that `match_prefix` finds it.

        Args:
            page: page that the caller holds, with complete keys and values, not registered yet.
            parent: registered page before it; None for the first page.
            token_ids: the page's tokens, exactly page_size of them.
            draft_key: `DraftKv.key` of the page's draft KV; None if it has none.
            salt: the request's salt; the same for all pages of a prefix.

        Returns:
            `page`, or an equal page that is already registered. The caller must use the returned
            page from now on; reference counts are already updated. A page without draft KV equals
            any page of its prefix; a page with draft KV equals only a page with the same key.
        """
        if not self._caching:
            return page
        before = self._root_of(salt) if parent is None else self._place_of[parent][0]
        tokens = _token_bytes(token_ids)
        prefix = before.children.get(tokens)
        if prefix is None:
            prefix = before.children[tokens] = Prefix(before, tokens)
            if self._listener is not None:
                self._listener.stored(prefix, token_ids, salt)
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
        """Release pages; registered pages stay cached until evicted, other pages become free."""
        # Last page first, so that the tail of a prefix is evicted before its start.
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
            if self._listener is not None:
                self._listener.removed(prefix)

    def _root_of(self, salt: Salt) -> Prefix:
        """Return the empty prefix of a salt, created if missing; the caller adds a child to it."""
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = Prefix(None, b"", salt)
        return root


def _token_bytes(token_ids: Sequence[int]) -> bytes:
    return array("i", token_ids).tobytes()
