# SPDX-License-Identifier: Apache-2.0
"""The engines that have a share of one model each, as one of them sees it.

Every rank runs the whole engine on the same commands, and decides the same: it draws, verifies and
drafts for itself. Only projections, heads and their keys and values are shared out, so that ranks
meet in two places: where a sum over inputs is put together, and where logits are.

A sum has `slices` summands, each over the same inputs on any number of ranks, and they are added in
pairs of neighbours, pairs of pairs, and so on. A rank with several slices adds its own first, which
is a part of that tree: so the bits depend on `slices` alone.
"""

import math

import torch
from torch import Tensor


class Ranks:
    """One rank that is alone; `group.Group` is one of several.

    Args:
        slices: summands of a sum over inputs that are shared out.
        has_whole_experts: a summand of experts is what some of them give, not a part of what each
            gives; of several summands.

    Attributes:
        rank: this one's number, from 0.
        size: how many there are.
        slices: as above.
        local_slices: how many of these a rank has.
    """

    rank = 0
    size = 1

    def __init__(self, slices: int = 1, has_whole_experts: bool = False) -> None:
        self.slices, self.has_whole_experts = slices, has_whole_experts
        self.local_slices = slices // self.size
        self._buffers: dict[str, list[Tensor]] = {}

    # ---- sums and logits ----

    def reserve(self, rows: int, width: int, device: torch.device) -> None:
        """Allocates what sums of so many rows need, which then stays where it is."""
        if self.slices > 1:
            self.summands((rows, width), device)
            self._room("gathered", (self.size, rows, width), device)

    def summands(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Returns memory for this rank's summands, float32 [local_slices, *shape]."""
        return self._room("summands", (self.local_slices, *shape), device)

    def add(self, summands: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """Adds the summands of all ranks, and rounds once.

        Args:
            summands: of `summands`; overwritten.
            bias: [width], added last; or None.
            out: [rows, width], float32 or the dtype of the states; written.
        """
        own = _folded(summands)
        if self.size > 1:
            everyone = self._room("gathered", (self.size, *own.shape), own.device)
            self._gather(own, everyone)
            own = _folded(everyone)
        out.copy_(own if bias is None else own.add_(bias))

    def join_columns(self, own: Tensor, out: Tensor) -> None:
        """Puts the columns of all ranks side by side.

        Args:
            own: float32 [rows, columns], this rank's: as many as every rank's but the last ones,
                which have what is left of `out`.
            out: float32 [rows, all columns]; written.
        """
        rows, total = out.shape
        most = -(-total // self.size)
        padded = self._room("columns", (rows, most), own.device)
        padded[:, : own.shape[1]] = own
        everyone = self._room("all columns", (self.size, rows, most), own.device)
        self._gather(padded, everyone)
        for rank, columns in enumerate(everyone):
            begin = min(rank * most, total)
            out[:, begin : begin + most] = columns[:, : total - begin]

    # ---- what is agreed on ----

    def least(self, number: int) -> int:
        """Returns the least that a rank has."""
        return number

    def of_first(self, number: float) -> float:
        """Returns what the first rank has, such as a time that it took."""
        return number

    def check(self, inputs: Tensor, num_bytes: int) -> None:
        """Compares the inputs of a step.

        Args:
            inputs: bytes, on the host.
            num_bytes: of these, the first.

        Raises:
            RanksApart: they are not every rank's.
        """

    def _gather(self, own: Tensor, everyone: Tensor) -> None:
        """Fills `everyone`, [size, *own.shape], with what each rank has, in their order."""
        raise NotImplementedError

    def _room(self, name: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Memory that is not set. What was given stays: a captured step may read it."""
        count = math.prod(shape)
        kept = self._buffers.setdefault(name, [])
        if not kept or kept[-1].numel() < count:
            least = 2 * kept[-1].numel() if kept else 0
            kept.append(torch.empty(max(count, least), dtype=torch.float32, device=device))
            if device.type == "cpu":
                del kept[:-1]
        return kept[-1][:count].view(shape)


def _folded(summands: Tensor) -> Tensor:
    """Adds neighbours until one is left, in the memory of the first."""
    parts: list[Tensor] = list(summands)
    while len(parts) > 1:
        pairs = [one.add_(other) for one, other in zip(parts[::2], parts[1::2], strict=False)]
        parts = pairs + parts[2 * len(pairs) :]
    (whole,) = parts
    return whole


ALONE = Ranks()


def dealt(total: int, size: int, rank: int) -> range:
    """Which of some things a rank has: equal shares, and neighbours the same if there are too few.

    Args:
        total: how many things there are; it divides `size`, or is a multiple of it.
        size: how many ranks there are.
        rank: one of them.
    """
    begin = rank * total // size
    return range(begin, begin + max(total // size, 1))
