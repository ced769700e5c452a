# SPDX-License-Identifier: Apache-2.0
"""The thread pool: every chunk runs once, whoever calls, however many threads, and after fork()."""

import os
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
import specops
import torch
from specops import attention, batching, dense, ngram, sampling
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
COMPILE = "-std=c++20 -O2 -pthread -Icsrc tests/parallel_check.cpp csrc/common/parallel.cpp"


@pytest.fixture(scope="module")
def parallel_check(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pool and its driver as a program of their own."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("no C++ compiler here")
    program = tmp_path_factory.mktemp("parallel") / "parallel_check"
    subprocess.run(
        [compiler, *COMPILE.split(), "-o", str(program)],
        cwd=ROOT,
        check=True,
    )
    return program


@pytest.mark.parametrize("num_threads", [1, 2, 3, 4])
def test_the_pool_alone(parallel_check: Path, num_threads: int) -> None:
    done = subprocess.run(
        [str(parallel_check), str(num_threads), "fork"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def decode_step(generator: torch.Generator) -> list[Tensor]:
    """Verification of three requests: attention over long caches, then the choice of tokens."""
    num_pages, kv_lens = 150, torch.tensor([1500, 700, 40], dtype=torch.int32)
    pages = (kv_lens + 15) // 16
    kv_indptr = torch.cat([torch.zeros(1), pages.cumsum(0)]).int()
    indptr = torch.tensor([0, 6, 8, 14], dtype=torch.int32)
    k_cache, v_cache = torch.randn(2, num_pages, 16, 2, 64, generator=generator).bfloat16()
    q = torch.randn(14, 8, 64, generator=generator).bfloat16()
    kv_indices = torch.randperm(num_pages, generator=generator)[: int(kv_indptr[-1])].int()
    attended = attention.append_attention(
        q, k_cache, v_cache, indptr, kv_indptr, kv_indices, kv_lens, return_lse=True
    )
    logprobs = torch.empty(3, 6)
    emitted = sampling.verify(
        4 * torch.randn(14, 9000, generator=generator),
        indptr,
        torch.randint(0, 9000, (3, 5), generator=generator).int(),
        positions=kv_lens,
        strategy=torch.ones(3, dtype=torch.int32),
        policy=torch.tensor([0, 0, 1], dtype=torch.int32),
        temperature=torch.tensor([1.0, 0.0, 0.7]),
        top_k=torch.tensor([0, 0, 50], dtype=torch.int32),
        top_p=torch.tensor([0.9, 1.0, 1.0]),
        min_p=torch.zeros(3),
        seeds=torch.arange(3),
        logprobs=logprobs,
    )
    return [*attended, *emitted, logprobs]


def big_job() -> list[Tensor]:
    """A few ops with enough work for several threads, and a small one."""
    generator = torch.Generator().manual_seed(7)
    gate_up = torch.randn(64, 4096, generator=generator)
    hidden = torch.randn(700, 512, generator=generator)
    output_rows = torch.randint(-1, 700, (500,), generator=generator).int()
    token_ids = torch.randint(0, 50, (96, 2048), generator=generator).int()
    drafts, counts = ngram.ngram_propose(
        token_ids,
        torch.full((96,), 2048, dtype=torch.int32),
        torch.full((96,), 5, dtype=torch.int32),
        min_ngram_size=3,
        max_ngram_size=9,
        draft_token_ids=torch.empty(96, 5, dtype=torch.int32),
    )
    x = torch.randn(6, 1024, generator=generator).bfloat16()
    weight = dense.pack_weight(torch.randn(3000, 1024, generator=generator).bfloat16())
    return [
        *decode_step(generator),
        dense.linear(x, weight),
        dense.rms_norm(gate_up, torch.ones(4096), 1e-6),
        dense.silu_mul(gate_up),
        dense.silu_mul(gate_up[:1]),
        batching.gather_output_rows(hidden, output_rows),
        drafts,
        counts,
    ]


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_the_thread_count_changes_no_bit(isa: str) -> None:
    specops.set_num_threads(1)
    want = big_job()
    for num_threads in (2, 3, 4, 1):
        specops.set_num_threads(num_threads)
        assert specops.get_num_threads() == num_threads
        for _ in range(2):
            assert equal(big_job(), want)


@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_host_threads_calling_at_once(num_threads: int) -> None:
    specops.set_num_threads(num_threads)
    want = big_job()
    results: list[bool] = []

    def call() -> None:
        results.extend(equal(big_job(), want) for _ in range(6))

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert results == [True] * 18


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_ops_in_a_forked_child() -> None:
    specops.set_num_threads(3)
    dense.silu_mul(torch.randn(64, 4096))  # the parent's workers exist before the fork
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
def test_thread_counts_that_are_refused(bad: int) -> None:
    before = specops.get_num_threads()
    with pytest.raises(ValueError, match=rf"set_num_threads: num_threads must be .* got {bad}"):
        specops.set_num_threads(bad)
    assert specops.get_num_threads() == before


@pytest.mark.parametrize("bad", ["2", None, 2.5])
def test_thread_counts_that_are_no_integers(bad: object) -> None:
    with pytest.raises(TypeError):
        specops.set_num_threads(bad)  # type: ignore[arg-type]


def test_an_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(ValueError, match=r"set_isa: isa must be one of \['portable'.*'sse9'"):
        specops.set_isa("sse9")
