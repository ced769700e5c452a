# SPDX-License-Identifier: Apache-2.0
"""Common parts of draft heads that are stacks of decoder layers."""

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from specops.api.methods.method import WeightOptions
from specops.engine.drafters.base import DrafterContext, MethodUnavailable, TargetStep
from specops.engine.models import CacheCapacity, KvCache, LayerStack

Options = TypeVar("Options", bound=WeightOptions)


def named_weights(context: DrafterContext, kind: type[Options], what: str) -> tuple[Options, str]:
    """Return the options of a method that needs a named checkpoint, and its directory.

    Args:
        context: of the engine.
        kind: class of the options.
        what: name of the weights with a verb for error messages, such as "EAGLE head is".

    Raises:
        MethodUnavailable: the configuration names no directory.
    """
    own = context.config.speculative_config.options_of(kind)
    if own.model is None:
        reason = f"no {what} named: the directory belongs into model"
        raise MethodUnavailable(reason, reason)
    return own, own.model


class StackHead:
    """The parts of a `DraftHead` that a `LayerStack` implements.

    The class constants describe most heads: one pass over the rows of a step, which reads the token
    after each row, and later its own states.

    Args:
        stack: the layers.

    Attributes:
        stack: this.
        cache: its keys and values.
    """

    num_passes = 1
    is_chained = True
    reads_states = True
    max_drafts: int | None = None
    lookahead = 1
    aux_layers: tuple[int, ...] = ()
    token_map: Tensor | None = None

    def __init__(self, stack: LayerStack) -> None:
        self.stack = stack
        self.cache: KvCache

    @property
    def hidden_size(self) -> int:
        """Width of the states that it reads."""
        return self.stack.hidden_size

    @property
    def dtype(self) -> torch.dtype:
        """Data type of these states."""
        return self.stack.dtype

    @property
    def vocab_size(self) -> int:
        """Number of tokens that it may draft."""
        return self.stack.lm_head.num_outputs

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes per token over all of its layers."""
        return self.stack.kv_bytes_per_token()

    def reserve(self, rows: int) -> None:
        """Allocate the buffers of passes with up to `rows` rows."""
        self.stack.reserve(rows)

    def allocate(self, capacity: CacheCapacity) -> None:
        """Allocate its keys and values on the target's pages."""
        self.cache = self.stack.new_kv_cache(*capacity)

    def kv_tensors(self) -> Sequence[Tensor]:
        """Return its keys and values."""
        return [shard.tensor for shard in self.cache.page_shards]

    def workspace_size(self, rows: int, batch: int, pages: int) -> int:
        """Return the size of the workspace of attention, in floats."""
        return self.stack.workspace_size(rows, batch, pages, self.cache)

    def sums_size(self, rows: int, outputs: int) -> int:
        """Return the size of the workspace of linear layers, in floats."""
        return self.stack.sums_size(rows, outputs)

    def target_states(self, target: TargetStep) -> Tensor:
        """Return the output of the final norm."""
        return target.hidden

    def logits(
        self, index: int, hidden: Tensor, *, out: Tensor | None = None, sums: Tensor | None = None
    ) -> Tensor:
        """Return the logits of rows."""
        return self.stack.logits(hidden, out=out, sums=sums)
