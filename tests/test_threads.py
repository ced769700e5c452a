# SPDX-License-Identifier: Apache-2.0
"""The thread pool runs every chunk once, with any caller, any thread count, and after fork()."""

import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import specops
import torch
from specops import _C, attention, batching, dense, linear_attention, moe, ngram, sampling
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ["csrc/common/parallel.cpp", "csrc/common/cpus.cpp"]
THREADS = (1, 2, 3, 7, 16, 64)


def build(folder: Path, program: str, flags: str, sources: list[str]) -> Path:
    """Compile tests/`program`.cpp with the sources that it tests."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("no C++ compiler here")
    path = folder / program
    options = ["-std=c++20", *flags.split(), "-Wall", "-Wextra", "-Werror", "-pthread", "-Icsrc"]
    command = [compiler, *options, f"tests/{program}.cpp", *sources, "-o", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if "cannot find" in done.stderr and "san" in done.stderr:
        pytest.skip("the compiler has no sanitizers here")
    assert done.returncode == 0, done.stderr[-3000:]
    return path


def run(*command: object) -> str:
    """Run a command, check that it succeeds without a message, and return its output."""
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1"},
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr[-6000:]
    return done.stdout


@pytest.fixture(scope="module")
def parallel_check(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the driver of the pool."""
    return build(tmp_path_factory.mktemp("parallel"), "parallel_check", "-O2", SOURCES)


@pytest.mark.parametrize("num_threads", THREADS)
@pytest.mark.ci
def test_pool_runs_every_chunk_once(parallel_check: Path, num_threads: int) -> None:
    assert run(parallel_check, num_threads, "fork") == ""


@pytest.mark.slow
@pytest.mark.sanitize
def test_pool_passes_the_thread_sanitizer(tmp_path: Path) -> None:
    program = build(tmp_path, "parallel_check", "-O1 -g -fsanitize=thread", SOURCES)
    for num_threads in (2, 7, 64):
        assert run(program, num_threads) == ""


@pytest.mark.ci
def test_claims_cover_every_chunk_once_on_large_machines(tmp_path: Path) -> None:
    assert run(build(tmp_path, "claims_check", "-O2", [])) == ""


V2 = "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup rw\n"
V1 = "32 31 0:29 / /sys/fs/cgroup/cpu rw,nosuid shared:7 - cgroup cgroup rw,cpu,cpuacct\n"
SUB = "32 31 0:29 /docker/ab /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpuacct,cpu\n"
GROUP = "sys/fs/cgroup"


