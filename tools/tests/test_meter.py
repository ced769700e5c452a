# SPDX-License-Identifier: Apache-2.0
"""Meter of hot loops (tools/gates), on handwritten machine code with known results."""

import struct
from pathlib import Path

import pytest

from tools import cuda_toolkit
from tools.gates import overlap, pipes, replay, sass, walk
from tools.gates.budgets import ARCHS, METERED, Metered, Way
from tools.gates.kernels import Kernel
from tools.gates.meter import meter_loops, strangers
from tools.gates.overlap import overlap_problems
from tools.gates.pipes import RATES
from tools.gates.sass import NO_BARRIER, Control, Function, Instruction

pytestmark = pytest.mark.ci

KERNEL = Kernel("x_kernel<bfloat16>", "90a", True, 128, 64, 0, 0, 0)


def encode(stall: int = 1, writes: int = 7, reads: int = 7, waits: int = 0) -> int:
    return stall << 41 | 1 << 45 | writes << 46 | reads << 49 | waits << 52


def listing(lines: list[str]) -> str:
    """Return the output of nvdisasm for lines like `.L_x_0:` and `@P0 BRA `(.L_x_0) # stall=5`."""
    text, address = ['\t.section\t.text.x_kernel,"ax",@progbits', ".text.x_kernel:"], 0
    for line in lines:
        if line.endswith(":"):
            text.append(line)
            continue
        code, _, bits = line.partition(" # ")
        control = encode(**{k: int(v) for k, v in (pair.split("=") for pair in bits.split())})
        text.append(f"        /*{address:04x}*/      {code} ;    /* 0x{7:016x} */")
        text.append(f"                               /* 0x{control:016x} */")
        address += 16
    return "\n".join(text) + "\n"


def function_of(lines: list[str]) -> Function:
    (function,) = sass.parse(listing(lines))
    return function


def addresses(function: Function, blocks: frozenset[int]) -> list[int]:
    return sorted(function.blocks[index].address for index in blocks)


@pytest.mark.parametrize(
    ("high", "control"),
    # Output of nvdisasm -hex for one of the kernels.
    [
        (0x000FE20000000800, Control(1, True, NO_BARRIER, NO_BARRIER, 0)),
        (0x000E620000002100, Control(1, True, 1, NO_BARRIER, 0)),
        (0x002FC60000011409, Control(3, False, NO_BARRIER, NO_BARRIER, 0b000010)),
        (0x004FEA0003800000, Control(5, True, NO_BARRIER, NO_BARRIER, 0b000100)),
        (0x000FCA000FF1E03F, Control(5, False, NO_BARRIER, NO_BARRIER, 0)),
    ],
)
def test_control_bits(high: int, control: Control) -> None:
    assert Control.decode(high) == control


def test_instructions_are_read() -> None:
    function = function_of(
        [
            "MOV R1, 0x4 # stall=2",
            ".L_x_0:",
            "@!P0 LDS.128 R4, [R2+0x10] # stall=1 writes=3 reads=2 waits=5",
            "@P1 BRA `(.L_x_0) # stall=5",
            "EXIT",
        ]
    )
    load = function.instructions[1]
    assert (load.address, load.guard, load.opcode, load.name) == (16, "@!P0", "LDS.128", "LDS")
    assert load.operands == "R4, [R2+0x10]"
    assert load.control == Control(1, True, 3, 2, 0b101)
    assert function.labels == {".L_x_0": 16}
    assert [block.after for block in function.blocks] == [[1], [1, 2], []]


NESTED = [
    "MOV R9, RZ",
    ".L_x_0:",  # 0x10, the outer loop
    "MOV R0, RZ",
    ".L_x_1:",  # 0x20, an inner loop of two turns
    "IADD3 R0, R0, 0x4, RZ",
    "LDGSTS.E.BYPASS.128 [R8], [R2.64]",
    "ISETP.NE.AND P0, PT, R0, 0x8, PT",
    "@P0 BRA `(.L_x_1)",
    "@!P1 BRA `(.L_x_2)",
    "FADD R5, R5, R6",  # 0x70
    "MUFU.EX2 R5, R5",
    ".L_x_2:",
    "HMMA.16816.F32.BF16 R12, R16, R20, R12",  # 0x90
    "@!P1 BRA `(.L_x_3)",
    "FADD R7, R7, R6",  # 0xb0
    ".L_x_3:",
    "@P2 BRA `(.L_x_0)",  # 0xc0
    "EXIT",
]


