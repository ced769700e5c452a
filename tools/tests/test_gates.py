# SPDX-License-Identifier: Apache-2.0
"""Gates of CUDA kernels (tools/gates): each refuses a planted violation."""

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tools import cuda_toolkit
from tools.cuda_toolkit import ROOT, find_nvcc
from tools.gates import kernels, sources
from tools.gates.budgets import (
    _NUMBERS,
    BUDGETS,
    DEFAULT_ARCHS,
    LARGE,
    LIMITS,
    Budget,
    blocks_per_sm,
    budget_of,
    exceptions,
    launch_problems,
)
from tools.gates.kernels import Kernel, judge

pytestmark = pytest.mark.ci

GOOD = Kernel(
    name="x_kernel<bfloat16>",
    arch="80",
    entry=True,
    threads=128,
    registers=96,
    smem_bytes=0,
    stack_bytes=0,
    spill_bytes=0,
)
ROW = Budget("x_kernel<*", registers=96, threads=128, smem_bytes=40 << 10, blocks_per_sm=4)


def planted(changes: dict[str, object]) -> list[str]:
    return list(judge(Kernel(**{**vars(GOOD), **changes}), (ROW, *BUDGETS)))  # type: ignore[arg-type]


def test_a_good_kernel_passes() -> None:
    assert planted({}) == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"registers": 97}, "takes 97 registers, its budget is 96"),
        ({"spill_bytes": 8}, "spills 8 bytes"),
        ({"stack_bytes": 16}, "keeps a stack frame of 16 bytes"),
        ({"smem_bytes": 4}, "owns 4 bytes of static shared memory"),
        ({"threads": None}, "has no __launch_bounds__"),
        ({"threads": 256}, "is bound to 256 threads, its budget says 128"),
        ({"name": "y_kernel", "registers": 129}, "takes 129 registers, its budget is 128"),
        ({"entry": False, "stack_bytes": 8}, "keeps a stack frame of 8 bytes"),
    ],
)
def test_a_kernel_over_its_budget_is_refused(changes: dict[str, object], sentence: str) -> None:
    assert sentence in planted(changes)


def test_a_budget_no_sm_can_hold_is_refused() -> None:
    for row, sentence in (
        (Budget("*", registers=96, smem_bytes=164 << 10), "a block has 166912"),
        (Budget("*", registers=96, smem_bytes=60 << 10, blocks_per_sm=3), "fits an SM 2 times"),
        (Budget("*", registers=96, blocks_per_sm=6), "fits an SM 5 times"),
    ):
        assert any(sentence in text for text in judge(GOOD, (row,))), sentence
    elsewhere = Budget("*", registers=96, smem_bytes=1 << 20, launched_on=("no such",))
    assert not list(judge(GOOD, (elsewhere,)))


@pytest.mark.parametrize(
    ("registers", "threads", "smem_bytes", "sm_80", "sm_90a"),
    # The expected values are those of NVIDIA's occupancy calculator.
    [
        (32, 256, 0, 8, 8),
        (128, 128, 0, 4, 4),
        (255, 128, 0, 2, 2),
        (168, 384, 0, 1, 1),
        (64, 1024, 0, 1, 1),
        (32, 32, 0, 32, 32),
        (64, 128, 40 << 10, 4, 5),
        (64, 128, 100 << 10, 1, 2),
    ],
)
def test_occupancy(registers: int, threads: int, smem_bytes: int, sm_80: int, sm_90a: int) -> None:
    for arch, expected in (("80", sm_80), ("90a", sm_90a)):
        assert blocks_per_sm(LIMITS[arch], registers, threads, smem_bytes) == expected


