# SPDX-License-Identifier: Apache-2.0
"""`append_attention` over a paged cache in bf16, against the run's read bandwidth.

On a CPU: batch 8, 16 query and 8 KV heads of 128, kv 4,096. Bytes are those of the keys and values:
128 MiB, more than any CPU cache of such machines. 8-bit caches are compared with bf16 caches of the
same tokens: 8 requests, and one request of 16,384 tokens.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from specops.attention import PagedBatch, PagedKv, append_attention
from torch import Tensor

from bench.common import Bench, Figure
from bench.limits import add_share, instructions

BATCH, QO_HEADS, KV_HEADS, HEAD_DIM, KV_LEN, PAGE_SIZE = 8, 16, 8, 128, 4096, 16
# 8-bit caches: batch and tokens per request.
SIZES_8BIT = ((8, 4096), (1, 16384))


def run_attention(bench: Bench) -> None:
    """Time q_len 1 and 5 with ascending and shuffled pages, and torch's SDPA at equal lengths."""
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
            add_share(
                bench,
                f"attention.bf16.q{q_len}.{order}",
                f"append_attention bf16 kv 4,096, q_len {q_len}, pages {order}: share of read",
                timing,
                order,
                num_bytes,
                instructions(bench, "bf16", num_bytes / 2, q_len * QO_HEADS / KV_HEADS),
                bar=limit if q_len == 1 else None,
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
    for batch, kv_len in SIZES_8BIT:
        for q_len in (1, 5):
            _run_8bit(bench, batch, kv_len, q_len)


def _run_8bit(bench: Bench, batch: int, kv_len: int, q_len: int) -> None:
    """Time int8 and float8_e4m3fn caches in turn with bf16."""
    pages = batch * kv_len // PAGE_SIZE
    generator = torch.Generator().manual_seed(0)
    slots = (pages, PAGE_SIZE, KV_HEADS)
    q = torch.randn(batch * q_len, QO_HEADS, HEAD_DIM, generator=generator).bfloat16()
    paged = PagedBatch(
        torch.arange(batch + 1, dtype=torch.int32) * q_len,
        torch.arange(batch + 1, dtype=torch.int32) * (kv_len // PAGE_SIZE),
        torch.arange(pages, dtype=torch.int32),
        torch.full((batch,), kv_len, dtype=torch.int32),
    )
    cases: dict[str, Callable[[], object]] = {}
    for name, dtype in (("bf16", None), ("int8", torch.int8), ("fp8", torch.float8_e4m3fn)):
        caches = [
            torch.randn(*slots, HEAD_DIM, generator=generator).bfloat16()
            if dtype is None
            else torch.randint(-120, 120, (*slots, HEAD_DIM), generator=generator)
            .to(torch.int8)
            .view(dtype)
            for _ in range(2)
        ]
        scales = [] if dtype is None else [torch.full(slots, 0.01) for _ in range(2)]
        cache = PagedKv(*caches, *scales)
        cases[name] = partial(append_attention, q, cache, paged, out=torch.empty_like(q))
    timing = bench.alternate(cases, rounds=9, window_s=0.1)
    for name in ("int8", "fp8"):
        is_goal = (name, kv_len, q_len) == ("int8", 16384, 1)
        bench.add(
            Figure(
                f"attention.{name}.kv{kv_len}.q{q_len}.vs_bf16",
                f"append_attention {name} cache, batch {batch}, kv {kv_len:,}, q_len {q_len}: "
                "times faster than bf16",
                timing.median(name) * 1e3,
                "ms",
                "bf16 cache",
                timing.median("bf16") * 1e3,
                timing.ratio("bf16", name),
                "ratio >= 1.5" if is_goal else None,
                threads=bench.num_threads,
                read_gb_s=timing.read_gb_s(),
            )
        )


def _ours(q: Tensor, q_len: int, caches: list[Tensor], kv_indices: Tensor) -> Callable[[], object]:
    qo_indptr = torch.arange(BATCH + 1, dtype=torch.int32) * q_len
    kv_indptr = torch.arange(BATCH + 1, dtype=torch.int32) * (KV_LEN // PAGE_SIZE)
    kv_lens = torch.full((BATCH,), KV_LEN, dtype=torch.int32)
    cache, out = PagedKv(*caches), torch.empty_like(q)
    paged = PagedBatch(qo_indptr, kv_indptr, kv_indices, kv_lens)
    return lambda: append_attention(q, cache, paged, out=out)


def _torch(q: Tensor, q_len: int, dense: list[Tensor]) -> Callable[[], object]:
    query = q.view(BATCH, q_len, QO_HEADS, HEAD_DIM).transpose(1, 2).contiguous()
    # One row attends to everything, so torch can use its path without a mask.
    mask = None
    if q_len > 1:
        mask = torch.ones(q_len, KV_LEN, dtype=torch.bool).tril(KV_LEN - q_len)
    return lambda: F.scaled_dot_product_attention(query, *dense, attn_mask=mask, enable_gqa=True)
