# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.gates`: the rules of device code, then every kernel for every architecture.

Prints a table; the exit status says whether all of it passed.
"""

import argparse
import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tools.cuda_toolkit import ROOT, find_nvcc, nvcc_version
from tools.gates.budgets import LIMITS, blocks_per_sm, budget_of
from tools.gates.kernels import Compiled, Kernel, cmake_list, compile_source, judge
from tools.gates.sources import violations

WORK = ROOT / "build" / "gates"


def main() -> int:
    """Runs the gates."""
    parser = argparse.ArgumentParser(prog="python -m tools.gates", description=__doc__)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", default="", help="sources whose path contains this text")
    arguments = parser.parse_args()
    begun = time.monotonic()
    problems = list(violations(ROOT / "csrc"))
    nvcc = find_nvcc()
    if nvcc is None:
        parser.error("nvcc is missing; `make gates` fetches it")
    sources = [name for name in cmake_list("SPECOPS_CUDA_KERNELS") if arguments.only in name]
    jobs = [(ROOT / source, arch) for source in sources for arch in LIMITS]
    # The longest first, as far as size tells.
    jobs.sort(key=lambda job: -sum(path.stat().st_size for path in _headers(job[0])))
    with ThreadPoolExecutor(arguments.jobs) as pool:
        results = list(pool.map(lambda job: compile_source(nvcc, *job, WORK), jobs))
    for result in sorted(results, key=lambda result: (result.source, result.arch)):
        problems += [f"{result.source} sm_{result.arch}: {text}" for text in result.problems]
        for kernel in result.kernels:
            problems += [f"sm_{kernel.arch}: {kernel.name} {text}" for text in judge(kernel)]
    print_table(results)
    release = ".".join(map(str, nvcc_version(nvcc)))
    fresh = [result for result in results if not result.cached]
    print(
        f"{sum(len(result.kernels) for result in results)} kernels of {len(sources)} sources for "
        f"{' and '.join(f'sm_{arch}' for arch in LIMITS)}, nvcc {release}: {len(fresh)} of "
        f"{len(results)} compiled in {time.monotonic() - begun:.0f} s, {len(problems)} problems"
    )
    for problem in problems:
        print(f"  {problem}")
    return min(len(problems), 1)


def _headers(source: Path) -> set[Path]:
    """The CUDA headers that a source includes, and those that these include."""
    found: set[Path] = set()
    left = [source]
    while left:
        names = re.findall(r'#include "(.+\.cuh)"', left.pop().read_text())
        new = {ROOT / "csrc" / name for name in names} - found
        found |= new
        left += new
    return found


def print_table(results: list[Compiled]) -> None:
    """A line per kernel and architecture: the range over its instances, and its budget."""
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
