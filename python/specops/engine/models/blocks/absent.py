# SPDX-License-Identifier: Apache-2.0
"""Absent blocks, for layers that have attention or an MLP only: they add zeros."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from specops.engine.models.batch import LayerBatch
from specops.engine.models.blocks.block import BlockLoader, MixingBlock, MlpBlock, NewRows
from specops.engine.models.kv import NoKvSpec


@dataclass(frozen=True)
class NoShape:
    """Shape of an absent block."""

    def views(self, new: NewRows) -> None:
        """Return None: the block has no activations."""


class NoMixing(MixingBlock):
    """Absent attention."""

    kv = NoKvSpec()
    shape = NoShape()
    sliding_window = None

    @property
    def projections(self) -> Sequence[Any]:
        """No projections."""
        return ()

    def workspace_size(self, rows: int, batch: int, pages: int, page_size: int) -> int:
        """Return 0."""
        return 0

    def run(self, x: Tensor, batch: LayerBatch, cache: Any, views: Any, out: Tensor) -> None:
        """Write zeros."""
        out.zero_()


class NoMlp(MlpBlock):
    """Absent MLP."""

    shape = NoShape()

    @property
    def projections(self) -> Sequence[Any]:
        """No projections."""
        return ()

    def run(self, x: Tensor, batch: LayerBatch, views: Any, out: Tensor) -> None:
        """Write zeros."""
        out.zero_()


@dataclass(frozen=True)
class NoMixingConfig:
    """Configuration of absent attention."""

    kind: ClassVar[str] = "no attention"

    def without_window(self) -> "NoMixingConfig":
        """Return this configuration."""
        return self

    def load(self, loader: BlockLoader, prefix: str) -> NoMixing:
        """Return the block; there is nothing to load."""
        return NoMixing()


@dataclass(frozen=True)
class NoMlpConfig:
    """Configuration of an absent MLP."""

    kind: ClassVar[str] = "no MLP"
    has_experts: ClassVar[bool] = False

    def narrowed(self, width: int) -> "NoMlpConfig":
        """Return this configuration."""
        return self

    def load(self, loader: BlockLoader, prefix: str) -> NoMlp:
        """Return the block; there is nothing to load."""
        return NoMlp()
