# SPDX-License-Identifier: Apache-2.0
"""Replay a trace through a model of a warp scheduler: how many cycles a loop iteration takes.

A warp issues its next instruction once four conditions hold: the stall count of the previous one
has passed, the barriers it waits for are free, the pipe it needs is idle and, for results of tensor
cores, the result is available. The scheduler issues one instruction per cycle and stays with a warp
as long as that warp can issue. Memory never stalls: global loads and asynchronous copies have
always arrived when they are waited for.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tools.gates.pipes import GLOBAL, Rates, is_dead, pipe_of, registers
from tools.gates.sass import NO_BARRIER, Instruction

_NEVER = float("inf")

# Instructions of a warp that are replayed before timing starts, and again while it lasts.
_SETTLING = 4000


@dataclass(frozen=True)
class Latencies:
    """Cycles from issue until a result is available, or until operands have been read."""

    shared: float = 30
    matrix: float = 34  # LDSM
    tensor: float = 34
    special: float = 20
    shuffle: float = 24
    constant: float = 24
    barrier: float = 20
    operands: float = 12
    global_memory: float = 0


@dataclass(eq=False)
class _Step:
    """Properties of an instruction that are computed once for all iterations."""

    instruction: Instruction
    pipe: str
    cycles: float
    latency: float
    arrives: bool  # at a barrier of the block
    waits: tuple[int, ...]  # barriers to wait for
    allowed: tuple[int, int] | None  # DEPBAR: a barrier, and how many may still be held
    reads: frozenset[str] = frozenset()  # registers that tensor cores write
    writes: frozenset[str] = frozenset()


@dataclass(eq=False)
class _Warp:
    block: int
    at: int = 0
    turns: int = 0
    ready: float = 0.0
    held: list[list[float]] = field(default_factory=lambda: [[] for _ in range(6)])
    tensor_results: dict[str, float] = field(default_factory=dict)
    waits_for_block: bool = False
    finished: list[float] = field(default_factory=list)


def cycles_per_turn(
    trace: Sequence[Instruction],
    rates: Rates,
    warps: int,
    warps_of_block: int,
    latencies: Latencies = Latencies(),
) -> float:
    """Return the cycles in which each warp of a scheduler completes one iteration in steady state.

    Args:
        trace: the instructions of one iteration.
        rates: rates of the architecture.
        warps: number of warps of the scheduler.
        warps_of_block: how many of these belong to one block, and meet at its barriers.
        latencies: latencies of results.
    """
    steps = _prepare(trace, rates, latencies)
    alone = sum(max(step.instruction.control.stall, 1) for step in steps)
    team = [_Warp(i // warps_of_block) for i in range(warps)]
    for warp in team:
        # Blocks do not begin at the same time.
        warp.ready = warp.block * alone / max(1, warps // warps_of_block)
    free: dict[str, float] = {}
    settled = max(2, _SETTLING // len(steps))
    turns = 2 * settled
    now, last = 0.0, team[0]
    while (slowest := min(len(warp.finished) for warp in team)) < turns:
        times = [_earliest(warp, steps[warp.at], free) for warp in team]
        soonest = max(min(times), now)
        assert soonest < _NEVER, "every warp waits at a barrier"
        ready = [warp for warp, time in zip(team, times, strict=True) if time <= soonest]
        # Stay with a warp as long as it can issue; then choose the warp with the least progress.
        if soonest > now or last not in ready or len(last.finished) > slowest:
            last = min(ready, key=lambda one: (len(one.finished), one.ready))
        _issue(last, steps, soonest, free, team, latencies)
        now = soonest + 1
    begun = sum(warp.finished[settled - 1] for warp in team)
    ended = sum(warp.finished[turns - 1] for warp in team)
    return (ended - begun) / len(team) / (turns - settled)


def _prepare(trace: Sequence[Instruction], rates: Rates, latencies: Latencies) -> list[_Step]:
    tensor_writes: set[str] = set()
    for instruction in trace:
        if pipe_of(instruction, rates)[0] == "tensor":
            tensor_writes |= registers(instruction.opcode, instruction.operands)[0]
    steps = []
    for instruction in trace:
        pipe, cycles = pipe_of(instruction, rates)
        written, read = registers(instruction.opcode, instruction.operands)
        allowed = None
        if instruction.opcode.startswith("DEPBAR.LE"):
            barrier, number = instruction.operands.split(",")[:2]
            allowed = (int(barrier.strip()[2:]), int(number.strip(), 16))
        steps.append(
            _Step(
                instruction,
                pipe,
                cycles,
                _latency(instruction, pipe, latencies),
                instruction.name == "BAR" and "ARV" not in instruction.opcode,
                tuple(i for i in range(6) if instruction.control.waits >> i & 1),
                allowed,
                read & tensor_writes,
                written & tensor_writes,
            )
        )
    return steps


def _latency(instruction: Instruction, pipe: str, latencies: Latencies) -> float:
    name = instruction.name
    if is_dead(instruction):
        return 0
    if name in GLOBAL or name == "LDGDEPBAR":
        return latencies.global_memory
    by_name = {"LDSM": latencies.matrix, "SHFL": latencies.shuffle}
    by_pipe = {
        "tensor": latencies.tensor,
        "special": latencies.special,
        "lsu": latencies.shared,
        "": latencies.constant,
    }
    return by_name.get(name, by_pipe.get(pipe, latencies.shuffle))


def _earliest(warp: _Warp, step: _Step, free: dict[str, float]) -> float:
    """Return when a warp could issue its next instruction if no other warp issued first."""
    if warp.waits_for_block:
        return _NEVER
    time = warp.ready
    for barrier in step.waits:
        if warp.held[barrier]:
            time = max(time, *warp.held[barrier])
    if step.allowed:
        barrier, number = step.allowed
        held = sorted(warp.held[barrier])
        if len(held) > number:
            time = max(time, held[len(held) - number - 1])
    for register in step.reads:
        time = max(time, warp.tensor_results.get(register, 0.0))
    if step.pipe and step.pipe != "lsu":
        time = max(time, free.get(step.pipe, 0.0))
    return time


def _issue(
    warp: _Warp,
    steps: list[_Step],
    now: float,
    free: dict[str, float],
    team: list[_Warp],
    latencies: Latencies,
) -> None:
    step = steps[warp.at]
    control = step.instruction.control
    begins = now
    if step.pipe:
        # Memory accesses are queued; other pipes accept an instruction when idle.
        begins = max(now, free.get(step.pipe, 0.0))
        free[step.pipe] = begins + step.cycles
    done = begins + step.latency + (step.cycles if step.pipe == "lsu" else 0)
    read = begins + min(latencies.operands, step.latency)
    for barrier, until in ((control.writes, done), (control.reads, read)):
        if barrier != NO_BARRIER:
            warp.held[barrier] = [time for time in warp.held[barrier] if time > now] + [until]
    for register in step.writes:
        if step.pipe == "tensor":
            warp.tensor_results[register] = done
        else:
            warp.tensor_results.pop(register, None)
    warp.ready = now + max(control.stall, 1)
    warp.at += 1
    if warp.at == len(steps):
        warp.at = 0
        warp.finished.append(now)
    if step.arrives:
        warp.waits_for_block = True
        block = [other for other in team if other.block == warp.block]
        if all(other.waits_for_block for other in block):
            for other in block:
                other.waits_for_block = False
                other.ready = max(other.ready, now + latencies.barrier)
