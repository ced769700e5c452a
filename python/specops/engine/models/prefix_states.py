# SPDX-License-Identifier: Apache-2.0
"""Selection of the prefixes whose states are stored, for layers with linear attention.

Such layers have one state per request, which every token changes. So another request can continue
from the pages of a prefix only if the states at its end are stored. One state takes as much memory
as thousands of tokens on pages, so states are stored only for prefixes that are likely to recur:

- a prompt up to its last whole page, for requests that begin with it or repeat it;
- the common prefix of a prompt and earlier ones, once two prompts share it;
- a text up to the last page that decoding has filled, for the next turn of a conversation. Once
  decoding fills the next page, the state at its end replaces this one.

The ends of these prefixes are called borders. Prompt chunks end at borders of the first two kinds.
States do not depend on how a text was split, so results have the same bits wherever a request
continues.

States of a drafter with linear attention are stored together with the target's, for the same
prefixes, so that its drafts also depend on the text alone. Only requests that use this drafter can
use such an entry, as with pages that hold the drafter's keys and values.

Source: the second rule is from SGLang's radix cache, which calls such a border a branching point.
In vLLM, prompt chunks end at borders as well.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specops.engine.memory.kv_cache import DraftKv, PagePool, Prefix
from specops.engine.models.kv import CacheCapacity, KvCache

_NO_CAPACITY = CacheCapacity(0, 0)

_Key = tuple[Prefix, str]  # the string names a drafter with states; empty: none


@dataclass(slots=True)
class _Running:
    """Progress of a request with a slot."""

    owner: str  # name of its drafter if that has states, else empty
    borders: Sequence[int]  # token counts of its prompt at which to store states, ascending
    end: int  # the last border, or the first token that runs if that is later
    waiting: tuple[int, int] | None = None  # reserved entry: token count and number
    decoded: _Key | None = None  # key of the state of decoded text, which the next one replaces


class PrefixStates:
    """LRU cache of the states of prefixes; an entry holds the states of all layers.

    If the model has no states, or no entries are configured, pages are usable without states.

    An entry is free, belongs to a prefix, or waits until the prefix's last page is registered: some
    drafters complete a page later than the model does. Prefixes whose pages were evicted are never
    found again, so their entries are evicted first, followed by the least recently used ones.

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
        # Caches that hold states of a request, by the name of its drafter with states.
        self._caches: dict[str, Sequence[KvCache]] = {"": ()}
        if capacity.num_prefix_states:
            shared = (target,) if target is not None and target.prefix_states else ()
            self._caches = {"": shared}
            self._caches |= {name: (*shared, cache) for name, cache in (drafters or {}).items()}
        # Slots hold the states of this many positions before the last row.
        self._num_drafts = capacity.num_drafts
        # A chunk may end this many tokens after its last border.
        self._slack = min(capacity.num_drafts, pool.page_size - 1)
        self._free = list(range(capacity.num_prefix_states - 1, -1, -1))
        self._entry_of: OrderedDict[_Key, int] = OrderedDict()  # least recently used first
        self._running: dict[int, _Running] = {}  # by slot

    def release_unusable(self, pages: list[int], draft_kv: DraftKv | None) -> int:
        """Release the cached pages that a request cannot use because states are missing.

        Args:
            pages: pages from `PagePool.match_prefix`; pages after the last one with states are
                removed from the list.
            draft_kv: draft KV of the request.

        Returns:
            Number of tokens on all pages that were passed.
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
            pages: the request's cached pages, after `release_unusable`.
            num_cached: number of tokens that `release_unusable` returned.
            num_tokens: number of tokens of the request.
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
        # The end of the last page that another request with these tokens can use.
        last = (num_tokens - max(1, 0 if draft_kv is None else draft_kv.lookahead)) // size * size
        borders = [one for one in sorted({num_cached, last}) if one > begin]
        self._running[slot] = _Running(owner, borders, max(last, begin))

    def chunk(self, slot: int, begin: int, rows: int) -> int:
        """Return how many of `rows` prompt rows to run in a step, so that it ends at a border."""
        progress = self._running.get(slot)
        for border in () if progress is None else progress.borders:
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
            pages: pages of the request.
            num_registered: number of leading pages that are registered.
            num_computed: number of committed tokens whose rows are computed.
            num_drafted: number of tokens whose draft KV is final.
            begin: position of the request's first row in the step.
            num_rows: number of the request's rows in the step, including rejected drafts.
        """
        progress = self._running.get(slot)
        if progress is None:
            return
        self._assign_waiting(pages, num_registered, progress)
        size = self._pool.page_size
        border = (min(num_computed, num_drafted) if progress.owner else num_computed) // size * size
        is_useful = border in progress.borders or border > progress.end
        # Only states that this step wrote are valid: rejected rows may have overwritten earlier
        # ones.
        if not is_useful or not begin < border or begin + num_rows > border + self._num_drafts:
            return
        entry = self._entry_to_overwrite(progress)
        if entry is not None:
            progress.waiting = border, entry
            for cache in self._caches[progress.owner]:
                cache.keep_states(slot, border, entry)
            self._assign_waiting(pages, num_registered, progress)

    def entry_of(self, pages: Sequence[int], draft_kv: DraftKv | None) -> int | None:
        """Return the entry with the states at the end of these pages, or None."""
        return self._entry_of.get(self._key(pages[-1], self._owner(draft_kv))) if pages else None

    def new_entry(self, pages: Sequence[int], draft_kv: DraftKv | None) -> int | None:
        """Reserve an entry for the states at the end of registered pages; the caller writes it.

        Returns:
            The entry; None if these states are stored already, if no states are needed, or if
            running requests have reserved all entries.
        """
        owner = self._owner(draft_kv)
        if not self._caches[owner] or not pages or self.entry_of(pages, draft_kv) is not None:
            return None
        entry = self._free_entry()
        if entry is not None:
            self._entry_of[self._key(pages[-1], owner)] = entry
        return entry

    def leave(self, slot: int) -> None:
        """Forget the request of a slot, and free the entry that it has reserved."""
        progress = self._running.pop(slot, None)
        if progress is not None and progress.waiting is not None:
            self._free.append(progress.waiting[1])

    def _owner(self, draft_kv: DraftKv | None) -> str:
        """Return the name of a request's drafter if the drafter has states, else ""."""
        return "" if draft_kv is None or draft_kv.owner not in self._caches else draft_kv.owner

    def _key(self, page: int, owner: str) -> _Key:
        return self._pool.prefix_of(page), owner

    def _assign_waiting(
        self, pages: Sequence[int], num_registered: int, progress: _Running
    ) -> None:
        """Assign a request's reserved entry to its prefix once the prefix's page is registered."""
        if progress.waiting is None:
            return
        border, entry = progress.waiting
        index = border // self._pool.page_size
        if index > num_registered:
            return
        progress.waiting = progress.decoded = None
        key = self._key(pages[index - 1], progress.owner)
        if key in self._entry_of:  # another request stored the same states
            self._entry_of.move_to_end(key)
            self._free.append(entry)
            return
        self._entry_of[key] = entry
        if border > progress.end:
            progress.decoded = key

    def _entry_to_overwrite(self, progress: _Running) -> int | None:
        """Return an entry to overwrite; None if other requests have reserved all entries."""
        if progress.waiting is not None:
            return progress.waiting[1]
        if progress.decoded is not None and progress.decoded in self._entry_of:
            return self._entry_of.pop(progress.decoded)
        return self._free_entry()

    def _free_entry(self) -> int | None:
        """Return a free entry, evicting one if needed; None if requests have reserved all."""
        if self._free:
            return self._free.pop()
        if not self._entry_of:
            return None
        unusable = (key for key in self._entry_of if not key[0].pages)
        return self._entry_of.pop(next(unusable, next(iter(self._entry_of))))
