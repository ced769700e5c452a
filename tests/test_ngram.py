# SPDX-License-Identifier: Apache-2.0
"""N-gram drafting against a brute-force search, on histories full of repetition."""

import pytest
import specops
import torch
from conftest import expect_fault
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from specops import ngram, reference
from torch import Tensor

POISON = 1_000_003


def propose(
    rows: list[list[int]],
    limits: list[int],
    k: int,
    sizes: tuple[int | Tensor, int | Tensor],
    device: str,
    max_len: int | None = None,
) -> tuple[list[list[int]], list[int]]:
    """Runs the op on poisoned, strided rows, checks the canaries, and checks the reference too."""
    width = max_len or max([len(row) for row in rows], default=0) + 3
    wide = torch.full((len(rows), width + 4), POISON, dtype=torch.int32)
    for b, row in enumerate(rows):
        wide[b, : len(row)] = torch.tensor(row, dtype=torch.int32)
    token_ids = wide.to(device)[:, :width]
    lens = torch.tensor([len(row) for row in rows], dtype=torch.int32, device=device)
    max_draft_tokens = torch.tensor(limits, dtype=torch.int32, device=device)
    canary = torch.full((len(rows) + 1, k), 77, dtype=torch.int32, device=device)
    drafts, counts = ngram.ngram_propose(
        token_ids,
        lens,
        max_draft_tokens,
        min_ngram_size=sizes[0],
        max_ngram_size=sizes[1],
        draft_token_ids=canary[:-1],
    )
    assert bool((canary[-1] == 77).all())
    want = reference.ngram_propose(
        token_ids, lens, max_draft_tokens, k=k, min_ngram_size=sizes[0], max_ngram_size=sizes[1]
    )
    assert torch.equal(drafts.cpu(), want[0]) and torch.equal(counts.cpu(), want[1])
    return drafts.tolist(), counts.tolist()


@pytest.mark.parametrize(
    "row,sizes,want",
    [
        ([1, 2, 3, 9, 1, 2, 4, 9, 1, 2], (1, 3), [4, 9, 1, 2]),  # most recent of two bigrams
        ([5, 1, 2, 3, 9, 7, 1, 2, 4, 5, 1, 2], (1, 3), [3, 9, 7, 1]),  # longer beats more recent
        ([5, 1, 2, 3, 9, 7, 1, 2, 4, 5, 1, 2], (1, 2), [4, 5, 1, 2]),  # unless it is not looked for
        ([1, 2, 3, 4], (1, 3), []),  # nothing repeats
        ([1, 2, 3, 2], (2, 3), []),  # the minimum holds
        ([1, 2, 3, 2], (1, 3), [3, 2]),  # clipped at the end of the row
        ([8, 8, 8, 8], (1, 3), [8]),  # an occurrence overlapping the tail, one token earlier
        ([3, 1, 3, 1, 3], (1, 9), [1, 3]),  # sizes beyond the row are skipped
        ([7, 7], (1, 5), [7]),
        ([7], (1, 5), []),
        ([], (1, 5), []),
    ],
)
def test_examples(device: str, isa: str, row: list[int], sizes: tuple[int, int], want: list[int]):
    drafts, counts = propose([row], [10], 4, sizes, device)
    assert drafts == [want + [-1] * (4 - len(want))]
    assert counts == [len(want)]


def test_limits_and_capacity(device: str, isa: str) -> None:
    row = [1, 2, 3, 4, 5, 6, 7, 1, 2]
    drafts, counts = propose([row] * 4, [0, 2, 5, 100], 4, (1, 2), device)
    assert counts == [0, 2, 4, 4]
    assert drafts == [[-1] * 4, [3, 4, -1, -1], [3, 4, 5, 6], [3, 4, 5, 6]]
    assert propose([row], [3], 0, (1, 2), device) == ([[]], [0])
    assert propose([], [], 3, (1, 2), device) == ([], [])


def test_sizes_per_request(device: str, isa: str) -> None:
    row = [5, 1, 2, 3, 9, 7, 1, 2, 4, 5, 1, 2]
    low = torch.tensor([1, 1, 3, 3], dtype=torch.int32, device=device)
    high = torch.tensor([3, 2, 3, 8], dtype=torch.int32, device=device)
    drafts, _ = propose([row] * 4, [1] * 4, 1, (low, high), device)
    assert drafts == [[3], [4], [3], [3]]
    assert propose([row, row], [1] * 2, 1, (torch.ones_like(low[:2]), 2), device)[0] == [[4], [4]]


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_history(device: str, on_cuda: bool, data: st.DataObject) -> None:
    alphabet = data.draw(st.integers(1, 5))
    tokens = st.lists(st.integers(0, alphabet), max_size=data.draw(st.sampled_from([8, 40, 300])))
    rows = data.draw(st.lists(tokens, max_size=5))
    limits = [data.draw(st.integers(0, 9)) for _ in rows]
    low = data.draw(st.integers(1, 6))
    high = data.draw(st.integers(low, 12))
    k = data.draw(st.integers(0, 8))
    for isa in specops.supported_isas()[: 1 if on_cuda else None]:
        specops.set_isa(isa)
        propose(rows, limits, k, (low, high), device)


