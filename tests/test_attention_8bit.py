# SPDX-License-Identifier: Apache-2.0
"""Caches of 8-bit elements and scales: writing, reading, and batch invariance of rows."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import specops
import torch
from rounding import assert_error_at_most, rounding_errors
from shared_fixtures import assert_close
from specops import attention, reference
from specops.attention import PagedBatch, PagedKv, PrefixTensors
from test_attention import (
    DTYPES,
    Batch,
    as_bits,
    grouped,
    lengths_to_indptr,
    make_batch,
    new_workspace,
    prefix_tree,
    random_batch,
)
from torch import Tensor

CACHE_DTYPES = [torch.int8, torch.float8_e4m3fn]


@pytest.fixture(autouse=True)
def _single_threaded_reference() -> Any:
    """Use one thread in torch: on a busy machine, every parallel op waits for a time slice."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def query_dtypes(on_cuda: bool) -> list[torch.dtype]:
    return [torch.bfloat16] if on_cuda else DTYPES


def skip_unsupported(on_cuda: bool, dtype: torch.dtype) -> None:
    if dtype not in query_dtypes(on_cuda):
        pytest.skip("CUDA kernels for 8-bit caches support bfloat16 queries only")


def quantized(batch: Batch, dtype: torch.dtype) -> Batch:
    """Return the batch with 8-bit caches; unused slots have random elements and NaN scales."""
    caches, scales = [], []
    for cache in (batch.k_cache, batch.v_cache):
        elements, of_heads = reference.quantized(cache, dtype)
        anything = torch.randint(0, 256, elements.shape, dtype=torch.uint8)
        unused = cache.isnan().all(-1, keepdim=True)
        raw = torch.where(unused, anything, elements.view(torch.uint8))
        caches.append(raw.view(dtype))
        scales.append(of_heads)
    return replace(
        batch, k_cache=caches[0], v_cache=caches[1], k_scales=scales[0], v_scales=scales[1]
    )


def attend(batch: Batch, **options: Any) -> tuple[Tensor, Tensor]:
    out, lse = attention.append_attention(*batch.arguments(), return_lse=True, **options)
    return out, lse


