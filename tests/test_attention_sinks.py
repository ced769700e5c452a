# SPDX-License-Identifier: Apache-2.0
"""Attention sinks match the reference, and rows are batch-invariant."""

from collections.abc import Callable

import pytest
import specops
import torch
from shared_fixtures import assert_close
from specops import attention, reference
from test_attention import (
    DTYPES,
    Batch,
    as_bits,
    attend_bits,
    grouped,
    make_batch,
    new_workspace,
    prefix_tree,
    random_batch,
)
from test_attention_8bit import quantized
from torch import Tensor


def random_sinks(heads: int) -> Tensor:
    """Return small sinks, a dominant one, and one that has no effect."""
    sinks = 2 * torch.randn(heads)
    sinks[-1] = -torch.inf
    sinks[0] = 9.0
    return sinks


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "heads,head_dim,window",
    [
        ((4, 2), 64, None),
        ((3, 1), 96, 100),
        ((8, 2), 128, None),
        ((2, 2), 256, 1),
        ((2, 1), 512, None),
    ],
)
@pytest.mark.pairwise
def test_attention_matches_the_reference(
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
        *batch.arguments(), sliding_window=window, sinks=sinks, return_lse=True
    )

    def expected_out(sinks: Tensor, *tensors: Tensor) -> Tensor:
        return reference.append_attention(*grouped(*tensors), sliding_window=window, sinks=sinks)[0]

    assert_close(expected_out, out, sinks, *batch.tensors())
    wide = [x.double() if x.is_floating_point() else x for x in batch.tensors()]
    truth = reference.append_attention(
        *grouped(*wide), sliding_window=window, sinks=sinks.double()
    )[1]
    assert (lse - truth).abs().max().item() <= 1e-4


