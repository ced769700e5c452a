# SPDX-License-Identifier: Apache-2.0
"""Token masks of steps with constrained outputs.

Every row whose tokens are constrained has a mask among the step's inputs.
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
    """Constraint on a request's tokens. If it is a grammar, it applies only after the thinking."""

    grammar: GrammarState | None
    allowed_token_ids: Sequence[int] | None
    think_end_token_id: int
    num_injected: int  # number of tokens injected to end the thinking early


class StepMasks:
    """Builder of the token masks of an engine's steps.

    Args:
        vocab_size: the model's vocabulary size.
        num_threads: number of threads that compute masks.
    """

    def __init__(self, vocab_size: int, num_threads: int) -> None:
        self._vocab_size, self._num_threads = vocab_size, num_threads
        # By slot: constraints, and fixed masks of requests with allowed_token_ids.
        self._rules: dict[int, TokenRule] = {}
        self._fixed: dict[int, NDArray[np.int32]] = {}
        self._filler: MaskFiller | None = None

    def start(self, slot: int, rule: TokenRule) -> None:
        """Record the constraint of a request that got its slot."""
        self._rules.pop(slot, None)
        if rule.grammar is not None or rule.allowed_token_ids is not None:
            self._rules[slot] = rule
        if rule.allowed_token_ids is not None:
            self._fixed[slot] = token_mask(rule.allowed_token_ids, self._vocab_size)

    def num_rows(self, parts: Sequence[Part]) -> int:
        """Return the number of masks that a step needs; 0 if no output is constrained."""
        rows = 0
        for part in parts:
            rule = self._rules.get(part.request.slot) if part.emits else None
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
        """Fill the masks of a step. If a request's masks cannot be computed, the request fails.

        Args:
            plan: the step's plan.
            drafts_of: function that returns the drafts to verify, by slot and count.
            thinking: int32 [slots], `thinking_state` of `sampling.commit`.
            masks: int32 [masks, ceil(vocab_size / 32)]; written.
            indices: int32 [rows with logits], filled with -1; set for rows with a mask.
            draft_indices: int32 [requests], filled with -1; set for requests whose mask is the same
                in every row, so that it also applies to the drafts for the next step.
        """
        to_fill: list[tuple[str, MaskRows]] = []
        row = count = 0
        for place, part in enumerate(plan.parts):
            if not part.emits:
                continue
            slot, num_drafts = part.request.slot, part.num_drafts
            rows, rule = 1 + num_drafts, self._rules.get(slot)
            if rule is not None and rule.grammar is not None:
                # While tokens are injected to end the thinking, they replace the sampled tokens
                # anyway.
                is_reply = has_begun(int(thinking[slot]), rule.num_injected)
                opening = -1 if is_reply else rule.think_end_token_id
                drafts = drafts_of(slot, num_drafts).tolist() if num_drafts else []
                one = MaskRows(rule.grammar, count, drafts, opening)
                to_fill.append((part.request.request_id, one))
                indices[row : row + rows] = range(count, count + rows)
                count += rows
            elif rule is not None:
                masks[count] = self._fixed[slot]
                indices[row : row + rows] = count
                draft_indices[place] = count
                count += 1
            row += rows
        if not to_fill:
            return
        if self._filler is None:
            self._filler = MaskFiller(self._num_threads)
        try:
            self._filler.fill([one for _, one in to_fill], masks)
        except Exception:  # retry one by one, to find the failing request
            for request_id, one in to_fill:
                try:
                    one.state.settle()
                    one.state.restart()
                    self._filler.fill([one], masks)
                except Exception as error:
                    plan.fail(request_id, error)


def token_mask(token_ids: Sequence[int], vocab_size: int) -> NDArray[np.int32]:
    """Return a token mask, with one bit per token of the vocabulary, that allows these tokens."""
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
