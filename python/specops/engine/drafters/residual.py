# SPDX-License-Identifier: Apache-2.0
"""Heads of residual blocks as the recurrent drafter runs them: a pass each, over the last rows."""

import torch
from torch import Tensor

from specops import batching
from specops.engine.drafters.base import TargetStep
from specops.engine.drafters.head import DraftRows
from specops.engine.models import ResidualHeads


class ResidualDraftHead:
    """Medusa's or Hydra's heads as a `DraftHead` that keeps nothing.

    Args:
        heads: of a checkpoint.
        slots: requests that run at once.

    Attributes:
        heads: these.
        is_independent: no head reads drafts.
    """

    is_chained = False
    lookahead = 1
    num_likeliest = 8
    taps: tuple[int, ...] = ()
    token_map: Tensor | None = None
    kv_bytes_per_token = 0

    def __init__(self, heads: ResidualHeads, slots: int) -> None:
        self.heads, self._slots = heads, slots
        self.is_independent = not heads.reads_tokens
        # By request of a step.
        self._places = torch.empty((3, slots), dtype=torch.int32, device=heads.device)
        self._same = torch.arange(slots, dtype=torch.int32, device=heads.device)
        self._gathered = torch.empty(0, heads.hidden_size, dtype=heads.dtype, device=heads.device)
        heads.reserve(slots)

    @property
    def num_passes(self) -> int:
        """How many heads there are."""
        return len(self.heads.heads)

    @property
    def hidden_size(self) -> int:
        """Of the target's states."""
        return self.heads.hidden_size

    @property
    def dtype(self) -> torch.dtype:
        """Of the target's states."""
        return self.heads.dtype

    @property
    def vocab_size(self) -> int:
        """The target's."""
        return self.heads.vocab_size

    def reserve(self, rows: int) -> None:
        """Allocates room for the states of rows."""
        self._gathered = self._gathered.new_empty(rows, self.hidden_size)

    def allocate(self, num_pages: int, page_size: int) -> None:
        """Keeps nothing on pages."""

    def workspace_size(self, rows: int, batch: int, pages: int) -> int:
        """Returns 0: there is no attention."""
        return 0

    def sums_size(self, rows: int, outputs: int) -> int:
        """Returns the floats that projections split their sums with."""
        return self.heads.sums_size(outputs)

    def target_states(self, target: TargetStep) -> Tensor:
        """Returns the states after the final norm."""
        return target.hidden

    def forward(self, index: int, rows: DraftRows, states: Tensor) -> tuple[Tensor, Tensor]:
        """Gathers the states that rows read, and the token that head `index` is first to read."""
        gathered = self._gathered[: rows.positions.shape[0]]
        if index == 0:
            batching.gather_output_rows(states, rows.source_rows, out=gathered)
        if self.heads.reads_tokens:
            self.heads.read_token(index, self._token_ids(index, rows))
        return gathered, gathered

    def logits(
        self, index: int, hidden: Tensor, *, out: Tensor | None = None, sums: Tensor | None = None
    ) -> Tensor:
        """Returns the logits of head `index`."""
        return self.heads.logits(index, hidden, out, sums)

    def _token_ids(self, index: int, rows: DraftRows) -> Tensor:
        """The newest token of each request of the step, or draft `index` - 1; 0 of others."""
        size = rows.slots.shape[0]
        slot, position, out = self._places[:, :size]
        torch.clamp(rows.slots, min=0, out=slot)
        torch.index_select(rows.lens, 0, slot, out=position)
        position.add_(index - 1)
        is_nobody = rows.slots < 0
        if index:
            # Of a request that has no such draft, nothing is read.
            draft = rows.draft_token_ids.index_select(0, slot)[:, index - 1]
            is_nobody = is_nobody | (draft < 0)
        slot.masked_fill_(is_nobody, -1)
        return batching.gather_input_ids(
            slot,
            position,
            self._same[: rows.lens.shape[0]],
            rows.token_ids,
            rows.lens,
            rows.draft_token_ids,
            out=out,
        )
