# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.gates`: check the rules of device code, then every kernel, then its hot loops.

The program prints tables; the exit status is 0 if everything passed.
"""

import argparse
import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tools.cuda_toolkit import ROOT, find_nvcc, find_nvdisasm, nvcc_version
from tools.gates.budgets import (
    ARCHS,
    DEFAULT_ARCHS,
    LIMITS,
    blocks_per_sm,
    budget_of,
    exceptions,
    launch_problems,
)
from tools.gates.kernels import Compiled, Kernel, cmake_list, compile_error, compile_source, judge
from tools.gates.meter import Metering, meter, print_meter
from tools.gates.sources import violations

WORK = ROOT / "build" / "gates"


def main() -> int:
    """Run the gates; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.gates", description=__doc__)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", default="", help="sources whose path contains this text")
    parser.add_argument(
        "--archs",
        default=" ".join(DEFAULT_ARCHS),
        help=f"all, or some of {' '.join(ARCHS)}; default: %(default)s",
    )
    parser.add_argument(
        "--compile-only",
        action="store_true",
        help="only check that every kernel compiles, without optimization: a tenth of the time",
    )
    arguments = parser.parse_args()
    archs = list(ARCHS) if arguments.archs == "all" else arguments.archs.split()
    if unknown := set(archs) - set(ARCHS):
        parser.error(f"no such architecture: {' '.join(sorted(unknown))}")
    begun = time.monotonic()
    problems = [*violations(ROOT / "csrc"), *launch_problems()]
    nvcc, nvdisasm = find_nvcc(), find_nvdisasm()
    if nvcc is None or nvdisasm is None:
        parser.error("nvcc or nvdisasm is missing; `make gates` fetches them")
    sources = [name for name in cmake_list("SPECOPS_CUDA_KERNELS") if arguments.only in name]
    jobs = [(ROOT / source, arch) for source in sources for arch in archs]
    # Start with the longest jobs, as far as size tells.
    jobs.sort(key=lambda job: -sum(path.stat().st_size for path in _headers(job[0])))

    if arguments.compile_only:
        with ThreadPoolExecutor(arguments.jobs) as pool:
            errors = list(pool.map(lambda job: compile_error(nvcc, *job), jobs))
        problems += [error for error in errors if error is not None]
        seconds = time.monotonic() - begun
        print(f"{len(jobs)} compilations in {seconds:.0f} s, {len(problems)} problems")
        for problem in problems:
            print(f"  {problem}")
        return min(len(problems), 1)

    def run(job: tuple[Path, str]) -> tuple[Compiled, Metering]:
        compiled = compile_source(nvcc, *job, WORK)
        return compiled, meter(nvdisasm, compiled, WORK / f"sm_{job[1]}" / job[0].stem)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        outcomes = list(pool.map(run, jobs))
    outcomes.sort(key=lambda outcome: (outcome[0].source, archs.index(outcome[0].arch)))
    results = [compiled for compiled, _ in outcomes]
    for compiled, metering in outcomes:
        texts = [*compiled.problems, *metering.problems]
        problems += [f"{compiled.source} sm_{compiled.arch}: {text}" for text in texts]
        for kernel in compiled.kernels:
            problems += [f"sm_{kernel.arch}: {kernel.name} {text}" for text in judge(kernel)]
        for loop in metering.measured:
            problems += [f"sm_{loop.arch}: {loop.kernel} {text}" for text in loop.problems()]
    print_table(results)
    for arch in archs:
        print_meter([loop for _, metering in outcomes for loop in metering.measured], arch)
    print("\nknown exceptions:", *exceptions(), sep="\n  ")
    release = ".".join(map(str, nvcc_version(nvcc)))
    fresh = [result for result in results if not result.cached]
    print(
        f"{sum(len(result.kernels) for result in results)} kernels of {len(sources)} sources for "
        f"{' and '.join(f'sm_{arch}' for arch in archs)}, nvcc {release}: {len(fresh)} of "
        f"{len(results)} compiled in {time.monotonic() - begun:.0f} s, {len(problems)} problems"
    )
    for problem in problems:
        print(f"  {problem}")
    return min(len(problems), 1)


def _headers(source: Path) -> set[Path]:
    """Return the CUDA headers that a source includes, directly or indirectly."""
    found: set[Path] = set()
    left = [source]
    while left:
        names = re.findall(r'#include "(.+\.cuh)"', left.pop().read_text())
        new = {ROOT / "csrc" / name for name in names} - found
        found |= new
        left += new
    return found


def print_table(results: list[Compiled]) -> None:
    """Print a line per kernel and architecture: the range over its instances, and its budget."""
    groups: dict[tuple[str, str], list[Kernel]] = {}
    for result in results:
        for kernel in result.kernels:
            if kernel.entry:
                groups.setdefault((kernel.name.split("<")[0], kernel.arch), []).append(kernel)
    print(f"{'kernel':40} {'arch':7} {'forms':>5} {'registers':>9} {'budget':>6} {'threads':>8} "
          f"{'smem':>7} {'per SM':>6}")  # fmt: skip
    for (name, arch), kernels in sorted(groups.items()):
        registers = [kernel.registers for kernel in kernels]
        rows = {budget_of(kernel.name) for kernel in kernels}
        threads = sorted({kernel.threads or 0 for kernel in kernels})
        fits = min(
            blocks_per_sm(
                LIMITS[arch],
                kernel.registers,
                kernel.threads or 1,
                budget_of(kernel.name).smem_bytes,
            )
            for kernel in kernels
        )
        print(
            f"{name:40} sm_{arch:4} {len(kernels):5} {_range(registers):>9} "
            f"{max(row.registers for row in rows):6} {_range(threads):>8} "
            f"{max(row.smem_bytes for row in rows):7} {fits:6}"
        )


def _range(numbers: list[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}-{high}"


if __name__ == "__main__":
    sys.exit(main())