def test_sinks_follow_the_formula(device: str, isa: str) -> None:
    """The expected output is computed in fp64 from the output without sinks."""
    batch = random_batch([70], [1], torch.float32, (1, 1))
    out, lse = attention.append_attention(*batch.arguments(), return_lse=True)
    for sink in (-50.0, -1.0, 0.0, 3.0, 200.0):
        sinks = torch.tensor([sink])
        got, both = attention.append_attention(*batch.arguments(), sinks=sinks, return_lse=True)
        total = torch.logaddexp(lse.double(), sinks.double())
        torch.testing.assert_close(both.double(), total, rtol=1e-6, atol=1e-6)
        fraction = (lse.double() - total).exp()[..., None]
        torch.testing.assert_close(got.double(), out.double() * fraction, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_non_finite_sinks_affect_only_their_head(device: str, isa: str, dtype: torch.dtype) -> None:
    batch = random_batch([1, 40, 1200], [1, 5, 3], dtype, (4, 2), 128)
    expected = attend_bits(batch)
    no_sinks = torch.full((4,), -torch.inf)
    for threads in (1, 3):
        specops.set_num_threads(threads)
        assert torch.equal(attend_bits(batch, sinks=no_sinks), expected)
    # A sink affects no other head.
    sinks = torch.tensor([-torch.inf, 1.0, torch.inf, torch.nan])
    out, lse = attention.append_attention(*batch.arguments(), sinks=sinks, return_lse=True)
    assert torch.equal(as_bits(out[:, 0]), expected.view(9, -1)[:, : 128 * out.element_size()])
    assert out[:, :2].isfinite().all() and lse[:, :2].isfinite().all()
    assert out[:, 2:].isnan().all()


def test_padding_has_no_sink(device: str, isa: str) -> None:
    batch = random_batch([40, 30], [2, 1], torch.bfloat16)
    batch.q = torch.cat([batch.q, batch.q])
    out, lse = attention.append_attention(*batch.arguments(), sinks=torch.zeros(4), return_lse=True)
    assert (out[3:] == 0).all() and (lse[3:] == -torch.inf).all()


@pytest.mark.parametrize(
    "dtype,heads,head_dim,window",
    [
        (torch.bfloat16, (4, 1), 64, None),
        (torch.float16, (5, 1), 96, 2100),
        (torch.float32, (2, 2), 64, None),
    ],
)
def test_rows_do_not_depend_on_the_number_of_sms(
    device: str,
    place: Callable[[int, int], None],
    on_cuda: bool,
    dtype: torch.dtype,
    heads: tuple[int, int],
    head_dim: int,
    window: int | None,
) -> None:
    """Sequences are verified and decoded, alone and in a batch, whole and in chunks."""
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
        got = attend_bits(batch, sliding_window=window, sinks=sinks, workspace=workspace)
        if not expected:
            expected.extend(got.split([x.shape[0] for x in feed]))
        assert torch.equal(got, torch.cat([expected[b][-rows:] for b in requests]))

    all_requests = [0, 1, 2, 3]
    place(4, 1)
    check(all_requests, 99, 16, None)
    check(all_requests, 99, 32, 0)
    place(1, 3)
    check(all_requests, 1, 16, None)
    place(40, 2)
    check([3], 1, 64, None)
    check([2, 1, 0], 3, 32, None)


@pytest.mark.parametrize("seed", range(6))
def test_rows_do_not_depend_on_shared_prefixes(
    device: str, isa: str, on_cuda: bool, seed: int
) -> None:
    if on_cuda and seed % 3:
        pytest.skip("one seed in three is enough for the interpreter")
    batch, tree = prefix_tree(seed + 100, DTYPES[seed % 3], (4, 2), 64, 900)
    sinks = random_sinks(4)
    for window in (None, 300):
        expected = attend_bits(batch, sliding_window=window, sinks=sinks)
        for threads in (1, 3):
            specops.set_num_threads(threads)
            got = attend_bits(batch, sliding_window=window, sinks=sinks, prefixes=tree)
            assert torch.equal(got, expected)


@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_8_bit_caches_are_supported(device: str, isa: str, cache_dtype: torch.dtype) -> None:
    batch = quantized(random_batch([300, 40], [4, 1], torch.bfloat16, (4, 2), 128), cache_dtype)
    sinks = random_sinks(4)
    out = attention.append_attention(*batch.arguments(), sinks=sinks)
    want = reference.append_attention(*batch.arguments(), sinks=sinks)[0]
    torch.testing.assert_close(out, want, rtol=2e-2, atol=4e-3)
    no_sinks = torch.full((4,), -torch.inf)
    assert torch.equal(attend_bits(batch, sinks=no_sinks), attend_bits(batch))


def test_merge_states_accepts_sinks_in_one_state(device: str, isa: str) -> None:
    batch = random_batch([64, 33], [1, 1], torch.float32)
    first, second = Batch(*batch.tensors()), Batch(*batch.tensors())
    first.kv_lens = torch.tensor([32, 16], dtype=torch.int32)
    second.kv_lens = batch.kv_lens - first.kv_lens
    second.kv_indices = torch.cat([batch.kv_indices[2:4], batch.kv_indices[5:7]])
    second.kv_indptr = torch.tensor([0, 2, 4], dtype=torch.int32)
    sinks = random_sinks(4)
    parts = [
        attention.append_attention(*first.arguments(), return_lse=True),
        attention.append_attention(*second.arguments(), sinks=sinks, return_lse=True),
    ]
    outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
    merged, lse = attention.merge_states(outs, lses)
    want, want_lse = attention.append_attention(*batch.arguments(), sinks=sinks, return_lse=True)
    torch.testing.assert_close(merged, want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, want_lse, rtol=1e-6, atol=1e-6)


def test_invalid_sinks_are_refused(device: str) -> None:
    batch = random_batch([4], [1], torch.float32)
    for sinks, got in [
        (torch.zeros(3), r"float32 \[num_qo_heads=4\], got float32 \[3\]"),
        (torch.zeros(4).double(), "float32 .*float64"),
        (torch.zeros(4).bfloat16(), "float32 .*bfloat16"),
        (torch.zeros(8)[::2], "contiguous"),
    ]:
        with pytest.raises(ValueError, match=f"append_attention: sinks must be {got}"):
            attention.append_attention(*batch.arguments(), sinks=sinks)
