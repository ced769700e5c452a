# SPDX-License-Identifier: Apache-2.0
"""The rows that a model's layers run over, and where their requests' keys and values are."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True, kw_only=True)
class LayerBatch:
    """What layers need to know about the rows that they run over."""

    positions: Tensor  # int32 [rows]
    cache_slots: Tensor  # int64 [rows]
    qo_indptr: Tensor  # int32 [batch + 1]
    kv_indptr: Tensor  # int32 [batch + 1], pages
    kv_indices: Tensor  # int32 [pages]
    kv_lens: Tensor  # int32 [batch]
    slots: Tensor | None = None  # int32 [batch]; None: of models that keep nothing in slots
    # Both int32 [levels, batch]; None: nobody shares anything.
    prefix_leaders: Tensor | None = None
    prefix_lens: Tensor | None = None
    # Both int64 [copies]: what is copied in the caches behind the rows. None: nothing.
    from_slots: Tensor | None = None
    to_slots: Tensor | None = None
    # Both float32, for every layer, as they run one after the other; None: allocated per layer.
    workspace: Tensor | None = None  # [workspace_size()], for attention
    sums: Tensor | None = None  # [sums_size()], for the projections
    # False: a row sees all positions of its request, as the rows of a block drafter do.
    is_causal: bool = True


@dataclass(slots=True, kw_only=True)
class StepBatch(LayerBatch):
    """The rows of one step of the target."""

    token_ids: Tensor  # int32 [rows]
