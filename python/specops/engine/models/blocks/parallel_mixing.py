# SPDX-License-Identifier: Apache-2.0
"""Two mixing blocks side by side: Mamba-2 and attention read the same rows, and are added."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from specops.engine.models.batch import LayerBatch
from specops.engine.models.blocks.attention import Attention, AttentionConfig
from specops.engine.models.blocks.block import BlockLoader, MixingBlock, NewRows, Shape
from specops.engine.models.blocks.column_parallel import ColumnParallelLinear
from specops.engine.models.blocks.mamba2 import Mamba2, Mamba2Config
from specops.engine.models.blocks.row_parallel import RowParallelLinear
from specops.engine.models.kv import ParallelKv, ParallelSpec


class ParallelViews(NamedTuple):
    """Activations of a step's rows."""

    mamba: Any
    attention: Any
    attended: Tensor  # [rows, hidden_size], output of attention


@dataclass(frozen=True)
class ParallelShape:
    """Sizes of both blocks."""

    mamba: Shape
    attention: Shape
    hidden_size: int

    def views(self, new: NewRows) -> ParallelViews:
        """Return views of the activation buffers that `new` makes; the blocks share them."""
        attended = new("parallel_branch", self.hidden_size)
        return ParallelViews(self.mamba.views(new), self.attention.views(new), attended)


class ParallelMixing(MixingBlock):
    """Sum of the scaled outputs of Mamba-2 and attention.

    Args:
        config: configuration of the block.
        mamba: first block.
        attention: second block.
        hidden_size: width of the outputs.
    """

    def __init__(
        self, config: "ParallelConfig", mamba: Mamba2, attention: Attention, hidden_size: int
    ) -> None:
        self.shape = ParallelShape(mamba.shape, attention.shape, hidden_size)
        self.kv = ParallelSpec(attention.kv, mamba.kv)
        self.sliding_window = attention.sliding_window
        self._mamba, self._attention = mamba, attention
        self._mamba_scale, self._attention_scale = config.mamba_scale, config.attention_scale

    @property
    def projections(self) -> Sequence[ColumnParallelLinear | RowParallelLinear]:
        """Projections of both blocks."""
        return (*self._mamba.projections, *self._attention.projections)

    def workspace_size(self, rows: int, batch: int, pages: int, page_size: int) -> int:
        """Return how many floats of workspace attention needs."""
        return self._attention.workspace_size(rows, batch, pages, page_size)

    def run(
        self, x: Tensor, batch: LayerBatch, cache: ParallelKv, views: ParallelViews, out: Tensor
    ) -> None:
        """Run Mamba-2, then attention, and add the outputs."""
        self._mamba.run(x, batch, cache.states, views.mamba, out)
        out.mul_(self._mamba_scale)
        self._attention.run(x, batch, cache.kv, views.attention, views.attended)
        out.add_(views.attended.mul_(self._attention_scale))


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Configuration of Mamba-2 and attention side by side.

    Attributes:
        mamba: first block.
        attention: second block.
        mamba_name: tensor name prefix of the first block.
        attention_name: tensor name prefix of the second block.
        mamba_scale: factor on the output of the first block.
        attention_scale: factor on the output of the second block.
    """

    kind: ClassVar[str] = "Mamba-2 beside attention"

    mamba: Mamba2Config
    attention: AttentionConfig
    mamba_name: str = "mamba."
    attention_name: str = "self_attn."
    mamba_scale: float = 1.0
    attention_scale: float = 1.0

    def without_window(self) -> "ParallelConfig":
        """Return this configuration without a sliding window."""
        return replace(self, attention=self.attention.without_window())

    def load(self, loader: BlockLoader, prefix: str) -> ParallelMixing:
        """Load both blocks; their tensor names begin with `prefix`.

        Raises:
            ModelError: a tensor is missing or has the wrong shape.
        """
        mamba = self.mamba.load(loader, prefix + self.mamba_name)
        attention = self.attention.load(loader, prefix + self.attention_name)
        return ParallelMixing(self, mamba, attention, loader.hidden_size)