def test_what_cannot_be_launched_is_refused() -> None:
    assert list(launch_problems()) == []
    everywhere = Budget("x_kernel", registers=64, smem_bytes=102736)
    assert list(launch_problems((everywhere,))) == [
        f"sm_{arch}: x_kernel cannot be launched: it asks for 102736 bytes of shared memory, "
        "a block has 101376"
        for arch in ("86", "89", "120")
    ]
    known = Budget("x_kernel", 64, smem_bytes=102736, launched_on=LARGE, elsewhere="it fails")
    assert list(launch_problems((known,))) == []
    assert list(exceptions((known,))) == [
        "x_kernel asks for 102736 bytes of shared memory, too much for sm_86, sm_89, sm_120: "
        "it fails"
    ]
    silent = Budget("x_kernel", 64, smem_bytes=102736, launched_on=LARGE)
    (problem,) = launch_problems((silent,))
    assert "does not say why" in problem
    mended = Budget("x_kernel", 64, smem_bytes=101376, launched_on=LARGE, elsewhere="it fails")
    assert len(list(launch_problems((mended,)))) == 3, "the exception has outlived its reason"


def test_a_smaller_sm_must_hold_one_block() -> None:
    row = Budget("*", registers=96, smem_bytes=80 << 10, blocks_per_sm=2)
    on = {arch: Kernel(**{**vars(GOOD), "arch": arch}) for arch in LIMITS}
    assert {arch for arch, kernel in on.items() if not list(judge(kernel, (row,)))} == set(LIMITS)
    row = Budget("*", registers=96, threads=128, smem_bytes=90 << 10, blocks_per_sm=2)
    assert [arch for arch, kernel in on.items() if list(judge(kernel, (row,)))] == ["80"]


def test_registers_in_proportion_to_the_threads_of_an_sm() -> None:
    row = Budget("*", registers=96)
    for arch, registers, good in (("90a", 97, False), ("89", 128, True), ("89", 129, False)):
        kernel = replace(GOOD, arch=arch, registers=registers)
        assert (not list(judge(kernel, (row,)))) == good


def test_known_spills_are_bounded() -> None:
    row = Budget("*", registers=96, spills={"120": 8})
    for arch, spill_bytes, good in (("120", 8, True), ("120", 12, False), ("80", 8, False)):
        kernel = replace(GOOD, arch=arch, spill_bytes=spill_bytes, stack_bytes=8)
        assert (not list(judge(kernel, (row,)))) == good


# Computes the budgets of append_attention and linear from the constants of their sources.
SIZES = """
#include "attention/append_attention/cuda/block.cuh"
#include "dense/linear.cuh"
#include "gemm/code_product.cuh"
#include "sampling/row/cuda/row_plan.cuh"
using namespace specops;
"""


