# SPDX-License-Identifier: Apache-2.0
"""`append_attention` over a paged cache in bf16, beside the read line of the same run.

On a CPU: batch 8, 16 query and 8 KV heads of 128, kv 4,096. Bytes are those of the keys and values,
128 MiB, which no cache of this kind of machine holds. And 16 requests that share a prefix of 2,048
tokens and have 128 of their own, with the prefix declared and without. Undeclared, the prefix is
read 16 times, though not from memory where a cache holds its 8 MiB.

On a GPU: 8 KV heads of 128, several batches and lengths, groups of 4 and 8 query heads, 1 to 8
rows, pages shuffled; and FlashInfer's fastest path on the same memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import torch
import torch.nn.functional as F
from specops import attention
from specops.attention import append_attention
from torch import Tensor

from bench.common import Bench, Figure, Timing
from bench.cuda import Call, CudaBench, bandwidth_figure, seconds, time_figure
from bench.peers import flashinfer_peer
from bench.variants import build

BATCH, QO_HEADS, KV_HEADS, HEAD_DIM, KV_LEN, PAGE_SIZE = 8, 16, 8, 128, 4096, 16
SHARING, PREFIX_LEN, OWN_LEN = 16, 2048, 128


def run_attention(bench: Bench) -> None:
    """q_len 1 and 5 with pages ascending and shuffled; torch SDPA on the same lengths."""
    pages = BATCH * KV_LEN // PAGE_SIZE
    generator = torch.Generator().manual_seed(0)
    caches = [
        torch.randn(pages, PAGE_SIZE, KV_HEADS, HEAD_DIM, generator=generator).bfloat16()
        for _ in range(2)
    ]
    orders = {
        "ascending": torch.arange(pages, dtype=torch.int32),
        "shuffled": torch.randperm(pages, generator=generator).to(torch.int32),
    }
    dense = [
        cache.view(BATCH, KV_LEN, KV_HEADS, HEAD_DIM).transpose(1, 2).contiguous()
        for cache in caches
    ]
    num_bytes = sum(cache.numel() * cache.element_size() for cache in caches)
    for q_len in (1, 5):
        q = torch.randn(BATCH * q_len, QO_HEADS, HEAD_DIM, generator=generator).bfloat16()
        cases = {order: _ours(q, q_len, caches, kv_indices) for order, kv_indices in orders.items()}
        cases["torch"] = _torch(q, q_len, dense)
        with torch.inference_mode():
            timing = bench.alternate(cases, rounds=9, window_s=0.1)
        for order in orders:
            limit = {"ascending": "ratio >= 0.75", "shuffled": "ratio >= 0.65"}[order]
            bench.add(
                Figure(
                    f"attention.bf16.q{q_len}.{order}",
                    f"append_attention bf16 kv 4,096, q_len {q_len}, pages {order}: share of read",
                    num_bytes * 1e-9 / timing.median(order),
                    "GB/s",
                    "read bandwidth",
                    timing.read_gb_s(order),
                    timing.share(order, num_bytes),
                    limit if q_len == 1 else None,
                    threads=bench.num_threads,
                    read_gb_s=timing.read_gb_s(order),
                )
            )
        bench.add(
            Figure(
                f"attention.bf16.q{q_len}.vs_torch",
                f"append_attention bf16 kv 4,096, q_len {q_len}: times faster than torch SDPA",
                timing.median("ascending") * 1e3,
                "ms",
                "torch SDPA, GQA",
                timing.median("torch") * 1e3,
                timing.ratio("torch", "ascending"),
                "ratio >= 3.3" if q_len == 5 else None,
                threads=bench.num_threads,
                read_gb_s=timing.read_gb_s(),
            )
        )

    _run_prefixes(bench, generator)


def _run_prefixes(bench: Bench, generator: torch.Generator) -> None:
    prefix_pages, own_pages = PREFIX_LEN // PAGE_SIZE, OWN_LEN // PAGE_SIZE
    pages = prefix_pages + SHARING * own_pages
    caches = [
        torch.randn(pages, PAGE_SIZE, KV_HEADS, HEAD_DIM, generator=generator).bfloat16()
        for _ in range(2)
    ]
    order = torch.randperm(pages, generator=generator).int()
    own = order[prefix_pages:].view(SHARING, own_pages)
    kv_indices = torch.cat([order[:prefix_pages].expand(SHARING, -1), own], dim=1).flatten()
    kv_indptr = torch.arange(SHARING + 1, dtype=torch.int32) * (prefix_pages + own_pages)
    kv_lens = torch.full((SHARING,), PREFIX_LEN + OWN_LEN, dtype=torch.int32)
    prefixes = {
        "prefix_leaders": torch.zeros(1, SHARING, dtype=torch.int32),
        "prefix_lens": torch.full((1, SHARING), PREFIX_LEN, dtype=torch.int32),
    }
    for q_len in (1, 5):
        q = torch.randn(SHARING * q_len, QO_HEADS, HEAD_DIM, generator=generator).bfloat16()
        qo_indptr = torch.arange(SHARING + 1, dtype=torch.int32) * q_len
        out = torch.empty_like(q)
        arguments = (q, *caches, qo_indptr, kv_indptr, kv_indices, kv_lens)
        cases: dict[str, Callable[[], object]] = {
            "flat": partial(append_attention, *arguments, out=out),
            "shared": partial(append_attention, *arguments, out=out, **prefixes),
        }
        timing = bench.alternate(cases, rounds=9, window_s=0.1)
        bench.add(
            Figure(
                f"attention.bf16.q{q_len}.shared_prefix",
                f"append_attention bf16, 16 requests, 2,048 tokens shared, q_len {q_len}: "
                "times faster than with the prefix undeclared",
                timing.median("shared") * 1e3,
                "ms",
                "the prefix undeclared",
                timing.median("flat") * 1e3,
                timing.ratio("flat", "shared"),
                {1: "ratio >= 1.5", 5: "ratio >= 1.0"}[q_len],
                threads=bench.num_threads,
                read_gb_s=timing.read_gb_s(),
            )
        )


def _ours(q: Tensor, q_len: int, caches: list[Tensor], kv_indices: Tensor) -> Callable[[], object]:
    qo_indptr = torch.arange(BATCH + 1, dtype=torch.int32) * q_len
    kv_indptr = torch.arange(BATCH + 1, dtype=torch.int32) * (KV_LEN // PAGE_SIZE)
    kv_lens = torch.full((BATCH,), KV_LEN, dtype=torch.int32)
    out = torch.empty_like(q)
    return lambda: append_attention(q, *caches, qo_indptr, kv_indptr, kv_indices, kv_lens, out=out)


def _torch(q: Tensor, q_len: int, dense: list[Tensor]) -> Callable[[], object]:
    query = q.view(BATCH, q_len, QO_HEADS, HEAD_DIM).transpose(1, 2).contiguous()
    # At one row everything is visible, and torch is asked for its path without a mask.
    mask = None
    if q_len > 1:
        mask = torch.ones(q_len, KV_LEN, dtype=torch.bool).tril(KV_LEN - q_len)
    return lambda: F.scaled_dot_product_attention(query, *dense, attn_mask=mask, enable_gqa=True)


# On a GPU

CUDA_KV_HEADS = 8
# t(8 rows) / t(1 row) by group; both read the same bytes.
ROWS_BARS = {4: "ratio <= 1.1", 8: "ratio <= 1.15"}


@dataclass(frozen=True)
class Load:
    """What is in the cache: requests and their lengths."""

    name: str
    kv_lens: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Of the keys and values of all requests."""
        return 2 * 2 * CUDA_KV_HEADS * HEAD_DIM * sum(self.kv_lens)


