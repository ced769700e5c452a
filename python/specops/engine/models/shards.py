# SPDX-License-Identifier: Apache-2.0
"""What a rank has of a weight: which outputs, and which inputs."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from specops.engine.errors import ModelError
from specops.engine.parallel.ranks import ALONE, Ranks, dealt
from specops.quantization import FP8_BLOCK, QuantizedWeight


@dataclass(frozen=True)
class Shares:
    """Deals what a model has, by the number.

    Attributes:
        ranks: among whom.
    """

    ranks: Ranks = ALONE

    def of_rank(self, total: int, what: str, each: int = 1) -> range:
        """Returns this rank's share of some things, each of `each` numbers: equal ones of all.

        Raises:
            ModelError: they cannot be dealt equally.
        """
        own = self._dealt(total, what)
        begin = self.ranks.rank * self.ranks.local_slices * own * each
        return range(begin, begin + self.ranks.local_slices * own * each)

    def summands(self, total: int, what: str, each: int = 1) -> "list[Cut]":
        """Returns the same as inputs, a cut for each summand; one that has all is none."""
        own = self._dealt(total, what) * each
        if self.ranks.slices == 1:
            return [WHOLE]
        first = self.ranks.rank * self.ranks.local_slices
        return [
            Cut(inputs=range(i * own, (i + 1) * own))
            for i in range(first, first + self.ranks.local_slices)
        ]

    def of_copies(self, total: int, what: str, each: int = 1) -> range:
        """Returns this rank's share, where neighbours have the same one if there are too few.

        Raises:
            ModelError: neither can they be dealt equally, nor do ranks.
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
        """Returns this rank's share of tokens: the last ranks may have fewer."""
        most = -(-total // self.ranks.size)
        begin = min(self.ranks.rank * most, total)
        return range(begin, min(begin + most, total))

    def _dealt(self, total: int, what: str) -> int:
        """How many are in a slice."""
        if total % self.ranks.slices:
            is_plain = self.ranks.slices == self.ranks.size
            name = "tensor_parallel_size" if is_plain else "exact_across_tp"
            raise ModelError(f"{name} must divide the {total} {what}, got {self.ranks.slices}")
        return total // self.ranks.slices


@dataclass(frozen=True)
class Cut:
    """What is kept of a weight.

    Attributes:
        outputs: of each part; None: all.
        inputs: of all parts; None: all.
    """

    outputs: Sequence[range] | None = None
    inputs: range | None = None

    @property
    def key(self) -> str:
        """A name of it."""
        return f"{self.outputs} {self.inputs}"


WHOLE = Cut()


def outputs_of(
    weight: Tensor | QuantizedWeight, kept: range, name: str
) -> Tensor | QuantizedWeight:
    """Returns some outputs of a weight, without a copy.

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
    """Returns some inputs of a weight, without a copy of its numbers.

    Raises:
        ModelError: they begin or end within a group that shares a scale, or inputs are grouped in
            an order of their own.
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
