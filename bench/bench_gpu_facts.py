# SPDX-License-Identifier: Apache-2.0
"""What the GPU itself does: bandwidths, clocks under load, gaps between kernels, latencies, flops.

A prediction is arithmetic over these, so they are measured first and in the same run.
"""

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import torch

from bench.common import Figure
from bench.cuda import CudaBench, compiled, seconds, time_figure

COPY_BYTES = 1 << 30
MM_SIZE = 8192
ROUNDS = 1000  # of a chain of latencies
CLOCK_NS = 50_000_000
CHAIN_STEP = 1 << 16  # bytes between two links: another page of memory each

_START = {
    "start_empty": [],
    "start_dependent": [],
    "start_fence_atomic": [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int],
    "start_chase": [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int],
    "start_clock": [ctypes.c_void_p, ctypes.c_int64],
}


class Probes:
    """The kernels of gpu_facts.cu; in a rehearsal none of them runs."""

    def __init__(self, bench: CudaBench) -> None:
        self._bench = bench
        self._library: Any = None if bench.rehearsal else compiled("gpu_facts")
        for name, types in _START.items():
            if self._library is not None:
                getattr(self._library, name).argtypes = [*types, ctypes.c_void_p]

    def start(self, name: str, *arguments: Any, stream: int | None = None) -> None:
        """Starts a kernel on a stream, the current one by default."""
        values = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments]
        assert len(values) == len(_START[name])
        if self._library is None:
            return
        handle = torch.cuda.current_stream().cuda_stream if stream is None else stream
        error = getattr(self._library, name)(*values, handle)
        assert error == 0, f"{name}: CUDA error {error}"


def run_facts_cuda(bench: CudaBench) -> None:
    """All facts, the quickest first."""
    probes = Probes(bench)
    reads = sorted(bench.read_gb_s() for _ in range(9))
    bench.add(Figure("facts.read", "read bandwidth", reads[4], "GB/s"))
    _copy(bench)
    _latencies(bench, probes)
    _clocks(bench, probes, {"idle": lambda: None, "reading": bench.read_gb_s, "mm": _mm(bench)})
    _gaps(bench, probes)  # last: an old driver may refuse to capture a dependent launch


def _copy(bench: CudaBench) -> None:
    source, target = torch.empty(
        2, bench.pick(COPY_BYTES, 1024), dtype=torch.uint8, device=bench.device
    )
    timings = bench.time({"copy": [lambda: target.copy_(source)]})
    value = 2 * source.numel() * 1e-9 / seconds(timings, "copy")
    bench.add(Figure("facts.copy", "bandwidth of a copy, read and written", value, "GB/s"))


def _gaps(bench: CudaBench, probes: Probes) -> None:
    """From kernel to kernel in one graph: all that a kernel costs that does nothing."""
    timings = bench.time({"gap": [lambda: probes.start("start_empty")]})
    bench.add(time_figure(timings, "gap", "facts.gap", "an empty kernel of a graph"))
    if not bench.rehearsal and torch.cuda.get_device_capability() < (9, 0):
        bench.note("facts.gap_dependent", "dependent launches need compute capability 9.0")
        return
    what = "an empty kernel of a graph, launched before the one before ends"
    timings = bench.time({"gap_dependent": [lambda: probes.start("start_dependent")]})
    bench.add(time_figure(timings, "gap_dependent", "facts.gap_dependent", what))


def _latencies(bench: CudaBench, probes: Probes) -> None:
    rounds = bench.pick(ROUNDS, 2)
    counter, cycles = bench.ints([0]), bench.ints([0], torch.int64)
    links = torch.arange(1, rounds + 1) * (CHAIN_STEP // 8)
    chain = torch.zeros((rounds + 1) * CHAIN_STEP // 8, dtype=torch.int64)
    chain[links - CHAIN_STEP // 8] = links
    chain = chain.to(bench.device)
    for name, what, memory in (
        ("fence_atomic", "a fence and an atomic behind it, seen by the same thread", counter),
        ("chase", "a load from memory", chain),
    ):
        bench.read_gb_s()  # nothing of the chain is left in the caches
        probes.start(f"start_{name}", memory, cycles, rounds)
        bench.synchronize()
        value = int(cycles.item()) / rounds
        bench.add(Figure(f"facts.{name}", f"latency of {what}", value, "cycles"))


def _mm(bench: CudaBench) -> Callable[[], object]:
    """A large matmul in bf16, once timed as the peak of the tensor cores."""
    size = bench.pick(MM_SIZE, 16)
    a, b, out = (bench.randn(size, size) for _ in range(3))

    def call() -> object:
        return torch.mm(a, b, out=out)

    took = seconds(bench.time({"mm": [call]}), "mm")
    what = f"torch.mm of {size} x {size} in bf16"
    bench.add(Figure("facts.mm", what, 2 * size**3 * 1e-12 / took, "TFLOP/s", us=took * 1e6))
    return call


def _clocks(bench: CudaBench, probes: Probes, loads: Mapping[str, Callable[[], object]]) -> None:
    """The clock of one SM while the others work: its cycles over the timer of the chip."""
    passed = bench.ints([0, 1], torch.int64)
    side = None if bench.rehearsal else torch.cuda.Stream()
    for name, load in loads.items():
        bench.synchronize()
        handle = 0 if side is None else side.cuda_stream
        probes.start("start_clock", passed, CLOCK_NS, stream=handle)
        while side is not None and not side.query():  # until the probe has ended
            load()
            torch.cuda.current_stream().synchronize()
        bench.synchronize()
        cycles, nanoseconds = passed.tolist()
        what = f"clock of an SM, {name}"
        bench.add(Figure(f"facts.clock.{name}", what, cycles / nanoseconds * 1e3, "MHz"))
