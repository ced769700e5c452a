# SPDX-License-Identifier: Apache-2.0
"""Medusa and Hydra heads for the recurrent drafter: each head is one pass over the last rows."""

from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from specops import batching
from specops.api.methods.method import Method, WeightOptions
from specops.engine.drafters.base import Drafter, DrafterContext, TargetStep
from specops.engine.drafters.head import DraftHead, DraftRows
from specops.engine.drafters.newest import NewestTokens
from specops.engine.drafters.recurrent import RecurrentDrafter
from specops.engine.drafters.stack_head import StackHead, named_weights
from specops.engine.models import CacheCapacity, MtpBatch, PrefixLayer, ResidualHeads, Transformer


class Loader(Protocol):
    """Function that loads the heads in a directory."""

    def __call__(
        self, target: Transformer, directory: str, *, quantization: str | None
    ) -> ResidualHeads: ...


def load_residual(
    context: DrafterContext,
    method: Method,
    options: type[WeightOptions],
    loader: Loader,
) -> Drafter:
    """Make the drafter for the heads that the configuration names.

    Args:
        context: the engine's config, target, tokenizer and device.
        method: the drafting method.
        options: class of the method's options.
        loader: function that loads the heads.

    Raises:
        MethodUnavailable: the configuration names no heads.
        ModelError: the heads cannot be used, or do not fit this target.
    """
    own, directory = named_weights(context, options, f"{method.title} are")
    heads = loader(context.target, directory, quantization=own.quantization)
    slots = context.config.max_num_seqs
    head: DraftHead = ResidualDraftHead(heads, slots)
    if heads.prefix is not None:
        head = PrefixedHead(heads, heads.prefix, slots)
    return RecurrentDrafter(method.name, context, head, draws=True)


class ResidualDraftHead:
    """Medusa or Hydra heads as a `DraftHead` without a KV cache.

    Args:
        heads: the heads of a checkpoint.
        slots: number of request slots.

    Attributes:
        heads: the argument.
    """

    is_chained = False
    lookahead = 1
    reads_states = True
    aux_layers: tuple[int, ...] = ()
    token_map: Tensor | None = None
    kv_bytes_per_token = 0

    def __init__(self, heads: ResidualHeads, slots: int) -> None:
        self.heads = heads
        self._tokens = NewestTokens(slots, heads.device)
        self._gathered = torch.empty(0, heads.hidden_size, dtype=heads.dtype, device=heads.device)
        heads.reserve(slots)

    @property
    def num_passes(self) -> int:
        """Number of heads."""
        return len(self.heads.heads)

    @property
    def max_drafts(self) -> int:
        """Number of heads: each drafts one token."""
        return self.num_passes

    @property
    def hidden_size(self) -> int:
        """Width of the target's states."""
        return self.heads.hidden_size

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the target's states."""
        return self.heads.dtype

    @property
    def vocab_size(self) -> int:
        """Size of the target's vocabulary."""
        return self.heads.vocab_size

    def reserve(self, rows: int) -> None:
        """Allocate a buffer for the states of `rows` rows."""
        self._gathered = self._gathered.new_empty(rows, self.hidden_size)

    def allocate(self, capacity: CacheCapacity) -> None:
        """Do nothing: the heads have no KV cache."""

    def kv_tensors(self) -> Sequence[Tensor]:
        """Return an empty tuple: the heads have no KV cache."""
        return ()

    def workspace_size(self, rows: int, batch: int, pages: int) -> int:
        """Return 0: the heads have no attention."""
        return 0

    def sums_size(self, rows: int, outputs: int) -> int:
        """Return the size of the workspace of linear layers, in floats."""
        return self.heads.sums_size(outputs)

    def target_states(self, target: TargetStep) -> Tensor:
        """Return the output of the final norm."""
        return target.hidden

    def forward(self, index: int, rows: DraftRows, states: Tensor) -> tuple[Tensor, Tensor]:
        """Gather the states of the rows, and embed the token that head `index` reads first."""
        gathered = self._gathered[: rows.positions.shape[0]]
        if index == 0:
            batching.gather_output_rows(states, rows.source_rows, out=gathered)
        if self.heads.reads_tokens:
            self.heads.read_token(index, self._tokens.before(index, rows))
        return gathered, gathered

    def logits(
        self, index: int, hidden: Tensor, *, out: Tensor | None = None, sums: Tensor | None = None
    ) -> Tensor:
        """Return the logits of head `index`."""
        return self.heads.logits(index, hidden, out, sums)


class PrefixedHead(StackHead):
    """Hydra++ heads as a `DraftHead`, whose prefix layer runs in the first pass.

    Args:
        heads: the heads of a checkpoint.
        prefix: the decoder layer before the heads.
        slots: number of request slots.

    Attributes:
        heads: the argument.
    """

    is_chained = False
    lookahead = 0  # the prefix layer reads no token

    def __init__(self, heads: ResidualHeads, prefix: PrefixLayer, slots: int) -> None:
        super().__init__(prefix)
        self.heads, self._prefix = heads, prefix
        self.num_passes = self.max_drafts = len(heads.heads)
        self._tokens = NewestTokens(slots, heads.device)
        self._states: Tensor  # states from the latest pass 0
        heads.reserve(slots)

    def sums_size(self, rows: int, outputs: int) -> int:
        """Return the size of the workspace of linear layers, in floats."""
        return max(super().sums_size(rows, outputs), self.heads.sums_size(outputs))

    def forward(self, index: int, rows: DraftRows, states: Tensor) -> tuple[Tensor, Tensor]:
        """Run the prefix layer over the rows in pass 0; return its states in every pass.

        If the heads read tokens, also embed the token before draft `index` for head `index`.
        """
        if index == 0:
            self._states = self._prefix.forward(cast(MtpBatch, rows), states, self.cache)
        if self.heads.reads_tokens:
            self.heads.read_token(index, self._tokens.before(index, rows))
        return self._states, self._states

    def logits(
        self, index: int, hidden: Tensor, *, out: Tensor | None = None, sums: Tensor | None = None
    ) -> Tensor:
        """Return the logits of head `index`."""
        return self.heads.logits(index, hidden, out, sums)
