# SPDX-License-Identifier: Apache-2.0
"""Rehearsal of the GPU benches: their cases, their peers, and no allocation in a timed call."""

import dataclasses
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import fake_flashinfer
import pytest
import simt
import torch
from specops import _C, attention, dense, sampling
from torch.utils._python_dispatch import TorchDispatchMode

from bench import (
    attention_phases,
    bench_ablations,
    bench_attention_peers,
    bench_dense,
    common,
    occupancy,
    variants,
)
from bench.__main__ import CUDA_FAMILIES, module_of
from bench.cuda import Call, CudaBench, bandwidth_figure, time_figure
from bench.cuda_caches import Cache, loads
from bench.peers import flashinfer_attention, flashinfer_cascade, flashinfer_peer
from bench.recorded_logits import record
from tools.gpu_check import held_back

pytestmark = pytest.mark.ci

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict]:
    """Install the fake FlashInfer package."""
    modules = fake_flashinfer.modules()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    flashinfer_peer.module.cache_clear()
    yield modules
    flashinfer_peer.module.cache_clear()


def rehearse(family: str) -> CudaBench:
    bench = CudaBench("cpu")
    module = module_of(CUDA_FAMILIES[family])
    getattr(module, f"run_{family}_cuda")(bench)
    return bench


def test_every_path_is_timed_or_has_a_reason(flashinfer: dict) -> None:
    timed = rehearse_cases("attention_peers")
    paths = set(flashinfer_attention.PATHS) - {"fa3"}
    assert {"ours", *paths} == set().union(*timed.cases)
    # One row: every path but fa3. More rows: not the decode wrapper either, with a reason.
    rows = [figure.id.rsplit(".q", 1)[1] for figure in timed.bench.figures]
    assert set(rows) == {"1", "2", "5", "8"}
    for figure, cases in zip(timed.bench.figures, timed.cases, strict=True):
        one_row = figure.id.endswith("q1")
        assert cases == {"ours", *(paths if one_row else paths - {"decode TC"})}
        assert timed.bench.notes[f"{figure.id}.fa3"] == "RuntimeError: fa3 needs Hopper"
        assert (f"{figure.id}.decode TC" in timed.bench.notes) is not one_row
    timed = rehearse_cases("cascade")
    assert timed.cases == [{"flat", "ours", "MultiLevelCascade", "two levels fa2"}] * 2
    assert all(id.endswith("two levels fa3") for id in timed.bench.notes)


