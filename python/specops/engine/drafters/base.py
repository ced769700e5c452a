# SPDX-License-Identifier: Apache-2.0
"""The protocols between the engine and whatever proposes draft tokens.

A drafter sees requests by slot, and may keep state per slot between `start` and `stop`. Most draft
for a step at the end of the one before, on the device: a step's results bring the next one's
drafts. A host drafter does so once these results are read. Proposals are only ever proposals: no
drafter can change a token that is emitted.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
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


@dataclass(slots=True)
class HostDraftBatch:
    """What a step emitted: a row per request of the step, whatever its method.

    Rows that this drafter has nothing to do with are to be left without drafts. Tensors are int32,
    on the host. `draft_token_ids` (-1 padded) and `num_draft_tokens` are this drafter's own, for it
    to fill.
    """

    slots: NDArray[np.int32]  # [batch]
    token_ids: Tensor  # [batch, w]; a row begins with what was emitted
    num_tokens: Tensor  # [batch], so many
    max_draft_tokens: Tensor  # [batch]
    draft_token_ids: Tensor  # [batch, k]
    num_draft_tokens: Tensor  # [batch], those given not among them
    # [batch]: so many drafts stand in the row already, and are to be continued; None: none.
    num_given_drafts: Tensor | None = None


class HostDrafter(Protocol):
    """Proposes draft tokens on the host; it is told when a request is gone for good."""

    def start(self, request: Request) -> None:
        """A request got its slot; after a preemption it has been here before, and goes on."""

    def propose(self, batch: HostDraftBatch) -> None:
        """Takes in what a step emitted, and fills the drafts of `batch`."""

    def stop(self, request: Request) -> None:
        """A request gave its slot back; unless it leaves, it will come back."""

    def leave(self, request: Request) -> None:
        """A request finished or was aborted; it need not have been here."""
