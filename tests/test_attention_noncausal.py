# SPDX-License-Identifier: Apache-2.0
"""Attention without the causal mask: every row of a request sees all tokens of the request."""

from collections.abc import Callable
from functools import partial

import pytest
import specops
import torch
from shared_fixtures import assert_close
from specops import attention, reference
from test_attention import (
    DTYPES,
    Batch,
    attend_bits,
    grouped,
    make_batch,
    new_workspace,
    prefix_tree,
    random_batch,
)
from torch import Tensor

attend = partial(attend_bits, is_causal=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.pairwise
def test_attention_matches_the_reference(
    device: str, isa: str, dtype: torch.dtype, window: int | None
) -> None:
    batch = random_batch([1, 5, 17, 64, 130, 600, 65], [1, 5, 0, 64, 3, 20, 1], dtype)
    out, lse = attention.append_attention(
        *batch.arguments(), is_causal=False, sliding_window=window, return_lse=True
    )

    def expected_out(*tensors: Tensor) -> Tensor:
        return reference.append_attention(
            *grouped(*tensors), is_causal=False, sliding_window=window
        )[0]

    assert_close(expected_out, out, *batch.tensors())
    wide = [x.double() if x.is_floating_point() else x for x in batch.tensors()]
    truth = reference.append_attention(*grouped(*wide), is_causal=False, sliding_window=window)[1]
    assert (lse - truth).abs().max().item() <= 1e-4


def test_reference_matches_torch() -> None:
    batch = random_batch([37], [37], torch.float64, (2, 1))
    q, k_cache, v_cache, _, _, kv_indices, _ = batch.tensors()
    keys, values = (cache[kv_indices[:3].long()].flatten(0, 1)[:37] for cache in (k_cache, v_cache))
    want = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1), enable_gqa=True
    )
    out, _ = reference.append_attention(*batch.arguments(), is_causal=False)
    torch.testing.assert_close(out, want.transpose(0, 1))


@pytest.mark.parametrize(
    "dtype,heads,head_dim",
    [
        (torch.bfloat16, (4, 1), 64),
        (torch.float16, (5, 1), 96),
        (torch.float32, (2, 2), 64),
        (torch.bfloat16, (2, 1), 256),
        (torch.float16, (1, 1), 512),
    ],
)
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.fast("*cpu-*", "*simt-True-dtype3-*", ci=("*simt-False-dtype[14]-*",))
def test_rows_equal_decode_rows(
    device: str,
    place: Callable[[int, int], None],
    on_cuda: bool,
    dtype: torch.dtype,
    heads: tuple[int, int],
    head_dim: int,
    with_sinks: bool,
) -> None:
    """The bits do not depend on chunks, page size, SMs or other requests."""
    kv_lens, qo_lens = [2390, 300, 20, 2100], [5, 1, 17, 70]
    keys, values = ([torch.randn(n, heads[1], head_dim).to(dtype) for n in kv_lens] for _ in "kv")
    queries = [torch.randn(n, heads[0], head_dim).to(dtype) for n in qo_lens]
    sinks = torch.randn(heads[0]) if with_sinks else None

    def batch_of(requests: list[int], rows: slice, page_size: int) -> Batch:
        of_each = [[x[b] for b in requests] for x in (keys, values)]
        return make_batch(*of_each, [queries[b][rows] for b in requests], page_size, True)

    all_requests = [0, 1, 2, 3]
    place(4, 1)
    expected = attend(batch_of(all_requests, slice(0, 99), 16), sinks=sinks).split(qo_lens)
    place(1, 3)
    for page_size, floats in ((32, 0), (64, None)):
        workspace = None if floats is None else new_workspace(floats, on_cuda, device)
        got = attend(
            batch_of(all_requests, slice(0, 99), page_size), sinks=sinks, workspace=workspace
        )
        assert torch.equal(got, torch.cat(expected))
    place(40, 2)
    for row in (0, 3, 16, 69):
        one = [b for b in all_requests if qo_lens[b] > row]
        batch = batch_of(one, slice(row, row + 1), 16)
        decoded = attend_bits(batch, sinks=sinks)
        assert torch.equal(decoded, torch.stack([expected[b][row] for b in one]))


@pytest.mark.parametrize("seed", range(6))
def test_rows_do_not_depend_on_shared_prefixes(
    device: str, isa: str, on_cuda: bool, seed: int
) -> None:
    if on_cuda and seed % 3:
        pytest.skip("one seed in three is enough for the interpreter")
    batch, tree = prefix_tree(seed + 200, DTYPES[seed % 3], (4, 2), 64, 900)
    for window in (None, 300):
        expected = attend(batch, sliding_window=window)
        for threads in (1, 3):
            specops.set_num_threads(threads)
            assert torch.equal(attend(batch, sliding_window=window, prefixes=tree), expected)


def test_window_counts_back_from_the_row(device: str, isa: str) -> None:
    """Pages before the window are not read."""
    batch = random_batch([300], [3], torch.bfloat16)
    expected = attend(batch, sliding_window=100)
    batch.kv_indices[: (297 - 99) // 16] = -1
    assert torch.equal(attend(batch, sliding_window=100), expected)
