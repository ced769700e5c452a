# SPDX-License-Identifier: Apache-2.0
"""Dense gated MLP."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from specops import dense
from specops.dense import PackedWeight
from specops.engine.models.adapters import AdapterSite, add_adapters
from specops.engine.models.batch import LayerBatch
from specops.engine.models.blocks.block import BlockLoader, MlpBlock, NewRows
from specops.engine.models.blocks.row_parallel import RowParallelLinear, load_row_parallel
from specops.engine.models.shards import Shard

_GATE_UP = ("gate_proj", "up_proj")


_ACTIVATE = {
    "silu": dense.silu_mul,
    "gelu_tanh": dense.gelu_tanh_mul,
    "swiglu_oai": dense.swiglu_oai_mul,
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

    gate_up: Tensor  # [rows, 2 * width]
    activated: Tensor  # [rows, width]


@dataclass(frozen=True)
class AdaptableMlpShape:
    """Inner width of an MLP that LoRA adapters may change."""

    width: int

    def views(self, new: NewRows) -> AdaptableMlpViews:
        """Return views of the activation buffers that `new` makes."""
        return AdaptableMlpViews(new("gate_up", 2 * self.width), new("activated", self.width))


@dataclass(frozen=True)
class DenseMlp(MlpBlock):
    """Dense MLP: down(activation(gate) * up). `linear` computes gate, up and activation at once."""

    shape: DenseMlpShape | AdaptableMlpShape
    gate_up: PackedWeight
    gate_up_bias: Tensor | None
    down: RowParallelLinear

    @property
    def weights(self) -> Sequence[PackedWeight]:
        """Packed projections of this block."""
        return (self.gate_up, *self.down.shards)

    def run(self, x: Tensor, batch: LayerBatch, views: Any, out: Tensor) -> None:
        """Compute the MLP of the rows into `out`."""
        self.activate(x, batch.sums, views)
        self.down.run(views, out, batch.sums)

    def activate(self, x: Tensor, sums: Tensor | None, views: Tensor) -> None:
        """Compute the gated activations `activation(gate) * up` into `views`; see `run`."""
        dense.linear(x, self.gate_up, self.gate_up_bias, out=views, workspace=sums)


@dataclass(frozen=True)
class AdaptableMlp(DenseMlp):
    """Dense MLP whose projections LoRA adapters may change. Its activation is a separate op.

    Rows have the bits of `DenseMlp`: `linear` with an activation equals `linear` and then the op.
    """

    activation: str
    sites: tuple[AdapterSite, AdapterSite]

    def run(self, x: Tensor, batch: LayerBatch, views: AdaptableMlpViews, out: Tensor) -> None:
        """Compute the MLP of the rows into `out`."""
        of_gate_up, of_down = self.sites
        self.activate(x, batch.sums, views.gate_up)  # without the activation
        add_adapters(batch.adapters, of_gate_up, x, views.gate_up)
        _ACTIVATE[self.activation](views.gate_up, out=views.activated)
        self.down.run(views.activated, out, batch.sums)
        add_adapters(batch.adapters, of_down, views.activated, out)


@dataclass(frozen=True, kw_only=True)
class DenseMlpConfig:
    """Configuration of a dense MLP.

    Attributes:
        width: inner width.
        activation: activation of the gates; see `dense.pack_weight`.
        has_bias: whether all projections have biases.
    """

    kind: ClassVar[str] = "a dense MLP"

    width: int
    activation: str = "silu"
    has_bias: bool = False

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
        sizes = (self.width, self.width)
        local_width = loader.sharding.of_rank(self.width, "inner widths of an MLP")
        shard = Shard(outputs=(local_width, local_width))
        activation = None if loader.is_adaptable else self.activation
        gate_up = source.linear(prefix, _GATE_UP, sizes, hidden, activation=activation, shard=shard)
        bias = source.bias(prefix, _GATE_UP, sizes, shard=shard) if self.has_bias else None
        down = load_row_parallel(
            source,
            f"{prefix}down_proj",
            hidden,
            self.width,
            "inner widths of an MLP",
            1,
            has_bias=self.has_bias,
            ranks=loader.ranks,
        )
        if not loader.is_adaptable:
            return DenseMlp(DenseMlpShape(len(local_width)), gate_up, bias, down)
        sites = (
            AdapterSite(prefix=prefix, parts=_GATE_UP, outputs=sizes, inputs=hidden),
            AdapterSite(prefix=prefix, parts=("down_proj",), outputs=(hidden,), inputs=self.width),
        )
        shape = AdaptableMlpShape(len(local_width))
        return AdaptableMlp(shape, gate_up, bias, down, self.activation, sites)
