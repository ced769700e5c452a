# SPDX-License-Identifier: Apache-2.0
"""Ops of the attention family match their references, and their rows are batch-invariant."""

import inspect
import random
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import simt
import specops
import torch
from shared_fixtures import assert_close, expect_fault
from specops import attention, reference
from specops.attention import PagedBatch, PagedKv, PrefixTensors
from torch import Tensor

# Number of leading floats of the workspace that must be zero on CUDA, as in csrc/attention.
COUNTERS = 8192
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SCALINGS = [
    None,
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
    {
        "type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.707,
        "beta_fast": 32,
        "beta_slow": 1,
        "truncate": False,
    },
    {"rope_type": "proportional", "partial_rotary_factor": 0.3},
    {"rope_type": "proportional", "factor": 4.0},
]


@pytest.fixture(autouse=True, scope="module")
def _single_threaded_reference() -> Iterator[None]:
    """Use one thread in torch: on a busy machine, every parallel op waits for a time slice."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class Batch:
    """Ragged requests with a poisoned cache: every slot that belongs to no request is NaN."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    kv_lens: Tensor
    k_scales: Tensor | None = None
    v_scales: Tensor | None = None

    def tensors(self) -> tuple[Tensor, ...]:
        return (
            self.q,
            self.k_cache,
            self.v_cache,
            self.qo_indptr,
            self.kv_indptr,
            self.kv_indices,
            self.kv_lens,
            *(scales for scales in (self.k_scales, self.v_scales) if scales is not None),
        )

    def arguments(self) -> tuple[Tensor, PagedKv, PagedBatch]:
        """Return the first arguments of `append_attention`."""
        return grouped(*self.tensors())


def grouped(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_lens: Tensor,
    *scales: Tensor,
) -> tuple[Tensor, PagedKv, PagedBatch]:
    """Return the first arguments of `append_attention`, from the tensors of a `Batch`."""
    cache = PagedKv(k_cache, v_cache, *scales)
    return q, cache, PagedBatch(qo_indptr, kv_indptr, kv_indices, kv_lens)


