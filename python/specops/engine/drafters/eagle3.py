# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3: a head that reads auxiliary hidden states of the target first, and then its own states.

P-EAGLE heads do not read their own states: mask rows yield all drafts but the first in one pass.
"""

from typing import cast

from torch import Tensor

from specops.api.methods.eagle3 import METHOD, Eagle3Options
from specops.engine.drafters.base import Drafter, DrafterContext, TargetStep
from specops.engine.drafters.blocks import BlocksDrafter, BlockStackHead
from specops.engine.drafters.head import DraftRows
from specops.engine.drafters.recurrent import RecurrentDrafter
from specops.engine.drafters.stack_head import StackHead, named_weights
from specops.engine.models import Eagle3, MtpBatch, load_eagle3


def load(context: DrafterContext) -> Drafter:
    """Make the drafter for the head that the configuration names.

    Raises:
        MethodUnavailable: the configuration names no head.
        ModelError: the head cannot be used, or does not fit this target.
    """
    own, directory = named_weights(context, Eagle3Options, "EAGLE-3 head is")
    head = load_eagle3(
        context.target,
        directory,
        target_directory=context.config.model_dir,
        quantization=own.quantization,
    )
    if head.config.mask_token_id is None:
        return RecurrentDrafter(METHOD.name, context, Eagle3Head(head), draws=True)
    return BlocksDrafter(METHOD.name, context, ParallelHead(head, context), draws=True)


# Default number of P-EAGLE drafts: the number that the speculators library trains.
_DRAFTS = 8


class Eagle3Head(StackHead):
    """EAGLE-3 head as a `DraftHead`.

    Args:
        head: the head's model, loaded for its target.

    Attributes:
        head: the argument.
    """

    def __init__(self, head: Eagle3) -> None:
        super().__init__(head)
        self.head, self.aux_layers, self.token_map = head, head.aux_layers, head.token_map

    def target_states(self, target: TargetStep) -> Tensor:
        """Return the auxiliary hidden states of the target, projected to the head's width."""
        return self.head.states_of(target.aux_hidden_states, target.sums)

    def forward(self, index: int, rows: DraftRows, states: Tensor) -> tuple[Tensor, Tensor]:
        """Run the head over rows; see `DraftHead.forward`."""
        return self.head.forward(cast(MtpBatch, rows), states, self.cache)


class ParallelHead(BlockStackHead):
    """P-EAGLE head as a `DraftHead`.

    The row of the newest token drafts the first token, and each mask row after it drafts one more.
    The masks form a block, which runs in the second pass.

    Args:
        head: the head's model, loaded for its target.
        context: the engine's config, target, tokenizer and device.

    Attributes:
        head: the argument.
    """

    def __init__(self, head: Eagle3, context: DrafterContext) -> None:
        # The head does not limit the number of drafts, but an engine has a fixed number of masks.
        # The configuration gives no number if its default method is a different one.
        drafts = context.config.speculative_config.num_model_steps or _DRAFTS
        super().__init__(head, drafts - 1, context)
        self.head, self.aux_layers, self.token_map = head, head.aux_layers, head.token_map
        self.num_passes = self.max_drafts = drafts
        self._hidden: Tensor | None = None  # states of the masks; None: no masks
        self._first_states: Tensor  # states from the latest pass 0

    def target_states(self, target: TargetStep) -> Tensor:
        """Return the auxiliary hidden states of the target, projected to the head's width."""
        return self.head.states_of(target.aux_hidden_states, target.sums)

    def forward(self, index: int, rows: DraftRows, states: Tensor) -> tuple[Tensor, Tensor]:
        """Run the head over rows (pass 0) or the masks (pass 1); see `DraftHead.forward`."""
        if index == 0:
            self._first_states, _ = self.head.forward(cast(MtpBatch, rows), states, self.cache)
        if index == 1:
            placed = self.blocks.place(rows, is_causal=True)
            self._hidden = None
            if placed is not None:
                self._hidden = self.head.forward_masks(placed.batch, self.cache)
        return self._first_states, self._first_states

    def logits(
        self, index: int, hidden: Tensor, *, out: Tensor | None = None, sums: Tensor | None = None
    ) -> Tensor:
        """Return the logits of the newest token's row, or of one mask of each request."""
        if index == 0:
            return super().logits(index, hidden, out=out, sums=sums)
        return self.logits_of_row(index - 1, self._hidden, hidden.shape[0], out, sums)[0]
