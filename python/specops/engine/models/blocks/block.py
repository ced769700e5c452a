# SPDX-License-Identifier: Apache-2.0
"""Interfaces common to all blocks: loading, norms, RoPE and activations."""

import json
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from specops import attention
from specops.api.errors import ModelError
from specops.dense import PackedWeight
from specops.engine.models.adapters import AdapterSite
from specops.engine.models.batch import LayerBatch
from specops.engine.models.blocks.column_parallel import ColumnParallelLinear
from specops.engine.models.blocks.row_parallel import RowParallelLinear
from specops.engine.models.kv import AnyKvSpec, KvSpec, LayerKv, StateSpec
from specops.engine.models.shards import Sharding
from specops.engine.models.weight_cache import CachedWeights
from specops.engine.models.weights import WeightSource
from specops.engine.parallel.ranks import ALONE, Ranks


class NewRows(Protocol):
    """Factory of activation tensors [rows, width] in named buffers."""

    def __call__(self, name: str, width: int, dtype: torch.dtype | None = None, /) -> Tensor:
        """Return a tensor [rows, width].

        Args:
            name: buffer name; blocks that use the same name share memory and must use one dtype.
            width: elements of a row.
            dtype: element type; None: the dtype of the model.
        """


class Shape(Hashable, Protocol):
    """Sizes of a block. Blocks with equal shapes share one set of views."""

    def views(self, new: NewRows) -> Any:
        """Return views of the block's activations, in memory shared with other blocks."""


class Block(ABC):
    """Base class of the attention and MLP blocks of a layer.

    Attributes:
        shape: sizes of the block.
    """

    shape: Shape

    @property
    @abstractmethod
    def projections(self) -> Sequence[ColumnParallelLinear | RowParallelLinear]:
        """Projections of this block, which LoRA adapters may change."""

    @property
    def weights(self) -> Sequence[PackedWeight]:
        """Packed projections of this block that need `linear` workspace."""
        return [weight for one in self.projections for weight in one.weights]

    @property
    def sites(self) -> Sequence[AdapterSite]:
        """Sites of LoRA adapters."""
        return [site for one in self.projections for site in one.sites]

    def bytes_read(self, rows: int) -> float:
        """Return the expected bytes of weights that a step of `rows` rows reads."""
        return sum(map(bytes_of, self.weights))


def bytes_of(weight: PackedWeight) -> int:
    """Return the size of a packed weight in bytes."""
    return sum(one.nbytes for one in weight if isinstance(one, Tensor))


class MixingBlock(Block):
    """Base class of attention blocks: rows interact through cached keys and values or states.

    Attributes:
        kv: layout of the cached data.
        sliding_window: number of positions that a row attends to; None: all.
    """

    kv: AnyKvSpec
    sliding_window: int | None

    @abstractmethod
    def workspace_size(self, rows: int, batch: int, pages: int, page_size: int) -> int:
        """Return how many floats of attention workspace steps of up to these sizes need."""

    @abstractmethod
    def run(self, x: Tensor, batch: LayerBatch, cache: Any, views: Any, out: Tensor) -> None:
        """Update the cache with these rows and compute their outputs from the cache.

        Args:
            x: [rows, hidden_size], normalized.
            batch: metadata of the rows.
            cache: cache of this layer, with the layout `kv`.
            views: views made by `shape`, with the same number of rows.
            out: [rows, hidden_size]; written.
        """


class StateBlock(MixingBlock):
    """Base class of blocks with one state per request, such as linear attention.

    Attributes:
        kv: layout of a state.
    """

    kv: StateSpec
    sliding_window = None

    def workspace_size(self, rows: int, batch: int, pages: int, page_size: int) -> int:
        """Return 0: only attention needs this workspace."""
        return 0


