# SPDX-License-Identifier: Apache-2.0
"""Machines that compute a case: device and interpreter (two interpreters in a rehearsal)."""

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any, TypeVar

import torch
from specops import (
    attention,
    batching,
    dense,
    linear_attention,
    moe,
    ngram,
    runtime,
    sampling,
)
from torch import Tensor

from tools.cuda_toolkit import ROOT

Prepared = TypeVar("Prepared")

ROUNDS_OF_GRAPH = 100

OP_MODULES: tuple[Any, ...] = (
    attention,
    batching,
    dense,
    linear_attention,
    moe,
    ngram,
    runtime,
    sampling,
)


@cache
def interpreter() -> Any:
    """Return the module _simt of `make -C tools simt`, or of the check's own build.

    Raises:
        RuntimeError: it is not built.
    """
    found = sorted((ROOT / "build" / "simt").glob("_simt.*so"))
    if not found:
        raise RuntimeError("the interpreter is not built: cmake --build <folder> --target _simt")
    spec = importlib.util.spec_from_file_location("_simt", found[0])
    assert spec is not None and spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Machine:
    """A device or interpreter that computes cases.

    Args:
        name: name in the figures.
        device: where tensors are placed.
        schedule: the interpreter's schedule, with a seed; None for the device.
    """

    def __init__(self, name: str, device: str, schedule: tuple[str, int] | None = None) -> None:
        self.name, self.device, self._schedule = name, torch.device(device), schedule
        if schedule is not None:
            interpreter().set_accumulation(rounding_rule())

    def move(self, tensor: Tensor) -> Tensor:
        """Copy a tensor to this machine, even if it is there: ops may write their arguments."""
        return tensor.clone() if self.device.type == "cpu" else tensor.to(self.device)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Run op calls inside this context on this machine."""
        if self._schedule is None:
            yield
            return
        interpreter().set_schedule(*self._schedule)
        # The tests check the bounds of every access; here calls may touch any memory.
        interpreter().set_regions([])
        before = [module._C for module in OP_MODULES]
        for module in OP_MODULES:
            module._C = interpreter()
        try:
            yield
        finally:
            for module, inner in zip(OP_MODULES, before, strict=True):
                module._C = inner

    def prepared(
        self,
        make: Callable[[torch.Generator, Callable[[Tensor], Tensor]], Prepared],
        generator: torch.Generator,
    ) -> Prepared:
        """Make a case on this machine, so that packed weights have its layout."""
        with self.at_work():
            return make(generator, self.move)

    def run(self, call: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Run a call and return its results on the CPU.

        Raises:
            ValueError: a kernel reported wrong data, so its results are meaningless.
        """
        with self.at_work():
            results = call()
            runtime.check_errors()
        return [result.cpu().clone() for result in results]

    def replayed(self, call: Callable[[], list[Tensor]], *, warm: bool = True) -> list[Tensor]:
        """Return the results of a captured call, replayed twice; on a CPU, of a second call.

        warm: whether the call also runs once before capture.
        """
        if self.device.type == "cpu":
            return self.run(call)
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        if warm:
            with torch.cuda.stream(stream):
                call()
            torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            results = call()
        for result in results:
            result.view(torch.uint8).fill_(0xFF)  # exposes outputs that a replay does not write
        graph.replay()
        graph.replay()
        runtime.check_errors()
        return [result.cpu() for result in results]

    def rounds(
        self, calls: Sequence[Callable[[], list[Tensor]]], count: int
    ) -> Callable[[], Tensor]:
        """Return a function that runs the calls `count` times in a row; on a GPU, by a graph.

        Args:
            calls: each writes to the same tensors every time, and returns them.
            count: number of repetitions.

        Returns:
            A function that returns how many bytes differed from the first run, [1].
        """
        wanted = [[self.move(x) for x in self.run(call)] for call in calls]
        wrong = torch.zeros(1, dtype=torch.int64, device=self.device)
        with self.at_work():
            outputs = [call() for call in calls]

        def once() -> None:
            for output in outputs:
                for x in output:
                    x.view(torch.uint8).fill_(0xFF)
            for call in calls:
                call()
            for output, right in zip(outputs, wanted, strict=True):
                for x, y in zip(output, right, strict=True):
                    wrong.add_((x.view(torch.uint8) != y.view(torch.uint8)).sum())

        def looped() -> Tensor:
            wrong.zero_()
            with self.at_work():
                for _ in range(count):
                    once()
                runtime.check_errors()
            return wrong.clone()

        if self.device.type == "cpu":
            return looped
        of_graph = min(count, ROUNDS_OF_GRAPH)
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            once()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(of_graph):
                once()

        def replayed() -> Tensor:
            wrong.zero_()
            for _ in range(count // of_graph):
                graph.replay()
            runtime.check_errors()
            return wrong.cpu()

        return replayed

    def answers(self) -> bool:
        """Return whether the device works; after an illegal access a process cannot use it."""
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize()
        except RuntimeError:
            return False
        return True

    @property
    def has_large_blocks(self) -> bool:
        """True if a block may use the shared memory of `linear`'s largest tiles."""
        if self.device.type == "cpu":
            return True
        properties = torch.cuda.get_device_properties(self.device)
        return bool(properties.shared_memory_per_block_optin >= 224 << 10)


def rounding_rule() -> str:
    """Return how mma rounds on this GPU, as far as is known; Hopper's rule without a GPU."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0):
        return "ampere"
    return "hopper"
