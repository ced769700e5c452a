# SPDX-License-Identifier: Apache-2.0
"""Requests that share a prefix: `append_attention` with detected sharing, and whole engine runs.

The op: 16 requests that share 4,096 tokens and have 256 more each, bf16, 16 query and 8 KV heads
with head_dim 128. A call with the groups that the engine finds in the page lists is compared with
the same call without groups. Groups of few requests or few tokens, which gain almost nothing, are
measured as well: they must cost nothing.

The engine: 16 requests on one prompt of 2,048 tokens in the shape of Qwen3-0.6B with random
weights, with sharing and without; and the fraction of a run spent on finding shared pages.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from specops.attention import (
    PagedBatch,
    PagedKv,
    append_attention,
    attention_workspace_size,
)
from specops.batching import find_shared_prefixes
from specops.engine import Engine, EngineConfig, SamplingParams, SpeculativeConfig
from specops.engine.plan import Plan
from specops.engine.sharing.prefixes import PrefixFinder

from bench import checkpoints
from bench.common import Bench, Figure

QO_HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, LEAF = 16, 8, 128, 16, 64
SHARING, PREFIX_LEN, OWN_LEN = 16, 4096, 256
PROMPT_LEN, NEW_TOKENS = 2048, 24  # tokens of an engine run
SHORT_PROMPT_LEN, SHORT_TOKENS = 512, 64  # tokens of a run with the bundled model


@dataclass(frozen=True)
class Sharing:
    """Requests in groups of equal size; a group shares its first tokens."""

    name: str
    requests: int
    group: int
    shared: int
    own: int


GAIN_REQUESTS, GAIN_PREFIX_LENS = (4, 16, 64), (512, 2048, 8192)
# Cases in which sharing saves at most a few percent.
HARDLY = (
    Sharing("pairs", 16, 2, 64, 960),
    Sharing("short", 16, 16, 64, 1984),
    Sharing("one pair", 2, 2, 64, 4032),
)


def run_cascade(bench: Bench) -> None:
    """Measure `append_attention` and the engine with and without declared shared prefixes.

    The op is timed with much, little and mixed sharing; the engine's search for shared pages is
    timed as well.
    """
    whole = Sharing("whole", SHARING, SHARING, PREFIX_LEN, OWN_LEN)
    for q_len, bar in ((1, "ratio >= 3"), (5, "ratio >= 1.5")):
        what = f"{SHARING} requests, {PREFIX_LEN:,} tokens shared, {OWN_LEN} own, {q_len} rows each"
        _add_op(bench, f"cascade.op.q{q_len}", what, whole, q_len, bar)
    for sharing in HARDLY:
        for q_len in (1, 5):
            what = (
                f"{sharing.requests} requests, groups of {sharing.group}, {sharing.shared} of "
                f"{sharing.shared + sharing.own:,} tokens shared, {q_len} rows each"
            )
            name = sharing.name.replace(" ", "_")
            _add_op(bench, f"cascade.hardly.{name}.q{q_len}", what, sharing, q_len, "ratio >= 0.98")
    for requests in GAIN_REQUESTS:
        for length in GAIN_PREFIX_LENS:
            sharing = Sharing("gain", requests, requests, length, OWN_LEN)
            what = f"{requests} requests, {length:,} tokens shared, {OWN_LEN} own, 1 rows each"
            _add_op(bench, gain_id(requests, length), what, sharing, 1, None)
    _add_engine(bench)
    _add_finding(bench)


def gain_id(requests: int, length: int) -> str:
    """Return the figure id, in results files, of a number of requests and a prefix length."""
    return f"cascade.gain.r{requests}.p{length}"


def _add_op(
    bench: Bench, name: str, what: str, sharing: Sharing, q_len: int, bar: str | None
) -> None:
    cases = _cases(sharing, q_len)
    timing = bench.alternate(cases, rounds=15, window_s=0.06)
    bench.add(
        Figure(
            name,
            f"append_attention bf16, {what}: times faster than without saying so",
            timing.median("shared") * 1e3,
            "ms",
            "sharing unsaid",
            timing.median("flat") * 1e3,
            timing.ratio("flat", "shared"),
            bar,
            threads=bench.num_threads,
            read_gb_s=timing.read_gb_s(),
        )
    )


def _cases(sharing: Sharing, q_len: int) -> dict[str, Callable[[], object]]:
    """Return two calls of `append_attention` on the same requests, by name.

    One declares the shared prefixes that `find_shared_prefixes` finds, the other declares none.
    """
    count, generator = sharing.requests, torch.Generator().manual_seed(0)
    shared_pages, own_pages = sharing.shared // PAGE_SIZE, sharing.own // PAGE_SIZE
    num_shared = count // sharing.group * shared_pages
    pages = num_shared + count * own_pages
    order = torch.randperm(pages, generator=generator).int().numpy()
    shared = order[:num_shared].reshape(-1, shared_pages)
    own = order[num_shared:].reshape(count, own_pages)
    lists = [np.concatenate([shared[b // sharing.group], own[b]]) for b in range(count)]
    kv_indptr = torch.arange(count + 1, dtype=torch.int32) * (shared_pages + own_pages)
    found = find_shared_prefixes(
        kv_indptr,
        torch.from_numpy(np.concatenate(lists)),
        page_size=PAGE_SIZE,
        leaf_tokens=LEAF,
    )
    lists = [lists[index] for index in found.order.tolist()]
    caches = [
        torch.randn(pages, PAGE_SIZE, KV_HEADS, HEAD_DIM, generator=generator).bfloat16()
        for _ in range(2)
    ]
    q = torch.randn(count * q_len, QO_HEADS, HEAD_DIM, generator=generator).bfloat16()
    kv_indices = torch.from_numpy(np.concatenate(lists))
    floats = attention_workspace_size(q.shape, caches[0].shape, len(kv_indices), count)
    call = partial(
        append_attention,
        q,
        PagedKv(*caches),
        PagedBatch(
            torch.arange(count + 1, dtype=torch.int32) * q_len,
            kv_indptr,
            kv_indices,
            torch.full((count,), sharing.shared + sharing.own, dtype=torch.int32),
        ),
        out=torch.empty_like(q),
        workspace=torch.empty(floats),
    )
    return {"flat": call, "shared": partial(call, prefixes=found.tensors)}


def _engine(
    bench: Bench, model: Path, max_model_len: int, requests: int, *, shares: bool
) -> Engine:
    return Engine(
        EngineConfig(
            model=str(model),
            device="cpu",
            load_format="dummy",
            speculative_config=SpeculativeConfig(method="naive"),
            max_num_seqs=requests,
            max_model_len=max_model_len,
            enable_cascade_attention=shares,
            num_threads=bench.num_threads,
            seed=0,
        )
    )


def _add_engine(bench: Bench) -> None:
    """Time engines with and without sharing in turn, with the prompt in their prefix caches."""
    model = checkpoints.without_weights("qwen06_shape", checkpoints.QWEN06).path
    engines = {
        name: _engine(bench, model, PROMPT_LEN + NEW_TOKENS + 1, SHARING, shares=shares)
        for name, shares in (("shared", True), ("flat", False))
    }
    prompt = [3 + i % 61 for i in range(PROMPT_LEN)]
    texts: dict[str, list[list[int]]] = {}
    shares = []  # fraction of each run's time spent on finding shared pages

    def run(name: str, count: int = SHARING, max_tokens: int = NEW_TOKENS) -> float:
        params = [
            SamplingParams(max_tokens=max_tokens, temperature=0.8, seed=i, ignore_eos=True)
            for i in range(count)
        ]
        with _finding_timed() as finding:
            begun = time.perf_counter()
            done = engines[name].generate([prompt] * count, params)
            seconds = time.perf_counter() - begun
        texts[name] = [one.token_ids for one in done]
        if name == "shared":
            shares.append(sum(finding) / seconds)
        return seconds

    for name in engines:
        run(name, count=1, max_tokens=1)
    shares.clear()
    timing = bench.rounds({name: partial(run, name) for name in engines}, rounds=5, guarded=False)
    what = f"{SHARING} requests on one prompt of {PROMPT_LEN:,} tokens, {NEW_TOKENS} tokens each"
    bench.add(
        Figure(
            "cascade.engine",
            f"Qwen3-0.6B shape, {what}: times faster than without sharing",
            SHARING * NEW_TOKENS / timing.median("shared"),
            "tok/s",
            "no sharing",
            SHARING * NEW_TOKENS / timing.median("flat"),
            timing.ratio("flat", "shared"),
            "ratio >= 1.5",
            threads=bench.num_threads,
            read_gb_s=timing.read_gb_s(),
        )
    )
    differ = sum(a != b for a, b in zip(texts["shared"], texts["flat"], strict=True))
    bench.add(
        Figure(
            "cascade.engine.differ",
            f"Qwen3-0.6B shape, {what}: texts that sharing changes",
            differ,
            "texts",
            bar="value == 0",
        )
    )
    bench.add(
        Figure(
            "cascade.engine.finding",
            f"Qwen3-0.6B shape, {what}: share of the run that finds who shares what",
            100 * statistics.median(shares),
            "%",
            bar="value <= 1",
            threads=bench.num_threads,
        )
    )


@contextmanager
def _finding_timed() -> Iterator[list[float]]:
    """Patch the engine to time its search for shared pages; yield the list of seconds per step."""
    arrange, taken = PrefixFinder.arrange, []

    def timed(self: PrefixFinder, plan: Plan) -> None:
        begun = time.perf_counter()
        arrange(self, plan)
        taken.append(time.perf_counter() - begun)

    with mock.patch.object(PrefixFinder, "arrange", timed):
        yield taken


def _add_finding(bench: Bench) -> None:
    """Time the search on the smallest model, whose steps are shortest, with varied lengths."""
    count = 2 * SHARING
    limit = SHORT_PROMPT_LEN + SHORT_TOKENS + 1
    engine = _engine(bench, checkpoints.BUNDLED, limit, count, shares=True)
    prompt = [3 + i % 61 for i in range(SHORT_PROMPT_LEN)]
    params = [
        SamplingParams(max_tokens=1 + i % SHORT_TOKENS, temperature=0.8, seed=i, ignore_eos=True)
        for i in range(3 * count)
    ]
    engine.generate([prompt], params[0])
    shares = []
    for _ in range(bench.pick(5, 1)):
        steps = engine.stats.num_steps
        with _finding_timed() as finding:
            begun = time.perf_counter()
            engine.generate([prompt] * len(params), params)
            seconds = time.perf_counter() - begun
        spent = sum(finding)
        shares.append((spent / seconds, spent, engine.stats.num_steps - steps))
    share, seconds, num_steps = sorted(shares)[len(shares) // 2]
    bench.add(
        Figure(
            "cascade.finding",
            f"bundled model, {len(params)} requests on one prompt of {SHORT_PROMPT_LEN}, up to "
            f"{SHORT_TOKENS} tokens, {count} at once: share of the run that finds who shares what",
            100 * share,
            "%",
            "us per step",
            1e6 * seconds / num_steps,
            bar="value <= 1.5",  # for steps as short as these; it takes 20 us
            threads=bench.num_threads,
        )
    )
