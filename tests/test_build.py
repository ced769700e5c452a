# SPDX-License-Identifier: Apache-2.0
"""Instruction sets of a build, as CMake reports them when it configures."""

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pybind11
import pytest
import specops

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
ON_ARM = platform.machine() in ("aarch64", "arm64")
SETS = [
    "portable",
    *(["neon", "neon_bf16"] if ON_ARM else ["avx2", "avx512", "avx512_bf16", "amx"]),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return one build folder for all tests, so that CMake examines the compiler once."""
    return tmp_path_factory.mktemp("build")


def configure(folder: Path, isas: str, source: Path = ROOT) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(BIN), os.environ["PATH"]])
    if shutil.which("cmake", path=path) is None or shutil.which("ninja", path=path) is None:
        pytest.skip("needs cmake and ninja")
    options = [
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
        f"-DSPECOPS_ISAS={isas}",
    ]
    command = ["cmake", "-G", "Ninja", "-S", str(source), "-B", str(folder), *options]
    env = {**os.environ, "PATH": path}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def default_isa() -> str:
    """Return the instruction set that a new process chooses."""
    program = "import specops; print(specops.get_isa())"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_default_isa_follows_cpu_features() -> None:
    isas = specops.supported_isas()
    cpu = Path("/proc/cpuinfo")
    if cpu.exists() and "GenuineIntel" in cpu.read_text():
        isas = [isa for isa in isas if isa != "avx512_bf16"]
    assert default_isa() == isas[-1]


@pytest.mark.ci
def test_native_selects_the_best_isa(folder: Path) -> None:
    """`make serve` compiles only this set, which a build with all sets would choose."""
    done = configure(folder, "native")
    assert done.returncode == 0, done.stderr
    best = default_isa()
    chosen = [best]
    if best == "amx":  # amx has only linear; other ops come from avx512_bf16
        chosen.insert(1, "avx512_bf16")
    assert f"-- Instruction sets: {';'.join(chosen)}\n" in done.stdout
    built = (folder / "build.ninja").read_text()
    for isa in SETS:
        linear = "linear_amx_cpu" if isa == "amx" else "linear_cpu"
        assert (f"specops_{isa}.dir/csrc/dense/{linear}.cpp.o:" in built) == (isa in chosen)
        compiled = isa in [one.removesuffix("_bf16") for one in chosen]
        if isa != "amx" and not isa.endswith("_bf16"):  # these reuse ops without bf16 products
            assert (f"specops_{isa}.dir/csrc/dense/embedding_cpu.cpp.o:" in built) == compiled


@pytest.mark.ci
def test_native_can_be_combined_with_other_isas(folder: Path) -> None:
    """`make test` compiles this machine's best set and the portable one."""
    done = configure(folder, "native;portable")
    assert done.returncode == 0, done.stderr
    sets = re.search(r"-- Instruction sets: (.*)\n", done.stdout)
    assert sets and {default_isa(), "portable"} <= set(sets.group(1).split(";"))
    assert "native" not in sets.group(1)


def test_supported_isas_match_the_architecture() -> None:
    isas = specops.supported_isas()
    assert isas == [isa for isa in SETS if isa in isas]
    for isa in {"avx2", "avx512", "neon", "neon_bf16"} - set(isas):
        with pytest.raises(ValueError, match=f"set_isa: isa must be one of .* got '{isa}'"):
            specops.set_isa(isa)


@pytest.mark.ci
@pytest.mark.parametrize("isas,message", [("avx9;portable", "among"), ("avx2", "must have")])
def test_invalid_isas_are_refused(folder: Path, isas: str, message: str) -> None:
    done = configure(folder, isas)
    assert done.returncode != 0
    error = " ".join(done.stderr.split())
    assert "SPECOPS_ISAS must" in error and message in error and f"got {isas}" in error


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_ninja_does_not_inherit_the_job_server(tmp_path: Path) -> None:
    """`make serve` runs make -j2, and ninja cannot open the job server of that make."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    build = re.search(r"^BUILD := .*$", makefile, re.MULTILINE)
    assert build is not None
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "with [$MAKEFLAGS] $1"\n')
    python.chmod(0o755)
    lines = [
        f"BIN := {tmp_path}",
        build[0],
        "serve:",
        "\t$(MAKE) -j2 built",
        "built:",
        "\t$(BUILD)",
    ]
    (tmp_path / "Makefile").write_text("\n".join(lines) + "\n")
    command = ["make", "-C", str(tmp_path), "serve"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "\nwith [] setup.py\n" in done.stdout
