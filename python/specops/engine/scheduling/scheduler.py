# SPDX-License-Identifier: Apache-2.0
"""Decides which rows the next step computes: verification rows first, then prefill chunks.

Scheduling can never change a result, because every op is row-identical; it only decides when. It
reads requests and pages, and answers with a plan: it asks nobody, and tells nobody.
"""

from array import array
from collections import deque
from collections.abc import Callable, Set
from itertools import chain

from specops.batching import num_spare_pages
from specops.engine.draft_trees import first_chain
from specops.engine.memory.kv_cache import PagePool
from specops.engine.plan import Plan, Scheduled
from specops.engine.request import Request
from specops.engine.scheduling.fairness import Shares
from specops.engine.scheduling.grammar_turns import GrammarTurns
from specops.engine.scheduling.prefixes import PrefixFinder
from specops.engine.scheduling.prompt_shares import PromptShares, client_of
from specops.engine.scheduling.turns import Ask, take_turns

# Rows that prompts have, over those that a step computes in the time that it takes anyway. Beside
# decoding requests of other clients: such a step takes about three times as long as without them,
# and a prompt one and a half times as long as if it had all rows.
_PROMPT_ROWS_BESIDE = 4
# And at most: whoever comes next waits for the end of the step. A prompt is computed as fast in
# steps of so many rows as in longer ones.
_MAX_PROMPT_ROWS = 32


