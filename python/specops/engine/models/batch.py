# SPDX-License-Identifier: Apache-2.0
"""The rows that a model's layers run over, and the locations of their keys and values."""

from dataclasses import dataclass

from torch import Tensor

from specops.attention import PagedBatch, PrefixTensors


@dataclass(slots=True, kw_only=True)
class LayerBatch:
    """Rows that layers run over."""

    positions: Tensor  # int32 [rows]
    cache_slots: Tensor  # int64 [rows]
    qo_indptr: Tensor  # int32 [batch + 1]
    kv_indptr: Tensor  # int32 [batch + 1], pages
    kv_indices: Tensor  # int32 [pages]
    kv_lens: Tensor  # int32 [batch]
    slots: Tensor | None = None  # int32 [batch]; None: for models without per-slot states
    prefixes: PrefixTensors | None = None  # None: no shared prefixes
    # Both float32, shared by all layers, which run in turn; None: allocated per layer.
    workspace: Tensor | None = None  # [workspace_size()], for attention
    sums: Tensor | None = None  # [sums_size()], for linear layers
    # False: a row sees all positions of its request, as the rows of a block drafter do.
    is_causal: bool = True

    @property
    def paged(self) -> PagedBatch:
        """Rows and pages of the requests, as an argument of `append_attention`."""
        return PagedBatch(self.qo_indptr, self.kv_indptr, self.kv_indices, self.kv_lens)


@dataclass(slots=True, kw_only=True)
class StepBatch(LayerBatch):
    """The rows of one step of the target."""

    token_ids: Tensor  # int32 [rows]
