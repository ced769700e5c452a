# SPDX-License-Identifier: Apache-2.0
"""Common parts of draft heads that are stacks of decoder layers."""

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from specops.api.methods import METHODS, method_of
from specops.api.methods.method import WeightOptions
from specops.engine.drafters.base import DrafterContext, MethodUnavailable, TargetStep
from specops.engine.models import CacheCapacity, KvCache, LayerStack

Options = TypeVar("Options", bound=WeightOptions)


def named_weights(context: DrafterContext, kind: type[Options], what: str) -> tuple[Options, str]:
    """Return a method's options, and the directory of the checkpoint that they must name.

    Args:
        context: the engine's config, target, tokenizer and device.
        kind: class of the options.
        what: subject and verb of the error message, such as "EAGLE head is".

    Raises:
        MethodUnavailable: the configuration names no directory.
    """
    own = context.config.speculative_config.options_of(kind)
    if own.model is None:
        method = next(name for name in METHODS if method_of(name).options is kind)
        reason = (
            f'no {what} named: set speculative_config to {{"method": "{method}", "model": "DIR"}}'
        )
        raise MethodUnavailable(reason, reason)
    return own, own.model


class StackHead:
    """Base class of draft heads that run a `LayerStack`.

    The class constants describe most heads: one pass over the rows of a step, which reads the token
    after each row. For further drafts, it is repeated on its own states.

    Args:
        stack: the layers.

    Attributes:
        stack: the argument.
        cache: KV cache of the layers.
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
        """Width of the hidden states that rows read."""
        return self.stack.hidden_size

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the hidden states that rows read."""
        return self.stack.dtype

    @property
    def vocab_size(self) -> int:
        """Size of the draft vocabulary."""
        return self.stack.lm_head.num_outputs

    @property
    def kv_bytes_per_token(self) -> int:
        """KV bytes per token, over all layers."""
        return self.stack.kv_bytes_per_token()

    def reserve(self, rows: int) -> None:
        """Allocate the buffers of passes with up to `rows` rows."""
        self.stack.reserve(rows)

    def allocate(self, capacity: CacheCapacity) -> None:
        """Allocate the layers' keys and values on the target's pages."""
        self.cache = self.stack.new_kv_cache(*capacity)

    def kv_tensors(self) -> Sequence[Tensor]:
        """Return the tensors of the layers' keys and values."""
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
        """Return the logits of the rows `hidden`."""
        return self.stack.logits(hidden, out=out, sums=sums)