def _load(bench: CudaBench, name: str, *kv_lens: int) -> Load:
    return Load(name, bench.pick(kv_lens, tuple(max(16, length // 256) for length in kv_lens[:3])))


def _loads(bench: CudaBench) -> dict[str, Load]:
    skewed = [int(256 * 128 ** (i / 31)) for i in range(32)]  # 256 to 32,768, evenly in log
    return {
        load.name: load
        for load in (
            _load(bench, "b32.4k", *[4096] * 32),
            _load(bench, "b8.32k", *[32768] * 8),
            _load(bench, "b1.4k", 4096),
            _load(bench, "b1.32k", 32768),
            _load(bench, "b32.skewed", *skewed),
        )
    }


class Cache:
    """Keys and values of a load, as often as it takes to be cold, with shuffled pages."""

    def __init__(self, bench: CudaBench, load: Load, page_size: int = PAGE_SIZE) -> None:
        self.load, self.page_size = load, page_size
        num_pages = [-(-length // page_size) for length in load.kv_lens]
        sets = bench.copies(load.num_bytes)
        shape = (sets * sum(num_pages), page_size, CUDA_KV_HEADS, HEAD_DIM)
        self.k, self.v = bench.randn(*shape), bench.randn(*shape)
        order = torch.randperm(shape[0], generator=torch.Generator().manual_seed(1))
        self.kv_indices = [bench.ints(part) for part in order.chunk(sets)]
        self.kv_indptr = bench.ints([0, *torch.tensor(num_pages).cumsum(0).tolist()])
        self.kv_lens = bench.ints(load.kv_lens)
        last = [(length - 1) % page_size + 1 for length in load.kv_lens]
        self.kv_last_page_len = bench.ints(last)

    def queries(self, bench: CudaBench, q_len: int, group: int) -> tuple[Tensor, Tensor]:
        """q and qo_indptr of q_len rows a request."""
        batch = len(self.load.kv_lens)
        q = bench.randn(batch * q_len, group * CUDA_KV_HEADS, HEAD_DIM)
        return q, bench.ints(torch.arange(batch + 1) * q_len)

    def ours(self, q: Tensor, qo_indptr: Tensor) -> list[Call]:
        """A call for each set of pages."""
        out = torch.empty_like(q)

        def call(kv_indices: Tensor) -> Call:
            arguments = (qo_indptr, self.kv_indptr, kv_indices, self.kv_lens)
            return lambda: append_attention(q, self.k, self.v, *arguments, out=out)

        return [call(kv_indices) for kv_indices in self.kv_indices]


def run_attention_cuda(bench: CudaBench) -> None:
    """Share of the read line by load, group and rows; what 8 rows cost over 1."""
    for load in _loads(bench).values():
        for page_size in (16, 64) if load.name == "b32.4k" else (16,):
            cache = Cache(bench, load, page_size)
            name = load.name if page_size == 16 else f"{load.name}.page{page_size}"
            rows = (1, 2, 4, 5, 8) if name == "b32.4k" else (1, 5, 8)
            for group in (4, 8):
                cases = {
                    f"q{q_len}": cache.ours(*cache.queries(bench, q_len, group)) for q_len in rows
                }
                _figures(bench, bench.time(cases), f"attention.{name}.g{group}", load, rows, group)
            del cache


def _figures(
    bench: CudaBench,
    timings: Sequence[Timing],
    prefix: str,
    load: Load,
    rows: Sequence[int],
    group: int,
) -> None:
    for q_len in rows:
        what = f"append_attention bf16 {load.name}, group {group}, {q_len} rows"
        case, id = f"q{q_len}", f"{prefix}.q{q_len}"
        if load.name == "b1.4k":
            bar = bench.on("H200", "value <= 12") if q_len <= 8 and group == 4 else None
            bench.add(time_figure(timings, case, id, what, bar=bar))
            continue
        big = load.num_bytes >= 128 << 20 and len(load.kv_lens) > 1
        bar = "ratio >= 0.85" if big else None
        what += ": share of read bandwidth"
        bench.add(bandwidth_figure(timings, case, id, what, load.num_bytes, bar))
    bench.add(
        time_figure(
            timings,
            "q8",
            f"{prefix}.q8_over_q1",
            f"append_attention bf16 {load.name}, group {group}: time of 8 rows over that of 1",
            over=("q1", "1 row"),
            bar=ROWS_BARS[group],
        )
    )


def run_attention_peers_cuda(bench: CudaBench) -> None:
    """Ours and FlashInfer's fastest path (decode on tensor cores, prefill fa2 and fa3), in turn."""
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device=bench.device)
    loads = _loads(bench)
    for name in ("b32.4k", "b1.4k", "b8.32k", "b32.skewed"):
        cache = Cache(bench, loads[name])
        for group in (4, 8) if name == "b32.4k" else (4,):
            for q_len in (1, 5, 8) if name == "b32.4k" else (1, 5):
                q, qo_indptr = cache.queries(bench, q_len, group)
                cases = {"ours": cache.ours(q, qo_indptr)}
                labels = flashinfer_peer.labels(q_len)
                for label in labels:
                    if calls := flashinfer_peer.attention(label, workspace, cache, q, qo_indptr):
                        cases[label] = calls
                bar = "ratio >= 1.2" if name == "b32.skewed" else "ratio >= 1"
                bench.add(
                    time_figure(
                        bench.time(cases),
                        "ours",
                        f"attention_peers.{name}.g{group}.q{q_len}",
                        f"append_attention bf16 {name}, group {group}, {q_len} rows: times faster "
                        "than FlashInfer's fastest path",
                        {label: f"FlashInfer {label}" for label in cases if label != "ours"},
                        bar,
                    )
                )
        del cache


# Leaves and chunks of other sizes. The product's never depend on the load; a schedule that is free
# to choose would take the fastest of these, so that is what exactness is priced against.
SPLITS_HEADER = "attention/attention_plan.cuh"
FREE_SPLITS = {
    "leaf512": {"kLeafTokens": 512, "kChunkLeaves": 4},
    "leaf2048": {"kLeafTokens": 2048, "kChunkLeaves": 1},
    "chunk512": {"kLeafTokens": 256, "kChunkLeaves": 2},
    "chunk8192": {"kLeafTokens": 2048, "kChunkLeaves": 4},
}


def run_exactness_cuda(bench: CudaBench) -> None:
    """The fixed leaves and chunks against the fastest of other sizes, chosen for each load."""
    modules = {"leaf512": attention._C} if bench.rehearsal else build(FREE_SPLITS, SPLITS_HEADER)
    for load in _loads(bench).values():
        cache = Cache(bench, load)
        for q_len in (1, 5):
            q, qo_indptr = cache.queries(bench, q_len, 4)
            cases = {"ours": cache.ours(q, qo_indptr)}
            for name, module in modules.items():
                calls = [_with(module, call) for call in cache.ours(q, qo_indptr)]
                if _runs(bench, name, calls[0]):
                    cases[name] = calls
            timings = bench.time(cases)
            best = min(cases, key=lambda name: seconds(timings, name))
            bar = "ratio <= 1.05" if len(load.kv_lens) > 1 else "ratio <= 1.1"
            bench.add(
                time_figure(
                    timings,
                    "ours",
                    f"exactness.{load.name}.q{q_len}",
                    f"append_attention bf16 {load.name}, group 4, {q_len} rows: time over that of "
                    "the best split for this load",
                    over=(best, best),
                    bar=bar,
                )
            )
        del cache


def _runs(bench: CudaBench, name: str, call: Call) -> bool:
    """Whether a variant can be launched: its tables may be too large for a block."""
    try:
        call()
        bench.synchronize()
    except RuntimeError as error:
        print(f"  no {name}: {error}", flush=True)
        return False
    return True


def _with(module: ModuleType, call: Call) -> Call:
    """The call with another compiled module; a graph keeps what was captured."""

    def run() -> None:
        before = attention._C
        attention._C = module  # type: ignore[misc, assignment]
        try:
            call()
        finally:
            attention._C = before  # type: ignore[misc]

    return run
