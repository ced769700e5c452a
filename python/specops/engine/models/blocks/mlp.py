# SPDX-License-Identifier: Apache-2.0
"""Dense MLP, gated or not."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from specops import dense
from specops.engine.models.batch import LayerBatch
from specops.engine.models.blocks.block import BlockLoader, MlpBlock, NewRows
from specops.engine.models.blocks.column_parallel import (
    ColumnParallelLinear,
    load_column_parallel,
)
from specops.engine.models.blocks.row_parallel import RowParallelLinear, load_row_parallel
from specops.engine.models.shards import WHOLE, Shard

RELU2 = "relu2"  # the only activation without gates


def first_parts(activation: str) -> tuple[str, ...]:
    """Return the modules that an MLP's first projection consists of."""
    return ("up_proj",) if activation == RELU2 else ("gate_proj", "up_proj")


def relu2(x: Tensor, *, out: Tensor) -> None:
    """Square the positive elements, and write zeros for the others; `out` may be `x`."""
    torch.clamp(x, min=0, out=out)
    out.mul_(out)


_ACTIVATE: dict[str, Callable[..., Any]] = {
    "silu": dense.silu_mul,
    "gelu_tanh": dense.gelu_tanh_mul,
    "swiglu_oai": dense.swiglu_oai_mul,
    RELU2: relu2,
}


@dataclass(frozen=True)
class DenseMlpShape:
    """Inner width of this rank's shard."""

    width: int

    def views(self, new: NewRows) -> Tensor:
        """Return the buffer [rows, width] of the gated activations."""
        return new("activated", self.width)


@dataclass(frozen=True)
class AdaptableMlpViews:
    """Activations of a step's rows."""

    gate_up: Tensor  # [rows, 2 * width], or [rows, width] without gates
    activated: Tensor  # [rows, width]


@dataclass(frozen=True)
class AdaptableMlpShape:
    """Inner width of an MLP that LoRA adapters may change."""

    width: int
    parts: int

    def views(self, new: NewRows) -> AdaptableMlpViews:
        """Return views of the activation buffers that `new` makes."""
        gate_up = new("gate_up", self.parts * self.width)
        return AdaptableMlpViews(gate_up, new("activated", self.width))


@dataclass(frozen=True)
class DenseMlp(MlpBlock):
    """Dense MLP: down(activation(gate) * up). `linear` computes gate, up and activation at once.

    With the activation relu2, the MLP has no gates: down(relu2(up)).
    """

    shape: DenseMlpShape | AdaptableMlpShape
    gate_up: ColumnParallelLinear
    down: RowParallelLinear
    activation: str

    @property
    def projections(self) -> Sequence[ColumnParallelLinear | RowParallelLinear]:
        """Projections of this block."""
        return (self.gate_up, self.down)

    def run(self, x: Tensor, batch: LayerBatch, views: Any, out: Tensor) -> None:
        """Compute the MLP of the rows into `out`."""
        self.down.run(self.activate(x, batch, views), out, batch)

    def activate(self, x: Tensor, batch: LayerBatch, views: Any) -> Tensor:
        """Return the input of the last projection; see `run`."""
        activated: Tensor = views
        self.gate_up.run(x, activated, batch)
        if self.activation == RELU2:
            relu2(activated, out=activated)
        return activated


@dataclass(frozen=True)
class AdaptableMlp(DenseMlp):
    """Dense MLP whose activation is a separate op: LoRA adapters or factors may change its input.

    Rows have the bits of `DenseMlp`: `linear` with an activation equals `linear` and then the op.
    """

    gate_scale: float = 1.0
    out_scale: float = 1.0

    def run(self, x: Tensor, batch: LayerBatch, views: AdaptableMlpViews, out: Tensor) -> None:
        """Compute the MLP of the rows into `out`."""
        super().run(x, batch, views, out)
        if self.out_scale != 1.0:
            out.mul_(self.out_scale)

    def activate(self, x: Tensor, batch: LayerBatch, views: AdaptableMlpViews) -> Tensor:
        """Return the input of the last projection; see `run`."""
        self.gate_up.run(x, views.gate_up, batch)
        if self.gate_scale != 1.0:
            views.gate_up[:, : self.shape.width].mul_(self.gate_scale)
        _ACTIVATE[self.activation](views.gate_up, out=views.activated)
        return views.activated


@dataclass(frozen=True, kw_only=True)
class DenseMlpConfig:
    """Configuration of a dense MLP.

    Attributes:
        width: inner width.
        activation: activation of the gates, see `dense.pack_weight`; or "relu2", without gates.
        has_bias: whether all projections have biases.
        gate_up_name: name of one tensor with the gates and then the ups; None: they are two.
        down_name: name of the last projection.
        gate_scale: factor on gates before their activation.
        out_scale: factor on outputs.
    """

    kind: ClassVar[str] = "a dense MLP"
    has_experts: ClassVar[bool] = False

    width: int
    activation: str = "silu"
    has_bias: bool = False
    gate_up_name: str | None = None
    down_name: str = "down_proj"
    gate_scale: float = 1.0
    out_scale: float = 1.0

    def narrowed(self, width: int) -> "DenseMlpConfig":
        """Return this configuration with the inner width `width`."""
        return replace(self, width=width)

    def load(self, loader: BlockLoader, prefix: str) -> DenseMlp:
        """Load the block whose tensor names begin with `prefix`.

        Raises:
            ModelError: a tensor is missing or has the wrong shape.
        """
        source = loader.source
        hidden = loader.hidden_size
        parts = first_parts(self.activation)
        sizes = [self.width] * len(parts)
        local_width = loader.sharding.of_rank(self.width, "inner widths of an MLP")
        shard, rows = Shard(outputs=[local_width] * len(parts)), None
        if self.gate_up_name is not None:
            parts, sizes, shard = (self.gate_up_name,), [2 * self.width], WHOLE
            if len(local_width) < self.width:
                gates = torch.arange(local_width.start, local_width.stop, dtype=torch.int32)
                rows = torch.cat([gates, gates + self.width]).to(source.device)
        is_plain = not loader.is_adaptable and self.gate_scale == self.out_scale == 1.0
        activation = self.activation if is_plain and self.activation != RELU2 else None
        gate_up = load_column_parallel(
            source,
            prefix,
            parts,
            sizes,
            hidden,
            has_bias=self.has_bias,
            activation=activation,
            rows=rows,
            shard=shard,
        )
        down = load_row_parallel(
            source,
            prefix + self.down_name,
            hidden,
            self.width,
            "inner widths of an MLP",
            1,
            has_bias=self.has_bias,
            ranks=loader.ranks,
        )
        if is_plain:
            return DenseMlp(DenseMlpShape(len(local_width)), gate_up, down, self.activation)
        num_outputs = gate_up.weight.num_outputs
        shape = AdaptableMlpShape(len(local_width), num_outputs // len(local_width))
        scales = self.gate_scale, self.out_scale
        return AdaptableMlp(shape, gate_up, down, self.activation, *scales)
