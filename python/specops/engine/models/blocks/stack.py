# SPDX-License-Identifier: Apache-2.0
"""Layers under one LM head, as a target and its drafting modules have them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specops import dense
from specops.dense import PackedWeight
from specops.engine.models.blocks.activations import Activations
from specops.engine.models.blocks.block import bytes_of
from specops.engine.models.blocks.layer import Layer
from specops.engine.models.kv import CacheRoom, KvCache


class LayerStack:
    """Layers, the head that reads what they give, and the memory that both need.

    Args:
        layers: in order; no two need be alike.
        lm_head: makes logits.
        hidden_size: width of the states between layers.
        dtype: of the states.
        device: of the weights.
        projections: what runs beside the layers' own.
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
    ) -> None:
        self.layers = layers
        self.lm_head = lm_head
        self.hidden_size, self.dtype, self.device = hidden_size, dtype, device
        shapes = [(layer.attention.shape, layer.mlp.shape) for layer in layers]
        self.activations = Activations(shapes, hidden_size, dtype, device)
        # One of each kind will do to find the largest.
        attentions = {(layer.attention.shape, layer.attention.kv): layer for layer in layers}
        self._attentions = [layer.attention for layer in attentions.values()]
        weights = [*projections, *(weight for layer in layers for weight in layer.weights)]
        sizes = {(one.num_outputs, one.num_leaves, one.max_split_rows): one for one in weights}
        self._weights = list(sizes.values())

    def reserve(self, rows: int) -> None:
        """Allocates the buffers of steps with up to `rows` rows, which then stay where they are."""
        self.activations.reserve(rows)

    def new_kv_cache(
        self,
        num_pages: int,
        page_size: int,
        num_slots: int = 1,
        num_drafts: int = 0,
        num_kept: int = 0,
    ) -> KvCache:
        """Allocates what every layer keeps; see `CacheRoom`."""
        specs = [layer.attention.kv for layer in self.layers]
        room = CacheRoom(num_pages, page_size, num_slots, num_drafts, num_kept)
        return KvCache.new(specs, room, self.device)

    def kv_bytes_per_token(self) -> int:
        """Returns the bytes one cached token takes over all layers."""
        return sum(layer.attention.kv.bytes_per_token for layer in self.layers)

    def kv_bytes_per_slot(self, num_drafts: int) -> int:
        """Returns the bytes a request takes over all layers, whatever its length."""
        return sum(layer.attention.kv.bytes_per_slot(num_drafts) for layer in self.layers)

    @property
    def keeps_states(self) -> bool:
        """Whether a layer keeps what has no place on pages, nor one for each node of a tree."""
        return self.kv_bytes_per_slot(0) > 0

    def bytes_read(self, rows: int) -> float:
        """Returns how many bytes of weights a step of so many rows is expected to read."""
        return bytes_of(self.lm_head) + sum(layer.bytes_read(rows) for layer in self.layers)

    def workspace_size(self, rows: int, batch: int, pages: int, cache: KvCache) -> int:
        """Returns the floats of workspace for attention in steps of up to these sizes."""
        sizes = (rows, batch, pages, cache.page_size)
        return max(one.workspace_size(*sizes) for one in self._attentions)

    def sums_size(self, rows: int, outputs: int) -> int:
        """Returns the floats that projections split their sums with, the head of `outputs` too."""
        sizes = [dense.linear_workspace_size(rows, weight) for weight in self._weights]
        return max(*sizes, dense.linear_workspace_size(outputs, self.lm_head))

    def logits(
        self, hidden: Tensor, *, out: Tensor | None = None, sums: Tensor | None = None
    ) -> Tensor:
        """Returns the fp32 logits [rows, vocabulary] of rows that `forward` returned."""
        return dense.linear(hidden, self.lm_head, out=out, out_dtype=torch.float32, workspace=sums)
