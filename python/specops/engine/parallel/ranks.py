# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel group, as seen by one rank.

Every rank runs the whole engine on the same commands and makes the same decisions: it samples,
verifies and drafts by itself. Only projections, heads and their keys and values are sharded. So
ranks communicate in two places: they all-reduce the outputs of row-parallel projections and gather
logits.

The output of a row-parallel projection is the sum of one partial sum per virtual TP rank. Each
virtual rank has the same inputs for any number of real ranks. Partial sums are added in pairs of
neighbors, then pairs of pairs, and so on. A rank with several virtual ranks adds its own partial
sums first. They form a subtree, so the bits depend only on the number of virtual ranks.
"""

import math

import torch
from torch import Tensor


class Ranks:
    """Tensor-parallel group of a single rank; `group.Group` is one rank of several.

    Args:
        num_virtual_ranks: number of virtual TP ranks, and of partial sums of an all-reduce.
        has_whole_experts: whether each virtual rank has whole experts instead of a shard of each
            expert.

    Attributes:
        rank: index of this rank, from 0.
        size: number of ranks.
        num_virtual_ranks: number of virtual TP ranks.
        num_local_virtual_ranks: number of virtual TP ranks on each rank.
    """

    rank = 0
    size = 1

    def __init__(self, num_virtual_ranks: int = 1, has_whole_experts: bool = False) -> None:
        self.num_virtual_ranks, self.has_whole_experts = num_virtual_ranks, has_whole_experts
        self.num_local_virtual_ranks = num_virtual_ranks // self.size
        self._buffers: dict[str, list[Tensor]] = {}

    # ---- sums and logits ----

    def reserve(self, rows: int, width: int, device: torch.device) -> None:
        """Allocate the buffers for partial sums of up to `rows` rows; they do not move later."""
        if self.num_virtual_ranks > 1:
            self.partial_sums((rows, width), device)
            self._buffer("gathered", (self.size, rows, width), device)

    def partial_sums(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Return a buffer for this rank's partial sums, float32.

        Its shape is [num_local_virtual_ranks, *shape].
        """
        return self._buffer("partial sums", (self.num_local_virtual_ranks, *shape), device)

    def add(self, partial_sums: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """Add the partial sums of all ranks (all-reduce), and round once.

        Args:
            partial_sums: the buffer from `partial_sums`; overwritten.
            bias: [width], added last, or None.
            out: [rows, width], float32 or the dtype of the states; written.
        """
        own = _folded(partial_sums)
        if self.size > 1:
            everyone = self._buffer("gathered", (self.size, *own.shape), own.device)
            self._gather(own, everyone)
            own = _folded(everyone)
        out.copy_(own if bias is None else own.add_(bias))

    def join_columns(self, own: Tensor, out: Tensor) -> None:
        """Gather the columns of all ranks side by side (all-gather).

        Args:
            own: float32 [rows, columns], this rank's columns. All ranks have the same number,
                except that the last ranks may have fewer.
            out: float32 [rows, all columns]; written.
        """
        rows, total = out.shape
        most = -(-total // self.size)
        padded = self._buffer("columns", (rows, most), own.device)
        padded[:, : own.shape[1]] = own
        everyone = self._buffer("all columns", (self.size, rows, most), own.device)
        self._gather(padded, everyone)
        for rank, columns in enumerate(everyone):
            begin = min(rank * most, total)
            out[:, begin : begin + most] = columns[:, : total - begin]

    # ---- agreement between ranks ----

    def least(self, number: int) -> int:
        """Return the minimum of `number` over all ranks."""
        return number

    def of_first(self, number: float) -> float:
        """Return the number that rank 0 passed, such as a measured time."""
        return number

    def check(self, inputs: Tensor, num_bytes: int) -> None:
        """Check that the inputs of a step are equal on all ranks.

        Args:
            inputs: bytes, on the host.
            num_bytes: number of leading bytes to compare.

        Raises:
            RanksDiverged: the inputs differ between ranks.
        """

    def _gather(self, own: Tensor, everyone: Tensor) -> None:
        """Fill `everyone`, [size, *own.shape], with each rank's tensor in rank order."""
        raise NotImplementedError

    def _buffer(self, name: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Return an uninitialized buffer. Old buffers stay alive: captured steps may use them."""
        count = math.prod(shape)
        buffers = self._buffers.setdefault(name, [])
        if not buffers or buffers[-1].numel() < count:
            least = 2 * buffers[-1].numel() if buffers else 0
            buffers.append(torch.empty(max(count, least), dtype=torch.float32, device=device))
            if device.type == "cpu":
                del buffers[:-1]
        return buffers[-1][:count].view(shape)


def _folded(partial_sums: Tensor) -> Tensor:
    """Add neighbors pairwise in place until one tensor is left; return it."""
    parts: list[Tensor] = list(partial_sums)
    while len(parts) > 1:
        pairs = [one.add_(other) for one, other in zip(parts[::2], parts[1::2], strict=False)]
        parts = pairs + parts[2 * len(pairs) :]
    (whole,) = parts
    return whole


ALONE = Ranks()


def shard_range(total: int, size: int, rank: int) -> range:
    """Return the range of units in a rank's shard; with fewer units than ranks, neighbors share.

    Args:
        total: number of units: a divisor or a multiple of `size`.
        size: number of ranks.
        rank: index of the rank.
    """
    begin = rank * total // size
    return range(begin, begin + max(total // size, 1))
