# SPDX-License-Identifier: Apache-2.0
"""The driver's blocks per SM for each kernel, compared with the computation of tools/gates.

The machine code is extracted from the compiled module and loaded by the driver, which knows every
kernel's registers and how its shared memory is rounded up. The launch parameters are in
tools/gates/budgets.py.
"""

import ctypes
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specops import _C

from bench.common import Figure
from bench.cuda import CudaBench, gpu_arch
from tools.gates.budgets import LIMITS, blocks_per_sm, budget_of
from tools.gates.kernels import demangle

MAGIC = struct.pack("<I", 0xBA55ED50)  # header of a fat binary: magic, version, header size, size
HEAD = struct.Struct("<IHHQ")
MAX_THREADS, REGISTERS, DYNAMIC_SHARED_BYTES = 0, 4, 8  # CUfunction_attribute


def fat_binaries(module: bytes) -> Iterator[bytes]:
    """Yield the fat binaries in a compiled module; each source file has one."""
    at = module.find(MAGIC)
    while at >= 0:
        _, version, head, size = HEAD.unpack_from(module, at)
        if version == 1 and head == HEAD.size and at + head + size <= len(module):
            yield module[at : at + head + size]
            at += head + size - 1
        at = module.find(MAGIC, at + 1)


class Driver:
    """The CUDA driver's API, in the context that torch has created."""

    def __init__(self, library: Any = None) -> None:
        self._library = library or ctypes.CDLL("libcuda.so.1")

    def call(self, name: str, *arguments: Any) -> None:
        """Call a driver function; raise RuntimeError for an error code."""
        error = getattr(self._library, name)(*arguments)
        if error != 0:
            raise RuntimeError(f"{name}: CUDA error {error}")

    def kernels(self, binary: bytes) -> "Iterator[tuple[str, Any]]":
        """Yield names and handles of the functions in a fat binary."""
        module, count = ctypes.c_void_p(), ctypes.c_uint()
        self.call("cuModuleLoadFatBinary", ctypes.byref(module), binary)
        self.call("cuModuleGetFunctionCount", ctypes.byref(count), module)
        functions = (ctypes.c_void_p * count.value)()
        self.call("cuModuleEnumerateFunctions", functions, count, module)
        for handle in functions:
            name, function = ctypes.c_char_p(), ctypes.c_void_p(handle)
            self.call("cuFuncLoad", function)
            self.call("cuFuncGetName", ctypes.byref(name), function)
            yield (name.value or b"").decode(), function

    def attribute(self, function: Any, which: int) -> int:
        """Return a CUfunction_attribute."""
        value = ctypes.c_int()
        self.call("cuFuncGetAttribute", ctypes.byref(value), which, function)
        return value.value

    def blocks(self, function: Any, threads: int, smem_bytes: int) -> int:
        """Return how many blocks of a kernel an SM runs at once."""
        self.call("cuFuncSetAttribute", function, DYNAMIC_SHARED_BYTES, smem_bytes)
        value = ctypes.c_int()
        self.call(
            "cuOccupancyMaxActiveBlocksPerMultiprocessor",
            ctypes.byref(value),
            function,
            threads,
            ctypes.c_size_t(smem_bytes),
        )
        return value.value


def add_occupancy(bench: CudaBench) -> None:
    """Add the number of kernels with fewer blocks per SM than tools/gates computes, with notes."""
    if bench.rehearsal:
        return
    if (arch := gpu_arch()) in LIMITS:
        look(bench, Driver(), Path(_C.__file__).read_bytes(), arch)
    else:
        bench.note("facts.occupancy", f"the gates know no sm_{arch}")


def look(bench: CudaBench, driver: Driver, binary: bytes, arch: str) -> None:
    """Compare the kernels of a compiled module for one architecture."""
    count = fewer = 0
    try:
        found = [kernel for fat in fat_binaries(binary) for kernel in driver.kernels(fat)]
        names = demangle([name for name, _ in found])
        for name, (_, function) in zip(names, found, strict=True):
            budget = budget_of(name)
            if arch not in budget.launched_on:
                continue
            threads = budget.threads or driver.attribute(function, MAX_THREADS)
            reported = driver.blocks(function, threads, budget.smem_bytes)
            registers = driver.attribute(function, REGISTERS)
            reckoned = blocks_per_sm(LIMITS[arch], registers, threads, budget.smem_bytes)
            count, fewer = count + 1, fewer + (reported < reckoned)
            if reported != reckoned:
                id = f"facts.occupancy.{name}"
                bench.note(id, f"{reported} blocks an SM, {reckoned} by the gates' arithmetic")
    except RuntimeError as error:  # the driver is too old for these functions
        bench.note("facts.occupancy", str(error))
        return
    what = f"kernels of {count} with fewer blocks on an SM than the gates reckon"
    bench.add(Figure("facts.occupancy", what, fewer, "kernels"))
