# SPDX-License-Identifier: Apache-2.0
"""DFlash and DSpark: a block of drafts in one pass, behind what the target's states gave."""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from specops import batching
from specops.batching import BatchIndices
from specops.engine.drafters.base import Drafter, DrafterContext, TargetStep
from specops.engine.drafters.head import DraftRows
from specops.engine.drafters.methods.dflash import METHOD, DflashOptions
from specops.engine.drafters.newest import NewestTokens
from specops.engine.drafters.recurrent import RecurrentDrafter
from specops.engine.drafters.stack_head import StackHead, named_weights
from specops.engine.memory.kv_cache import DraftKv
from specops.engine.models import BlockDrafter, LayerBatch, MtpBatch, load_dflash
from specops.engine.request import Request


def load(context: DrafterContext) -> Drafter:
    """Makes the drafter of the head that the configuration names.

    Raises:
        MethodUnavailable: it names none.
        ModelError: the head cannot be used, or not with this target.
    """
    own, directory = named_weights(context, DflashOptions, "head of DFlash or DSpark is")
    model = load_dflash(
        context.target,
        directory,
        target_directory=context.config.model_dir,
        quantization=own.quantization,
    )
    head = BlockHead(model, context)
    return BlocksDrafter(METHOD.name, context, head, draws=True)


@dataclass(frozen=True)
class BlockKv(DraftKv):
    """What a block drafter keeps: behind the text it writes whole blocks.

    Attributes:
        num_rows: of a block.
    """

    num_rows: int

    def num_rows_behind(self, draft_limit: int) -> int:
        """Rows that drafting writes behind those of the step itself."""
        return self.num_rows


class BlocksDrafter(RecurrentDrafter):
    """The recurrent drafter with pages for whole blocks."""

    head: "BlockHead"

    def draft_kv(self, request: Request) -> DraftKv | None:
        """Keys and values of the target's states, and a block behind them."""
        drafts, rows = request.draft_stages[self.name], self.head.model.config.num_rows
        return BlockKv(self.name, self.head.lookahead, drafts, rows)


