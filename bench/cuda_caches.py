# SPDX-License-Identifier: Apache-2.0
"""Paged caches of the attention benchmarks on a GPU, and calls of `append_attention` over them.

Caches have 8 KV heads of 128, in bf16 or in 8 bits with scales. A case has as many shuffled sets of
pages as cold reads need. Outputs and workspace are allocated beforehand, so that a call consists of
the op's kernels alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from specops.attention import (
    PagedBatch,
    PagedKv,
    PrefixTensors,
    append_attention,
    attention_workspace_size,
)
from torch import Tensor

from bench.cuda import Call, CudaBench

KV_HEADS, HEAD_DIM, PAGE_SIZE = 8, 128, 16
TOKEN_BYTES = 2 * 2 * KV_HEADS * HEAD_DIM  # keys and values of one token
TOKEN_BYTES_8BIT = 2 * KV_HEADS * (HEAD_DIM + 4)  # one token with its scales
BIG_BYTES = 128 << 20  # loads with more bytes of keys and values have a bandwidth bar


@dataclass(frozen=True)
class Load:
    """Content of a cache: the lengths of its requests."""

    name: str
    kv_lens: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the keys and values of all requests."""
        return TOKEN_BYTES * sum(self.kv_lens)

    @property
    def is_big(self) -> bool:
        """True if reading the cache takes so long that bandwidth matters most."""
        return self.num_bytes >= BIG_BYTES


def load(bench: CudaBench, name: str, *kv_lens: int) -> Load:
    """Return a load of requests with these lengths.

    In a rehearsal, only the first three requests remain, with a 256th of their lengths.
    """
    return Load(name, bench.pick(kv_lens, tuple(max(16, length // 256) for length in kv_lens[:3])))


def skewed_lens() -> list[int]:
    """Return 32 lengths from 256 to 32,768, evenly spaced in their logarithm."""
    return [int(256 * 128 ** (i / 31)) for i in range(32)]


def loads(bench: CudaBench) -> dict[str, Load]:
    """Return the loads of the figures, by name."""
    found = (
        load(bench, "b1.4k", 4096),
        load(bench, "b1.32k", 32768),
        load(bench, "b8.4k", *[4096] * 8),
        load(bench, "b32.4k", *[4096] * 32),
        load(bench, "b8.32k", *[32768] * 8),
        load(bench, "b32.skewed", *skewed_lens()),
    )
    return {one.name: one for one in found}


class Cache:
    """Keys and values of a load, in as many copies as cold reads need, with shuffled pages."""

    def __init__(
        self,
        bench: CudaBench,
        load: Load,
        page_size: int = PAGE_SIZE,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.load, self.page_size, self.device = load, page_size, bench.device
        self.batch = len(load.kv_lens)
        num_pages = [-(-length // page_size) for length in load.kv_lens]
        sets = bench.copies(load.num_bytes)
        shape = (sets * sum(num_pages), page_size, KV_HEADS, HEAD_DIM)
        self.k, self.v = bench.randn(*shape), bench.randn(*shape)
        self.scales: list[Tensor] = []
        if dtype != torch.bfloat16:
            self.k, self.v = ((x * 30).clamp(-120, 120).to(dtype) for x in (self.k, self.v))
            self.scales = [bench.randn(*shape[:3]).float().abs() / 30 for _ in range(2)]
        order = torch.randperm(shape[0], generator=torch.Generator().manual_seed(1))
        self.kv_indices = [bench.ints(part) for part in order.chunk(sets)]
        self.kv_indptr = bench.ints([0, *torch.tensor(num_pages).cumsum(0).tolist()])
        self.kv_lens = bench.ints(load.kv_lens)
        last = [(length - 1) % page_size + 1 for length in load.kv_lens]
        self.kv_last_page_len = bench.ints(last)

    def queries(self, bench: CudaBench, q_len: int, group: int) -> tuple[Tensor, Tensor]:
        """Return q and qo_indptr with q_len rows per request."""
        q = bench.randn(self.batch * q_len, group * KV_HEADS, HEAD_DIM)
        return q, bench.ints(torch.arange(self.batch + 1) * q_len)

    def workspace(self, q: Tensor, share: float = 1.0) -> Tensor:
        """Return a workspace of a fraction of the default size; a small one limits splitting."""
        floats = attention_workspace_size(
            q.shape, self.k.shape, self.kv_indices[0].shape[0], self.batch, self.device
        )
        return torch.zeros(max(1, int(share * floats)), dtype=torch.float32, device=self.device)

    def ours(
        self,
        q: Tensor,
        qo_indptr: Tensor,
        *,
        workspace: Tensor | None = None,
        kv_lens: Tensor | None = None,
        kv_indices: Sequence[Tensor] | None = None,
        prefixes: PrefixTensors | None = None,
    ) -> list[Call]:
        """Return a call per set of pages; all of them write to one output."""
        out = torch.empty_like(q)
        memory = self.workspace(q) if workspace is None else workspace
        cache = PagedKv(self.k, self.v, *self.scales)
        lens = self.kv_lens if kv_lens is None else kv_lens
        return [
            partial(
                append_attention,
                q,
                cache,
                PagedBatch(qo_indptr, self.kv_indptr, pages, lens),
                prefixes=prefixes,
                out=out,
                workspace=memory,
            )
            for pages in kv_indices or self.kv_indices
        ]