def test_loops_are_found() -> None:
    function = function_of(NESTED)
    outer, inner = function.loops
    assert addresses(function, inner.blocks) == [0x20]
    assert addresses(function, outer.blocks) == [0x10, 0x20, 0x60, 0x70, 0x90, 0xB0, 0xC0]
    counted = walk.trips_of(function, outer, inner)
    assert counted is not None and counted.number == 2
    assert walk.trips_of(function, inner, outer) is None


def test_meeting_points_and_calls_that_do_not_return() -> None:
    """A BSYNC continues at the label of its BSSY; on sm_80, calls of a label leave loops."""
    function = function_of(
        [
            "BSSY B0, `(.L_x_1)",
            ".L_x_0:",
            "@P0 BSYNC B0",
            "@P1 CALL.REL.NOINC `(.L_x_2)",
            "CALL.REL.NOINC `($__internal_0_$__cuda_sm20_div_s64)",
            "BRA `(.L_x_0)",
            ".L_x_1:",
            "NOP",
            ".L_x_2:",
            "EXIT",
        ]
    )
    follows = {b.address: [function.blocks[i].address for i in b.after] for b in function.blocks}
    assert follows == {0: [16], 16: [80, 32], 32: [96, 48], 48: [16], 80: [96], 96: []}
    (loop,) = function.loops
    assert walk.find_walk(function, loop, {}) is None, "the way round calls a subroutine"


def way(function: Function, work: dict[str, int]) -> list[int]:
    found = walk.find_walk(function, function.loops[0], work)
    return [instruction.address for instruction in found.trace] if found else []


def test_the_way_that_does_the_work() -> None:
    function = function_of(NESTED)
    turn = [0x20, 0x30, 0x40, 0x50]
    short = [0x10, *turn, *turn, 0x60, 0x90, 0xA0, 0xC0]
    assert way(function, {"HMMA*": 1, "LDGSTS*": 2}) == short
    # P1 is tested twice, with the same result.
    long = [0x10, *turn, *turn, 0x60, 0x70, 0x80, 0x90, 0xA0, 0xB0, 0xC0]
    assert way(function, {"HMMA*": 1, "MUFU.EX2": 1}) == long
    # The counter of the inner loop gives two iterations, not three; no path has two HMMA.
    assert not way(function, {"HMMA*": 1, "LDGSTS*": 3})
    assert not way(function, {"HMMA*": 2})
    assert not way(function, {"HMMA*": 1, "LDS*": 1})


@pytest.mark.parametrize("mma", ["HMMA.16816.F32.BF16", "IMMA.16832.S8.S8"])
def test_a_loop_does_one_unit_with_all_its_tensor_instructions(mma: str) -> None:
    two_ways = [
        ".L_x_0:",
        f"{mma} R12, R16, R20, R12",
        "@P1 BRA `(.L_x_1)",
        f"{mma} R12, R16, R22, R12",
        ".L_x_1:",
        "@P0 BRA `(.L_x_0)",
        "EXIT",
    ]
    function = function_of(two_ways)
    assert not way(function, {f"{mma[:4]}*": 1})
    assert way(function, {f"{mma[:4]}*": 2}) == [0, 16, 32, 48]


def test_classes() -> None:
    """Arithmetic for addresses and arithmetic for values are different classes."""
    lines = [
        "IMAD R0, R1, 0x4, R2",
        "IADD3 R3, R0, 0x10, RZ",
        "ISETP.GE.AND P0, PT, R9, R10, PT",
        "LDS R4, [R3]",
        "LDGSTS.E.BYPASS.128 [R5], [R6.64], P0",
        "IADD3 R8, R4, 0x1, RZ",
        "MOV R11, R12",
        "FADD R13, R13, R4",
        "MUFU.EX2 R13, R13",
        "BAR.SYNC 0x0",
        "HMMA.16816.F32.BF16 R12, R16, R20, R12",
    ]
    assert pipes.classify(function_of(lines).instructions) == [
        "address",
        "address",
        "address",
        "shared",
        "global",
        "other",
        "move",
        "other",
        "special",
        "sync",
        "tensor",
    ]