class BlockHead(StackHead):
    """A block drafter as a `DraftHead`: the first pass runs the block, and each drafts a token.

    Args:
        model: on top of its target.
        context: of the engine.

    Attributes:
        model: this.
    """

    is_chained = False
    lookahead = 0
    num_likeliest = 8

    def __init__(self, model: BlockDrafter, context: DrafterContext) -> None:
        super().__init__(model)
        self.model, self.taps, self.token_map = model, model.taps, model.token_map
        # A token for each row of a block that drafts.
        self.num_passes = self.max_drafts = model.config.num_drafts
        # No draft reads another without a Markov head.
        self.is_independent = model.weights.markov is None
        slots, where = context.config.max_num_seqs, context.device.device
        self._is_async, self._most_rows = context.device.is_async, slots * model.config.num_rows
        self._by_size: dict[int, BatchIndices] = {}
        self._tokens = NewestTokens(slots, where)
        self._states = torch.empty(slots, model.hidden_size, dtype=model.dtype, device=where)
        # Of the last first pass: by request, the row of its newest token and how many it has.
        self._first_rows: Tensor
        self._num_rows: Tensor
        self._hidden: Tensor | None = None  # of the block's rows; None: there are none
        self._rows: DraftRows
        self._given: Tensor  # of the rows of the last first pass

    def reserve(self, rows: int) -> None:
        """Allocates the buffers of passes with up to `rows` rows, and of blocks."""
        super().reserve(max(rows, self._most_rows))

    def workspace_size(self, rows: int, batch: int, pages: int) -> int:
        """Returns the floats of workspace that attention takes."""
        rows = max(rows, batch * self.model.config.num_rows)
        return super().workspace_size(rows, batch, pages)

    def sums_size(self, rows: int, outputs: int) -> int:
        """Returns the floats that projections split their sums with."""
        return super().sums_size(max(rows, outputs * self.model.config.num_rows), outputs)

    def target_states(self, target: TargetStep) -> Tensor:
        """Returns what keys and values are made of."""
        return self.model.states_of(target.taps, target.sums)

    def forward(self, index: int, rows: DraftRows, states: Tensor) -> tuple[Tensor, Tensor]:
        """Writes the keys and values of rows, and runs blocks behind them, in the first pass."""
        if index == 0:
            self._given = self.model.append(cast(MtpBatch, rows), states, self.cache)
            self._run_blocks(rows)
        self._rows = rows
        return self._given, self._given

    def logits(
        self, index: int, hidden: Tensor, *, out: Tensor | None = None, sums: Tensor | None = None
    ) -> Tensor:
        """Returns the logits of the row of each block that drafts token `index`."""
        size = hidden.shape[0]
        if self._hidden is None:
            return torch.zeros(size, self.vocab_size, out=out)
        place = index if self.model.config.samples_anchor else index + 1
        chosen = (self._first_rows + place).masked_fill_(self._num_rows <= place, -1)
        states = batching.gather_output_rows(self._hidden, chosen, out=self._states[:size])
        logits = self.model.logits(states, out=out, sums=sums)
        bias = self.model.markov_logits(self._tokens.before(index, self._rows), sums)
        return logits if bias is None else logits.add_(bias)

    def _run_blocks(self, rows: DraftRows) -> None:
        """Runs the block of each request whose newest token follows its last row."""
        size = rows.slots.shape[0]
        qo_lens, lens = self._lens_of(rows)
        indices = self._by_size.get(size)
        if indices is None:
            indices = self._by_size[size] = BatchIndices.empty(
                size,
                total_rows=size * self.model.config.num_rows,
                num_output_rows=1,
                device=rows.slots.device,
            )
        batching.prepare_batch(
            qo_lens,
            (lens - 1 + qo_lens).masked_fill_(qo_lens == 0, 0),
            torch.zeros_like(qo_lens),
            rows.whole_kv_indptr,
            rows.kv_indices,
            page_size=self.cache.page_size,
            total_rows=size * self.model.config.num_rows,
            num_output_rows=1,
            out=indices,
        )
        self._first_rows, self._num_rows = indices.qo_indptr[:-1], qo_lens
        end = size * self.model.config.num_rows
        if not self._is_async:
            end = int(indices.qo_indptr[-1])
        self._hidden = None
        if not end:
            return
        request = indices.row_to_request[:end].clamp(min=0)
        positions = indices.positions[:end]
        newest = self._tokens.before(0, rows).index_select(0, request)
        is_mask = positions != (lens - 1).index_select(0, request)
        batch = LayerBatch(
            positions=positions,
            cache_slots=indices.cache_slots[:end],
            qo_indptr=indices.qo_indptr,
            kv_indptr=rows.kv_indptr,
            kv_indices=rows.kv_indices,
            kv_lens=(rows.kv_lens + qo_lens).masked_fill_(qo_lens == 0, 0),
            workspace=rows.workspace,
            sums=rows.sums,
            is_causal=False,
        )
        token_ids = newest.masked_fill_(is_mask, self.model.config.mask_token_id)
        self._hidden = self.model.forward(token_ids, batch, self.cache)

    def _lens_of(self, rows: DraftRows) -> tuple[Tensor, Tensor]:
        """How many rows the block of each request has, as far as it has pages; and its tokens."""
        assert rows.whole_kv_indptr is not None
        lens = rows.lens.index_select(0, rows.slots.clamp(min=0))
        last = rows.positions.index_select(0, (rows.qo_indptr[1:] - 1).clamp(min=0))
        has_rows = rows.qo_indptr[1:] > rows.qo_indptr[:-1]
        drafts = has_rows & (rows.slots >= 0) & (last == lens - 2)
        room = rows.whole_kv_indptr.diff() * self.cache.page_size - (lens - 1)
        count = room.clamp(0, self.model.config.num_rows)
        return count.masked_fill_(~drafts, 0).to(torch.int32), lens
