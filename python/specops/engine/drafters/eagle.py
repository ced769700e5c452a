# SPDX-License-Identifier: Apache-2.0
"""EAGLE-1 and 2: a head that reads the target's final states first, and then its own states."""

from typing import cast

from torch import Tensor

from specops.api.methods.eagle import METHOD, EagleOptions
from specops.engine.drafters.base import Drafter, DrafterContext
from specops.engine.drafters.head import DraftRows
from specops.engine.drafters.recurrent import RecurrentDrafter
from specops.engine.drafters.stack_head import StackHead, named_weights
from specops.engine.models import Eagle, MtpBatch, load_eagle


def load(context: DrafterContext) -> Drafter:
    """Make the drafter for the head that the configuration names.

    Raises:
        MethodUnavailable: the configuration names no head.
        ModelError: the head cannot be used, or does not fit this target.
    """
    own, directory = named_weights(context, EagleOptions, "EAGLE head is")
    head = load_eagle(
        context.target,
        directory,
        target_directory=context.config.model_dir,
        num_slots=context.config.max_num_seqs,
        quantization=own.quantization,
    )
    return RecurrentDrafter(METHOD.name, context, EagleHead(head), draws=True)


class EagleHead(StackHead):
    """EAGLE head as a `DraftHead`.

    Args:
        head: the head's model, loaded for its target.

    Attributes:
        head: the argument.
    """

    def __init__(self, head: Eagle) -> None:
        super().__init__(head)
        self.head, self.token_map = head, head.token_map

    def forward(self, index: int, rows: DraftRows, states: Tensor) -> tuple[Tensor, Tensor]:
        """Run the head over rows; see `DraftHead.forward`."""
        states = self.head.forward(cast(MtpBatch, rows), states, self.cache)
        return states, states