@pytest.mark.ci
@pytest.mark.parametrize(
    "mounts,groups,files,quota",
    [
        ("", "", {}, 0),
        (V2, "0::/\n", {}, 0),
        (V2, "0::/\n", {f"{GROUP}/cpu.max": "max 100000"}, 0),
        (V2, "0::/\n", {f"{GROUP}/cpu.max": "800000 100000"}, 8),
        (V2, "0::/\n", {f"{GROUP}/cpu.max": "390000 100000"}, 3),
        (V2, "0::/\n", {f"{GROUP}/cpu.max": "50000 100000"}, 1),
        (V2, "0::/\n", {f"{GROUP}/cpu.max": "words"}, 0),
        (V2, "0::/\n", {f"{GROUP}/cpu.max": "99999999999 1"}, 1024),
        # A limit of a parent holds for its children, whose own limit may be lower.
        (V2, "0::/a/b\n", {f"{GROUP}/a/cpu.max": "200000 100000"}, 2),
        (
            V2,
            "0::/a/b\n",
            {f"{GROUP}/a/cpu.max": "600000 100000", f"{GROUP}/a/b/cpu.max": "500000 100000"},
            5,
        ),
        (V2, "0::/a/b\n", {f"{GROUP}/c/cpu.max": "200000 100000"}, 0),
        (
            V1,
            "3:cpuset:/x\n2:cpu,cpuacct:/x\n0::/\n",
            {
                f"{GROUP}/cpu/x/cpu.cfs_quota_us": "250000",
                f"{GROUP}/cpu/x/cpu.cfs_period_us": "100000",
            },
            2,
        ),
        (
            V1,
            "2:cpu:/\n",
            {f"{GROUP}/cpu/cpu.cfs_quota_us": "-1", f"{GROUP}/cpu/cpu.cfs_period_us": "100000"},
            0,
        ),
        # Inside a container, the group's folder is the root of the mount, but its name is that
        # outside.
        (
            SUB,
            "2:cpu,cpuacct:/docker/ab\n",
            {
                f"{GROUP}/cpu/cpu.cfs_quota_us": "400000",
                f"{GROUP}/cpu/cpu.cfs_period_us": "100000",
            },
            4,
        ),
        # The controllers cpuset and cpuacct have no quota.
        (
            V1.replace("cpu,cpuacct", "cpuset"),
            "2:cpuset:/\n",
            {
                f"{GROUP}/cpu/cpu.cfs_quota_us": "400000",
                f"{GROUP}/cpu/cpu.cfs_period_us": "100000",
            },
            0,
        ),
    ],
)
def test_quotas_of_control_groups_are_read(
    cpus_check: Path, tmp_path: Path, mounts: str, groups: str, files: dict[str, str], quota: int
) -> None:
    files = {"proc/self/mountinfo": mounts, "proc/self/cgroup": groups, **files}
    assert ask(cpus_check, tmp_path, files) == (quota, [])


NODES = "sys/devices/system/node"


@pytest.mark.parametrize(
    "files,nodes",
    [
        ({f"{NODES}/has_cpu": "0", f"{NODES}/node0/cpulist": "0-3"}, []),
        (
            {
                f"{NODES}/has_cpu": "0-1",
                f"{NODES}/node0/cpulist": "0-2,6",
                f"{NODES}/node1/cpulist": "3-5,7",
            },
            [0, 0, 0, 1, 1, 1, 0, 1],
        ),
        # Node numbers may have gaps.
        (
            {
                f"{NODES}/has_cpu": "0,8\n",
                f"{NODES}/node0/cpulist": "0\n",
                f"{NODES}/node8/cpulist": "2\n",
            },
            [0, 0, 1],
        ),
    ],
)
def test_memory_nodes_of_cpus_are_read(
    cpus_check: Path, tmp_path: Path, files: dict[str, str], nodes: list[int]
) -> None:
    assert ask(cpus_check, tmp_path, files) == (0, nodes)


