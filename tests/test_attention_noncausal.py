# SPDX-License-Identifier: Apache-2.0
"""Attention without the causal mask: every row of a request sees all of it."""

from collections.abc import Callable
from typing import Any

import pytest
import specops
import torch
from shared_fixtures import assert_close
from specops import attention, reference
from test_attention import (
    DTYPES,
    Batch,
    as_bits,
    make_batch,
    new_workspace,
    prefix_tree,
    random_batch,
)
from test_attention_8bit import quantized
from torch import Tensor


def attend(batch: Batch, **options: Any) -> Tensor:
    """Out and lse of rows that see all, as bits in one row."""
    out, lse = attention.append_attention(
        *batch.tensors(), is_causal=False, return_lse=True, **options
    )
    return torch.cat([as_bits(out).flatten(1), as_bits(lse).flatten(1)], 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.pairwise
def test_against_the_reference(
    device: str, isa: str, dtype: torch.dtype, window: int | None
) -> None:
    batch = random_batch([1, 5, 17, 64, 130, 600, 65], [1, 5, 0, 64, 3, 20, 1], dtype)
    out, lse = attention.append_attention(
        *batch.tensors(), is_causal=False, sliding_window=window, return_lse=True
    )

    def twin(*tensors: Tensor) -> Tensor:
        return reference.append_attention(*tensors, is_causal=False, sliding_window=window)[0]

    assert_close(twin, out, *batch.tensors())
    wide = [x.double() if x.is_floating_point() else x for x in batch.tensors()]
    truth = reference.append_attention(*wide, is_causal=False, sliding_window=window)[1]
    assert (lse - truth).abs().max().item() <= 1e-4


def test_the_reference_is_torchs_attention() -> None:
    batch = random_batch([37], [37], torch.float64, (2, 1))
    q, k_cache, v_cache, _, _, kv_indices, _ = batch.tensors()
    keys, values = (cache[kv_indices[:3].long()].flatten(0, 1)[:37] for cache in (k_cache, v_cache))
    want = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1), enable_gqa=True
    )
    out, _ = reference.append_attention(*batch.tensors(), is_causal=False)
    torch.testing.assert_close(out, want.transpose(0, 1))


@pytest.mark.parametrize(
    "dtype,heads,head_dim",
    [
        (torch.bfloat16, (4, 1), 64),
        (torch.float16, (5, 1), 96),
        (torch.float32, (2, 2), 64),
        (torch.bfloat16, (2, 1), 256),
    ],
)
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.fast("*cpu-*", "*simt-True-dtype3-*", ci=("*simt-False-dtype1-*",))
def test_rows_are_the_last_rows_of_their_requests(
    device: str,
    place: Callable[[int, int], None],
    on_cuda: bool,
    dtype: torch.dtype,
    heads: tuple[int, int],
    head_dim: int,
    with_sinks: bool,
) -> None:
    """However they are cut, and whatever stands beside them."""
    kv_lens, qo_lens = [2390, 300, 20, 2100], [5, 1, 17, 70]
    keys, values = ([torch.randn(n, heads[1], head_dim).to(dtype) for n in kv_lens] for _ in "kv")
    queries = [torch.randn(n, heads[0], head_dim).to(dtype) for n in qo_lens]
    sinks = torch.randn(heads[0]) if with_sinks else None

    def batch_of(requests: list[int], rows: slice, page_size: int) -> Batch:
        of_each = [[x[b] for b in requests] for x in (keys, values)]
        return make_batch(*of_each, [queries[b][rows] for b in requests], page_size, True)

    everyone = [0, 1, 2, 3]
    place(4, 1)
    expected = attend(batch_of(everyone, slice(0, 99), 16), sinks=sinks).split(qo_lens)
    place(1, 3)
    for page_size, floats in ((32, 0), (64, None)):
        workspace = None if floats is None else new_workspace(floats, on_cuda, device)
        got = attend(batch_of(everyone, slice(0, 99), page_size), sinks=sinks, workspace=workspace)
        assert torch.equal(got, torch.cat(expected))
    place(40, 2)
    for row in (0, 3, 16, 69):
        one = [b for b in everyone if qo_lens[b] > row]
        batch = batch_of(one, slice(row, row + 1), 16)
        last, lse = attention.append_attention(*batch.tensors(), sinks=sinks, return_lse=True)
        decoded = torch.cat([as_bits(last).flatten(1), as_bits(lse).flatten(1)], 1)
        assert torch.equal(decoded, torch.stack([expected[b][row] for b in one]))


@pytest.mark.parametrize("seed", range(6))
def test_prefixes_change_nothing(device: str, isa: str, on_cuda: bool, seed: int) -> None:
    if on_cuda and seed % 3:
        pytest.skip("one seed in three is enough for the interpreter")
    batch, tree = prefix_tree(seed + 200, DTYPES[seed % 3], (4, 2), 64, 900)
    for window in (None, 300):
        expected = attend(batch, sliding_window=window)
        for threads in (1, 3):
            specops.set_num_threads(threads)
            assert torch.equal(attend(batch, sliding_window=window, **tree), expected)


@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_over_8_bit_caches(device: str, isa: str, cache_dtype: torch.dtype) -> None:
    batch, scales = quantized(
        random_batch([300, 40], [9, 3], torch.bfloat16, (4, 2), 128), cache_dtype
    )
    out = attention.append_attention(*batch.tensors(), is_causal=False, **scales)
    want = reference.append_attention(*batch.tensors(), is_causal=False, **scales)[0]
    torch.testing.assert_close(out, want, rtol=2e-2, atol=4e-3)


def test_a_window_begins_where_it_did(device: str, isa: str) -> None:
    """It counts from the row's own position backwards; pages before it may be gone."""
    batch = random_batch([300], [3], torch.bfloat16)
    expected = attend(batch, sliding_window=100)
    batch.kv_indices[: (297 - 99) // 16] = -1
    assert torch.equal(attend(batch, sliding_window=100), expected)
