# SPDX-License-Identifier: Apache-2.0
"""Selection of prefixes whose states are kept, so that other requests can continue from their end.

Layers with linear attention have one state per request, which every token changes. Pages of a
prefix are useful to another request only with the states at their end. States are kept for few
prefixes, since one state takes as much memory as thousands of tokens on pages. These are prefixes
that are likely to recur:

- a prompt up to its last whole page, for requests that begin with it or repeat it;
- the common prefix of a prompt and earlier ones, once two prompts share it;
- a text up to the last page that decoding has filled, for the next turn of a conversation. The
  state at the end of the next page replaces it.

Chunks of prompts end at the first two kinds of borders. States do not depend on how a text was
split, so a request has the same bits wherever it continues.

A drafter whose layers have states keeps them next to the target's, for the same prefixes, so that
its drafts also depend on the text alone. Such an entry has both and is useful to requests of this
drafter, as are pages with the drafter's keys and values.

Source: the second rule is that of SGLang's radix cache for such models, which calls the place a
branching point; vLLM's chunks end at borders as well.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specops.engine.memory.kv_cache import DraftKv, PagePool, Prefix
from specops.engine.models.kv import CacheCapacity, KvCache

_NO_CAPACITY = CacheCapacity(0, 0)

_Key = tuple[Prefix, str]  # the name is of the drafter with its own states; empty: none


@dataclass(slots=True)
class _Running:
    """Progress of a request with a slot."""

    owner: str  # the drafter with its own states; empty: none
    borders: Sequence[int]  # token counts of its prompt at which to store states, ascending
    end: int  # the last border, or the first token that runs if later
    waiting: tuple[int, int] | None = None  # tokens and entry, until the page is registered
    decoded: _Key | None = None  # entry of decoded text, to be replaced by the next one


class PrefixStates:
    """States of prefixes in a least-recently-used cache; an entry has the states of all layers.

    If the model has no states, or no entries are configured, pages are usable without states.

    An entry is free, belongs to a prefix, or waits for its prefix: some drafters complete a page
    later than the model does. A prefix whose pages are gone is never found again and is evicted
    first; after these, the least recently used prefix is evicted.

    Args:
        pool: page pool.
        capacity: capacity of every cache.
        target: cache with the target's states; None if the target has no states.
        drafters: caches with states of drafters, by name; None if no drafter has states.
    """

    def __init__(
        self,
        pool: PagePool,
        capacity: CacheCapacity = _NO_CAPACITY,
        target: KvCache | None = None,
        drafters: Mapping[str, KvCache] | None = None,
    ) -> None:
        self._pool = pool
        # Caches with states of a request, by its drafter with its own states.
        self._caches: dict[str, Sequence[KvCache]] = {"": ()}
        if capacity.num_prefix_states:
            own = (target,) if target is not None and target.prefix_states else ()
            self._caches = {"": own} | {name: (*own, one) for name, one in (drafters or {}).items()}
        # Slots hold the states of this many positions before the last row.
        self._num_drafts = capacity.num_drafts
        # A chunk may end this many tokens after its last border.
        self._slack = min(capacity.num_drafts, pool.page_size - 1)
        self._free = list(range(capacity.num_prefix_states - 1, -1, -1))
        self._entry_of: OrderedDict[_Key, int] = OrderedDict()  # least recently used first
        self._running: dict[int, _Running] = {}  # by slot

    def release_unusable(self, pages: list[int], draft_kv: DraftKv | None) -> int:
        """Release those cached pages of a request that it cannot use because states are missing.

        Args:
            pages: pages from `PagePool.match_prefix`; pages after the last one with states are
                removed from the list.
            draft_kv: draft KV of the request.

        Returns:
            Number of tokens on the pages found.
        """
        count = found = len(pages)
        owner = self._owner(draft_kv)
        if self._caches[owner]:
            while count and self._key(pages[count - 1], owner) not in self._entry_of:
                count -= 1
            self._pool.release(pages[count:])
            del pages[count:]
        return found * self._pool.page_size

    def start(
        self,
        slot: int,
        pages: Sequence[int],
        num_cached: int,
        num_tokens: int,
        draft_kv: DraftKv | None,
    ) -> None:
        """Load the states from which a request continues.

        Args:
            slot: slot of the request.
            pages: its cached pages, after `release_unusable`.
            num_cached: number of tokens that `release_unusable` returned.
            num_tokens: tokens of the request.
            draft_kv: draft KV of the request.
        """
        owner, size = self._owner(draft_kv), self._pool.page_size
        if not self._caches[owner]:
            return
        begin = len(pages) * size
        if pages:
            key = self._key(pages[-1], owner)
            self._entry_of.move_to_end(key)
            for cache in self._caches[owner]:
                cache.load_states(self._entry_of[key], begin, slot)
        # The end of the pages that another request with these tokens can use.
        last = (num_tokens - max(1, 0 if draft_kv is None else draft_kv.lookahead)) // size * size
        borders = [one for one in sorted({num_cached, last}) if one > begin]
        self._running[slot] = _Running(owner, borders, max(last, begin))

    def chunk(self, slot: int, begin: int, rows: int) -> int:
        """Return how many of `rows` prompt rows a step may run: up to the first border inside."""
        own = self._running.get(slot)
        for border in () if own is None else own.borders:
            if begin < border < begin + rows - self._slack:
                return border - begin
        return rows

    def keep(
        self,
        slot: int,
        pages: Sequence[int],
        num_registered: int,
        num_computed: int,
        num_drafted: int,
        begin: int,
        num_rows: int,
    ) -> None:
        """Store the states at the last border that a request has reached with a step.

        Args:
            slot: slot of the request.
            pages: pages of its text.
            num_registered: number of its first pages that are registered.
            num_computed: committed tokens whose rows are computed.
            num_drafted: tokens whose draft KV is final.
            begin: position of the first row of the step.
            num_rows: rows of the step; some of the last may be rejected.
        """
        own = self._running.get(slot)
        if own is None:
            return
        self._assign_waiting(pages, num_registered, own)
        size = self._pool.page_size
        border = (min(num_computed, num_drafted) if own.owner else num_computed) // size * size
        is_useful = border in own.borders or border > own.end
        # States from before this step are not used: rejected rows may have overwritten them.
        if not is_useful or not begin < border or begin + num_rows > border + self._num_drafts:
            return
        entry = self._entry_to_overwrite(own)
        if entry is not None:
            own.waiting = border, entry
            for cache in self._caches[own.owner]:
                cache.keep_states(slot, border, entry)
            self._assign_waiting(pages, num_registered, own)

    def entry_of(self, pages: Sequence[int], draft_kv: DraftKv | None) -> int | None:
        """Return the entry with the states at the end of a text's first pages, or None."""
        return self._entry_of.get(self._key(pages[-1], self._owner(draft_kv))) if pages else None

    def new_entry(self, pages: Sequence[int], draft_kv: DraftKv | None) -> int | None:
        """Reserve an entry for the states at the end of registered pages; the caller writes it.

        Returns:
            The entry. None if it exists already, no states are needed, or all entries wait.
        """
        owner = self._owner(draft_kv)
        if not self._caches[owner] or not pages or self.entry_of(pages, draft_kv) is not None:
            return None
        entry = self._free_entry()
        if entry is not None:
            self._entry_of[self._key(pages[-1], owner)] = entry
        return entry

    def leave(self, slot: int) -> None:
        """Forget the request of a slot."""
        own = self._running.pop(slot, None)
        if own is not None and own.waiting is not None:
            self._free.append(own.waiting[1])

    def _owner(self, draft_kv: DraftKv | None) -> str:
        """Return the name of a request's drafter if the drafter has states, else ""."""
        return "" if draft_kv is None or draft_kv.owner not in self._caches else draft_kv.owner

    def _key(self, page: int, owner: str) -> _Key:
        return self._pool.prefix_of(page), owner

    def _assign_waiting(self, pages: Sequence[int], num_registered: int, own: _Running) -> None:
        """Assign the waiting entry to its prefix if the prefix's page is registered by now."""
        if own.waiting is None:
            return
        border, entry = own.waiting
        index = border // self._pool.page_size
        if index > num_registered:
            return
        own.waiting = own.decoded = None
        key = self._key(pages[index - 1], own.owner)
        if key in self._entry_of:  # the same states
            self._entry_of.move_to_end(key)
            self._free.append(entry)
            return
        self._entry_of[key] = entry
        if border > own.end:
            own.decoded = key

    def _entry_to_overwrite(self, own: _Running) -> int | None:
        """Return an entry to overwrite; None if all wait for prefixes of other requests."""
        if own.waiting is not None:
            return own.waiting[1]
        if own.decoded is not None and own.decoded in self._entry_of:
            return self._entry_of.pop(own.decoded)
        return self._free_entry()

    def _free_entry(self) -> int | None:
        """Return a free entry, after an eviction if needed; None if all entries wait."""
        if self._free:
            return self._free.pop()
        if not self._entry_of:
            return None
        gone = (key for key in self._entry_of if not key[0].pages)
        return self._entry_of.pop(next(gone, next(iter(self._entry_of))))
