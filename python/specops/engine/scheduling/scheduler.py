# SPDX-License-Identifier: Apache-2.0
"""Scheduler: plans the rows of the next step, verification rows first, then prefill chunks.

Scheduling only decides when a token is computed. It never changes a result, because a row has the
same bits in any batch. The scheduler reads requests and pages and returns a plan; it calls no other
part of the engine.
"""

from collections.abc import Callable, Set
from itertools import chain

from specops.api.config import EngineConfig
from specops.engine.memory.kv_cache import PagePool
from specops.engine.models import PrefixStates
from specops.engine.plan import Plan
from specops.engine.request import Request
from specops.engine.scheduling.decode_rows import plan_decode_rows
from specops.engine.scheduling.draft_pages import reserve_draft_pages
from specops.engine.scheduling.prompt_rows import PROMPT_ROWS_BESIDE, plan_prompt_rows
from specops.engine.scheduling.slots import Slots
from specops.engine.sharing.fair_scheduling import Demand, select_decoding
from specops.engine.sharing.grammar_scheduling import GrammarScheduler
from specops.engine.sharing.prefixes import PrefixFinder
from specops.engine.sharing.prompt_budgets import client_of
from specops.engine.sharing.row_costs import RowCosts


class Scheduler(Slots):
    """Scheduler that holds the waiting and the running requests and plans steps.

    Args:
        pool: the page pool.
        config: the engine's configuration: slots, and rows and drafts of a step.
        states: states of cached prefixes; None if the model has no states.
        free_rows: number of rows that hardly prolong a step; None: a step is never shortened in
            favor of a client with few rows.
        prefix_finder: finder of prefixes that requests of a step share; None: share no attention
            work.
        costs: costs of the rows of a step; by default a step costs as much as `free_rows` rows.

    Attributes:
        costs: the argument; the engine may replace it by measured costs.
    """

    def __init__(
        self,
        pool: PagePool,
        config: EngineConfig,
        states: PrefixStates | None = None,
        free_rows: int | None = None,
        prefix_finder: PrefixFinder | None = None,
        costs: RowCosts | None = None,
    ) -> None:
        super().__init__(pool, config.max_num_seqs, states)
        self._max_rows = self._max_drafts = config.max_num_batched_tokens
        if (most := config.speculative_config.max_total_draft_tokens) is not None:
            self._max_drafts = min(self._max_rows, most)
        self._free_rows = free_rows
        self.costs = costs or RowCosts(free_rows or 0)
        self._prefix_finder = prefix_finder
        self._num_steps = 0
        self._turns: Set[Request] | None = None  # requests that decode next; None: all
        self._max_rows_beside: int | None = None  # limit on a request's rows in the next step
        self._grammar_scheduler = GrammarScheduler()

    def decoding(
        self, num_proposed: Callable[[Request], int] = lambda request: 0
    ) -> tuple[list[Request], int]:
        """Decide which requests decode in the next step.

        Args:
            num_proposed: returns the number of drafts proposed for a request.

        Returns:
            The requests that decode in the step, and the maximum number of drafts of one request.
        """
        decoding: list[Request] = []
        prompts: list[Request] = []
        for request in self.running:
            (decoding if request.is_decoding else prompts).append(request)
        late = self._grammar_scheduler.requests_to_skip(decoding, bool(prompts))
        if late:
            decoding = [request for request in decoding if request not in late]
        self._turns = set(decoding) if late else None
        self._max_rows_beside = None
        if self._free_rows is not None and len(decoding) > 1:
            if len({client_of(request) for request in decoding}) > 1:
                self._max_rows_beside = PROMPT_ROWS_BESIDE * self._free_rows
            demands = [
                Demand(request, 1 + self._num_drafts(request, num_proposed(request)))
                for request in decoding
            ]
            of_prompts = [
                Demand(request, len(request.token_ids) - request.num_computed)
                for request in chain(prompts, self.newcomers())
            ]
            turns = select_decoding(demands, self._max_rows, self._free_rows, of_prompts)
            if turns is not None:
                self._turns = turns
                decoding = [request for request in decoding if request in turns]
        return decoding, min(self._max_rows - len(decoding), self._max_drafts)

    def _num_drafts(self, request: Request, count: int) -> int:
        """Return how many of `count` drafts a request may verify beside those of other clients."""
        if self._max_rows_beside is None or not request.speculative.has_exact_verification:
            return count
        return min(count, self._max_rows_beside - 1)

    def schedule(self) -> Plan:
        """Plan one step.

        Each request selected by `decoding` verifies its first `num_drafts` proposals, and may
        propose up to `draft_limit` drafts for the next step. The total number of verified drafts is
        within the limit that `decoding` returned.
        """
        plan = Plan()
        turns, self._turns = self._turns, None
        self._num_steps += 1
        self.take_back()
        plan_decode_rows(plan, self, turns, self._num_drafts, self._grammar_scheduler)
        plan_prompt_rows(plan, self, self._max_rows, self._free_rows, self.costs)
        reserve_draft_pages(plan, self, self._grammar_scheduler)
        for part in plan.parts:
            part.request.placement.last_step = self._num_steps
        if self._prefix_finder is not None:
            self._prefix_finder.arrange(plan)
        return plan

    def note_step(self, plan: Plan, seconds: float) -> None:
        """Record the duration of a step whose tokens are committed."""
        self._grammar_scheduler.note(plan, seconds)
