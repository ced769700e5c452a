# SPDX-License-Identifier: Apache-2.0
"""Cost of attention over trees of drafts, compared with chains of equal size.

The op: four requests of 4,096 tokens, each verifying 16 nodes, bf16, 16 query and 8 KV heads of
size 128. `copy_kv` and `append_attention` over the chains of a tree are compared with
`append_attention` over one chain. The host: `tree_chains` for 16 such requests.
"""

from collections.abc import Callable
from functools import partial

import torch
from specops import batching
from specops.attention import (
    PagedBatch,
    PagedKv,
    PrefixTensors,
    append_attention,
    attention_workspace_size,
    copy_kv,
)
from specops.batching import BatchIndices, TreeChains
from torch import Tensor

from bench.common import Bench, Figure

QO_HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, LEAF = 16, 8, 128, 16, 64
BATCH, KV_LEN, HOST_BATCH = 4, 4096, 16
# Parents of 16 nodes: a path with an alternative at every other token; and a binary tree.
TREES = {
    "likely_path": [-1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 7, 5, 3, 1, 0, -1],
    "binary": [-1, 0, 1, 2, 2, 1, 5, 0, 7, 7, -1, 10, 11, 11, 10, 14],
}
CHAIN = list(range(-1, 15))


def run_trees(bench: Bench) -> None:
    """Measure attention over trees, and the host's part."""
    for name, parents in TREES.items():
        cases = {"tree": _attention(parents), "chain": _attention(CHAIN)}
        timing = bench.alternate(cases, rounds=15, window_s=0.06)
        count = 1 + sum(parent != node - 1 for node, parent in enumerate(parents))
        bench.add(
            Figure(
                f"trees.attention.{name}",
                f"attention of {BATCH} trees of 16 nodes in {count} chains, {KV_LEN:,} tokens "
                "before: times as long as of chains of 16",
                timing.median("tree") * 1e3,
                "ms",
                "chains",
                timing.median("chain") * 1e3,
                timing.ratio("tree", "chain"),
                "ratio <= 1.1",
                threads=bench.num_threads,
                read_gb_s=timing.read_gb_s(),
            )
        )
    _add_host(bench)


def _requests(parents: list[int], batch: int) -> dict[str, Tensor]:
    """Return the `tree_chains` arguments of a batch whose requests all have the same tree."""
    nodes, root = len(parents), KV_LEN - 1
    pages = -(-(KV_LEN + nodes) // PAGE_SIZE)
    order = torch.randperm(batch * (pages + 2 * nodes), generator=_seeded()).int()
    return {
        "parents": torch.tensor([parents] * batch, dtype=torch.int32),
        "num_draft_tokens": torch.full((batch,), nodes, dtype=torch.int32),
        "qo_lens": torch.full((batch,), 1 + nodes, dtype=torch.int32),
        "kv_lens": torch.full((batch,), root + 1 + nodes, dtype=torch.int32),
        "kv_indptr": torch.arange(batch + 1, dtype=torch.int32) * pages,
        "kv_indices": order[: batch * pages],
        "spare_pages": order[batch * pages :],
    }


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _attention(parents: list[int]) -> Callable[[], object]:
    """Return a call of one layer's attention over a batch of trees, with the KV copies it needs."""
    requests = _requests(parents, BATCH)
    chains = batching.tree_chains(**requests, page_size=PAGE_SIZE)
    count, copies = int(chains.chain_indptr[-1]), int((chains.to_slots >= 0).sum())
    rows = BATCH * (1 + len(parents))
    indices = batching.prepare_batch(
        chains.qo_lens,
        chains.kv_lens,
        torch.zeros_like(chains.qo_lens),
        chains.kv_indptr,
        chains.kv_indices,
        page_size=PAGE_SIZE,
        out=BatchIndices.empty(len(chains.qo_lens), total_rows=rows, num_output_rows=0),
    )
    num_pages = len(requests["kv_indices"]) + len(requests["spare_pages"])
    shape, generator = (num_pages, PAGE_SIZE, KV_HEADS, HEAD_DIM), _seeded()
    caches = [torch.randn(shape, generator=generator).bfloat16() for _ in range(2)]
    q = torch.randn(rows, QO_HEADS, HEAD_DIM, generator=generator).bfloat16()
    prefixes = None
    if count > BATCH:
        leaders = torch.repeat_interleave(chains.chain_indptr[:-1], chains.chain_indptr.diff())
        lens = torch.full((1, count), (KV_LEN - 1) // LEAF * LEAF)
        prefixes = PrefixTensors(leaders[None].int(), lens.int())
    floats = attention_workspace_size(q.shape, caches[0].shape, len(chains.kv_indices), count)
    call = partial(
        append_attention,
        q,
        PagedKv(*caches),
        PagedBatch(
            indices.qo_indptr[: count + 1],
            chains.kv_indptr[: count + 1],
            chains.kv_indices,
            chains.kv_lens[:count],
        ),
        prefixes=prefixes,
        out=torch.empty_like(q),
        workspace=torch.empty(floats),
    )
    slots = chains.from_slots[:copies], chains.to_slots[:copies]

    def run() -> None:
        if copies:
            copy_kv(*caches, *slots)
        call()

    return run


def _add_host(bench: Bench) -> None:
    """Time `tree_chains`, the host's part of a step."""
    requests = _requests(TREES["likely_path"], HOST_BATCH)
    found = batching.tree_chains(**requests, page_size=PAGE_SIZE)
    sizes = (len(found.qo_lens), len(found.kv_indices), len(found.from_slots))
    out = TreeChains.empty(HOST_BATCH, chains=sizes[0], pages=sizes[1], copies=sizes[2])
    call = partial(batching.tree_chains, **requests, page_size=PAGE_SIZE, out=out)
    timing = bench.alternate({"host": call}, rounds=9)
    what = f"tree_chains, {HOST_BATCH} requests of 16 nodes, {KV_LEN:,} tokens before"
    bench.add(Figure("trees.host", what, timing.median("host") * 1e6, "us"))
