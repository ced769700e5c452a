# SPDX-License-Identifier: Apache-2.0
"""Attention sinks: what they add to a row's sums, and that nothing else decides on its bits."""

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


def random_sinks(heads: int) -> Tensor:
    """Small ones, one that takes almost everything, and one that is none."""
    sinks = 2 * torch.randn(heads)
    sinks[-1] = -torch.inf
    sinks[0] = 9.0
    return sinks


def attend(batch: Batch, **options: Any) -> Tensor:
    """Out and lse, as bits in one row."""
    out, lse = attention.append_attention(*batch.tensors(), return_lse=True, **options)
    return torch.cat([as_bits(out).flatten(1), as_bits(lse).flatten(1)], 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "heads,head_dim,window",
    [((4, 2), 64, None), ((3, 1), 96, 100), ((8, 2), 128, None), ((2, 2), 256, 1)],
)
@pytest.mark.pairwise
def test_against_the_reference(
    device: str,
    isa: str,
    dtype: torch.dtype,
    heads: tuple[int, int],
    head_dim: int,
    window: int | None,
) -> None:
    batch = random_batch([1, 5, 17, 130, 600], [1, 5, 0, 3, 20], dtype, heads, head_dim)
    sinks = random_sinks(heads[0])
    out, lse = attention.append_attention(
        *batch.tensors(), sliding_window=window, sinks=sinks, return_lse=True
    )

    def twin(sinks: Tensor, *tensors: Tensor) -> Tensor:
        return reference.append_attention(*tensors, sliding_window=window, sinks=sinks)[0]

    assert_close(twin, out, sinks, *batch.tensors())
    wide = [x.double() if x.is_floating_point() else x for x in batch.tensors()]
    truth = reference.append_attention(*wide, sliding_window=window, sinks=sinks.double())[1]
    assert (lse - truth).abs().max().item() <= 1e-4


