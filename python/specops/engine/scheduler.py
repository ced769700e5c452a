# SPDX-License-Identifier: Apache-2.0
"""Decides which rows the next step computes: verification rows first, then prefill chunks.

Scheduling can never change a result, because every op is row-identical; it only decides when.
"""

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specops.engine.kv_cache import PagePool
from specops.engine.request import Request


@dataclass
class Scheduled:
    """A request's part in one step: rows for token_ids[num_computed:] and then its drafts."""

    request: Request
    num_rows: int
    num_drafts: int  # of these rows, the last num_drafts hold draft tokens
    emits: bool  # False for a prefill chunk that does not end the known tokens


class Scheduler:
    """Holds the waiting and the running requests and hands out slots and pages."""

    def __init__(
        self,
        pool: PagePool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_total_draft_tokens: int | None = None,
    ) -> None:
        self.pool = pool
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of arrival
        self.num_preemptions = 0
        self._max_rows = max_num_batched_tokens
        self._max_drafts = max_num_batched_tokens
        if max_total_draft_tokens is not None:
            self._max_drafts = min(self._max_drafts, max_total_draft_tokens)
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._plan: list[Scheduled] = []  # of the step being planned
        self._on_stop: Callable[[Request], None] = lambda request: None

    def schedule(
        self,
        num_drafts: Callable[[Sequence[Request], int], Sequence[int]],
        on_start: Callable[[Request], None],
        on_stop: Callable[[Request], None],
    ) -> list[Scheduled]:
        """Plans one step.

        Args:
            num_drafts: how many drafts each of the decoding requests is to verify, given how many
                rows there are beside one for each.
            on_start: called when a request gets a slot.
            on_stop: called when a request loses its slot to preemption, before it does.
        """
        plan = self._plan = []
        self._on_stop = on_stop
        budget = self._max_rows
        # Verification rows first, in order of arrival, so that prefill never delays them.
        decoding = [request for request in self.running if request.is_decoding]
        room = min(budget - len(decoding), self._max_drafts)
        wanted = num_drafts(decoding, room) if decoding else ()
        for request, drafts in zip(decoding, wanted, strict=True):
            if request.slot < 0:
                continue  # preempted by an earlier one in this very loop
            if not self._has_pages(request, 1 + drafts):
                drafts = 0  # rather no drafts than another's preemption
            if self._make_room(request, 1):
                plan.append(Scheduled(request, 1 + drafts, drafts, emits=True))
                budget -= 1 + drafts
        for request in [r for r in self.running if not r.is_decoding]:
            if request.slot >= 0 and budget > 0:
                budget -= self._plan_chunk(request, budget)
        while self.waiting and budget > 0 and self._free_slots:
            request = self.waiting[0]
            if not self._admit(request):
                break
            self.waiting.popleft()
            on_start(request)
            budget -= self._plan_chunk(request, budget)
        return plan

    def finish(self, request: Request) -> None:
        """Takes a request out, wherever it is, and releases its slot and pages."""
        if request.slot >= 0:
            self.running.remove(request)
            self._give_back(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def register_full_pages(self, request: Request) -> None:
        """Makes the request's newly completed pages findable for later prompts."""
        size = self.pool.page_size
        while (request.num_registered_pages + 1) * size <= request.num_computed:
            index = request.num_registered_pages
            parent = request.pages[index - 1] if index else None
            tokens = request.token_ids[index * size : (index + 1) * size]
            request.pages[index] = self.pool.register(request.pages[index], parent, tokens)
            request.num_registered_pages += 1

    def _plan_chunk(self, request: Request, budget: int) -> int:
        missing = len(request.token_ids) - request.num_computed
        rows = min(missing, budget)
        if not self._make_room(request, rows):
            return 0
        self._plan.append(Scheduled(request, rows, 0, emits=rows == missing))
        return rows

    def _admit(self, request: Request) -> bool:
        """Gives a waiting request a slot and its cached prefix, if all its tokens find room."""
        hits = self.pool.match_prefix(request.token_ids, len(request.token_ids) - 1)
        needed = self._pages_for(len(request.token_ids)) - len(hits)
        if needed > self.pool.num_available:
            self.pool.release(hits)
            return False
        request.pages = array("i", hits)
        request.num_registered_pages = len(hits)
        request.num_computed = len(hits) * self.pool.page_size
        if not request.was_preempted:
            request.num_cached_tokens = request.num_computed
        request.slot = self._free_slots.pop()
        self.running.append(request)
        self.running.sort(key=lambda r: r.arrival)
        return True

    def _has_pages(self, request: Request, rows: int) -> bool:
        needed = self._pages_for(request.num_computed + rows) - len(request.pages)
        if needed <= 0:
            return True
        pages = self.pool.allocate(needed)
        if pages is None:
            return False
        request.pages.extend(pages)
        return True

    def _make_room(self, request: Request, rows: int) -> bool:
        """Finds pages for `rows` more rows, preempting later arrivals; False if it went itself."""
        while not self._has_pages(request, rows):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self._on_stop(request)
        # It may be planned already: an earlier arrival's chunk can need a later one's pages.
        self._plan[:] = [part for part in self._plan if part.request is not request]
        self.running.remove(request)
        self._give_back(request)
        request.num_computed = 0
        request.was_preempted = True
        self.num_preemptions += 1
        self.waiting.appendleft(request)

    def _give_back(self, request: Request) -> None:
        self.pool.release(request.pages)
        request.pages = array("i")
        request.num_registered_pages = 0
        self._free_slots.append(request.slot)
        request.slot = -1

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.page_size)