class AttentionBlock(MixingBlock):
    """Base class of attention blocks with keys and values of every token on pages.

    Attributes:
        kv: layout of a token's keys and values.
    """

    kv: KvSpec

    @abstractmethod
    def append_kv(self, x: Tensor, batch: LayerBatch, cache: LayerKv, views: Any) -> None:
        """Write the keys and values of the rows, without computing attention.

        Block drafters use this: the keys and values of the text are projected from hidden states of
        the target.

        Args:
            x: [rows, hidden_size], input of the key and value projections.
            batch: positions and cache slots of the rows.
            cache: cache of this layer.
            views: views made by `shape`, with the same number of rows.
        """


class MlpBlock(Block):
    """Base class of MLP blocks, which compute each row independently of the others."""

    def expert_sums_size(self, rows: int) -> int:
        """Return how many floats of `LayerBatch.sums` experts need for up to `rows` rows."""
        return 0

    @abstractmethod
    def run(self, x: Tensor, batch: LayerBatch, views: Any, out: Tensor) -> None:
        """Compute the MLP of the rows.

        Args:
            x: [rows, hidden_size], normalized.
            batch: metadata of the rows.
            views: views made by `shape`, with the same number of rows.
            out: [rows, hidden_size]; written.
        """


class Norm(NamedTuple):
    """Weight and epsilon of an RMSNorm, in the order of `dense.rms_norm`."""

    weight: Tensor
    eps: float


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary embedding: base, scaling as in config.json, and number of rotated elements.

    With `is_identity`, these elements are rotated by 0 at every position, which changes no bit.
    """

    theta: float
    scaling: Mapping[str, Any] | None
    dim: int
    is_identity: bool = False


NO_ROPE = Rope(theta=1.0, scaling=None, dim=0, is_identity=True)  # of attention without positions


@dataclass
class RopeTables:
    """Cosine/sine tables of a model's rotary embeddings, each computed once.

    Attributes:
        num_positions: rows of a table.
        device: device of the tables.
        cached: the model's entry of the weight cache, which also stores tables; None: none.
    """

    num_positions: int
    device: torch.device
    cached: CachedWeights | None = None
    _tables: list[tuple[Rope, Tensor]] = field(default_factory=list)

    def of(self, rope: Rope) -> Tensor:
        """Return the table of a rotary embedding.

        Raises:
            ModelError: the table does not fit in memory.
        """
        for known, table in self._tables:
            if known == rope:
                return table
        arguments = self.num_positions, rope.dim, rope.theta, rope.scaling
        make = partial(attention.rope_cos_sin, *arguments)
        try:
            if rope.is_identity:
                pairs = max(rope.dim // 2, 1)  # the ops rotate at least one pair
                table = torch.tensor([1.0, 0.0]).repeat_interleave(pairs)
                table = table.repeat(self.num_positions, 1)
            elif self.cached is None:
                table = make()
            else:
                table = self.cached.table(json.dumps(["rope", *arguments]), make)
        except RuntimeError as error:
            raise ModelError(
                f"max_model_len must be smaller: positions up to {self.num_positions} do not fit "
                "the memory"
            ) from error
        self._tables.append((rope, table.to(self.device)))
        return self._tables[-1][1]


@dataclass(frozen=True, kw_only=True)
class BlockLoader:
    """Weight source and settings for loading blocks.

    Attributes:
        source: source of the weights.
        hidden_size: width of the hidden states.
        norm_eps: epsilon of every norm.
        kv_dtype: dtype of keys and values on pages.
        ropes: RoPE tables that layers share.
        ranks: tensor-parallel ranks over which blocks are sharded.
        is_adaptable: whether LoRA adapters may change the blocks. Gates and ups of dense MLPs are
            then computed before their activation, which changes no bit.
    """

    source: WeightSource
    hidden_size: int
    norm_eps: float
    kv_dtype: torch.dtype
    ropes: RopeTables
    ranks: Ranks = ALONE
    is_adaptable: bool = False

    @property
    def sharding(self) -> Sharding:
        """Sharding of a block's weights over the ranks."""
        return Sharding(self.ranks)

    def norm(self, name: str, width: int | None = None) -> Norm:
        """Load a norm of `width` elements; None: the hidden size."""
        weight = self.source.norm(f"{name}.weight", self.hidden_size if width is None else width)
        return Norm(weight, self.norm_eps)
