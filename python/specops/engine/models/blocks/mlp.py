# SPDX-License-Identifier: Apache-2.0
"""Dense gated MLP."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from specops import dense
from specops.dense import PackedWeight
from specops.engine.models.blocks.block import BlockLoader, MlpBlock, NewRows
from specops.engine.models.blocks.row_parallel import RowParallelLinear, load_row_parallel
from specops.engine.models.shards import Shard

_GATE_UP = ("gate_proj", "up_proj")


@dataclass(frozen=True)
class DenseMlpShape:
    """Inner width of this rank's shard."""

    width: int

    def views(self, new: NewRows) -> Tensor:
        """Return the buffer [rows, width] of the gated activations."""
        return new("activated", self.width)


@dataclass(frozen=True)
class DenseMlp(MlpBlock):
    """Dense MLP: down(activation(gate) * up). `linear` computes gate, up and activation at once."""

    shape: DenseMlpShape
    gate_up: PackedWeight
    gate_up_bias: Tensor | None
    down: RowParallelLinear

    @property
    def weights(self) -> Sequence[PackedWeight]:
        """Packed projections of this block."""
        return (self.gate_up, *self.down.shards)

    def run(self, x: Tensor, sums: Tensor | None, views: Tensor, out: Tensor) -> None:
        """Compute the MLP of the rows into `out`."""
        self.activate(x, sums, views)
        self.down.run(views, out, sums)

    def activate(self, x: Tensor, sums: Tensor | None, views: Tensor) -> None:
        """Compute the gated activations `activation(gate) * up` into `views`; see `run`."""
        dense.linear(x, self.gate_up, self.gate_up_bias, out=views, workspace=sums)


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
        return DenseMlp(
            DenseMlpShape(len(local_width)),
            source.linear(prefix, _GATE_UP, sizes, hidden, activation=self.activation, shard=shard),
            source.bias(prefix, _GATE_UP, sizes, shard=shard) if self.has_bias else None,
            load_row_parallel(
                source,
                f"{prefix}down_proj",
                hidden,
                self.width,
                "inner widths of an MLP",
                1,
                has_bias=self.has_bias,
                ranks=loader.ranks,
            ),
        )
