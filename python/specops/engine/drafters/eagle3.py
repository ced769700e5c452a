# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3: a head that reads states of several of the target's layers, and then its own."""

from typing import cast

import torch
from torch import Tensor

from specops.engine.drafters.base import Drafter, DrafterContext, MethodUnavailable, TargetStep
from specops.engine.drafters.head import DraftRows
from specops.engine.drafters.methods.eagle3 import METHOD, Eagle3Options
from specops.engine.drafters.recurrent import RecurrentDrafter
from specops.engine.models import Eagle3, KvCache, MtpBatch, load_eagle3


def load(context: DrafterContext) -> Drafter:
    """Makes the drafter of the head that the configuration names.

    Raises:
        MethodUnavailable: it names none.
        ModelError: the head cannot be used, or not with this target.
    """
    own = context.config.speculative_config.options_of(Eagle3Options)
    if own.model is None:
        reason = "no EAGLE-3 head is named: its directory belongs into model"
        raise MethodUnavailable(reason, reason)
    head = load_eagle3(
        context.target,
        own.model,
        target_directory=context.config.model_dir,
        quantization=own.quantization,
    )
    return RecurrentDrafter(METHOD.name, context, Eagle3Head(head), draws=True)


class Eagle3Head:
    """EAGLE-3's head as a `DraftHead`: one pass over the rows of a step, then its own states.

    Args:
        head: on top of its target.

    Attributes:
        head: this.
        cache: its keys and values.
    """

    num_passes = 1
    is_chained = True
    num_likeliest = 2
    reads_states = True
    max_drafts = None
    is_independent = False
    lookahead = 1

    def __init__(self, head: Eagle3) -> None:
        self.head = head
        self.cache: KvCache

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's layers whose states it reads."""
        return self.head.config.taps

    @property
    def hidden_size(self) -> int:
        """Of its own states, to which the target's are projected."""
        return self.head.hidden_size

    @property
    def dtype(self) -> torch.dtype:
        """Of these states."""
        return self.head.dtype

    @property
    def vocab_size(self) -> int:
        """Tokens that it may draft."""
        return self.head.lm_head.num_outputs

    @property
    def token_map(self) -> Tensor | None:
        """These tokens; None: all of the target's."""
        return self.head.weights.token_map

    @property
    def kv_bytes_per_token(self) -> int:
        """Over all of its layers."""
        return self.head.kv_bytes_per_token()

    def reserve(self, rows: int) -> None:
        """Allocates the buffers of passes with up to `rows` rows."""
        self.head.reserve(rows)

    def allocate(self, num_pages: int, page_size: int) -> None:
        """Allocates its keys and values, on the target's pages."""
        self.cache = self.head.new_kv_cache(num_pages, page_size)

    def workspace_size(self, rows: int, batch: int, pages: int) -> int:
        """Returns the floats of workspace that attention takes."""
        return self.head.workspace_size(rows, batch, pages, self.cache)

    def sums_size(self, rows: int, outputs: int) -> int:
        """Returns the floats that projections split their sums with."""
        return self.head.sums_size(rows, outputs)

    def target_states(self, target: TargetStep) -> Tensor:
        """Returns the states of the layers that it reads, projected."""
        return self.head.states_of(target.taps, target.sums)

    def forward(self, index: int, rows: DraftRows, states: Tensor) -> tuple[Tensor, Tensor]:
        """Runs the head over rows; as `DraftHead.forward`."""
        return self.head.forward(cast(MtpBatch, rows), states, self.cache)

    def logits(
        self, index: int, hidden: Tensor, *, out: Tensor | None = None, sums: Tensor | None = None
    ) -> Tensor:
        """Returns the logits of rows, of the head's vocabulary."""
        return self.head.logits(hidden, out=out, sums=sums)
