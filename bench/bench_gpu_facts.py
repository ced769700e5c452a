# SPDX-License-Identifier: Apache-2.0
"""Properties of the GPU: bandwidths, clocks under load, gaps between kernels, latencies, flops.

They are measured first, since predictions of other figures are computed from them.
"""

import ctypes
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any

import torch

from bench.common import Figure
from bench.cuda import CudaBench, compiled, seconds, time_figure
from bench.occupancy import add_occupancy

COPY_BYTES = 1 << 30
MM_SIZE = 8192
ROUNDS = 1000  # number of dependent reads in a latency chain
CLOCK_NS = 50_000_000
CHAIN_STEP = 1 << 16  # bytes between two reads of a chain, so that each is on another memory page
READ_BLOCK_BYTES = 256 * 8 * 16  # bytes per block of read_cached_kernel: threads, loads, size
MMA_WARPS, MMA_CHAINS, MMA_FLOPS = 8, 8, 2 * 16 * 8 * 16  # constants of mma_peak_kernel
WGMMA_TILES = 1_000_000  # tiles of 16 x 8
WGMMA_OUTPUTS = (8, 64, 128, 256)
WGMMA_INPUTS = ("bf16", "f16")  # by number in the enum Inputs of gpu_facts.cu
WGMMA_PLACES = ("registers", "shared")  # memory of operand A
RANDOM, EXACT, UNLIKE = range(3)  # numbers in gpu_facts.cu
# By number in the enum Arrival of gpu_facts.cu.
ARRIVALS = {
    "fence_atomic": "a fence (MEMBAR.SC) and an atomic behind it",
    "fence_acq_rel": "a fence.acq_rel and an atomic behind it",
    "atomic_acq_rel": "an atomic that is acq_rel itself",
    "atomic": "an atomic alone",
}

_START = {
    "start_empty": [],
    "start_dependent": [],
    "start_arrival": [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int],
    "start_read_cached": [
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_void_p,
    ],
    "start_mma_peak": [ctypes.c_int, ctypes.c_int, ctypes.c_void_p],
    "start_wgmma": [ctypes.c_void_p, *[ctypes.c_int] * 6],
    "start_chase": [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int],
    "start_clock": [ctypes.c_void_p, ctypes.c_int64],
}


class Probes:
    """Launcher of the kernels of gpu_facts.cu; in a rehearsal it runs none.

    If the compiler removed a kernel's timed work, its figure would look too good. So each kernel
    returns a value that only the work produces, and `proven` checks the value.
    """

    def __init__(self, bench: CudaBench) -> None:
        self._bench = bench
        self._library: Any = None if bench.rehearsal else compiled("gpu_facts")
        for name, types in _START.items():
            if self._library is not None:
                getattr(self._library, name).argtypes = [*types, ctypes.c_void_p]

    def proven(self, id: str, what: str, got: int, expected: int) -> bool:
        """Return whether a probe returned the expected value; if not, add a note with both values.

        A rehearsal runs no probe and always returns True.
        """
        if self._library is not None and got != expected:
            self._bench.note(id, f"the probe is wrong: {what}: {got}, expected {expected}")
            return False
        return True

    def start(self, name: str, *arguments: Any, stream: int | None = None) -> None:
        """Start a kernel on a stream, the current one by default."""
        values = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments]
        assert len(values) == len(_START[name])
        if self._library is None:
            return
        handle = torch.cuda.current_stream().cuda_stream if stream is None else stream
        error = getattr(self._library, name)(*values, handle)
        assert error == 0, f"{name}: CUDA error {error}"


def num_sms(bench: CudaBench) -> int:
    """Return the number of SMs of the GPU."""
    if bench.rehearsal:
        return 1
    return int(torch.cuda.get_device_properties(bench.device).multi_processor_count)


