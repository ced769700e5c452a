# SPDX-License-Identifier: Apache-2.0
"""Latent attention (MLA) equals attention without absorption, and rows are batch-invariant."""

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import simt
import specops
import torch
from rounding import assert_error_at_most, distance, rounding_errors
from shared_fixtures import assert_close, expect_fault
from specops import attention, batching, dense, reference
from specops.attention import AttentionMask, PagedBatch, PagedKv, PrefixTensors
from test_attention import (
    COUNTERS,
    DTYPES,
    Batch,
    as_bits,
    lengths_to_indptr,
    make_batch,
    new_workspace,
    prefix_tree,
)
from test_trees import CHAIN, ints, path_to, preorder, random_tree, tree_batch
from torch import Tensor

LATENT, KEY = 512, 576
SCALE = 192**-0.5  # the scale of DeepSeek-V3 without scaled RoPE


def arguments(batch: Batch) -> tuple[Tensor, PagedKv, PagedBatch]:
    """Return the first arguments of a call with one cache, whose keys begin with the values."""
    q, cache, paged = batch.arguments()
    return q, cache._replace(v=None), paged


def make_latent_batch(
    cached: list[Tensor], queries: list[Tensor], page_size: int, shuffle: bool = True
) -> Batch:
    """Put each request's latents and keys, [kv_len, 1, 576], into pages."""
    return make_batch(cached, cached, queries, page_size, shuffle)


def random_latents(
    kv_lens: list[int], qo_lens: list[int], dtype: torch.dtype, heads: int, page_size: int = 16
) -> Batch:
    cached = [torch.randn(n, 1, KEY).to(dtype) for n in kv_lens]
    return make_latent_batch(
        cached, [torch.randn(n, heads, KEY).to(dtype) for n in qo_lens], page_size
    )


def attend(batch: Batch, **options: Any) -> Tensor:
    """Return the bits of out and lse."""
    options.setdefault("sm_scale", SCALE)
    out, lse = attention.append_attention(*arguments(batch), return_lse=True, **options)
    assert out.shape[-1] == LATENT
    return torch.cat([as_bits(out).flatten(1), as_bits(lse).flatten(1)], 1)


def skip_float32(on_cuda: bool, dtype: torch.dtype) -> None:
    if on_cuda and dtype == torch.float32:
        pytest.skip("float32 latents are refused on cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads,page_size", [(1, 16), (16, 32), (20, 64), (128, 16)])
