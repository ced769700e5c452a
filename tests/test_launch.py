# SPDX-License-Identifier: Apache-2.0
"""Kernel launches under nvcc, on a fake runtime with the limits of CUDA's driver."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from specops import runtime

ROOT = Path(__file__).resolve().parent.parent

# A line of csrc/common/launch.cuh, its replacement, and the message of the program's failing check.
PLANTED = {
    "set by every launch": (
        "if (bytes <= raised) return;",
        "",
        "a graph can be instantiated after smaller launches",
    ),
    "remembered for all devices": (
        "states_[{kernel, device}].raised",
        "states_[{kernel, 0}].raised",
        "another device has its own limit",
    ),
    "remembered before it is granted": (
        "if (bytes <= raised) return;",
        "if (bytes <= raised) return; raised = bytes;",
        "what fits is launched after it",
    ),
    "without a lock": (
        "std::lock_guard<std::mutex> lock(mutex_);\n    size_t& raised",
        "size_t known; { std::lock_guard<std::mutex> lock(mutex_); known = "
        "states_[{kernel, device}].raised; } if (bytes <= known) return;"
        " size_t& raised",
        "no limit is ever lowered",
    ),
    "overlap of kernels that do not wait": (
        "return ptx_version >= 90;",
        "return true;",
        "what is made from older PTX does not overlap",
    ),
    "overlap remembered for all devices": (
        "states_[{kernel, device}].ptx_version",
        "states_[{kernel, 0}].ptx_version",
        "what is compiled for sm_90 overlaps",
    ),
    "overlap that cannot be switched off": (
        "waits && kernels_overlap.load(std::memory_order_relaxed)",
        "waits",
        "nothing overlaps when it is switched off",
    ),
    "limit raised in the capture's mode": (
        "RelaxedCapture relaxed;\n    cudaError_t error",
        "cudaError_t error",
        "and one that asks for room",
    ),
    "attributes queried in the capture's mode": (
        "RelaxedCapture relaxed;\n      cudaFuncAttributes",
        "cudaFuncAttributes",
        "a first launch is captured",
    ),
    "loaded by its launch where nothing overlaps": (
        "bool waits = kernel_states()",
        "bool waits = kernels_overlap && kernel_states()",
        "and one that may not overlap",
    ),
    "mode not restored": (
        "~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }",
        "~RelaxedCapture() {}",
        "the capture's mode is put back",
    ),
    "attributes queried at every launch": (
        "if (ptx_version == 0) {",
        "{",
        "is asked once",
    ),
}


def run(launch_header: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Compile tests/launch_check.cpp with this text as launch.cuh, and run it."""
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


def test_kernel_overlap_can_be_switched_off() -> None:
    assert runtime.get_kernel_overlap()
    try:
        runtime.set_kernel_overlap(False)
        assert not runtime.get_kernel_overlap()
    finally:
        runtime.set_kernel_overlap(True)
    assert runtime.get_kernel_overlap()


def test_launches_keep_shared_memory_limits_and_overlap(tmp_path: Path) -> None:
    done = run(launch_header(), tmp_path)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize("planted", PLANTED)
@pytest.mark.slow
def test_planted_bug_is_noticed(planted: str, tmp_path: Path) -> None:
    line, other, message = PLANTED[planted]
    text = launch_header()
    assert text.count(line) == 1
    done = run(text.replace(line, other), tmp_path)
    assert done.returncode == 1 and message in done.stdout
