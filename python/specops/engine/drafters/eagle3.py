# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3: a head that reads states of several of the target's layers, and then its own."""

from typing import cast

from torch import Tensor

from specops.engine.drafters.base import Drafter, DrafterContext, TargetStep
from specops.engine.drafters.head import DraftRows
from specops.engine.drafters.methods.eagle3 import METHOD, Eagle3Options
from specops.engine.drafters.recurrent import RecurrentDrafter
from specops.engine.drafters.stack_head import StackHead, named_weights
from specops.engine.models import Eagle3, MtpBatch, load_eagle3


def load(context: DrafterContext) -> Drafter:
    """Makes the drafter of the head that the configuration names.

    Raises:
        MethodUnavailable: it names none.
        ModelError: the head cannot be used, or not with this target.
    """
    own, directory = named_weights(context, Eagle3Options, "EAGLE-3 head is")
    head = load_eagle3(
        context.target,
        directory,
        target_directory=context.config.model_dir,
        quantization=own.quantization,
    )
    return RecurrentDrafter(METHOD.name, context, Eagle3Head(head), draws=True)


class Eagle3Head(StackHead):
    """EAGLE-3's head as a `DraftHead`.

    Args:
        head: on top of its target.

    Attributes:
        head: this.
    """

    def __init__(self, head: Eagle3) -> None:
        super().__init__(head)
        self.head, self.taps, self.token_map = head, head.taps, head.token_map

    def target_states(self, target: TargetStep) -> Tensor:
        """Returns the states of the layers that it reads, projected."""
        return self.head.states_of(target.taps, target.sums)

    def forward(self, index: int, rows: DraftRows, states: Tensor) -> tuple[Tensor, Tensor]:
        """Runs the head over rows; as `DraftHead.forward`."""
        return self.head.forward(cast(MtpBatch, rows), states, self.cache)