def lengths_to_indptr(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def make_batch(
    keys: list[Tensor], values: list[Tensor], queries: list[Tensor], page_size: int, shuffle: bool
) -> Batch:
    """Put each request's keys and values, [kv_len, num_kv_heads, head_dim], into pages."""
    counts = [-(-k.shape[0] // page_size) for k in keys]
    num_pages = sum(counts) + 3
    order = torch.randperm(num_pages) if shuffle else torch.arange(num_pages)
    indptr = lengths_to_indptr(counts)
    heads, dtype = keys[0].shape[1:], keys[0].dtype
    k_cache = torch.full((num_pages, page_size, *heads), torch.nan, dtype=dtype)
    v_cache = k_cache.clone()
    indices = order[: sum(counts)]
    for request, (k, v) in enumerate(zip(keys, values, strict=True)):
        position = torch.arange(k.shape[0])
        pages = indices[indptr[request] + position // page_size]
        k_cache[pages, position % page_size] = k
        v_cache[pages, position % page_size] = v
    return Batch(
        q=torch.cat(queries),
        k_cache=k_cache,
        v_cache=v_cache,
        qo_indptr=lengths_to_indptr([q.shape[0] for q in queries]),
        kv_indptr=indptr,
        # Entries behind the page lists are invalid pages.
        kv_indices=torch.cat([indices, torch.tensor([2**30, -7])]).int(),
        kv_lens=torch.tensor([k.shape[0] for k in keys], dtype=torch.int32),
    )


def random_batch(
    kv_lens: list[int],
    qo_lens: list[int],
    dtype: torch.dtype,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    page_size: int = 16,
) -> Batch:
    def draw(length: int, count: int) -> Tensor:
        return torch.randn(length, count, head_dim).to(dtype)

    keys = [draw(n, heads[1]) for n in kv_lens]
    values = [draw(n, heads[1]) for n in kv_lens]
    return make_batch(keys, values, [draw(n, heads[0]) for n in qo_lens], page_size, True)


def check_against_reference(batch: Batch, window: int | None = None) -> None:
    out, lse = attention.append_attention(
        *batch.arguments(), sliding_window=window, return_lse=True
    )

    def expected_out(*tensors: Tensor) -> Tensor:
        return reference.append_attention(*grouped(*tensors), sliding_window=window)[0]

    assert_close(expected_out, out, *batch.tensors())
    wide = [x.double() if x.is_floating_point() else x for x in batch.tensors()]
    truth = reference.append_attention(*grouped(*wide), sliding_window=window)[1]
    used = int(batch.qo_indptr[-1])
    assert (lse[used:] == -torch.inf).all()
    assert (lse[:used] - truth[:used]).abs().max().item() <= 1e-4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.pairwise
def test_append_attention_matches_the_reference(
    device: str, isa: str, dtype: torch.dtype, page_size: int
) -> None:
    batch = random_batch(
        [1, 5, 17, 64, 130, 600, 65, 520],
        [1, 5, 0, 64, 3, 5, 1, 20],
        dtype,
        page_size=page_size,
    )
    check_against_reference(batch)
    check_against_reference(batch, window=1)
    check_against_reference(batch, window=100)


@pytest.mark.parametrize("dtype", DTYPES)
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
def test_append_attention_supports_every_head_shape(
    device: str, isa: str, dtype: torch.dtype, heads: tuple[int, int], head_dim: int
) -> None:
    batch = random_batch([90, 20, 3], [6, 1, 2], dtype, heads, head_dim)
    check_against_reference(batch)


def test_append_attention_zeroes_padding_and_accepts_empty_batches(device: str, isa: str) -> None:
    batch = random_batch([40, 30], [2, 1], torch.bfloat16)
    padded = replace(batch, q=torch.cat([batch.q, torch.full_like(batch.q, torch.nan)]))
    out, lse = attention.append_attention(*padded.arguments(), return_lse=True)
    assert torch.equal(out[:3], attention.append_attention(*batch.arguments()))
    assert (out[3:] == 0).all() and (lse[3:] == -torch.inf).all()

    none = random_batch([40], [0], torch.bfloat16)
    assert attention.append_attention(*none.arguments()).shape == (0, 4, 64)
    empty = replace(
        none,
        qo_indptr=torch.zeros(1, dtype=torch.int32),
        kv_indptr=torch.zeros(1, dtype=torch.int32),
        kv_lens=torch.zeros(0, dtype=torch.int32),
    )
    assert attention.append_attention(*empty.arguments()).shape == (0, 4, 64)


def as_bits(x: Tensor) -> Tensor:
    """Return the bits of a tensor, so that -0 differs from 0."""
    return x.contiguous().view(torch.uint8)


def attend_bits(batch: Batch, **options: Any) -> Tensor:
    """Return the bits of out and lse, a row each."""
    out, lse = attention.append_attention(*batch.arguments(), return_lse=True, **options)
    return torch.cat([as_bits(out).flatten(1), as_bits(lse).flatten(1)], 1)


def attend_one(
    k: Tensor, v: Tensor, q: Tensor, page_size: int, window: int | None = None
) -> tuple[Tensor, Tensor]:
    batch = make_batch([k], [v], [q], page_size, shuffle=True)
    out, lse = attention.append_attention(
        *batch.arguments(), sliding_window=window, return_lse=True
    )
    return out, lse


@pytest.mark.parametrize(
    "dtype,window,heads,head_dim",
    [
        (torch.bfloat16, None, (2, 2), 64),
        (torch.bfloat16, 77, (2, 1), 64),
        (torch.bfloat16, 600, (3, 1), 96),
        (torch.bfloat16, None, (4, 1), 128),
        (torch.bfloat16, 1, (8, 1), 64),
        (torch.bfloat16, None, (1, 1), 256),
        (torch.float32, None, (4, 2), 64),
        (torch.float32, 600, (1, 1), 128),
        (torch.float16, None, (2, 1), 96),
        (torch.bfloat16, 300, (1, 1), 512),
        (torch.float32, 100, (1, 1), 512),
    ],
)
@pytest.mark.fast("cpu-*", "simt-dtype[09]-*", ci=("simt-dtype[238]-*", "simt-dtype10-*"))
def test_append_attention_prefill_rows_equal_decode_rows(
    device: str,
    isa: str,
    on_cuda: bool,
    dtype: torch.dtype,
    window: int | None,
    heads: tuple[int, int],
    head_dim: int,
) -> None:
    length = 580 if on_cuda or isa == "portable" else 1093  # two chunks, or three
    q = torch.randn(length, heads[0], head_dim).to(dtype)
    k, v = (torch.randn(length, heads[1], head_dim).to(dtype) for _ in range(2))
    # A later token must not reach an earlier row, not even as zero times NaN.
    k[-1], v[-1] = torch.nan, torch.inf
    whole, whole_lse = attend_one(k, v, q, 16, window)
    assert not whole[:-1].isnan().any()

    def check(end: int, rows: int, page_size: int) -> None:
        out, lse = attend_one(k[:end], v[:end], q[end - rows : end], page_size, window)
        assert torch.equal(as_bits(out), as_bits(whole[end - rows : end]))
        assert torch.equal(lse, whole_lse[end - rows : end])

    ends = [1, 63, 65, 300, 513] if on_cuda else [1, 2, 17, 63, 64, 65, 300, 512, 513]
    for end in [*ends, length - 1]:
        for threads, page_size, rows in [(1, 16, 1), (2, 32, 5), (3, 64, 13)]:
            specops.set_num_threads(threads)
            check(end, min(rows, end), page_size)
    for begin in range(0, length - 1, 253):  # prefill in chunks
        check(min(begin + 253, length - 1), min(begin + 253, length - 1) - begin, 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_append_attention_rows_are_the_same_alone_and_in_a_batch(
    device: str, isa: str, on_cuda: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    kv_lens = torch.randint(5, 700, (5 if on_cuda else 32,)).tolist()
    keys = [torch.randn(n, 2, 64).to(dtype) for n in kv_lens]
    values = [torch.randn(n, 2, 64).to(dtype) for n in kv_lens]
    queries = [torch.randn(5, 4, 64).to(dtype) for _ in kv_lens]
    alone = [attend_one(*kvq, 16)[0] for kvq in zip(keys, values, queries, strict=True)]
    for threads, page_size in [(1, 16), (2, 64), (3, 32)]:
        specops.set_num_threads(threads)
        batch = make_batch(keys, values, queries, page_size, shuffle=True)
        assert torch.equal(attention.append_attention(*batch.arguments()), torch.cat(alone))
        last = [q[-1:] for q in queries]
        batch = make_batch(keys, values, last, page_size, shuffle=False)
        got = attention.append_attention(*batch.arguments())
        assert torch.equal(got, torch.stack([x[-1] for x in alone]))


def new_workspace(floats: int, on_cuda: bool, device: str) -> Tensor:
    """Return a poisoned workspace; on CUDA its counters are zero."""
    workspace = torch.full((floats,), torch.nan, device=device)
    if on_cuda:
        workspace[:COUNTERS] = 0
    return workspace


@pytest.mark.parametrize(
    "dtype,heads,head_dim,window",
    [
        (torch.bfloat16, (4, 1), 64, None),
        (torch.float16, (5, 1), 96, 2100),
        (torch.bfloat16, (2, 1), 128, None),
        (torch.bfloat16, (1, 1), 256, 70),
        (torch.float32, (2, 2), 64, None),
        (torch.bfloat16, (2, 1), 512, None),
        (torch.float32, (1, 1), 512, 2100),
    ],
)
@pytest.mark.fast("fma-*-dtype[015]-*", "hopper-*-dtype0-*", ci=("fma-*",))
def test_append_attention_does_not_depend_on_the_number_of_sms(
    device: str,
    request: pytest.FixtureRequest,
    on_cuda: bool,
    accumulation: str,
    dtype: torch.dtype,
    heads: tuple[int, int],
    head_dim: int,
    window: int | None,
) -> None:
    # A warp, a block or several blocks compute a sequence, depending on the batch and the SMs.
    kv_lens, qo_lens = [2390, 300, 20, 4100], [5, 1, 17, 3]
    keys, values = ([torch.randn(n, heads[1], head_dim).to(dtype) for n in kv_lens] for _ in "kv")
    queries = [torch.randn(n, heads[0], head_dim).to(dtype) for n in qo_lens]
    expected: list[Tensor] = []

    def check(requests: list[int], rows: int, page_size: int, floats: int | None) -> None:
        """Compute the last `rows` rows of some requests; the first call sets the expectation."""
        rows_of_each = [queries[b][-rows:] for b in requests]
        batch = make_batch(
            [keys[b] for b in requests],
            [values[b] for b in requests],
            rows_of_each,
            page_size,
            True,
        )
        workspace = None if floats is None else new_workspace(floats, on_cuda, device)
        out, lse = attention.append_attention(
            *batch.arguments(), sliding_window=window, workspace=workspace, return_lse=True
        )
        got = [torch.cat([as_bits(out).flatten(1), as_bits(lse).flatten(1)], 1)]
        if workspace is not None and on_cuda:
            assert not workspace[:COUNTERS].view(torch.int32).any()
        if not expected:
            expected.extend(got[0].split([x.shape[0] for x in rows_of_each]))
        assert torch.equal(got[0], torch.cat([expected[b][-rows:] for b in requests]))

    def sms(count: int) -> None:
        if request.node.callspec.params["device"] == "simt":
            simt.load().set_num_sms(count)

    all_requests = [0, 1, 2, 3]
    try:
        sms(4)
        check(all_requests, 99, 16, None)
        check(all_requests, 99, 32, 0)  # whole sequences
        check(all_requests, 2, 64, COUNTERS + 40_000)  # little memory for partial results
        sms(1)
        check(all_requests, 1, 16, None)  # chunks
        sms(40)
        check([3], 1, 64, None)  # leaves
        check([0], 5, 16, None)
        check([2, 1, 0], 3, 32, None)
    finally:
        sms(4)


def test_append_attention_supports_many_requests(device: str, isa: str) -> None:
    # More requests than the kernel plans at a time, some of them idle.
    kv_lens = torch.randint(1, 30, (300,)).tolist()
    batch = random_batch(kv_lens, [i % 2 for i in range(300)], torch.bfloat16, page_size=16)
    check_against_reference(batch)


def test_append_attention_does_not_depend_on_the_workspace(
    device: str, isa: str, on_cuda: bool
) -> None:
    batch = random_batch([2000, 900, 30], [5, 2, 3], torch.bfloat16)
    specops.set_num_threads(3)
    expected = attention.append_attention(*batch.arguments())
    for floats in (0, 20000, 10**6):
        workspace = new_workspace(floats, on_cuda, device)
        got = attention.append_attention(*batch.arguments(), workspace=workspace)
        assert torch.equal(got, expected)


def test_append_attention_reports_a_workspace_without_leading_zeros(
    device: str, isa: str, on_cuda: bool
) -> None:
    batch = random_batch([2000, 30], [5, 3], torch.bfloat16)
    expected = attention.append_attention(*batch.arguments())
    for head in (0.0, 1.0, -1.0):
        workspace = new_workspace(10**6, on_cuda, device)
        workspace[:COUNTERS] = head
        if not on_cuda or head == 0.0:  # a CPU uses no counters
            got = attention.append_attention(*batch.arguments(), workspace=workspace)
            assert torch.equal(got, expected)
            continue
        with expect_fault(on_cuda, "append_attention: workspace must begin with zeros"):
            attention.append_attention(*batch.arguments(), workspace=workspace)


def attend_with_stamps(batch: Batch, stamps: Tensor, workspace: Tensor) -> tuple[Tensor, Tensor]:
    """Call append_attention with phase stamps."""
    attention.set_phase_stamps(stamps)
    try:
        return attention.append_attention(*batch.arguments(), workspace=workspace, return_lse=True)
    finally:
        attention.set_phase_stamps(None)


def test_append_attention_with_phase_stamps_keeps_its_bits(
    request: pytest.FixtureRequest, device: str, on_cuda: bool
) -> None:
    """The phases of a block add up to the block's time."""
    stamps = torch.zeros(1024, 8, dtype=torch.int64, device=device)
    if not on_cuda:
        with pytest.raises(ValueError, match="set_phase_stamps: stamps must be on cuda"):
            attention.set_phase_stamps(stamps)
        return
    if simt.BUILD == "race":
        pytest.skip("the race detector knows only the arguments of an op, not the stamps")
    batch = random_batch([2300, 40, 0], [3, 2, 0], torch.bfloat16, head_dim=128)
    plain = attention.append_attention(*batch.arguments(), return_lse=True)
    floats = attention.attention_workspace_size(
        batch.q.shape, batch.k_cache.shape, batch.kv_indices.shape[0], 3, device
    )
    got = attend_with_stamps(batch, stamps, new_workspace(floats, on_cuda, device))
    assert all(torch.equal(as_bits(x), as_bits(y)) for x, y in zip(got, plain, strict=True))
    rows = stamps[stamps[:, 0] != 0].cpu()
    begin, end, cycles, last = rows[:, 0], rows[:, 1], rows[:, 2:7], rows[:, 7]
    assert rows.shape[0] % 2 == 0 and (stamps[rows.shape[0] :] == 0).all()
    assert (end >= begin).all() and (cycles >= 0).all()
    plan, _, load, stream, merge = cycles.unbind(1)
    assert (plan > 0).all() and (load > 0).any() and ((stream > 0) == (load > 0)).all()
    assert (merge > 0).any()
    if (
        request.node.callspec.params["device"] == "simt"
    ):  # the interpreter's clocks count their reads
        assert torch.equal(cycles.sum(1), last - (begin // 64 + 1) * 100)
    again = stamps.clone()
    attention.append_attention(*batch.arguments())
    assert torch.equal(stamps, again)


def test_append_attention_refuses_invalid_phase_stamps(device: str, on_cuda: bool) -> None:
    if not on_cuda:
        pytest.skip("phase stamps exist on CUDA only")
    batch = random_batch([40], [2], torch.bfloat16, head_dim=128)
    for wrong, words in [
        (torch.zeros(8, dtype=torch.int64, device=device), "stamps must be int64"),
        (torch.zeros(64, 8, device=device), "stamps must be int64"),
        (torch.zeros(64, 7, dtype=torch.int64, device=device), "stamps must be .*words=8"),
    ]:
        with pytest.raises(ValueError, match=f"set_phase_stamps: {words}"):
            attention.set_phase_stamps(wrong)
    few = torch.zeros(1, 8, dtype=torch.int64, device=device)
    workspace = new_workspace(COUNTERS, on_cuda, device)
    with pytest.raises(ValueError, match=r"phase stamps must have a row for each of .* got 1"):
        attend_with_stamps(batch, few, workspace)
    assert not few.any()
    other = random_batch([40], [2], torch.bfloat16)
    with pytest.raises(ValueError, match="q must be bfloat16 with head_dim=128 while phases"):
        attend_with_stamps(other, torch.zeros(1024, 8, dtype=torch.int64, device=device), workspace)


def test_append_attention_ignores_pages_before_the_window(device: str, isa: str) -> None:
    batch = random_batch([300], [3], torch.bfloat16)
    expected = attention.append_attention(*batch.arguments(), sliding_window=100)
    batch.kv_indices[: (297 - 99) // 16] = -1
    assert torch.equal(attention.append_attention(*batch.arguments(), sliding_window=100), expected)


def test_append_attention_refuses_invalid_heads(device: str) -> None:
    """The arguments have no query heads, or a cache whose heads come before its slots."""
    batch = random_batch([40, 50], [2, 1], torch.bfloat16)
    none = replace(batch, q=batch.q[:, :0].contiguous())
    for workspace in (None, torch.zeros(1 << 20)):
        with pytest.raises(ValueError, match=r"num_qo_heads must be 1 to 64 times .*, got 0"):
            attention.append_attention(*none.arguments(), workspace=workspace)
    none = replace(batch, q=batch.q[..., :0].contiguous())
    with pytest.raises(ValueError, match=r"^append_attention: cache.k must be .*head_dim=0.*"):
        attention.append_attention(*none.arguments())
    swapped = {name: getattr(batch, name).transpose(1, 2).contiguous() for name in CACHES}
    with pytest.raises(ValueError, match=r"page_size must be 16, 32 or 64 .*second dim.*got"):
        attention.append_attention(*replace(batch, **swapped).arguments())


@pytest.mark.parametrize(
    "batch,tokens,rows,heads",
    [
        (1, 1 << 20, 8, 64),
        (1, 512 << 10, 8, 64),
        (1, 256 << 10, 17, 64),
        (4, 256 << 10, 8, 64),
        (8, 128 << 10, 8, 64),
        (32, 32 << 10, 8, 64),
        (64, 32 << 10, 5, 32),
    ],
)
def test_workspace_has_room_to_split_long_contexts(
    device: str, batch: int, tokens: int, rows: int, heads: int
) -> None:
    """Each chunk of 2,048 tokens stores a state for each row and head; a request needs them all."""
    if device == "cpu":
        pytest.skip("CPU threads divide requests in another way")
    pages = batch * tokens // 16
    size = attention.attention_workspace_size(
        (batch * rows, heads, 128), (pages, 16, 8, 128), pages, batch, torch.device("cpu")
    )
    assert size >= batch * (tokens // 2048) * rows * heads * (128 + 2)


def test_attention_workspace_size_refuses_invalid_arguments(device: str) -> None:
    def refused(message: str, *changes: Any) -> None:
        good = [(3, 4, 64), (9, 16, 2, 64), 9, 2, "cpu"]
        for place, value in zip(changes[::2], changes[1::2], strict=True):
            good[place] = value
        with pytest.raises(ValueError, match=f"^attention_workspace_size: {message}"):
            attention.attention_workspace_size(*good)

    refused("num_kv_heads must be an int in 1 .. 4096, got 0", 1, (9, 16, 0, 64))
    refused("num_qo_heads must be an int in 1 .. 4096, got 0", 0, (3, 0, 64))
    refused("rows must be .*, got -1", 0, (-1, 4, 64))
    refused(r"q_shape must be 3 sizes, got tuple", 0, (3, 4))
    refused("cache_shape must be 4 sizes, got None", 1, None)
    refused("num_pages must be .*, got 9.5", 2, 9.5)
    refused("batch must be .*, got -1", 3, -1)
    refused("device must be a torch.device, got 'elsewhere'", 4, "elsewhere")


CACHES = ("k_cache", "v_cache")


def test_append_attention_refuses_invalid_arguments(device: str, on_cuda: bool) -> None:
    batch = random_batch([40, 50], [2, 1], torch.bfloat16)

    def faulty(message: str, on_cuda_message: str, **changes: Tensor) -> None:
        with expect_fault(on_cuda, on_cuda_message if on_cuda else message):
            attention.append_attention(*replace(batch, **changes).arguments())

    def refused(message: str, window: int | None = None, **changes: Tensor) -> None:
        changed = replace(batch, **changes)
        with pytest.raises(ValueError, match=message):
            attention.append_attention(*changed.arguments(), sliding_window=window)

    gone = batch.kv_indices.clone()
    gone[4] = 99
    faulty(
        r"append_attention: batch.kv_indices\[4\] must be in \[0, num_pages=10\) where a row sees "
        "the page, got 99",
        r"append_attention: batch.kv_indices must be in \[0, num_pages\) where",
        kv_indices=gone,
    )
    lengths = (
        "append_attention: batch.kv_lens must be at least the request's rows and at most the slots"
    )
    faulty(
        r"kv_lens\[1\] must be at least the request's rows=1 and at most the slots of its "
        "pages=64, got 0",
        lengths,
        kv_lens=torch.tensor([40, 0], dtype=torch.int32),
    )
    faulty(r"kv_lens\[0\].*got 49", lengths, kv_lens=torch.tensor([49, 50], dtype=torch.int32))
    in_order = (
        "append_attention: batch.{} must be non-decreasing from 0, at least the entry before it"
    )
    least = -(2**31)  # its distance from 2 does not fit an int
    for entries, got in (([0, 2, 1], 1), ([0, 2, least], least), ([0, 2, 4], 4)):
        faulty(
            rf"qo_indptr\[2\].* = 2 and at most the rows of q = 3, got {got}",
            in_order.format("qo_indptr"),
            qo_indptr=torch.tensor(entries, dtype=torch.int32),
        )
    for entries, got in (([0, 3, 2], 2), ([0, 3, 10], 10)):
        faulty(
            rf"kv_indptr\[2\].* = 3 and at most the size of batch.kv_indices = 9, got {got}",
            in_order.format("kv_indptr"),
            kv_indptr=torch.tensor(entries, dtype=torch.int32),
        )
    faulty(
        r"kv_indptr\[0\].* at most the size of batch.kv_indices = 9, got -1",
        in_order.format("kv_indptr"),
        kv_indptr=torch.tensor([-1, 3, 7], dtype=torch.int32),
    )
    refused("cache.k must be float32", q=batch.q.float())
    refused("q must be float32|bfloat16|float16", q=batch.q.double())
    refused("sliding_window must be an int of at least 1", window=0)
    refused("num_qo_heads must be 1 to 64 times num_kv_heads=2, got 3", q=batch.q[:, :3].clone())
    if on_cuda:  # the invalid row is zero, and the others keep their values
        got, lse = attention.append_attention(
            *replace(batch, kv_lens=torch.tensor([40, 0], dtype=torch.int32)).arguments(),
            return_lse=True,
        )
        assert torch.equal(got[:2], attention.append_attention(*batch.arguments())[:2])
        assert (got[2] == 0).all() and (lse[2] == -torch.inf).all()
        with pytest.raises(ValueError, match=lengths):
            specops.check_errors()
    for head_dim in (80, 1024):
        wide = random_batch([4], [1], torch.float32, head_dim=head_dim)
        message = f"head_dim must be 64, 96, 128, 256 or 512, got {head_dim}$"
        with pytest.raises(ValueError, match=message):
            attention.append_attention(*wide.arguments())


def prefix_tree(
    seed: int, dtype: torch.dtype, heads: tuple[int, int], head_dim: int, most_tokens: int
) -> tuple[Batch, PrefixTensors]:
    """Return requests that share the pages of a random tree of prefixes, and the tree."""
    draw = random.Random(seed)
    size, page_size = draw.randint(1, 12), draw.choice([16, 32, 64])
    cuts, shared, leaders, lens = {0}, [0] * size, [], []
    common = [0] * size  # tokens in common with the request before
    for _ in range(draw.randint(1, 3)):
        cuts |= {b for b in range(size) if draw.random() < 0.25}
        leaders.append([max(c for c in cuts if c <= b) for b in range(size)])
        lens.append(list(shared))
        for leader in cuts:
            group = [b for b in range(size) if leaders[-1][b] == leader]
            longer = draw.choice([0, draw.randint(1, 70), draw.randint(1, most_tokens)])
            for b in group:
                shared[b] += longer if len(group) > 1 else 0
                common[b] = common[b] if b == leader else shared[b]
                lens[-1][b] = shared[b] if len(group) > 1 else draw.choice([0, 7, 10**6])
    qo_lens = [draw.choice([0, 1, 1, 1, 3, 5, 13, 40]) for _ in range(size)]
    own = [draw.choice([0, 1, draw.randint(0, 150)]) for _ in range(size)]
    kv_lens = [sum(x) for x in zip(shared, qo_lens, own, strict=True)]
    pages: list[list[int]] = []
    used = 0
    for b in range(size):
        first = pages[-1][: -(-common[b] // page_size)] if b else []
        count = -(-kv_lens[b] // page_size) - len(first)
        pages.append([*first, *range(used, used + count)])
        used += count
    order = torch.randperm(used)
    caches = [torch.randn(used, page_size, heads[1], head_dim).to(dtype) for _ in range(2)]
    batch = Batch(
        q=torch.randn(sum(qo_lens), heads[0], head_dim).to(dtype),
        k_cache=caches[0],
        v_cache=caches[1],
        qo_indptr=lengths_to_indptr(qo_lens),
        kv_indptr=lengths_to_indptr([len(x) for x in pages]),
        kv_indices=torch.cat([order[x] for x in pages]).int(),
        kv_lens=torch.tensor(kv_lens, dtype=torch.int32),
    )
    return batch, PrefixTensors(*(torch.tensor(x, dtype=torch.int32) for x in (leaders, lens)))


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.fast("*-?", ci=("*-??",))
def test_append_attention_does_not_depend_on_shared_prefixes(
    device: str, isa: str, on_cuda: bool, seed: int
) -> None:
    if on_cuda and seed % 4:
        pytest.skip("one seed in four is enough for the interpreter")
    draw = random.Random(seed)
    dtype = DTYPES[seed % 3]
    heads, head_dim = draw.choice([((4, 2), 64), ((2, 1), 96), ((6, 3), 128), ((1, 1), 256)])
    if seed in (7, 8, 24):  # bfloat16 on the CPU; float16 and float32 in the interpreter as well
        heads, head_dim = (4, 2), 512
    batch, tree = prefix_tree(seed, dtype, heads, head_dim, draw.choice([200, 1500]))
    for window in (None, draw.choice([1, 60, 300, 1000])):

        def attend(
            workspace: int | None = None,
            prefixes: PrefixTensors | None = None,
            window: int | None = window,
        ) -> tuple[Tensor, ...]:
            out, lse = attention.append_attention(
                *batch.arguments(),
                sliding_window=window,
                return_lse=True,
                workspace=None if workspace is None else new_workspace(workspace, on_cuda, device),
                prefixes=prefixes,
            )
            return as_bits(out), as_bits(lse)

        expected = attend()
        schedules = [(1, None), (2, 0), (2, None), (3, 30_000), (3, None)]
        for threads, workspace in schedules[:1] if on_cuda else schedules:
            specops.set_num_threads(threads)
            for got, flat in zip(attend(workspace, tree), expected, strict=True):
                assert torch.equal(got, flat)


def test_append_attention_supports_a_prefix_of_many_requests(
    device: str, isa: str, on_cuda: bool
) -> None:
    # More requests than the kernel plans at a time, more rows than a work item has, some idle.
    count, page_size = 30 if on_cuda else 300, 16
    qo_lens = [i % 3 for i in range(count)]
    own = torch.arange(count) + 9
    kv_indices = torch.cat([torch.cat([torch.arange(9), page[None]]) for page in own]).int()
    caches = [torch.randn(count + 9, page_size, 1, 64).bfloat16() for _ in range(2)]
    arguments = grouped(
        torch.randn(sum(qo_lens), 2, 64).bfloat16(),
        *caches,
        lengths_to_indptr(qo_lens),
        lengths_to_indptr([10] * count),
        kv_indices,
        torch.full((count,), 150, dtype=torch.int32),
    )
    expected = attention.append_attention(*arguments)
    leaders = torch.zeros(1, count, dtype=torch.int32)
    prefixes = PrefixTensors(leaders, torch.full_like(leaders, 9 * page_size))
    for threads in (1, 3):
        specops.set_num_threads(threads)
        got = attention.append_attention(*arguments, prefixes=prefixes)
        assert torch.equal(as_bits(got), as_bits(expected))


@pytest.mark.parametrize("members", [12, 23, 24, 25, 32, 33, 47, 64, 65, 131])
@pytest.mark.fast("cpu-*", "simt-33")
def test_append_attention_does_not_depend_on_the_size_of_a_bundle(
    device: str, isa: str, members: int
) -> None:
    # From one row to several tiles, with scores of -inf and NaN.
    page_size, shared = 64, 11
    caches = [torch.randn(shared + members, page_size, 2, 128).bfloat16() for _ in range(2)]
    caches[0][3, 5, 0] = -torch.inf
    caches[0][4, :, 1] = 3e38
    caches[0][6, 7, 1, 9] = torch.nan
    caches[1][2, 1, 0, 4] = torch.inf
    pages = [[*range(shared), shared + b] for b in range(members)]
    batch = Batch(
        q=torch.randn(members, 2, 128).bfloat16(),
        k_cache=caches[0],
        v_cache=caches[1],
        qo_indptr=lengths_to_indptr([1] * members),
        kv_indptr=lengths_to_indptr([shared + 1] * members),
        kv_indices=torch.tensor(pages, dtype=torch.int32).flatten(),
        kv_lens=torch.full((members,), shared * page_size + 3, dtype=torch.int32),
    )
    batch.q[: members // 2].abs_()  # the first key's score is -inf for these rows, else NaN
    leaders = torch.zeros(1, members, dtype=torch.int32)
    lens = torch.full_like(leaders, shared * page_size)
    for begin in (0, 7 * page_size):  # later pages have finite numbers only
        kv_lens = batch.kv_lens - begin
        first = begin // page_size
        pages_left = torch.tensor([x[first:] for x in pages], dtype=torch.int32)
        part = replace(
            batch,
            kv_indptr=lengths_to_indptr([shared + 1 - first] * members),
            kv_indices=pages_left.flatten(),
            kv_lens=kv_lens,
        )
        flat = attention.append_attention(*part.arguments(), return_lse=True)
        got = attention.append_attention(
            *part.arguments(), return_lse=True, prefixes=PrefixTensors(leaders, lens - begin)
        )
        for x, y in zip(got, flat, strict=True):
            assert torch.equal(x.isnan(), y.isnan())
            assert torch.equal(as_bits(x.nan_to_num(nan=1.0)), as_bits(y.nan_to_num(nan=1.0)))
        assert not begin or not got[0].isnan().any()


@pytest.mark.parametrize(
    "dtype,head_dim,window",
    [(torch.bfloat16, 64, None), (torch.float32, 64, 9000), (torch.float16, 64, 3000)],
)
@pytest.mark.fast("fma-*-dtype0-*", ci=("hopper-*-dtype2-*",))
def test_append_attention_with_prefixes_does_not_depend_on_the_number_of_sms(
    device: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    on_cuda: bool,
    accumulation: str,
    dtype: torch.dtype,
    head_dim: int,
    window: int | None,
) -> None:
    # The bytes that calls read are compared, so all calls must run under the same schedules.
    monkeypatch.setenv("SPECOPS_SIMT_SCHEDULES", "all")
    # Prefixes of whole and partial chunks, with two row tiles and three levels.
    page_size, qo_lens, own = 64, [1, 4, 0, 2, 9, 1], [3, 300, 0, 700, 1, 40]
    shared = [4864, 4864, 4864, 2560, 2560, 2368]
    tree = (
        [[0] * 6, [0, 0, 0, 3, 3, 5], [0, 0, 2, 3, 3, 5]],
        [[2350] * 6, [4700] * 3 + [2560] * 2 + [0], [4864] * 2 + [0, 2560, 2560, 0]],
    )
    kv_lens = [x + y + z for x, y, z in zip(shared, own, qo_lens, strict=True)]
    pages: list[list[int]] = []
    used = 0
    for b in range(6):
        like, common = [(0, 0), (0, 76), (0, 76), (0, 37), (3, 40), (0, 37)][b]
        first = pages[like][:common] if b else []
        count = -(-kv_lens[b] // page_size) - len(first)
        pages.append([*first, *range(used, used + count)])
        used += count
    caches = [torch.randn(used, page_size, 1, head_dim).to(dtype) for _ in range(2)]
    batch = Batch(
        q=torch.randn(sum(qo_lens), 4, head_dim).to(dtype),
        k_cache=caches[0],
        v_cache=caches[1],
        qo_indptr=lengths_to_indptr(qo_lens),
        kv_indptr=lengths_to_indptr([len(x) for x in pages]),
        kv_indices=torch.tensor([page for x in pages for page in x], dtype=torch.int32),
        kv_lens=torch.tensor(kv_lens, dtype=torch.int32),
    )
    prefixes = PrefixTensors(*(torch.tensor(x, dtype=torch.int32) for x in tree))
    is_simt = request.node.callspec.params["device"] == "simt"

    def attend(
        floats: int | None = None, prefixes: PrefixTensors | None = None
    ) -> tuple[Tensor, Tensor, int]:
        workspace = None if floats is None else new_workspace(floats, on_cuda, device)
        if is_simt:
            simt.load().reset_counters()
        out, lse = attention.append_attention(
            *batch.arguments(),
            sliding_window=window,
            workspace=workspace,
            return_lse=True,
            prefixes=prefixes,
        )
        read = simt.load().counters()["copied_bytes"] if is_simt else 0
        return as_bits(out), as_bits(lse), read

    expected = attend()
    try:
        for sms, floats, is_shared in [
            (4, None, True),
            (1, None, True),
            (40, None, True),
            (4, 0, False),
        ]:
            if is_simt:
                simt.load().set_num_sms(sms)
            out, lse, read = attend(floats, prefixes)
            assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
            if is_simt and window is None:
                assert (read < 0.5 * expected[2]) == is_shared
    finally:
        if is_simt:
            simt.load().set_num_sms(4)


def test_append_attention_shares_prefixes_only_among_narrow_requests(
    device: str, request: pytest.FixtureRequest, on_cuda: bool
) -> None:
    # Tiles full of one request's rows read the prefix once anyway, and sharing would cost writing
    # and reading partial states. Requests with few rows in the same batch share.
    page_size, prefix = 64, 512
    counts = [16, 16, 1, 1, 1]  # rows, of 4 query heads each
    pages = [[*range(prefix // page_size), 8 + b] for b in range(5)]
    caches = [torch.randn(13, page_size, 1, 64).bfloat16() for _ in range(2)]

    def attend(members: list[int], prefixes: PrefixTensors | None = None) -> tuple[Tensor, int]:
        rows = [counts[b] for b in members]
        kv_lens = torch.tensor([prefix + n for n in rows], dtype=torch.int32)
        torch.manual_seed(len(rows))
        batch = Batch(
            q=torch.randn(sum(rows), 4, 64).bfloat16(),
            k_cache=caches[0],
            v_cache=caches[1],
            qo_indptr=lengths_to_indptr(rows),
            kv_indptr=lengths_to_indptr([9] * len(rows)),
            kv_indices=torch.tensor([pages[b] for b in members], dtype=torch.int32).flatten(),
            kv_lens=kv_lens,
        )
        is_simt = request.node.callspec.params["device"] == "simt"
        if is_simt:
            simt.load().reset_counters()
        out = attention.append_attention(*batch.arguments(), prefixes=prefixes)
        assert isinstance(out, Tensor)
        return as_bits(out), simt.load().counters()["copied_bytes"] if is_simt else 0

    for members, is_shared in (([0, 1], False), ([2, 3], True), ([0, 2, 3, 4], True)):
        leaders = torch.zeros(1, len(members), dtype=torch.int32)
        flat, whole = attend(members)
        prefixes = PrefixTensors(leaders, torch.full_like(leaders, prefix))
        out, read = attend(members, prefixes)
        assert torch.equal(out, flat)
        assert not whole or (read < whole) == is_shared


def test_append_attention_refuses_invalid_prefixes(device: str, on_cuda: bool) -> None:
    batch = random_batch([100, 100, 100, 90], [2, 1, 0, 3], torch.float32)
    pages = batch.kv_indices[:28].view(4, 7)  # the last request has six; its seventh is unused
    kv_indices = torch.cat([pages[0, :4], pages[0, 4:]] + [pages[0]] * 3)
    good = replace(batch, kv_indices=kv_indices, kv_indptr=lengths_to_indptr([7] * 4))

    def call(leaders: list[list[int]], lens: list[list[int]], **changes: object) -> Tensor:
        tensors = [torch.tensor(x, dtype=torch.int32).view(len(x), -1) for x in (leaders, lens)]
        window = changes.pop("window", None)
        return attention.append_attention(
            *replace(good, **changes).arguments(),
            sliding_window=window,
            prefixes=PrefixTensors(*tensors),
        )

    def refused(
        message: str, leaders: list[list[int]], lens: list[list[int]], **kw: object
    ) -> None:
        with pytest.raises(ValueError, match=message):
            call(leaders, lens, **kw)

    one = [[0, 0, 0, 0]]
    expected = attention.append_attention(*good.arguments())
    assert torch.equal(call(one, [[87] * 4]), expected)
    assert torch.equal(call([*one, [0, 0, 2, 2]], [[50] * 4, [98, 98, 60, 60]]), expected)
    refused(
        "prefixes.lens must be int32 \\[levels=1, batch=4\\], got int32 \\[2, 2\\]",
        one,
        [[0] * 2] * 2,
    )
    with pytest.raises(ValueError, match=r"prefixes.lens must be int32 .*got None$"):
        half: Any = PrefixTensors(torch.zeros(1, 4).int(), None)
        attention.append_attention(*good.arguments(), prefixes=half)
    if on_cuda:  # only the CPU checks the values
        return
    refused(r"prefixes.leaders\[0, 0\] must be 0, got 1", [[1, 1, 1, 1]], [[0] * 4])
    refused(
        r"prefixes.leaders\[0, 2\] must be 2 \(a group of its own\) or 1 \(that of .*\), got 0",
        [[0, 1, 0, 0]],
        [[9] * 4],
    )
    refused(r"prefixes.lens\[0, 0\] must be at least 0, got -1", one, [[-1] * 4])
    refused(
        r"prefixes.lens\[0, 3\] must be 9 as in the rest of its group, got 8",
        one,
        [[9, 9, 9, 8]],
    )
    refused(
        r"prefixes.leaders\[1, 2\] must be 2, where a group of level 0 begins, got 0",
        [[0, 0, 2, 2], [0, 0, 0, 3]],
        [[9] * 4, [9] * 4],
    )
    refused(
        r"prefixes.lens\[1, 1\] must be at least that of level 0, 9, got 8",
        [[0, 0, 0, 0], [0, 0, 2, 3]],
        [[9] * 4, [8, 8, 0, 0]],
    )
    refused(
        r"prefixes.lens\[0, 3\] must be at most batch.kv_lens - rows of request 3, 87, got 88",
        one,
        [[88] * 4],
    )
    other = kv_indices.clone()
    other[7 * 3 + 4] = pages[1, 0]
    message = (
        rf"page 4 of request 3 in batch.kv_indices must be that of request 1, {pages[0, 4]}, as "
        rf"prefixes.lens\[0, 3\]=65 tokens are shared, got {pages[1, 0]}"
    )
    refused(message, one, [[65] * 4], kv_indices=other)
    call(one, [[64] * 4], kv_indices=other)
    call(one, [[65] * 4], kv_indices=other, window=15)


def test_comparison_detects_planted_faults() -> None:
    """The error that `assert_close` allows is far smaller than that of a planted fault."""
    batch = random_batch([40, 70], [3, 30], torch.float32)
    q, *rest = batch.tensors()

    def op(*tensors: Tensor, **options: Any) -> Tensor:
        return reference.append_attention(*grouped(*tensors), **options)[0]

    good = op(q, *rest)
    assert_close(op, good, q, *rest)
    faulty = {
        "scale": op(q, *rest, sm_scale=64**-0.5 * 1.001),
        "window": op(q, *rest, sliding_window=69),
        "heads": op(q, *rest).roll(1, 1),
        "row": op(q, *rest).roll(1, 0),
        "halves": op(q.roll(32, 2), *rest),
        "bfloat16": good.bfloat16().float(),
    }
    for name, out in faulty.items():
        with pytest.raises(AssertionError, match="max error"):
            assert_close(op, out, q, *rest)
            pytest.fail(name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    "head_dim,rotary_dim", [(64, 64), (96, 24), (128, 128), (256, 64), (512, 512)]
)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.fast("*-40-*", "*-1-*-64-64-*")
@pytest.mark.no_bf16
@pytest.mark.pairwise
def test_rope_append_kv_matches_the_reference(
    device: str,
    isa: str,
    dtype: torch.dtype,
    interleaved: bool,
    head_dim: int,
    rotary_dim: int,
    norm: bool,
    rows: int,
) -> None:
    qkv = torch.randn(rows, 4 + 2 + 2, head_dim).to(dtype)
    q, k, v = qkv.split([4, 2, 2], dim=1)
    cache = torch.full((40, 16, 2, head_dim), 7.0, dtype=dtype)
    slots = torch.randperm(640)[:rows]
    positions = torch.randint(0, 500, (rows,), dtype=torch.int32)
    if rows > 2:
        slots[1] = slots[2] = -1
        positions[2] = -1
    cos_sin = attention.rope_cos_sin(500, rotary_dim, 1e4)
    weights = [torch.randn(head_dim).to(dtype) for _ in range(2)] if norm else [None, None]

    def expected_out(q: Tensor, k: Tensor, v: Tensor, *weights: Tensor) -> Tensor:
        caches = PagedKv(cache.to(q.dtype).clone(), cache.to(q.dtype).clone())
        kw = dict(zip(["q_norm_weight", "k_norm_weight"], weights, strict=False))
        out = reference.rope_append_kv(
            q, k, v, caches, slots, positions, cos_sin, interleaved=interleaved, **kw
        )
        return torch.cat([out.flatten(), *(c.flatten() for c in caches[:2])])

    k_cache, v_cache = cache.clone(), cache.clone()
    out = attention.rope_append_kv(
        q,
        k,
        v,
        PagedKv(k_cache, v_cache),
        slots,
        positions,
        cos_sin,
        interleaved=interleaved,
        q_norm_weight=weights[0],
        k_norm_weight=weights[1],
    )
    got = torch.cat([out.flatten(), k_cache.flatten(), v_cache.flatten()])
    assert_close(expected_out, got, q, k, v, *([w for w in weights if w is not None]))
    # Run each row alone, in place, on one thread.
    specops.set_num_threads(1)
    for row in {0, rows // 2, rows - 1}:
        k_one, v_one = cache.clone(), cache.clone()
        q_one = q[row : row + 1].clone()
        attention.rope_append_kv(
            q_one,
            k[row : row + 1],
            v[row : row + 1],
            PagedKv(k_one, v_one),
            slots[row : row + 1],
            positions[row : row + 1],
            cos_sin,
            interleaved=interleaved,
            q_norm_weight=weights[0],
            k_norm_weight=weights[1],
            q_out=q_one,
        )
        assert torch.equal(q_one[0], out[row])
        if slots[row] >= 0:
            assert torch.equal(k_one.flatten(0, 1)[slots[row]], k_cache.flatten(0, 1)[slots[row]])
            assert torch.equal(v_one.flatten(0, 1)[slots[row]], v[row])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("head_dim", [64, 512])
@pytest.mark.no_bf16
@pytest.mark.pairwise
def test_rope_append_kv_does_not_depend_on_alignment(
    device: str, isa: str, dtype: torch.dtype, interleaved: bool, head_dim: int
) -> None:
    def moved(x: Tensor) -> Tensor:
        """Return a copy that starts one element after an aligned address."""
        return torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)

    count = 400 if head_dim == 64 else 120
    q, k, v = torch.randn(count, 12, head_dim).to(dtype).split([8, 2, 2], dim=1)
    q[3], k[4] = torch.nan, torch.inf  # must not affect other rows
    weights = {f"{name}_norm_weight": torch.randn(head_dim).to(dtype) for name in "qk"}
    slots, positions = torch.randperm(416)[:count], torch.arange(count, dtype=torch.int32)
    cos_sin = attention.rope_cos_sin(count, head_dim // 4 * 3, 1e4)

    def call(rows: slice, place: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        cache = torch.zeros(2, 26, 16, 2, head_dim, dtype=dtype)
        kv = [place(x) for x in cache]
        out = attention.rope_append_kv(
            *(place(x[rows]) for x in (q, k, v)),
            PagedKv(*kv),
            slots[rows],
            positions[rows],
            place(cos_sin),
            interleaved=interleaved,
            **{name: place(weight) for name, weight in weights.items()},
        )
        return out, torch.stack([x.flatten(0, 1)[slots[rows]] for x in kv])

    # The kernel shares cosines among heads only if there are many rows.
    many, many_kv = call(slice(0, count), lambda x: x)
    for rows in (slice(count - 70, count), slice(2, 3)):
        for place in (moved, torch.clone):
            out, kv = call(rows, place)
            assert torch.equal(as_bits(out), as_bits(many[rows]))
            assert torch.equal(as_bits(kv), as_bits(many_kv[:, rows]))


@pytest.mark.parametrize("heads,kv_heads,head_dim", [(0, 0, 64), (4, 2, 0), (0, 2, 64), (4, 0, 64)])
def test_rope_append_kv_supports_zero_sizes(
    device: str, heads: int, kv_heads: int, head_dim: int
) -> None:
    """Without query or KV heads, the heads of the other kind are still written."""
    q, k = torch.randn(2, heads, head_dim), torch.randn(2, kv_heads, head_dim)
    cache = torch.zeros(2, 16, kv_heads, head_dim)
    slots, positions = torch.tensor([3, 4]), torch.tensor([0, 1], dtype=torch.int32)
    table = attention.rope_cos_sin(8, 64, 1e4) if head_dim else torch.zeros(8, 0)
    out = attention.rope_append_kv(q, k, k, PagedKv(cache, cache.clone()), slots, positions, table)
    assert out.shape == q.shape
    expected_cache = cache.clone().zero_()
    expected = PagedKv(expected_cache, expected_cache.clone())
    reference.rope_append_kv(q, k, k, expected, slots, positions, table)
    torch.testing.assert_close(cache, expected_cache)


def test_rope_append_kv_refuses_before_writing(device: str, on_cuda: bool) -> None:
    q, k = torch.randn(2, 4, 64), torch.randn(2, 2, 64)
    cos_sin = attention.rope_cos_sin(8, 64, 1e4)

    def refused(message: str, slots: list[int], positions: list[int]) -> None:
        k_cache, v_cache = torch.zeros(2, 16, 2, 64), torch.zeros(2, 16, 2, 64)
        q_out = torch.full_like(q, 7.0)
        with expect_fault(on_cuda, message):
            attention.rope_append_kv(
                q,
                k,
                k,
                PagedKv(k_cache, v_cache),
                torch.tensor(slots),
                torch.tensor(positions, dtype=torch.int32),
                cos_sin,
                q_out=q_out,
            )
        # The second row is invalid. CUDA skips it; the CPU writes nothing at all.
        caches = torch.stack([k_cache, v_cache]).flatten(1, 2)
        assert (caches[:, 1:] == 0).all()
        assert (q_out[1] == (0.0 if on_cuda else 7.0)).all()
        assert on_cuda or ((caches == 0).all() and (q_out == 7.0).all())

    refused(
        r"^rope_append_kv: cache_slots.* must be -1 or .*, got (32|another value)", [0, 32], [0, 1]
    )
    refused(r"cache_slots.* must be -1 or .*, got (-2|another value)", [0, -2], [0, 1])
    refused(r"positions.* must be in \[0, max_positions.*, got (8|another value)", [0, 1], [0, 8])
    refused(r"positions.*, or -1 where cache_slots is -1, got (-1|another value)", [0, 1], [0, -1])


@pytest.mark.parametrize("scaling", SCALINGS)
def test_rope_cos_sin_matches_the_reference(device: str, scaling: dict[str, object] | None) -> None:
    got = attention.rope_cos_sin(512, 64, 1e6, scaling)
    assert got.shape == (512, 64) and got.dtype == torch.float32
    # A float32 angle of 512 radians is off by up to 3e-5; below 8 radians the table is tight.
    torch.testing.assert_close(
        got, reference.rope_cos_sin(512, 64, 1e6, scaling), rtol=0, atol=1e-4
    )
    torch.testing.assert_close(
        got[:8], reference.rope_cos_sin(8, 64, 1e6, scaling), rtol=0, atol=1e-6
    )


def test_rope_cos_sin_refuses_invalid_arguments(device: str) -> None:
    for scaling, message in [
        ({"rope_type": "dynamic", "factor": 2.0}, "got 'dynamic'"),
        ({"rope_type": "linear"}, "'linear' needs the key 'factor'"),
        ({"rope_type": "linear", "factor": 2.0, "betas": 1}, "'linear' has no key 'betas'"),
        ({"rope_type": "default", "rope_theta": 5e5}, "must be the rope_theta=500000.0"),
        ({"rope_type": "proportional", "partial_rotary_factor": 1.5}, "must be at most 1, got 1.5"),
    ]:
        with pytest.raises(ValueError, match=message):
            attention.rope_cos_sin(4, 64, 1e4, scaling)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"rotary_dim": 63}, "rotary_dim must be even and at most 512, got 63"),
        ({"rotary_dim": 514}, "rotary_dim must be even and at most 512, got 514"),
        ({"rotary_dim": 2**31}, "rotary_dim must be an int32 of at least 2, got 2147483648"),
        ({"rotary_dim": 64.0}, "rotary_dim must be an int32 of at least 2, got 64.0"),
        ({"max_positions": -1}, "max_positions must be an int32 of at least 0, got -1"),
        ({"max_positions": 2**31}, "max_positions must be an int32 of at least 0, got 2147483648"),
        ({"theta": 0.0}, "theta must be a finite number above 0, got 0.0"),
        ({"theta": torch.nan, "scaling": {"rope_theta": 1e4}}, "theta must be .*, got nan"),
        ({"theta": "1"}, "theta must be a finite number above 0, got '1'"),
        ({"scaling": 3}, "scaling must be a mapping, or None, got 3"),
        ({"scaling": {"rope_type": "linear", "factor": 0}}, "factor must be a finite number above"),
        ({"scaling": {"rope_type": "linear", "factor": "2"}}, "factor must be .*, got '2'"),
    ]
    for arguments, message in wrong:
        with pytest.raises(ValueError, match=f"^rope_cos_sin: {message}"):
            attention.rope_cos_sin(
                **{"max_positions": 4, "rotary_dim": 64, "theta": 1e4, **arguments}
            )


@pytest.mark.skipif(not hasattr(typing, "get_overloads"), reason="Python 3.10 has no get_overloads")
def test_append_attention_overloads_type_its_result() -> None:
    """The result is one tensor without lse; overloads have the options of the function."""
    returns = {
        (str(s.parameters["lse"].annotation), str(s.parameters["return_lse"].annotation)): str(
            s.return_annotation
        )
        for s in map(inspect.signature, typing.get_overloads(attention.append_attention))
    }
    assert returns["None", "typing.Literal[False]"] == str(Tensor)
    assert len(returns) == 4
    options = set(inspect.signature(attention.append_attention).parameters)
    first = inspect.signature(typing.get_overloads(attention.append_attention)[0])
    named = set(attention._AttentionOptions.__annotations__) | set(first.parameters) - {"options"}
    assert named == options


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("states,rows", [(1, 3), (2, 1), (7, 1500)])
@pytest.mark.no_bf16
@pytest.mark.pairwise
def test_merge_states_matches_the_reference(
    device: str, isa: str, dtype: torch.dtype, states: int, rows: int
) -> None:
    outs, lses = torch.randn(states, rows, 3, 64).to(dtype), 5 * torch.randn(states, rows, 3)
    lses[torch.rand(lses.shape) < 0.3] = -torch.inf
    outs[lses == -torch.inf] = torch.nan
    out, lse = attention.merge_states(outs, lses)
    assert_close(lambda o, x: reference.merge_states(o, x)[0], out, outs, lses)
    assert_close(lambda o, x: reference.merge_states(o, x)[1], lse, outs, lses)
    row = rows // 2
    alone = attention.merge_states(outs[:, row : row + 1].clone(), lses[:, row : row + 1].clone())
    assert torch.equal(alone[0][0], out[row]) and torch.equal(alone[1][0], lse[row])


@pytest.mark.no_bf16
def test_merge_states_ignores_empty_states(device: str, isa: str) -> None:
    outs, lses = torch.randn(3, 4, 2, 64), torch.randn(3, 4, 2)
    expected = attention.merge_states(outs, lses)
    poison = torch.full((1, 4, 2, 64), torch.nan)
    nothing = torch.full((1, 4, 2), -torch.inf)
    got = attention.merge_states(
        torch.cat([poison, outs, poison]), torch.cat([nothing, lses, nothing])
    )
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


def paged_trees(
    paths: list[list[int]],
    nodes: int,
    prefixes: list[int],
    page_size: int,
    dtype: torch.dtype,
    heads: int,
    head_dim: int,
    device: str,
) -> dict[str, Tensor]:
    """Return requests with a prefix, a root and `nodes` nodes.

    Every slot of the caches has different bits, and entries that must not be read are poisoned.
    """
    kv_lens = [prefix + 1 + nodes for prefix in prefixes]
    counts = [-(-kv_len // page_size) + 1 for kv_len in kv_lens]
    num_pages = sum(counts) + 2
    order = torch.randperm(num_pages).tolist()
    indices: list[int] = []
    for prefix, count in zip(prefixes, counts, strict=True):
        pages = [order.pop() for _ in range(count)]
        for page in range(prefix // page_size):
            pages[page] = 2**30  # before the root, so it must not be read
        pages[-1] = -7
        indices += pages
    shape = (num_pages, page_size, heads, head_dim)
    k_cache = torch.randn(shape).to(dtype).to(device)
    v_cache = torch.randn(shape).to(dtype).to(device)
    accepted = torch.full((len(paths), nodes), 2**30, dtype=torch.int32)
    for b, path in enumerate(paths):
        accepted[b, : len(path)] = torch.tensor(path, dtype=torch.int32)
    return {
        "k_cache": k_cache,
        "v_cache": v_cache,
        "accepted_nodes": accepted.to(device),
        "num_accepted_tokens": torch.tensor([len(p) for p in paths]).int().to(device),
        "qo_indptr": lengths_to_indptr([1 + nodes] * len(paths)).to(device),
        "kv_lens": torch.tensor(kv_lens, dtype=torch.int32).to(device),
        "kv_indptr": lengths_to_indptr(counts).to(device),
        "kv_indices": torch.tensor(indices, dtype=torch.int32).to(device),
    }


@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize(
    "dtype,heads,head_dim",
    [
        (torch.float32, 2, 64),
        (torch.bfloat16, 3, 128),
        (torch.float16, 1, 80),
        (torch.bfloat16, 1, 13),
    ],
)
@pytest.mark.no_bf16
def test_compact_kv_matches_the_reference(
    device: str, isa: str, page_size: int, dtype: torch.dtype, heads: int, head_dim: int
) -> None:
    nodes = 40
    paths = [
        [],  # nothing accepted
        list(range(nodes)),  # a chain: all in place
        [39],
        [0, 1, 5, 6, 30, 39],  # begins in place
        sorted(torch.randperm(nodes)[:17].tolist()),
        list(range(1, nodes)),  # each source is the next one's destination
    ]
    prefixes = [0, 5, 14, 15, 16, 100]
    case = paged_trees(paths, nodes, prefixes, page_size, dtype, heads, head_dim, device)
    expected = {name: tensor.clone() for name, tensor in case.items()}
    reference.compact_kv(**expected)
    assert not torch.equal(expected["k_cache"], case["k_cache"])
    start = {name: case[name].clone() for name in ("k_cache", "v_cache")}
    for num_threads in (1, 2, 3):
        specops.set_num_threads(num_threads)
        for name, cache in start.items():
            case[name].copy_(cache)
        attention.compact_kv(**case)
        for name, tensor in case.items():
            assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("nodes", [7, 300])
@pytest.mark.no_bf16
def test_compact_kv_moves_only_accepted_tokens(
    device: str, isa: str, on_cuda: bool, nodes: int
) -> None:
    """Each accepted token is in the slot after its parent, and all other slots are unchanged."""
    paths = [sorted(torch.randperm(nodes)[: nodes // 2].tolist()) for _ in range(3)]
    prefixes = [3, 31, 200]
    case = paged_trees(paths, nodes, prefixes, 16, torch.float32, 1, 4, device)
    before = case["k_cache"].cpu().clone()
    attention.compact_kv(**case)
    after = case["k_cache"].cpu()
    owned = torch.zeros(before.shape[:2], dtype=torch.bool)
    for b, (path, prefix) in enumerate(zip(paths, prefixes, strict=True)):
        pages = case["kv_indices"].cpu()[int(case["kv_indptr"][b]) :].long()

        def slot(token: int, pages: Tensor = pages) -> tuple[int, int]:
            return int(pages[token // 16]), token % 16

        for i, node in enumerate(path):
            assert torch.equal(after[slot(prefix + 1 + i)], before[slot(prefix + 1 + node)])
            owned[slot(prefix + 1 + i)] = True
    assert torch.equal(after[~owned], before[~owned])


@pytest.mark.no_bf16
def test_compact_kv_supports_idle_slots_and_empty_batches(device: str, isa: str) -> None:
    case = paged_trees([], 5, [], 16, torch.float32, 2, 8, device)
    attention.compact_kv(**case)
    # The data of idle slots is ignored.
    case = paged_trees([[], [2, 3]], 5, [0, 9], 16, torch.float32, 2, 8, device)
    case["kv_lens"][0] = -4
    expected = {name: tensor.clone() for name, tensor in case.items()}
    reference.compact_kv(**expected)
    attention.compact_kv(**case)
    assert torch.equal(case["v_cache"], expected["v_cache"])


@pytest.mark.parametrize(
    "argument,index,value,message",
    [
        ("num_accepted_tokens", 1, -1, r"num_accepted_tokens\[1\] must be at least 0.*got -1"),
        ("num_accepted_tokens", 1, 6, r"num_accepted_tokens\[1\] must be .*=5, got 6"),
        ("qo_indptr", 2, 8, r"num_accepted_tokens\[1\] must be .*rows=2 .*got 2"),
        ("accepted_nodes", (1, 1), 2, r"accepted_nodes\[1, 1\] must .* in \[3, 5\), got 2"),
        ("accepted_nodes", (1, 0), -1, r"accepted_nodes\[1, 0\] must .* in \[0, 5\), got -1"),
        ("accepted_nodes", (1, 1), 5, r"accepted_nodes\[1, 1\] must .* in \[3, 5\), got 5"),
        ("kv_lens", 1, 5, r"kv_lens\[1\] must be at least the request's rows=6 .*got 5"),
        ("kv_lens", 1, 49, r"kv_lens\[1\] must be .*slots of its pages=48, got 49"),
        ("kv_indptr", 2, 7, r"kv_(indptr|lens)\[2\] must be .*=5, got 7"),
        ("kv_indices", 2, -1, r"kv_indices\[2\] must be .* where a token moves, got -1"),
        ("kv_indices", 3, 7, r"kv_indices\[3\] must be in \[0, num_pages=7\) .*, got 7"),
    ],
)
def test_compact_kv_reports_invalid_data(
    device: str,
    on_cuda: bool,
    argument: str,
    index: int | tuple[int, int],
    value: int,
    message: str,
) -> None:
    """The CPU writes nothing; CUDA still moves the tokens of the valid request."""
    case = paged_trees([[1, 2], [2, 4]], 5, [0, 13], 16, torch.float32, 2, 8, device)
    case[argument][index] = value
    expected = {name: tensor.clone() for name, tensor in case.items()}
    if on_cuda:
        expected["num_accepted_tokens"][1] = 0
        reference.compact_kv(**expected)
        message = r"\w+ must "
    with expect_fault(on_cuda, "^compact_kv: " + message):
        attention.compact_kv(**case)
    for name in ("k_cache", "v_cache"):
        assert torch.equal(case[name], expected[name]), name
