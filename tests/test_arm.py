# SPDX-License-Identifier: Apache-2.0
"""Every operation of common/simd.h has the same result under every instruction set.

On x86, NEON is tested if the cross compiler and qemu are installed. The tests of the ops run on
ARM, or under emulation by `make -C tools test-arm` (tools/emulate_arm.py).
"""

import os
import platform
import re
import shutil
import struct
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import specops

from tools import emulate_arm

pytestmark = pytest.mark.ci

ROOT = Path(__file__).resolve().parent.parent
ON_ARM = platform.machine() in ("aarch64", "arm64")
ARM_SETS = ("neon", "neon_bf16")
CROSS_COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
# Instruction sets with fused multiply-adds.
FUSED = ("avx2", "avx512", "avx512_bf16", "neon", "neon_bf16")
SETS = ("portable", *FUSED)


def flags(isa: str) -> list[str]:
    """Return the compiler flags of an instruction set from CMakeLists.txt."""
    cmake = (ROOT / "CMakeLists.txt").read_text()
    match = re.search(rf"^set\(SPECOPS_FLAGS_{isa}\b([^)]*)\)", cmake, re.MULTILINE)
    assert match is not None
    words = []
    for word in re.sub(r"#.*", "", match[1]).split():
        inner = re.fullmatch(r"\$\{SPECOPS_FLAGS_(\w+)\}", word)
        words += flags(inner[1]) if inner else [word]
    return words


def require_programs(*programs: str) -> None:
    for program in programs:
        if shutil.which(program) is None:
            package = emulate_arm.PROGRAMS.get(program, "a C++ compiler")
            pytest.skip(f"{program} is not installed (apt-get install {package})")


@cache
def operations(isa: str, folder: Path) -> list[str]:
    """Return the output of simd_check.cpp for an instruction set, run natively or by qemu."""
    foreign = (isa in ARM_SETS) != ON_ARM and isa != "portable"
    if foreign and ON_ARM:
        pytest.skip("x86 is not emulated here")
    if not foreign and isa not in specops.supported_isas():
        pytest.skip(f"this machine has no {isa}")
    compiler, runner = os.environ.get("CXX", "c++"), []
    if foreign:
        compiler, runner = CROSS_COMPILER, [EMULATOR, "-cpu", "max"]
    require_programs(compiler, *runner[:1])
    program = folder / isa
    options = f"-std=c++20 -O2 -ffp-contract=off -Icsrc -DSPECOPS_ISA={isa} -DSPECOPS_ISA_{isa}=1"
    command = [compiler, *options.split(), *flags(isa), "tests/simd_check.cpp", "-o", str(program)]
    subprocess.run([*command, *(["-static"] if foreign else [])], cwd=ROOT, check=True)
    done = subprocess.run([*runner, str(program)], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("simd")


@pytest.mark.parametrize("name", SETS)
def test_operations_agree_across_instruction_sets(folder: Path, name: str) -> None:
    """Fused operations and products of bf16 pairs may round differently."""
    lines, like = operations(name, folder), operations("portable", folder)
    assert len(lines) == len(like) > 1000
    for line, other in zip(lines, like, strict=True):
        assert line.split(" ")[0] == other.split(" ")[0]
        if not line.startswith(("fused", "pairs")):
            assert line == other


@pytest.mark.parametrize("name", [isa for isa in FUSED if isa != "avx2"])
def test_fused_operations_agree_across_instruction_sets(folder: Path, name: str) -> None:
    ours = "neon" if ON_ARM else "avx2"
    lines, like = operations(name, folder), operations(ours, folder)
    fused = 0
    for line, other in zip(lines, like, strict=True):
        if line.startswith("fused") or (line.startswith("pairs") and not name.endswith("_bf16")):
            assert line == other
            fused += 1
    assert fused > 100


@pytest.mark.parametrize("name", [isa for isa in FUSED if isa.endswith("_bf16")])
def test_bf16_dot_products_are_close(folder: Path, name: str) -> None:
    """bf16 instructions round differently: within fp32 rounding of the largest partial sum."""
    ours = "neon" if ON_ARM else "avx2"

    def products(of: str) -> list[list[float]]:
        rows = [line.split()[2:] for line in operations(of, folder) if line.startswith("pairs")]
        return [[struct.unpack(">f", bytes.fromhex(word))[0] for word in row] for row in rows]

    assert len(products(name)) == 3
    for row, other in zip(products(name), products(ours), strict=True):
        for got, want in zip(row, other, strict=True):
            assert abs(got - want) <= 200 * 2**-22  # sum of two products of at most 10 x 10


@pytest.mark.parametrize(
    "cpu,best", [("cortex-a57", "neon"), ("neoverse-n1", "neon"), ("max", "neon_bf16")]
)
def test_default_isa_on_arm_follows_cpu_features(tmp_path: Path, cpu: str, best: str) -> None:
    require_programs(CROSS_COMPILER, EMULATOR)
    program = tmp_path / "best_isa"
    sources = ["csrc/common/isa.cpp", "tools/best_isa.cpp"]
    options = ["-std=c++20", "-static", "-Icsrc", *(f"-DSPECOPS_HAS_{isa}=1" for isa in ARM_SETS)]
    subprocess.run([CROSS_COMPILER, *options, *sources, "-o", program], cwd=ROOT, check=True)
    command = [EMULATOR, "-cpu", cpu, str(program)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == best


# Sources that are compiled once per instruction set.
KERNEL_TEXTS = sorted([*ROOT.glob("csrc/*/*_cpu.*"), ROOT / "csrc" / "common" / "simd.h"])


@pytest.mark.parametrize("path", KERNEL_TEXTS, ids=lambda path: path.name)
def test_neon_code_exists_wherever_avx2_code_does(path: Path) -> None:
    """A preprocessor chain that ends with portable code names NEON wherever it names AVX2."""
    open_chains: list[str] = []
    for line in path.read_text().splitlines():
        if re.match(r"\s*#\s*if", line):
            open_chains.append(line)
        elif re.match(r"\s*#\s*el", line):
            open_chains[-1] += line
        elif re.match(r"\s*#\s*endif", line):
            chain = open_chains.pop()
            if "SPECOPS_AVX2" in chain and "#else" in chain:
                assert "SPECOPS_NEON" in chain, chain


def test_emulation_names_missing_packages(tmp_path: Path) -> None:
    """With --if-possible, the program succeeds despite missing packages."""
    for option, code in (("--if-possible", 0), ("--build-only", 1)):
        done = subprocess.run(
            [sys.executable, "-m", "tools.emulate_arm", option],
            cwd=ROOT,
            env={**os.environ, "PATH": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stderr
        assert "qemu-user-static" in done.stdout and "g++-aarch64-linux-gnu" in done.stdout
