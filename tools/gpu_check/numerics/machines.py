# SPDX-License-Identifier: Apache-2.0
"""Who computes a case: the device or the interpreter; in a rehearsal both are the latter."""

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
    *(attention, batching, dense, linear_attention, moe, ngram, runtime, sampling),
)


@cache
def interpreter() -> Any:
    """The module _simt of `make simt`, or of the check's own build.

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
    """Computes cases.

    Args:
        name: in figures.
        device: where tensors go.
        schedule: of the interpreter, with a seed; None: this is the device.
    """

    def __init__(self, name: str, device: str, schedule: tuple[str, int] | None = None) -> None:
        self.name, self.device, self._schedule = name, torch.device(device), schedule
        if schedule is not None:
            interpreter().set_accumulation(rounding_rule())

    def move(self, tensor: Tensor) -> Tensor:
        """A copy there, always a new one: ops may write what they are given."""
        return tensor.clone() if self.device.type == "cpu" else tensor.to(self.device)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Calls of ops within run on this machine."""
        if self._schedule is None:
            yield
            return
        interpreter().set_schedule(*self._schedule)
        # Checks of every byte are for the tests; here a call may touch what it likes.
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
        """A case made here: what it packs is in this machine's layout."""
        with self.at_work():
            return make(generator, self.move)

    def run(self, call: Callable[[], list[Tensor]]) -> list[Tensor]:
        """The results, on the CPU.

        Raises:
            ValueError: a kernel has reported wrong data; its results say nothing then.
        """
        with self.at_work():
            results = call()
            runtime.check_errors()
        return [result.cpu().clone() for result in results]

    def replayed(self, call: Callable[[], list[Tensor]], *, warm: bool = True) -> list[Tensor]:
        """The results of a captured call, replayed twice; on a CPU of a second call.

        warm: it is called before it is captured, too.
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
            result.view(torch.uint8).fill_(0xFF)  # what a replay leaves out is seen
        graph.replay()
        graph.replay()
        runtime.check_errors()
        return [result.cpu() for result in results]

    def rounds(
        self, calls: Sequence[Callable[[], list[Tensor]]], count: int
    ) -> Callable[[], Tensor]:
        """Repeats calls in a row `count` times, when it is called; on a GPU by a graph.

        Args:
            calls: each writes to the same tensors every time, and returns them.
            count: how often.

        Returns:
            Something that returns how many bytes were not as at the first time, [1].
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
        """Whether the device still works: an illegal access ends a process's use of it."""
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize()
        except RuntimeError:
            return False
        return True

    @property
    def has_large_blocks(self) -> bool:
        """Whether a block may have the shared memory of `linear`'s largest tiles."""
        if self.device.type == "cpu":
            return True
        properties = torch.cuda.get_device_properties(self.device)
        return bool(properties.shared_memory_per_block_optin >= 224 << 10)


def rounding_rule() -> str:
    """How mma rounds on this GPU, as far as is known; Hopper's rule where there is none."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0):
        return "ampere"
    return "hopper"
