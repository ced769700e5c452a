# SPDX-License-Identifier: Apache-2.0
"""A fake GPU in CPU memory: mistakes that only a GPU would expose fail here.

Host and device buffers are separate, and what a step does not copy stays poisoned. A capture
records the calls into the compiled module, without running them, and the calls of torch's own
operators. A replay repeats exactly these calls, with the same tensors and numbers, as a CUDA graph
does.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

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
from torch.utils._python_dispatch import TorchDispatchMode

OP_MODULES: list[ModuleType] = [
    attention,
    batching,
    dense,
    linear_attention,
    moe,
    ngram,
    runtime,
    sampling,
]

# Queries, which run immediately even if their arguments include tensors.
_QUERIES = ("_bytes", "_size")


class _Recorder:
    """Stand-in for the compiled module: records op calls and lets queries run."""

    def __init__(self, module: Any, calls: list[tuple[Any, tuple[Any, ...]]]) -> None:
        self._module = module
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if not callable(value):
            return value

        def call(*args: Any) -> Any:
            if name.endswith(_QUERIES) or not any(isinstance(arg, Tensor) for arg in args):
                return value(*args)
            self._calls.append((value, args))
            return None

        return call


class _TorchRecorder(TorchDispatchMode):
    """Mode that records torch's operators; a replay recomputes new tensors in their old memory."""

    def __init__(self, calls: list[tuple[Any, tuple[Any, ...]]]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)

        def again() -> None:
            result = func(*args, **kwargs)
            if isinstance(made, Tensor) and result.data_ptr() != made.data_ptr():
                made.copy_(result)

        self._calls.append((again, ()))
        return made


@contextmanager
def _recording(calls: list[tuple[Any, tuple[Any, ...]]]) -> Iterator[None]:
    before: list[Any] = [module.__dict__["_C"] for module in OP_MODULES]
    for module, inner in zip(OP_MODULES, before, strict=True):
        module.__dict__["_C"] = _Recorder(inner, calls)
    try:
        with _TorchRecorder(calls):
            yield
    finally:
        for module, inner in zip(OP_MODULES, before, strict=True):
            module.__dict__["_C"] = inner


class FakeGpu:
    """Implementation of `specops.engine.device.Device` on the CPU.

    Args:
        captures: whether repeating steps are captured and replayed.
        poison: byte that fills all device memory before each step; 0xff makes floats NaN and
            integers -1, 0x7f makes both huge.
    """

    device = torch.device("cpu")
    is_async = True

    def __init__(self, *, captures: bool = True, poison: int = 0xFF) -> None:
        self.captures = captures
        self.log: list[str] = []  # every copy, wait, capture and replay
        self.scratch: list[Tensor] = []  # more memory to poison
        self._poison = poison
        self._buffers: list[Tensor] = []
        self._pending: list[tuple[Tensor, Tensor]] = []

    def host_buffer(self, num_bytes: int) -> Tensor:
        self.log.append("allocate")
        return torch.full((num_bytes,), self._poison, dtype=torch.uint8)

    def device_buffer(self, num_bytes: int, host: Tensor | None = None) -> Tensor:
        self._buffers.append(self.host_buffer(num_bytes))
        return self._buffers[-1]

    def workspace(self, num_bytes: int) -> Tensor:
        self.log.append("allocate")
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def copy_in(self, buffer: Tensor, host: Tensor, num_bytes: int) -> None:
        self.log.append("in")
        for memory in (*self._buffers, *self.scratch):
            memory.view(torch.uint8).fill_(self._poison)
        buffer[:num_bytes].copy_(host[:num_bytes])

    def copy_out(self, host: Tensor, buffer: Tensor, num_bytes: int) -> None:
        self.log.append("out")
        host.fill_(self._poison)
        self._pending.append((host[:num_bytes], buffer[:num_bytes]))

    def wait(self) -> None:
        self.log.append("wait")
        for host, buffer in self._pending:
            host.copy_(buffer)
        self._pending.clear()

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        self.log.append("capture")
        calls: list[tuple[Any, tuple[Any, ...]]] = []
        with _recording(calls):
            launch()

        def replay() -> None:
            self.log.append("replay")
            for op, args in calls:
                op(*args)

        return replay

    def free_bytes(self) -> int:
        return 1 << 40
