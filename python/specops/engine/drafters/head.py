# SPDX-License-Identifier: Apache-2.0
"""The protocol between a recurrent drafter and its head, the model that it runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specops.engine.drafters.base import TargetStep
from specops.engine.models import CacheCapacity, LayerBatch


@dataclass(slots=True, kw_only=True)
class DraftRows(LayerBatch):
    """The rows of one pass of a head, and the locations of their tokens and states.

    A row at position i reads the state of position i, and the later token that the pass is for. The
    first two fields are from `batching.DraftIndices`; the others are the target step's, by slot.
    """

    row_to_request: Tensor  # int32 [rows]
    source_rows: Tensor  # int32 [rows]: a row of the `states` argument, or of `kept`
    slots: Tensor  # int32 [batch]
    token_ids: Tensor  # int32 [num_slots, max_len]
    lens: Tensor  # int32 [num_slots]
    draft_token_ids: Tensor  # int32 [num_slots, k]
    kept: Tensor | None = None  # [num_slots, window, hidden_size]
    # int32 [batch + 1]: all pages of each request, including those that `kv_indptr` skips.
    whole_kv_indptr: Tensor | None = None


class DraftHead(Protocol):
    """A model that a recurrent drafter runs: weights, keys and values, and a pass."""

    @property
    def num_passes(self) -> int:
        """Number of passes over the rows of a step.

        Pass m = 0, 1, .. reads the token m + 1 places after its row and drafts the token after
        that. The last pass then continues with its own states.
        """

    @property
    def is_chained(self) -> bool:
        """True if a pass reads the states of the pass before it, not the target's."""

    @property
    def lookahead(self) -> int:
        """Number of tokens after a row that its keys and values depend on.

        Pass m reads the token m + 1 places after its row. So this is also the number of passes
        whose keys and values later steps read. Exception: if it is 0, the first pass writes keys
        and values for later steps, and reads no later token.
        """

    @property
    def reads_states(self) -> bool:
        """True if rows read states, those of the target first.

        Otherwise a row reads only the token at its own position: rows begin with the first token
        and end with the newest one.
        """

    @property
    def max_drafts(self) -> int | None:
        """Most drafts that it makes for a request in a step; None: no limit."""

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Layers of the target whose auxiliary hidden states `target_states` reads."""

    @property
    def hidden_size(self) -> int:
        """Width of the states that it reads, the target's and its own."""

    @property
    def dtype(self) -> torch.dtype:
        """Data type of these states."""

    @property
    def vocab_size(self) -> int:
        """Number of its logits."""

    @property
    def token_map(self) -> Tensor | None:
        """Token id of each logit, int32 [vocab_size]; None: logit i is token i."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes on pages per token, over all passes.

        0: only rows that draft run, and no row runs again.
        """

    def reserve(self, rows: int) -> None:
        """Allocate the buffers of passes with up to `rows` rows; they do not move afterwards."""

    def allocate(self, capacity: CacheCapacity) -> None:
        """Allocate keys and values on the target's pages."""

    def kv_tensors(self) -> Sequence[Tensor]:
        """Return the keys and values, once they are allocated."""

    def workspace_size(self, rows: int, batch: int, pages: int) -> int:
        """Return the size, in floats, of the workspace of attention for up to these sizes."""

    def sums_size(self, rows: int, outputs: int) -> int:
        """Return the size, in floats, of the workspace of linear layers and the LM head."""

    def target_states(self, target: TargetStep) -> Tensor:
        """Return the states that the first pass reads, [rows of the target, hidden_size]."""

    def forward(self, index: int, rows: DraftRows, states: Tensor) -> tuple[Tensor, Tensor]:
        """Run pass `index` over rows, and write their keys and values.

        Args:
            index: of the pass, from 0.
            rows: of the pass.
            states: [source rows, hidden_size], from the target, or the second result of a pass.

        Returns:
            The input of `logits`, and the states that the next pass or draft reads, both for all
            rows. They lie in the head's own buffers: the next call overwrites them.
        """

    def logits(
        self, index: int, hidden: Tensor, *, out: Tensor | None = None, sums: Tensor | None = None
    ) -> Tensor:
        """Return fp32 logits [rows, vocab_size].

        Args:
            index: which draft of the request they are for, from 0.
            hidden: rows of the first result of `forward`, one for each request of the step.
            out: receives the logits.
            sums: linear workspace.
        """
