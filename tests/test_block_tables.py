# SPDX-License-Identifier: Apache-2.0
"""Dense block tables work as page lists without a copy and with the same bits."""

from dataclasses import replace

import pytest
import torch
from specops import attention, batching
from test_attention import DTYPES, Batch, as_bits, new_workspace, random_batch
from torch import Tensor

KV_LENS, QO_LENS = [1, 300, 17, 640, 40], [1, 5, 0, 1, 3]


def block_table(batch: Batch, more_columns: int) -> Tensor:
    """Return a table with a row of pages per request and invalid pages behind them."""
    counts = batch.kv_indptr.diff().tolist()
    table = torch.full((len(counts), max(counts) + more_columns), -(2**31), dtype=torch.int32)
    for b, pages in enumerate(batch.kv_indices[: sum(counts)].split(counts)):
        table[b, : len(pages)] = pages
    return table


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size,more", [(16, 0), (32, 9), (64, 200)])
@pytest.mark.pairwise
def test_attention_is_the_same_with_block_tables(
    device: str, isa: str, on_cuda: bool, dtype: torch.dtype, page_size: int, more: int
) -> None:
    batch = random_batch(KV_LENS, QO_LENS, dtype, page_size=page_size)
    floats = attention.attention_workspace_size(
        batch.q.shape, batch.k_cache.shape, int(batch.kv_indptr[-1]), len(KV_LENS), device
    )
    workspace = new_workspace(floats, on_cuda, device)
    want = attention.append_attention(*batch.arguments(), return_lse=True, workspace=workspace)
    table = block_table(batch, more)
    before = table.clone()
    kv_indptr, kv_indices = batching.pages_of_block_table(table)
    dense = replace(batch, kv_indptr=kv_indptr, kv_indices=kv_indices)
    for memory in (workspace, None):
        got = attention.append_attention(*dense.arguments(), return_lse=True, workspace=memory)
        for ours, theirs in zip(got, want, strict=True):
            assert torch.equal(as_bits(ours), as_bits(theirs))
    assert torch.equal(table, before)


def test_cache_slots_are_the_same_with_block_tables(device: str, isa: str) -> None:
    batch = random_batch(KV_LENS, QO_LENS, torch.float32)
    kv_indptr, kv_indices = batching.pages_of_block_table(block_table(batch, 3))
    dense = replace(batch, kv_indptr=kv_indptr, kv_indices=kv_indices)
    slots = []
    for one in (batch, dense):
        rows = batching.prepare_batch(
            qo_lens=torch.tensor(QO_LENS, dtype=torch.int32),
            kv_lens=one.kv_lens,
            output_modes=torch.full((5,), 2, dtype=torch.int32),
            kv_indptr=one.kv_indptr,
            kv_indices=one.kv_indices,
            page_size=16,
        )
        slots.append(rows.cache_slots)
    assert torch.equal(*slots) and (slots[0] >= 0).all()


def test_compact_kv_is_the_same_with_block_tables(device: str, isa: str) -> None:
    kv_lens, qo_lens = [40, 90], [4, 4]
    batch = random_batch(kv_lens, qo_lens, torch.bfloat16)
    paths = torch.tensor([[1, 2, -1], [0, 2, -1]], dtype=torch.int32)
    kv_indptr, kv_indices = batching.pages_of_block_table(block_table(batch, 1))
    found = []
    for lists in ((batch.kv_indptr, batch.kv_indices), (kv_indptr, kv_indices)):
        caches = [batch.k_cache.clone(), batch.v_cache.clone()]
        attention.compact_kv(
            *caches,
            paths,
            torch.tensor([2, 2], dtype=torch.int32),
            batch.qo_indptr,
            batch.kv_lens,
            *lists,
        )
        found.append(as_bits(torch.stack(caches)))
    assert torch.equal(*found)
    assert not torch.equal(found[0], as_bits(torch.stack([batch.k_cache, batch.v_cache])))


def test_page_lists_are_views_of_the_block_table() -> None:
    table = torch.arange(12, dtype=torch.int32).view(4, 3)
    kv_indptr, kv_indices = batching.pages_of_block_table(table[:2])
    assert kv_indptr.tolist() == [0, 3, 6] and kv_indptr.dtype == torch.int32
    assert kv_indices.tolist() == list(range(6))
    table[1, 0] = 77  # changes the view, too
    assert kv_indices.data_ptr() == table.data_ptr() and kv_indices[3] == 77
    kv_indptr, kv_indices = batching.pages_of_block_table(table[:0])
    assert kv_indptr.tolist() == [0] and kv_indices.shape == (0,)


def test_block_tables_work_in_a_compiled_step() -> None:
    pytest.importorskip("specops.torch_ops")
    batch = random_batch(KV_LENS, QO_LENS, torch.float32)
    table = block_table(batch, 2)

    def step(table: Tensor) -> Tensor:
        kv_indptr, kv_indices = batching.pages_of_block_table(table)
        dense = replace(batch, kv_indptr=kv_indptr, kv_indices=kv_indices)
        out = attention.append_attention(*dense.arguments())
        assert isinstance(out, Tensor)
        return out

    compiled = torch.compile(step, fullgraph=True, backend="eager")
    assert torch.equal(compiled(table), attention.append_attention(*batch.arguments()))


@pytest.mark.parametrize(
    "table,message",
    [
        (torch.zeros(2, 3, dtype=torch.int64), r"int32 \[batch, max_pages\], got int64 \[2"),
        (torch.zeros(6, dtype=torch.int32), r"got int32 \[6\]"),
        (torch.zeros(2, 6, dtype=torch.int32)[:, :3], r"contiguous, got strides \[6, 1\]"),
        ([[1, 2]], "got list"),
    ],
)
def test_invalid_block_tables_are_refused(table: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=f"^pages_of_block_table: block_table must be.*{message}"):
        batching.pages_of_block_table(table)
