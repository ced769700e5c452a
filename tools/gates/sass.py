# SPDX-License-Identifier: Apache-2.0
"""Machine code as nvdisasm prints it: instructions with their control bits, blocks and loops.

Every instruction since sm_70 has 128 bits. The scheduling bits are not printed as text: how long
the warp waits before its next instruction, which of six barriers ("scoreboards") the instruction
holds until it has read or written its registers, and which barriers it waits for.
"""

import re
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

# Barriers are numbered 0 to 5; this number means none.
NO_BARRIER = 7


@dataclass(frozen=True)
class Control:
    """Scheduling bits of an instruction.

    Attributes:
        stall: cycles before the warp's next instruction may issue.
        keeps: whether the scheduler should stay with the warp instead of switching.
        writes: the barrier held until the result is available, or NO_BARRIER.
        reads: the barrier held until the operands have been read, or NO_BARRIER.
        waits: a bit per barrier that must be free before this instruction issues.
    """

    stall: int
    keeps: bool
    writes: int
    reads: int
    waits: int

    @staticmethod
    def decode(high: int) -> "Control":
        """Decode the upper 64 bits of an instruction."""
        return Control(
            stall=high >> 41 & 15,
            keeps=bool(high >> 45 & 1),
            writes=high >> 46 & 7,
            reads=high >> 49 & 7,
            waits=high >> 52 & 63,
        )


@dataclass(frozen=True)
class Instruction:
    """One line: `@!P0 BRA (.L_x_0)` has a guard, an opcode and an operand."""

    address: int
    guard: str
    opcode: str
    operands: str
    control: Control

    @property
    def name(self) -> str:
        """The opcode without its modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def labels(self) -> list[str]:
        """Labels among the operands: possible branch targets."""
        return re.findall(r"\.L_\w+", self.operands)

    @property
    def is_jump(self) -> bool:
        """True if it may branch to a label; on sm_80, also by a call that does not return."""
        return self.name in _JUMPS or (self.name == "CALL" and bool(self.labels))

    @property
    def is_call(self) -> bool:
        """True if it calls a subroutine that returns."""
        return self.name == "CALL" and not self.labels


@dataclass
class Block:
    """Instructions that run one after another; `after`: indices of the blocks that follow."""

    index: int
    body: list[Instruction]
    after: list[int] = field(default_factory=list)

    @property
    def address(self) -> int:
        """Address of the first instruction."""
        return self.body[0].address


@dataclass(frozen=True)
class Loop:
    """A natural loop: its header is on every path into it, `latches` jump back to the header."""

    header: int
    latches: tuple[int, ...]
    blocks: frozenset[int]


@dataclass
class Function:
    """A kernel, with the subroutines that follow it."""

    name: str
    instructions: list[Instruction]
    labels: dict[str, int]  # addresses

    @cached_property
    def blocks(self) -> list[Block]:
        """Basic blocks in the order of their addresses; the first is the entry."""
        return _link(self._cut(), self)

    @cached_property
    def loops(self) -> list[Loop]:
        """Natural loops; outer ones may come before or after the loops inside them."""
        return find_loops(self.blocks)

    def _cut(self) -> list[Block]:
        starts = set(self.labels.values())
        blocks: list[Block] = []
        ended = True
        for instruction in self.instructions:
            if ended or instruction.address in starts:
                blocks.append(Block(len(blocks), []))
            blocks[-1].body.append(instruction)
            ended = instruction.is_jump or instruction.name in _ENDS
        return blocks


_JUMPS = frozenset({"BRA", "BRX", "BRXU", "JMP", "JMX"})
_ENDS = frozenset({"EXIT", "RET", "BSYNC", "KILL"})


def parse(text: str) -> list[Function]:
    """Parse the output of `nvdisasm -c -hex`; one function per section."""
    functions: list[Function] = []
    pending: list[str] = []
    line = re.compile(
        r"^\s*/\*(?P<address>[0-9a-f]{4,})\*/\s+(?:(?P<guard>@!?U?P\w+)\s+)?(?P<opcode>[A-Z][\w.]*)"
        r"\s*(?P<operands>[^;]*?)\s*;\s*/\* 0x[0-9a-f]{16} \*/\s*\n"
        r"\s*/\* 0x(?P<high>[0-9a-f]{16}) \*/"
        r"|^(?P<label>\.L_\w+):|^\s*\.section\s+\.text\.(?P<section>[^,\s]+)",
        re.MULTILINE,
    )
    for match in line.finditer(text):
        if match["section"]:
            functions.append(Function(match["section"], [], {}))
            pending = []
        elif match["label"]:
            pending.append(match["label"])
        else:
            address = int(match["address"], 16)
            function = functions[-1]
            function.labels |= dict.fromkeys(pending, address)
            pending = []
            function.instructions.append(
                Instruction(
                    address,
                    match["guard"] or "",
                    match["opcode"],
                    match["operands"],
                    Control.decode(int(match["high"], 16)),
                )
            )
    return functions


def _link(blocks: list[Block], function: Function) -> list[Block]:
    """Set the successors of every block."""
    at = {block.address: block.index for block in blocks}
    meeting: dict[str, int] = {}  # barrier register -> block where its divergent paths reconverge
    for block in blocks:
        for instruction in block.body:
            if instruction.name == "BSSY" and instruction.labels:
                register = instruction.operands.split(",")[0].strip()
                meeting[register] = at[function.labels[instruction.labels[0]]]
        last = block.body[-1]
        following = [block.index + 1] if block.index + 1 < len(blocks) else []
        targets = [at[function.labels[label]] for label in last.labels if label in function.labels]
        if last.is_jump:
            block.after = targets + (following if _may_fall_through(last) else [])
        elif last.name in ("EXIT", "RET", "KILL"):
            block.after = following if last.guard else []
        elif last.name == "BSYNC":
            register = last.operands.split(",")[-1].strip()
            met = [meeting[register]] if register in meeting else following
            block.after = met + (following if last.guard else [])
        else:
            block.after = following
        block.after = list(dict.fromkeys(block.after))
    return blocks


def _may_fall_through(branch: Instruction) -> bool:
    """Return whether a branch has a condition: a guard, or operands before its target."""
    if branch.name != "BRA":
        return bool(branch.guard)
    return bool(branch.guard) or "," in branch.operands


def _reverse_postorder(blocks: list[Block]) -> list[int]:
    order: list[int] = []
    seen = {0}
    stack = [(0, iter(blocks[0].after))]
    while stack:
        index, left = stack[-1]
        following = next((after for after in left if after not in seen), None)
        if following is None:
            order.append(index)
            stack.pop()
        else:
            seen.add(following)
            stack.append((following, iter(blocks[following].after)))
    return order[::-1]


def predecessors(blocks: list[Block]) -> dict[int, list[int]]:
    """Return the predecessors of each block."""
    before: dict[int, list[int]] = {block.index: [] for block in blocks}
    for block in blocks:
        for after in block.after:
            before[after].append(block.index)
    return before


def dominators(blocks: list[Block]) -> dict[int, int]:
    """Return each reachable block's nearest dominator (Cooper, Harvey and Kennedy 2001)."""
    order = _reverse_postorder(blocks)
    rank = {index: place for place, index in enumerate(order)}
    before = predecessors(blocks)
    nearest = {0: 0}
    changed = True
    while changed:
        changed = False
        for index in order[1:]:
            new = -1
            for other in before[index]:
                if other not in nearest:
                    continue
                if new < 0:
                    new = other
                    continue
                while new != other:
                    while rank[new] > rank[other]:
                        new = nearest[new]
                    while rank[other] > rank[new]:
                        other = nearest[other]
            if nearest.get(index) != new:
                nearest[index] = new
                changed = True
    return nearest


