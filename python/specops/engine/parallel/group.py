# SPDX-License-Identifier: Apache-2.0
"""Ranks that are processes, and meet by torch.distributed: gloo on CPUs, NCCL between GPUs."""

import os
import socket
import zlib
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from specops.engine.errors import EngineError
from specops.engine.parallel.ranks import Ranks

# One rank may load for so long after another; in a step nobody waits long.
_TIMEOUT = timedelta(minutes=30)
_LOOPBACK = "lo"  # network device; all ranks run on one machine


class RanksApart(EngineError):
    """Ranks have not done the same: what they computed together is worth nothing."""


class Group(Ranks):
    """One rank of several; of a process, the only one.

    Args:
        store: a file that is not there yet, by which they find each other; all name the same.
        rank: this one's number.
        size: how many there are; every one makes a `Group`, and waits here for the others.
        slices, has_whole_experts: as in `Ranks`; slices are a multiple of `size`.
        device: "cpu" or "cuda": where the tensors are that they exchange. What the host has goes by
            gloo in any case.

    Raises:
        RuntimeError: another one did not come.
    """

    def __init__(
        self,
        store: Path,
        rank: int,
        size: int,
        slices: int,
        device: str,
        has_whole_experts: bool = False,
    ) -> None:
        self.rank, self.size = rank, size
        super().__init__(slices, has_whole_experts)
        # Without it, gloo listens at the address that the host's name has.
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
        """Returns the least that a rank has."""
        return int(self._of_all(number, torch.int64).min())

    def of_first(self, number: float) -> float:
        """Returns what the first rank has."""
        return float(self._of_all(number, torch.float64)[0])

    def check(self, inputs: Tensor, num_bytes: int) -> None:
        """Compares the inputs of a step, by a sum of them."""
        own = zlib.crc32(inputs.numpy().data[:num_bytes])
        found = self._of_all(own, torch.int64).tolist()
        if found != [own] * self.size:
            raise RanksApart(f"the ranks have come apart: the inputs of a step have sums {found}")

    def _of_all(self, number: float, dtype: torch.dtype) -> Tensor:
        everyone = torch.empty(self.size, 1, dtype=dtype)
        self._gather(torch.tensor([number], dtype=dtype), everyone)
        return everyone[:, 0]

    def _gather(self, own: Tensor, everyone: Tensor) -> None:
        if own.device.type != "cpu":
            dist.all_gather(list(everyone), own)
            return
        # Pairs one after the other, in one order: a quarter of the time of gloo's own all_gather,
        # which hands every call to threads.
        everyone[self.rank].copy_(own)
        for other in range(self.size):
            if other > self.rank:
                dist.send(own, other)
            if other != self.rank:
                dist.recv(everyone[other], other)
            if other < self.rank:
                dist.send(own, other)