def test_pipes() -> None:
    cycles = {
        "LDS.128 R4, [R3]": ("lsu", 16),
        "LDSM.16.M88.4 R4, [R3]": ("lsu", 16),
        "STS [R3], R4": ("lsu", 4),
        "@!PT LDS RZ, [RZ]": ("", 0),
        "MUFU.EX2 R4, R4": ("special", 8),
        "HMMA.16816.F32.BF16 R12, R16, R20, R12": ("tensor", 6.5),
        "IMMA.16832.S8.S8 R12, R16.ROW, R20.COL, R12": ("tensor", 6.5),
        "FMUL R4, R4, R5": ("fma", 1),
        "IMAD.MOV.U32 R4, RZ, RZ, R5": ("fma", 2),
        "LOP3.LUT R4, R4, R5, RZ, 0xc0, !PT": ("alu", 2),
    }
    for line, expected in cycles.items():
        (instruction,) = function_of([line]).instructions
        assert pipes.pipe_of(instruction, RATES["90a"]) == expected, line


def turn_of(lines: list[str], warps: int = 1, of_block: int = 1) -> float:
    return replay.cycles_per_turn(function_of(lines).instructions, RATES["90a"], warps, of_block)


def test_replay_of_stall_counts() -> None:
    assert turn_of(["FADD R1, R1, R2 # stall=4", "FADD R1, R1, R2 # stall=5"]) == 9
    # Two warps fill each other's gaps; four do not fit into nine cycles with three each.
    lines = ["FADD R1, R1, R2 # stall=4", "FMUL R3, R3, R2 # stall=1", "FADD R1, R1, R2 # stall=4"]
    assert turn_of(lines) == 9
    assert turn_of(lines, warps=2) == 9
    assert turn_of(lines, warps=4) == 12


def test_replay_of_barriers_and_pipes() -> None:
    # The load begins at 0, takes 4 cycles of the pipe and 30 more; then FADD issues.
    waits = ["LDS R4, [R3] # writes=2", "FADD R1, R1, R4 # stall=4 waits=4"]
    assert turn_of(waits) == 34 + 4
    assert turn_of(["LDS R4, [R3] # writes=2", "FADD R1, R1, R4 # stall=4 waits=2"]) == 5
    # DEPBAR waits until only one of two loads is pending.
    two = ["LDS R4, [R3] # stall=8 writes=0", "LDS R5, [R3] # writes=0"]
    assert turn_of([*two, "DEPBAR.LE SB0, 0x1 # stall=4"]) < turn_of(
        [*two, "DEPBAR.LE SB0, 0x0 # stall=4"]
    )
    # Ten instructions of two cycles each, for each of two warps.
    assert turn_of(["LOP3.LUT R1, R1, R2, RZ, 0xc0, !PT"] * 10, warps=2) == 40
    assert turn_of(["MUFU.EX2 R1, R1"] * 3) == 24


def test_replay_of_tensor_cores() -> None:
    """A dependent HMMA waits for its sums regardless of stall counts; two chains overlap."""
    chain = "HMMA.16816.F32.BF16 R12, R16, R20, R12 # stall=6"
    other = "HMMA.16816.F32.BF16 R24, R16, R22, R24 # stall=6"
    assert turn_of([chain] * 4) == 4 * 34
    assert turn_of([chain, other] * 4) == 4 * 34
    assert turn_of([chain, other], warps=4) == pytest.approx(8 * 6.5, abs=4)


def test_replay_of_blocks() -> None:
    """Warps wait at a barrier for the warps of their own block only."""
    lines = ["FADD R1, R1, R2 # stall=6", "BAR.SYNC.DEFER_BLOCKING 0x0 # stall=1"]
    assert turn_of(lines) == turn_of(lines, warps=2)
    assert turn_of(lines, warps=2, of_block=2) > turn_of(lines, warps=2)


def row(instructions: int, *ways: Way) -> Metered:
    return Metered(
        "x_kernel<*",
        "tile",
        ways or (Way({"HMMA*": 1, "LDGSTS*": 2}),),
        dict.fromkeys(ARCHS, instructions),
        warps=4,
        moved_bytes=512,
        smem_bytes=100 << 10,
    )


def test_an_instruction_more_exceeds_the_budget() -> None:
    function = function_of(NESTED)
    (loop,) = meter_loops(function, KERNEL, row(13))
    assert (loop.address, loop.instructions, loop.blocks, loop.warps) == (0x10, 13, 2, 2)
    assert loop.pipes["issue"] == 13 and loop.pipes["tensor"] == 6.5
    assert loop.cap(13) == pytest.approx(512 * 132 * 1.755 / 13 / 1000)
    assert loop.replayed >= 13 and not list(loop.problems())
    at = NESTED.index("@!P1 BRA `(.L_x_2)")
    planted = function_of([*NESTED[:at], "MOV R30, R31", *NESTED[at:]])
    (loop,) = meter_loops(planted, KERNEL, row(13))
    (problem,) = loop.problems()
    assert problem == "issues 14 instructions per tile in the loop at 0x10, its budget is 13"


