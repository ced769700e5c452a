# SPDX-License-Identifier: Apache-2.0
"""How kernels are launched under nvcc, over a runtime that keeps limits as CUDA's driver does."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# A line of csrc/common/launch.cuh, what replaces it, and what the program then says.
PLANTED = {
    "set by every launch": (
        "if (bytes <= raised) return;",
        "",
        "a graph can be instantiated after smaller launches",
    ),
    "remembered for all devices": (
        "raised_[{kernel, device}]",
        "raised_[{kernel, 0}]",
        "another device has its own limit",
    ),
    "remembered before it is granted": (
        "if (bytes <= raised) return;",
        "if (bytes <= raised) return; raised = bytes;",
        "what fits is launched after it",
    ),
    "without a lock": (
        "std::lock_guard<std::mutex> lock(mutex_);",
        "size_t known; { std::lock_guard<std::mutex> lock(mutex_); known = "
        "raised_[{kernel, device}]; } if (bytes <= known) return;",
        "no limit is ever lowered",
    ),
}


def run(launch_header: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Compiles tests/launch_check.cpp with this text as launch.cuh, and runs it."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("no C++ compiler here")
    (folder / "common").mkdir()
    (folder / "common" / "launch.cuh").write_text(launch_header)
    program = folder / "launch_check"
    includes = [f"-I{folder}", f"-I{ROOT / 'tests' / 'fake_cuda'}", f"-I{ROOT / 'csrc'}"]
    source = str(ROOT / "tests" / "launch_check.cpp")
    command = [compiler, "-std=c++20", "-O1", "-pthread", *includes, source, "-o", str(program)]
    subprocess.run(command, check=True)
    return subprocess.run([str(program)], capture_output=True, text=True, timeout=120)


def launch_header() -> str:
    return (ROOT / "csrc" / "common" / "launch.cuh").read_text()


def test_limits_of_shared_memory(tmp_path: Path) -> None:
    done = run(launch_header(), tmp_path)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_bug_is_noticed(planted: str, tmp_path: Path) -> None:
    line, other, said = PLANTED[planted]
    text = launch_header()
    assert text.count(line) == 1
    done = run(text.replace(line, other), tmp_path)
    assert done.returncode == 1 and said in done.stdout