def test_shared_memory_of_budgets_is_what_is_asked_for(tmp_path: Path) -> None:
    lines = [SIZES]
    for row in BUDGETS:
        kernel = re.match(
            r"append_(8bit_)?attention(_stamped)?_kernel<(.*), (\d+), (\d)\b", row.kernel
        )
        if kernel is None:
            continue
        is_8bit, _, dtype, head_dim, tiles = kernel.groups()
        dtype = "float" if dtype == "float" else "bfloat16"
        cache = "KvInt8" if is_8bit else dtype
        shape = f"AttentionShape<{dtype}, {head_dim}, {tiles}, {cache}>"
        lines.append(f"static_assert({shape}::kSharedBytes == {row.smem_bytes});")
        three = "==" if row.registers == 168 else "!="
        lines.append(f"static_assert({shape}::kBlocksPerSm {three} 3);")
    for tiles, rows in ((2, 64), (2, 128), (4, 128)):
        size = budget_of(f"linear_tile_kernel<*, {tiles}, {rows}, *>").smem_bytes
        lines.append(f"static_assert(TileShape<{tiles}, {rows}>::kSmemBytes == {size});")
    size = budget_of("verify_kernel<*, false, *>").smem_bytes
    lines.append(f"static_assert(scan_bytes(kFewRowWarps, kScanDepth<false>) == {size});")
    for numbers, (row_bytes, _, _) in _NUMBERS.items():
        rows = f"StageRows<{numbers.replace('*', 'b')}, 8>"
        lines.append(f"static_assert({rows}::kBytes == {8 * row_bytes});")
    assert len(lines) > 50
    source = tmp_path / "sizes.cpp"
    source.write_text("\n".join(lines))
    command = ["g++", "-std=c++20", "-DSPECOPS_SIMT=1", f"-I{ROOT / 'csrc'}", "-fsyntax-only"]
    done = subprocess.run([*command, source], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_row_but_the_last_names_a_kernel() -> None:
    assert BUDGETS[-1].kernel == "*"
    text = "".join(path.read_text() for path in (ROOT / "csrc").rglob("*.cu*"))
    for row in BUDGETS[:-1]:
        assert f" {row.kernel.split('<')[0].rstrip('*')}" in text, row.kernel
        assert budget_of(row.kernel) is row, f"{row.kernel} stands behind a wider pattern"


LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN7specops15silu_mul_kernelI6__halfEEvi' for 'sm_80'
ptxas info    : Function properties for _ZN7specops15silu_mul_kernelI6__halfEEvi
    24 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 24 bytes cumulative stack size, 512 bytes smem
ptxas info    : Compile time = 7.1 ms
ptxas info    : Function properties for _Z6helperv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
"""


def test_the_log_of_the_assembler_is_read() -> None:
    bounds = {"_ZN7specops15silu_mul_kernelI6__halfEEvi": 256}
    entry, helper = kernels.read_ptxas(LOG, "80", bounds)
    assert entry == Kernel("silu_mul_kernel<__half>", "80", True, 256, 40, 512, 24, 20)
    assert not helper.entry and helper.name == "helper"
    assert list(kernels.log_problems("ptxas warning : Registers are spilled\n"))
    assert not list(kernels.log_problems(LOG))


# Each kernel breaks one rule that only its compilation shows.
PLANTED = {
    "spills": """
__global__ void __launch_bounds__(1024) planted_kernel(float* x) {
  float v[96];
  for (int i = 0; i < 96; ++i) v[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
  for (int i = 0; i < 96; ++i) x[i * 1024 + threadIdx.x] = v[i] * v[(i * 7 + 3) % 96];
}""",
    "keeps a stack frame": """
__global__ void __launch_bounds__(128) planted_kernel(float* x, int n) {
  float v[64];
  for (int i = 0; i < 64; ++i) v[i] = x[i] * x[i + threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = v[(n + threadIdx.x) % 64];
}""",
    "static shared memory": """
__global__ void __launch_bounds__(128) planted_kernel(float* x) {
  __shared__ float v[128];
  v[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = v[127 - threadIdx.x];
}""",
    "atomics on floats": """
__global__ void __launch_bounds__(128) planted_kernel(float* x) { atomicAdd(x, 1.0f); }""",
    "has no __launch_bounds__": """
__global__ void planted_kernel(float* x) { x[threadIdx.x] = 1.0f; }""",
    "its budget is 128": """
__global__ void __launch_bounds__(128) planted_kernel(float* x) {
  float v[180];
#pragma unroll
  for (int i = 0; i < 180; ++i) v[i] = x[i * 128 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 180; ++i) x[i * 128 + threadIdx.x] = v[i] * v[(i * 7 + 3) % 180];
}""",
    "does not compile": "__global__ void planted_kernel() { int unused; }",
}


@pytest.fixture
def nvcc() -> Path:
    found = find_nvcc()
    if found is None:
        pytest.skip("needs nvcc, which `make gates` fetches")
    return found


@pytest.mark.parametrize("sentence", PLANTED)
@pytest.mark.fast("spills", "keeps a stack frame", "does not compile")
def test_planted_kernels_are_refused(sentence: str, nvcc: Path, tmp_path: Path) -> None:
    source = tmp_path / "planted.cu"
    source.write_text(PLANTED[sentence])
    for arch in DEFAULT_ARCHS:
        result = kernels.compile_source(nvcc, source, arch, tmp_path / "work")
        problems = [*result.problems, *(text for k in result.kernels for text in judge(k))]
        assert any(sentence in problem for problem in problems), problems
        again = kernels.compile_source(nvcc, source, arch, tmp_path / "work")
        assert again.cached == bool(result.kernels) and again.problems == result.problems
        compiles = kernels.compile_error(nvcc, source, arch) is None
        assert compiles == (sentence != "does not compile")


def test_a_mended_kernel_is_compiled_again(nvcc: Path, tmp_path: Path) -> None:
    source, arch = tmp_path / "planted.cu", DEFAULT_ARCHS[0]
    source.write_text(PLANTED["has no __launch_bounds__"])
    planted = kernels.compile_source(nvcc, source, arch, tmp_path / "work")
    assert list(judge(*planted.kernels))
    source.write_text("__global__ void __launch_bounds__(128) planted_kernel() {}")
    mended = kernels.compile_source(nvcc, source, arch, tmp_path / "work")
    assert not mended.cached and not mended.problems and not list(judge(*mended.kernels))


def test_device_code_keeps_the_rules() -> None:
    assert list(sources.violations(ROOT / "csrc")) == []


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("dense/x.cuh", 'asm volatile("bar.sync 0;");'),
        ("dense/x.cu", "kernel<<<1, 1>>>();"),
        ("dense/x.cu", "cudaLaunchKernel(entry, 1, 1, nullptr);"),
        ("dense/x.cuh", "__shared__ float tile[32];"),
        ("dense/x.cuh", "#if __CUDA_ARCH__ >= 900"),
        ("dense/x.cuh", "#include <cuda_bf16.h>"),
        ("dense/x.h", "#include <cub/cub.cuh>"),
        ("dense/x.cuh", "__shfl_sync(__activemask(), x, 0);"),
    ],
)
def test_planted_text_is_refused(name: str, line: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir()
    path.write_text(f'// a comment: {line}\n/* and\n{line} */\nauto s = "//"; {line}\n')
    (problem,) = sources.violations(tmp_path)
    assert problem.startswith(f"csrc/{name}:4: ")


def test_the_choice_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` depends on the versions of nvcc and torch; every choice comes with its reason."""
    nvcc = Path("/none/nvcc")
    monkeypatch.setattr(cuda_toolkit, "find_nvcc", lambda: nvcc)
    monkeypatch.setattr(cuda_toolkit, "nvcc_version", lambda _: (13, 0))
    monkeypatch.setattr(cuda_toolkit, "static_runtime", lambda _: nvcc)
    for torch, asked, expected in (
        ((13, 0), "auto", True),
        ((13, 0), "OFF", False),
        ((12, 6), "auto", False),
        ((12, 6), "ON", True),
        (None, "auto", False),
        (None, "ON", True),
    ):
        monkeypatch.setattr(cuda_toolkit, "torch_cuda", lambda torch=torch: torch)
        monkeypatch.setenv("SPECOPS_CUDA", asked)
        wanted, why = cuda_toolkit.cuda_choice()
        assert wanted == expected and why
    monkeypatch.setattr(cuda_toolkit.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("SPECOPS_CUDA", "auto")
    wanted, why = cuda_toolkit.cuda_choice()
    assert not wanted and "isolated builds have none; SPECOPS_CUDA=ON builds" in why
    monkeypatch.setenv("SPECOPS_CUDA", "ON")
    assert cuda_toolkit.cuda_choice()[0]
    monkeypatch.setattr(cuda_toolkit, "find_nvcc", lambda: None)
    with pytest.raises(SystemExit, match="SPECOPS_CUDA=ON, but nvcc is not"):
        cuda_toolkit.cuda_choice()
    monkeypatch.setenv("SPECOPS_CUDA", "yes")
    with pytest.raises(SystemExit, match="must be auto, ON or OFF, got yes"):
        cuda_toolkit.cuda_choice()


def test_the_choice_of_architectures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_toolkit, "gpu_archs", lambda: [])
    monkeypatch.delenv("SPECOPS_CUDA_ARCHS", raising=False)
    assert cuda_toolkit.wanted_archs() == ["80", "90a"]
    monkeypatch.setattr(cuda_toolkit, "gpu_archs", lambda: ["90a"])
    assert cuda_toolkit.wanted_archs() == ["90a"]
    monkeypatch.setenv("SPECOPS_CUDA_ARCHS", "80;86")
    assert cuda_toolkit.wanted_archs() == ["80", "86"]
    monkeypatch.setenv("SPECOPS_CUDA_ARCHS", "sm_80")
    with pytest.raises(SystemExit, match="got sm_80"):
        cuda_toolkit.wanted_archs()