def test_by_the_formula(device: str, isa: str) -> None:
    """One row of one head in fp64, from what attention without sinks says of it."""
    batch = random_batch([70], [1], torch.float32, (1, 1))
    out, lse = attention.append_attention(*batch.tensors(), return_lse=True)
    for sink in (-50.0, -1.0, 0.0, 3.0, 200.0):
        sinks = torch.tensor([sink])
        got, both = attention.append_attention(*batch.tensors(), sinks=sinks, return_lse=True)
        total = torch.logaddexp(lse.double(), sinks.double())
        torch.testing.assert_close(both.double(), total, rtol=1e-6, atol=1e-6)
        share = (lse.double() - total).exp()[..., None]
        torch.testing.assert_close(got.double(), out.double() * share, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_none_of_infinity_and_nan(device: str, isa: str, dtype: torch.dtype) -> None:
    batch = random_batch([1, 40, 1200], [1, 5, 3], dtype, (4, 2), 128)
    expected = attend(batch)
    none = torch.full((4,), -torch.inf)
    for threads in (1, 3):
        specops.set_num_threads(threads)
        assert torch.equal(attend(batch, sinks=none), expected)
    # A head's sink is that head's alone.
    sinks = torch.tensor([-torch.inf, 1.0, torch.inf, torch.nan])
    out, lse = attention.append_attention(*batch.tensors(), sinks=sinks, return_lse=True)
    assert torch.equal(as_bits(out[:, 0]), expected.view(9, -1)[:, : 128 * out.element_size()])
    assert out[:, :2].isfinite().all() and lse[:, :2].isfinite().all()
    assert out[:, 2:].isnan().all()


def test_padding_has_no_sink(device: str, isa: str) -> None:
    batch = random_batch([40, 30], [2, 1], torch.bfloat16)
    batch.q = torch.cat([batch.q, batch.q])
    out, lse = attention.append_attention(*batch.tensors(), sinks=torch.zeros(4), return_lse=True)
    assert (out[3:] == 0).all() and (lse[3:] == -torch.inf).all()


@pytest.mark.parametrize(
    "dtype,heads,head_dim,window",
    [
        (torch.bfloat16, (4, 1), 64, None),
        (torch.float16, (5, 1), 96, 2100),
        (torch.float32, (2, 2), 64, None),
    ],
)
def test_schedules_change_nothing(
    device: str,
    place: Callable[[int, int], None],
    on_cuda: bool,
    dtype: torch.dtype,
    heads: tuple[int, int],
    head_dim: int,
    window: int | None,
) -> None:
    """Verification and decoding, alone and in a batch, whole and cut into parts."""
    kv_lens, qo_lens = [2390, 300, 20, 4100], [5, 1, 17, 3]
    keys, values = ([torch.randn(n, heads[1], head_dim).to(dtype) for n in kv_lens] for _ in "kv")
    queries = [torch.randn(n, heads[0], head_dim).to(dtype) for n in qo_lens]
    sinks = random_sinks(heads[0])
    expected: list[Tensor] = []

    def check(requests: list[int], rows: int, page_size: int, floats: int | None) -> None:
        feed = [queries[b][-rows:] for b in requests]
        batch = make_batch(
            [keys[b] for b in requests], [values[b] for b in requests], feed, page_size, True
        )
        workspace = None if floats is None else new_workspace(floats, on_cuda, device)
        got = attend(batch, sliding_window=window, sinks=sinks, workspace=workspace)
        if not expected:
            expected.extend(got.split([x.shape[0] for x in feed]))
        assert torch.equal(got, torch.cat([expected[b][-rows:] for b in requests]))

    everyone = [0, 1, 2, 3]
    place(4, 1)
    check(everyone, 99, 16, None)
    check(everyone, 99, 32, 0)
    place(1, 3)
    check(everyone, 1, 16, None)
    place(40, 2)
    check([3], 1, 64, None)
    check([2, 1, 0], 3, 32, None)


@pytest.mark.parametrize("seed", range(6))
def test_prefixes_change_nothing(device: str, isa: str, on_cuda: bool, seed: int) -> None:
    if on_cuda and seed % 3:
        pytest.skip("one seed in three is enough for the interpreter")
    batch, tree = prefix_tree(seed + 100, DTYPES[seed % 3], (4, 2), 64, 900)
    sinks = random_sinks(4)
    for window in (None, 300):
        expected = attend(batch, sliding_window=window, sinks=sinks)
        for threads in (1, 3):
            specops.set_num_threads(threads)
            got = attend(batch, sliding_window=window, sinks=sinks, **tree)
            assert torch.equal(got, expected)


@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_over_8_bit_caches(device: str, isa: str, cache_dtype: torch.dtype) -> None:
    batch, scales = quantized(
        random_batch([300, 40], [4, 1], torch.bfloat16, (4, 2), 128), cache_dtype
    )
    sinks = random_sinks(4)
    out = attention.append_attention(*batch.tensors(), sinks=sinks, **scales)
    want = reference.append_attention(*batch.tensors(), sinks=sinks, **scales)[0]
    torch.testing.assert_close(out, want, rtol=2e-2, atol=4e-3)
    none = torch.full((4,), -torch.inf)
    assert torch.equal(attend(batch, sinks=none, **scales), attend(batch, **scales))


def test_parts_of_which_one_has_the_sinks_merge(device: str, isa: str) -> None:
    batch = random_batch([64, 33], [1, 1], torch.float32)
    first, second = Batch(*batch.tensors()), Batch(*batch.tensors())
    first.kv_lens = torch.tensor([32, 16], dtype=torch.int32)
    second.kv_lens = batch.kv_lens - first.kv_lens
    second.kv_indices = torch.cat([batch.kv_indices[2:4], batch.kv_indices[5:7]])
    second.kv_indptr = torch.tensor([0, 2, 4], dtype=torch.int32)
    sinks = random_sinks(4)
    parts = [
        attention.append_attention(*first.tensors(), return_lse=True),
        attention.append_attention(*second.tensors(), sinks=sinks, return_lse=True),
    ]
    outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
    merged, lse = attention.merge_states(outs, lses)
    want, want_lse = attention.append_attention(*batch.tensors(), sinks=sinks, return_lse=True)
    torch.testing.assert_close(merged, want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, want_lse, rtol=1e-6, atol=1e-6)


def test_refuses(device: str) -> None:
    batch = random_batch([4], [1], torch.float32)
    for sinks, got in [
        (torch.zeros(3), r"float32 \[num_qo_heads=4\], got float32 \[3\]"),
        (torch.zeros(4).double(), "float32 .*float64"),
        (torch.zeros(4).bfloat16(), "float32 .*bfloat16"),
        (torch.zeros(8)[::2], "contiguous"),
    ]:
        with pytest.raises(ValueError, match=f"append_attention: sinks must be {got}"):
            attention.append_attention(*batch.tensors(), sinks=sinks)
