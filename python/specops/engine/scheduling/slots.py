# SPDX-License-Identifier: Apache-2.0
"""Slots, the waiting queue, and the pages of running requests."""

import time
from array import array
from collections import deque

from specops.engine.memory.kv_cache import PagePool
from specops.engine.models import PrefixStates
from specops.engine.plan import Part, Plan
from specops.engine.request import Request
from specops.engine.sharing.fair_slots import FairSlots


class Slots:
    """Allocator of slots and pages; writes the placement of requests.

    Args:
        pool: the page pool.
        max_num_seqs: number of slots.
        states: states of cached prefixes; None if the model has no states.

    Attributes:
        waiting: requests without a slot; preempted requests first, then in order of arrival.
        running: requests with a slot, in order of arrival.
        at: the running requests by slot.
        fair: fair order of requests: which one gets a slot next, and which one is preempted.
        states: states of cached prefixes.
    """

    def __init__(
        self, pool: PagePool, max_num_seqs: int, states: PrefixStates | None = None
    ) -> None:
        self.pool, self.states = pool, states or PrefixStates(pool)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.at: dict[int, Request] = {}
        self.fair = FairSlots(self.running)
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        # Number of times that a request got or gave up a slot. `_settled_at` is its value, and the
        # queue length, when no waiting request could get a slot.
        self._num_changes = 0
        self._settled_at = (-1, -1)
        # Requests with pages reserved for drafts of one step, and the number of their other pages.
        self._borrowers: list[tuple[Request, int]] = []

    @property
    def has_free_slot(self) -> bool:
        """True if a slot is free without preempting a request."""
        return bool(self._free_slots)

    @property
    def may_start(self) -> bool:
        """True if a waiting request may get a slot: something has changed since `settle`."""
        return bool(self.waiting) and self._settled_at != (self._num_changes, len(self.waiting))

    def settle(self) -> None:
        """Record that no waiting request can get a slot until something changes."""
        self._settled_at = (self._num_changes, len(self.waiting))

    def newcomers(self) -> list[Request]:
        """Return the requests to start next if pages suffice, at most one per client."""
        if not self.may_start:
            return []
        candidates = self.fair.in_order(self.waiting)
        if self._free_slots:
            return candidates[: len(self._free_slots)]
        return [one for one in candidates if self.fair.victim(one) is not None][:1]

    def start(self, request: Request, plan: Plan) -> bool:
        """Give a waiting request a slot and its cached prefix; return False if pages are short."""
        hits = self.pool.match_prefix(
            request.token_ids, request.num_reusable, request.drafts.kv, request.salt
        )
        num_cached = self.states.release_unusable(hits, request.drafts.kv)
        needed = self.num_pages_for(len(request.token_ids)) - len(hits)
        if needed > self.pool.num_available:
            self.pool.release(hits)
            return False
        placement = request.placement
        placement.pages = array("i", hits)
        placement.num_registered_pages = len(hits)
        placement.num_computed = len(hits) * self.pool.page_size
        request.drafts.num_final_kv = placement.num_computed
        if not placement.was_preempted:
            placement.num_cached_tokens = placement.num_computed
            placement.queue_seconds = time.perf_counter() - request.added_at
        placement.slot = self._free_slots.pop()
        self.waiting.remove(request)
        self.running.append(request)
        self.running.sort(key=lambda one: one.arrival)
        self.at[request.slot] = request
        self.states.start(request.slot, hits, num_cached, len(request.token_ids), request.drafts.kv)
        self.fair.started(request)
        self._num_changes += 1
        plan.started.append(request)
        return True

    def has_pages(self, request: Request, rows: int) -> bool:
        """Allocate pages for `rows` more rows; return False if too few are available."""
        needed = self.num_pages_for(request.num_computed + rows) - len(request.pages)
        if needed <= 0:
            return True
        pages = self.pool.allocate(needed)
        if pages is None:
            return False
        request.pages.extend(pages)
        return True

    def make_room(self, request: Request, rows: int, plan: Plan) -> bool:
        """Allocate pages, preempting others if needed; return False if `request` was preempted."""
        while not self.has_pages(request, rows):
            victim = self.fair.last()
            self.preempt(victim, plan)
            if victim is request:
                return False
        return True

    def preempt(self, request: Request, plan: Plan) -> None:
        """Take slot and pages from a request, and put it first in the waiting queue."""
        plan.stopped.append((request, request.slot))
        # The request may be planned already: an earlier arrival's chunk may need its pages.
        plan.parts[:] = [part for part in plan.parts if part.request is not request]
        if request in plan.paused:
            plan.paused.remove(request)
        self._give_back(request)
        request.placement.num_computed = request.drafts.num_final_kv = 0
        request.placement.was_preempted = True
        self.waiting.appendleft(request)

    def reserve_behind(self, request: Request, num_tokens: int) -> None:
        """Reserve pages for up to `num_tokens` tokens of a request, as far as pages are free."""
        missing = self.num_pages_for(num_tokens) - len(request.pages)
        count = min(missing, self.pool.num_available)
        if count > 0:
            self._borrowers.append((request, len(request.pages)))
            request.pages.extend(self.pool.allocate(count) or ())

    def take_back(self) -> None:
        """Release the pages that `reserve_behind` reserved."""
        for request, count in self._borrowers:
            self.pool.release(request.pages[count:])  # empty if the request has been released
            del request.pages[count:]
        self._borrowers.clear()

    def advance(self, request: Request, num_computed: int) -> None:
        """Record the number of tokens whose keys and values are computed."""
        request.placement.num_computed = num_computed

    def register_full_pages(self, part: Part) -> None:
        """Register newly full pages in the prefix cache after a commit, and store prefix states."""
        request, placement = part.request, part.request.placement
        size, complete, draft_kv = self.pool.page_size, request.num_computed, request.drafts.kv
        if draft_kv is not None:
            complete = min(complete, request.drafts.num_final_kv)
        while (end := (placement.num_registered_pages + 1) * size) <= complete:
            index = placement.num_registered_pages
            parent = placement.pages[index - 1] if index else None
            placement.pages[index] = self.pool.register(
                placement.pages[index],
                parent,
                request.token_ids[end - size : end],
                None if draft_kv is None else draft_kv.key(request.token_ids, end),
                request.salt,
            )
            placement.num_registered_pages += 1
        known = placement.pages, placement.num_registered_pages, placement.num_computed
        self.states.keep(
            request.slot, *known, request.drafts.num_final_kv, part.begin, part.num_rows
        )

    def finish(self, request: Request) -> None:
        """Remove a running or waiting request, and release its slot and pages."""
        if request.slot >= 0:
            self._give_back(request)
        elif request in self.waiting:
            self.waiting.remove(request)
            self._num_changes += 1

    def _give_back(self, request: Request) -> None:
        self.running.remove(request)
        self.pool.release(request.pages)
        request.placement.pages, request.placement.num_registered_pages = array("i"), 0
        self.states.leave(request.slot)
        self._free_slots.append(request.slot)
        del self.at[request.slot]
        request.placement.slot = -1
        self.fair.stopped(request)
        self._num_changes += 1

    def num_pages_for(self, num_tokens: int) -> int:
        """Return the number of pages that `num_tokens` tokens need."""
        return -(-num_tokens // self.pool.page_size)