def test_peer_with_a_wrong_result_is_not_timed(
    flashinfer: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted peer ignores the causal mask."""
    package = flashinfer["flashinfer"]

    class Careless(fake_flashinfer.Prefill):
        def plan(self, *args, causal, **types) -> None:
            super().plan(*args, causal=False, **types)

    monkeypatch.setattr(package, "BatchPrefillWithPagedKVCacheWrapper", Careless)
    timed = rehearse_cases("attention_peers")
    refused = {id: note for id, note in timed.bench.notes.items() if id.endswith(".fa2")}
    assert refused and all("its result differs from ours by" in note for note in refused.values())
    assert all(".q1." not in id for id in refused)  # a single row has no later rows


@pytest.mark.parametrize("missing", ["BatchAttention", "decode.xqa_batch_decode_with_kv_cache"])
def test_missing_functions_of_the_peer_are_named(
    flashinfer: dict, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    *folder, name = missing.split(".")
    monkeypatch.delattr(flashinfer[".".join(["flashinfer", *folder])], name)
    with pytest.raises(flashinfer_peer.Refused, match=f"this FlashInfer has no {missing}"):
        flashinfer_peer.named(missing)
    assert flashinfer_peer.given(lambda q, out: None, out=1, lse=2) == {"out": 1}
    assert flashinfer_peer.given(lambda **rest: None, out=1, lse=2) == {"out": 1, "lse": 2}


def test_benches_run_without_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    flashinfer_peer.module.cache_clear()
    for family in ("attention_peers", "cascade", "sampling_peers"):
        bench = rehearse(family)
        assert bench.figures and all("no FlashInfer" in note for note in bench.notes.values())
        assert not any((figure.peer or "").startswith("FlashInfer") for figure in bench.figures)
    flashinfer_peer.module.cache_clear()


class AllocationRecorder(TorchDispatchMode):
    """Record of the operators that allocate or fill memory."""

    WORDS = (
        "empty",
        "zeros",
        "ones",
        "full",
        "fill",
        "zero_",
        "arange",
        "rand",
        "clone",
        "to_copy",
    )

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(word in func.__name__ for word in self.WORDS):
            self.seen.add(func.__name__)
        return func(*args, **(kwargs or {}))


@dataclasses.dataclass
class Timed:
    """Timed cases of a family: their names by group, and the operators that allocate."""

    bench: CudaBench
    cases: list[set[str]]
    made: dict[str, set[str]]


def rehearse_cases(family: str) -> Timed:
    cases: list[set[str]] = []
    made: dict[str, set[str]] = defaultdict(set)
    time = CudaBench.time

    def watched(self: CudaBench, groups: Mapping[str, Sequence[Call]]) -> list[common.Timing]:
        cases.append(set(groups))
        for case, calls in groups.items():
            with AllocationRecorder() as memory:
                calls[0]()
            made[case] |= memory.seen
        return time(self, groups)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CudaBench, "time", watched)
        bench = rehearse(family)
    return Timed(bench, cases, made)


@pytest.fixture
def nonzero_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the ops need workspaces on the CPU, as on CUDA, and allocate them if missing."""
    monkeypatch.setattr(attention, "_workspace_size", lambda *_: (256, 16))
    monkeypatch.setattr(_C, "sampling_workspace_bytes", lambda *_: 64)
    pack = dense.pack_weight

    def split(weight, **how):
        return pack(weight, **how)._replace(workspace_per_row=64, max_workspace_rows=4096)

    monkeypatch.setattr(bench_dense, "pack_weight", split)


# These families use a host clock or time a whole engine.
UNTIMED = {"binding", "bundled", "qwen8"}
THEIRS = {"peer", *flashinfer_attention.PATHS, *flashinfer_cascade.CASCADES}


@pytest.mark.slow
@pytest.mark.parametrize("family", CUDA_FAMILIES)
def test_bench_runs_on_cpu_without_allocating(
    family: str, flashinfer: dict, nonzero_workspaces: None
) -> None:
    """A CUDA graph would repeat every allocation of a timed call."""
    timed = rehearse_cases(family)
    ids = [figure.id for figure in timed.bench.figures]
    assert ids and len(set(ids)) == len(ids)
    for figure in timed.bench.figures:
        assert figure.id.startswith(f"{family}.") and figure.bar is None
        if family.endswith("_peers"):
            assert figure.peer and figure.ratio
            assert figure.peer.startswith("FlashInfer") and "fa3" not in figure.peer
    assert all(id.split(".")[0] == family for id in timed.bench.notes)
    assert (family in UNTIMED) == (not timed.made.keys() - THEIRS)
    made = {case: seen for case, seen in timed.made.items() if seen and case not in THEIRS}
    assert not made


@pytest.mark.skipif(simt.BUILD == "race", reason="the race detector knows only an op's arguments")
def test_phases_are_measured_by_stamps(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA kernels have phases, also in the interpreter; CPU kernels have none."""
    for name, few in {"LOADS": ("b1.4k",), "GROUPS": (4,), "ROWS": (1,)}.items():
        monkeypatch.setattr(bench_ablations, name, few)
    id = "ablations.b1.4k.g4.q1"
    without = rehearse("ablations")
    assert "stamps must be on cuda, got a tensor on cpu" in without.notes[f"{id}.phases"]
    assert "stamps must be on cuda, got" in without.notes["ablations.verify.phases"]
    of_verify = {f"ablations.verify.{case}" for case in bench_ablations.WHAT_OF_VERIFY}
    assert {figure.id.removeprefix(f"{id}.") for figure in without.figures} - of_verify == set(
        bench_ablations.WHAT
    )
    module = simt.load()
    module.set_regions([])
    monkeypatch.setattr(attention, "_C", module)
    monkeypatch.setattr(sampling, "_C", module)
    bench = rehearse("ablations")
    assert not bench.notes
    blocks = {f"ablations.verify.blocks.{phase}" for phase in held_back.PHASES_OF_VERIFY}
    assert sum(f.ratio for f in bench.figures if f.id in blocks) == pytest.approx(1.0)
    of_verify |= blocks
    found = {figure.id.removeprefix(f"{id}."): figure for figure in bench.figures}
    assert set(found) - of_verify == {*bench_ablations.WHAT, *attention_phases.SHARES}
    assert set(attention_phases.SHARES) == set(held_back.PHASES)
    fractions = {phase: found[phase].ratio for phase in attention_phases.SHARES}
    assert sum(fractions.values()) == pytest.approx(1.0) and min(fractions.values()) >= 0.0
    assert fractions["plan"] > 0 and fractions["stream"] > 0


class FakeCuda:
    """Functions of a CUDA driver whose binaries each have two kernels."""

    NAMES = (
        b"_ZN7specops20rms_norm_kernel_fakeEv",
        b"_ZN7specops20rms_norm_kernel_sakeEv",
    )

    def __init__(self, blocks: int | None) -> None:
        self.blocks = blocks

    def __getattr__(self, name: str) -> object:
        return lambda *arguments: 0

    def cuModuleGetFunctionCount(self, count, module) -> int:
        count._obj.value = len(self.NAMES)
        return 0

    def cuModuleEnumerateFunctions(self, functions, count, module) -> int:
        for i in range(count.value):
            functions[i] = i + 1
        return 0

    def cuFuncGetName(self, name, function) -> int:
        name._obj.value = self.NAMES[function.value - 1]
        return 0

    def cuFuncGetAttribute(self, value, which, function) -> int:
        value._obj.value = {occupancy.MAX_THREADS: 128, occupancy.REGISTERS: 32}[which]
        return 0

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(
        self, value, function, threads, smem_bytes
    ) -> int:
        if self.blocks is None:
            return 500  # "not found", as an older driver returns
        value._obj.value = self.blocks
        return 0


@pytest.mark.parametrize(("blocks", "fewer", "noted"), [(16, 0, 0), (8, 2, 2), (None, None, 1)])
def test_occupancy_of_the_driver_is_reported(
    blocks: int | None, fewer: int | None, noted: int, tmp_path: Path
) -> None:
    """With 128 threads per block, 16 blocks fill an SM's 2,048 threads."""
    body = b"machine code"
    head = occupancy.HEAD.pack(0xBA55ED50, 1, occupancy.HEAD.size, len(body))
    module = tmp_path / "_C.so"
    # A header whose size exceeds the file is not a fat binary.
    module.write_bytes(
        b"elf" + head + body + b"between" + occupancy.MAGIC + b"\1\0\x10\0" + b"\xff" * 9
    )
    assert list(occupancy.fat_binaries(module.read_bytes())) == [head + body]
    bench = CudaBench("cpu")
    occupancy.look(bench, occupancy.Driver(FakeCuda(blocks)), module.read_bytes(), "90a")
    assert [figure.value for figure in bench.figures] == ([] if fewer is None else [fewer])
    assert len(bench.notes) == noted
    for note in bench.notes.values():
        assert "8 blocks an SM, 16 by the gates" in note or "CUDA error 500" in note


def test_phase_fractions_are_computed_from_stamps() -> None:
    """Two blocks run at 2 cycles per ns; the second starts 100 ns late and does not wait."""
    stamps = torch.zeros(4, attention_phases.WORDS, dtype=torch.int64)
    stamps[0] = torch.tensor([1000, 1400, 80, 20, 100, 400, 200, 9999])
    stamps[2] = torch.tensor([1100, 1300, 100, 0, 100, 200, 0, 7777])
    us, fractions = attention_phases.shares_of(stamps)
    assert us == pytest.approx(0.4)
    expected = {"plan": 45, "item": 5, "load": 50, "stream": 150, "merge": 50, "idle": 100}
    assert fractions == pytest.approx({phase: ns / 400 for phase, ns in expected.items()})


def test_allocation_recorder_detects_a_missing_workspace(nonzero_workspaces: None) -> None:
    bench = CudaBench("cpu")
    cache = Cache(bench, loads(bench)["b1.4k"])
    q, qo_indptr = cache.queries(bench, 1, 4)
    call = cache.ours(q, qo_indptr)[0]
    keywords = {**call.keywords, "workspace": None}
    with AllocationRecorder() as memory:
        call.func(*call.args, **keywords)
    assert {"empty.memory_format", "fill_.Tensor"} <= memory.seen
    logits = torch.randn(2, 64)
    with AllocationRecorder() as memory:
        sampling.sample(logits, torch.zeros(2, dtype=torch.int32))
    assert "zeros.default" in memory.seen
    packed = bench_dense.pack_weight(torch.randn(32, 32))
    x, out = torch.randn(32, 32), torch.empty(32, 32)
    with AllocationRecorder() as memory:
        dense.linear(x, packed, out=out)
    assert "empty.memory_format" in memory.seen


def test_cases_of_the_goals_are_timed() -> None:
    ids = {figure.id for figure in rehearse("attention").figures}
    for name in ("b1.4k", "b1.32k", "b8.4k", "b32.4k"):
        for group in (4, 8):
            assert {f"attention.{name}.g{group}.q{q_len}" for q_len in (1, 2, 5, 8)} <= ids
    rows = {figure.id for figure in rehearse("linear").figures}
    assert {f"linear.layer.m{2**i}.vs_torch" for i in range(12)} <= rows


def test_shared_prefix_uses_one_set_of_pages() -> None:
    bench = CudaBench("cpu")
    shared = bench_attention_peers.shared_loads(bench)[0]
    cache = bench_attention_peers.SharedCache(bench, shared)
    assert len(cache.kv_indices) > 1
    used = [set(pages.tolist()) for pages in cache.kv_indices]
    assert not used[0] & used[1]
    assert [len(pages) * 16 * 4096 for pages in used] == [shared.num_bytes] * len(used)
    flat, *_ = cache.ours(*cache.queries(bench, 2, 4))
    q, _, batch = flat.args
    declared = cache.ours(q, batch.qo_indptr, prefixes=cache.declared())[0]
    assert torch.equal(flat(), declared())


def test_recorded_logits_come_from_the_model() -> None:
    recorded = record(torch.device("cpu"), 50, 40)
    assert recorded.logits.shape == (50, 4096) and recorded.next_token_ids.shape == (50,)
    # A trained model predicts the next token far more often than 1 in 4,096.
    assert (recorded.logits.argmax(-1) == recorded.next_token_ids).float().mean() > 0.2
    rolled = recorded.rolled(5)
    assert torch.equal(rolled.logits[0], recorded.logits[5])
    assert rolled.next_token_ids[-1] == recorded.next_token_ids[4]
    with pytest.raises(ValueError, match="record: num_rows must be at most"):
        record(torch.device("cpu"), 200, 1)


def test_figures_are_saved_immediately(tmp_path: Path) -> None:
    """A family that ends early leaves its figures, and reasons for missing ones."""
    path = tmp_path / "results.json"
    saved_counts: list[tuple[int, int]] = []

    def on_change(bench: CudaBench) -> None:
        saved_counts.append((len(bench.figures), len(bench.notes)))
        common.save(
            bench.figures,
            family="x",
            minutes=0.0,
            versions={},
            on={"gpu": "none"},
            path=path,
            notes=bench.notes,
        )

    bench = CudaBench("cpu", on_change)
    bench.add(common.Figure("x.a", "a", 1.0, "us"))
    bench.note("x.b", "not here")
    assert saved_counts == [(1, 0), (1, 1)]
    saved = json.loads(path.read_text())
    assert [row["id"] for row in saved["figures"]] == ["x.a"]
    assert saved["notes"] == {"x.b": "not here"}
    common.save([], family="y", minutes=0.0, versions={}, on={}, path=path, notes={"y.c": "no"})
    assert json.loads(path.read_text())["notes"] == {"x.b": "not here", "y.c": "no"}
    common.save([], family="x", minutes=0.0, versions={}, on={}, path=path, notes={})
    assert json.loads(path.read_text())["notes"] == {"y.c": "no"}


def test_killed_bench_keeps_its_figures(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    command = [sys.executable, "-m", "bench", "--device", "rehearsal", "--only", "facts,sweeps"]
    process = subprocess.Popen(
        [*command, "--results", str(path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("sweeps."):
            process.kill()
            break
    process.wait()
    saved = json.loads(path.read_text())
    families = {row["id"].split(".")[0] for row in saved["figures"]}
    assert families == {"facts", "sweeps"} and set(saved["runs"]) == families


def test_figures_are_computed_from_timings() -> None:
    timings = [
        common.Timing(
            {"ours": [1e-6 * f] * 3, "slow": [4e-6] * 3, "fast": [2e-6] * 3},
            {case: [1000.0] * 3 for case in ("ours", "slow", "fast")},
        )
        for f in (1.0, 1.1)
    ]
    figure = bandwidth_figure(timings, "ours", "x.y", "what", 8e5, "ratio >= 0.7")
    assert figure.ratio == pytest.approx((0.8 + 0.8 / 1.1) / 2)
    assert figure.spread == pytest.approx(0.1) and figure.us == pytest.approx(1.05)
    peers = {"slow": "Slow", "fast": "Fast"}
    figure = time_figure(timings, "ours", "x.y", "what", peers, "ratio >= 1.5")
    assert figure.peer == "Fast" and figure.peer_value == pytest.approx(2.0)
    assert figure.ratio == pytest.approx((2.0 + 2.0 / 1.1) / 2) and common.judged(figure).met
    figure = time_figure(timings, "fast", "x.y", "what", over=("ours", "Ours"), bar="ratio <= 1.5")
    assert figure.ratio == pytest.approx((2.0 + 2.0 / 1.1) / 2) and not common.judged(figure).met
    # A bar on a ratio does not apply without a peer.
    assert time_figure(timings, "ours", "x.y", "what", {}, "ratio >= 1").bar is None
    assert time_figure(timings, "ours", "x.y", "what", {}, "value <= 1").bar == "value <= 1"


def test_variant_changes_only_its_constants(tmp_path: Path) -> None:
    edits = variants.constants(kGatedMulThreads=64)
    variants.write_overlay(tmp_path, "dense/gated_mul.cuh", edits)
    ours = (ROOT / "csrc/dense/gated_mul.cuh").read_text().splitlines()
    other = (tmp_path / "dense/gated_mul.cuh").read_text().splitlines()
    changed = [pair for pair in zip(ours, other, strict=True) if pair[0] != pair[1]]
    assert [pair[1] for pair in changed] == ["constexpr int kGatedMulThreads = 64;"]
    with pytest.raises(AssertionError, match=r"gated_mul.cuh has 0 times .*kNone"):
        variants.write_overlay(tmp_path, "dense/gated_mul.cuh", variants.constants(kNone=1))
    for header, edits in variants.VARIANTS.values():
        variants.write_overlay(tmp_path, header, edits)


def test_kernel_without_tensor_cores_keeps_other_instructions(tmp_path: Path) -> None:
    header = "common/ptx.cuh"
    variants.write_overlay(tmp_path, header, variants.NO_MMA)
    ours, other = ((folder / header).read_text() for folder in (ROOT / "csrc", tmp_path))
    assert ours.count("mma.sync.aligned.m16n8k16") > 0 == other.count("mma.sync.aligned.m16n8k16")
    for instruction in ("ldmatrix.sync", "cp.async.cg", "ex2.approx", "mma_m16n8k16("):
        assert ours.count(instruction) == other.count(instruction) > 0


def test_variants_are_built_as_one_object_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package's own CUDA build is used if it exists, else one build for all variants."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(variants, "WORK", tmp_path / "work")
    monkeypatch.setattr(variants, "ROOT", tmp_path)
    monkeypatch.setattr(variants.subprocess, "run", run)
    monkeypatch.setattr(variants, "write_overlay", lambda folder, *_: folder.mkdir(parents=True))
    monkeypatch.setattr(variants, "_load", lambda name, folder: folder)
    monkeypatch.setattr(variants, "cmake_options", lambda: ["-DSPECOPS_CUDA=ON"])
    monkeypatch.setattr(variants, "VARIANTS", {"one": ("h", {}), "two": ("h", {})})
    assert list(variants.build(["two"])) == ["two"]
    configure, build = commands
    # All variants are declared whichever is needed, so that a later build finds them made.
    folders = ";".join(str(tmp_path / "work" / "variants" / name) for name in ("one", "two"))
    assert f"-DSPECOPS_CUDA_VARIANTS={folders}" in configure and "-DSPECOPS_CUDA=ON" in configure
    varied = ";".join(f"csrc/{source}" for source in variants.BF16_ATTENTION)
    assert f"-DSPECOPS_CUDA_VARIED={varied}" in configure
    assert build[-2:] == ["--target", "_C_two"]
    assert build[2] == str(tmp_path / "work" / "variants" / "build")
    own = tmp_path / "build" / f"cmake-{sys.implementation.cache_tag}"
    own.mkdir(parents=True)
    for cuda, tree in (("OFF", build[2]), ("ON", str(own))):
        (own / "CMakeCache.txt").write_text(f"SPECOPS_CUDA:BOOL={cuda}\n")
        for name in ("one", "two"):
            (tmp_path / "work" / "variants" / name).rmdir()
        variants.build(["one"])
        assert commands[-1][2] == tree
