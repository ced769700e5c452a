# SPDX-License-Identifier: Apache-2.0
"""Who computes a case: the device or the interpreter; in a rehearsal both are the latter."""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any, TypeVar

import torch
from specops import attention, batching, dense, ngram, sampling
from torch import Tensor

from tools.cuda_toolkit import ROOT

Prepared = TypeVar("Prepared")

OP_MODULES: tuple[Any, ...] = (attention, batching, dense, ngram, sampling)


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
        """The results, on the CPU."""
        with self.at_work():
            results = call()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return [result.cpu().clone() for result in results]

    def replayed(self, call: Callable[[], list[Tensor]]) -> list[Tensor]:
        """The results of a captured call, replayed twice; on a CPU of a second call."""
        if self.device.type == "cpu":
            return self.run(call)
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            call()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            results = call()
        for result in results:
            result.view(torch.uint8).fill_(0xFF)  # what a replay leaves out is seen
        graph.replay()
        graph.replay()
        torch.cuda.synchronize()
        return [result.cpu() for result in results]


def rounding_rule() -> str:
    """How mma rounds on this GPU, as far as is known; Hopper's rule where there is none."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0):
        return "ampere"
    return "hopper"
