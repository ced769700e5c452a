# SPDX-License-Identifier: Apache-2.0
"""The path through a loop that does one unit of work: the instructions that a warp issues for it.

A loop in machine code has branches that the steady state does not take (the end of a leaf, a tile
that is partly masked), and inner loops. Nothing marks the common path, but its work is known: a
tile takes a fixed number of HMMA, of copies, of powers of two. So the path is the cheapest one
through the loop that does exactly that. A loop without such a path does not process this unit.
"""

import heapq
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache

from tools.gates.pipes import is_tensor
from tools.gates.sass import Block, Function, Instruction, Loop

# Subroutines are not followed; this cost keeps paths away from calls.
_CALL = 10_000
# Kinds of work on tensor cores.
TENSOR_WORK = frozenset({"HMMA*", "IMMA*"})
_MOST_STATES = 400_000


@dataclass(frozen=True)
class Trips:
    """An inner loop whose trip count can be read from its code."""

    loop: Loop
    number: int


@dataclass(frozen=True)
class Walk:
    """One path through a loop.

    Attributes:
        address: address of the loop's header.
        units: how many units of work it does.
        trace: the instructions in the order in which a warp issues them.
    """

    address: int
    units: int
    trace: tuple[Instruction, ...]


def work_of(body: Sequence[Instruction], kinds: Sequence[str]) -> tuple[int, ...]:
    """Return how many instructions of each kind there are; kinds are patterns of opcodes."""
    live = [instruction.opcode for instruction in body if instruction.guard != "@!PT"]
    return tuple(sum(fnmatchcase(opcode, kind) for opcode in live) for kind in kinds)


def tensor_addresses(function: Function, loop: Loop) -> set[int]:
    """Return the addresses of a loop's tensor instructions."""
    inside = (i for index in loop.blocks for i in function.blocks[index].body)
    return {i.address for i in inside if is_tensor(i)}


def find_walk(
    function: Function,
    loop: Loop,
    work: Mapping[str, int],
    units: int = 1,
    is_one_of_several: bool = False,
) -> Walk | None:
    """Return the cheapest path that does the work of `units` units, or None.

    All tensor instructions of the loop must be on it, unless it is one of several paths.
    """
    inside = [function.blocks[index] for index in sorted(loop.blocks)]
    kinds = tuple(work)
    everything = [i for block in inside for i in block.body]
    have = work_of(everything, kinds)
    if any(needed and not found for needed, found in zip(work.values(), have, strict=True)):
        return None
    tensor = set() if is_one_of_several else tensor_addresses(function, loop)
    wanted = [number for kind, number in work.items() if kind in TENSOR_WORK]
    if wanted and len(tensor) > units * sum(wanted):
        return None
    trips = [found for inner in function.loops if (found := trips_of(function, loop, inner))]
    amounts = tuple(number * units for number in work.values())
    path = _cheapest(function, loop, kinds, amounts, trips)
    trace = tuple(i for index in path for i in function.blocks[index].body)
    # Tensor instructions on other paths mean that this is part of another loop's work.
    if not trace or tensor - {i.address for i in trace} or any(i.is_call for i in trace):
        return None
    return Walk(function.blocks[loop.header].address, units, trace)


# A block, the work done up to its end, iterations of counted loops, and the predicate values that
# the branches so far imply: a warp that jumped because of P1 does not fall through at the next test
# of P1.
_Known = frozenset[tuple[str, bool]]
_State = tuple[int, tuple[int, ...], tuple[int, ...], _Known]


