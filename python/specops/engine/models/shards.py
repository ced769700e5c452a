# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel shards of weights: the ranges of outputs and inputs that a rank holds."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from specops.api.errors import ModelError
from specops.engine.parallel.ranks import ALONE, Ranks, shard_range
from specops.quantization import FP8_BLOCK, QuantizedWeight


@dataclass(frozen=True)
class Sharding:
    """Assignment of heads, widths, experts and vocabulary to ranks.

    Attributes:
        ranks: tensor-parallel ranks over which the model is sharded.
    """

    ranks: Ranks = ALONE

    def of_rank(self, total: int, what: str, each: int = 1) -> range:
        """Return this rank's channels if `total` units of `each` channels are split equally.

        Raises:
            ModelError: the units cannot be divided equally.
        """
        count = self._units_of_virtual_rank(total, what)
        begin = self.ranks.rank * self.ranks.num_local_virtual_ranks * count * each
        return range(begin, begin + self.ranks.num_local_virtual_ranks * count * each)

    def of_inputs(self, total: int, what: str, each: int = 1) -> "list[Shard]":
        """Return the shard of each local virtual TP rank; [WHOLE] if there is one virtual rank.

        The shards are equal ranges of the inputs, which are `total` units of `each` channels.

        Raises:
            ModelError: the units cannot be divided equally.
        """
        size = self._units_of_virtual_rank(total, what) * each
        if self.ranks.num_virtual_ranks == 1:
            return [WHOLE]
        first = self.ranks.rank * self.ranks.num_local_virtual_ranks
        return [
            Shard(inputs=range(i * size, (i + 1) * size))
            for i in range(first, first + self.ranks.num_local_virtual_ranks)
        ]

    def of_copies(self, total: int, what: str, each: int = 1) -> range:
        """Return this rank's range of channels, like `of_rank`, with copies if there are few units.

        If there are more ranks than units, neighboring ranks hold the same unit.

        Raises:
            ModelError: neither of the numbers of units and ranks divides the other.
        """
        size, rank = self.ranks.size, self.ranks.rank
        if total % size and size % total:
            raise ModelError(
                f"tensor_parallel_size must divide the {total} {what}, or be a multiple of them, "
                f"got {size}"
            )
        shard = shard_range(total, size, rank)
        return range(shard.start * each, shard.stop * each)

    def of_vocabulary(self, total: int) -> range:
        """Return this rank's range of token ids; the last ranks may have fewer."""
        most = -(-total // self.ranks.size)
        begin = min(self.ranks.rank * most, total)
        return range(begin, min(begin + most, total))

    def _units_of_virtual_rank(self, total: int, what: str) -> int:
        """Return the number of units per virtual TP rank."""
        if total % self.ranks.num_virtual_ranks:
            is_plain = self.ranks.num_virtual_ranks == self.ranks.size
            name = "tensor_parallel_size" if is_plain else "exact_across_tp"
            raise ModelError(
                f"{name} must divide the {total} {what}, got {self.ranks.num_virtual_ranks}"
            )
        return total // self.ranks.num_virtual_ranks


@dataclass(frozen=True)
class Shard:
    """Shard of a weight that a rank holds.

    Attributes:
        outputs: range of outputs of each fused part; None: all.
        inputs: range of inputs; None: all.
    """

    outputs: Sequence[range] | None = None
    inputs: range | None = None

    @property
    def key(self) -> str:
        """String that identifies the shard."""
        return f"{self.outputs} {self.inputs}"


WHOLE = Shard()


def outputs_of(
    weight: Tensor | QuantizedWeight, outputs: range, name: str
) -> Tensor | QuantizedWeight:
    """Return the part of a weight with a range of outputs, without a copy.

    Raises:
        ModelError: the range begins or ends within a quantization group.
    """
    rows = slice(outputs.start, outputs.stop)
    if isinstance(weight, Tensor):
        return weight[rows]
    scaled = rows
    if weight.kind == "fp8" and weight.group:
        _check_border(outputs, FP8_BLOCK, len(weight.values), "outputs", name)
        scaled = slice(outputs.start // FP8_BLOCK, -(-outputs.stop // FP8_BLOCK))
    return weight._replace(
        values=weight.values[rows],
        scales=weight.scales[scaled],
        offsets=None if weight.offsets is None else weight.offsets[rows],
    )


def inputs_of(
    weight: Tensor | QuantizedWeight, inputs: range, name: str
) -> Tensor | QuantizedWeight:
    """Return the part of a weight with a range of inputs, without a copy of the values.

    Raises:
        ModelError: the range begins or ends within a group that shares a scale, or the groups do
            not consist of consecutive inputs.
    """
    columns = slice(inputs.start, inputs.stop)
    if isinstance(weight, Tensor):
        return weight[:, columns]
    if weight.input_order is not None:
        raise ModelError(
            f"{name} cannot be sharded over ranks: its inputs are quantized in groups that are not "
            "contiguous (desc_act); use a checkpoint without desc_act, or one rank"
        )
    values = weight.values[:, columns]
    if not weight.group:
        return weight._replace(values=values)
    _check_border(inputs, weight.group, weight.values.shape[1], "inputs", name)
    groups = slice(inputs.start // weight.group, -(-inputs.stop // weight.group))
    return weight._replace(
        values=values,
        scales=weight.scales[:, groups],
        offsets=None if weight.offsets is None else weight.offsets[:, groups],
    )


def _check_border(shard: range, size: int, total: int, what: str, name: str) -> None:
    for border in (shard.start, shard.stop):
        if border % size and border != total:
            raise ModelError(
                f"{name} cannot be sharded over ranks: groups of {size} of its {total} {what} "
                f"share a scale, and a rank would hold {shard.start} to {shard.stop}; use fewer "
                "ranks"
            )
