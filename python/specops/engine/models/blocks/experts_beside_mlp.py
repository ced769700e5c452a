# SPDX-License-Identifier: Apache-2.0
"""Dense MLP and a mixture of experts side by side; norms surround both."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from specops import dense
from specops.engine.models.batch import LayerBatch
from specops.engine.models.blocks.block import BlockLoader, MlpBlock, NewRows, Norm, Shape
from specops.engine.models.blocks.column_parallel import ColumnParallelLinear
from specops.engine.models.blocks.experts import (
    Experts,
    ExpertsConfig,
    ExpertsShape,
    ExpertsViews,
)
from specops.engine.models.blocks.mlp import DenseMlp, DenseMlpConfig
from specops.engine.models.blocks.row_parallel import RowParallelLinear


@dataclass(frozen=True)
class ExpertsBesideMlpViews:
    """Activations of a step's rows."""

    mlp: Any
    experts: ExpertsViews
    residual: Tensor  # [rows, hidden_size], the layer's states before the norm
    normed: Tensor  # [rows, hidden_size], inputs of the experts
    mixed: Tensor  # [rows, hidden_size], outputs of the experts


@dataclass(frozen=True)
class ExpertsBesideMlpShape:
    """Shapes of both blocks."""

    mlp: Shape
    experts: ExpertsShape

    def views(self, new: NewRows) -> ExpertsBesideMlpViews:
        """Return views of the activation buffers that `new` makes."""
        hidden = self.experts.hidden_size
        return ExpertsBesideMlpViews(
            mlp=self.mlp.views(new),
            experts=self.experts.views(new),
            residual=new("residual", hidden),  # the buffer of `StepViews` with this name
            normed=new("experts_in", hidden),
            mixed=new("experts_out", hidden),
        )


@dataclass(frozen=True)
class BesideNorms:
    """Norms of the blocks.

    Attributes:
        mlp_output: norm of the dense MLP's output.
        experts_input: norm of the layer's states, before the experts.
        experts_output: norm of the experts' output.
    """

    mlp_output: Norm
    experts_input: Norm
    experts_output: Norm


class ExpertsBesideMlp(MlpBlock):
    """Sum of the normed outputs of a dense MLP and of a mixture of experts.

    The dense MLP reads the layer's normed states. The experts read the states with a norm of their
    own, and so does the router.

    Args:
        mlp: dense MLP.
        experts: experts without a shared MLP.
        norms: norms of both.
    """

    def __init__(self, mlp: DenseMlp, experts: Experts, norms: BesideNorms) -> None:
        self.shape = ExpertsBesideMlpShape(mlp.shape, experts.shape)
        self._mlp, self._experts, self._norms = mlp, experts, norms

    @property
    def projections(self) -> Sequence[ColumnParallelLinear | RowParallelLinear]:
        """Projections of the dense MLP."""
        return self._mlp.projections

    def expert_sums_size(self, rows: int) -> int:
        """Return how many floats of `LayerBatch.sums` experts need for up to `rows` rows."""
        return self._experts.expert_sums_size(rows)

    def bytes_read(self, rows: int) -> float:
        """Return the expected bytes of weights read if rows choose their experts independently."""
        return super().bytes_read(rows) + self._experts.bytes_read(rows)

    def run(self, x: Tensor, batch: LayerBatch, views: ExpertsBesideMlpViews, out: Tensor) -> None:
        """Compute both blocks of the rows, and add their outputs in `out`."""
        norms, mixed = self._norms, views.mixed
        self._mlp.run(x, batch, views.mlp, out)
        dense.rms_norm(out, *norms.mlp_output, out=out)
        self._experts.route(views.residual, views.experts)
        dense.rms_norm(views.residual, *norms.experts_input, out=views.normed)
        self._experts.mix(views.normed, batch, views.experts, mixed)
        dense.rms_norm(mixed, *norms.experts_output, out=mixed)
        out.add_(mixed)


@dataclass(frozen=True, kw_only=True)
class ExpertsBesideMlpConfig:
    """Configuration of a dense MLP and a mixture of experts side by side.

    Attributes:
        mlp: dense MLP.
        experts: experts without a shared MLP.
        mlp_name: tensor name prefix of the dense MLP.
        mlp_norm: tensor name of the norm of its output.
        experts_input_norm: tensor name of the norm before the experts.
        experts_output_norm: tensor name of the norm of their output.
    """

    kind: ClassVar[str] = "a mixture of experts beside a dense MLP"
    has_experts: ClassVar[bool] = True

    mlp: DenseMlpConfig
    experts: ExpertsConfig
    mlp_name: str = "mlp."
    mlp_norm: str = "post_feedforward_layernorm_1"
    experts_input_norm: str = "pre_feedforward_layernorm_2"
    experts_output_norm: str = "post_feedforward_layernorm_2"

    def narrowed(self, width: int) -> "ExpertsBesideMlpConfig":
        """Return this configuration with the inner width `width`."""
        return replace(self, mlp=self.mlp.narrowed(width), experts=self.experts.narrowed(width))

    def load(self, loader: BlockLoader, prefix: str) -> ExpertsBesideMlp:
        """Load both blocks; their tensor names begin with `prefix`.

        Raises:
            ModelError: a tensor is missing or has the wrong shape.
        """
        return ExpertsBesideMlp(
            self.mlp.load(loader, prefix + self.mlp_name),
            self.experts.load(loader, prefix),
            BesideNorms(
                mlp_output=loader.norm(prefix + self.mlp_norm),
                experts_input=loader.norm(prefix + self.experts_input_norm),
                experts_output=loader.norm(prefix + self.experts_output_norm),
            ),
        )
