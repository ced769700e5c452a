# SPDX-License-Identifier: Apache-2.0
"""Stack of layers with an LM head: the core of target models and draft heads."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specops import dense
from specops.dense import PackedWeight
from specops.engine.models.blocks.activations import Activations
from specops.engine.models.blocks.block import bytes_of
from specops.engine.models.blocks.layer import Layer
from specops.engine.models.kv import CacheCapacity, KvCache


class LayerStack:
    """Decoder layers with an LM head, and buffers for both.

    Args:
        layers: layers in order, each of any kind.
        lm_head: packed weight of the LM head.
        hidden_size: width of the hidden states.
        dtype: dtype of the hidden states.
        device: device of the weights.
        projections: packed weights outside the layers that use the same workspace.
        logits_divisor: number by which logits are divided.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        lm_head: PackedWeight,
        *,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        projections: Sequence[PackedWeight] = (),
        logits_divisor: float = 1.0,
    ) -> None:
        self.layers = layers
        self.lm_head = lm_head
        self.hidden_size, self.dtype, self.device = hidden_size, dtype, device
        self._logits_divisor = logits_divisor
        shapes = [layer.shapes for layer in layers]
        self.activations = Activations(shapes, hidden_size, dtype, device)
        # One attention block per shape suffices to find the largest workspace.
        attentions = {(layer.attention.shape, layer.attention.kv): layer for layer in layers}
        self._attentions = [layer.attention for layer in attentions.values()]
        weights = [*projections, *(weight for layer in layers for weight in layer.weights)]
        sizes = {(one.workspace_per_row, one.max_workspace_rows): one for one in weights}
        self._weights = list(sizes.values())

    def reserve(self, rows: int) -> None:
        """Allocate buffers for steps of up to `rows` rows; calls for fewer rows do nothing."""
        self.activations.reserve(rows)

    def new_kv_cache(
        self,
        num_pages: int,
        page_size: int,
        num_slots: int = 1,
        num_drafts: int = 0,
        num_prefix_states: int = 0,
    ) -> KvCache:
        """Allocate the KV cache and states of all layers; see `CacheCapacity`."""
        specs = [layer.attention.kv for layer in self.layers]
        capacity = CacheCapacity(num_pages, page_size, num_slots, num_drafts, num_prefix_states)
        return KvCache.new(specs, capacity, self.device)

    def kv_bytes_per_token(self) -> int:
        """Return the KV bytes per token, over all layers."""
        return sum(layer.attention.kv.bytes_per_token for layer in self.layers)

    def kv_bytes_per_slot(self, num_drafts: int) -> int:
        """Return the bytes of per-slot states, over all layers."""
        return sum(layer.attention.kv.bytes_per_slot(num_drafts) for layer in self.layers)

    @property
    def keeps_states(self) -> bool:
        """True if a layer has per-slot states, as in linear attention."""
        return self.kv_bytes_per_slot(0) > 0

    def bytes_read(self, rows: int) -> float:
        """Return the expected bytes of weights that a step of `rows` rows reads."""
        return bytes_of(self.lm_head) + sum(layer.bytes_read(rows) for layer in self.layers)

    def workspace_size(self, rows: int, batch: int, pages: int, cache: KvCache) -> int:
        """Return how many floats of attention workspace steps of up to these sizes need."""
        sizes = (rows, batch, pages, cache.page_size)
        return max(one.workspace_size(*sizes) for one in self._attentions)

    def sums_size(self, rows: int, outputs: int) -> int:
        """Return the floats of workspace that products need.

        Args:
            rows: largest number of rows.
            outputs: largest number of rows for logits.
        """
        return max(
            dense.linear_workspace_size(outputs, self.lm_head),
            *(dense.linear_workspace_size(rows, weight) for weight in self._weights),
            *(layer.mlp.expert_sums_size(rows) for layer in self.layers),
        )

    def logits(
        self, hidden: Tensor, *, out: Tensor | None = None, sums: Tensor | None = None
    ) -> Tensor:
        """Return float32 logits [rows, vocabulary] of hidden states that `forward` returned."""
        logits = dense.linear(
            hidden, self.lm_head, out=out, out_dtype=torch.float32, workspace=sums
        )
        return logits if self._logits_divisor == 1.0 else logits.div_(self._logits_divisor)