def run_facts_cuda(bench: CudaBench) -> None:
    """Measure all facts, the quickest first."""
    probes = Probes(bench)
    reads = sorted(bench.read_gb_s() for _ in range(9))
    bench.add(Figure("facts.read", "read bandwidth", reads[4], "GB/s"))
    _copy(bench)
    _latencies(bench, probes)
    _cached(bench, probes)
    _mma(bench, probes)
    _wgmma(bench, probes)
    add_occupancy(bench)
    _clocks(bench, probes, {"idle": lambda: None, "reading": bench.read_gb_s, "mm": _mm(bench)})
    _gaps(bench, probes)  # last, since an old driver may refuse to capture a dependent launch


def _copy(bench: CudaBench) -> None:
    source, target = torch.empty(
        2, bench.pick(COPY_BYTES, 1024), dtype=torch.uint8, device=bench.device
    )
    timings = bench.time({"copy": [lambda: target.copy_(source)]})
    value = 2 * source.numel() * 1e-9 / seconds(timings, "copy")
    bench.add(Figure("facts.copy", "bandwidth of a copy, read and written", value, "GB/s"))


def _gaps(bench: CudaBench, probes: Probes) -> None:
    """Measure the time from kernel to kernel in a graph: the full cost of an empty kernel."""
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
    counter, passed = bench.ints([0]), bench.ints([0, 0], torch.int64)
    links = torch.arange(1, rounds + 1) * (CHAIN_STEP // 8)
    chain = torch.zeros((rounds + 1) * CHAIN_STEP // 8, dtype=torch.int64)
    chain[links - CHAIN_STEP // 8] = links
    chain = chain.to(bench.device)
    for number, (name, what) in enumerate(ARRIVALS.items()):
        counter.zero_()
        probes.start("start_arrival", counter, passed, rounds, number)
        bench.synchronize()
        if probes.proven(f"facts.{name}", "arrivals that were counted", counter.item(), rounds):
            text = f"latency of {what}, seen by the same thread"
            bench.add(Figure(f"facts.{name}", text, int(passed[0]) / rounds, "cycles"))
    bench.read_gb_s()  # evict the chain from the caches
    probes.start("start_chase", chain, passed, rounds)
    bench.synchronize()
    cycles, last = passed.tolist()
    if probes.proven("facts.chase", "the chain's last link", last, int(links[-1])):
        what = "latency of a load from memory"
        bench.add(Figure("facts.chase", what, cycles / rounds, "cycles"))


def _cached(bench: CudaBench, probes: Probes) -> None:
    """Measure the bandwidth of the L2 cache, on data that fits it."""
    blocks, rounds = 4 * num_sms(bench), bench.pick(100, 1)
    num_bytes = blocks * READ_BLOCK_BYTES
    data = torch.ones(num_bytes // 4, dtype=torch.int32, device=bench.device)
    sums = torch.zeros(blocks * 256, dtype=torch.int32, device=bench.device)

    def call() -> None:
        probes.start("start_read_cached", data, num_bytes, rounds, blocks, sums)

    took = seconds(bench.time({"l2": [call]}), "l2")
    words = rounds * data.numel()
    if probes.proven("facts.l2_read", "words that were read", int(sums.sum()), words):
        what = f"read bandwidth of {num_bytes * 1e-6:.1f} MB that are in L2"
        bench.add(Figure("facts.l2_read", what, 4 * words * 1e-9 / took, "GB/s"))


def _mma(bench: CudaBench, probes: Probes) -> None:
    """Measure the peak rate of mma.sync, which bounds all kernels that use it."""
    blocks, rounds = 4 * num_sms(bench), bench.pick(100, 1)
    once, sums = torch.zeros(2, blocks * MMA_WARPS * 32, device=bench.device)
    probes.start("start_mma_peak", 1, blocks, once)

    def call() -> None:
        probes.start("start_mma_peak", rounds, blocks, sums)

    took = seconds(bench.time({"mma": [call]}), "mma")
    what = "threads whose sums are not those of all products"
    wrong = int(((sums != rounds * once) | (once.abs().max() == 0)).sum())
    if probes.proven("facts.mma", what, wrong, 0):
        what, flops = "mma.sync in bf16, no memory", blocks * MMA_WARPS * MMA_CHAINS * MMA_FLOPS
        bench.add(Figure("facts.mma", what, rounds * flops * 1e-12 / took, "TFLOP/s"))


def wgmma_cases() -> Iterator[tuple[str, int, int, int]]:
    """Yield the forms of wgmma: figure id, number of outputs, and two indices.

    The indices select the type of the inputs (WGMMA_INPUTS), and where the operand A lies
    (WGMMA_PLACES). With A in shared memory, only 64 outputs are probed.
    """
    for inputs, outputs, place in product(WGMMA_INPUTS, WGMMA_OUTPUTS, WGMMA_PLACES):
        if place == "shared" and outputs != 64:
            continue
        numbers = WGMMA_INPUTS.index(inputs), WGMMA_PLACES.index(place)
        yield f"facts.wgmma.{inputs}.n{outputs}.{place}", outputs, *numbers


def _wgmma(bench: CudaBench, probes: Probes) -> None:
    """Check whether wgmma gives the same bits as mma.sync, so that kernels may use either."""
    if not bench.rehearsal and torch.cuda.get_device_capability() != (9, 0):
        bench.note("facts.wgmma", "only compute capability 9.0 has wgmma")
        return
    blocks = 2 * num_sms(bench)
    for id, outputs, inputs, place in wgmma_cases():
        of_turn = blocks * 4 * (outputs // 8)
        turns = bench.pick(-(-WGMMA_TILES // of_turn), 1)
        tiles, counts = turns * of_turn, {}
        for numbers in (EXACT, UNLIKE, RANDOM):
            found = bench.ints([0, 0, 0], torch.int64)
            probes.start("start_wgmma", found, outputs, inputs, place, turns, numbers, blocks)
            bench.synchronize()
            counts[numbers] = found.tolist()
        if all(
            probes.proven(id, what, got, expected)
            for what, got, expected in (
                ("tiles that were computed", counts[RANDOM][0], tiles),
                ("tiles that a product changed", counts[RANDOM][2], tiles),
                ("tiles of exact sums that differ", counts[EXACT][1], 0),
                ("tiles made unlike that differ", counts[UNLIKE][1], tiles),
            )
        ):
            what = (
                f"tiles of {tiles:,} in which mma.sync and wgmma.m64n{outputs}k16 of "
                f"{WGMMA_INPUTS[inputs]}, A in {WGMMA_PLACES[place]}, differ"
            )
            bench.add(Figure(id, what, counts[RANDOM][1], "tiles"))


def _mm(bench: CudaBench) -> Callable[[], object]:
    """Time a large bf16 matmul as the peak of the tensor cores, and return a call of it."""
    size = bench.pick(MM_SIZE, 16)
    a, b, out = (bench.randn(size, size) for _ in range(3))

    def call() -> object:
        return torch.mm(a, b, out=out)

    took = seconds(bench.time({"mm": [call]}), "mm")
    what = f"torch.mm of {size} x {size} in bf16"
    bench.add(Figure("facts.mm", what, 2 * size**3 * 1e-12 / took, "TFLOP/s", us=took * 1e6))
    return call


def _clocks(bench: CudaBench, probes: Probes, loads: Mapping[str, Callable[[], object]]) -> None:
    """Measure the clock frequency of one SM while the other SMs run each of the loads.

    The frequency is the SM's cycle count divided by the time on the GPU's global timer.
    """
    passed = bench.ints([0, 1], torch.int64)
    side = None if bench.rehearsal else torch.cuda.Stream()
    for name, load in loads.items():
        passed.copy_(bench.ints([0, 1], torch.int64))
        bench.synchronize()
        handle = 0 if side is None else side.cuda_stream
        probes.start("start_clock", passed, CLOCK_NS, stream=handle)
        while side is not None and not side.query():  # repeat until the probe ends
            load()
            torch.cuda.current_stream().synchronize()
        bench.synchronize()
        cycles, nanoseconds = passed.tolist()
        id, what = f"facts.clock.{name}", f"clock of an SM, {name}"
        if probes.proven(id, "whole windows that have passed", nanoseconds // CLOCK_NS, 1):
            bench.add(Figure(id, what, cycles / nanoseconds * 1e3, "MHz"))
