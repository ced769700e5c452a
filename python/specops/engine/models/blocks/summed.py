# SPDX-License-Identifier: Apache-2.0
"""A projection back to the states, whose inputs may lie on several ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from specops import dense
from specops.dense import PackedWeight
from specops.engine.models.shards import Shares
from specops.engine.models.weights import WeightSource
from specops.engine.parallel.ranks import Ranks


@dataclass(frozen=True)
class SummedLinear:
    """A projection, of which each rank has the weights of its own inputs.

    Attributes:
        slices: the weights, of inputs that lie side by side: one for each summand.
        bias: of all ranks together; or None.
        ranks: that have a part of it.
    """

    slices: Sequence[PackedWeight]
    bias: Tensor | None
    ranks: Ranks

    def run(self, x: Tensor, out: Tensor, sums: Tensor | None) -> None:
        """Computes rows.

        Args:
            x: [rows, inputs of this rank].
            out: [rows, outputs].
            sums: workspace of projections.
        """
        if self.ranks.slices == 1:
            dense.linear(x, self.slices[0], self.bias, out=out, workspace=sums)
            return
        summands = self.ranks.summands(out.shape, out.device)
        for index, summand in enumerate(summands):
            self.summand(index, x, summand, sums)
        self.ranks.add(summands, self.bias, out)

    def summand(self, index: int, x: Tensor, out: Tensor, sums: Tensor | None) -> None:
        """Computes what one slice adds to rows; see `run`."""
        weight = self.slices[index]
        dense.linear(self.inputs_of(index, x), weight, out=out, workspace=sums)

    def inputs_of(self, index: int, x: Tensor) -> Tensor:
        """Returns the inputs of a slice."""
        size = self.slices[index].num_inputs
        return x[:, index * size : (index + 1) * size]


def load_summed(
    source: WeightSource,
    name: str,
    outputs: int,
    count: int,
    what: str,
    each: int,
    *,
    has_bias: bool,
    ranks: Ranks,
) -> SummedLinear:
    """Loads one.

    Args:
        source: of its weights.
        name: of its tensors.
        outputs: width of the states.
        count: of things that are shared out.
        what: what these are called, in errors.
        each: inputs of one of them.
        has_bias: whether it has a bias.
        ranks: among whom.

    Raises:
        ModelError: a tensor is missing, has another shape or cannot be shared out.
    """
    slices = [
        source.linear("", (name,), (outputs,), count * each, cut=cut)
        for cut in Shares(ranks).summands(count, what, each)
    ]
    bias = source.bias("", (name,), (outputs,)) if has_bias else None
    return SummedLinear(slices, bias, ranks)