def check_against_reference(batch: Batch, window: int | None = None) -> None:
    """Compare with the reference; bf16 softmax weights may be off by a relative 2^-9."""
    out, lse = attend(batch, sliding_window=window)
    tensors = batch.tensors()

    def expected_out(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return reference.append_attention(*grouped(*tensors), sliding_window=window)

    wide = [x.double() if x.is_floating_point() else x for x in tensors]
    truth, true_lse = expected_out(*wide)
    error = (out.double() - truth).abs()
    if batch.q.dtype == torch.bfloat16:
        wide[2] = wide[2].double().abs()
        error = (error - 2**-9 * expected_out(*wide)[0]).clamp(min=0)
    (rounding,) = rounding_errors(lambda: [expected_out(*tensors)[0]], [truth])
    assert_error_at_most(error.max().item() if error.numel() else 0.0, rounding)
    used = int(batch.qo_indptr[-1])
    assert (lse[used:] == -torch.inf).all()
    assert (lse[:used] - true_lse[:used]).abs().max().item() <= 1e-4


# ---- writing ----


def hard_heads(rows: int, heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Return random heads, some of which are hard to quantize."""
    x = torch.randn(rows, heads, head_dim) * torch.logspace(-30, 30, rows)[:, None, None]
    ties = torch.arange(head_dim) - head_dim // 2 + 0.5
    x[0, 0] = torch.cat([torch.tensor([127.0]), ties[1:]])  # int8 has a scale of 1
    x[1, 0] = 0.0
    x[2, 0] = 2.0**-127  # too small for a scale
    x[3, 0], x[3, 0, 5] = 1.0, torch.nan
    x[4, 0], x[4, 0, -1] = 1.0, -torch.inf
    x[5, 0] = -0.0
    # Between every two numbers of float8_e4m3fn, whose scale is 1.
    numbers = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (numbers[1:] + numbers[:-1]) / 2
    for at in range(0, len(middles), head_dim - 1):
        some = middles[at : at + head_dim - 1]
        x[6, at // (head_dim - 1)] = 448.0
        x[6, at // (head_dim - 1), 1 : 1 + len(some)] = some * (-1.0) ** at
    return x.to(dtype)


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("head_dim", [64, 512])
@pytest.mark.no_bf16
@pytest.mark.pairwise("simt-*-torch.float32-*", "simt-*-torch.float16-*")
def test_written_elements_equal_quantized_16_bit_caches(
    device: str,
    isa: str,
    on_cuda: bool,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    norm: bool,
    head_dim: int,
) -> None:
    """The bits do not depend on the other rows, and other slots are unchanged."""
    skip_unsupported(on_cuda, dtype)
    rows, heads = 40, 4
    q, k = torch.randn(rows, 8, head_dim).to(dtype), torch.randn(rows, heads, head_dim).to(dtype)
    v = hard_heads(rows, heads, head_dim, dtype)
    k[:7] = v[:7]
    slots = torch.randperm(640)[:rows]
    slots[9] = -1
    positions = torch.randint(0, 500, (rows,), dtype=torch.int32)
    positions[:7] = 0  # no rotation
    where = (slots, positions, attention.rope_cos_sin(500, head_dim, 1e4))
    weight = torch.randn(head_dim).to(dtype) if norm else None
    plain = [torch.full((40, 16, heads, head_dim), 7.0, dtype=dtype) for _ in "kv"]
    q_plain = attention.rope_append_kv(q, k, v, PagedKv(*plain), *where, k_norm_weight=weight)

    def append(chosen: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor]:
        caches = [torch.full((40, 16, heads, head_dim), 0x55, dtype=torch.uint8) for _ in "kv"]
        scales = [torch.full((40, 16, heads), -3.0) for _ in "kv"]
        k_cache, v_cache = (cache.view(cache_dtype) for cache in caches)
        out = attention.rope_append_kv(
            q[chosen],
            k[chosen],
            v[chosen],
            PagedKv(k_cache, v_cache, *scales),
            slots[chosen],
            positions[chosen],
            where[2],
            k_norm_weight=weight,
        )
        return caches, scales, out

    caches, scales, out = append(torch.arange(rows))
    assert torch.equal(as_bits(out), as_bits(q_plain))
    written = torch.zeros(640, dtype=torch.bool)
    written[slots[slots >= 0]] = True
    for got, of_heads, want in zip(caches, scales, plain, strict=True):
        elements, expected = reference.quantized(want.flatten(0, 1)[written], cache_dtype)
        assert torch.equal(got.flatten(0, 1)[written], elements.view(torch.uint8))
        assert torch.equal(as_bits(of_heads.flatten(0, 1)[written]), as_bits(expected))
        assert (got.flatten(0, 1)[~written] == 0x55).all()
        assert (of_heads.flatten(0, 1)[~written] == -3.0).all()
    specops.set_num_threads(1)
    for row in (0, 6, 9, rows - 1):
        alone, alone_scales, _ = append(torch.tensor([row]))
        if slots[row] < 0:
            continue
        for got, one in zip([*caches, *scales], [*alone, *alone_scales], strict=True):
            mine = as_bits(got.flatten(0, 1)[slots[row]])
            assert torch.equal(as_bits(one.flatten(0, 1)[slots[row]]), mine)


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES, ids=str)
def test_quantization_error_is_at_most_half_a_step(cache_dtype: torch.dtype) -> None:
    """A step of int8 is constant; a step of float8_e4m3fn depends on the exponent."""
    x = torch.randn(2000, 128)
    elements, scales = reference.quantized(x, cache_dtype)
    error = (elements.float() * scales[:, None] - x).abs() / scales[:, None]
    scaled = (x / scales[:, None]).abs()
    half = torch.full_like(x, 0.5)
    if cache_dtype == torch.float8_e4m3fn:
        half = torch.maximum(2.0 ** scaled.log2().floor().clamp(min=-6) / 16, scaled * 0)
    assert (error <= half * (1 + 2**-10)).all()


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES, ids=str)
def test_reference_marks_heads_with_non_finite_values(cache_dtype: torch.dtype) -> None:
    """A head with NaN or infinity has a NaN scale."""
    v = hard_heads(40, 4, 64, torch.float32)
    q, k = torch.randn(40, 8, 64), torch.randn(40, 4, 64)
    where = (torch.arange(40), torch.arange(40).int(), attention.rope_cos_sin(40, 64, 1e4))
    caches = [torch.zeros(3, 16, 4, 64, dtype=torch.uint8).view(cache_dtype) for _ in "kv"]
    scales = [torch.zeros(3, 16, 4) for _ in "kv"]
    reference.rope_append_kv(q, k, v, PagedKv(*caches, *scales), *where)
    elements, of_heads = reference.quantized(v, cache_dtype)
    got = caches[1].view(torch.uint8).flatten(0, 1)[:40]
    assert torch.equal(got, elements.view(torch.uint8))
    assert torch.equal(as_bits(scales[1].flatten(0, 1)[:40]), as_bits(of_heads))
    assert of_heads[3:5, 0].isnan().all() and not (of_heads[[0, 1, 2, 5, 6]].isnan()).any()
    assert (elements.view(torch.uint8)[1:6, 0] & 0x7F == 0).all()
    assert (of_heads[[1, 2, 5], 0] == 0).all()


# ---- reading ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES, ids=str)
def test_every_bit_pattern_has_its_value(
    device: str, isa: str, on_cuda: bool, dtype: torch.dtype, cache_dtype: torch.dtype
) -> None:
    """All 256 bit patterns are read as values, and as keys by one-hot queries."""
    skip_unsupported(on_cuda, dtype)
    patterns = torch.arange(256, dtype=torch.uint8)
    values = patterns.view(cache_dtype).double()
    values = torch.where(values.isnan(), 480.0 - 960.0 * (patterns >> 7), values)
    cache = torch.zeros(1, 16, 1, 256, dtype=torch.uint8)
    cache[0, 0, 0] = patterns
    scales = torch.full((1, 16, 1), torch.nan)
    scales[0, 0] = 0.25
    count = 256
    out, lse = attention.append_attention(
        torch.eye(count, dtype=dtype)[:, None],
        PagedKv(*[cache.view(cache_dtype)] * 2, scales, scales),
        PagedBatch(
            torch.arange(count + 1, dtype=torch.int32),
            torch.arange(count + 1, dtype=torch.int32),
            torch.zeros(count, dtype=torch.int32),
            torch.ones(count, dtype=torch.int32),
        ),
        sm_scale=1.0,
        return_lse=True,
    )
    # CUDA computes scores in base 2 and rounds twice when it converts them back.
    assert (lse[:, 0].double() - values * 0.25).abs().max() <= (2.0**-14 if on_cuda else 0.0)
    assert torch.equal(out[:, 0].double(), (values * 0.25).expand(count, -1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES, ids=str)
@pytest.mark.parametrize("page_size", [16, 64])
def test_attention_matches_the_reference(
    device: str,
    isa: str,
    on_cuda: bool,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    page_size: int,
) -> None:
    skip_unsupported(on_cuda, dtype)
    plain = random_batch(
        [1, 5, 17, 64, 130, 600, 65, 520],
        [1, 5, 0, 64, 3, 5, 1, 20],
        dtype,
        page_size=page_size,
    )
    batch = quantized(plain, cache_dtype)
    check_against_reference(batch)
    check_against_reference(batch, window=1)
    check_against_reference(batch, window=100)


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES, ids=str)
@pytest.mark.parametrize(
    "heads,head_dim",
    [
        ((1, 1), 256),
        ((2, 1), 96),
        ((6, 2), 64),
        ((8, 2), 128),
        ((16, 2), 64),
        ((8, 2), 512),
    ],
)
@pytest.mark.pairwise
def test_attention_supports_every_head_shape(
    device: str,
    isa: str,
    on_cuda: bool,
    cache_dtype: torch.dtype,
    heads: tuple[int, int],
    head_dim: int,
) -> None:
    for dtype in query_dtypes(on_cuda):
        plain = random_batch([90, 20, 3], [6, 1, 2], dtype, heads, head_dim)
        check_against_reference(quantized(plain, cache_dtype))


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES, ids=str)
def test_padding_is_zero_and_empty_batches_are_accepted(
    device: str, isa: str, on_cuda: bool, cache_dtype: torch.dtype
) -> None:
    for dtype in query_dtypes(on_cuda):
        batch = quantized(random_batch([40, 30], [2, 1], dtype), cache_dtype)
        padded = replace(batch, q=torch.cat([batch.q, torch.full_like(batch.q, torch.nan)]))
        out, lse = attend(padded)
        assert torch.equal(out[:3], attend(batch)[0])
        assert (out[3:] == 0).all() and (lse[3:] == -torch.inf).all()
        none = quantized(random_batch([40], [0], dtype), cache_dtype)
        assert attend(none)[0].shape == (0, 4, 64)


def test_comparison_detects_planted_faults() -> None:
    """The error allowed for rounding is far smaller than that of wrong scales."""
    batch = quantized(random_batch([40, 70], [3, 30], torch.float32), torch.int8)
    *rest, k_scales, v_scales = tensors = batch.tensors()

    def op(*tensors: Tensor) -> Tensor:
        return reference.append_attention(*grouped(*tensors))[0]

    assert_close(op, op(*tensors), *tensors)
    for wrong in (
        (k_scales, k_scales),
        (v_scales, v_scales),
        (k_scales.roll(1, 1), v_scales),
        (k_scales, v_scales.flip(2)),
        (k_scales * 1.001, v_scales),
    ):
        faulty = op(*rest, *wrong)
        with pytest.raises(AssertionError, match="max error"):
            assert_close(op, faulty, *tensors)


# ---- row identity ----


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES, ids=str)
@pytest.mark.parametrize(
    "dtype,window,heads,head_dim",
    [
        (torch.bfloat16, None, (2, 2), 64),
        (torch.bfloat16, 77, (8, 1), 64),
        (torch.float16, 600, (3, 1), 96),
        (torch.bfloat16, None, (4, 1), 128),
        (torch.float32, 1, (1, 1), 256),
        (torch.bfloat16, 300, (1, 1), 512),
    ],
)
@pytest.mark.fast(
    "cpu-*", "simt-dtype0-*", "simt-dtype[35]-*-torch.int8", ci=("simt-*-torch.int8",)
)
@pytest.mark.pairwise
def test_prefill_rows_equal_decode_rows(
    device: str,
    isa: str,
    on_cuda: bool,
    cache_dtype: torch.dtype,
    dtype: torch.dtype,
    window: int | None,
    heads: tuple[int, int],
    head_dim: int,
) -> None:
    """Chunks, page sizes and threads vary; a NaN in a later token affects no earlier row."""
    skip_unsupported(on_cuda, dtype)
    length = 580 if on_cuda or isa == "portable" else 1093  # two chunks, or three
    q = torch.randn(length, heads[0], head_dim).to(dtype)
    k, v = (torch.randn(length, heads[1], head_dim).to(dtype) for _ in "kv")
    k[-1], v[-1] = torch.nan, torch.inf

    def attend_one(end: int, rows: int, page_size: int) -> tuple[Tensor, Tensor]:
        plain = make_batch([k[:end]], [v[:end]], [q[end - rows : end]], page_size, shuffle=True)
        out, lse = attend(quantized(plain, cache_dtype), sliding_window=window)
        return as_bits(out), as_bits(lse)

    whole = attend_one(length, length, 16)
    assert not whole[0][:-1].view(dtype).isnan().any()
    assert whole[0][-1].view(dtype).isnan().all()
    ends = [1, 63, 65, 300, 513] if on_cuda else [1, 2, 17, 63, 64, 65, 300, 512, 513]
    for end in [*ends, length - 1]:
        for threads, page_size, rows in [(1, 16, 1), (2, 32, 5), (3, 64, 13)]:
            specops.set_num_threads(threads)
            rows = min(rows, end)
            for got, want in zip(attend_one(end, rows, page_size), whole, strict=True):
                assert torch.equal(got, want[end - rows : end])
    for begin in range(0, length - 1, 253):  # prefill in chunks
        end = min(begin + 253, length - 1)
        for got, want in zip(attend_one(end, end - begin, 64), whole, strict=True):
            assert torch.equal(got, want[begin:end])


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES, ids=str)
def test_rows_are_the_same_alone_and_in_a_batch(
    device: str, isa: str, on_cuda: bool, cache_dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    kv_lens = torch.randint(5, 700, (5 if on_cuda else 32,)).tolist()
    keys, values = ([torch.randn(n, 2, 64).bfloat16() for n in kv_lens] for _ in "kv")
    queries = [torch.randn(5, 4, 64).bfloat16() for _ in kv_lens]

    def run(queries: list[Tensor], page_size: int, chosen: list[int]) -> Tensor:
        picked = ([of[b] for b in chosen] for of in (keys, values))
        plain = make_batch(*picked, queries, page_size, shuffle=True)
        return as_bits(attend(quantized(plain, cache_dtype))[0])

    all_requests = list(range(len(kv_lens)))
    alone = [run([queries[b]], 16, [b]) for b in all_requests]
    for threads, page_size in [(1, 16), (2, 64), (3, 32)]:
        specops.set_num_threads(threads)
        assert torch.equal(run(queries, page_size, all_requests), torch.cat(alone))
        last = run([q[-1:] for q in queries], page_size, all_requests)
        assert torch.equal(last, torch.stack([one[-1] for one in alone]))


@pytest.mark.parametrize("seed", range(12))
def test_rows_do_not_depend_on_shared_prefixes(
    device: str, isa: str, on_cuda: bool, seed: int
) -> None:
    if on_cuda and seed % 4 > 1:
        pytest.skip("one seed in two is enough for the interpreter")
    draw = random.Random(seed)
    heads, head_dim = draw.choice([((4, 2), 64), ((2, 1), 96), ((6, 3), 128), ((1, 1), 256)])
    if seed == 8:  # int8
        heads, head_dim = (4, 2), 512
    dtype = torch.bfloat16 if on_cuda else DTYPES[seed % 3]
    plain, tree = prefix_tree(seed, dtype, heads, head_dim, draw.choice([200, 1500]))
    batch = quantized(plain, CACHE_DTYPES[seed % 2])
    for window in (None, draw.choice([1, 60, 300, 1000])):

        def run(
            workspace: int | None = None,
            prefixes: PrefixTensors | None = None,
            window: int | None = window,
        ) -> list[Tensor]:
            memory = None if workspace is None else new_workspace(workspace, on_cuda, device)
            options = {"sliding_window": window, "workspace": memory, "prefixes": prefixes}
            return [as_bits(one) for one in attend(batch, **options)]

        expected = run()
        schedules = [(1, None), (2, 0), (2, None), (3, 30_000), (3, None)]
        for threads, workspace in schedules[:1] if on_cuda else schedules:
            specops.set_num_threads(threads)
            for got, flat in zip(run(workspace, tree), expected, strict=True):
                assert torch.equal(got, flat)


# ---- moving tokens ----


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES, ids=str)
@pytest.mark.no_bf16
@pytest.mark.parametrize("heads,head_dim", [(2, 64), (1, 13)])
def test_moved_slots_keep_their_scales(
    device: str, isa: str, cache_dtype: torch.dtype, heads: int, head_dim: int
) -> None:
    caches = [torch.randint(0, 256, (9, 16, heads, head_dim), dtype=torch.uint8) for _ in "kv"]
    scales = [torch.randn(9, 16, heads) for _ in "kv"]
    cache_pairs: list[list[Tensor]] = [
        [cache.view(cache_dtype) for cache in caches],
        [one[..., None] for one in scales],
    ]
    slots = torch.randperm(144)[:40]
    path = {
        "accepted_nodes": torch.tensor([[1, 2, 5], [0, 3, -1]], dtype=torch.int32),
        "num_accepted_tokens": torch.tensor([3, 2], dtype=torch.int32),
        "qo_indptr": torch.tensor([0, 7, 12], dtype=torch.int32),
        "kv_lens": torch.tensor([40, 20], dtype=torch.int32),
        "kv_indptr": lengths_to_indptr([3, 2]),
        "kv_indices": torch.randperm(9)[:5].int(),
    }
    for pair in cache_pairs:
        expected = [one.clone() for one in pair]
        reference.copy_kv(*expected, slots[:20], slots[20:])
        attention.copy_kv(*pair, slots[:20], slots[20:])
        reference.compact_kv(*expected, **path)
        attention.compact_kv(*pair, **path)
        for got, want in zip(pair, expected, strict=True):
            assert torch.equal(as_bits(got), as_bits(want))


# ---- errors ----


def test_invalid_arguments_are_refused(device: str, on_cuda: bool) -> None:
    batch = quantized(random_batch([40], [2], torch.bfloat16), torch.int8)
    *_, k_scales, v_scales = batch.tensors()

    def refused(message: str, **changes: Tensor | None) -> None:
        q, cache, paged = batch.arguments()
        with pytest.raises(ValueError, match=message):
            attention.append_attention(q, cache._replace(**changes), paged)

    shape = r"float32 \[num_pages=6, page_size=16, num_kv_heads=2\]"
    refused(rf"append_attention: cache.k_scales must be {shape}, got None", k_scales=None)
    refused(rf"append_attention: cache.v_scales must be {shape}, got None", v_scales=None)
    refused(
        rf"cache.k_scales must be {shape}, got float32 \[6, 16\]",
        k_scales=k_scales[..., 0].contiguous(),
    )
    refused(
        rf"cache.v_scales must be {shape}, got bfloat16 \[6, 16, 2\]",
        v_scales=v_scales.bfloat16(),
    )
    refused(
        "cache.k must be bfloat16|int8|float8_e4m3fn .* got uint8",
        k=batch.k_cache.view(torch.uint8),
    )
    refused(
        r"cache.v must be int8 .* got float8_e4m3fn \[6, 16, 2, 64\]",
        v=batch.v_cache.view(torch.float8_e4m3fn),
    )
    plain = random_batch([40], [2], torch.bfloat16)
    with pytest.raises(
        ValueError, match=r"cache\.k_scales must be None where the caches are bfloat16"
    ):
        attend(replace(plain, k_scales=k_scales, v_scales=v_scales))
    if on_cuda:
        other = quantized(random_batch([40], [2], torch.float16), torch.int8)
        with pytest.raises(ValueError, match="q must be bfloat16 where the caches have 8 bits on"):
            attend(other)
    rows: Callable[[int], Tensor] = lambda heads: torch.zeros(2, heads, 64).bfloat16()  # noqa: E731
    with pytest.raises(
        ValueError, match=f"rope_append_kv: cache.v_scales must be {shape}, got None"
    ):
        attention.rope_append_kv(
            rows(4),
            rows(2),
            rows(2),
            PagedKv(batch.k_cache, batch.v_cache, k_scales),
            torch.tensor([0, 1]),
            torch.tensor([0, 1], dtype=torch.int32),
            torch.zeros(8, 64),
        )
