# SPDX-License-Identifier: Apache-2.0
"""The pass that lends trees of drafts the pages that all their chains but the first need."""

from specops.batching import num_spare_pages
from specops.engine.draft_trees import first_chain
from specops.engine.plan import Plan
from specops.engine.scheduling.slots import Slots


def lend_tree_pages(plan: Plan, slots: Slots) -> None:
    """Lends pages for the step; a tree for which there are none is verified as its first chain.

    So are all trees beside a request whose drafts cannot be verified in a step of trees.
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
        pages = slots.lend(count) if may_be_trees else None
        if pages is None:
            part.draft_parents, part.num_drafts = None, first_chain(parents)
            part.num_rows = 1 + part.num_drafts
        else:
            part.spare_pages = pages
