# SPDX-License-Identifier: Apache-2.0
"""Blocks of rows that a head runs after the text of a request to draft several tokens at once.

The keys and values of a block lie on the request's pages, after the text. They are used in one step
only: the next step overwrites them.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specops import batching
from specops.batching import BatchIndices
from specops.engine.drafters.base import DrafterContext
from specops.engine.drafters.head import DraftHead, DraftRows
from specops.engine.drafters.recurrent import RecurrentDrafter
from specops.engine.drafters.stack_head import StackHead
from specops.engine.memory.kv_cache import DraftKv
from specops.engine.models import LayerBatch, LayerStack
from specops.engine.request import Request


class PlacedRows(NamedTuple):
    """Rows of all blocks of a step."""

    batch: LayerBatch
    requests: Tensor  # int64 [rows], index of each row's request in the step
    lens: Tensor  # int32 [requests], number of tokens


class Blocks:
    """Positions and cache slots of block rows, and lookup of the rows that draft a given token.

    The first row of a block is at the position of the newest token.

    Args:
        num_rows: rows of a block.
        context: the engine's config, target, tokenizer and device.

    Attributes:
        num_rows: rows of a block.
        most_rows: maximum number of block rows of a step.
        max_len: maximum number of tokens of a request.
    """

    def __init__(self, num_rows: int, context: DrafterContext) -> None:
        self.num_rows = num_rows
        self.most_rows = context.config.max_num_seqs * num_rows
        self.max_len = context.target.max_model_len
        self._is_async, self._page_size = context.device.is_async, context.config.page_size
        self._by_size: dict[int, BatchIndices] = {}
        # The first row of each request's block, and the number of rows in it.
        self._first_rows: Tensor
        self._num_rows: Tensor

    def place(self, rows: DraftRows, *, is_causal: bool) -> PlacedRows | None:
        """Place a block after each request whose last row in this pass precedes its newest token.

        Args:
            rows: rows of the pass over the text.
            is_causal: whether attention inside a block is causal.

        Returns:
            The rows of all blocks; None if no request has a block.
        """
        size = rows.slots.shape[0]
        qo_lens, lens = self._lens_of(rows)
        indices = self._by_size.get(size)
        if indices is None:
            indices = self._by_size[size] = BatchIndices.empty(
                size,
                total_rows=size * self.num_rows,
                num_output_rows=1,
                device=rows.slots.device,
            )
        batching.prepare_batch(
            qo_lens,
            (lens - 1 + qo_lens).masked_fill_(qo_lens == 0, 0),
            torch.zeros_like(qo_lens),
            rows.whole_kv_indptr,
            rows.kv_indices,
            page_size=self._page_size,
            out=indices,
        )
        self._first_rows, self._num_rows = indices.qo_indptr[:-1], qo_lens
        end = size * self.num_rows
        if not self._is_async:
            end = int(indices.qo_indptr[-1])
        if not end:
            return None
        batch = LayerBatch(
            positions=indices.positions[:end],
            cache_slots=indices.cache_slots[:end],
            qo_indptr=indices.qo_indptr,
            kv_indptr=rows.kv_indptr,
            kv_indices=rows.kv_indices,
            kv_lens=(rows.kv_lens + qo_lens).masked_fill_(qo_lens == 0, 0),
            workspace=rows.workspace,
            sums=rows.sums,
            is_causal=is_causal,
        )
        return PlacedRows(batch, indices.row_to_request[:end].clamp(min=0), lens)

    def states(self, hidden: Tensor, place: int, out: Tensor) -> Tensor:
        """Gather the state of row `place` of each block; zeros for blocks that are shorter."""
        chosen = (self._first_rows + place).masked_fill_(self._num_rows <= place, -1)
        return batching.gather_output_rows(hidden, chosen, out=out)

    def _lens_of(self, rows: DraftRows) -> tuple[Tensor, Tensor]:
        """Return the number of block rows and the number of tokens of each request.

        A block is limited to the rows that the request's pages can hold. A request that does not
        draft has no block.
        """
        assert rows.whole_kv_indptr is not None
        lens = rows.lens.index_select(0, rows.slots.clamp(min=0))
        last = rows.positions.index_select(0, (rows.qo_indptr[1:] - 1).clamp(min=0))
        has_rows = rows.qo_indptr[1:] > rows.qo_indptr[:-1]
        drafts = has_rows & (rows.slots >= 0) & (last == lens - 2)
        room = rows.whole_kv_indptr.diff() * self._page_size - (lens - 1)
        count = room.clamp(0, self.num_rows)
        return count.masked_fill_(~drafts, 0).to(torch.int32), lens


class BlockStackHead(StackHead):
    """Draft head of decoder layers that drafts with blocks.

    Args:
        stack: the layers.
        num_rows: rows of a block.
        context: the engine's config, target, tokenizer and device.

    Attributes:
        blocks: the blocks of the head.
    """

    is_chained = False

    def __init__(self, stack: LayerStack, num_rows: int, context: DrafterContext) -> None:
        super().__init__(stack)
        self.blocks = Blocks(num_rows, context)
        slots, where = context.config.max_num_seqs, context.device.device
        self._states = torch.empty(slots, stack.hidden_size, dtype=stack.dtype, device=where)

    def reserve(self, rows: int) -> None:
        """Allocate the buffers for passes with up to `rows` rows, and for blocks."""
        super().reserve(max(rows, self.blocks.most_rows))

    def workspace_size(self, rows: int, batch: int, pages: int) -> int:
        """Return the size of the workspace of attention, in floats."""
        return super().workspace_size(max(rows, batch * self.blocks.num_rows), batch, pages)

    def sums_size(self, rows: int, outputs: int) -> int:
        """Return the size of the workspace of linear layers, in floats."""
        return super().sums_size(max(rows, outputs * self.blocks.num_rows), outputs)

    def logits_of_row(
        self, place: int, hidden: Tensor | None, size: int, out: Tensor | None, sums: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the logits of row `place` of each block, and the states they were computed from.

        Args:
            place: index of a row in its block.
            hidden: states of all block rows; None: there are no blocks.
            size: number of requests of the step.
            out: [size, vocabulary], receives the logits.
            sums: linear workspace.

        Returns:
            Zeros and None if there are no blocks.
        """
        if hidden is None:
            return torch.zeros(size, self.vocab_size, out=out), None
        states = self.blocks.states(hidden, place, self._states[:size])
        return self.stack.logits(states, out=out, sums=sums), states


@dataclass(frozen=True)
class BlockKv(DraftKv):
    """Draft KV of a block drafter, which writes whole blocks after the text.

    Attributes:
        num_rows: rows of a block.
        context_len: maximum number of tokens of a request.
    """

    num_rows: int
    context_len: int

    def num_rows_behind(self, draft_limit: int) -> int:
        """Return how many rows drafting writes after the rows of the step itself."""
        return self.num_rows

    def end_of_rows(self, max_len: int) -> int:
        """Return the end of the context, regardless of the request's maximum length.

        A block that is cut off at that length would give other drafts.
        """
        return self.context_len


class HasBlocks(DraftHead, Protocol):
    """Draft head that drafts with blocks."""

    @property
    def blocks(self) -> Blocks:
        """Blocks of the head."""


class BlocksDrafter(RecurrentDrafter):
    """Recurrent drafter that reserves pages for whole blocks."""

    head: HasBlocks

    def draft_kv(self, request: Request) -> DraftKv | None:
        """Return the draft KV of the text and of a block after it."""
        drafts, blocks = request.drafts.stages[self.name], self.head.blocks
        return BlockKv(self.name, self.head.lookahead, drafts, blocks.num_rows, blocks.max_len)
