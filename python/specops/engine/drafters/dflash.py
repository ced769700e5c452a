# SPDX-License-Identifier: Apache-2.0
"""DFlash and DSpark: draft a whole block of tokens in one pass that reads target states."""

from typing import cast

from torch import Tensor

from specops.api.methods.dflash import METHOD, DflashOptions
from specops.engine.drafters.base import Drafter, DrafterContext, TargetStep
from specops.engine.drafters.blocks import BlocksDrafter, BlockStackHead
from specops.engine.drafters.head import DraftRows
from specops.engine.drafters.newest import NewestTokens
from specops.engine.drafters.stack_head import named_weights
from specops.engine.models import BlockDrafter, MtpBatch, load_dflash


def load(context: DrafterContext) -> Drafter:
    """Make the drafter for the head that the configuration names.

    Raises:
        MethodUnavailable: the configuration names no head.
        ModelError: the head cannot be used, or does not fit this target.
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


class BlockHead(BlockStackHead):
    """Block drafter as a `DraftHead`: pass 0 runs the block; each pass yields one of its drafts.

    Args:
        model: the head's model, loaded for its target.
        context: the engine's config, target, tokenizer and device.

    Attributes:
        model: the argument.
    """

    lookahead = 0

    def __init__(self, model: BlockDrafter, context: DrafterContext) -> None:
        super().__init__(model, model.config.num_rows, context)
        self.model, self.aux_layers, self.token_map = model, model.aux_layers, model.token_map
        # Each drafting row of a block drafts one token.
        self.num_passes = self.max_drafts = model.config.num_drafts
        self._tokens = NewestTokens(context.config.max_num_seqs, context.device.device)
        self._hidden: Tensor | None = None  # states of all block rows; None: no blocks
        self._rows: DraftRows
        self._first_states: Tensor  # states from the latest pass 0

    def target_states(self, target: TargetStep) -> Tensor:
        """Return the target states from which the layers' keys and values are computed."""
        return self.model.states_of(target.aux_hidden_states, target.sums)

    def forward(self, index: int, rows: DraftRows, states: Tensor) -> tuple[Tensor, Tensor]:
        """In pass 0, write the keys and values of the rows, then run each request's block.

        Later passes run nothing and return the states of pass 0.
        """
        if index == 0:
            self._first_states = self.model.append(cast(MtpBatch, rows), states, self.cache)
            self._run_blocks(rows)
        self._rows = rows
        return self._first_states, self._first_states

    def logits(
        self, index: int, hidden: Tensor, *, out: Tensor | None = None, sums: Tensor | None = None
    ) -> Tensor:
        """Return the logits of the row of each block that drafts token `index`."""
        place = index if self.model.config.samples_anchor else index + 1
        logits, states = self.logits_of_row(place, self._hidden, hidden.shape[0], out, sums)
        if states is None or not self.model.reads_drafts:
            return logits
        before = self._tokens.before(index, self._rows)
        return self.model.with_tokens_before(logits, states, before, sums)

    def _run_blocks(self, rows: DraftRows) -> None:
        """Run the block of each request: its newest token followed by masks."""
        self._hidden = None
        placed = self.blocks.place(rows, is_causal=False)
        if placed is None:
            return
        newest = self._tokens.before(0, rows).index_select(0, placed.requests)
        places = placed.batch.positions - (placed.lens - 1).index_select(0, placed.requests)
        token_ids = newest.masked_fill_(places != 0, self.model.config.mask_token_id)
        self._hidden = self.model.forward(token_ids, places, placed.batch, self.cache)
