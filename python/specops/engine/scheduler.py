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
    # The runner's: drafts to propose for the step after this one, and rows before these that MTP
    # modules run over again; -1: they do not run.
    draft_limit: int = 0
    redraft_len: int = -1


class Scheduler:
    """Holds the waiting and the running requests and hands out slots and pages.

    Args:
        pool: of pages.
        max_num_seqs: slots.
        max_num_batched_tokens: rows of a step.
        max_total_draft_tokens: drafts of a step.
        lookahead: drafting modules, whose keys and values of a token depend on as many that follow.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_total_draft_tokens: int | None = None,
        lookahead: int = 0,
    ) -> None:
        self.pool = pool
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of arrival
        self.num_preemptions = 0
        self._max_rows = max_num_batched_tokens
        self._max_drafts = max_num_batched_tokens
        if max_total_draft_tokens is not None:
            self._max_drafts = min(self._max_drafts, max_total_draft_tokens)
        self._lookahead = lookahead
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._plan: list[Scheduled] = []  # of the step being planned
        # Who got spare pages in it, behind how many pages.
        self._borrowers: list[tuple[Request, int]] = []
        self._on_stop: Callable[[Request], None] = lambda request: None

    def schedule(
        self,
        num_drafts: Callable[[Sequence[Request], int], Sequence[int]],
        draft_limit: Callable[[Request], int],
        on_start: Callable[[Request], None],
        on_stop: Callable[[Request], None],
    ) -> list[Scheduled]:
        """Plans one step.

        Args:
            num_drafts: how many drafts each of the decoding requests is to verify, given how many
                rows there are beside one for each.
            draft_limit: how many drafts a request may get in the step, for the one after it.
            on_start: called when a request gets a slot.
            on_stop: called when a request loses its slot to preemption, before it does.
        """
        plan = self._plan = []
        self._on_stop = on_stop
        self._return_spare_pages()
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
        if self._lookahead:
            self._lend_spare_pages(draft_limit)
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
        size, lookahead = self.pool.page_size, self._lookahead_of(request)
        complete = request.num_computed
        if lookahead:
            # Rows that do not see all before them are nobody else's.
            complete = 0 if request.draft_begin else min(complete, request.num_drafted)
        while (end := (request.num_registered_pages + 1) * size) <= complete:
            index = request.num_registered_pages
            parent = request.pages[index - 1] if index else None
            request.pages[index] = self.pool.register(
                request.pages[index],
                parent,
                request.token_ids[end - size : end],
                request.token_ids[end : end + lookahead] if lookahead else None,
            )
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
        hits = self.pool.match_prefix(
            request.token_ids, len(request.token_ids) - 1, self._lookahead_of(request)
        )
        needed = self._pages_for(len(request.token_ids)) - len(hits)
        if needed > self.pool.num_available:
            self.pool.release(hits)
            return False
        request.pages = array("i", hits)
        request.num_registered_pages = len(hits)
        request.num_computed = request.num_drafted = len(hits) * self.pool.page_size
        request.draft_begin = request.kept_from = 0
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
        request.num_computed = request.num_drafted = 0
        request.was_preempted = True
        self.num_preemptions += 1
        self.waiting.appendleft(request)

    def _give_back(self, request: Request) -> None:
        self.pool.release(request.pages)
        request.pages = array("i")
        request.num_registered_pages = 0
        self._free_slots.append(request.slot)
        request.slot = -1

    def _lookahead_of(self, request: Request) -> int:
        return self._lookahead if request.has_draft_kv else 0

    def _lend_spare_pages(self, draft_limit: Callable[[Request], int]) -> None:
        """Gives modules that draft on from their own drafts room for the rows behind the text.

        They may have what a plan leaves, and only until the next one is made: nobody waits, loses
        drafts or is preempted for them.
        """
        for part in self._plan:
            request = part.request
            if not (part.emits and request.has_draft_kv):
                continue
            # The modules' own rows stand on tokens that are there; passes after those do not.
            passes = min(draft_limit(request), request.speculative.num_model_steps)
            if passes <= self._lookahead:
                continue
            rows = part.num_rows + passes - self._lookahead
            wanted = self._pages_for(min(request.num_computed + rows, request.max_len))
            count = min(wanted - len(request.pages), self.pool.num_available)
            if count > 0:
                self._borrowers.append((request, len(request.pages)))
                request.pages.extend(self.pool.allocate(count) or ())

    def _return_spare_pages(self) -> None:
        """Takes back what was lent."""
        for request, count in self._borrowers:
            self.pool.release(request.pages[count:])  # nothing, if it gave all back since
            del request.pages[count:]
        self._borrowers.clear()

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.page_size)
