# SPDX-License-Identifier: Apache-2.0
"""Timings on a GPU: CUDA-graph replay, cold L2, random data, medians, everything twice.

A case is a list of calls on different memory, together more than three times the L2 cache, so that
each call's data has been evicted since it was last read. The calls are captured into one CUDA
graph; a window replays the graph between two events, right after measuring the read bandwidth.

On `cpu` the same code runs with small sizes and a host clock: a rehearsal, which tests use, so that
a typo does not end the first run on a GPU. Its figures mean nothing and are not saved.
"""

import ctypes
import gc
import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor

from bench.common import BENCH, WORK, Figure, Timing, format_row, judged
from tools.cuda_toolkit import find_nvcc, gpu_property, nvcc_version
from tools.gpu_check.goals import bar_of

Call = Callable[[], object]
Size = TypeVar("Size")

ROUNDS = 9
REPEATS = 2
GRAPH_S = 1e-3  # work in a graph, large enough to make its launch negligible
MAX_CALLS = 512  # maximum number of calls in a graph
READ_BYTES = 1 << 30


class CudaBench:
    """One run on a GPU, or a rehearsal on `cpu`: read bandwidth and figures."""

    def __init__(
        self, device: str = "cuda", keep: "Callable[[CudaBench], None] | None" = None
    ) -> None:
        """Prepare a run; `keep` is called after each figure and note, to save them."""
        self.device = torch.device(device)
        self.rehearsal = self.device.type == "cpu"
        self.figures: list[Figure] = []
        self.notes: dict[str, str] = {}
        self._keep = keep or (lambda _: None)
        self.gpu = "rehearsal" if self.rehearsal else torch.cuda.get_device_name()
        self.cold_bytes = self.pick(3 * self._l2_bytes() + (1 << 20), 1)
        self.generator = torch.Generator(self.device).manual_seed(0)
        self._read_graph = self._read_line()

    def _l2_bytes(self) -> int:
        if self.rehearsal:
            return 0
        return int(torch.cuda.get_device_properties(self.device).L2_cache_size)

    def pick(self, real: Size, rehearsed: Size) -> Size:
        """Return `real` on a GPU, or the smaller `rehearsed` in a rehearsal."""
        return rehearsed if self.rehearsal else real

    def copies(self, num_bytes: float) -> int:
        """Return how many buffers of this size a case needs for cold reads: three times the L2."""
        return max(2, int(self.cold_bytes // num_bytes) + 1)

    def goal(self, id: str) -> str | None:
        """Return the requirement of a goal, such as "ratio >= 1.2"; None if this GPU has none."""
        return bar_of(id, self.gpu)

    def on(self, gpu: str, bar: str) -> str | None:
        """Return a requirement in absolute units, or None if this GPU is of another kind."""
        return bar if gpu in self.gpu else None

    def randn(self, *shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
        """Return random numbers on the device."""
        numbers = torch.empty(shape, dtype=dtype, device=self.device)
        return numbers.normal_(0.0, scale, generator=self.generator)

    def ints(self, values: Sequence[int] | Tensor, dtype: torch.dtype = torch.int32) -> Tensor:
        """Return integers on the device."""
        return torch.as_tensor(values, dtype=dtype).to(self.device)

    def time(self, cases: Mapping[str, Sequence[Call]]) -> "list[Timing]":
        """Time the cases in turn, each window after a bandwidth measurement; REPEATS times."""
        windows = {case: self._window(calls) for case, calls in cases.items()}
        timings = []
        for _ in range(self.pick(REPEATS, 1)):
            timing = Timing({case: [] for case in cases}, {case: [] for case in cases})
            for _ in range(self.pick(ROUNDS, 1)):
                for case, window in windows.items():
                    timing.reads[case].append(self.read_gb_s())
                    timing.seconds[case].append(window())
            timings.append(timing)
        return timings

    def host_us(self, call: Call, calls: int = 300) -> float:
        """Return the host's microseconds per call; wait for the device now and then, untimed."""
        per_call = []
        for _ in range(self.pick(20, 2)):
            self.synchronize()
            begun = time.perf_counter()
            for _ in range(calls):
                call()
            per_call.append((time.perf_counter() - begun) / calls * 1e6)
        self.synchronize()
        return median(per_call)

    def read_gb_s(self) -> float:
        """Read memory once; return GB/s (10^9)."""
        num_bytes, window = self._read_graph
        return num_bytes * 1e-9 / window()

    def synchronize(self) -> None:
        """Wait for the device."""
        if not self.rehearsal:
            torch.cuda.synchronize()

    def add(self, figure: Figure) -> None:
        """Judge a figure against its bar, record and print it."""
        bar = None if self.rehearsal else figure.bar
        self.figures.append(judged(replace(figure, bar=bar, threads=None)))
        self._keep(self)
        print(format_row(self.figures[-1]), flush=True)

    def note(self, id: str, reason: str) -> None:
        """Record and print why a case is missing; `id` begins with the family's name."""
        self.notes[id] = reason
        self._keep(self)
        print(f"  {id}: {reason}", flush=True)

    def runs(self, id: str, call: Call) -> bool:
        """Return whether a call succeeds; if not, add a note why the case is missing."""
        try:
            call()
            self.synchronize()
        except (RuntimeError, ValueError) as error:
            self.note(id, str(error))
            return False
        return True

    def _window(self, calls: Sequence[Call]) -> Callable[[], float]:
        """Return a function that returns the seconds of one call, averaged over a graph of many."""
        if self.rehearsal:
            return lambda: _host_seconds(calls)
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()  # inputs were written on another stream
        with torch.cuda.stream(stream):
            for call in calls[:2]:
                call()
            stream.synchronize()
            begun = time.perf_counter()
            for call in calls:
                call()
            stream.synchronize()
            seconds = (time.perf_counter() - begun) / len(calls)
        turns = min(MAX_CALLS, max(1, round(GRAPH_S / seconds)))
        count = -(-turns // len(calls)) * len(calls)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(count):
                calls[i % len(calls)]()
        graph.replay()
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def window() -> float:
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) * 1e-3 / count

        return window

    def _read_line(self) -> tuple[int, Callable[[], float]]:
        if self.rehearsal:
            data = torch.ones(1 << 16)
            return data.numel() * 4, lambda: _host_seconds([data.sum])
        library = compiled("read_bandwidth")
        library.read_unit_bytes.restype = ctypes.c_int64
        library.read_memory.argtypes = [
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_void_p,
            ctypes.c_void_p,
        ]
        assert READ_BYTES % library.read_unit_bytes() == 0
        self._read_data = torch.randint(
            256, (READ_BYTES,), dtype=torch.uint8, device=self.device, generator=self.generator
        )
        sink = torch.zeros(1, dtype=torch.int32, device=self.device)

        def read() -> None:
            stream = torch.cuda.current_stream().cuda_stream
            data = self._read_data.data_ptr()
            error = library.read_memory(data, READ_BYTES, sink.data_ptr(), stream)
            assert error == 0, f"read_memory: CUDA error {error}"

        return READ_BYTES, self._window([read] * 4)


def _host_seconds(calls: Sequence[Call]) -> float:
    begun = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - begun) / len(calls)


def gpu_arch() -> str:
    """Return this GPU's architecture for nvcc: "80", or "90a" for all instructions of Hopper."""
    major, minor = torch.cuda.get_device_capability()
    return "90a" if (major, minor) == (9, 0) else f"{major}{minor}"


def compiled(name: str) -> ctypes.CDLL:
    """Compile bench/`name`.cu for this GPU, unless that has been done, and load it."""
    WORK.mkdir(exist_ok=True)
    source, library = BENCH / f"{name}.cu", WORK / f"{name}_cuda.so"
    if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
        nvcc = find_nvcc()
        assert nvcc, "nvcc is missing"
        arch = gpu_arch()
        code = f"arch=compute_{arch},code=sm_{arch}"
        flags = ["-std=c++20", "-O3", "-gencode", code, "-shared", "-Xcompiler", "-fPIC"]
        subprocess.run([str(nvcc), *flags, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def spread(timings: Sequence[Timing], case: str) -> float:
    """Return how much the repeats' medians differ, relative to the fastest."""
    medians = [timing.median(case) for timing in timings]
    return max(medians) / min(medians) - 1.0


def seconds(timings: Sequence[Timing], case: str) -> float:
    """Return the median over all rounds of all repeats."""
    return median([x for timing in timings for x in timing.seconds[case]])


def read_line(timings: Sequence[Timing], case: str) -> float:
    """Return the median read bandwidth of a case, in GB/s."""
    return median([x for timing in timings for x in timing.reads[case]])


def bandwidth_figure(
    timings: Sequence[Timing], case: str, id: str, what: str, num_bytes: float, bar: str | None
) -> Figure:
    """Return the figure of a case's bytes per second as a fraction of its read bandwidth."""
    share = median([timing.share(case, num_bytes) for timing in timings])
    read = read_line(timings, case)
    took = seconds(timings, case)
    return Figure(
        id,
        what,
        num_bytes * 1e-9 / took,
        "GB/s",
        "read bandwidth",
        read,
        share,
        bar,
        read_gb_s=read,
        us=took * 1e6,
        spread=spread(timings, case),
    )


def time_figure(
    timings: Sequence[Timing],
    case: str,
    id: str,
    what: str,
    peers: Mapping[str, str] | None = None,
    bar: str | None = None,
    over: tuple[str, str] | None = None,
) -> Figure:
    """Return the figure of a case's microseconds and of its fastest peer; ratio = peer / ours.

    `peers` maps cases to names. `over` names another case and its label; then ratio = ours / other.
    """
    ours = seconds(timings, case)
    figure = Figure(
        id,
        what,
        ours * 1e6,
        "us",
        bar=bar,
        read_gb_s=read_line(timings, case),
        us=ours * 1e6,
        spread=spread(timings, case),
    )
    if over:
        other, name = over
        ratio = median([timing.ratio(case, other) for timing in timings])
        took = seconds(timings, other) * 1e6
        return replace(figure, peer=name, peer_value=took, ratio=ratio)
    if not peers:
        return replace(figure, bar=bar if (bar or "").startswith("value") else None)
    peer = min(peers, key=lambda name: seconds(timings, name))
    ratio = median([timing.ratio(peer, case) for timing in timings])
    took = seconds(timings, peer) * 1e6
    return replace(figure, peer=peers[peer], peer_value=took, ratio=ratio)


def gpu_machine() -> dict[str, Any]:
    """Return a description of the kind of GPU and driver, which does not identify the instance."""
    if not torch.cuda.is_available():
        return {"gpu": "none"}
    properties = torch.cuda.get_device_properties(0)
    driver = gpu_property("driver_version")
    return {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30),
        "l2_mb": round(properties.L2_cache_size / 1e6),
        "driver": (driver or ["unknown"])[0],
        "cores": os.cpu_count(),
    }


def gpu_versions() -> dict[str, str]:
    """Return the versions that a timing on a GPU depends on."""
    nvcc = find_nvcc()
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_cuda": str(torch.version.cuda),
        "nvcc": ".".join(map(str, nvcc_version(nvcc))) if nvcc else "none",
    }
    try:
        import flashinfer

        found["flashinfer"] = str(flashinfer.__version__)
    except Exception:  # a module that cannot be imported counts as missing
        found["flashinfer"] = "none"
    return found


def free_memory() -> None:
    """Free the GPU memory that a family has allocated."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
