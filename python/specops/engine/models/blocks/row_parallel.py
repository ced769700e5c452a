# SPDX-License-Identifier: Apache-2.0
"""Row-parallel projection to the hidden states: ranks hold the weights of different inputs."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from specops import dense
from specops.dense import PackedWeight
from specops.engine.models.adapters import AdapterSite, add_adapters
from specops.engine.models.batch import LayerBatch
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
        sites: sites of LoRA adapters, one for each shard; empty for experts, which
            have none and only use the shards.
    """

    shards: Sequence[PackedWeight]
    bias: Tensor | None
    ranks: Ranks
    sites: Sequence[AdapterSite] = ()

    @property
    def weights(self) -> Sequence[PackedWeight]:
        """Packed weights of the projection."""
        return self.shards

    def run(self, x: Tensor, out: Tensor, batch: LayerBatch) -> None:
        """Compute the projection of the rows, summed over all ranks, with their adapters.

        Args:
            x: [rows, inputs of this rank].
            out: [rows, outputs]; written.
            batch: metadata of the rows.
        """
        if self.ranks.num_virtual_ranks == 1:
            self._shard(0, x, out, batch, self.bias)
            return
        partial_sums = self.ranks.partial_sums(out.shape, out.device)
        for index, partial_sum in enumerate(partial_sums):
            self.partial_sum(index, x, partial_sum, batch)
        self.ranks.add(partial_sums, self.bias, out)

    def partial_sum(self, index: int, x: Tensor, out: Tensor, batch: LayerBatch) -> None:
        """Compute the partial sum of one virtual TP rank into `out`; see `run`.

        The products of the adapters are part of the sum, so they need no communication.
        """
        self._shard(index, self.inputs_of(index, x), out, batch, None)

    def _shard(
        self, index: int, x: Tensor, out: Tensor, batch: LayerBatch, bias: Tensor | None
    ) -> None:
        dense.linear(x, self.shards[index], bias, out=out, workspace=batch.sums)
        add_adapters(batch.adapters, self.sites[index], x, out)

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
    inputs, parts, sizes = count * each, (name,), (outputs,)
    shards = Sharding(ranks).of_inputs(count, what, each)
    return RowParallelLinear(
        [source.linear("", parts, sizes, inputs, shard=shard) for shard in shards],
        source.bias("", parts, sizes) if has_bias else None,
        ranks,
        [
            AdapterSite(prefix="", parts=parts, outputs=sizes, inputs=inputs, shard=shard)
            for shard in shards
        ],
    )
