# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's paths over a paged cache, planned before they are timed, with given workspaces.

Each path is a function from a `Case` to the calls to time and the tensor that they write. Every
plan reads lengths on the host, so it cannot be part of a captured step.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from bench.peers.flashinfer_peer import Call, Refused, given, made, named, working

WORKSPACE_BYTES = 128 << 20


class Cache(Protocol):
    """A case's keys and values, with enough sets of pages that each call reads cold memory."""

    k: Tensor
    v: Tensor
    page_size: int
    batch: int
    kv_indices: list[Tensor]
    kv_indptr: Tensor
    kv_lens: Tensor
    kv_last_page_len: Tensor


@dataclass(frozen=True)
class Case:
    """Queries over a cache, each request with `q_len` rows, and the workspaces of the peer.

    Attributes:
        workspace: [bytes], uint8: for the planned wrappers, which use it in turn.
        zeros: the same for paths that keep counters in it; zero before the first call.
    """

    cache: Cache
    q: Tensor
    qo_indptr: Tensor
    q_len: int
    workspace: Tensor
    zeros: Tensor

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, KV heads, head_dim."""
        return self.q.shape[1], self.cache.k.shape[2], self.q.shape[2]

    @property
    def types(self) -> dict[str, torch.dtype]:
        """The dtypes, under the names of every plan."""
        return {"q_data_type": self.q.dtype, "kv_data_type": self.cache.k.dtype}


Path = Callable[[Case], tuple[list[Call], Tensor]]


def workspaces(device: torch.device, num_bytes: int = WORKSPACE_BYTES) -> tuple[Tensor, Tensor]:
    """Allocate both workspaces of a `Case`: an uninitialized one, and one of zeros."""
    workspace = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    return workspace, torch.zeros(num_bytes, dtype=torch.uint8, device=device)


def decode(case: Case) -> tuple[list[Call], Tensor]:
    """Plan the decode wrapper on tensor cores; one row per request."""
    if case.q_len != 1:
        raise Refused("decodes one row a request")
    cache, out = case.cache, torch.empty_like(case.q)
    wrapper_class = named("BatchDecodeWithPagedKVCacheWrapper")

    def planned(pages: Tensor) -> Call:
        wrapper = wrapper_class(case.workspace, "NHD", use_tensor_cores=True)
        paged = (cache.kv_indptr, pages, cache.kv_last_page_len)
        wrapper.plan(*paged, *case.heads, cache.page_size, **case.types)
        return lambda: wrapper.run(case.q, (cache.k, cache.v), out=out)

    return [planned(pages) for pages in cache.kv_indices], out


def prefill(backend: str) -> Path:
    """Return the path of the append wrapper with one of its kernels: fa2 or fa3."""

    def path(case: Case) -> tuple[list[Call], Tensor]:
        cache, out = case.cache, torch.empty_like(case.q)
        wrapper_class = named("BatchPrefillWithPagedKVCacheWrapper")

        def planned(pages: Tensor) -> Call:
            wrapper = wrapper_class(case.workspace, "NHD", backend=backend)
            paged = (cache.kv_indptr, pages, cache.kv_last_page_len)
            wrapper.plan(
                case.qo_indptr, *paged, *case.heads, cache.page_size, causal=True, **case.types
            )
            return lambda: wrapper.run(case.q, (cache.k, cache.v), out=out)

        return [planned(pages) for pages in cache.kv_indices], out

    return path


def batch_attention(case: Case) -> tuple[list[Call], Tensor]:
    """Plan the persistent kernel for mixed batches; each object has its own workspace."""
    cache, (num_qo_heads, num_kv_heads, head_dim) = case.cache, case.heads
    out = torch.empty_like(case.q)
    lse = torch.empty(case.q.shape[:2], dtype=torch.float32, device=case.q.device)
    wrapper_class = named("BatchAttention")

    def planned(pages: Tensor) -> Call:
        wrapper = wrapper_class(kv_layout="NHD")
        wrapper.plan(
            case.qo_indptr,
            cache.kv_indptr,
            pages,
            cache.kv_lens,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            head_dim,
            cache.page_size,
            causal=True,
            **case.types,
        )
        buffers = given(wrapper.run, out=out, lse=lse)
        if "out" not in buffers:
            raise Refused("this version writes no given output")
        return lambda: wrapper.run(case.q, (cache.k, cache.v), **buffers)

    return [planned(pages) for pages in cache.kv_indices], out


def xqa(case: Case) -> tuple[list[Call], Tensor]:
    """Plan the decode kernel that takes several rows per request under a packed mask."""
    cache, out = case.cache, torch.empty_like(case.q)
    run = named("decode.xqa_batch_decode_with_kv_cache")
    arguments = given(
        run,
        max_seq_len=int(cache.kv_lens.max()),
        bmm1_scale=1.0 / math.sqrt(case.q.shape[2]),
        bmm2_scale=1.0,
        kv_layout="NHD",
        q_len_per_req=case.q_len,
        mask=packed_causal_mask(cache.batch, case.q_len, case.q.device),
        out=out,
    )
    if case.q_len > 1 and not {"q_len_per_req", "mask"} <= arguments.keys():
        raise Refused("this version decodes one row a request")
    lens = cache.kv_lens.view(torch.uint32)

    def planned(pages: Tensor) -> Call:
        table = block_table(cache.kv_indptr, pages)
        return lambda: run(case.q, (cache.k, cache.v), case.zeros, table, lens, **arguments)

    return [planned(pages) for pages in cache.kv_indices], out


def packed_causal_mask(batch: int, q_len: int, device: torch.device) -> Tensor | None:
    """Return which of a request's new rows each of them sees, low bits first.

    Returns:
        [batch, q_len, words], uint16, an even number of words; None for one row, which needs none.
    """
    if q_len == 1:
        return None
    width = -(-q_len // 32) * 32
    sees = torch.ones(q_len, width, dtype=torch.int64).tril()
    words = (sees.view(q_len, -1, 16) << torch.arange(16)).sum(-1).to(torch.uint16)
    return words.expand(batch, -1, -1).contiguous().to(device)


def block_table(kv_indptr: Tensor, pages: Tensor) -> Tensor:
    """Return [batch, most pages], int32, from the flat page list; padded with 0."""
    ends = kv_indptr.tolist()
    counts = [end - start for start, end in pairwise(ends)]
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32, device=pages.device)
    for row, (start, count) in enumerate(zip(ends, counts, strict=False)):
        table[row, :count] = pages[start : start + count]
    return table


PATHS: dict[str, Path] = {
    "decode TC": decode,
    "fa2": prefill("fa2"),
    "fa3": prefill("fa3"),
    "BatchAttention": batch_attention,
    "XQA": xqa,
}


def attention(label: str, case: Case, wanted: Tensor) -> list[Call]:
    """Return a path's calls, one per set of pages; the first result is compared with `wanted`.

    Raises:
        Refused: this path does not run here, or not on this case.
    """
    return checked(PATHS[label], case, wanted)


def checked(path: Path, case: Case, wanted: Tensor) -> list[Call]:
    """Return the calls of a path; raise Refused if the first result is not like `wanted`."""
    written: list[Tensor] = []

    def build() -> list[Call]:
        calls, out = path(case)
        written.append(out)
        return calls

    calls = made(build)
    working(calls, written[0], wanted)
    return calls
