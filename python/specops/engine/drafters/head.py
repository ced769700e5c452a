# SPDX-License-Identifier: Apache-2.0
"""Protocol between a recurrent drafter and the draft head that it runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specops.engine.drafters.base import TargetStep
from specops.engine.models import CacheCapacity, LayerBatch


@dataclass(slots=True, kw_only=True)
class DraftRows(LayerBatch):
    """Rows of one pass of a head, and the locations of their tokens and states.

    A row at position i reads the state of position i and a later token, whose distance depends on
    the pass. The first two fields are from `batching.DraftIndices`, the others from the target's
    step.
    """

    row_to_request: Tensor  # int32 [rows]
    source_rows: Tensor  # int32 [rows]: row of the `states` argument, or of `kept`
    slots: Tensor  # int32 [batch]
    token_ids: Tensor  # int32 [num_slots, max_len]
    lens: Tensor  # int32 [num_slots]
    draft_token_ids: Tensor  # int32 [num_slots, k]
    kept: Tensor | None = None  # [num_slots, window, hidden_size]: states of earlier steps
    # int32 [batch + 1]: all pages of each request, including those that `kv_indptr` skips.
    whole_kv_indptr: Tensor | None = None


class DraftHead(Protocol):
    """Draft head: the model that a recurrent drafter runs, with its KV cache."""

    @property
    def num_passes(self) -> int:
        """Number of passes over the rows of a step.

        A row of pass m = 0, 1, ... reads the token m + 1 positions after it and drafts the token
        after that one. For further drafts, the last pass is repeated on its own states.
        """

    @property
    def is_chained(self) -> bool:
        """True if each pass reads the states of the previous pass; False: all read the target's."""

    @property
    def lookahead(self) -> int:
        """Number of tokens after a row on which the row's keys and values depend.

        It equals the number of passes whose keys and values later steps read, since pass m reads
        the token m + 1 positions after a row. Exception: with 0, the first pass reads no later
        token, but later steps read its keys and values.
        """

    @property
    def reads_states(self) -> bool:
        """True if rows read hidden states: the target's first, then the head's own.

        If False, a row reads only the token at its own position, as in a separate draft model.
        """

    @property
    def max_drafts(self) -> int | None:
        """Maximum number of drafts that the head makes for a request in a step; None: no limit."""

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Layers of the target whose auxiliary hidden states `target_states` reads."""

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states that rows read."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the hidden states that rows read."""

    @property
    def vocab_size(self) -> int:
        """Size of the draft vocabulary: the number of logits."""

    @property
    def token_map(self) -> Tensor | None:
        """Token id of each logit, int32 [vocab_size]; None: logit i is token i."""

    @property
    def kv_bytes_per_token(self) -> int:
        """KV bytes per token, over all passes.

        0: the head has no KV cache, so it runs only rows that draft, and each only once.
        """

    def reserve(self, rows: int) -> None:
        """Allocate the buffers for passes with up to `rows` rows; they do not move afterwards."""

    def allocate(self, capacity: CacheCapacity) -> None:
        """Allocate keys and values on the target's pages."""

    def kv_tensors(self) -> Sequence[Tensor]:
        """Return the tensors of keys and values, once they are allocated."""

    def workspace_size(self, rows: int, batch: int, pages: int) -> int:
        """Return the attention workspace for passes of up to these sizes, in floats."""

    def sums_size(self, rows: int, outputs: int) -> int:
        """Return the workspace of linear layers and the LM head, in floats."""

    def target_states(self, target: TargetStep) -> Tensor:
        """Return the states that the first pass reads, [rows of the target, hidden_size]."""

    def forward(self, index: int, rows: DraftRows, states: Tensor) -> tuple[Tensor, Tensor]:
        """Run pass `index` over the rows, and write their keys and values.

        Args:
            index: index of the pass, from 0.
            rows: the rows of the pass.
            states: [source rows, hidden_size], from `target_states` or the second result of a pass.

        Returns:
            The input of `logits`, and the states that the next pass or draft reads, both for all
            rows. They lie in the head's buffers: the next call overwrites them.
        """

    def logits(
        self, index: int, hidden: Tensor, *, out: Tensor | None = None, sums: Tensor | None = None
    ) -> Tensor:
        """Return fp32 logits [rows, vocab_size].

        Args:
            index: index of the draft that the logits are for, from 0.
            hidden: rows of the first result of `forward`, one for each request of the step.
            out: receives the logits.
            sums: linear workspace.
        """
