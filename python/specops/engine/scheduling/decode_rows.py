# SPDX-License-Identifier: Apache-2.0
"""Scheduling pass for decoding requests: a row for the newest token and a row per draft."""

from collections.abc import Callable, Set

from specops.engine.plan import Part, Plan
from specops.engine.request import Request
from specops.engine.scheduling.slots import Slots
from specops.engine.sharing.grammar_scheduling import GrammarScheduler


def plan_decode_rows(
    plan: Plan,
    slots: Slots,
    turns: Set[Request] | None,
    num_drafts: Callable[[Request, int], int],
    grammar_scheduler: GrammarScheduler,
) -> None:
    """Plan the rows of decoding requests in order of arrival, before those of prompts.

    Args:
        plan: the step's plan, empty so far; extended.
        slots: the engine's slots. If pages are short, a later arrival is preempted.
        turns: the requests that decode in this step; None: all of them.
        num_drafts: returns how many of its drafts a request may verify beside other clients.
        grammar_scheduler: limits the drafts of requests with slow grammars.
    """
    for request in [request for request in slots.running if request.is_decoding]:
        if request.slot < 0:
            continue  # preempted by an earlier request in this loop
        if turns is not None and request not in turns:
            plan.paused.append(request)
            continue
        drafts = num_drafts(request, request.drafts.num_selected)
        most = grammar_scheduler.most_drafts(request)
        if most is not None:
            drafts = min(drafts, most)
        if not slots.has_pages(request, 1 + drafts):
            drafts = 0  # drop the drafts rather than preempt another request
            if not slots.make_room(request, 1, plan):
                continue
        plan.parts.append(Part(request, request.num_computed, 1 + drafts, drafts, emits=True))