def find_loops(blocks: list[Block]) -> list[Loop]:
    """Return the natural loops: a back edge to a dominator and the blocks that reach it."""
    nearest = dominators(blocks)
    before = predecessors(blocks)
    latches: dict[int, list[int]] = {}
    for block in blocks:
        if block.index not in nearest:
            continue
        for after in block.after:
            above = block.index
            while above not in (after, 0):
                above = nearest[above]
            if above == after:
                latches.setdefault(after, []).append(block.index)
    loops = []
    for header, ends in latches.items():
        inside = {header}
        left = list(ends)
        while left:
            index = left.pop()
            if index not in inside and index in nearest:
                inside.add(index)
                left += before[index]
        loops.append(Loop(header, tuple(ends), frozenset(inside)))
    return sorted(loops, key=lambda loop: blocks[loop.header].address)


def kernel_symbols(cubin: bytes) -> Iterator[tuple[int, str]]:
    """Yield the functions in a cubin, with the indices that `nvdisasm -fun` uses."""
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError("no 64-bit ELF file")
    (sections_at,) = struct.unpack_from("<Q", cubin, 40)
    size, number = struct.unpack_from("<HH", cubin, 58)
    headers = [
        struct.unpack_from("<IIQQQQIIQQ", cubin, sections_at + i * size) for i in range(number)
    ]
    for _, kind, _, _, offset, length, link, *_ in headers:
        if kind != 2:  # the symbol table
            continue
        names = headers[link][4]
        for index in range(length // 24):
            name, info = struct.unpack_from("<IB", cubin, offset + 24 * index)
            if info & 15 == 2:  # functions
                begin = names + name
                yield index, cubin[begin : cubin.index(b"\0", begin)].decode()


def disassemble(nvdisasm: Path, cubin: Path, symbols: list[int]) -> list[Function]:
    """Disassemble some of the functions of a cubin."""
    chosen = ",".join(map(str, symbols))
    command = [str(nvdisasm), "-c", "-hex", "-fun", chosen, str(cubin)]
    return parse(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
