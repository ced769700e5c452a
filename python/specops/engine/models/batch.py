# SPDX-License-Identifier: Apache-2.0
"""Batches of rows that a model's layers run over, and the locations of their keys and values."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from specops.attention import PagedBatch, PrefixTensors
from specops.engine.models.adapters import AdapterRows


@dataclass(slots=True, kw_only=True)
class LayerBatch:
    """Batch of rows for a model's layers."""

    positions: Tensor  # int32 [rows]
    cache_slots: Tensor  # int64 [rows]
    qo_indptr: Tensor  # int32 [batch + 1]
    kv_indptr: Tensor  # int32 [batch + 1], ranges of `kv_indices`
    kv_indices: Tensor  # int32 [pages], page numbers of each request in turn
    kv_lens: Tensor  # int32 [batch]
    slots: Tensor | None = None  # int32 [batch]; only needed by models with per-slot states
    prefixes: PrefixTensors | None = None  # None: no shared prefixes
    # Both float32, reused by all layers; None: each layer allocates its own.
    workspace: Tensor | None = None  # [workspace_size()], for attention
    sums: Tensor | None = None  # [sums_size()], for linear layers
    # False: a row attends to all positions of its request, as in a block drafter.
    is_causal: bool = True
    adapters: Sequence[AdapterRows] = ()  # rows with LoRA adapters; empty in steps of drafters

    @property
    def paged(self) -> PagedBatch:
        """Rows and pages of the requests, as an argument of `append_attention`."""
        return PagedBatch(self.qo_indptr, self.kv_indptr, self.kv_indices, self.kv_lens)


@dataclass(slots=True, kw_only=True)
class StepBatch(LayerBatch):
    """Batch of the target model's rows in one step."""

    token_ids: Tensor  # int32 [rows]
