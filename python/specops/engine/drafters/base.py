# SPDX-License-Identifier: Apache-2.0
"""The protocol between the engine and whatever proposes draft tokens.

A drafter sees requests by slot, and may keep state per slot between `start` and `stop`. It drafts
for a step at the end of the one before, on the device: a step's results bring the next one's
drafts. Proposals are only ever proposals: no drafter can change a token that is emitted.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from specops.engine.request import Request


@dataclass(frozen=True)
class DraftBatch:
    """Per-slot tensors; slots that this drafter has nothing to do with have max_draft_tokens 0.

    `draft_token_ids` (-1 padded) and `num_draft_tokens` are this drafter's own, for it to fill.
    Tree drafts will add `parents` beside them.
    """

    token_ids: Tensor  # int32 [slots, max_model_len], prompt and output of each request
    lens: Tensor  # int32 [slots], how many of them are there
    max_draft_tokens: Tensor  # int32 [slots]
    draft_token_ids: Tensor  # int32 [slots, k]
    num_draft_tokens: Tensor  # int32 [slots]


class Drafter(Protocol):
    """Proposes draft tokens for the requests of one method."""

    def start(self, request: Request) -> None:
        """A request got its slot (again, after a preemption)."""

    def propose(self, batch: DraftBatch) -> None:
        """Fills the drafts of `batch`; may be captured once and replayed on other numbers."""

    def stop(self, request: Request) -> None:
        """A request gave its slot back: finished, aborted or preempted."""
