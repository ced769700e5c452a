# SPDX-License-Identifier: Apache-2.0
"""Instruction classes, the pipe of a multiprocessor that an instruction occupies, and for how long.

Cycles are those of one of the four schedulers of a multiprocessor. The path to shared memory, which
all four share, is charged as if all four ran the same code, so one access counts four times.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from tools.gates.sass import Instruction

CLASSES = (
    "address",
    "move",
    "shared",
    "tensor",
    "special",
    "sync",
    "global",
    "other",
)
PIPES = ("issue", "alu", "fma", "tensor", "special", "lsu")


@dataclass(frozen=True)
class Rates:
    """Cycles of a scheduler per warp instruction; `assumed`: rates without a published source.

    Attributes:
        tensor: HMMA.16816 with sums in fp32.
        fp32: FADD, FMUL, FFMA.
        assumed: which of these are guesses.
    """

    tensor: float
    fp32: int
    assumed: str = ""


# Sources: CUDA C++ Programming Guide, throughput of arithmetic instructions; tensor cores from the
# dense bf16 figures of the cards named in budgets.py. Measured on Hopper, mma.sync reaches 62 % of
# wgmma.
RATES = {
    "80": Rates(tensor=8, fp32=2),
    "86": Rates(tensor=16, fp32=1),
    "89": Rates(tensor=16, fp32=1),
    "90a": Rates(tensor=6.5, fp32=1),
    "100a": Rates(tensor=8, fp32=1, assumed="mma.sync at the rate of sm_80"),
    "120": Rates(tensor=32, fp32=1, assumed="mma.sync with fp32 sums at half rate"),
}

# Tensor-core instructions with a known rate: in the same time, IMMA of 8-bit integers multiplies
# twice as many inputs as HMMA.
_RATED_TENSOR = frozenset({"HMMA", "IMMA"})
_SHARED = frozenset({"LDS", "STS", "LDSM", "STSM", "SHFL", "ATOMS", "MOVM"})
GLOBAL = frozenset({"LDG", "STG", "LDGSTS", "ATOMG", "ATOM", "RED", "LD", "ST", "LDL", "STL"})
_SPECIAL = frozenset({"MUFU", "I2F", "F2I", "F2F", "I2I", "POPC", "FLO", "BREV", "FRND", "I2FP"})
_MOVE = frozenset(
    {"MOV", "UMOV", "MOV32I", "LDC", "ULDC", "LDCU", "S2R", "S2UR", "CS2R", "R2UR", "UR2UR", "UR2R"}
)
_SYNC = frozenset(
    {
        "BAR",
        "BRA",
        "BRX",
        "BSSY",
        "BSYNC",
        "BREAK",
        "CALL",
        "RET",
        "EXIT",
        "WARPSYNC",
        "NOP",
        "YIELD",
        "DEPBAR",
        "LDGDEPBAR",
        "MEMBAR",
        "ERRBAR",
        "CCTL",
        "ENDCOLLECTIVE",
        "BMOV",
        "NANOSLEEP",
        "SYNCS",
        "ELECT",
        "COLLECTIVE",
        "KILL",
        "JMP",
        "BRXU",
        "PREEXIT",
        "ACQBULK",
    }
)
_FP32 = frozenset({"FADD", "FMUL", "FFMA", "FADD32I", "FMUL32I", "FFMA32I", "FADD2", "FMUL2"})
_INTEGER = frozenset(
    {
        "IADD3",
        "IADD",
        "VIADD",
        "IMAD",
        "LEA",
        "LOP3",
        "SHF",
        "ISETP",
        "SEL",
        "IABS",
        "PRMT",
        "SGXT",
        "BMSK",
        "VIMNMX",
        "IMNMX",
        "LOP",
        "SHL",
        "SHR",
        "PLOP3",
        "UIADD3",
        "UIMAD",
        "ULEA",
        "ULOP3",
        "USHF",
        "UISETP",
        "USEL",
        "UPRMT",
        "UPLOP3",
        "USGXT",
        "UFLO",
        "UPOPC",
        "ULOP",
        "IADD64",
        "UIADD3X",
        "VIADDMNMX",
        "UVIADD",
        "USHL",
        "UVIMNMX",
        "VIMNMX3",
        "UIADD64",
    }
)


def is_dead(instruction: Instruction) -> bool:
    """Return whether an instruction never executes because its predicate is always false."""
    return instruction.guard in ("@!PT", "@!UPT")


def is_tensor(instruction: Instruction) -> bool:
    """Return whether an instruction runs on tensor cores: HMMA, IMMA, QGMMA, UTCHMMA and others."""
    return instruction.name.endswith("MMA")


def has_rate(instruction: Instruction) -> bool:
    """Return whether the rate of an instruction is known; it may not be on tensor cores."""
    return not is_tensor(instruction) or instruction.name in _RATED_TENSOR


def is_move(instruction: Instruction) -> bool:
    """Return whether an instruction copies a value: a register, a constant, a special register."""
    return instruction.name in _MOVE or instruction.opcode.startswith("IMAD.MOV")


def pipe_of(instruction: Instruction, rates: Rates) -> tuple[str, float]:
    """Return the pipe that an instruction occupies beside the issue port, and the cycles."""
    name, opcode = instruction.name, instruction.opcode
    if is_tensor(instruction) and not is_dead(instruction):
        return ("tensor", rates.tensor * (0.5 if ".1688" in opcode or ".1684" in opcode else 1))
    if is_dead(instruction) or name in _SYNC or name.startswith("U") or name in ("LDC", "S2R"):
        return ("", 0)
    if name in _SPECIAL:
        return ("special", 8)
    if name in _SHARED or name in GLOBAL:
        return ("lsu", 4 * wavefronts(instruction))
    if name in _FP32:
        return ("fma", rates.fp32)
    if name in ("IMAD", "HFMA2", "HADD2", "HMUL2"):
        return ("fma", 2)
    return ("alu", 2)


def wavefronts(instruction: Instruction) -> int:
    """Return the 128-byte passes of an access by a whole warp, without bank conflicts."""
    opcode = instruction.opcode
    if instruction.name == "LDSM":
        return int(opcode.rsplit(".", 1)[1]) if opcode[-1] in "24" else 1
    if ".128" in opcode:
        return 4
    return 2 if ".64" in opcode else 1


def classify(trace: Sequence[Instruction]) -> list[str]:
    """Return a class per instruction of a trace that repeats.

    The class "address" is integer arithmetic whose result goes into an address or the predicate of
    a copy, directly or through other such instructions.
    """
    needed: set[str] = set()
    classes = [_class_by_name(instruction) for instruction in trace]
    for _ in range(2):  # values computed for the next iteration need a second pass
        for place in range(len(trace) - 1, -1, -1):
            instruction = trace[place]
            written, read = registers(instruction.opcode, instruction.operands)
            is_address = instruction.name in _INTEGER and not needed.isdisjoint(written)
            if is_address and classes[place] == "other":
                classes[place] = "address"
            if not instruction.guard:
                needed -= written
            if is_address:
                needed |= read
            elif instruction.name in _SHARED | GLOBAL and instruction.name != "SHFL":
                needed |= _address_of(instruction)
    return classes


def _class_by_name(instruction: Instruction) -> str:
    name = instruction.name
    if is_move(instruction):
        return "move"
    if is_tensor(instruction):
        return "tensor"
    for kind, names in (
        ("shared", _SHARED),
        ("global", GLOBAL),
        ("special", _SPECIAL),
        ("sync", _SYNC),
    ):
        if name in names:
            return kind
    return "other"


def _address_of(instruction: Instruction) -> set[str]:
    """Return registers in brackets, and the predicate that decides whether a copy happens."""
    inside = " ".join(re.findall(r"\[([^\]]*)\]", instruction.operands))
    found = set(_names(inside))
    if instruction.name == "LDGSTS":
        found |= set(re.findall(r"\bU?P\d\b", instruction.operands))
    return found


def _names(text: str, width: int = 1) -> Iterable[str]:
    for kind, number, wide in re.findall(r"\b(U?R)(\d+)((?:\.\w+)*)", text):
        for i in range(max(width, 2 if ".64" in wide else 1)):
            yield f"{kind}{int(number) + i}"
    yield from re.findall(r"\bU?P\d\b", text)


_NO_RESULT = frozenset({"STS", "STG", "ST", "STL", "LDGSTS", "RED", "STSM", "R2P"}) | _SYNC


@cache
def registers(opcode: str, operands: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the registers and predicates that are written, and those that are read."""
    name = opcode.partition(".")[0]
    parts = [part.strip() for part in operands.split(",")]
    first = 0
    if name not in _NO_RESULT:
        while first < len(parts) and re.fullmatch(r"U?P(\d|T)", parts[first]):
            first += 1
        has_register = not name.endswith("SETP") and name not in ("PLOP3", "UPLOP3")
        if has_register and first < len(parts) and re.fullmatch(r"U?RZ?\d*(\..*)?", parts[first]):
            first += 1
            while first < len(parts) and re.fullmatch(r"U?P\d", parts[first]):
                first += 1
    written: set[str] = set()
    for part in parts[:first]:
        written |= set(_names(part, _width(opcode, 0)))
    read: set[str] = set()
    for place, part in enumerate(parts[first:], 1):
        read |= set(_names(part, _width(opcode, place)))
    return frozenset(written), frozenset(read)


def _width(opcode: str, place: int) -> int:
    """Return how many registers an operand takes; place 0 is the result."""
    name = opcode.partition(".")[0]
    if name in _RATED_TENSOR:
        return (4, 4, 2, 4)[min(place, 3)]
    if name == "LDSM":
        return int(opcode[-1]) if place == 0 and opcode[-1] in "24" else 1
    if ".WIDE" in opcode:
        return 2 if place in (0, 3) else 1
    if name in ("LDS", "LDG", "LD", "LDC", "ULDC", "STS", "STG", "ST", "LDCU"):
        is_data = place == 0 or (name.startswith("ST") and place == 2)
        return (4 if ".128" in opcode else 2 if ".64" in opcode else 1) if is_data else 1
    return 2 if name == "CS2R" and ".32" not in opcode and place == 0 else 1
