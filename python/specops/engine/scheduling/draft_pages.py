# SPDX-License-Identifier: Apache-2.0
"""Scheduling pass that reserves pages for rows of drafters in one step."""

from specops.engine.plan import Plan
from specops.engine.scheduling.slots import Slots
from specops.engine.sharing.grammar_scheduling import GrammarScheduler


def reserve_draft_pages(plan: Plan, slots: Slots, grammar_scheduler: GrammarScheduler) -> None:
    """Limit the drafts for the next step, and reserve pages for drafters' rows after the text.

    Drafters that run past the text write keys and values to these pages. Only pages that the plan
    leaves free are reserved, and only until the next plan. So no request waits, loses drafts or is
    preempted because of them.
    """
    for part in plan.parts:
        request = part.request
        if not part.emits or not request.drafts.limit:
            continue
        # This step emits at least one token, and the step that verifies the drafts emits one more.
        limit = max(min(request.drafts.limit, request.draft_room - 1), 0)
        most = grammar_scheduler.most_drafts(request)
        part.draft_limit = limit if most is None else min(limit, most)
        if part.draft_limit and request.drafts.kv is not None:
            behind = request.drafts.kv.num_rows_behind(part.draft_limit)
            if behind > 0:
                end = part.begin + part.num_rows + behind
                slots.reserve_behind(
                    request, min(end, request.drafts.kv.end_of_rows(request.max_len))
                )
