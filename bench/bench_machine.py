# SPDX-License-Identifier: Apache-2.0
"""The limits of this machine's cores and memory, and what they allow the kernels.

It measures read bandwidth by number of threads, the latency of an unpredictable read, the cost of
splitting a call among threads, and issue rates of the instructions in inner loops. These determine
up to how many rows arithmetic keeps up with weights (or keys and values) that stream from memory.
With more rows, no kernel reaches that bandwidth (bench/limits.py). `linear` is measured in the same
run, against the lowest limit of the active instruction set.
"""

import ctypes
import time
from collections.abc import Callable
from functools import partial
from itertools import cycle

import specops
import torch
from specops.dense import PackedWeight, linear, pack_weight, silu_mul

from bench.common import Bench, Figure, host_library
from bench.limits import RATES, instructions, issue_rate, lowest_limit

LATENCIES = {"l2": 256 << 10, "l3": 8 << 20, "memory": 256 << 20}
OUTPUTS, INPUTS = 4096, 2048  # a bf16 matrix of 16 MiB
COLD_BYTES = 512 << 20
_SILU_ROWS = 64  # rows per chunk of silu_mul


def run_machine(bench: Bench) -> None:
    """Measure bandwidth, latency, rates, and `linear` against the resulting limits."""
    _bandwidth(bench)
    _rates(bench)
    _latency(bench)
    _dispatch(bench)
    _linear(bench)


def _bandwidth(bench: Bench) -> None:
    threads = sorted({1, 2, 4, 8, 16, 32, bench.num_threads})
    for count in (number for number in threads if number <= bench.num_threads):
        timing = bench.rounds(
            {"read": partial(bench.read_gb_s, count)}, rounds=9, guarded=not bench.rehearsal
        )
        what = f"read bandwidth, {count} threads"
        bench.add(
            Figure(f"machine.read.t{count}", what, timing.median("read"), "GB/s", threads=count)
        )


def _add(bench: Bench, id: str, what: str, value: float, unit: str, threads: int) -> None:
    bench.add(Figure(f"machine.{id}", what, value, unit, threads=threads))


def _rates(bench: Bench) -> None:
    seconds, count = bench.pick(0.05, 0.0), bench.num_threads
    for name in RATES:
        if issue_rate(name, count, 0.0) < 0:
            continue
        rate = bench.rounds({name: partial(issue_rate, name, count, seconds)}, rounds=5)
        what = f"{name} instructions"
        _add(bench, f"rate.{name}", what, rate.median(name) / 1e9, "G/s", count)


def _latency(bench: Bench) -> None:
    function = _function("latency_ns", (ctypes.c_int64, ctypes.c_int64))
    for name, num_bytes in LATENCIES.items():
        size, reads = bench.pick((num_bytes, 1_000_000), (4096, 64))
        timing = bench.rounds({name: partial(function, size, reads)}, rounds=3)
        what = f"a read from {num_bytes >> 10:,} KiB, each at the address that the last one gave"
        _add(bench, f"latency.{name}", what, timing.median(name), "ns", 1)


def _dispatch(bench: Bench) -> None:
    """Measure the cost of splitting a call among threads: one nearly empty chunk per thread."""
    counts = sorted({2, 4, 8, 16, 32, 64, bench.num_threads})
    for count in (number for number in counts if number <= bench.num_threads):
        gate_up = torch.zeros(_SILU_ROWS * count, 2)
        timing = bench.rounds(
            {
                "shared": partial(_call_us, bench, gate_up, count),
                "alone": partial(_call_us, bench, gate_up, 1),
            },
            rounds=5,
        )
        value = timing.median("shared") - timing.median("alone")
        what = f"a call shared by {count} threads, less the same on one"
        _add(bench, f"dispatch.t{count}", what, value, "us", count)
    specops.set_num_threads(bench.num_threads)


def _call_us(bench: Bench, gate_up: torch.Tensor, num_threads: int) -> float:
    """Return the microseconds per call of many consecutive calls, which keep workers awake."""
    specops.set_num_threads(num_threads)
    out, calls = torch.empty(len(gate_up), 1), bench.pick(2000, 5)
    silu_mul(gate_up, out=out)
    begun = time.perf_counter()
    for _ in range(calls):
        silu_mul(gate_up, out=out)
    return (time.perf_counter() - begun) / calls * 1e6


def _function(name: str, argtypes: tuple[type, ...]) -> Callable[..., float]:
    function = getattr(host_library("machine_rates"), name)
    function.restype, function.argtypes = ctypes.c_double, argtypes
    call: Callable[..., float] = function
    return call


def _linear(bench: Bench) -> None:
    if not instructions(bench, "bf16", 1):
        return
    outputs, inputs = bench.pick((OUTPUTS, INPUTS), (64, 64))
    copies = bench.pick(-(-COLD_BYTES // (2 * outputs * inputs)), 1)
    weight = torch.randn(outputs, inputs).bfloat16() * 0.02
    weights = [pack_weight(weight) for _ in range(copies)]
    cases = {rows: _calls(weights, rows, inputs) for rows in (1, 5, 8, 16)}
    timing = bench.alternate({f"m{rows}": call for rows, call in cases.items()})
    num_bytes, read = 2 * outputs * inputs, timing.read_gb_s()

    def limit(rows: int) -> tuple[str, float]:
        work = instructions(bench, "bf16", outputs * inputs, rows)
        return lowest_limit(bench, num_bytes, read, work)

    for rows in cases:
        name, least = limit(rows)
        seconds = timing.median(f"m{rows}")
        bench.add(
            Figure(
                f"machine.linear.m{rows}",
                f"linear bf16, {rows} rows, cold weights: share of the lower limit",
                num_bytes * 1e-9 / seconds,
                "GB/s",
                name,
                num_bytes * 1e-9 / least,
                least / seconds,
                threads=bench.num_threads,
                read_gb_s=read,
            )
        )
    ridge = 1
    while limit(ridge + 1)[0] == "reading" and ridge < 1024:
        ridge += 1
    what = f"rows that {specops.get_isa()} products keep up with at the read line"
    _add(bench, "rows", what, float(ridge), "rows", bench.num_threads)


def _calls(weights: list[PackedWeight], rows: int, inputs: int) -> Callable[[], None]:
    x = torch.randn(rows, inputs).bfloat16()
    out = torch.empty(rows, weights[0].num_outputs, dtype=torch.bfloat16)
    turn = cycle(weights)

    def call() -> None:
        linear(x, next(turn), out=out)

    return call
