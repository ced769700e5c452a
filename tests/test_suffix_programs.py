# SPDX-License-Identifier: Apache-2.0
"""C++ programs that test the suffix tree, its cache and its arrays without Python.

They fuzz the tree and call it from several threads, also under sanitizers
(`make -C tools test-sanitize`).
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ci

ROOT = Path(__file__).resolve().parent.parent
SOURCES = [
    *sorted(set(ROOT.glob("csrc/suffix_tree/suffix_*.cpp")) - set(ROOT.glob("csrc/*/*_ops.cpp"))),
    ROOT / "csrc" / "common" / "cpus.cpp",
    ROOT / "csrc" / "common" / "parallel.cpp",
]
FLAGS = [
    "-std=c++20",
    "-g",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-pthread",
    "-ffp-contract=off",
    "-Icsrc",
    "-Itests",
]
ADDRESS = "-O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all"
THREAD = "-O1 -fno-omit-frame-pointer -fsanitize=thread"


def objects() -> list[Path]:
    """Return the package's object files of SOURCES, or an empty list if one is out of date."""
    folder = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}" / "CMakeFiles"
    found = [folder / "specops_host.dir" / f"{path.relative_to(ROOT)}.o" for path in SOURCES]
    if not all(path.is_file() for path in found):
        return []
    read = [*ROOT.glob("csrc/suffix_tree/*"), *ROOT.glob("csrc/common/*")]
    newest = max(path.stat().st_mtime for path in read)
    return found if min(path.stat().st_mtime for path in found) > newest else []


def build(folder: Path, program: str, flags: str, units: list[Path] = SOURCES) -> Path:
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("no C++ compiler here")
    path = folder / program
    command = [compiler, *FLAGS, *flags.split(), f"tests/{program}.cpp", *map(str, units)]
    done = subprocess.run(
        [*command, "-o", str(path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if "cannot find" in done.stderr and "san" in done.stderr:
        pytest.skip("the compiler has no sanitizers here")
    assert done.returncode == 0, done.stderr[-3000:]
    return path


def run(program: Path, *args: object) -> str:
    """Run a program, check that it succeeds, and return its output."""
    env = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1", "LD_PRELOAD": ""}
    done = subprocess.run(
        [str(program), *map(str, args)], capture_output=True, text=True, timeout=600, env=env
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


def fuzz(program: Path, seconds: float) -> None:
    """Fuzz for some seconds. The program prints its seed, which repeats a failure."""
    seconds = float(os.environ.get("FUZZ_SECONDS", seconds))
    out = run(program, seconds)
    found = re.search(r"(\d+) inputs, nothing wrong", out)
    assert found is not None and int(found.group(1)) >= seconds, out


def test_fuzzing_finds_no_error(tmp_path: Path) -> None:
    fuzz(build(tmp_path, "fuzz_suffix_tree", "-O1", objects() or SOURCES), seconds=3)


@pytest.mark.parametrize("system", ["-O1", "-O1 -U__linux__"], ids=["linux", "others"])
def test_growing_arrays_keep_their_contents(tmp_path: Path, system: str) -> None:
    assert run(build(tmp_path, "grow_array_check", system, [])).endswith(" bytes\n")


@pytest.mark.slow
@pytest.mark.sanitize
def test_fuzzing_under_address_sanitizer_finds_no_error(tmp_path: Path) -> None:
    fuzz(build(tmp_path, "fuzz_suffix_tree", ADDRESS), seconds=60)


@pytest.mark.slow
@pytest.mark.sanitize
@pytest.mark.parametrize("flags,seconds", [(ADDRESS, 15), (THREAD, 30)], ids=["address", "thread"])
def test_threads_pass_sanitizers(tmp_path: Path, flags: str, seconds: int) -> None:
    run(build(tmp_path, "suffix_threads", flags), seconds)
