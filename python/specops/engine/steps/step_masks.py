# SPDX-License-Identifier: Apache-2.0
"""The token masks of steps in which some output is constrained: their number, and what they allow.

Without such a request a step has none, and allowed tokens are a table (`slot_tables.py`). With one,
every row that may not choose freely has a mask among the step's inputs.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from specops.engine.plan import Plan, Scheduled
from specops.engine.request import Request
from specops.engine.steps.slot_tables import token_mask
from specops.engine.structured import MaskFiller, MaskRows

Drafts = Callable[[Request], NDArray[np.int32]]


class StepMasks:
    """Counts and fills the masks of an engine's steps.

    Args:
        vocab_size: of the model.
        num_threads: that compute masks.
    """

    def __init__(self, vocab_size: int, num_threads: int) -> None:
        self._vocab_size, self._num_threads = vocab_size, num_threads
        self._filler: MaskFiller | None = None

    def num_rows(self, parts: Sequence[Scheduled]) -> int:
        """How many masks a step needs; 0 where no output is constrained."""
        rows, is_constrained = 0, False
        for part in parts:
            request = part.request
            if not part.emits:
                continue
            if request.grammar is not None:
                is_constrained = True
                rows += 1 + part.num_drafts
            elif request.params.allowed_token_ids is not None:
                rows += 1
        return rows if is_constrained else 0

    def fill(
        self,
        plan: Plan,
        drafts_of: Drafts,
        masks: NDArray[np.int32],
        indices: NDArray[np.int32],
    ) -> None:
        """Fills the masks of a step that has some; a request whose own cannot be filled fails.

        Args:
            plan: of the step.
            drafts_of: the drafts that a request verifies.
            masks: int32 [masks, ceil(vocab_size / 32)]; written.
            indices: int32 [rows with logits], -1; written where a row has a mask.
        """
        wanted: list[tuple[Request, MaskRows]] = []
        tables: list[tuple[int, Request]] = []
        row = count = 0
        for part in plan.parts:
            request, rows = part.request, 1 + part.num_drafts
            if not part.emits:
                continue
            if request.grammar is not None:
                wanted.append((request, _rows_of(part, count, drafts_of)))
                indices[row : row + rows] = range(count, count + rows)
                count += rows
            elif request.params.allowed_token_ids is not None:
                tables.append((count, request))
                indices[row : row + rows] = count
                count += 1
            row += rows
        if self._filler is None:
            self._filler = MaskFiller(self._num_threads)
        try:
            self._filler.fill([one for _, one in wanted], masks)
        except Exception:  # whose? Each is looked at alone, from where its text stands
            for request, one in wanted:
                try:
                    one.state.settle()
                    one.state.restart()
                    self._filler.fill([one], masks)
                except Exception as error:
                    plan.fail(request, error)
        for place, request in tables:
            masks[place] = token_mask(request.params.allowed_token_ids or (), self._vocab_size)


def _rows_of(part: Scheduled, first: int, drafts_of: Drafts) -> MaskRows:
    """What a request's masks are of."""
    request = part.request
    assert request.grammar is not None
    drafts = drafts_of(request)[: part.num_drafts].tolist() if part.num_drafts else []
    # While a thinking is being ended by force, what is sampled is replaced.
    opening = -1 if request.has_grammar_begun else request.think_end_token_id
    return MaskRows(request.grammar, first, drafts, part.draft_parents, opening)
