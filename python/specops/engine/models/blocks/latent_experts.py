# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts in a latent space: projections to it and back surround the experts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from specops.engine.models.batch import LayerBatch
from specops.engine.models.blocks.block import BlockLoader, MlpBlock, NewRows, Shape
from specops.engine.models.blocks.column_parallel import (
    ColumnParallelLinear,
    load_column_parallel,
)
from specops.engine.models.blocks.experts import (
    Experts,
    ExpertsConfig,
    ExpertsShape,
    ExpertsViews,
)
from specops.engine.models.blocks.mlp import DenseMlp, DenseMlpConfig
from specops.engine.models.blocks.row_parallel import RowParallelLinear


@dataclass(frozen=True)
class LatentExpertsViews:
    """Activations of a step's rows."""

    experts: ExpertsViews
    latent: Tensor  # [rows, latent width], inputs of the experts
    mixed: Tensor  # [rows, latent width], outputs of the experts
    shared: Any  # views of the shared MLP
    shared_out: Tensor  # [rows, hidden_size], float32


@dataclass(frozen=True)
class LatentExpertsShape:
    """Sizes of the block."""

    experts: ExpertsShape
    shared: Shape

    def views(self, new: NewRows) -> LatentExpertsViews:
        """Return views of the activation buffers that `new` makes."""
        return LatentExpertsViews(
            experts=self.experts.views(new),
            latent=new("latent_in", self.experts.out_size),
            mixed=new("latent_out", self.experts.out_size),
            shared=self.shared.views(new),
            shared_out=new("shared_out", self.experts.hidden_size, torch.float32),
        )


class LatentExperts(MlpBlock):
    """Mixture of experts in a latent space: up(experts(down(x))), plus the shared MLP of x.

    The router reads x, too. Each rank has the whole projections to the latent space and back.

    Args:
        experts: experts without a shared MLP.
        down: projection of the rows to the latent space.
        up: projection back.
        shared: shared MLP.
    """

    def __init__(
        self,
        experts: Experts,
        down: ColumnParallelLinear,
        up: ColumnParallelLinear,
        shared: DenseMlp,
    ) -> None:
        self.shape = LatentExpertsShape(experts.shape, shared.shape)
        self._experts, self._down, self._up, self._shared = experts, down, up, shared

    @property
    def projections(self) -> Sequence[ColumnParallelLinear | RowParallelLinear]:
        """All projections but those of the experts."""
        return (self._down, self._up, *self._shared.projections)

    def bytes_read(self, rows: int) -> float:
        """Return the expected bytes of weights read if rows choose their experts independently."""
        return super().bytes_read(rows) + self._experts.bytes_read(rows)

    def run(self, x: Tensor, batch: LayerBatch, views: LatentExpertsViews, out: Tensor) -> None:
        """Compute the mixture of experts of the rows into `out`."""
        self._experts.route(x, views.experts)
        self._down.run(x, views.latent, batch)
        self._experts.mix(views.latent, batch, views.experts, views.mixed)
        self._up.run(views.mixed, out, batch)
        self._shared.run(x, batch, views.shared, views.shared_out)
        out.add_(views.shared_out)


@dataclass(frozen=True, kw_only=True)
class LatentExpertsConfig:
    """Configuration of a mixture of experts in a latent space.

    Attributes:
        experts: experts without a shared MLP.
        width: width of the latent space.
        shared: shared MLP, applied to every row.
        down_name: tensor name of the projection to the latent space.
        up_name: tensor name of the projection back.
        shared_name: tensor name prefix of the shared MLP.
    """

    kind: ClassVar[str] = "a mixture of latent experts"
    has_experts: ClassVar[bool] = True

    experts: ExpertsConfig
    width: int
    shared: DenseMlpConfig
    down_name: str = "fc1_latent_proj"
    up_name: str = "fc2_latent_proj"
    shared_name: str = "shared_experts."

    def narrowed(self, width: int) -> "LatentExpertsConfig":
        """Return this configuration with the inner and latent width `width`."""
        experts, shared = self.experts.narrowed(width), self.shared.narrowed(width)
        return replace(self, experts=experts, width=width, shared=shared)

    def load(self, loader: BlockLoader, prefix: str) -> LatentExperts:
        """Load the block whose tensor names begin with `prefix`.

        Raises:
            ModelError: a tensor is missing or has the wrong shape.
        """
        source, hidden = loader.source, loader.hidden_size
        latent = replace(loader, hidden_size=self.width)
        return LatentExperts(
            self.experts.load(latent, prefix, hidden),
            load_column_parallel(source, prefix, (self.down_name,), (self.width,), hidden),
            load_column_parallel(source, prefix, (self.up_name,), (hidden,), self.width),
            self.shared.load(loader, prefix + self.shared_name),
        )
