# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel ranks as threads of one process, which exchange data in memory."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from specops.engine.parallel.ranks import Ranks
from torch import Tensor

T = TypeVar("T")
_SECONDS = 600.0  # timeout for other ranks; long, since machines may be busy or paused


class Meeting:
    """Exchange point of the ranks of one model."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=_SECONDS)
        self._brought: list[Any] = [None] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Return the values that all ranks have passed."""
        self._brought[rank] = value
        self._barrier.wait()
        values = list(self._brought)
        self._barrier.wait()
        return values

    def leave(self) -> None:
        """Make the other ranks fail instead of waiting forever."""
        self._barrier.abort()


class ThreadRanks(Ranks):
    """One of several ranks, in its own thread."""

    def __init__(self, meeting: Meeting, rank: int, num_virtual_ranks: int, whole: bool) -> None:
        self.rank, self.size, self._meeting = rank, meeting.size, meeting
        super().__init__(num_virtual_ranks, has_whole_experts=whole)

    def least(self, number: int) -> int:
        return min(self._meeting.exchange(self.rank, number))

    def of_first(self, number: float) -> float:
        first: float = self._meeting.exchange(self.rank, number)[0]
        return first

    def check(self, inputs: Tensor, num_bytes: int) -> None:
        found = self._meeting.exchange(self.rank, bytes(inputs.numpy()[:num_bytes]))
        assert found == [found[0]] * self.size, "the inputs of a step differ"

    def _gather(self, own: Tensor, everyone: Tensor) -> None:
        everyone.copy_(torch.stack(self._meeting.exchange(self.rank, own.clone())))


def on_ranks(
    size: int,
    work: Callable[[Ranks], T],
    num_virtual_ranks: int | None = None,
    has_whole_experts: bool = False,
) -> list[T]:
    """Run `work` on every rank concurrently; return the results."""
    meeting = Meeting(size)

    def run(rank: int) -> T:
        try:
            return work(ThreadRanks(meeting, rank, num_virtual_ranks or size, has_whole_experts))
        except BaseException:
            meeting.leave()
            raise

    with ThreadPoolExecutor(size) as pool:
        running = [pool.submit(run, rank) for rank in range(size)]
        errors = [one.exception() for one in running]
        failures = [
            one for one in errors if one and not isinstance(one, threading.BrokenBarrierError)
        ]
        if failures:
            raise failures[0]
        return [one.result() for one in running]
