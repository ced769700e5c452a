# SPDX-License-Identifier: Apache-2.0
"""Ranks in separate processes, connected by torch.distributed: gloo on CPUs, NCCL on GPUs."""

import os
import socket
import zlib
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from specops.api.errors import EngineError
from specops.engine.parallel.ranks import Ranks

# Ranks may finish loading at times this far apart; waits within a step are short.
_TIMEOUT = timedelta(minutes=30)
_LOOPBACK = "lo"  # loopback network device: all ranks run on one machine


class RanksDiverged(EngineError):
    """Error of ranks that have diverged, so that the results of collectives are invalid."""


class Group(Ranks):
    """One rank of several; a process has at most one.

    Args:
        store: file through which the ranks find each other; it must not exist yet.
        rank: index of this rank.
        size: number of ranks; each constructs a `Group`, which waits for the others.
        num_virtual_ranks: as in `Ranks`; a multiple of `size`.
        device: device of the exchanged tensors, "cpu" or "cuda". Host data always goes through
            gloo.
        has_whole_experts: as in `Ranks`.

    Raises:
        RuntimeError: another rank did not connect.
    """

    def __init__(
        self,
        store: Path,
        rank: int,
        size: int,
        num_virtual_ranks: int,
        device: str,
        has_whole_experts: bool = False,
    ) -> None:
        self.rank, self.size = rank, size
        super().__init__(num_virtual_ranks, has_whole_experts)
        # By default, gloo listens at the address to which the host name resolves.
        if any(name == _LOOPBACK for _, name in socket.if_nameindex()):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
        dist.init_process_group(
            "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
            store=dist.FileStore(str(store), size),  # type: ignore[attr-defined]
            rank=rank,
            world_size=size,
            timeout=_TIMEOUT,
        )

    def least(self, number: int) -> int:
        """Return the minimum of `number` over all ranks."""
        return int(self._of_all(number, torch.int64).min())

    def of_first(self, number: float) -> float:
        """Return the number that rank 0 passed."""
        return float(self._of_all(number, torch.float64)[0])

    def check(self, inputs: Tensor, num_bytes: int) -> None:
        """Compare CRCs of the inputs of a step between all ranks."""
        own = zlib.crc32(inputs.numpy().data[:num_bytes])
        found = self._of_all(own, torch.int64).tolist()
        if found != [own] * self.size:
            raise RanksDiverged(
                f"tensor-parallel ranks have diverged: their inputs have checksums {found}"
            )

    def _of_all(self, number: float, dtype: torch.dtype) -> Tensor:
        everyone = torch.empty(self.size, 1, dtype=dtype)
        self._gather(torch.tensor([number], dtype=dtype), everyone)
        return everyone[:, 0]

    def _gather(self, own: Tensor, everyone: Tensor) -> None:
        if own.device.type != "cpu":
            dist.all_gather(list(everyone), own)
            return
        # Exchange with one rank after another, in a fixed order. This takes a quarter of the time
        # of gloo's all_gather, which passes every call to threads.
        everyone[self.rank].copy_(own)
        for other in range(self.size):
            if other > self.rank:
                dist.send(own, other)
            if other != self.rank:
                dist.recv(everyone[other], other)
            if other < self.rank:
                dist.send(own, other)
