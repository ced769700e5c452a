# SPDX-License-Identifier: Apache-2.0
"""Probes of GPU properties: a probe that does not do its work gives no figure."""

import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import bench_gpu_facts as facts
from bench.cuda import CudaBench
from tools import cuda_toolkit
from tools.gates import sass

pytestmark = pytest.mark.ci

SOURCE = cuda_toolkit.ROOT / "bench" / "gpu_facts.cu"
TIMED = (
    {name: f"facts.{name}" for name in facts.ARRIVALS}
    | {
        "chase": "facts.chase",
        "read_cached": "facts.l2_read",
        "mma_peak": "facts.mma",
        "clock": "facts.clock.idle",
    }
    | {id: id for id, *_ in facts.wgmma_cases()}
)
WGMMA = {id for id, *_ in facts.wgmma_cases()}


def compiled_to(folder: Path, source: str, arch: str) -> Path:
    nvcc = cuda_toolkit.find_nvcc()
    if nvcc is None:
        pytest.skip("nvcc is missing; `make gates` fetches it")
    text, cubin = folder / "probes.cu", folder / "probes.cubin"
    text.write_text(source)
    code = f"-gencode=arch=compute_{arch},code=sm_{arch}"
    flags = ["-std=c++20", "-O3", code, "-Werror", "all-warnings", "-cubin"]
    done = subprocess.run(
        [str(nvcc), *flags, str(text), "-o", str(cubin)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return cubin


def loop_opcodes(cubin: Path) -> dict[str, Counter[str]]:
    """Return the opcodes in the loops of each probe."""
    nvdisasm = cuda_toolkit.find_nvdisasm()
    if nvdisasm is None:
        pytest.skip("nvdisasm is missing; `make gates` fetches it")
    command = [str(nvdisasm), "-c", "-hex", str(cubin)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: dict[str, Counter[str]] = {}
    for function in sass.parse(text):
        inside = {block for loop in function.loops for block in loop.blocks}
        body = [i for block in inside for i in function.blocks[block].body]
        found[function.name] = Counter(i.opcode for i in body)
    return found


def probes_without_work(opcodes: dict[str, Counter[str]]) -> set[str]:
    """Return the probes whose loops lack the timed instructions."""

    def of(kernel: str) -> Counter[str]:
        (name,) = [name for name in opcodes if kernel in name]
        return opcodes[name]

    def count(kernel: str, begin: str) -> int:
        return sum(n for opcode, n in of(kernel).items() if opcode.startswith(begin))

    arrivals = {name: f"arrival_kernelILNS_7ArrivalE{i}" for i, name in enumerate(facts.ARRIVALS)}
    barriers = {"fence_atomic": "MEMBAR.SC.GPU", "fence_acq_rel": "MEMBAR.ALL.GPU"}
    works = {name: count(kernel, "ATOMG") > 0 for name, kernel in arrivals.items()}
    for name, opcode in (barriers | {"atomic_acq_rel": "MEMBAR.ALL.GPU"}).items():
        works[name] &= count(arrivals[name], opcode) > 0
    works["atomic"] &= count(arrivals["atomic"], "MEMBAR") == 0
    works["chase"] = count("chase_kernel", "LDG") > 0
    loads = count("read_cached_kernel", "LDG.E.128.STRONG.GPU")
    works["read_cached"] = loads > 0 and loads % 8 == 0
    multiplied = count("mma_peak_kernel", "HMMA.16816.F32.BF16")
    works["mma_peak"] = multiplied > 0 and multiplied % facts.MMA_CHAINS == 0
    for id, outputs, inputs, place in facts.wgmma_cases():
        kernel = f"wgmma_kernelILi{outputs}ELNS_6InputsE{inputs}ELb{place}E"
        hmma = "HMMA.16816.F32" + (".BF16" if facts.WGMMA_INPUTS[inputs] == "bf16" else "")
        works[id] = (
            count(kernel, f"HGMMA.64x{outputs}x16") == 1 and of(kernel)[hmma] == outputs // 8
        )
    return {name for name, has in works.items() if not has}


def test_probes_compile(tmp_path: Path) -> None:
    compiled_to(tmp_path, SOURCE.read_text(), "80")


# Source with a planted fault: each still compiles, ends, and would give a plausible figure.
PLANTED = {
    "(kArrival == kFenceAtomic) __threadfence();": "(kArrival == kAtomicAlone) __threadfence();",
    '(kArrival == kAcqRelFence) asm volatile("fence.acq_rel.gpu;" ::: "memory");': "(false) {}",
    "atom.acq_rel.gpu.global.add.s32": "atom.relaxed.gpu.global.add.s32",
    "for (int i = 0; i < rounds; ++i) at = chain[at];": "at = chain[rounds];",
    "got[i] = __ldcg(data + at + i * stride);": "got[i] = make_uint4(1, 1, 1, 1);",
    "mma_bf16(d[chain], a, b);": "if (i < 0) mma_bf16(d[chain], a, b);",
    "mma<kInputs>(by_warp, a, {core[0], core[kN * 4]});": "by_warp[0] += core[0] + a[0];",
}


def test_machine_code_of_probes_has_the_timed_instructions(tmp_path: Path) -> None:
    source = SOURCE.read_text()
    assert probes_without_work(loop_opcodes(compiled_to(tmp_path, source, "90a"))) == set()
    for right, wrong in PLANTED.items():
        assert source.count(right) == 1, right
        source = source.replace(right, wrong)
    found = probes_without_work(loop_opcodes(compiled_to(tmp_path, source, "90a")))
    assert found == set(TIMED) - {"clock"}


class Kernels(facts.Probes):
    """CPU version of gpu_facts.cu with an optional planted fault."""

    def __init__(self, bench: CudaBench, planted: str = "") -> None:
        super().__init__(bench)
        self._library = self
        self._planted = planted

    def start(self, name: str, *arguments: Any, stream: int | None = None) -> None:
        if self._planted != f"{name} does nothing":
            getattr(self, f"_{name.removeprefix('start_')}")(*arguments)

    def _arrival(self, counter: Tensor, passed: Tensor, rounds: int, which: int) -> None:
        counter += rounds if self._planted != "an arrival less" else rounds - 1
        passed[0] = 700 * rounds

    def _chase(self, chain: Tensor, passed: Tensor, rounds: int) -> None:
        at = 0
        for _ in range(rounds if self._planted != "a shorter chain" else rounds - 1):
            at = int(chain[at])
        passed[:] = torch.tensor([600 * rounds, at])

    def _read_cached(
        self, data: Tensor, num_bytes: int, rounds: int, blocks: int, sums: Tensor
    ) -> None:
        words = data[: num_bytes // 4 if self._planted != "half is read" else num_bytes // 8]
        sums[:] = 0
        sums[0] = rounds * words.sum()

    def _mma_peak(self, rounds: int, blocks: int, sums: Tensor) -> None:
        sums[:] = 3.0 * rounds
        if self._planted == "a product less" and rounds > 1:
            sums[-1] -= 1.0

    def _wgmma(
        self,
        counts: Tensor,
        outputs: int,
        inputs: int,
        place: int,
        rounds: int,
        numbers: int,
        blocks: int,
    ) -> None:
        tiles = rounds * blocks * 4 * (outputs // 8)
        differing = {facts.RANDOM: 5, facts.EXACT: 0, facts.UNLIKE: tiles}[numbers]
        left = {
            "a tile less": [tiles - 1, differing, tiles],
            "nothing is compared": [tiles, 0, tiles],
            "nothing is multiplied": [tiles, differing, 0],
            "another product": [tiles, tiles if numbers == facts.EXACT else differing, tiles],
        }
        counts += torch.tensor(left.get(self._planted, [tiles, differing, tiles]))

    def _clock(self, passed: Tensor, nanoseconds: int) -> None:
        passed[:] = torch.tensor([1755 * nanoseconds // 1000, nanoseconds + 32])


def measure(planted: str, monkeypatch: pytest.MonkeyPatch) -> tuple[set[str], dict[str, str]]:
    """Run all probes and return the ids of the figures, and the notes."""
    bench = CudaBench("cpu")
    monkeypatch.setattr(bench, "pick", lambda real, rehearsed: max(rehearsed, 2))
    probes = Kernels(bench, planted)
    parts: tuple[Callable[[CudaBench, facts.Probes], None], ...]
    parts = (facts._latencies, facts._cached, facts._mma, facts._wgmma)
    for part in parts:
        part(bench, probes)
    facts._clocks(bench, probes, {"idle": lambda: None})
    return {figure.id for figure in bench.figures}, bench.notes


@pytest.mark.parametrize(
    ("planted", "lost"),
    [
        ("", set()),
        ("start_arrival does nothing", set(facts.ARRIVALS)),
        ("start_chase does nothing", {"chase"}),
        ("start_read_cached does nothing", {"read_cached"}),
        ("start_mma_peak does nothing", {"mma_peak"}),
        ("start_wgmma does nothing", WGMMA),
        ("start_clock does nothing", {"clock"}),
        ("an arrival less", set(facts.ARRIVALS)),
        ("a shorter chain", {"chase"}),
        ("half is read", {"read_cached"}),
        ("a product less", {"mma_peak"}),
        ("a tile less", WGMMA),
        ("nothing is compared", WGMMA),
        ("nothing is multiplied", WGMMA),
        ("another product", WGMMA),
    ],
)
def test_probe_with_a_fault_has_no_figure(
    planted: str, lost: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    figures, notes = measure(planted, monkeypatch)
    assert figures == {id for name, id in TIMED.items() if name not in lost}
    assert set(notes) == {TIMED[name] for name in lost}
    assert all(note.startswith("the probe is wrong: ") for note in notes.values())
