# SPDX-License-Identifier: Apache-2.0
"""The protocols between the engine and whatever proposes draft tokens.

A drafter sees requests by slot, and may keep state per slot between `start` and `stop`. Most draft
for a step at the end of the one before, on the device: a step's results bring the next one's
drafts. A host drafter does so once these results are read. Proposals are only ever proposals: no
drafter can change a token that is emitted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specops.engine.request import Request


@dataclass(frozen=True, kw_only=True)
class TargetRows:
    """The target's step, for drafters that run rows of their own behind it.

    Of `batching`: qo_indptr, kv_lens, kv_indptr and kv_indices are the step's own; redraft_lens is
    as `prepare_draft_batch` has it.
    """

    hidden: Tensor  # [rows, hidden_size], the states after the final norm
    slots: Tensor  # int32 [batch]; -1: a request of another method
    drafting_slots: Tensor  # int32 [batch]; -1: or one whose drafter has a rest
    redraft_lens: Tensor  # int32 [batch]
    qo_indptr: Tensor  # int32 [batch + 1]
    kv_lens: Tensor  # int32 [batch]
    kv_indptr: Tensor  # int32 [batch + 1]
    kv_indices: Tensor  # int32 [pages]
    module_kv_indptr: Tensor  # int32 [batch + 1]; as kv_indptr, without the pages that are skipped
    skipped: Tensor | None  # int32 [batch], positions on them; None: no request skips any
    max_continued_drafts: Tensor  # int32 [slots]; > 0: n-grams continue the drafts up to so many
    total_rows: int  # most rows of the first pass; 0: the drafter has a rest
    # As `sampling.sample` has them; None: all drafts are the likeliest tokens.
    choosing: Mapping[str, Tensor] | None
    # int32 [batch], 0 or 1; None: no request. Drafts are drawn with numbers of their own, not with
    # those that the target will draw with; and these are anchored, as BLOCK wants them.
    has_own_numbers: Tensor | None
    has_anchors: Tensor | None
    workspace: Tensor | None  # float32, for attention
    sums: Tensor | None  # float32, for projections


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
    # int32 [slots]: so many drafts are there already, and are to be continued; None: none.
    num_given_drafts: Tensor | None = None
    target: TargetRows | None = None  # for drafters that ask for it


class Drafter(Protocol):
    """Proposes draft tokens for the requests of one method."""

    def start(self, request: Request) -> bool:
        """A request got its slot (again, after a preemption).

        Returns:
            Whether memory has moved, so that steps made so far must be made anew.
        """

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

    def extend(self, request: Request, token_ids: Sequence[int]) -> None:
        """Takes in what a request with a slot emitted while there was nothing to draft."""

    def propose(self, batch: HostDraftBatch) -> None:
        """Takes in what a step emitted, and fills the drafts of `batch`."""

    def stop(self, request: Request) -> None:
        """A request gave its slot back; unless it leaves, it will come back."""

    def leave(self, request: Request) -> None:
        """A request finished or was aborted; it need not have been here."""