@pytest.mark.fast(
    "cpu-*-1-16-*",
    "cpu-*-16-32-*",
    "simt-16-32-*",
    ci=("cpu-*-20-64-*", "cpu-*-128-16-dtype1", "simt-*"),
)
def test_attention_matches_the_reference(
    device: str, isa: str, on_cuda: bool, dtype: torch.dtype, heads: int, page_size: int
) -> None:
    skip_float32(on_cuda, dtype)
    batch = random_latents([1, 5, 17, 70, 600], [1, 5, 0, 3, 20 // heads + 1], dtype, heads)
    out, lse = attention.append_attention(*arguments(batch), sm_scale=SCALE, return_lse=True)
    q, cache, paged = arguments(batch)

    def expected_out(q: Tensor, cache: Tensor, *paged: Tensor) -> Tensor:
        whole = PagedKv(cache), PagedBatch(*paged)
        return reference.append_attention(q, *whole, sm_scale=SCALE)[0]

    assert_close(expected_out, out, q, cache.k, *paged)
    wide = q.double(), PagedKv(cache.k.double())
    truth = reference.append_attention(*wide, paged, sm_scale=SCALE)[1]
    assert (lse - truth).abs().max().item() <= 1e-4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads,nope,value_dim", [(16, 128, 128), (3, 64, 32)])
@pytest.mark.pairwise("simt-*-dtype0")
def test_attention_equals_attention_without_absorption(
    device: str,
    isa: str,
    on_cuda: bool,
    dtype: torch.dtype,
    heads: int,
    nope: int,
    value_dim: int,
) -> None:
    """Compare absorbed queries with the keys and values of every head in fp64."""
    skip_float32(on_cuda, dtype)
    qo_lens = [1, 4, 2]
    q_nope, q_rope = (torch.randn(sum(qo_lens), heads, n).double() for n in (nope, 64))
    w_uk = torch.randn(heads, nope, LATENT).double() * nope**-0.5
    w_uv = torch.randn(heads, value_dim, LATENT).double() * LATENT**-0.5
    absorbed = torch.cat([torch.einsum("rhd,hdc->rhc", q_nope, w_uk), q_rope], -1)
    batch = make_latent_batch(
        [torch.randn(n, 1, KEY).to(dtype) for n in (1, 90, 300)],
        list(absorbed.to(dtype).split(qo_lens)),
        page_size=16,
    )
    q, cache, paged = arguments(batch)
    scale = (nope + 64) ** -0.5
    truth, truth_lse = reference.expanded_attention(
        q_nope, q_rope, w_uk, w_uv, cache.k.double(), paged, sm_scale=scale
    )

    def restored(out: Tensor) -> Tensor:
        return torch.einsum("rhc,hdc->rhd", out.double(), w_uv)

    def rounded() -> list[Tensor]:
        return [restored(reference.append_attention(q, cache, paged, sm_scale=scale)[0])]

    (allowed,) = rounding_errors(rounded, [truth])
    out, lse = attention.append_attention(q, cache, paged, sm_scale=scale, return_lse=True)
    assert_error_at_most(distance(restored(out), truth), allowed)
    assert (lse - truth_lse).abs().max().item() <= (1e-4 if dtype == torch.float32 else 0.02)
    # In fp64 both forms give the same result.
    same, same_lse = reference.append_attention(
        absorbed, PagedKv(cache.k.double()), paged, sm_scale=scale
    )
    torch.testing.assert_close(restored(same), truth, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(same_lse, truth_lse, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "dtype,heads",
    [
        (torch.bfloat16, 16),
        (torch.bfloat16, 128),
        (torch.float16, 5),
        (torch.float32, 20),
        (torch.bfloat16, 1),
    ],
)
@pytest.mark.fast(
    "cpu-[!p]*",
    "cpu-portable-dtype[23]-*",
    "simt-dtype2-*",
    ci=("cpu-*-dtype4-*", "simt-dtype[04]-*"),
)
def test_prefill_rows_equal_decode_rows(
    device: str, isa: str, on_cuda: bool, dtype: torch.dtype, heads: int
) -> None:
    """Later tokens are NaN and infinite and must not affect earlier rows."""
    skip_float32(on_cuda, dtype)
    length = 600 if heads == 16 else 200 if heads > 20 else 280  # more than one leaf
    if on_cuda:
        length = 40 if heads > 16 else 280
    q, cached = torch.randn(length, heads, KEY).to(dtype), torch.randn(length, 1, KEY).to(dtype)
    cached[-1], cached[-1, :, ::2] = torch.nan, torch.inf
    whole = attend(make_latent_batch([cached], [q], 16))
    used = heads * LATENT * q.element_size()
    assert not whole[:-1, :used].view(dtype).isnan().any()

    def check(end: int, rows: int, page_size: int) -> None:
        begin = end - rows
        got = attend(make_latent_batch([cached[:end]], [q[begin:end]], page_size))
        assert torch.equal(got, whole[begin:end])

    for end in [n for n in (1, 17, 64, 65, 257, 513, length - 1) if n < length]:
        for threads, page_size, rows in [(1, 16, 1), (2, 32, 5), (3, 64, 13)]:
            specops.set_num_threads(threads)
            check(end, min(rows, end), page_size)
    for begin in range(0, length - 1, 97 if not on_cuda else 193):
        end = min(begin + 97, length - 1)
        check(end, end - begin, 64)


@pytest.mark.parametrize("dtype,heads", [(torch.bfloat16, 16), (torch.float16, 3)])
@pytest.mark.fast("simt-dtype1-*", "cpu-*")
def test_rows_do_not_depend_on_the_number_of_sms(
    device: str,
    place: Callable[[int, int], None],
    on_cuda: bool,
    dtype: torch.dtype,
    heads: int,
) -> None:
    """Sequences are verified and decoded, alone and in a batch, whole and in chunks."""
    kv_lens, qo_lens = [2390, 300, 20, 4100], [3, 1, 5, 2]
    cached = [torch.randn(n, 1, KEY).to(dtype) for n in kv_lens]
    queries = [torch.randn(n, heads, KEY).to(dtype) for n in qo_lens]
    expected: list[Tensor] = []

    def check(requests: list[int], rows: int, page_size: int, floats: int | None) -> None:
        feed = [queries[b][-rows:] for b in requests]
        batch = make_latent_batch([cached[b] for b in requests], feed, page_size)
        workspace = None if floats is None else new_workspace(floats, on_cuda, device)
        got = attend(batch, workspace=workspace)
        if workspace is not None and on_cuda:
            assert not workspace[:COUNTERS].view(torch.int32).any()
        if not expected:
            expected.extend(got.split([x.shape[0] for x in feed]))
        assert torch.equal(got, torch.cat([expected[b][-rows:] for b in requests]))

    all_requests = [0, 1, 2, 3]
    place(4, 1)
    check(all_requests, 99, 16, None)
    check(all_requests, 2, 64, COUNTERS + 60_000)
    place(1, 3)
    check(all_requests, 1, 16, None)
    check(all_requests, 99, 32, 0)
    place(40, 2)
    check([3], 1, 64, None)
    check([2, 1, 0], 3, 32, None)


def test_heads_split_among_threads_keep_their_bits(device: str, isa: str, on_cuda: bool) -> None:
    """There are more heads than rows in a tile, and the workspace has an odd size."""
    batch = random_latents([1300, 40], [1, 1], torch.bfloat16, 128 if not on_cuda else 40)
    expected = attend(batch, workspace=new_workspace(COUNTERS + 10**6, on_cuda, device))
    for threads in (1, 3):
        specops.set_num_threads(threads)
        assert torch.equal(attend(batch), expected)
        floats = COUNTERS + 200_000
        got = attend(batch, workspace=new_workspace(floats, on_cuda, device))
        assert torch.equal(got, expected)


def test_head_bits_do_not_depend_on_the_tile(
    device: str, isa: str, on_cuda: bool, place: Callable[[int, int], None]
) -> None:
    """Tiles have 64 rows for 40 heads, and 16 rows for 16 heads or with little block memory."""
    place(1, 1)
    cached = [torch.randn(n, 1, KEY).bfloat16() for n in (2100, 40)]
    queries = [torch.randn(n, 40, KEY).bfloat16() for n in (1, 2)]
    # The sums of a column overflow in the first chunk, and start anew in the second.
    cached[0][:2048, :, 5], queries[0][:, :, 5] = 3e38, 0

    def attend(begin: int, end: int, floats: int | None = None) -> tuple[Tensor, Tensor]:
        batch = make_latent_batch(cached, [q[:, begin:end].contiguous() for q in queries], 32)
        workspace = None if floats is None else new_workspace(floats, on_cuda, device)
        return attention.append_attention(
            *arguments(batch), sm_scale=SCALE, workspace=workspace, return_lse=True
        )

    def same(got: Any, begin: int, end: int) -> bool:
        outputs = zip(got, all_heads, strict=True)
        return all(
            torch.equal(as_bits(x), as_bits(y[:, begin:end].contiguous())) for x, y in outputs
        )

    all_heads = attend(0, 40)
    assert same(attend(24, 40), 24, 40)
    if on_cuda:
        assert same(attend(0, 40, COUNTERS), 0, 40)
        # Memory for the partial results of one SM: a block computes both chunks of its sequence.
        assert same(attend(0, 40, COUNTERS + 69_632), 0, 40)
    if device == "cpu":
        with simt.block_memory(99):
            assert same(attend(0, 40), 0, 40)


def test_128_heads_read_latents_twice(
    device: str, request: pytest.FixtureRequest, place: Callable[[int, int], None]
) -> None:
    if request.node.callspec.params["device"] != "simt":
        pytest.skip("only the interpreter counts copied bytes")
    kv_len, heads = 600, 128
    batch = random_latents([kv_len], [1], torch.bfloat16, heads)
    place(1, 1)
    for kib, times in ((227, 2), (99, 8)):
        with simt.block_memory(kib):
            simt.load().reset_counters()
            attention.append_attention(*arguments(batch), sm_scale=SCALE)
            counters = simt.load().counters()
        assert counters["copied_bytes"] == counters["launches"] * (times * kv_len + heads) * 2 * KEY


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.fast("*-?")
def test_rows_do_not_depend_on_shared_prefixes(
    device: str, isa: str, on_cuda: bool, seed: int
) -> None:
    if on_cuda and seed % 4:
        pytest.skip("one seed in four is enough for the interpreter")
    heads = random.Random(seed).choice([1, 2, 4, 16] if not on_cuda else [1, 4])
    dtype = DTYPES[seed % 3] if not on_cuda else torch.bfloat16
    batch, tree = prefix_tree(seed + 200, dtype, (heads, 1), KEY, 900)
    expected = attend(batch)
    schedules = [(1, None), (2, 0), (3, 30_000), (3, None)]
    for threads, floats in schedules[:1] if on_cuda else schedules:
        specops.set_num_threads(threads)
        workspace = None if floats is None else new_workspace(floats, on_cuda, device)
        assert torch.equal(attend(batch, workspace=workspace, prefixes=tree), expected)


def test_bundled_requests_keep_their_bits(device: str, isa: str, on_cuda: bool) -> None:
    """Many one-row requests share a long prefix: the CPU bundles them, the GPU groups them."""
    count, shared, heads = 6, 40, 2
    own = torch.arange(count) + shared
    cache = torch.randn(count + shared, 16, 1, KEY).bfloat16()
    batch = Batch(
        torch.randn(count, heads, KEY).bfloat16(),
        cache,
        cache,
        lengths_to_indptr([1] * count),
        lengths_to_indptr([shared + 1] * count),
        torch.cat([torch.cat([torch.arange(shared), page[None]]) for page in own]).int(),
        torch.full((count,), 16 * shared + 7, dtype=torch.int32),
    )
    expected = attend(batch)
    leaders = torch.zeros(1, count, dtype=torch.int32)
    for threads in (1, 3):
        specops.set_num_threads(threads)
        lens = torch.full_like(leaders, 16 * shared)
        got = attend(batch, prefixes=PrefixTensors(leaders, lens))
        assert torch.equal(got, expected)


@pytest.mark.parametrize("page_size", [16, 64])
def test_tree_nodes_equal_rows_of_plain_decoding(
    device: str, isa: str, on_cuda: bool, page_size: int
) -> None:
    """Trees are verified as chains, in a batch with chains and chunks, and then compacted."""
    draw = random.Random(page_size)
    sizes, heads = [24, 0, 9] if not on_cuda else [8, 0, 5], 4
    trees = [*(preorder(random_tree(draw, size, reach=4)) for size in sizes), CHAIN]
    texts = [250, 15, 70, 47]
    case = tree_batch(draw, trees, texts, page_size)
    kv_lens, qo_lens = case["kv_lens"].tolist(), case["qo_lens"].tolist()
    cached = [torch.randn(n, 1, KEY).bfloat16() for n in kv_lens]
    q = torch.randn(sum(qo_lens), heads, KEY).bfloat16()
    num_pages = 3 + len(case["kv_indices"]) + len(case["spare_pages"])
    cache = torch.full((num_pages, page_size, 1, KEY), torch.nan).bfloat16()
    indptr = case["kv_indptr"].tolist()

    def slots(b: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
        pages = case["kv_indices"][indptr[b] : indptr[b + 1]].long()
        return pages[tokens // page_size], tokens % page_size

    for b, x in enumerate(cached):
        cache[slots(b, torch.arange(len(x)))] = x
    chains = batching.tree_chains(**case)
    attention.copy_kv(cache, None, chains.from_slots, chains.to_slots)
    where = (lengths_to_indptr(chains.qo_lens.tolist()), chains.kv_indptr, chains.kv_indices)
    paged = PagedBatch(*where, chains.kv_lens)
    out, lse = attention.append_attention(q, PagedKv(cache), paged, sm_scale=SCALE, return_lse=True)
    row = 0
    for x, tree, text, rows in zip(cached, trees, texts, qo_lens, strict=True):
        for i in range(rows):
            tokens = [*range(text + 1 - (0 if tree else rows - 1 - i))]
            tokens += [text + 1 + node for node in path_to(tree, i - 1)] if tree else []
            alone = make_latent_batch([x[tokens]], [q[row : row + 1]], page_size)
            want = attend(alone)
            got = [as_bits(y[row : row + 1]).flatten(1) for y in (out, lse)]
            assert torch.equal(torch.cat(got, 1), want)
            row += 1
    paths = [path_to(tree, len(tree) - 1) for tree in trees]
    nodes = torch.full((len(trees), max(map(len, paths))), -1, dtype=torch.int32)
    for b, path in enumerate(paths):
        nodes[b, : len(path)] = ints(path)
    requests = (case["kv_lens"], case["kv_indptr"], case["kv_indices"])
    counts = ints([len(path) for path in paths])
    attention.compact_kv(cache, None, nodes, counts, lengths_to_indptr(qo_lens), *requests)
    for b, (path, text, x) in enumerate(zip(paths, texts, cached, strict=True)):
        got = cache[slots(b, torch.arange(text + 1 + len(path)))]
        assert torch.equal(got, x[[*range(text + 1), *(text + 1 + node for node in path)]])


@pytest.mark.parametrize("option", ["window", "noncausal", "sinks", "mask"])
def test_options_match_the_reference(device: str, isa: str, on_cuda: bool, option: str) -> None:
    dtype, heads = torch.bfloat16 if on_cuda else torch.float32, 6
    batch = random_latents([5, 90, 330], [5, 1, 4], dtype, heads)
    options: dict[str, Any] = {
        "window": {"sliding_window": 70},
        "noncausal": {"is_causal": False},
        "sinks": {"sinks": torch.randn(heads)},
        "mask": {"mask": AttentionMask(torch.randint(-(2**31), 2**31 - 1, (10, 1)).int() | 1)},
    }[option]
    q, cache, paged = arguments(batch)

    def expected_out(q: Tensor, cache: Tensor, *paged: Tensor) -> Tensor:
        whole = PagedKv(cache), PagedBatch(*paged)
        return reference.append_attention(q, *whole, sm_scale=SCALE, **options)[0]

    out = attention.append_attention(*arguments(batch), sm_scale=SCALE, **options)
    assert_close(expected_out, out, q, cache.k, *paged)


def test_padding_is_zero_and_empty_batches_are_accepted(
    device: str, isa: str, on_cuda: bool
) -> None:
    batch = random_latents([40, 30], [2, 1], torch.bfloat16, 4)
    expected = attend(batch)
    batch.q = torch.cat([batch.q, torch.full_like(batch.q, torch.nan)])
    out, lse = attention.append_attention(*arguments(batch), sm_scale=SCALE, return_lse=True)
    got = torch.cat([as_bits(out).flatten(1), as_bits(lse).flatten(1)], 1)
    assert torch.equal(got[:3], expected)
    assert (out[3:] == 0).all() and (lse[3:] == -torch.inf).all()
    none = random_latents([40], [0], torch.bfloat16, 4)
    assert attention.append_attention(*arguments(none), sm_scale=SCALE).shape == (0, 4, LATENT)


def test_invalid_arguments_are_refused(device: str, on_cuda: bool) -> None:
    def refused(message: str, batch: Batch, **options: Any) -> None:
        options.setdefault("sm_scale", SCALE)
        with pytest.raises(ValueError, match="^append_attention: " + message):
            attention.append_attention(*arguments(batch), **options)

    good = random_latents([20], [1], torch.bfloat16, 4)
    refused("sm_scale must be given where cache.v is None", good, sm_scale=None)
    refused(
        r"out must be bfloat16 \[rows=1, num_qo_heads=4, latent_dim=512\], got bfloat16 ",
        good,
        out=torch.empty_like(good.q),
    )
    x = torch.randn(20, 1, 128).bfloat16()
    other = make_latent_batch([x], [torch.randn(1, 4, 128).bfloat16()], 16)
    refused("cache.v must be a tensor where head_dim=128, got None", other)
    x = torch.randn(20, 2, KEY).bfloat16()
    heads = make_latent_batch([x], [torch.randn(1, 4, KEY).bfloat16()], 16)
    refused("num_kv_heads must be 1 of latents, got 2", heads)
    with pytest.raises(ValueError, match=r"head_dim must be 64, 96, 128.*, got 576"):
        attention.append_attention(*good.arguments(), sm_scale=SCALE)
    good.k_cache = good.k_cache.to(torch.int8)
    good.k_scales, good.v_scales = torch.ones(2, *good.k_cache.shape[:3])
    refused(r"cache.k must be .*float16 where cache.v is None.*, got int8", good)
    if on_cuda:
        single = random_latents([20], [1], torch.float32, 4)
        refused(
            "cache.k must be bfloat16 or float16 where cache.v is None on cuda, got float32", single
        )


def test_documented_example_runs() -> None:
    text = (Path(__file__).resolve().parent.parent / "docs" / "ops.md").read_text()
    section = text.split("## Latent attention")[1].split("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.S)
    exec(compile(code, "docs/ops.md", "exec"), {})


# ---- writing ----


@pytest.mark.no_bf16
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("rows,heads", [(1, 16), (40, 3)])
@pytest.mark.pairwise
def test_rope_append_latent_matches_the_reference(
    device: str,
    isa: str,
    dtype: torch.dtype,
    interleaved: bool,
    norm: bool,
    rows: int,
    heads: int,
) -> None:
    packed = torch.randn(rows, (heads + 1) * KEY + 8).to(dtype)
    q, kv = packed[:, : heads * KEY].view(rows, heads, KEY), packed[:, heads * KEY : -8]
    cache = torch.full((4, 16, 1, KEY), 7.0, dtype=dtype)
    slots = torch.randperm(64)[:rows]
    positions = torch.randint(0, 500, (rows,), dtype=torch.int32)
    if rows > 2:
        slots[1] = slots[2] = -1
        positions[2] = -1
    cos_sin = attention.rope_cos_sin(500, 64, 1e4)
    weight = torch.randn(LATENT).to(dtype)

    def expected_out(q: Tensor, kv: Tensor, weight: Tensor) -> Tensor:
        into = cache.to(q.dtype).clone()
        out = reference.rope_append_latent(
            q, kv, into, slots, positions, cos_sin,
            interleaved=interleaved, norm_weight=weight if norm else None, norm_eps=1e-5,
        )  # fmt: skip
        return torch.cat([out.flatten(), into.flatten()])

    def call(rows: slice, into: Tensor, **options: Any) -> Tensor:
        return attention.rope_append_latent(
            q[rows], kv[rows], into, slots[rows], positions[rows], cos_sin,
            interleaved=interleaved, norm_weight=weight if norm else None, norm_eps=1e-5, **options,
        )  # fmt: skip

    into = cache.clone()
    out = call(slice(None), into)
    assert_close(expected_out, torch.cat([out.flatten(), into.flatten()]), q, kv, weight)
    assert torch.equal(as_bits(out[:1, :, :LATENT]), as_bits(q[:1, :, :LATENT]))
    # Each row alone on one thread, then all rows in place.
    specops.set_num_threads(1)
    for row in {0, rows // 2, rows - 1}:
        one = cache.clone()
        assert torch.equal(as_bits(call(slice(row, row + 1), one)[0]), as_bits(out[row]))
        if slots[row] >= 0:
            assert torch.equal(one.flatten(0, 1)[slots[row]], into.flatten(0, 1)[slots[row]])
    q = q.contiguous()
    assert torch.equal(as_bits(call(slice(None), cache, q_out=q)), as_bits(out))
    assert torch.equal(as_bits(cache), as_bits(into))


@pytest.mark.no_bf16
@pytest.mark.parametrize("dtype", DTYPES)
def test_latents_are_normalized_like_rms_norm(
    device: str, isa: str, on_cuda: bool, dtype: torch.dtype
) -> None:
    """The CPU has the same bits; CUDA adds the elements in another order."""
    kv, weight = torch.randn(5, KEY).to(dtype), torch.randn(LATENT).to(dtype)
    cache, q = torch.zeros(1, 16, 1, KEY).to(dtype), torch.zeros(5, 1, KEY).to(dtype)
    attention.rope_append_latent(
        q, kv, cache, torch.arange(5), torch.zeros(5, dtype=torch.int32),
        attention.rope_cos_sin(1, 64, 1e4), norm_weight=weight,
    )  # fmt: skip
    got, latents = cache[0, :5, 0], kv[:, :LATENT].contiguous()
    assert torch.equal(got[:, LATENT:], kv[:, LATENT:])  # at position 0
    if not on_cuda:
        assert torch.equal(got[:, :LATENT], dense.rms_norm(latents, weight, eps=1e-6))
    want = reference.rms_norm(latents, weight, eps=1e-6)[0]
    torch.testing.assert_close(got[:, :LATENT], want, rtol=2 * torch.finfo(dtype).eps, atol=1e-7)


def test_rope_append_latent_refuses_before_writing(device: str, on_cuda: bool) -> None:
    cos_sin = attention.rope_cos_sin(8, 64, 1e4)

    def refused(message: str, slots: list[int], positions: list[int]) -> None:
        cache, q = torch.zeros(2, 16, 1, KEY), torch.randn(2, 3, KEY)
        q_out = torch.full_like(q, 7.0)
        with expect_fault(on_cuda, message):
            attention.rope_append_latent(
                q, torch.randn(2, KEY), cache, torch.tensor(slots), ints(positions), cos_sin,
                q_out=q_out,
            )  # fmt: skip
        # The second row is invalid. CUDA skips it; the CPU writes nothing at all.
        assert (cache.flatten(0, 1)[1:] == 0).all()
        assert (q_out[1] == (0.0 if on_cuda else 7.0)).all()
        assert on_cuda or ((cache == 0).all() and (q_out == 7.0).all())

    name = "^rope_append_latent: "
    refused(name + r"cache_slots.* must be -1 or .*, got (32|another value)", [0, 32], [0, 1])
    refused(name + r"cache_slots.* must be -1 or .*, got (-2|another value)", [0, -2], [0, 1])
    refused(name + r"positions.* must be in \[0, .*, got (8|another value)", [0, 1], [0, 8])
    refused(
        name + r"positions.*, or -1 where cache_slots is -1, got (-1|another value)",
        [0, 1],
        [0, -1],
    )


@pytest.mark.parametrize("interleaved", [True, False])
def test_layer_matches_deepseek_in_transformers(isa: str, interleaved: bool) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as theirs

    config = transformers.DeepseekV3Config(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=None,
        kv_lora_rank=LATENT, qk_rope_head_dim=64, qk_nope_head_dim=32, v_head_dim=24,
        rope_interleave=interleaved, max_position_embeddings=256, attn_implementation="eager",
    )  # fmt: skip
    length, heads, nope = 90, 4, 32
    layer = theirs.DeepseekV3Attention(config, 0).eval()
    torch.nn.init.normal_(layer.kv_a_layernorm.weight, 1.0, 0.1)
    x, position = torch.randn(1, length, 64), torch.arange(length)
    rotary = theirs.DeepseekV3RotaryEmbedding(config)(x, position[None])
    hidden = torch.full((length, length), -torch.inf).triu(1)[None, None]
    with torch.no_grad():
        want = layer(x, position_embeddings=rotary, attention_mask=hidden)[0][0]
        projected = layer.q_proj(x[0]).view(length, heads, nope + 64)
        kv = layer.kv_a_proj_with_mqa(x[0])
        w_uk, w_uv = layer.kv_b_proj.weight.view(heads, nope + 24, LATENT).split([nope, 24], 1)
        absorbed = torch.einsum("rhd,hdc->rhc", projected[..., :nope], w_uk)
        q = torch.cat([absorbed, projected[..., nope:]], -1)
        cache = torch.full((6, 16, 1, KEY), torch.nan)
        where = (position, position.int(), attention.rope_cos_sin(256, 64, 1e4))
        q = attention.rope_append_latent(
            q, kv, cache, *where, interleaved=interleaved,
            norm_weight=layer.kv_a_layernorm.weight, norm_eps=1e-6,
        )  # fmt: skip
        paged = PagedBatch(ints([0, length]), ints([0, 6]), torch.arange(6).int(), ints([length]))
        out = attention.append_attention(q, PagedKv(cache), paged, sm_scale=layer.scaling)
        values = torch.einsum("rhc,hdc->rhd", out, w_uv)
        got = layer.o_proj(values.flatten(1))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-6)
