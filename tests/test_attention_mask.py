# SPDX-License-Identifier: Apache-2.0
"""Attention with a packed mask, which has one bit per row and visible token."""

from collections.abc import Callable
from typing import Any

import pytest
import specops
import torch
from shared_fixtures import assert_close
from specops import attention, batching, reference
from specops.attention import AttentionMask, PrefixTensors
from test_attention import (
    DTYPES,
    attend_bits,
    grouped,
    make_batch,
    new_workspace,
    prefix_tree,
    random_batch,
)
from test_attention_8bit import quantized
from torch import Tensor

KV_LENS, QO_LENS = [3, 17, 90, 600, 130, 40], [3, 5, 40, 20, 0, 7]


def packed(sees: Tensor) -> Tensor:
    """Pack bools [rows, tokens] into int32 [rows, words]."""
    words = -(-sees.shape[1] // 32)
    bits = torch.nn.functional.pad(sees, (0, 32 * words - sees.shape[1])).view(-1, words, 32)
    return (bits.long() << torch.arange(32)).sum(-1).int()


def random_mask(rows: int, tokens: int) -> AttentionMask:
    return AttentionMask(packed(torch.rand(rows, tokens) < 0.6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "heads,head_dim,window,is_causal",
    [
        ((4, 2), 64, None, True),
        ((8, 2), 128, None, False),
        ((3, 1), 96, 30, True),
        ((1, 1), 256, 100, False),
        ((2, 1), 512, None, True),
    ],
)
@pytest.mark.parametrize("starts", [None, [0, 2, 60, 300, -5, 400]], ids=["rows", "starts"])
@pytest.mark.pairwise
def test_attention_matches_the_reference(
    device: str,
    isa: str,
    dtype: torch.dtype,
    heads: tuple[int, int],
    head_dim: int,
    window: int | None,
    is_causal: bool,
    starts: list[int] | None,
) -> None:
    batch = random_batch(KV_LENS, QO_LENS, dtype, heads, head_dim)
    mask = random_mask(sum(QO_LENS), 310)
    mask.bits[4] = -1
    if starts is not None:
        mask = mask._replace(starts=torch.tensor(starts, dtype=torch.int32))
    options: dict[str, Any] = {"mask": mask, "sliding_window": window, "is_causal": is_causal}
    out, lse = attention.append_attention(*batch.arguments(), return_lse=True, **options)

    def expected_out(*tensors: Tensor) -> Tensor:
        return reference.append_attention(*grouped(*tensors), **options)[0]

    assert_close(expected_out, out, *batch.tensors())
    wide = [x.double() if x.is_floating_point() else x for x in batch.tensors()]
    truth = reference.append_attention(*grouped(*wide), **options)[1]
    nothing = truth == -torch.inf
    assert torch.equal(lse == -torch.inf, nothing) and not out[nothing].any()
    assert (lse - truth)[~nothing].abs().max().item() <= 1e-4


def test_reference_matches_torch() -> None:
    batch = random_batch([37], [9], torch.float64, (2, 1))
    sees = torch.rand(9, 9) < 0.5
    sees[:, 0] = True
    q, k_cache, v_cache, _, _, kv_indices, _ = batch.tensors()
    keys, values = (cache[kv_indices[:3].long()].flatten(0, 1)[:37] for cache in (k_cache, v_cache))
    allowed = torch.cat([torch.ones(9, 28, dtype=torch.bool), sees], 1)
    want = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (q, keys, values)), attn_mask=allowed, enable_gqa=True
    )
    out, _ = reference.append_attention(
        *batch.arguments(), is_causal=False, mask=AttentionMask(packed(sees))
    )
    torch.testing.assert_close(out, want.transpose(0, 1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_mask_with_all_bits_set_has_no_effect(device: str, isa: str, dtype: torch.dtype) -> None:
    batch = random_batch(KV_LENS, QO_LENS, dtype)
    mask = AttentionMask(torch.full((sum(QO_LENS), 2), -1, dtype=torch.int32))
    for is_causal in (True, False):
        expected = attend_bits(batch, is_causal=is_causal)
        assert torch.equal(attend_bits(batch, is_causal=is_causal, mask=mask), expected)
    # A causal mask equals `is_causal`.
    tril = AttentionMask(packed(torch.cat([torch.ones(n, 40).tril() for n in QO_LENS]).bool()))
    assert torch.equal(attend_bits(batch, is_causal=False, mask=tril), attend_bits(batch))


def test_tree_mask_shows_each_node_its_path(device: str, isa: str) -> None:
    """Sums are in another order than for the path alone, so bits may differ."""
    parents, text = [-1, -1, 0, 2, 0], 50
    tree = batching.build_tree(
        torch.tensor([parents], dtype=torch.int32),
        torch.tensor([5], dtype=torch.int32),
        torch.tensor([text], dtype=torch.int32),
    )
    k, v, q = (torch.randn(text + 6, n, 64) for n in (2, 2, 4))
    batch = make_batch([k], [v], [q[text:]], 16, True)
    mask = AttentionMask(tree.ancestor_mask.flatten(0, 1))
    got, lse = attention.append_attention(*batch.arguments(), mask=mask, return_lse=True)
    for node in range(-1, 5):
        path = [node]
        while path[0] >= 0:
            path.insert(0, parents[path[0]])
        tokens = [*range(text), *(text + 1 + one for one in path)]
        row = text + 1 + node
        alone = make_batch([k[tokens]], [v[tokens]], [q[row : row + 1]], 16, True)
        want, want_lse = attention.append_attention(*alone.arguments(), return_lse=True)
        torch.testing.assert_close(got[node + 1], want[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(lse[node + 1], want_lse[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "dtype,heads,head_dim",
    [
        (torch.bfloat16, (4, 1), 64),
        (torch.float16, (5, 1), 96),
        (torch.bfloat16, (2, 1), 128),
        (torch.float32, (2, 2), 64),
    ],
)
def test_rows_do_not_depend_on_batch_or_chunks(
    device: str,
    place: Callable[[int, int], None],
    on_cuda: bool,
    dtype: torch.dtype,
    heads: tuple[int, int],
    head_dim: int,
) -> None:
    kv_lens, qo_lens = [2390, 300, 20, 2100], [5, 1, 17, 40]
    keys, values = ([torch.randn(n, heads[1], head_dim).to(dtype) for n in kv_lens] for _ in "kv")
    queries = [torch.randn(n, heads[0], head_dim).to(dtype) for n in qo_lens]
    masks = [random_mask(n, 300) for n in qo_lens]
    starts = [2200, 10, 3, 1990]
    expected: list[Tensor] = []

    def check(requests: list[int], rows: int, page_size: int, floats: int | None) -> None:
        of_each = [[x[b] for b in requests] for x in (keys, values)]
        batch = make_batch(*of_each, [queries[b][-rows:] for b in requests], page_size, True)
        got = attend_bits(
            batch,
            is_causal=False,
            mask=AttentionMask(
                torch.cat([masks[b].bits[-rows:] for b in requests]),
                torch.tensor([starts[b] for b in requests], dtype=torch.int32),
            ),
            workspace=None if floats is None else new_workspace(floats, on_cuda, device),
        )
        if not expected:
            expected.extend(got.split(qo_lens))
        assert torch.equal(got, torch.cat([expected[b][-rows:] for b in requests]))

    all_requests = [0, 1, 2, 3]
    place(4, 1)
    check(all_requests, 99, 16, None)
    check(all_requests, 99, 32, 0)
    place(1, 3)
    check(all_requests, 1, 64, None)
    place(40, 2)
    check([3], 6, 16, None)
    check([2, 0], 3, 32, None)


@pytest.mark.parametrize("seed", range(6))
def test_rows_do_not_depend_on_shared_prefixes(
    device: str, isa: str, on_cuda: bool, seed: int
) -> None:
    if on_cuda and seed % 3:
        pytest.skip("one seed in three is enough for the interpreter")
    batch, tree = prefix_tree(seed + 300, DTYPES[seed % 3], (4, 2), 64, 900)
    mask = random_mask(len(batch.q), 64)
    for is_causal in (True, False):
        expected = attend_bits(batch, mask=mask, is_causal=is_causal)
        for threads in (1, 3):
            specops.set_num_threads(threads)
            got = attend_bits(batch, mask=mask, is_causal=is_causal, prefixes=tree)
            assert torch.equal(got, expected)


def test_mask_may_begin_in_a_shared_prefix_on_cuda(device: str, on_cuda: bool) -> None:
    """CUDA shares the part before the mask; the CPU raises an error."""
    shared, page_size = 900, 16
    batch = random_batch([shared + 20, shared + 20], [2, 3], torch.bfloat16, page_size=page_size)
    pages = -(-(shared + 20) // page_size)
    batch.kv_indices[pages : pages + shared // page_size] = batch.kv_indices[: shared // page_size]
    starts = torch.tensor([800, 700], dtype=torch.int32)
    mask = random_mask(5, 400)._replace(starts=starts)
    prefixes = PrefixTensors(
        torch.zeros(1, 2, dtype=torch.int32),
        torch.full((1, 2), shared // page_size * page_size, dtype=torch.int32),
    )
    expected = attend_bits(batch, mask=mask)
    if on_cuda:
        assert torch.equal(attend_bits(batch, mask=mask, prefixes=prefixes), expected)
    else:
        with pytest.raises(
            ValueError, match=r"prefixes.lens\[0, 0\].* mask.starts\[0\]=800, got 896"
        ):
            attend_bits(batch, mask=mask, prefixes=prefixes)
    prefixes.lens[:] = 700
    assert torch.equal(attend_bits(batch, mask=mask, prefixes=prefixes), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_visible_tokens_are_zero(
    device: str, isa: str, on_cuda: bool, dtype: torch.dtype
) -> None:
    batch = random_batch([40, 1100], [3, 2], dtype)
    mask = torch.zeros(5, 40, dtype=torch.int32)
    mask[1, 0] = 1
    sinks = torch.tensor([0.5, -torch.inf, 3.0, -2.0])
    starts = torch.zeros(2, dtype=torch.int32)
    specops.set_num_threads(3)
    for floats in (0, None):
        workspace = None if floats is None else new_workspace(floats, on_cuda, device)
        for row_sinks in (None, sinks):
            out, lse = attention.append_attention(
                *batch.arguments(),
                mask=AttentionMask(mask, starts),
                sinks=row_sinks,
                return_lse=True,
                workspace=workspace,
            )
            of_sinks = torch.full((4,), -torch.inf) if row_sinks is None else row_sinks
            for row in (0, 2, 3, 4):
                assert not out[row].any()
                torch.testing.assert_close(lse[row], of_sinks)
            assert out[1].any(-1).all()


@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("has_mask", [True, False])
def test_noncausal_attention_supports_8_bit_caches(
    device: str, isa: str, cache_dtype: torch.dtype, has_mask: bool
) -> None:
    batch = quantized(random_batch([300, 40], [9, 3], torch.bfloat16, (4, 2), 128), cache_dtype)
    options = {"mask": random_mask(12, 9) if has_mask else None, "is_causal": False}
    out = attention.append_attention(*batch.arguments(), **options)
    want = reference.append_attention(*batch.arguments(), **options)[0]
    torch.testing.assert_close(out, want, rtol=2e-2, atol=4e-3)


def test_invalid_masks_are_refused(device: str) -> None:
    batch = random_batch([40, 9], [2, 1], torch.float32)
    good, starts = torch.zeros(3, 1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    for bits, mask_starts, message in [
        (good[:2], None, r"mask.bits must be int32 \[rows=3, words=1\], got int32 \[2, 1\]"),
        (good.long(), None, r"mask.bits must be int32 .*got int64"),
        (good[:, :0], None, "mask.bits must be of at least one word, got 0"),
        (good, starts[:1], r"mask.starts must be int32 \[batch=2\], got int32 \[1\]"),
        (None, starts, r"mask.bits must be int32 .*got None"),
    ]:
        mask: Any = AttentionMask(bits, mask_starts)
        with pytest.raises(ValueError, match=f"^append_attention: {message}"):
            attention.append_attention(*batch.arguments(), mask=mask)
