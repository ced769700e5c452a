# SPDX-License-Identifier: Apache-2.0
"""Row-parallel projection to the hidden states: ranks hold the weights of different inputs."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from specops import dense
from specops.dense import PackedWeight
from specops.engine.models.shards import Sharding
from specops.engine.models.weights import WeightSource
from specops.engine.parallel.ranks import Ranks


@dataclass(frozen=True)
class RowParallelLinear:
    """Row-parallel projection: each rank holds the weights of its own inputs.

    Attributes:
        shards: weights of consecutive input ranges, one for each local virtual TP rank.
        bias: bias that is added once to the sum over all ranks, or None.
        ranks: tensor-parallel ranks that hold the shards.
    """

    shards: Sequence[PackedWeight]
    bias: Tensor | None
    ranks: Ranks

    def run(self, x: Tensor, out: Tensor, sums: Tensor | None) -> None:
        """Compute the projection of the rows, summed over all ranks.

        Args:
            x: [rows, inputs of this rank].
            out: [rows, outputs]; written.
            sums: workspace of `dense.linear`.
        """
        if self.ranks.num_virtual_ranks == 1:
            dense.linear(x, self.shards[0], self.bias, out=out, workspace=sums)
            return
        partial_sums = self.ranks.partial_sums(out.shape, out.device)
        for index, partial_sum in enumerate(partial_sums):
            self.partial_sum(index, x, partial_sum, sums)
        self.ranks.add(partial_sums, self.bias, out)

    def partial_sum(self, index: int, x: Tensor, out: Tensor, sums: Tensor | None) -> None:
        """Compute the partial sum of one virtual TP rank into `out`; see `run`."""
        weight = self.shards[index]
        dense.linear(self.inputs_of(index, x), weight, out=out, workspace=sums)

    def inputs_of(self, index: int, x: Tensor) -> Tensor:
        """Return the columns of `x` that one local virtual TP rank reads."""
        size = self.shards[index].num_inputs
        return x[:, index * size : (index + 1) * size]


def load_row_parallel(
    source: WeightSource,
    name: str,
    outputs: int,
    count: int,
    what: str,
    each: int,
    *,
    has_bias: bool,
    ranks: Ranks,
) -> RowParallelLinear:
    """Load a row-parallel projection.

    Args:
        source: source of the weights.
        name: tensor name, without the suffix.
        outputs: width of the hidden states.
        count: number of units to distribute, such as heads.
        what: name of these units in error messages.
        each: inputs per unit.
        has_bias: whether there is a bias.
        ranks: tensor-parallel ranks over which the inputs are sharded.

    Raises:
        ModelError: a tensor is missing, has the wrong shape or cannot be sharded.
    """
    shards = [
        source.linear("", (name,), (outputs,), count * each, shard=shard)
        for shard in Sharding(ranks).of_inputs(count, what, each)
    ]
    bias = source.bias("", (name,), (outputs,)) if has_bias else None
    return RowParallelLinear(shards, bias, ranks)
