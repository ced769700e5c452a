# SPDX-License-Identifier: Apache-2.0
"""Scheduling pass for prompt chunks in the remaining rows, and for slots of new requests."""

from collections import Counter
from itertools import chain

from specops.engine.plan import Part, Plan
from specops.engine.prompt_logprobs import PromptRows
from specops.engine.request import Request
from specops.engine.scheduling.slots import Slots
from specops.engine.sharing.prompt_budgets import PromptBudgets, client_of
from specops.engine.sharing.row_costs import RowCosts

# Limits on the rows of prompts, as multiples of the rows that hardly prolong a step (free_rows).
# The first limit applies to a step with decoding requests of other clients. The time that those
# requests take limits prompts as well; this constant matters if there are many of them. The second
# limit applies to every step, because a new request waits for the end of the current step. Longer
# steps would not compute prompts faster.
PROMPT_ROWS_BESIDE = 4
MAX_PROMPT_ROWS = 32


def plan_prompt_rows(
    plan: Plan, slots: Slots, max_rows: int, free_rows: int | None, costs: RowCosts
) -> None:
    """Plan the prompt chunks of a step.

    Args:
        plan: the step's plan with its decode rows; extended.
        slots: the engine's slots. Clients with too many slots lose some to other clients.
        max_rows: maximum number of rows of the step.
        free_rows: number of rows that hardly prolong a step; None: prompts may use all rows.
        costs: costs of the rows of a step.
    """
    may_start = slots.may_start
    if len(plan.parts) + len(plan.paused) == len(slots.running) and not may_start:
        return  # all running requests decode
    budget = max_rows - plan.num_rows
    if budget <= 0:
        return
    prompts = [request for request in slots.running if not request.is_decoding]
    decoding: Counter[str] = Counter()
    for part in plan.parts:
        decoding[client_of(part.request)] += part.num_rows
    budgets = PromptBudgets(
        chain(prompts, slots.waiting if may_start else ()),
        costs=costs,
        decoding=decoding,
        max_rows=budget if free_rows is None else min(budget, MAX_PROMPT_ROWS * free_rows),
        max_rows_beside=None if free_rows is None else PROMPT_ROWS_BESIDE * free_rows,
    )
    for request in prompts:
        if request.slot >= 0 and budget > 0:
            budget -= _plan_chunk(plan, slots, request, budget, budgets)
    while may_start and slots.waiting and budget > 0:
        waiting = slots.fair.in_order(slots.waiting)
        candidates = [request for request in waiting if budgets.left(request)]
        if not candidates:
            return
        if slots.has_free_slot and slots.start(candidates[0], plan):
            budget -= _plan_chunk(plan, slots, candidates[0], budget, budgets)
            continue
        victim = next(filter(None, map(slots.fair.victim, candidates)), None)
        if victim is None:
            # If a slot is free, only pages are missing, and any step may release pages.
            if not slots.has_free_slot and len(candidates) == len(waiting):
                slots.settle()
            return
        slots.preempt(victim, plan)
        budget = max_rows - plan.num_rows


def _plan_chunk(
    plan: Plan, slots: Slots, request: Request, budget: int, budgets: PromptBudgets
) -> int:
    """Plan the next rows of a prompt; return their number."""
    missing = len(request.token_ids) - request.num_computed
    rows = min(missing, budget, budgets.left(request))
    rows = slots.states.chunk(request.slot, request.num_computed, rows)
    if rows <= 0 or not slots.make_room(request, rows, plan):
        return 0
    budgets.take(request, rows)
    begin, emits = request.num_computed, rows == missing and not request.has_no_output
    part = Part(request, begin, rows, num_drafts=0, emits=emits)
    if (wanted := request.prompt_logprobs) is not None:
        owner = request.request_id, request.slot
        part.prompt_rows = PromptRows.missing(*owner, wanted, begin, begin + rows)
    plan.parts.append(part)
    return rows