def test_ways_are_averaged() -> None:
    function = function_of(NESTED)
    common = Way({"HMMA*": 1, "MUFU*": 0}, times=3)
    (loop,) = meter_loops(function, KERNEL, row(14, common, Way({"HMMA*": 1, "MUFU*": 1})))
    assert loop.instructions == 13 + 3 / 4
    never = Way({"HMMA*": 1, "MUFU*": 2}, times=0)
    assert not list(meter_loops(function, KERNEL, row(14, common, never)))


def test_a_rare_way_has_tensor_cores_of_its_own() -> None:
    """If a loop has a rare second path with HMMA, a row without that path does not match."""
    hmma = "HMMA.16816.F32.BF16 R12, R16, R20, R12"
    lines = [".L_x_0:", "@P1 BRA `(.L_x_1)", hmma, hmma, "BRA `(.L_x_2)", ".L_x_1:", hmma]
    function = function_of([*lines, ".L_x_2:", "@P0 BRA `(.L_x_0)", "EXIT"])
    common, rare = Way({"HMMA*": 2}), Way({"HMMA*": 1}, times=0)
    (loop,) = meter_loops(function, KERNEL, row(5, common, rare))
    assert loop.instructions == 5 and not list(strangers(function, KERNEL, [loop]))
    assert not list(meter_loops(function, KERNEL, row(5, common)))
    assert not list(meter_loops(function, KERNEL, row(5, common, Way({"HMMA*": 2}, times=0))))


def test_an_unrolled_loop_does_several_units() -> None:
    lines = [".L_x_0:", *["HMMA.16816.F32.BF16 R12, R16, R20, R12"] * 4, "@P0 BRA `(.L_x_0)"]
    (loop,) = meter_loops(function_of([*lines, "EXIT"]), KERNEL, row(3, Way({"HMMA*": 2})))
    assert loop.instructions == 2.5


def test_a_loop_that_no_row_knows_is_told() -> None:
    function = function_of(NESTED)
    found = list(meter_loops(function, KERNEL, row(13)))
    assert not list(strangers(function, KERNEL, found))
    assert not list(meter_loops(function, KERNEL, row(13, Way({"HMMA*": 5}))))
    assert list(strangers(function, KERNEL, [])) == [
        "the loop at 0x10 with 1 HMMA is in no row of METERED"
    ]


@pytest.mark.parametrize("name", ["HMMA", "IMMA", "QMMA", "HGMMA", "IGMMA", "QGMMA", "NEWMMA"])
def test_an_instruction_on_tensor_cores_is_noticed_in_any_kernel(name: str) -> None:
    """A loop without a row is reported for every kind of mma, and each kind needs a known rate."""
    function = function_of([line.replace("HMMA.16816", f"{name}.16816") for line in NESTED])
    said = list(strangers(function, KERNEL, []))
    no_row = f"the loop at 0x10 with 1 {name} is in no row of METERED"
    no_rate = [f"{name} runs on tensor cores, and pipes.py has no rate for it"]
    assert said == [*([] if name in ("HMMA", "IMMA") else no_rate), no_row]
    (loop,) = meter_loops(function, KERNEL, row(13, Way({f"{name}*": 1, "LDGSTS*": 2})))
    assert loop.classes["tensor"] == 1 and loop.pipes["tensor"] == 6.5
    assert not [text for text in strangers(function, KERNEL, [loop]) if "no row" in text]


WAITS = [
    "S2R R0, SR_CTAID.X",
    "@P0 BRA `(.L_x_0)",
    "UBLKPF [UR4], UR6",
    ".L_x_0:",
    "ACQBULK",
    "PREEXIT",
    "LDG.E R2, [R4.64]",
    "@P0 EXIT",
    "STG.E [R4.64], R2",
    "EXIT",
]


def test_a_kernel_that_waits_may_overlap() -> None:
    assert list(overlap_problems(function_of(WAITS))) == []
    assert [overlap.waits(arch) for arch in ARCHS] == [False, False, False, True, True, True]


