# SPDX-License-Identifier: Apache-2.0
"""The protocol between a recurrent drafter and the model that it runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specops.engine.drafters.base import TargetStep
from specops.engine.drafters.trees import TreeMaker
from specops.engine.models import CacheRoom, LayerBatch


@dataclass(slots=True, kw_only=True)
class DraftRows(LayerBatch):
    """The rows of one pass of a head, and where their tokens and states are.

    A row at position i reads the state of position i, and the token behind it that the pass is for.
    The first two are of `batching.DraftIndices`, the others of the target's step, by slot.
    """

    row_to_request: Tensor  # int32 [rows]
    source_rows: Tensor  # int32 [rows]: a row of the states given, or of `kept`
    slots: Tensor  # int32 [batch]
    token_ids: Tensor  # int32 [num_slots, max_len]
    lens: Tensor  # int32 [num_slots]
    draft_token_ids: Tensor  # int32 [num_slots, k]
    kept: Tensor | None = None  # [num_slots, window, hidden_size]
    # int32 [batch + 1]: all pages of each request, where `kv_indptr` leaves out those not seen.
    whole_kv_indptr: Tensor | None = None


class DraftHead(Protocol):
    """What a recurrent drafter runs: weights, keys and values, and a pass."""

    @property
    def num_passes(self) -> int:
        """How many passes go over the rows of a step.

        Pass m = 0, 1, .. reads the token m + 1 places behind its row, and drafts the one behind
        that. The last one then goes on with its own states.
        """

    @property
    def is_chained(self) -> bool:
        """Whether a pass reads the states of the one before it, not the target's."""

    @property
    def lookahead(self) -> int:
        """Tokens behind its position that the keys and values of a row depend on.

        It is also the number of passes that write keys and values which later steps read: pass m
        reads token m + 1 behind its row. 0: only the first pass writes any, and it reads no token.
        """

    @property
    def reads_states(self) -> bool:
        """Whether rows read states, those of the target first.

        Otherwise a row reads the token at its own position, and no states: rows begin with the
        first token and end with the newest one.
        """

    @property
    def max_drafts(self) -> int | None:
        """Most drafts that it makes for a request in a step; None: as many as are wanted."""

    @property
    def num_likeliest(self) -> int:
        """Number of the likeliest tokens of each pass that make trees, at least 2.

        A smaller vocabulary limits it.
        """

    @property
    def new_tree(self) -> TreeMaker | None:
        """Makes trees where no draft depends on those before it, so that each may follow each.

        None: drafts depend on those before them, and trees branch off one chain.
        """

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the target whose states `target_states` reads."""

    @property
    def hidden_size(self) -> int:
        """Of the states that it reads, the target's and its own."""

    @property
    def dtype(self) -> torch.dtype:
        """Of these states."""

    @property
    def vocab_size(self) -> int:
        """Of its logits."""

    @property
    def token_map(self) -> Tensor | None:
        """The token of each logit, int32 [vocab_size]; None: every token in turn."""

    @property
    def kv_bytes_per_token(self) -> int:
        """What it keeps on pages, over all passes.

        0: only rows run that draft, and none runs again.
        """

    def reserve(self, rows: int) -> None:
        """Allocates the buffers of passes with up to `rows` rows, which then stay there."""

    def allocate(self, room: CacheRoom) -> None:
        """Allocates keys and values, on the target's pages."""

    def kv_tensors(self) -> Sequence[Tensor]:
        """Returns these, once they are allocated."""

    def workspace_size(self, rows: int, batch: int, pages: int) -> int:
        """Returns the floats of workspace that attention takes in passes of up to these sizes."""

    def sums_size(self, rows: int, outputs: int) -> int:
        """Returns the floats that projections split their sums with, those of logits too."""

    def target_states(self, target: TargetStep) -> Tensor:
        """Returns the states that the first pass reads, [rows of the target, hidden_size]."""

    def forward(self, index: int, rows: DraftRows, states: Tensor) -> tuple[Tensor, Tensor]:
        """Runs pass `index` over rows and writes their keys and values.

        Args:
            index: which pass, from 0.
            rows: its rows.
            states: [source rows, hidden_size], of the target, or what a pass gave as the second.

        Returns:
            What `logits` reads, and what the next pass, or draft, reads as states; both of all
            rows. They lie in the head's own buffers: the next call overwrites them.
        """

    def logits(
        self, index: int, hidden: Tensor, *, out: Tensor | None = None, sums: Tensor | None = None
    ) -> Tensor:
        """Returns the fp32 logits [rows, vocab_size] of rows that `forward` returned first.

        Args:
            index: which draft of the request they are for, from 0.
            hidden: these rows, one for each request of the step.
            out: receives them.
            sums: workspace of projections.
        """
