# SPDX-License-Identifier: Apache-2.0
"""The pass that says how much drafters may propose behind a step, and lends them room for it."""

from specops.engine.plan import Plan
from specops.engine.scheduling.slots import Slots
from specops.engine.sharing.grammar_turns import GrammarTurns


def lend_draft_pages(plan: Plan, slots: Slots, grammar_turns: GrammarTurns) -> None:
    """Limits the drafts for the step after this one, and lends pages for rows behind the text.

    Drafters that run on behind it write there. They may have what the plan leaves, and only until
    the next one is made: nobody waits, loses drafts or is preempted for them.
    """
    for part in plan.parts:
        request = slots.at[part.slot]
        if not part.emits or not request.draft_limit:
            continue
        # This step emits a token at least, and so will the one that verifies.
        limit = max(min(request.draft_limit, request.draft_room - 1), 0)
        most = grammar_turns.most_drafts(request)
        part.draft_limit = limit if most is None else min(limit, most)
        if part.draft_limit and request.draft_kv is not None:
            behind = request.draft_kv.num_rows_behind(part.draft_limit)
            if behind > 0:
                end = part.begin + part.num_rows + behind
                slots.lend_behind(request, min(end, request.max_len))
