# SPDX-License-Identifier: Apache-2.0
"""Latent attention (MLA) over a paged cache in bf16, against torch's attention on the same rows.

Tokens have 576 elements. Decoding and verification run with 16 heads (DeepSeek-V2-Lite, or an
eighth of V3) and with 128. torch gets each head's keys and values, expanded in advance as the
models define: 640 flops per row, head and token, and 320 elements to read per head. Its fast kernel
requires values as wide as keys, so values are padded, as is usual. Our absorbed form takes 2,176
flops and reads 576 elements for all heads together, so arithmetic limits it.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from specops.attention import (
    PagedBatch,
    PagedKv,
    append_attention,
    attention_workspace_size,
)

from bench.common import Bench, Figure
from bench.limits import add_share, instructions

LATENT, KEY, NOPE, VALUE = 512, 576, 128, 128
PAGE_SIZE, KV_LEN = 16, 4096
SIZES = ((16, 4), (128, 1))  # (heads, requests)
FLOPS = 2 * (KEY + LATENT)  # flops per row, head and token


def run_latent(bench: Bench) -> None:
    """Time q_len 1 and 5, each in turn with torch's SDPA on expanded keys and values in bf16."""
    for heads, batch in SIZES:
        for q_len in (1, 5):
            _run(bench, heads, batch, q_len)


def _run(bench: Bench, heads: int, batch: int, q_len: int) -> None:
    cases = {
        "ours": _ours(heads, batch, q_len),
        "torch": _torch(heads, batch, q_len),
    }
    with torch.inference_mode():
        timing = bench.alternate(cases, rounds=7, window_s=0.1)
    what = f"latent attention bf16 kv {KV_LEN:,}, {heads} heads, batch {batch}, q_len {q_len}"
    flops = FLOPS * heads * batch * q_len * KV_LEN
    num_bytes = 2 * KEY * batch * KV_LEN
    numbers = num_bytes / 2
    add_share(
        bench,
        f"latent.h{heads}.q{q_len}.rate",
        f"{what}: share of read, {num_bytes * 1e-6:.0f} MB",
        timing,
        "ours",
        num_bytes,
        instructions(bench, "bf16", numbers, flops / 2 / numbers),
        rate=(flops * 1e-9, "GFLOP/s"),
    )
    bench.add(
        Figure(
            f"latent.h{heads}.q{q_len}.vs_torch",
            f"{what}: times faster than torch SDPA on expanded keys and values",
            timing.median("ours") * 1e3,
            "ms",
            "torch SDPA, expanded",
            timing.median("torch") * 1e3,
            timing.ratio("torch", "ours"),
            threads=bench.num_threads,
            read_gb_s=timing.read_gb_s(),
        )
    )


def _ours(heads: int, batch: int, q_len: int) -> Callable[[], object]:
    pages = batch * -(-KV_LEN // PAGE_SIZE)
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(pages, PAGE_SIZE, 1, KEY, generator=generator).bfloat16()
    q = torch.randn(batch * q_len, heads, KEY, generator=generator).bfloat16()
    qo_indptr = torch.arange(batch + 1, dtype=torch.int32) * q_len
    kv_indptr = torch.arange(batch + 1, dtype=torch.int32) * (pages // batch)
    kv_indices = torch.arange(pages, dtype=torch.int32)
    kv_lens = torch.full((batch,), KV_LEN, dtype=torch.int32)
    out = q.new_empty(*q.shape[:2], LATENT)
    size = attention_workspace_size(q.shape, cache.shape, pages, batch)
    where = (PagedKv(cache), PagedBatch(qo_indptr, kv_indptr, kv_indices, kv_lens))
    options = {"sm_scale": (NOPE + KEY - LATENT) ** -0.5, "out": out}
    workspace = torch.empty(size)
    return lambda: append_attention(q, *where, workspace=workspace, **options)


def _torch(heads: int, batch: int, q_len: int) -> Callable[[], object]:
    head_dim = NOPE + KEY - LATENT
    q = torch.randn(batch, heads, q_len, head_dim).bfloat16()
    keys = torch.randn(batch, heads, KV_LEN, head_dim).bfloat16()
    values = F.pad(torch.randn(batch, heads, KV_LEN, VALUE).bfloat16(), (0, head_dim - VALUE))
    mask = None
    if q_len > 1:
        mask = torch.ones(q_len, KV_LEN, dtype=torch.bool).tril(KV_LEN - q_len)
    return lambda: F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