@pytest.mark.parametrize(
    ("at", "line", "sentence"),
    [
        (2, "LDG.E.CONSTANT R2, [R4.64]", "LDG.E.CONSTANT at 0x20 may touch global memory"),
        (0, "@P1 STG.E [R4.64], R2", "STG.E at 0x0 may touch global memory"),
        (4, "ATOMG.E.ADD.STRONG.GPU PT, R2, [R4.64], R3", "ATOMG.E.ADD.STRONG.GPU at 0x30"),
        (4, "PREEXIT", "lets the next kernel start at 0x30, before it waits"),
        (2, "@P1 EXIT", "may end at 0x20 without having waited"),
    ],
)
def test_what_comes_before_the_wait_is_told(at: int, line: str, sentence: str) -> None:
    (said,) = overlap_problems(function_of([*WAITS[:at], line, *WAITS[at:]]))
    assert said.startswith(sentence)


def test_a_kernel_without_its_wait_is_told() -> None:
    gone = [line for line in WAITS if line not in ("ACQBULK", "PREEXIT")]
    said = list(overlap_problems(function_of(gone)))
    assert len(said) == 5 and said[-1] == "never lets the next kernel start early"
    # A wait that only some threads reach does not count.
    guarded = ["@P0 ACQBULK" if line == "ACQBULK" else line for line in WAITS]
    assert list(overlap_problems(function_of(guarded)))


def test_rows_have_a_budget_everywhere() -> None:
    for one in METERED:
        assert set(one.instructions) == set(ARCHS), one.kernel
        assert any(way.times for way in one.ways) and (one.moved_bytes or one.flops)


def test_the_symbols_of_a_cubin_are_read() -> None:
    names = b"\0kernel\0hidden\0"
    symbols = b"".join(
        struct.pack("<IBBHQQ", name, info, 0, 0, 0, 0) for name, info in ((8, 1), (1, 18), (8, 2))
    )
    header = struct.pack("<IIQQQQIIQQ", *(0,) * 10)
    table = struct.pack("<IIQQQQIIQQ", 0, 2, 0, 0, 64, len(symbols), 2, 0, 8, 24)
    strings = struct.pack("<IIQQQQIIQQ", 0, 3, 0, 0, 64 + len(symbols), len(names), 0, 0, 1, 0)
    body = symbols + names
    elf = b"\x7fELF\x02\x01\x01".ljust(40, b"\0") + struct.pack("<Q", 64 + len(body))
    elf = elf.ljust(58, b"\0") + struct.pack("<HHH", 64, 3, 0)
    cubin = elf + body + header + table + strings
    # Kernels in an unnamed namespace are visible in one file only; the first symbol is a variable.
    assert list(sass.kernel_symbols(cubin)) == [(1, "kernel"), (2, "hidden")]
    with pytest.raises(ValueError, match="no 64-bit ELF"):
        list(sass.kernel_symbols(b"nothing"))


def test_the_disassembler_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "nvdisasm" / "nvidia" / "cu13" / "bin" / "nvdisasm"
    tool.parent.mkdir(parents=True)
    tool.write_text("#!/bin/sh\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr("sys.path", [])
    monkeypatch.setattr(cuda_toolkit, "WHEELS", tmp_path)
    find = cuda_toolkit.find_nvdisasm.__wrapped__
    assert find() is None, "not a program yet"
    tool.chmod(0o755)
    assert find() == tool
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert find() == tool


def test_registers() -> None:
    def both(line: str) -> tuple[set[str], set[str]]:
        one: Instruction = function_of([line]).instructions[0]
        written, read = pipes.registers(one.opcode, one.operands)
        return set(written), set(read)

    assert both("HMMA.16816.F32.BF16 R4, R8, R12, RZ") == (
        {"R4", "R5", "R6", "R7"},
        {"R8", "R9", "R10", "R11", "R12", "R13"},
    )
    assert both("IADD3 R1, P0, R2.reuse, -R3, RZ") == ({"R1", "P0"}, {"R2", "R3"})
    assert both("ISETP.GE.AND P1, PT, R2, UR4, P0") == ({"P1"}, {"R2", "UR4", "P0"})
    assert both("STS.64 [R1+0x10], R2") == (set(), {"R1", "R2", "R3"})
    assert both("SHFL.BFLY PT, R1, R2, 0x1, 0x1f") == ({"R1"}, {"R2"})
    assert both("LDG.E.128 R4, desc[UR6][R2.64]") == (
        {"R4", "R5", "R6", "R7"},
        {"UR6", "R2", "R3"},
    )
