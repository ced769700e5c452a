# SPDX-License-Identifier: Apache-2.0
"""Passes that reserve pages for one step: for trees of drafts and for drafters' rows."""

from specops.batching import num_spare_pages
from specops.engine.drafters.trees import first_chain
from specops.engine.plan import Plan
from specops.engine.scheduling.slots import Slots
from specops.engine.sharing.grammar_scheduling import GrammarScheduler


def reserve_tree_pages(plan: Plan, slots: Slots) -> None:
    """Reserve the pages that all chains of a tree but the first need.

    Without pages, only the first chain of a tree is verified. The same holds for every tree in a
    step with a request that cannot be verified beside trees, since one call of `verify` serves the
    whole step.
    """
    trees = [part for part in plan.parts if part.draft_parents is not None]
    if not trees:
        return
    may_be_trees = all(slots.at[part.slot].speculative.verifies_trees for part in plan.parts)
    for part in trees:
        parents = part.draft_parents
        assert parents is not None
        kv_len = part.begin + part.num_rows
        count = num_spare_pages(parents, kv_len, slots.pool.page_size)
        pages = slots.reserve(count) if may_be_trees else None
        if pages is None:
            part.draft_parents, part.num_drafts = None, first_chain(parents)
            part.num_rows = 1 + part.num_drafts
        else:
            part.spare_pages = pages


def reserve_draft_pages(plan: Plan, slots: Slots, grammar_scheduler: GrammarScheduler) -> None:
    """Limit the drafts for the next step, and reserve pages for drafters' rows after the text.

    Drafters that continue past the text write their keys and values to these pages. Only pages that
    the plan leaves free are reserved, and only until the next plan: no request waits, loses drafts
    or is preempted for them.
    """
    for part in plan.parts:
        request = slots.at[part.slot]
        if not part.emits or not request.draft_limit:
            continue
        # This step emits at least one token, and so will the step that verifies the drafts.
        limit = max(min(request.draft_limit, request.draft_room - 1), 0)
        most = grammar_scheduler.most_drafts(request)
        part.draft_limit = limit if most is None else min(limit, most)
        if part.draft_limit and request.draft_kv is not None:
            behind = request.draft_kv.num_rows_behind(part.draft_limit)
            if behind > 0:
                end = part.begin + part.num_rows + behind
                slots.reserve_behind(
                    request, min(end, request.draft_kv.end_of_rows(request.max_len))
                )
