# SPDX-License-Identifier: Apache-2.0
"""The interpreter's module in place of `_C`: CUDA kernels on CPU tensors, under every schedule.

A call of an op runs under several schedules on the same inputs. All tensor arguments must end with
the same bits, which reveals most missing barriers and every dependence on the order of blocks.

In a test, the first two calls of an op run under two schedules, or under all four if
SPECOPS_SIMT_SCHEDULES is "first calls" (CI). Each later call uses one schedule, in rotation: a
result that depends on the schedule then differs from what the test expects. With
SPECOPS_SIMT_SCHEDULES=all (`make prove`), every call runs under all schedules. Builds with the race
detector or AddressSanitizer compare no results; their calls use one schedule each, in rotation.
"""

import importlib.util
import os
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent

# Build of the interpreter: plain, race (checks every memory access), or asan (AddressSanitizer).
BUILD = os.environ.get("SPECOPS_SIMT_BUILD", "plain")
TARGETS = {"plain": "simt", "race": "simt-race", "asan": "simt-asan"}

# Order of blocks and threads, its seed, and the time when cp.async writes.
SCHEDULES = [
    ("in_order", 0, "late"),
    ("reverse", 0, "early"),
    ("warp_at_a_time", 0, "late"),
    ("random", 1, "random"),
]
ACCUMULATIONS = ["fma", "hopper", "ampere"]
WHOLE_CALLS = 2  # number of first calls of an op in a test that run under several schedules
DAILY = [
    SCHEDULES[0],
    SCHEDULES[3],
]  # schedules of these calls in `make test`; CI uses all schedules

# Calls with state outside their tensors, which cannot be repeated.
_ONCE = {"take_error"}


@cache
def load(name: str = "_simt", build: str = BUILD) -> ModuleType:
    """Import a module of the interpreter from the build folder."""
    folder = ROOT / "build" / ("simt" if build == "plain" else f"simt_{build}")
    found = sorted(folder.glob(f"{name}.*so"))
    if not found:
        raise RuntimeError(
            f"the interpreter's module {name} is not in {folder}: "
            f"run `make -C tools {TARGETS[build]}`"
        )
    # The builds of a module have the same name, so the folder distinguishes them.
    full_name = name if build == "plain" else f"{folder.name}.{name}"
    spec = importlib.util.spec_from_file_location(full_name, found[0])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class UnderEverySchedule:
    """Stand-in for `_C` that repeats each op under every schedule and compares what it wrote."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._num_calls: Counter[str] = Counter()

    def _schedules(self, name: str) -> list[tuple[str, int, str]]:
        """Return the schedules of this call of an op."""
        number = self._num_calls[name]
        self._num_calls[name] += 1
        schedules = os.environ.get("SPECOPS_SIMT_SCHEDULES", "daily")
        if schedules == "all":
            return SCHEDULES
        if BUILD == "plain" and number < WHOLE_CALLS:
            return SCHEDULES if schedules == "first calls" else DAILY
        return [SCHEDULES[number % len(SCHEDULES)]]

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return self._repeated(name, value) if callable(value) else value

    def _repeated(self, name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            memory = _storages(args)
            self._module.set_regions(_regions(args))
            if not memory or name in _ONCE:
                return op(*args)
            before = [storage.clone() for storage in memory]
            after: list[torch.Tensor] = []
            result = None
            for number, (schedule, seed, landing) in enumerate(self._schedules(name)):
                for storage, saved in zip(memory, before, strict=True):
                    storage.copy_(saved)
                self._module.set_schedule(schedule, seed)
                self._module.set_landing(landing)
                result = op(*args)
                if number == 0:
                    after = [storage.clone() for storage in memory]
                    continue
                for index, (storage, first) in enumerate(zip(memory, after, strict=True)):
                    assert torch.equal(storage, first), (
                        f"{name}: tensor {index} differs between the schedules "
                        f"{SCHEDULES[0][0]} and {schedule}"
                    )
            return result

        return call


@contextmanager
def block_memory(kib: int) -> Iterator[None]:
    """Limit the shared memory of the interpreter's blocks to `kib` KiB inside the context."""
    load().set_max_shared_bytes(kib << 10)
    try:
        yield
    finally:
        load().set_max_shared_bytes(0)


def _tensors(args: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    """Yield the tensors among arguments, including those in tuples."""
    for arg in args:
        if isinstance(arg, torch.Tensor):
            yield arg
        elif isinstance(arg, tuple):
            yield from _tensors(arg)


def _storages(args: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return the memory of every tensor argument, once, as bytes."""
    found = {}
    for tensor in _tensors(args):
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8).set_(storage)
    return list(found.values())


def asan_environment() -> dict[str, str]:
    """Return the environment that a process needs to load a module built with AddressSanitizer."""
    command = ["g++", "-print-file-name=libasan.so", "-print-file-name=libstdc++.so"]
    libraries = [
        subprocess.run([command[0], option], capture_output=True, text=True, check=True).stdout
        for option in command[1:]
    ]
    return {
        "LD_PRELOAD": " ".join(path.strip() for path in libraries),
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=0",
    }


def _regions(args: tuple[Any, ...]) -> list[tuple[int, int]]:
    """Return the byte range of every tensor argument: the memory a kernel may access."""
    found = []
    for tensor in _tensors(args):
        if tensor.numel():
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            reach = sum((n - 1) * step for n, step in steps)
            end = tensor.data_ptr() + (reach + 1) * tensor.element_size()
            found.append((tensor.data_ptr(), end))
    return found


@contextmanager
def accumulation(model: str) -> Iterator[None]:
    """Run the block with one of ACCUMULATIONS as the rounding rule of mma."""
    module = load()
    module.set_accumulation(model)
    try:
        yield
    finally:
        module.set_accumulation("fma")