@pytest.mark.parametrize("vocab", [3, 30, 3000])
def test_long_rows_of_many_requests(device: str, on_cuda: bool, isa: str, vocab: int) -> None:
    rows = [torch.randint(0, vocab, (int(n),)).tolist() for n in torch.randint(0, 3000, (60,))]
    limits = torch.randint(0, 7, (60,)).tolist()
    results = []
    for num_threads in (1,) if on_cuda else (1, 2, 3):
        specops.set_num_threads(num_threads)
        results.append(propose(rows, limits, 5, (1, 4), device))
        assert results[0] == results[-1]
    assert sum(results[0][1]) > 0
    for b in (0, 17, 59):  # alone as in the batch, whatever the width of the buffer
        alone = propose([rows[b]], [limits[b]], 5, (1, 4), device, max_len=4000)
        assert alone == ([results[0][0][b]], [results[0][1][b]])


@pytest.mark.parametrize("distance", [1, 2, 63, 64, 65, 127, 129, 1000, 1024, 8191, 8193, 20000])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_match_at_every_distance_from_a_block(
    device: str, isa: str, distance: int, size: int
) -> None:
    """One planted occurrence, at the very start of the row and in its middle."""
    for lead in (0, 1, 70):
        filler = list(range(10, 10 + lead + distance))
        tail = list(range(-size - 10, -10))
        row = filler[:lead] + tail + filler[lead:] + tail
        drafts, counts = propose([row], [3], 3, (size, size + 3), device)
        follow = (filler[lead:] + tail)[:3]
        assert drafts == [follow + [-1] * (3 - len(follow))] and counts == [len(follow)]


@pytest.mark.parametrize(
    "change,message",
    [
        ({"lens": [4, 9]}, r"lens\[1\] must be in 0 \.\. max_len = 8, got 9"),
        ({"lens": [-1, 8]}, r"lens\[0\] must be in 0 \.\. max_len = 8, got -1"),
        ({"max_draft_tokens": [2, -1]}, r"max_draft_tokens\[1\] must be at least 0, got -1"),
        ({"min_ngram_size": 0}, r"min_ngram_size must be at least 1, got 0"),
        ({"max_ngram_size": 1}, r"max_ngram_size must be at least min_ngram_size = 2, got 1"),
        ({"min_ngram_size": [2, 0]}, r"min_ngram_size\[1\] must be at least 1, got 0"),
        ({"max_ngram_size": [2, 1]}, r"max_ngram_size\[1\] must be at least .* = 2, got 1"),
        ({"max_ngram_size": [2]}, r"max_ngram_size must be int32 \[batch=2\], got int32 \[1\]"),
        ({"min_ngram_size": None}, r"min_ngram_size must be an int or int32 \[batch\], got None"),
        ({"max_ngram_size": 2.5}, r"max_ngram_size must be an int or int32 \[batch\], got float"),
    ],
)
def test_refusals_leave_out_untouched(
    device: str, on_cuda: bool, change: dict[str, object], message: str
) -> None:
    """On CUDA a fault in the data is told afterwards, and its request has no drafts."""
    arguments: dict[str, object] = {
        "lens": [4, 8],
        "max_draft_tokens": [2, 2],
        "min_ngram_size": 2,
        "max_ngram_size": 3,
        **change,
    }
    tensors = {
        name: torch.tensor(value, dtype=torch.int32, device=device)
        if isinstance(value, list)
        else value
        for name, value in arguments.items()
    }
    out = torch.full((2, 3), 77, dtype=torch.int32, device=device)
    counts = torch.full((2,), 77, dtype=torch.int32, device=device)
    token_ids = torch.zeros(2, 8, dtype=torch.int32, device=device)
    reported = on_cuda and "\\[" in message.split()[0]
    if reported:  # the sentence of a code: the argument without its index
        message = message.split()[0].partition("\\[")[0] + " must be "
    with expect_fault(reported, "^ngram_propose: " + message):
        ngram.ngram_propose(token_ids, **tensors, draft_token_ids=out, num_draft_tokens=counts)  # type: ignore[arg-type]
    if reported:
        at_fault = 0 if change.get("lens") == [-1, 8] else 1
        assert counts.tolist()[at_fault] == 0 and out.tolist()[at_fault] == [-1] * 3
        assert counts.tolist()[1 - at_fault] > 0
    else:
        assert bool((out == 77).all()) and bool((counts == 77).all())
