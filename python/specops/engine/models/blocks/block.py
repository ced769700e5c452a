# SPDX-License-Identifier: Apache-2.0
"""What all blocks have in common: how they are loaded, their norms, RoPE and activations."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from specops import attention
from specops.dense import PackedWeight
from specops.engine.errors import ModelError
from specops.engine.models.batch import LayerBatch
from specops.engine.models.kv import KvSpec, LayerKv, StateSpec
from specops.engine.models.shards import Shares
from specops.engine.models.weights import WeightSource
from specops.engine.parallel.ranks import ALONE, Ranks


class NewRows(Protocol):
    """Makes activations [rows, width] on the memory of a name."""

    def __call__(self, name: str, width: int, dtype: torch.dtype | None = None, /) -> Tensor:
        """Returns them.

        Args:
            name: blocks that use one name share its memory, and agree on the dtype.
            width: elements of a row.
            dtype: None: that of the model.
        """


class Shape(Hashable, Protocol):
    """The sizes of a block: blocks of equal shapes share one set of views."""

    def views(self, new: NewRows) -> Any:
        """Returns the views of its activations, on memory that other blocks use as well."""


class Block(ABC):
    """A part of a layer.

    Attributes:
        shape: its sizes.
    """

    shape: Shape

    @property
    @abstractmethod
    def weights(self) -> Sequence[PackedWeight]:
        """Its projections."""

    def bytes_read(self, rows: int) -> float:
        """Returns how many bytes of weights a step of so many rows is expected to read."""
        return sum(map(bytes_of, self.weights))


def bytes_of(weight: PackedWeight) -> int:
    """Returns the bytes of a packed weight."""
    return sum(one.nbytes for one in weight if isinstance(one, Tensor))


class MixingBlock(Block):
    """A part that looks at other rows, by what it keeps of them.

    Attributes:
        kv: what it keeps.
        sliding_window: positions that a row sees; None: all of them.
    """

    kv: KvSpec | StateSpec
    sliding_window: int | None

    @abstractmethod
    def workspace_size(self, rows: int, batch: int, pages: int, page_size: int) -> int:
        """Returns the floats of workspace for steps of up to these sizes."""

    @abstractmethod
    def run(self, x: Tensor, batch: LayerBatch, cache: Any, views: Any, out: Tensor) -> None:
        """Keeps what later rows are to see, and looks at what earlier ones left.

        Args:
            x: [rows, hidden_size], normed.
            batch: the rows.
            cache: of the layer, made by `kv`.
            views: of `shape`, for as many rows.
            out: [rows, hidden_size].
        """


class AttentionBlock(MixingBlock):
    """One that keeps keys and values of each row on pages.

    Attributes:
        kv: what it keeps of a token.
    """

    kv: KvSpec

    @abstractmethod
    def append_kv(self, x: Tensor, batch: LayerBatch, cache: LayerKv, views: Any) -> None:
        """Writes the keys and values of rows, and computes nothing else.

        So a row may see what was made of other states than a row's own: a block drafter's rows see
        keys and values of the target's states.

        Args:
            x: [rows, hidden_size], what keys and values are projected from.
            batch: whose positions and slots these are.
            cache: of the layer.
            views: of `shape`, for as many rows.
        """


class MlpBlock(Block):
    """A part that computes every row from itself."""

    @abstractmethod
    def run(self, x: Tensor, sums: Tensor | None, views: Any, out: Tensor) -> None:
        """Computes rows.

        Args:
            x: [rows, hidden_size], normed.
            sums: workspace of projections.
            views: of `shape`, for as many rows.
            out: [rows, hidden_size].
        """


class Norm(NamedTuple):
    """An RMSNorm, as `dense.rms_norm` takes it."""

    weight: Tensor
    eps: float


@dataclass(frozen=True, kw_only=True)
class Rope:
    """A rotary embedding: its base, its scaling as config.json has it, and how much it rotates."""

    theta: float
    scaling: Mapping[str, Any] | None
    dim: int


@dataclass
class RopeTables:
    """The tables of a model's rotary embeddings, each made once."""

    num_positions: int
    device: torch.device
    _tables: list[tuple[Rope, Tensor]] = field(default_factory=list)

    def of(self, rope: Rope) -> Tensor:
        """Returns the table of one.

        Raises:
            ModelError: it does not fit the memory.
        """
        for known, table in self._tables:
            if known == rope:
                return table
        try:
            table = attention.rope_cos_sin(self.num_positions, rope.dim, rope.theta, rope.scaling)
        except RuntimeError as error:
            raise ModelError(
                f"max_model_len must be smaller: positions up to {self.num_positions} do not fit "
                "the memory"
            ) from error
        self._tables.append((rope, table.to(self.device)))
        return self._tables[-1][1]


@dataclass(frozen=True, kw_only=True)
class BlockLoader:
    """What blocks are loaded with.

    Attributes:
        source: of the weights.
        hidden_size: width of the states between layers.
        norm_eps: of every norm.
        kv_dtype: of keys and values on pages.
        ropes: the tables that layers share.
        ranks: among whom blocks are shared out.
    """

    source: WeightSource
    hidden_size: int
    norm_eps: float
    kv_dtype: torch.dtype
    ropes: RopeTables
    ranks: Ranks = ALONE

    @property
    def shares(self) -> Shares:
        """Deals what blocks have."""
        return Shares(self.ranks)

    def norm(self, name: str, width: int | None = None) -> Norm:
        """Loads a norm of the hidden size, or of another width."""
        weight = self.source.norm(f"{name}.weight", self.hidden_size if width is None else width)
        return Norm(weight, self.norm_eps)
