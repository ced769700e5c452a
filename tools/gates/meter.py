# SPDX-License-Identifier: Apache-2.0
"""Meter the hot loops of compiled kernels: instructions per unit of work, and the resulting caps.

There are two caps: by the busiest pipe, as if it never waited, and by a replay of the loop with its
own stall counts and barriers and as many warps as fit (replay.py). Both assume that memory takes no
time, so they bound what the instructions allow and do not predict what a kernel reaches. The README
of this folder has the conclusions.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from tools.gates import overlap, pipes, replay, sass, walk
from tools.gates.budgets import (
    LIMITS,
    UNMETERED,
    Metered,
    blocks_per_sm,
    budget_of,
    metered_in,
)
from tools.gates.kernels import Compiled, Kernel, demangle


@dataclass(frozen=True)
class Measured:
    """A hot loop, as compiled.

    Attributes:
        kernel: name of the kernel.
        arch: target architecture.
        unit: unit of work.
        address: address of the loop in the kernel.
        instructions: number of instructions that a warp issues per unit.
        budget: limit on instructions.
        classes: instructions by purpose.
        pipes: for each pipe, the cycles per unit for which it is busy on an SM; `issue` counts
            all instructions.
        replayed: cycles of an SM per unit in the replay.
        smem_bytes: shared memory of a block.
        blocks: number of blocks that an SM holds at once; 0 if the kernel cannot be launched. The
            replay then uses one block.
        warps: warps of one scheduler.
        amount: bytes or flops of a unit.
        is_flops: whether `amount` is in flops.
    """

    kernel: str
    arch: str
    unit: str
    address: int
    instructions: float
    budget: int
    classes: dict[str, float]
    pipes: dict[str, float]
    replayed: float
    smem_bytes: int
    blocks: int
    warps: int
    amount: int
    is_flops: bool

    @property
    def bound(self) -> str:
        """The busiest pipe."""
        return max(self.pipes, key=lambda name: self.pipes[name])

    def cap(self, cycles: float) -> float:
        """Return TB/s or TFLOP/s of the whole card if an SM takes `cycles` per unit."""
        limits = LIMITS[self.arch]
        return self.amount * limits.sms * limits.ghz / cycles / 1000

    def problems(self) -> Iterator[str]:
        """Yield in words where the loop exceeds its budget."""
        if math.ceil(self.instructions) > self.budget:
            yield (
                f"issues {self.instructions:g} instructions per {self.unit} in the loop at "
                f"0x{self.address:x}, its budget is {self.budget}"
            )


@dataclass(frozen=True)
class Metering:
    """All metered loops of one source and architecture, and their problems."""

    measured: tuple[Measured, ...]
    problems: tuple[str, ...]


def meter(nvdisasm: Path, compiled: Compiled, folder: Path) -> Metering:
    """Meter a compiled source, or reuse the result of an identical one.

    Where kernels overlap, their accesses before the wait are checked in the same disassembly.
    """
    overlaps = overlap.waits(compiled.arch)
    wanted = [kernel for kernel in compiled.kernels if kernel.entry]
    cubin = folder / "kernel.cubin"
    if not wanted or not cubin.exists():
        return Metering((), ())
    saved, key = folder / "meter.json", _key(cubin, nvdisasm)
    if saved.exists():
        result = json.loads(saved.read_text())
        if result["key"] == key:
            loops = tuple(Measured(**loop) for loop in result["measured"])
            return Metering(loops, tuple(result["problems"]))
    symbols = list(sass.kernel_symbols(cubin.read_bytes()))
    names = demangle([name for _, name in symbols])
    by_name = {name: symbol for (symbol, _), name in zip(symbols, names, strict=True)}
    functions = sass.disassemble(nvdisasm, cubin, [by_name[kernel.name] for kernel in wanted])
    by_mangled = {mangled: name for (_, mangled), name in zip(symbols, names, strict=True)}
    measured: list[Measured] = []
    problems: list[str] = []
    for kernel in wanted:
        function = next(f for f in functions if by_mangled[f.name] == kernel.name)
        for row in metered_in(kernel.name):
            found = list(meter_loops(function, kernel, row))
            measured += found
            if not found:
                problems.append(f"{kernel.name}: no loop does the work of a {row.unit}")
        if not fnmatchcase(kernel.name, UNMETERED):
            problems += [f"{kernel.name}: {text}" for text in strangers(function, kernel, measured)]
        if overlaps:
            problems += [f"{kernel.name}: {text}" for text in overlap.overlap_problems(function)]
    saved.write_text(
        json.dumps(
            {"key": key, "measured": [asdict(loop) for loop in measured], "problems": problems}
        )
    )
    return Metering(tuple(measured), tuple(problems))


def _key(cubin: Path, nvdisasm: Path) -> str:
    digest = hashlib.sha256(cubin.read_bytes() + str(nvdisasm.stat().st_size).encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def meter_loops(function: sass.Function, kernel: Kernel, row: Metered) -> Iterator[Measured]:
    """Yield the innermost loops that do a row's work; more than one if the kernel holds copies.

    Unrolled loops are considered only if no loop does one unit per iteration.
    """
    for units in (1, 2, 4):
        taken: list[sass.Loop] = []
        for loop in sorted(function.loops, key=lambda loop: len(loop.blocks)):
            if any(inner.blocks <= loop.blocks for inner in taken):
                continue
            walks = _walks(function, loop, row, units)
            if walks:
                taken.append(loop)
                yield _measure(walks, kernel, row)
        if taken:
            return


def _walks(function: sass.Function, loop: sass.Loop, row: Metered, units: int) -> list[walk.Walk]:
    """Return one walk per way of the row; empty if the loop lacks any of them."""
    walks = []
    # If rare ways use their own tensor instructions, all ways together must cover those of the
    # loop.
    several = any(way.times == 0 and walk.TENSOR_WORK & set(way.work) for way in row.ways)
    for way in row.ways:
        found = walk.find_walk(function, loop, way.work, units, several)
        if found is None:
            return []
        walks.append(found)
    used = {i.address for found in walks for i in found.trace}
    return walks if not several or walk.tensor_addresses(function, loop) <= used else []


def _measure(walks: list[walk.Walk], kernel: Kernel, row: Metered) -> Measured:
    rates, limits = pipes.RATES[kernel.arch], LIMITS[kernel.arch]
    # In execution order: the last way ends what the first ones continue.
    steady = [(way.times, one) for way, one in zip(row.ways, walks, strict=True)]
    trace = [i for times, one in steady for _ in range(times) for i in one.trace]
    units = sum(times * one.units for times, one in steady)
    classes = Counter(pipes.classify(trace))
    busy = dict.fromkeys(pipes.PIPES, 0.0)
    for instruction in trace:
        pipe, cycles = pipes.pipe_of(instruction, rates)
        busy["issue"] += 1
        if pipe:
            busy[pipe] += cycles
    threads = row.threads or kernel.threads or 32
    smem_bytes = budget_of(kernel.name).smem_bytes if row.smem_bytes is None else row.smem_bytes
    blocks = blocks_per_sm(limits, kernel.registers, threads, smem_bytes)
    if smem_bytes > limits.block_smem_bytes:
        blocks = 0
    of_block = max(1, threads // 128)
    warps = max(1, blocks) * of_block
    turn = replay.cycles_per_turn(trace, rates, warps, of_block)
    return Measured(
        kernel=kernel.name,
        arch=kernel.arch,
        unit=row.unit,
        address=walks[0].address,
        instructions=len(trace) / units,
        budget=row.instructions[kernel.arch],
        classes={name: classes[name] / units for name in pipes.CLASSES},
        pipes={name: cycles * row.warps / 4 / units for name, cycles in busy.items()},
        replayed=turn * row.warps / (4 * warps) / units,
        smem_bytes=smem_bytes,
        blocks=blocks,
        warps=warps,
        amount=row.moved_bytes or row.flops,
        is_flops=not row.moved_bytes,
    )


def strangers(function: sass.Function, kernel: Kernel, measured: list[Measured]) -> Iterator[str]:
    """Yield tensor-core instructions without a rate, and innermost loops of them without a row.

    Loops inside a metered loop are on its ways, like all of its tensor instructions.
    """
    for name in sorted({i.name for i in function.instructions if not pipes.has_rate(i)}):
        yield f"{name} runs on tensor cores, and pipes.py has no rate for it"
    known = {loop.address for loop in measured if loop.kernel == kernel.name}
    rows = [loop for loop in function.loops if function.blocks[loop.header].address in known]
    for loop in function.loops:
        inner = [other for other in function.loops if other.blocks < loop.blocks]
        counts = _tensor_counts(function, loop)
        if not counts or any(_tensor_counts(function, other) for other in inner):
            continue
        address = function.blocks[loop.header].address
        if address not in known and not any(loop.blocks < outer.blocks for outer in rows):
            text = " and ".join(f"{number} {name}" for name, number in sorted(counts.items()))
            yield f"the loop at 0x{address:x} with {text} is in no row of METERED"


def _tensor_counts(function: sass.Function, loop: sass.Loop) -> Counter[str]:
    body = (i for index in loop.blocks for i in function.blocks[index].body)
    return Counter(i.name for i in body if pipes.is_tensor(i))


def print_meter(loops: list[Measured], arch: str) -> None:
    """Print one line per loop of an architecture, below its kernel and unit of work."""
    loops = [loop for loop in loops if loop.arch == arch]
    if not loops:
        return
    limits, assumed = LIMITS[arch], pipes.RATES[arch].assumed
    print(
        f"\nhot loops, sm_{arch} as {limits.card}: {limits.sms} SMs at {limits.ghz} GHz, at most "
        f"{limits.block_smem_bytes} bytes of shared memory a block"
        f"{f'; assumed: {assumed}' if assumed else ''}"
    )
    print(
        f"{'':16} {'warp instructions per unit of work':>74} | "
        f"{'cycles of an SM per unit':^55} | cap"
    )
    print(
        f"  {'loop at':8} {'all':>6} {'budget':>6}"
        + "".join(f"{name:>8}" for name in pipes.CLASSES)
        + "   |"
        + "".join(f"{name:>8}" for name in (*pipes.PIPES, "replay"))
        + " | by pipe  replay"
    )
    heading = ""
    for loop in loops:
        fits = f"{loop.blocks} to an SM" if loop.blocks else "CANNOT BE LAUNCHED"
        sizes = f"{loop.smem_bytes} bytes a block, {fits}, {loop.warps} warps a scheduler"
        if heading != (heading := f"{loop.kernel}: {loop.unit}; {sizes}"):
            print(heading)
        print(_line(loop))


def _line(loop: Measured) -> str:
    kind = "TFLOP/s" if loop.is_flops else "TB/s"
    cycles = [*(loop.pipes[name] for name in pipes.PIPES), loop.replayed]
    caps = [loop.cap(loop.pipes[loop.bound]), loop.cap(loop.replayed)]
    return (
        f"  0x{loop.address:<6x} {loop.instructions:6.0f} {loop.budget:6}"
        + "".join(f"{loop.classes[name]:8.0f}" for name in pipes.CLASSES)
        + "   |"
        + "".join(f"{number:8.0f}" for number in cycles)
        + " |"
        + "".join(f"{cap:8.0f}" if loop.is_flops else f"{cap:8.2f}" for cap in caps)
        + f" {kind}, {loop.bound}"
    )
