# SPDX-License-Identifier: Apache-2.0
"""The token masks of steps in which some output is constrained: their number, and what they allow.

Every row that may not choose freely has a mask among the step's inputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specops.engine.plan import Part, Plan
from specops.engine.structured.masks import MaskFiller, MaskRows
from specops.engine.structured.matching import GrammarState, has_begun

DraftsOf = Callable[[int, int], NDArray[np.int32]]


@dataclass(frozen=True, slots=True)
class TokenRule:
    """What a request's tokens must be; with a grammar, behind its thinking."""

    grammar: GrammarState | None
    allowed_token_ids: Sequence[int] | None
    think_end_token_id: int
    num_injected: int  # tokens that end the thinking by force


class StepMasks:
    """Counts and fills the masks of an engine's steps.

    Args:
        vocab_size: of the model.
        num_threads: that compute masks.
    """

    def __init__(self, vocab_size: int, num_threads: int) -> None:
        self._vocab_size, self._num_threads = vocab_size, num_threads
        # By slot, of those that may not choose freely; and the masks of those without a grammar.
        self._rules: dict[int, TokenRule] = {}
        self._fixed: dict[int, NDArray[np.int32]] = {}
        self._filler: MaskFiller | None = None

    def start(self, slot: int, rule: TokenRule) -> None:
        """Notes what constrains a request that got its slot."""
        self._rules.pop(slot, None)
        if rule.grammar is not None or rule.allowed_token_ids is not None:
            self._rules[slot] = rule
        if rule.allowed_token_ids is not None:
            self._fixed[slot] = token_mask(rule.allowed_token_ids, self._vocab_size)

    def num_rows(self, parts: Sequence[Part]) -> int:
        """How many masks a step needs; 0 where no output is constrained."""
        rows = 0
        for part in parts:
            rule = self._rules.get(part.slot) if part.emits else None
            if rule is not None:
                rows += 1 if rule.grammar is None else 1 + part.num_drafts
        return rows

    def fill(
        self,
        plan: Plan,
        drafts_of: DraftsOf,
        thinking: NDArray[np.int32],
        masks: NDArray[np.int32],
        indices: NDArray[np.int32],
        draft_indices: NDArray[np.int32],
    ) -> None:
        """Fills the masks of a step that has some; a request whose own cannot be filled fails.

        Args:
            plan: of the step.
            drafts_of: the drafts that a slot's request verifies, as many as given.
            thinking: int32 [slots], as `sampling.commit` has `thinking_state`.
            masks: int32 [masks, ceil(vocab_size / 32)]; written.
            indices: int32 [rows with logits], -1; written where a row has a mask.
            draft_indices: int32 [requests], -1; written where the mask of a request is the same in
                every row, and so that of the drafts behind them.
        """
        wanted: list[tuple[str, MaskRows]] = []
        row = count = 0
        for place, part in enumerate(plan.parts):
            if not part.emits:
                continue
            rows, rule = 1 + part.num_drafts, self._rules.get(part.slot)
            if rule is not None and rule.grammar is not None:
                # While a thinking is being ended by force, what is sampled is replaced.
                is_reply = has_begun(int(thinking[part.slot]), rule.num_injected)
                opening = -1 if is_reply else rule.think_end_token_id
                drafts = drafts_of(part.slot, part.num_drafts).tolist() if part.num_drafts else []
                one = MaskRows(rule.grammar, count, drafts, part.draft_parents, opening)
                wanted.append((part.request_id, one))
                indices[row : row + rows] = range(count, count + rows)
                count += rows
            elif rule is not None:
                masks[count] = self._fixed[part.slot]
                indices[row : row + rows] = count
                draft_indices[place] = count
                count += 1
            row += rows
        if not wanted:
            return
        if self._filler is None:
            self._filler = MaskFiller(self._num_threads)
        try:
            self._filler.fill([one for _, one in wanted], masks)
        except Exception:  # whose? Each is looked at alone, from where its text stands
            for request_id, one in wanted:
                try:
                    one.state.settle()
                    one.state.restart()
                    self._filler.fill([one], masks)
                except Exception as error:
                    plan.fail(request_id, error)


def token_mask(token_ids: Sequence[int], vocab_size: int) -> NDArray[np.int32]:
    """One bit per token of a vocabulary, set for these."""
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