def _cheapest(
    function: Function,
    loop: Loop,
    kinds: tuple[str, ...],
    wanted: tuple[int, ...],
    trips: list[Trips],
) -> list[int]:
    """Return the blocks of the cheapest path from the header back to it (Dijkstra 1959)."""
    blocks = function.blocks
    does = {index: work_of(blocks[index].body, kinds) for index in loop.blocks}
    costs = {
        index: sum(_CALL if i.is_call else 1 for i in blocks[index].body) for index in loop.blocks
    }
    asked_later = _asked_later(blocks, loop)
    start: _State = (loop.header, does[loop.header], (0,) * len(trips), frozenset())
    before: dict[_State, _State | None] = {start: None}
    best = {start: costs[loop.header]}
    queue = [(best[start], 0, start)]
    settled: set[_State] = set()
    while queue and len(settled) < _MOST_STATES:
        cost, _, state = heapq.heappop(queue)
        if state in settled:
            continue
        settled.add(state)
        index, done, turns, known = state
        for after, told in _ways_on(function, index, known):
            if after not in loop.blocks:
                continue
            next_known = frozenset(fact for fact in told if fact[0] in asked_later[after])
            if after == loop.header:
                if done == wanted:
                    return _path(before, state)
                continue
            next_turns = _turn(turns, index, after, trips)
            next_done = tuple(a + b for a, b in zip(done, does[after], strict=True))
            if next_turns is None or any(a > b for a, b in zip(next_done, wanted, strict=True)):
                continue
            following: _State = (after, next_done, next_turns, next_known)
            if cost + costs[after] < best.get(following, 1 << 60):
                best[following] = cost + costs[after]
                before[following] = state
                heapq.heappush(queue, (best[following], len(before), following))
    return []


def _ways_on(function: Function, index: int, known: _Known) -> Iterator[tuple[int, _Known]]:
    """Yield the blocks that may follow a block, and the predicate values that are known there."""
    block = function.blocks[index]
    if changed := predicates_set(block):
        known = frozenset(fact for fact in known if fact[0] not in changed)
    last = block.body[-1]
    asked = conditions(last)
    if not last.is_jump or not asked or len(block.after) != 2:
        yield from ((after, known) for after in block.after)
        return
    target = function.labels[last.labels[-1]]
    for after in block.after:
        if function.blocks[after].address == target:
            if not any((name, not value) in known for name, value in asked):
                yield after, known | set(asked)
        elif not all(fact in known for fact in asked):
            yield after, known | {(name, not value) for name, value in asked[:1] if len(asked) == 1}


def _asked_later(blocks: list[Block], loop: Loop) -> dict[int, frozenset[str]]:
    """Return per block the predicates that a later branch may test before they are set again."""
    asks = {}
    for index in loop.blocks:
        last = blocks[index].body[-1]
        names = [name for name, _ in conditions(last)] if last.is_jump else []
        asks[index] = frozenset(names) - predicates_set(blocks[index])
    found = dict(asks)
    changed = True
    while changed:
        changed = False
        for index in sorted(loop.blocks, reverse=True):
            later = frozenset().union(
                *(found[i] for i in blocks[index].after if i in found and i != loop.header)
            )
            now = asks[index] | (later - predicates_set(blocks[index]))
            changed = changed or now != found[index]
            found[index] = now
    return found


def conditions(branch: Instruction) -> list[tuple[str, bool]]:
    """Return the predicate values that must all hold for a branch to be taken."""
    texts = [branch.guard.removeprefix("@"), *branch.operands.split(",")[:-1]]
    found = [re.fullmatch(r"(!?)(U?P\d)", text.strip()) for text in texts]
    return [(match[2], match[1] == "") for match in found if match]


@cache
def _written(opcode: str, operands: str) -> frozenset[str]:
    """Return the predicates that an instruction writes: those before its sources."""
    if opcode.startswith(("R2P", "CALL")):
        return frozenset(f"{kind}{i}" for kind in ("P", "UP") for i in range(8))
    found = set()
    for place, operand in enumerate(operands.split(",")):
        name = operand.strip().lstrip("!")
        if re.fullmatch(r"U?P(\d|T)", name):
            found.add(name)
        elif (place > 0 and found) or place > 1:
            break
    return frozenset(found)


def predicates_set(block: Block) -> frozenset[str]:
    """Return the predicates that a block may change."""
    names = (
        _written(i.opcode, i.operands)
        for i in block.body
        if i.name not in _READERS and not i.is_jump
    )
    return frozenset().union(*names)


# Instructions that read the predicates in their operands, in any position.
_READERS = frozenset({"BAR", "EXIT", "STS", "STG", "LDGSTS", "WARPSYNC", "BSSY", "BSYNC"})


def _path(before: Mapping[_State, _State | None], state: _State | None) -> list[int]:
    path = []
    while state is not None:
        path.append(state[0])
        state = before[state]
    return path[::-1]