@pytest.fixture(scope="module")
def cpus_check(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the program that prints what cpus.h finds in a folder."""
    return build(tmp_path_factory.mktemp("cpus"), "cpus_check", "-O1", SOURCES)


def ask(program: Path, root: Path, files: dict[str, str]) -> tuple[int, list[int]]:
    """Return the quota and the nodes of CPUs for a file system rooted at `root`."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    quota, nodes = run(program, root).split("\n")
    return int(quota), [int(node) for node in nodes.split()]


def in_a_process(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        cwd=ROOT,
    )


@pytest.mark.parametrize("count", ["1", "3", "64", "1024"])
def test_environment_sets_the_thread_count(count: str) -> None:
    program = "import specops; print(specops.get_num_threads())"
    done = in_a_process(program, SPECOPS_NUM_THREADS=count)
    assert (done.stdout, done.returncode) == (f"{count}\n", 0), done.stderr


def test_default_thread_count_is_at_most_the_number_of_cpus() -> None:
    program = "import specops; print(specops.get_num_threads())"
    cpus = len(os.sched_getaffinity(0))
    assert 1 <= int(in_a_process(program, SPECOPS_NUM_THREADS="").stdout) <= cpus
    pinned = f"import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); {program}"
    assert in_a_process(pinned, SPECOPS_NUM_THREADS="").stdout == "1\n"


@pytest.mark.ci
def test_invalid_counts_in_the_environment_are_refused() -> None:
    wrong = ["0", "-1", "1025", "two", "2.5", " 2", "2 ", "99999999999999"]
    program = f"""
import os, torch, specops
from specops import dense
for bad in {wrong}:
    os.environ["SPECOPS_NUM_THREADS"] = bad
    for call in (specops.get_num_threads, lambda: dense.silu_mul(torch.zeros(64, 4096))):
        try:
            call()
        except ValueError as error:
            print(error)
os.environ["SPECOPS_NUM_THREADS"] = "3"
print(specops.get_num_threads())
"""
    done = in_a_process(program)
    sentence = "SPECOPS_NUM_THREADS must be a whole number from 1 to 1024, got "
    assert done.stdout.splitlines() == [
        *(f"{sentence}'{bad}'" for bad in wrong for _ in range(2)),
        "3",
    ], done.stderr


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no masks on this platform")
def test_no_more_threads_run_than_there_are_cpus() -> None:
    program = """
import os, threading, torch, specops
from specops import dense
specops.set_num_threads(64)
dense.silu_mul(torch.zeros(64, 4096))
print(specops.get_num_threads(), len(os.listdir("/proc/self/task")))
"""
    done = in_a_process(program, OMP_NUM_THREADS="1")
    count, tasks = map(int, done.stdout.split())
    assert count == 64 and tasks < 2 * len(os.sched_getaffinity(0)) + 8


def attention_job(generator: torch.Generator) -> list[Tensor]:
    """Verify three requests: append keys, attend over caches and compact paths."""
    num_pages, kv_lens = 150, torch.tensor([1500, 700, 40], dtype=torch.int32)
    pages = (kv_lens + 15) // 16
    kv_indptr = torch.cat([torch.zeros(1), pages.cumsum(0)]).int()
    indptr = torch.tensor([0, 6, 8, 14], dtype=torch.int32)
    k_cache, v_cache = torch.randn(2, num_pages, 16, 2, 64, generator=generator).bfloat16()
    cache = attention.PagedKv(k_cache, v_cache)
    kv_indices = torch.randperm(num_pages, generator=generator)[: int(kv_indptr[-1])].int()
    rows = 700
    q = attention.rope_append_kv(
        torch.randn(rows, 8, 64, generator=generator).bfloat16(),
        *torch.randn(2, rows, 2, 64, generator=generator).bfloat16(),
        cache,
        torch.randperm(num_pages * 16, generator=generator)[:rows],
        torch.randint(0, 2000, (rows,), generator=generator).int(),
        attention.rope_cos_sin(2000, 64, 10000.0),
    )
    paged = attention.PagedBatch(indptr, kv_indptr, kv_indices, kv_lens)
    attended = attention.append_attention(q[:14], cache, paged, return_lse=True)
    merged = attention.merge_states(
        torch.randn(3, rows, 8, 64, generator=generator).bfloat16(),
        torch.randn(3, rows, 8, generator=generator),
    )
    attention.copy_kv(k_cache, v_cache, torch.arange(900), torch.arange(1100, 2000))
    attention.compact_kv(
        k_cache,
        v_cache,
        torch.tensor([[1, 3, 4], [0, -1, -1], [2, 4, -1]], dtype=torch.int32),
        torch.tensor([3, 1, 2], dtype=torch.int32),
        indptr,
        kv_lens,
        kv_indptr,
        kv_indices,
    )
    return [q, *attended, *merged, k_cache, v_cache]


def latent_job(generator: torch.Generator) -> list[Tensor]:
    """Verify one request over latents."""
    rows, num_pages = 300, 40
    cache = torch.randn(num_pages, 16, 1, 576, generator=generator).bfloat16()
    q = attention.rope_append_latent(
        torch.randn(rows, 8, 576, generator=generator).bfloat16(),
        torch.randn(rows, 576, generator=generator).bfloat16(),
        cache,
        torch.randperm(num_pages * 16, generator=generator)[:rows],
        torch.randint(0, 2000, (rows,), generator=generator).int(),
        attention.rope_cos_sin(2000, 64, 10000.0),
        norm_weight=torch.ones(512).bfloat16(),
    )
    pages = torch.randperm(num_pages, generator=generator).int()
    kv_indptr = torch.tensor([0, num_pages], dtype=torch.int32)
    kv_lens = torch.tensor([num_pages * 16], dtype=torch.int32)
    indptr = torch.tensor([0, 6], dtype=torch.int32)
    paged = attention.PagedBatch(indptr, kv_indptr, pages, kv_lens)
    attended = attention.append_attention(
        q[:6], attention.PagedKv(cache), paged, sm_scale=0.07, return_lse=True
    )
    return [q, cache, *attended]


def sampling_job(generator: torch.Generator) -> list[Tensor]:
    """Verify and sample tokens, and list the likeliest."""
    indptr = torch.tensor([0, 6, 8, 14], dtype=torch.int32)
    logits = 4 * torch.randn(14, 9000, generator=generator)
    logprobs = torch.empty(3, 6)
    emitted = sampling.verify(
        logits,
        sampling.Drafts(indptr, torch.randint(0, 9000, (3, 5), generator=generator).int()),
        positions=torch.tensor([1500, 700, 40], dtype=torch.int32),
        strategy=torch.ones(3, dtype=torch.int32),
        policy=torch.tensor([0, 0, 1], dtype=torch.int32),
        sampling=sampling.SamplingTensors(
            temperature=torch.tensor([1.0, 0.0, 0.7]),
            top_k=torch.tensor([0, 0, 50], dtype=torch.int32),
            top_p=torch.tensor([0.9, 1.0, 1.0]),
            min_p=torch.zeros(3),
            seeds=torch.arange(3),
        ),
        outputs=sampling.VerifyOutputs(logprobs=logprobs),
    )
    row_logprobs = torch.empty(14)
    token_ids = sampling.sample(
        logits,
        torch.arange(14).int(),
        sampling=sampling.SamplingTensors(temperature=0.9, top_p=0.95, seeds=torch.arange(14)),
        outputs=sampling.SampleOutputs(logprobs=row_logprobs),
    )
    listed = sampling.top_logprobs(logits, 5)
    return [*emitted, logprobs, token_ids, row_logprobs, *listed]


def batching_job(generator: torch.Generator) -> list[Tensor]:
    """Gather ids and hidden states of many rows, and build trees."""
    hidden = torch.randn(700, 512, generator=generator)
    output_rows = torch.randint(-1, 700, (500,), generator=generator).int()
    rows, batch = 9000, 96
    token_ids = torch.randint(0, 50, (batch, 100), generator=generator).int()
    input_ids = batching.gather_input_ids(
        torch.randint(0, batch, (rows,), generator=generator).int(),
        torch.randint(0, 100, (rows,), generator=generator).int(),
        torch.arange(batch).int(),
        token_ids,
        torch.full((batch,), 100, dtype=torch.int32),
    )
    nodes = 60
    parents = (torch.rand(batch, nodes, generator=generator) * torch.arange(nodes)).int() - 1
    tree = batching.build_tree(
        parents,
        torch.randint(0, nodes + 1, (batch,), generator=generator).int(),
        torch.arange(batch).int(),
    )
    return [batching.gather_output_rows(hidden, output_rows), input_ids, *vars(tree).values()]


def dense_job(generator: torch.Generator) -> list[Tensor]:
    """Run layers over few and many rows."""
    gate_up = torch.randn(64, 4096, generator=generator)
    out = [dense.rms_norm(gate_up, torch.ones(4096), 1e-6)]
    out += [dense.silu_mul(gate_up), dense.silu_mul(gate_up[:1])]
    out += [dense.gelu_tanh_mul(gate_up), dense.swiglu_oai_mul(gate_up)]
    for dtype in (torch.bfloat16, torch.float32):
        weight = torch.randn(3000, 512, generator=generator).to(dtype)
        x = torch.randn(70, 512, generator=generator).to(dtype)
        for activation in (None, "silu", "gelu_tanh", "swiglu_oai"):
            packed = dense.pack_weight(weight, activation=activation)
            out += [packed.data, dense.linear(x, packed), dense.linear(x[:5], packed)]
    rows = 300
    ids = torch.randint(0, 500, (2, rows), generator=generator).int()
    table = torch.randn(500, 512, generator=generator)
    arange, zeros = torch.arange(rows).int(), torch.zeros(rows, dtype=torch.int32)
    out.append(dense.embedding(ids[0], table))
    out.append(
        dense.mtp_input(
            dense.ModuleRows(zeros, arange, arange),
            dense.TokenTables(
                zeros[:1],
                ids,
                torch.tensor([rows, rows], dtype=torch.int32),
                ids[:, :3].contiguous(),
            ),
            table,
            torch.ones(512),
            torch.ones(512),
            torch.randn(rows, 512, generator=generator),
            eps=1e-6,
        )
    )
    return out


def drafting_job(generator: torch.Generator) -> list[Tensor]:
    """Draft by n-grams and by suffixes for many requests."""
    token_ids = torch.randint(0, 50, (96, 2048), generator=generator).int()
    drafts, counts = ngram.ngram_propose(
        token_ids,
        torch.full((96,), 2048, dtype=torch.int32),
        torch.full((96,), 5, dtype=torch.int32),
        min_ngram_size=3,
        max_ngram_size=9,
        draft_token_ids=torch.empty(96, 5, dtype=torch.int32),
    )
    cache = specops.SuffixCache()
    for request in range(96):
        cache.start(request, token_ids[request, :300].tolist())
    drafted = [cache.speculate(request, 5).token_ids for request in range(96)]
    return [drafts, counts, *map(torch.tensor, drafted)]


def experts_job(generator: torch.Generator) -> list[Tensor]:
    x, logits = (torch.randn(40, width, generator=generator) for width in (96, 12))
    weights = torch.randn(12, 160, 96, generator=generator)
    ids, scales = moe.moe_route(logits, 3)
    order = moe.moe_sort(ids, 12)
    stacked = moe.stack_experts(map(dense.pack_weight, weights), 12)
    out = moe.moe_linear(x, stacked, order.expert_indptr, order.row_indices)
    return [scales, moe.moe_combine(out, order.places, scales)]


def states_job(generator: torch.Generator) -> list[Tensor]:
    """Run linear attention of new requests over many heads and channels."""
    x = torch.randn(60, 1024, generator=generator)
    given = [torch.tensor(one, dtype=torch.int32) for one in ([1, 0], [0, 20, 60], [20, 40])]
    weight, conv = torch.randn(4, 1024, generator=generator), torch.zeros(2, 6, 1024)
    mixed = linear_attention.causal_conv1d(x, weight, conv, *given)
    heads = mixed[:, :960].unflatten(1, (3, 5, 64)).unbind(1)
    gates = mixed[:, 960:970].split(5, 1)
    states = torch.zeros(2, 3, 5, 64, 64)
    out = linear_attention.gated_delta_rule(
        *heads, *gates, torch.zeros(5), torch.ones(5), states, *given
    )
    by_channel = torch.zeros(2, 3, 5, 64, 64)
    decayed = linear_attention.gated_delta_rule(
        *heads, heads[0], gates[1], torch.zeros(5), torch.ones(5, 64), by_channel, *given
    )
    space = torch.zeros(2, 3, 5, 64, 64)
    queried = linear_attention.selective_state_update(
        heads[0], gates[0], *heads[1:], *torch.ones(3, 5), space, *given
    )
    gated = dense.output_gate(out, heads[0], norm_weight=x[0, :64].contiguous())
    return [conv, states, by_channel, decayed, space, queried, gated]


def big_job() -> list[Tensor]:
    """Run all ops that use several threads, with enough work for them, and small ones."""
    generator = torch.Generator().manual_seed(7)
    jobs = [attention_job, latent_job, sampling_job, batching_job, dense_job, experts_job]
    jobs += [states_job, drafting_job]
    return [tensor for job in jobs for tensor in job(generator)]


def test_big_job_covers_every_op_that_uses_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    called: set[str] = set()

    class Noted:
        def __getattr__(self, name: str) -> Any:
            called.add(name)
            return getattr(_C, name)

    for module in (attention, batching, dense, linear_attention, moe, ngram, sampling):
        monkeypatch.setattr(module, "_C", Noted())
    big_job()
    shared = {
        # linear has another kernel, and silu_mul shares its file with the other gated ops
        path.name.removesuffix("_cpu.cpp").removesuffix("_amx").replace("gated_mul", "silu_mul")
        for path in ROOT.glob("csrc/**/*_cpu.cpp")
        if re.search(r"parallel_for\(|common/parallel.h|attention_split", path.read_text())
    }
    assert len(shared) > 12 and shared | {"pack_weight"} <= called


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.fast("[!p]*")  # the portable set divides work among threads by the same code
def test_thread_count_changes_no_bit(isa: str) -> None:
    specops.set_num_threads(1)
    want = big_job()
    for num_threads in (*THREADS[1:], 1):
        specops.set_num_threads(num_threads)
        assert specops.get_num_threads() == num_threads
        assert equal(big_job(), want)


@pytest.mark.parametrize("num_threads", [1, 2, 64])
def test_host_threads_may_call_at_once(num_threads: int) -> None:
    specops.set_num_threads(num_threads)
    want = big_job()
    results: list[bool] = []

    def call() -> None:
        results.extend(equal(big_job(), want) for _ in range(3))

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 9


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_ops_work_in_a_forked_child() -> None:
    specops.set_num_threads(3)
    dense.silu_mul(torch.randn(64, 4096))  # starts the parent's workers before the fork
    gate_up = torch.randn(8, 256)
    want = dense.silu_mul(gate_up)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            same = torch.equal(dense.silu_mul(gate_up), want)
            specops.set_num_threads(2)
            status = 0 if same and torch.equal(dense.silu_mul(gate_up), want) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(dense.silu_mul(gate_up), want)


@pytest.mark.parametrize("bad", [0, -1, -(2**31), 1025, 2**31 - 1])
def test_thread_counts_out_of_range_are_refused(bad: int) -> None:
    before = specops.get_num_threads()
    with pytest.raises(ValueError, match=rf"set_num_threads: num_threads must be .* got {bad}"):
        specops.set_num_threads(bad)
    assert specops.get_num_threads() == before


@pytest.mark.parametrize("bad", ["2", None, 2.5])
def test_thread_counts_must_be_integers(bad: object) -> None:
    with pytest.raises(ValueError, match=r"^set_num_threads: num_threads must be an int .*, got "):
        specops.set_num_threads(bad)  # type: ignore[arg-type]


def test_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(ValueError, match=r"set_isa: isa must be one of \['portable'.*'sse9'"):
        specops.set_isa("sse9")


def test_environment_sets_the_instruction_set() -> None:
    program = "import specops; print(specops.get_isa())"
    for isa in specops.supported_isas():
        done = in_a_process(program, SPECOPS_ISA=isa)
        assert (done.stdout, done.returncode) == (f"{isa}\n", 0), done.stderr
    done = in_a_process(program, SPECOPS_ISA="sse9")
    names = ", ".join(specops.supported_isas())
    assert f"ValueError: SPECOPS_ISA must be one of {names}, got 'sse9'" in done.stderr