class Scheduler:
    """Holds the waiting and the running requests and hands out slots and pages.

    Args:
        pool: of pages.
        max_num_seqs: slots.
        max_num_batched_tokens: rows of a step.
        max_total_draft_tokens: drafts of a step.
        free_rows: that a step computes in the time that it takes however few it has; None: a step
            is never made shorter for the sake of an owner with few rows.
        prefix_finder: finds what the requests of a step share; None: nobody asks.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_total_draft_tokens: int | None = None,
        free_rows: int | None = None,
        prefix_finder: PrefixFinder | None = None,
    ) -> None:
        self.pool = pool
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of arrival
        self.num_preemptions = 0
        self._max_rows = max_num_batched_tokens
        self._max_drafts = max_num_batched_tokens
        if max_total_draft_tokens is not None:
            self._max_drafts = min(self._max_drafts, max_total_draft_tokens)
        self._free_rows = free_rows
        self._prefix_finder = prefix_finder
        self._num_steps = 0
        self._turns: Set[Request] | None = None  # who decodes in the next step; None: everybody
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._shares = Shares(self.running)
        self.grammar_turns = GrammarTurns()
        # How many had come and gone, and how many waited, when nobody could get a slot any more.
        self._num_changes = 0
        self._settled_at = (-1, -1)
        self._plan = Plan()  # of the step being planned
        # Who got spare pages in it, behind how many pages.
        self._borrowers: list[tuple[Request, int]] = []
        self._pages_of_trees: list[int] = []

    def decoding(
        self, num_proposed: Callable[[Request], int] = lambda request: 0
    ) -> tuple[list[Request], int]:
        """Decides whose turn it is in the next step.

        Args:
            num_proposed: how many drafts there are for a request.

        Returns:
            The requests that decode in it, and how many drafts it has room for.
        """
        decoding = [request for request in self.running if request.is_decoding]
        late = self.grammar_turns.sitting_out(decoding, len(decoding) < len(self.running))
        if late:
            decoding = [request for request in decoding if request not in late]
        self._turns = set(decoding) if late else None
        if self._free_rows is not None and len(decoding) > 1:
            asks = [Ask(request, 1 + num_proposed(request)) for request in decoding]
            prompts = [
                Ask(request, len(request.token_ids) - request.num_computed)
                for request in chain(self._prompts(), self._newcomers())
            ]
            turns = take_turns(asks, self._max_rows, self._free_rows, prompts)
            if turns is not None:
                self._turns = turns
                decoding = [request for request in decoding if request in turns]
        return decoding, min(self._max_rows - len(decoding), self._max_drafts)

    def schedule(self) -> Plan:
        """Plans one step.

        A decoding request whose turn it is verifies its first `num_drafts` proposals, and may
        propose up to its `draft_limit` for the step after this one. Together the drafts fit the
        room of `decoding`.
        """
        plan = self._plan = Plan()
        turns, self._turns = self._turns, None
        self._num_steps += 1
        self._return_spare_pages()
        budget = self._max_rows
        # Verification rows first, in order of arrival, so that prefill never delays them.
        for request in [request for request in self.running if request.is_decoding]:
            if request.slot < 0:
                continue  # preempted by an earlier one in this very loop
            if turns is not None and request not in turns:
                plan.paused.append(request)
                continue
            drafts, parents = request.num_drafts, request.draft_parents
            most = self.grammar_turns.most_drafts(request)
            if most is not None and drafts > most:
                drafts = most if parents is None else min(first_chain(parents), most)
                parents = None
            if not self._has_pages(request, 1 + drafts):
                drafts, parents = 0, None  # rather no drafts than another's preemption
            if self._make_room(request, 1):
                part = Scheduled(request, 1 + drafts, drafts, emits=True, draft_parents=parents)
                plan.parts.append(part)
                budget -= 1 + drafts
        self._plan_prompts(budget)
        for part in plan.parts:
            part.request.last_step = self._num_steps
            if part.emits and part.request.draft_limit:
                # This step emits a token at least, and so will the one that verifies.
                room = part.request.draft_room - 1
                part.draft_limit = max(min(part.request.draft_limit, room), 0)
                most = self.grammar_turns.most_drafts(part.request)
                if most is not None:
                    part.draft_limit = min(part.draft_limit, most)
        self._lend_pages_to_trees()
        self._lend_spare_pages()
        if self._prefix_finder is not None:
            self._prefix_finder.arrange(plan)
        return plan

    def finish(self, request: Request) -> None:
        """Takes a request out, wherever it is, and releases its slot and pages."""
        if request.slot >= 0:
            self.running.remove(request)
            self._give_back(request)
        elif request in self.waiting:
            self.waiting.remove(request)
            self._num_changes += 1

    def register_full_pages(self, request: Request) -> None:
        """Makes the request's newly completed pages findable for later prompts."""
        size, complete, draft_kv = self.pool.page_size, request.num_computed, request.draft_kv
        if draft_kv is not None:
            complete = min(complete, request.num_final_draft_kv)
        while (end := (request.num_registered_pages + 1) * size) <= complete:
            index = request.num_registered_pages
            parent = request.pages[index - 1] if index else None
            request.pages[index] = self.pool.register(
                request.pages[index],
                parent,
                request.token_ids[end - size : end],
                None if draft_kv is None else draft_kv.key(request.token_ids, end),
            )
            request.num_registered_pages += 1

    def _prompts(self) -> list[Request]:
        """Those with a slot whose prompts are not computed yet."""
        return [request for request in self.running if not request.is_decoding]

    def _newcomers(self) -> list[Request]:
        """Those who get a slot in the next step, of each client one, unless pages are short."""
        if not self.waiting or self._is_settled:
            return []
        in_turn = self._shares.in_turn(self.waiting)
        if self._free_slots:
            return in_turn[: len(self._free_slots)]
        return [one for one in in_turn if self._shares.victim(one) is not None][:1]

    @property
    def _is_settled(self) -> bool:
        """Whether nobody who waits can get a slot, since nobody came or went since the last try."""
        return self._settled_at == (self._num_changes, len(self.waiting))

    def _plan_prompts(self, budget: int) -> None:
        """Gives prompts what decoding requests leave, and slots to those who wait."""
        prompts = self._prompts()
        may_start = bool(self.waiting) and not self._is_settled
        if budget <= 0 or not (prompts or may_start):
            return
        free_rows = self._free_rows
        rows = PromptShares(
            chain(prompts, self.waiting if may_start else ()),
            decoding={client_of(part.request) for part in self._plan.parts},
            max_rows=budget if free_rows is None else min(budget, _MAX_PROMPT_ROWS * free_rows),
            max_beside=None if free_rows is None else _PROMPT_ROWS_BESIDE * free_rows,
        )
        for request in prompts:
            if request.slot >= 0 and budget > 0:
                budget -= self._plan_chunk(request, budget, rows)
        if may_start:
            self._admit_waiting(budget, rows)

    def _admit_waiting(self, budget: int, rows: PromptShares) -> None:
        """Gives slots and pages to those who wait, and takes them from owners with too many."""
        plan, shares = self._plan, self._shares
        while self.waiting and budget > 0:
            everybody = shares.in_turn(self.waiting)
            in_turn = [request for request in everybody if rows.left(request)]
            if not in_turn:
                return
            if self._free_slots and self._admit(in_turn[0]):
                self.waiting.remove(in_turn[0])
                plan.started.append(in_turn[0])
                budget -= self._plan_chunk(in_turn[0], budget, rows)
                continue
            victim = next(filter(None, map(shares.victim, in_turn)), None)
            if victim is None:
                # Where there are slots, it is for pages, of which any step may give some back.
                if not self._free_slots and len(in_turn) == len(everybody):
                    self._settled_at = (self._num_changes, len(self.waiting))
                return
            self._preempt(victim)
            budget = self._max_rows - sum(part.num_rows for part in plan.parts)

    def _plan_chunk(self, request: Request, budget: int, shares: PromptShares) -> int:
        missing = len(request.token_ids) - request.num_computed
        rows = min(missing, budget, shares.left(request))
        if rows <= 0 or not self._make_room(request, rows):
            return 0
        shares.take(request, rows)
        emits = rows == missing and not request.has_no_output
        self._plan.parts.append(Scheduled(request, rows, 0, emits=emits))
        return rows

    def _admit(self, request: Request) -> bool:
        """Gives a waiting request a slot and its cached prefix, if all its tokens find room."""
        hits = self.pool.match_prefix(request.token_ids, request.num_reusable, request.draft_kv)
        needed = self._pages_for(len(request.token_ids)) - len(hits)
        if needed > self.pool.num_available:
            self.pool.release(hits)
            return False
        request.pages = array("i", hits)
        request.num_registered_pages = len(hits)
        request.num_computed = request.num_final_draft_kv = len(hits) * self.pool.page_size
        if not request.was_preempted:
            request.num_cached_tokens = request.num_computed
        request.slot = self._free_slots.pop()
        self.running.append(request)
        self.running.sort(key=lambda r: r.arrival)
        self._shares.started(request)
        self._num_changes += 1
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
        """Finds pages for `rows` more rows, preempting others; False if it went itself."""
        while not self._has_pages(request, rows):
            victim = self._shares.last()
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        plan = self._plan
        plan.stopped.append((request, request.slot))
        # It may be planned already: an earlier arrival's chunk can need a later one's pages.
        plan.parts[:] = [part for part in plan.parts if part.request is not request]
        if request in plan.paused:
            plan.paused.remove(request)
        self.running.remove(request)
        self._give_back(request)
        request.num_computed = request.num_final_draft_kv = 0
        request.was_preempted = True
        self.num_preemptions += 1
        self.waiting.appendleft(request)

    def _give_back(self, request: Request) -> None:
        self.pool.release(request.pages)
        request.pages = array("i")
        request.num_registered_pages = 0
        self._free_slots.append(request.slot)
        request.slot = -1
        self._shares.stopped(request)
        self._num_changes += 1

    def _lend_spare_pages(self) -> None:
        """Gives drafters that run on behind the text room for the rows that they write there.

        They may have what a plan leaves, and only until the next one is made: nobody waits, loses
        drafts or is preempted for them.
        """
        for part in self._plan.parts:
            request = part.request
            if not part.draft_limit or request.draft_kv is None:
                continue
            behind = request.draft_kv.num_rows_behind(part.draft_limit)
            if behind <= 0:
                continue
            end = min(request.num_computed + part.num_rows + behind, request.max_len)
            count = min(self._pages_for(end) - len(request.pages), self.pool.num_available)
            if count > 0:
                self._borrowers.append((request, len(request.pages)))
                request.pages.extend(self.pool.allocate(count) or ())

    def _lend_pages_to_trees(self) -> None:
        """Gives trees the pages that their other chains need; without them, the first one is left.

        Nor may all be verified as trees where one request's drafts cannot be.
        """
        parts = self._plan.parts
        if all(part.draft_parents is None for part in parts):
            return
        may_be_trees = all(part.request.speculative.verifies_trees for part in parts)
        for part in parts:
            parents = part.draft_parents
            if parents is None:
                continue
            kv_len = part.request.num_computed + part.num_rows
            count = num_spare_pages(parents, kv_len, self.pool.page_size)
            pages = self.pool.allocate(count) if may_be_trees else None
            if pages is None:
                part.draft_parents, part.num_drafts = None, first_chain(parents)
                part.num_rows = 1 + part.num_drafts
            else:
                part.spare_pages = pages
                self._pages_of_trees += pages

    def return_pages_of_trees(self) -> None:
        """Takes back what only the last step needed."""
        self.pool.release(self._pages_of_trees)
        self._pages_of_trees.clear()

    def _return_spare_pages(self) -> None:
        """Takes back what was lent."""
        self.return_pages_of_trees()
        for request, count in self._borrowers:
            self.pool.release(request.pages[count:])  # nothing, if it gave all back since
            del request.pages[count:]
        self._borrowers.clear()

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.page_size)