def _turn(
    turns: tuple[int, ...], index: int, after: int, trips: list[Trips]
) -> tuple[int, ...] | None:
    """Return the iterations of the counted loops after an edge; None if a trip count forbids it."""
    new = list(turns)
    for i, counted in enumerate(trips):
        inner = counted.loop
        if after == inner.header and index in inner.latches:
            new[i] += 1
            if new[i] >= counted.number:
                return None
        elif index in inner.latches and after not in inner.blocks:
            if turns[i] != counted.number - 1:
                return None
            new[i] = 0
        elif after not in inner.blocks:
            new[i] = 0
    return tuple(new)


def trips_of(function: Function, outer: Loop, inner: Loop) -> Trips | None:
    """Return the trip count of an inner loop whose register counts between constants, else None."""
    if inner.header not in outer.blocks or inner == outer or len(inner.latches) != 1:
        return None
    latch = function.blocks[inner.latches[0]]
    branch = latch.body[-1]
    guard = re.fullmatch(r"@(!?)(U?P\d)", branch.guard)
    if branch.name != "BRA" or guard is None or len(latch.after) != 2:
        return None
    goes_back_if = guard[1] == ""
    if branch.labels and function.labels[branch.labels[0]] != function.blocks[inner.header].address:
        goes_back_if = not goes_back_if
    compare = next((i for i in reversed(latch.body[:-1]) if _sets(i, guard[2])), None)
    test = compare and re.fullmatch(
        r"U?ISETP\.(NE|LT|LE|GT|GE|EQ)(?:\.U32)?\.AND \w+, U?PT, (U?R\d+), "
        r"(-?0x[0-9a-f]+|U?RZ), U?PT",
        f"{compare.opcode} {compare.operands}".replace(".reuse", ""),
    )
    if not test or compare is None:
        return None
    step = _step(function, inner, test[2])
    first = _value_before(function, inner, test[2])
    if step is None or first is None:
        return None
    number = _count(first, step[0], test[1], _constant(test[3]), goes_back_if, step[1], compare)
    return Trips(inner, number) if number else None


def _sets(instruction: Instruction, register: str) -> bool:
    return instruction.operands.partition(",")[0].strip() == register


def _constant(text: str) -> int:
    return 0 if text.endswith("RZ") else int(text, 16)


def _step(function: Function, loop: Loop, register: str) -> tuple[int, int] | None:
    """Return the number that a loop adds to a register, if it does so once, and where."""
    writers = [
        i for index in loop.blocks for i in function.blocks[index].body if _sets(i, register)
    ]
    if len(writers) != 1 or writers[0].guard:
        return None
    text = f"{writers[0].opcode} {writers[0].operands}".replace(".reuse", "")
    added = re.fullmatch(
        rf"(?:VIADD|U?IADD3?|IMAD\.IADD|IADD3\.X) {register}, (?:U?PT, U?PT, )?{register}, "
        r"(?:0x1, )?(-?0x[0-9a-f]+)(?:, U?RZ)?",
        text,
    )
    return (int(added[1], 16), writers[0].address) if added else None


def _value_before(function: Function, loop: Loop, register: str) -> int | None:
    """Return the constant that a register holds when the loop is entered."""
    blocks = function.blocks
    index = loop.header
    inside = loop.blocks
    for _ in range(8):
        ways = [b.index for b in blocks if index in b.after and b.index not in inside]
        if len(ways) != 1:
            return None
        index = ways[0]
        inside = inside | {index}
        for instruction in reversed(blocks[index].body):
            if not _sets(instruction, register):
                continue
            text = f"{instruction.opcode} {instruction.operands}"
            found = re.fullmatch(
                r"(?:U?MOV|IMAD\.MOV\.U32|HFMA2\S*|CS2R(?:\.32)?) \w+, "
                r"(?:RZ, RZ, )?(-?0x[0-9a-f]+|U?RZ|SRZ)",
                text,
            )
            if found is None or instruction.guard:
                return None
            return _constant("RZ" if found[1] == "SRZ" else found[1])
    return None


def _count(
    value: int, step: int, how: str, limit: int, back_if: bool, added_at: int, compare: Instruction
) -> int:
    """Return how often the body runs; 0 if unknown."""
    holds = {
        "NE": int.__ne__,
        "EQ": int.__eq__,
        "LT": int.__lt__,
        "LE": int.__le__,
        "GT": int.__gt__,
        "GE": int.__ge__,
    }[how]
    for number in range(1, 65):
        tested = value + step if added_at < compare.address else value
        value += step
        if holds(tested, limit) != back_if:
            return number
    return 0
