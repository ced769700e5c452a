# SPDX-License-Identifier: Apache-2.0
"""FlashInfer on the memory of our own cases, in this process: both are timed in one run, in turn.

It compiles its kernels at first use, which takes minutes. Whatever fails is said and left out;
where the package is not installed nothing is compared.
"""

from collections.abc import Callable
from functools import cache as cached
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

Call = Callable[[], object]


class Cache(Protocol):
    """A case's keys and values: buffers for as many calls as it takes to be cold."""

    k: Tensor
    v: Tensor
    page_size: int
    kv_indices: list[Tensor]
    kv_indptr: Tensor
    kv_last_page_len: Tensor


# Torch's generator cannot be asked while a graph is captured.
RANDOM = {"seed": 1, "offset": 0}


@cached
def module() -> ModuleType | None:
    """The package, or None and a line that says why."""
    try:
        import flashinfer
    except Exception as error:  # it can fail on any of its own needs
        print(f"  no FlashInfer: {type(error).__name__}: {error}", flush=True)
        return None
    return flashinfer  # type: ignore[no-any-return]


def labels(q_len: int) -> list[str]:
    """Its paths over a paged cache; decoding takes one row."""
    if module() is None:
        return []
    return (["decode TC"] if q_len == 1 else []) + ["prefill fa2", "prefill fa3"]


def attention(
    label: str, workspace: Tensor, cache: Cache, q: Tensor, qo_indptr: Tensor
) -> list[Call]:
    """A planned call for each set of pages; none if this path does not run here."""
    try:
        calls = [
            _planned(label, workspace, cache, q, qo_indptr, pages) for pages in cache.kv_indices
        ]
    except Exception as error:
        return _refused(label, error)
    return _working(label, calls)


def _working(what: str, calls: list[Call]) -> list[Call]:
    """The calls, if the first of them runs (kernels are compiled then) and can be captured."""
    try:
        calls[0]()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                calls[0]()
    except Exception as error:
        return _refused(what, error)
    return calls


def _refused(what: str, error: Exception) -> list[Call]:
    print(f"  no FlashInfer {what}: {type(error).__name__}: {str(error)[:500]}", flush=True)
    return []


def _planned(
    label: str, workspace: Tensor, cache: Cache, q: Tensor, qo_indptr: Tensor, pages: Tensor
) -> Call:
    flashinfer: Any = module()
    heads = (q.shape[1], cache.k.shape[2], q.shape[2], cache.page_size)
    paged = (cache.kv_indptr, pages, cache.kv_last_page_len)
    types = {"q_data_type": q.dtype, "kv_data_type": cache.k.dtype}
    if label == "decode TC":
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=True
        )
        wrapper.plan(*paged, *heads, **types)
    else:
        backend = label.removeprefix("prefill ")
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)
        wrapper.plan(qo_indptr, *paged, *heads, causal=True, **types)
    out = torch.empty_like(q)
    return lambda: wrapper.run(q, (cache.k, cache.v), out=out)


def sampling(what: str, logits: list[Tensor], top_k: int, top_p: float) -> list[Call]:
    """Top-k and top-p sampling of every row; none if it does not run here."""
    flashinfer: Any = module()
    if flashinfer is None:
        return []
    from flashinfer import sampling as ops

    def call(rows: Tensor) -> Call:
        if what == "top-k top-p":
            return lambda: ops.top_k_top_p_sampling_from_logits(rows, top_k, top_p, **RANDOM)
        return lambda: ops.top_p_sampling_from_probs(ops.softmax(rows), top_p, **RANDOM)

    return _working(what, [call(rows) for rows in logits])


def chain_verification(
    logits: list[Tensor], drafts: Tensor, top_p: float, draft_probs: Tensor
) -> list[Call]:
    """Softmax, top-p renormalisation and chain verification: its pipeline of one step."""
    flashinfer: Any = module()
    if flashinfer is None:
        return []
    from flashinfer import sampling as ops

    batch, num_drafts = drafts.shape

    def call(rows: Tensor) -> Call:
        def run() -> object:
            probs = ops.top_p_renorm_probs(ops.softmax(rows), top_p)
            target = probs.view(batch, num_drafts + 1, -1)
            return ops.chain_speculative_sampling(draft_probs, drafts, target, **RANDOM)

        return run

    return _working("chain verification", [call(rows) for rows in logits])
