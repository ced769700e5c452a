# SPDX-License-Identifier: Apache-2.0
"""Lower bounds of a call's time: reading its bytes, and issuing each kind of instruction.

An instruction's bound is its number in the call over its measured rate (machine_rates.cpp).
Different instructions may overlap, so the bounds are not added up: no kernel with these
instructions can exceed the largest bound. Loads, and rounding of rows, are not counted.
"""

import ctypes
from collections.abc import Mapping
from functools import cache, partial
from statistics import median

import specops

from bench.common import Bench, Figure, Timing, host_library

# Name of an instruction, or of a few that belong together, in machine_rates.cpp -> numbers that it
# handles per 32 bits of a vector: products, or converted numbers. A name ends in the vector's bits.
NUMBERS = {
    "fma": 1,
    "dpbf16_": 2,
    "dpwssd": 2,  # VNNI, 16-bit integers
    "dpbusd": 4,  # VNNI, 8-bit integers
    "madd": 2,  # 16-bit integers: products, and their addition
    "maddubs": 4,  # 8-bit integers, likewise
    "widen": 1,  # bf16 to fp32
    "widen_fp8_": 1,  # to fp32
    "split": 4,  # quads of 8 bits to 16 bits
    "halves": 8,  # 4 bits to quads of 8 bits
    "max": 1,
}
RATES = [f"{name}{bits}" for bits in (512, 256) for name in NUMBERS]


def rates_of(bench: Bench) -> Mapping[str, float]:
    """Return each instruction's rate per second over all threads, if the CPU has it."""
    return dict.fromkeys(RATES, 1e9) if bench.rehearsal else _measured(bench.num_threads)


@cache
def _measured(num_threads: int) -> dict[str, float]:
    rates = {
        name: median(partial(issue_rate, name, num_threads, 0.03)() for _ in range(3))
        for name in RATES
    }
    return {name: rate for name, rate in rates.items() if rate > 0}


def issue_rate(name: str, num_threads: int, seconds: float) -> float:
    """Measure the rate of an instruction; negative if the CPU does not have it."""
    function = host_library("machine_rates").issue_rate
    function.restype = ctypes.c_double
    function.argtypes = (ctypes.c_char_p, ctypes.c_double, ctypes.c_int)
    return float(function(name.encode(), seconds, num_threads))


def _names(isa: str, kind: str, has: Mapping[str, float], bits: int) -> tuple[str, ...]:
    """Return the instructions of a product: the multiplication, then conversions."""
    is_bf16, vnni = isa == "avx512_bf16", f"dpbusd{bits}" in has
    pairs = "dpwssd" if vnni else "madd"
    match kind:
        case "fp32":
            return ("fma",)
        case "bf16":
            return ("dpbf16_",) if is_bf16 else ("fma", "widen")
        case "fp8":
            return ("dpbf16_" if is_bf16 else "fma", "widen_fp8_")
        case "int8 int8" if vnni:
            return ("dpbusd",)
        case "int4 int8" if vnni or bits == 256:
            return ("dpbusd" if vnni else "maddubs", "halves")
        case "int8 int16" | "int8 int8":
            return (pairs, "split")
        case "int4 int16" | "int4 int8":
            return (pairs, "split", "halves")
        case "max of bf16":
            return ("max", "widen")
        case "max of fp32":
            return ("max",)
    raise ValueError(kind)


def instructions(bench: Bench, kind: str, numbers: float, rows: float = 1) -> dict[str, float]:
    """Return the number of instructions of a product, or of maxima, by name.

    Args:
        bench: the run.
        kind: "fp32", "bf16", "fp8"; weights and rows of integers, such as "int4 int8"; or
            "max of fp32" or "max of bf16".
        numbers: number of weights, or of elements of keys and values.
        rows: rows by which each number is multiplied.

    Returns:
        The numbers, for all threads together; empty if the limits of the instruction set are
        unknown.
    """
    isa = specops.get_isa()
    bits = 256 if isa == "avx2" else 512
    if isa not in ("avx2", "avx512", "avx512_bf16"):
        return {}
    first, *others = _names(isa, kind, rates_of(bench), bits)
    per = {name: NUMBERS[name] * bits / 32 for name in (first, *others)}
    return {
        f"{first}{bits}": numbers * rows / per[first],
        **{f"{name}{bits}": numbers / per[name] for name in others},
    }


def lowest_limit(
    bench: Bench, num_bytes: float, read_gb_s: float, work: Mapping[str, float]
) -> tuple[str, float]:
    """Return what bounds the speed of a call, and the least seconds that it takes.

    Args:
        bench: the run.
        num_bytes: bytes that the call reads.
        read_gb_s: read bandwidth.
        work: the result of `instructions`.
    """
    rates = rates_of(bench)
    seconds = {"reading": num_bytes * 1e-9 / read_gb_s}
    seconds |= {name: count / rates[name] for name, count in work.items() if name in rates}
    name = max(seconds, key=seconds.__getitem__)
    return name, seconds[name]


def add_share(
    bench: Bench,
    id: str,
    what: str,
    timing: Timing,
    case: str,
    num_bytes: float,
    work: Mapping[str, float],
    *,
    bar: str | None = None,
    rate: tuple[float, str] | None = None,
) -> None:
    """Add the fraction of the read bandwidth that a case reaches, and that of its lowest limit.

    Args:
        bench: the run.
        id: id of the figure.
        what: description of the figure.
        timing: timing of the cases.
        case: name of the case.
        num_bytes: bytes that a call reads.
        work: the result of `instructions`.
        bar: required fraction of the read bandwidth.
        rate: operations of a call and unit of their rate; None: GB/s of the bytes read.
    """
    seconds, read = timing.median(case), timing.read_gb_s(case)
    amount, unit = rate or (num_bytes * 1e-9, "GB/s")
    limit, least = lowest_limit(bench, num_bytes, read, work)
    bench.add(
        Figure(
            id,
            what,
            amount / seconds,
            unit,
            "read bandwidth",
            read,
            timing.share(case, num_bytes),
            bar,
            threads=bench.num_threads,
            read_gb_s=read,
            limit=limit,
            of_limit=least / seconds,
        )
    )
