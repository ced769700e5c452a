# SPDX-License-Identifier: Apache-2.0
"""Which prefixes have their states kept, so that another request can go on from their end.

Layers with linear attention have a state of a request, which every token changes. Pages of a prefix
are of use to another request only with the states at their end. Few prefixes have theirs kept, as
one takes as much as thousands of tokens do on pages. They are those that are likely to come again:

- a prompt up to its last whole page, for those that begin with it, or are it;
- what a prompt has in common with those before it, once two of them do;
- a text up to the last page that decoding has filled, for the next turn of a conversation. It gives
  way to that of the next page.

Chunks of prompts end where the first two do. States do not depend on how a text was cut, so a
request has the same bits wherever it goes on.

A drafter whose layers have states of their own keeps them beside the target's, of the same
prefixes: so its drafts, too, are those of the text alone. An entry has both then, and is of use to
requests of this drafter, as pages with its keys and values are.

Source: the second rule is that of SGLang's radix cache for such models, which calls the place a
branching point; vLLM's chunks end at borders as well.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specops.engine.memory.kv_cache import DraftKv, PagePool, Prefix
from specops.engine.models.kv import CacheRoom, KvCache

_NO_ROOM = CacheRoom(0, 0)

_Key = tuple[Prefix, str]  # with the drafter that has states of its own; empty: none


@dataclass(slots=True)
class _Running:
    """A request with a slot."""

    owner: str  # the drafter with states of its own; empty: none
    borders: Sequence[int]  # of its prompt, at which its states are to be kept, ascending
    end: int  # the last of them, or where it begins behind it
    waiting: tuple[int, int] | None = None  # tokens and entry of states whose page is not known yet
    decoded: _Key | None = None  # that gives way to the next one


class KeptStates:
    """Finds, keeps and evicts states of prefixes; an entry has those of all layers.

    Where nothing has states, or no prefix may have them kept, pages are of use as they are.

    An entry is free, a prefix's, or waits for its prefix: some drafters complete a page later than
    the model does. A prefix whose pages are gone is never found again, and the first to give way;
    then it is the one that was not used for longest.

    Args:
        pool: of pages.
        room: of every cache.
        target: has the target's states, if there are any; None: there are none.
        drafters: have those of drafters, by name; None: there are none.
    """

    def __init__(
        self,
        pool: PagePool,
        room: CacheRoom = _NO_ROOM,
        target: KvCache | None = None,
        drafters: Mapping[str, KvCache] | None = None,
    ) -> None:
        self._pool = pool
        # What has states of a request, by its drafter with states of its own.
        self._caches: dict[str, Sequence[KvCache]] = {"": ()}
        if room.num_kept:
            own = (target,) if target is not None and target.kept else ()
            self._caches = {"": own} | {name: (*own, one) for name, one in (drafters or {}).items()}
        # Of so many positions before the last row slots have what is needed.
        self._num_drafts = room.num_drafts
        # A chunk may end so far behind a border, which is the last one then.
        self._slack = min(room.num_drafts, pool.page_size - 1)
        self._free = list(range(room.num_kept - 1, -1, -1))
        self._entry_of: OrderedDict[_Key, int] = OrderedDict()  # least recently used first
        self._running: dict[int, _Running] = {}  # by slot

    def cut(self, pages: list[int], draft_kv: DraftKv | None) -> int:
        """Lets go of the pages, of those that begin a text, that are of no use without states.

        Args:
            pages: as `PagePool.match_prefix` has found them; those behind the last one with states
                are taken out.
            draft_kv: what a request that is to have them keeps on pages for its drafters.

        Returns:
            How many tokens there were pages of.
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
        """Loads what a request goes on from.

        Args:
            slot: that it got.
            pages: that it begins with, as `cut` has left them.
            num_cached: what that has returned.
            num_tokens: that the request has.
            draft_kv: what its drafters keep on pages.
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
        # As far as the next request with these tokens finds pages.
        last = (num_tokens - max(1, 0 if draft_kv is None else draft_kv.lookahead)) // size * size
        borders = [one for one in sorted({num_cached, last}) if one > begin]
        self._running[slot] = _Running(owner, borders, max(last, begin))

    def chunk(self, slot: int, begin: int, rows: int) -> int:
        """How many of so many rows of a prompt a step may have, to end where states are kept."""
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
        """Keeps the states at the last border that a request has come to with a step.

        Args:
            slot: that it has.
            pages: of its text.
            num_registered: of these, from the first on, so many are registered.
            num_computed: tokens whose rows are computed, of those that are committed.
            num_drafted: tokens of which what its drafter keeps is final.
            begin: position of the first row of the step.
            num_rows: of the step; some of the last may be rejected.
        """
        own = self._running.get(slot)
        if own is None:
            return
        self._give(pages, num_registered, own)
        size = self._pool.page_size
        border = (min(num_computed, num_drafted) if own.owner else num_computed) // size * size
        is_wanted = border in own.borders or border > own.end
        # Rejected rows of steps before have overwritten what these left there.
        if not is_wanted or not begin < border or begin + num_rows > border + self._num_drafts:
            return
        entry = self._take(own)
        if entry is not None:
            own.waiting = border, entry
            for cache in self._caches[own.owner]:
                cache.keep_states(slot, border, entry)
            self._give(pages, num_registered, own)

    def entry_of(self, pages: Sequence[int], draft_kv: DraftKv | None) -> int | None:
        """The entry with the states at the end of pages that begin a text; None: there is none."""
        return self._entry_of.get(self._key(pages[-1], self._owner(draft_kv))) if pages else None

    def new_entry(self, pages: Sequence[int], draft_kv: DraftKv | None) -> int | None:
        """An entry for the states at the end of registered pages, which the caller writes.

        None: they are there already, need none, or all entries wait for pages.
        """
        owner = self._owner(draft_kv)
        if not self._caches[owner] or not pages or self.entry_of(pages, draft_kv) is not None:
            return None
        entry = self._evicted()
        if entry is not None:
            self._entry_of[self._key(pages[-1], owner)] = entry
        return entry

    def leave(self, slot: int) -> None:
        """Forgets the request of a slot."""
        own = self._running.pop(slot, None)
        if own is not None and own.waiting is not None:
            self._free.append(own.waiting[1])

    def _owner(self, draft_kv: DraftKv | None) -> str:
        """A request's drafter with states of its own; empty: it has none."""
        return "" if draft_kv is None or draft_kv.owner not in self._caches else draft_kv.owner

    def _key(self, page: int, owner: str) -> _Key:
        return self._pool.prefix_of(page), owner

    def _give(self, pages: Sequence[int], num_registered: int, own: _Running) -> None:
        """Gives a prefix the entry that waits for it, if its page is known by now."""
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

    def _take(self, own: _Running) -> int | None:
        """An entry to overwrite; None: all wait for prefixes of others."""
        if own.waiting is not None:
            return own.waiting[1]
        if own.decoded is not None and own.decoded in self._entry_of:
            return self._entry_of.pop(own.decoded)
        return self._evicted()

    def _evicted(self) -> int | None:
        """An entry that was free, or is now."""
        if self._free:
            return self._free.pop()
        if not self._entry_of:
            return None
        gone = (key for key in self._entry_of if not key[0].pages)
        return self._entry_of.pop(next(gone, next(iter(self._entry_of))))
