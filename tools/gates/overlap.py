# SPDX-License-Identifier: Apache-2.0
"""Check in machine code that a kernel that may start early waits before it touches memory.

From sm_90 on, a kernel starts while the previous one still runs (csrc/common/launch.cuh). Until it
has waited (ACQBULK) it may not read or write global memory, let the next kernel start (PREEXIT), or
end. A compiler may move a load that it believes to be constant above the wait, so the source text
is no proof.
"""

from collections.abc import Iterator

from tools.gates.sass import Function, Instruction

WAIT = "ACQBULK"
RELEASE = "PREEXIT"
# Accesses to global memory, also by generic addresses. A prefetch (CCTL, UBLKPF) is allowed: later
# writes reach the L2 cache, too.
ACCESSES = frozenset(
    {"LD", "LDG", "LDGSTS", "ST", "STG", "ATOM", "ATOMG", "RED", "REDG", "UBLKCP", "UBLKRED"}
)


def waits(arch: str) -> bool:
    """Return whether kernels of an architecture may overlap."""
    return int(arch.rstrip("a")) >= 90


def overlap_problems(function: Function) -> Iterator[str]:
    """Yield in words what a kernel does before it has waited."""
    seen: set[int] = set()
    left = [0]
    while left:
        index = left.pop()
        if index in seen:
            continue
        seen.add(index)
        block = function.blocks[index]
        for instruction in block.body:
            if _is_wait(instruction):
                break
            if instruction.name in ACCESSES:
                yield (
                    f"{instruction.opcode} at 0x{instruction.address:x} may touch global memory "
                    "before the kernel before it has ended"
                )
            if instruction.name == RELEASE:
                yield f"lets the next kernel start at 0x{instruction.address:x}, before it waits"
            if instruction.name == "EXIT":
                yield f"may end at 0x{instruction.address:x} without having waited"
        else:
            left += block.after
    if not any(instruction.name == RELEASE for instruction in function.instructions):
        yield "never lets the next kernel start early"


def _is_wait(instruction: Instruction) -> bool:
    return instruction.name == WAIT and not instruction.guard
