# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel shards of weights: the outputs and inputs that a rank holds."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from specops.api.errors import ModelError
from specops.engine.parallel.ranks import ALONE, Ranks, dealt
from specops.quantization import FP8_BLOCK, QuantizedWeight


@dataclass(frozen=True)
class Shares:
    """Assigns heads, widths, experts and vocabulary to ranks.

    Attributes:
        ranks: that the model is sharded over.
    """

    ranks: Ranks = ALONE

    def of_rank(self, total: int, what: str, each: int = 1) -> range:
        """Return this rank's equal share of `total` units of `each` numbers, as a range of numbers.

        Raises:
            ModelError: the units cannot be divided equally.
        """
        own = self._dealt(total, what)
        begin = self.ranks.rank * self.ranks.num_local_virtual_ranks * own * each
        return range(begin, begin + self.ranks.num_local_virtual_ranks * own * each)

    def of_inputs(self, total: int, what: str, each: int = 1) -> "list[Cut]":
        """Return a Cut of the inputs per local virtual TP rank; [WHOLE] if there is just one."""
        own = self._dealt(total, what) * each
        if self.ranks.num_virtual_ranks == 1:
            return [WHOLE]
        first = self.ranks.rank * self.ranks.num_local_virtual_ranks
        return [
            Cut(inputs=range(i * own, (i + 1) * own))
            for i in range(first, first + self.ranks.num_local_virtual_ranks)
        ]

    def of_copies(self, total: int, what: str, each: int = 1) -> range:
        """Return this rank's share; neighboring ranks hold the same unit if there are too few.

        Raises:
            ModelError: neither number divides the other.
        """
        size, rank = self.ranks.size, self.ranks.rank
        if total % size and size % total:
            raise ModelError(
                f"tensor_parallel_size must divide the {total} {what}, or be a multiple of them, "
                f"got {size}"
            )
        own = dealt(total, size, rank)
        return range(own.start * each, own.stop * each)

    def of_vocabulary(self, total: int) -> range:
        """Return this rank's range of tokens; the last ranks may have fewer."""
        most = -(-total // self.ranks.size)
        begin = min(self.ranks.rank * most, total)
        return range(begin, min(begin + most, total))

    def _dealt(self, total: int, what: str) -> int:
        """Return the number of units per virtual TP rank."""
        if total % self.ranks.num_virtual_ranks:
            is_plain = self.ranks.num_virtual_ranks == self.ranks.size
            name = "tensor_parallel_size" if is_plain else "exact_across_tp"
            raise ModelError(
                f"{name} must divide the {total} {what}, got {self.ranks.num_virtual_ranks}"
            )
        return total // self.ranks.num_virtual_ranks


@dataclass(frozen=True)
class Cut:
    """The part of a weight that a rank keeps.

    Attributes:
        outputs: of each part; None: all.
        inputs: of all parts; None: all.
    """

    outputs: Sequence[range] | None = None
    inputs: range | None = None

    @property
    def key(self) -> str:
        """Text that identifies the shard."""
        return f"{self.outputs} {self.inputs}"


WHOLE = Cut()


def outputs_of(
    weight: Tensor | QuantizedWeight, kept: range, name: str
) -> Tensor | QuantizedWeight:
    """Return the outputs `kept` of a weight, without a copy.

    Raises:
        ModelError: they begin or end within a block that shares a scale.
    """
    rows = slice(kept.start, kept.stop)
    if isinstance(weight, Tensor):
        return weight[rows]
    scaled = rows
    if weight.kind == "fp8" and weight.group:
        _check_border(kept, FP8_BLOCK, len(weight.codes), "outputs", name)
        scaled = slice(kept.start // FP8_BLOCK, -(-kept.stop // FP8_BLOCK))
    return weight._replace(
        codes=weight.codes[rows],
        scales=weight.scales[scaled],
        offsets=None if weight.offsets is None else weight.offsets[rows],
    )


def inputs_of(weight: Tensor | QuantizedWeight, kept: range, name: str) -> Tensor | QuantizedWeight:
    """Return the inputs `kept` of a weight, without a copy of its numbers.

    Raises:
        ModelError: they begin or end within a group that shares a scale, or the groups do not
            consist of consecutive inputs.
    """
    columns = slice(kept.start, kept.stop)
    if isinstance(weight, Tensor):
        return weight[:, columns]
    if weight.input_order is not None:
        raise ModelError(
            f"{name} cannot be shared out: its inputs are grouped in an order "
            "(desc_act) that has no neighbours"
        )
    codes = weight.codes[:, columns]
    if not weight.group:
        return weight._replace(codes=codes)
    _check_border(kept, weight.group, weight.codes.shape[1], "inputs", name)
    groups = slice(kept.start // weight.group, -(-kept.stop // weight.group))
    return weight._replace(
        codes=codes,
        scales=weight.scales[:, groups],
        offsets=None if weight.offsets is None else weight.offsets[:, groups],
    )


def _check_border(kept: range, size: int, total: int, what: str, name: str) -> None:
    for border in (kept.start, kept.stop):
        if border % size and border != total:
            raise ModelError(
                f"{name} cannot be shared out: {size} of its {total} {what} have a scale together, "
                f"and a rank would have {kept.start} to {kept.stop}"
            )
