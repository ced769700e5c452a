# SPDX-License-Identifier: Apache-2.0
"""Projection whose outputs are sharded: ranks hold the weights of different outputs."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from specops import dense
from specops.dense import PackedWeight
from specops.engine.models.adapters import AdapterSite, add_adapters
from specops.engine.models.batch import LayerBatch
from specops.engine.models.shards import WHOLE, Shard
from specops.engine.models.weights import WeightSource


@dataclass(frozen=True)
class ColumnParallelLinear:
    """Column-parallel projection: each rank has all inputs, and the weights of its own outputs.

    Attributes:
        weight: packed weight of this rank's outputs.
        bias: bias of these outputs, or None.
        site: site of LoRA adapters.
    """

    weight: PackedWeight
    bias: Tensor | None
    site: AdapterSite

    @property
    def weights(self) -> Sequence[PackedWeight]:
        """Packed weights of the projection."""
        return (self.weight,)

    @property
    def sites(self) -> Sequence[AdapterSite]:
        """Sites of LoRA adapters."""
        return (self.site,)

    def run(self, x: Tensor, out: Tensor, batch: LayerBatch) -> None:
        """Compute the projection of the rows, with their adapters.

        Args:
            x: [rows, inputs].
            out: [rows, outputs of this rank]; written.
            batch: metadata of the rows.
        """
        dense.linear(x, self.weight, self.bias, out=out, workspace=batch.sums)
        add_adapters(batch.adapters, self.site, x, out)


def load_column_parallel(
    source: WeightSource,
    prefix: str,
    parts: Sequence[str],
    outputs: Sequence[int],
    inputs: int,
    *,
    has_bias: bool = False,
    activation: str | None = None,
    quantization: str | None = None,
    rows: Tensor | None = None,
    shard: Shard = WHOLE,
) -> ColumnParallelLinear:
    """Load a column-parallel projection; see `WeightSource.linear` for the other arguments.

    Args:
        source: source of the weights.
        prefix: name prefix of the parts.
        has_bias: whether the parts have biases.

    Raises:
        ModelError: a tensor is missing, has the wrong shape or cannot be sharded.
    """
    bias = source.bias(prefix, parts, outputs, shard=shard) if has_bias else None
    if bias is not None and rows is not None:
        bias = bias[rows.long()]
    weight = source.linear(
        prefix,
        parts,
        outputs,
        inputs,
        activation=activation,
        quantization=quantization,
        rows=rows,
        shard=shard,
    )
    site = AdapterSite(
        prefix=prefix, parts=parts, outputs=outputs, inputs=inputs, order=rows, shard=shard
    )
    return ColumnParallelLinear(weight, bias, site)
