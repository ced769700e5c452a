# SPDX-License-Identifier: Apache-2.0
"""N-gram drafting against a brute-force search, on histories full of repetition."""

from typing import Any

import pytest
import specops
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shared_fixtures import expect_fault
from specops import ngram, reference
from specops.ngram import NgramIndex
from torch import Tensor

pytestmark = pytest.mark.no_bf16

POISON = 1_000_003


def ints(values: list[int], device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def propose(
    rows: list[list[int]],
    limits: list[int],
    k: int,
    sizes: tuple[int | Tensor, int | Tensor],
    device: str,
    max_len: int | None = None,
    *,
    leftmost: bool | Tensor = False,
    given: list[list[int]] | None = None,
    total: int | None = None,
    index: NgramIndex | None = None,
) -> tuple[list[list[int]], list[int]]:
    """Run the op on poisoned, strided rows; check the canaries, and compare with the reference."""
    width = max_len or max([len(row) for row in rows], default=0) + 3
    wide = torch.full((len(rows), width + 4), POISON, dtype=torch.int32)
    for b, row in enumerate(rows):
        wide[b, : len(row)] = torch.tensor(row, dtype=torch.int32)
    token_ids = wide.to(device)[:, :width]
    lens = ints([len(row) for row in rows], device)
    canary = torch.full((len(rows) + 1, k), 77, dtype=torch.int32, device=device)
    for b, first in enumerate(given or []):
        canary[b, : len(first)] = ints(first, device)
    options: dict[str, Any] = {
        "min_ngram_size": sizes[0],
        "max_ngram_size": sizes[1],
        "leftmost": leftmost,
        "num_given_drafts": ints([len(first) for first in given], device) if given else None,
        "max_total_draft_tokens": total,
    }
    match_lens = torch.full((len(rows),), 77, dtype=torch.int32, device=device)
    want_lens = torch.full((len(rows),), 77, dtype=torch.int32)
    want = reference.ngram_propose(
        token_ids,
        lens,
        ints(limits, device),
        k=k,
        given_token_ids=canary.clone(),
        match_lens=want_lens,
        **options,
    )
    if given:  # one tensor for the number of given drafts and the number of drafts
        options["num_draft_tokens"] = options["num_given_drafts"]
    drafts, counts = ngram.ngram_propose(
        token_ids,
        lens,
        ints(limits, device),
        draft_token_ids=canary[:-1],
        index=index,
        match_lens=match_lens,
        **options,
    )
    assert torch.equal(match_lens.cpu(), want_lens)
    assert bool((canary[-1] == 77).all())
    assert torch.equal(drafts.cpu(), want[0]) and torch.equal(counts.cpu(), want[1])
    return drafts.tolist(), counts.tolist()


def poisoned_index(batch: int, entries: int, device: str, **options: Any) -> NgramIndex:
    """Return an index with a poisoned table and no limits other than its number of entries."""
    table = torch.full((batch, entries), POISON, dtype=torch.int32, device=device)
    state = torch.zeros(batch, 2, dtype=torch.int32, device=device)
    return NgramIndex(table, state, **{"scan_tokens": 0, "index_tokens": 1 << 20, **options})


@pytest.mark.parametrize(
    "row,sizes,want",
    [
        ([1, 2, 3, 9, 1, 2, 4, 9, 1, 2], (1, 3), [4, 9, 1, 2]),  # most recent of two bigrams
        ([5, 1, 2, 3, 9, 7, 1, 2, 4, 5, 1, 2], (1, 3), [3, 9, 7, 1]),  # longer beats more recent
        ([5, 1, 2, 3, 9, 7, 1, 2, 4, 5, 1, 2], (1, 2), [4, 5, 1, 2]),  # within the maximal size
        ([1, 2, 3, 4], (1, 3), []),  # nothing repeats
        ([1, 2, 3, 2], (2, 3), []),  # shorter than the minimum
        ([1, 2, 3, 2], (1, 3), [3, 2]),  # clipped at the end of the row
        ([8, 8, 8, 8], (1, 3), [8]),  # an occurrence that overlaps the end, one token earlier
        ([3, 1, 3, 1, 3], (1, 9), [1, 3]),  # sizes beyond the row are skipped
        ([7, 7], (1, 5), [7]),
        ([7], (1, 5), []),
        ([], (1, 5), []),
    ],
)
def test_examples_of_matches(
    device: str, isa: str, row: list[int], sizes: tuple[int, int], want: list[int]
):
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


def test_ngram_sizes_per_request(device: str, isa: str) -> None:
    row = [5, 1, 2, 3, 9, 7, 1, 2, 4, 5, 1, 2]
    low = torch.tensor([1, 1, 3, 3], dtype=torch.int32, device=device)
    high = torch.tensor([3, 2, 3, 8], dtype=torch.int32, device=device)
    drafts, _ = propose([row] * 4, [1] * 4, 1, (low, high), device)
    assert drafts == [[3], [4], [3], [3]]
    assert propose([row, row], [1] * 2, 1, (torch.ones_like(low[:2]), 2), device)[0] == [[4], [4]]


@pytest.mark.parametrize(
    "row,sizes,want",
    [
        ([1, 2, 3, 9, 1, 2, 4, 9, 1, 2], (1, 3), [4, 9, 1, 2]),  # the longer one, which is later
        ([1, 2, 3, 9, 1, 2, 4, 9, 1, 2], (1, 2), [3, 9, 1, 2]),
        ([8, 8, 8, 8, 8], (1, 2), [8, 8, 8]),
        ([7, 7], (1, 5), [7]),
        ([7], (1, 5), []),
    ],
)
def test_examples_of_leftmost_matches(
    device: str, isa: str, row: list[int], sizes: tuple[int, int], want: list[int]
) -> None:
    drafts, counts = propose([row], [10], 4, sizes, device, leftmost=True)
    assert drafts == [want + [-1] * (4 - len(want))] and counts == [len(want)]
    both = propose([row, row], [10] * 2, 4, sizes, device, leftmost=ints([1, 0], device))
    assert both[0][0] == drafts[0]
    assert both[0][1] == propose([row], [10], 4, sizes, device)[0][0]


def test_given_drafts_count_as_the_last_tokens(device: str, isa: str) -> None:
    row = [1, 2, 3, 4, 5, 6, 1]
    drafts, counts = propose(
        [row] * 6,
        [5, 5, 2, 1, 9, 4],
        5,
        (1, 4),
        device,
        given=[[], [2], [2, 3], [2, 3], [2, 3, 2, 3, 2], [9, 9]],
    )
    assert drafts[:3] == [[2, 3, 4, 5, 6], [2, 3, 4, 5, 6], [2, 3, -1, -1, -1]]
    assert drafts[3:] == [[2, 3, -1, -1, -1], [2, 3, 2, 3, 2], [9, 9, 9, -1, -1]]
    assert counts == [5, 5, 2, 2, 5, 3]
    assert propose([[], [4]], [3, 3], 3, (1, 2), device, given=[[6, 6], [4]]) == (
        [[6, 6, 6], [4, 4, -1]],
        [3, 2],
    )


def test_match_lens_are_those_of_the_longest_match(device: str, isa: str) -> None:
    """The limit on drafts does not shorten the match; 0 means that no draft was added."""
    row = [1, 2, 3, 4, 5, 9, 2, 3, 4]
    lens = ints([9, 9, 9, 9, 3], device)
    token_ids = torch.tensor([row] * 5, dtype=torch.int32, device=device)
    drafts = torch.full((5, 4), 5, dtype=torch.int32, device=device)
    for total, want in [(None, [3, 3, 0, 4, 0]), (3, [3, 3, 0, 0, 0]), (1, [0, 0, 0, 0, 0])]:
        match_lens = ints([77] * 5, device)
        counts = ints([0, 0, 0, 1, 0], device)
        ngram.ngram_propose(
            token_ids,
            lens,
            ints([4, 2, 0, 4, 4], device),
            min_ngram_size=1,
            max_ngram_size=9,
            draft_token_ids=drafts,
            num_draft_tokens=counts,
            num_given_drafts=counts,
            match_lens=match_lens,
            max_total_draft_tokens=total,
        )
        assert match_lens.tolist() == want


@pytest.mark.parametrize("shared", [False, True])
def test_drafters_in_a_row_share_a_buffer(device: str, isa: str, shared: bool) -> None:
    """One tensor of draft counts is read and written; skipped requests keep their drafts."""
    row = [1, 2, 3, 4, 5, 6, 1]
    drafts = torch.tensor([[2, 3, 77, 77]] * 3 + [[77] * 4], dtype=torch.int32, device=device)
    counts = ints([2, 2, 2, 0], device)
    for limits, want in [([0, 3, 2, 1], [2, 3, 2, 1]), ([0, 3, 9, 0], [2, 3, 4, 1])]:
        ngram.ngram_propose(
            torch.tensor([row] * 4, dtype=torch.int32, device=device),
            ints([7] * 4, device),
            ints(limits, device),
            min_ngram_size=1,
            max_ngram_size=4,
            draft_token_ids=drafts,
            num_draft_tokens=counts,
            num_given_drafts=counts,
            max_total_draft_tokens=sum(want) if shared else None,
        )
        assert counts.tolist() == want
    assert drafts.tolist() == [[2, 3, -1, -1], [2, 3, 4, -1], [2, 3, 4, 5], [2, -1, -1, -1]]


@pytest.mark.parametrize(
    "total,want",
    [
        (None, [6, 1, 4, 0, 6]),
        (17, [6, 1, 4, 0, 6]),
        (16, [6, 1, 4, 0, 5]),
        (13, [4, 1, 4, 0, 4]),
        (12, [4, 1, 4, 0, 3]),
        (11, [4, 1, 3, 0, 3]),
        (4, [1, 1, 1, 0, 1]),
        (3, [1, 1, 1, 0, 0]),
        (0, [0, 0, 0, 0, 0]),
    ],
)
def test_total_of_drafts_is_divided_fairly(
    device: str, isa: str, total: int | None, want: list[int]
) -> None:
    row = [1, 2, 3, 4, 5, 6, 1, 2]
    rows = [row, row, row, [1, 2, 3], row]
    _, counts = propose(rows, [6, 1, 4, 6, 6], 6, (1, 2), device, total=total)
    assert counts == want


def test_total_of_drafts_never_removes_given_drafts(device: str, isa: str) -> None:
    row = [1, 2, 3, 4, 5, 6, 1]
    given = [[2, 3, 4], [], [2], []]
    for total, want in [(20, [6, 6, 6, 0]), (12, [4, 4, 4, 0]), (9, [3, 3, 3, 0])]:
        rows = [row, row, row, [5]]
        assert propose(rows, [9] * 4, 6, (1, 3), device, given=given, total=total)[1] == want
    for total, want in [(6, [3, 2, 1, 0]), (4, [3, 0, 1, 0]), (1, [3, 0, 1, 0])]:
        assert propose(rows, [9] * 4, 6, (1, 3), device, given=given, total=total)[1] == want
    assert propose([], [], 3, (1, 2), device, total=5) == ([], [])


@pytest.mark.parametrize(
    "batch", [40, pytest.param(1500, marks=pytest.mark.slow, id="more than threads")]
)
def test_total_of_drafts_is_divided_among_many_requests(device: str, batch: int) -> None:
    """The remainder goes to the first limited requests, one draft each."""
    rows = [[1, 2, 3, 4, 5, 1] if b % 3 else [1, 2] for b in range(batch)]
    wanting = sum(b % 3 > 0 for b in range(batch))
    total = 2 * wanting + wanting // 3
    _, counts = propose(rows, [4] * batch, 4, (1, 1), device, total=total)
    assert sum(counts) == total
    want = [3] * (wanting // 3) + [2] * (wanting - wanting // 3)
    assert [count for b, count in enumerate(counts) if b % 3] == want


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_drafts_of_any_history_equal_the_reference(
    device: str, on_cuda: bool, data: st.DataObject
) -> None:
    alphabet = data.draw(st.integers(1, 5))
    tokens = st.lists(st.integers(0, alphabet), max_size=data.draw(st.sampled_from([8, 40, 300])))
    rows = data.draw(st.lists(tokens, max_size=5))
    limits = [data.draw(st.integers(0, 9)) for _ in rows]
    low = data.draw(st.integers(1, 6))
    high = data.draw(st.integers(low, 12))
    k = data.draw(st.integers(0, 8))
    few = st.lists(st.integers(0, alphabet), max_size=k)
    options: dict[str, Any] = {
        "leftmost": data.draw(st.booleans()),
        "given": [data.draw(few) for _ in rows] if data.draw(st.booleans()) else None,
        "total": data.draw(st.none() | st.integers(0, 20)),
    }
    entries = data.draw(st.none() | st.integers(0, 3000))
    for isa in specops.supported_isas()[: 1 if on_cuda else None]:
        specops.set_isa(isa)
        index = None if entries is None else poisoned_index(len(rows), entries, device)
        propose(rows, limits, k, (low, high), device, index=index, **options)
        if index is not None:  # now with a filled index
            propose(rows, limits, k, (low, high), device, index=index, **options)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_an_index_changes_no_draft_of_a_growing_history(
    device: str, on_cuda: bool, data: st.DataObject
) -> None:
    """Rows grow at their own pace, and are replaced, shortened or skipped for some steps."""
    alphabet = data.draw(st.sampled_from([1, 3, 20]))
    token = st.integers(0, alphabet)
    rows = [data.draw(st.lists(token, max_size=60)) for _ in range(data.draw(st.integers(1, 3)))]
    low = data.draw(st.integers(1, 3))
    sizes = (low, low + data.draw(st.integers(0, 4)))
    leftmost = data.draw(st.booleans())
    index = poisoned_index(
        len(rows),
        data.draw(st.sampled_from([1, 7, 64, 200, 2000])),
        device,
        scan_tokens=data.draw(st.sampled_from([0, 1, 10, None])),
        index_tokens=data.draw(st.sampled_from([1, 5, 33, None])),
    )
    isa = specops.get_isa()
    for _ in range(data.draw(st.integers(1, 4 if on_cuda else 12))):
        event = data.draw(st.sampled_from(["grow", "grow", "grow", "replace", "shorten", "sizes"]))
        b = data.draw(st.integers(0, len(rows) - 1))
        if event == "replace":  # the slot of another request
            rows[b] = data.draw(st.lists(token, max_size=60))
            index.reset(b)
        elif event == "shorten":
            rows[b] = rows[b][: data.draw(st.integers(0, len(rows[b])))]
            index.reset(b)
        elif event == "sizes":
            sizes = (sizes[0], sizes[1] + 1)
        for row in rows:
            row.extend(data.draw(st.lists(token, max_size=data.draw(st.sampled_from([1, 4, 40])))))
        limits = [data.draw(st.sampled_from([0, 4, 4, 4])) for _ in rows]
        propose(rows, limits, 4, sizes, device, 1000, leftmost=leftmost, index=index)
    specops.set_isa(isa)


@pytest.mark.parametrize("leftmost", [False, True])
def test_every_prefix_has_the_drafts_of_a_scan(device: str, isa: str, leftmost: bool) -> None:
    """One index grows by one token per step; others start with any number of tokens."""
    row = torch.randint(0, 4, (90,)).tolist()
    options: dict[str, Any] = {"leftmost": leftmost}
    from_nothing = poisoned_index(1, 800, device)
    for count in range(len(row) + 1):
        grown = propose([row[:count]], [5], 5, (2, 5), device, 100, index=from_nothing, **options)
        at_once = poisoned_index(1, 800, device)
        for _ in range(2):
            fresh = propose([row[:count]], [5], 5, (2, 5), device, 100, index=at_once, **options)
            assert grown == fresh
    assert from_nothing.state.tolist()[0][0] == len(row) - 1  # nothing was left to scan


def test_index_notices_a_shorter_row(device: str, isa: str) -> None:
    index = poisoned_index(1, 400, device)
    propose([[1, 2, 3, 1, 2, 4, 1, 2]], [3], 3, (1, 2), device, 40, index=index)
    assert propose([[9, 2, 9]], [3], 3, (1, 2), device, 40, index=index) == ([[2, 9, -1]], [2])


def test_reset_index_ignores_the_old_text(device: str, isa: str) -> None:
    """Old entries of the table are neither found nor in the way."""
    index = poisoned_index(2, 400, device)
    old = [1, 2, 3, 4, 5, 6, 7, 8] * 4
    propose([old, old], [3, 3], 3, (2, 4), device, 40, index=index)
    index.reset(0)
    new = [5, 6, 1, 1, 2, 9, 1, 2, 3, 3, 3, 3, 4, 4, 4, 4, 4, 3, 2, 9, 9, 8, 8, 8, 8, 8, 8, 8, 7]
    for count in range(4, len(new) + 1):
        rows = [new[:count], [*old, 1, 2]]
        propose(rows, [3, 3], 3, (2, 4), device, 40, index=index)


def test_full_index_scans_the_remaining_tokens(device: str, isa: str) -> None:
    """A table of 64 entries holds a few of 300 different tokens; the others are always scanned."""
    index = poisoned_index(1, 64, device)
    row = list(range(300))
    for extra in ([0, 1], [299, 0, 1, 2], [7, 7, 3]):
        row = row + extra
        propose([row], [4], 4, (1, 2), device, 400, index=index)
        known = -1 - index.state.tolist()[0][0]
        assert 20 <= known < 64
    for leftmost in (False, True):
        index = poisoned_index(1, 80, device)
        for tail in ([5], [5, 6, 7], [200, 201], [80, 80, 200]):
            for _ in range(2):
                propose([row + tail], [4], 4, (1, 2), device, 400, leftmost=leftmost, index=index)


def colliding(token: int, before: int, other: int) -> int:
    """Return a token x such that (x, other) has the same hash as (before, token)."""

    def mixed(value: int) -> int:
        value = value * 0x9E3779B1 % 2**32
        return value ^ (value >> 15)

    found = mixed(token) ^ mixed(other) ^ before
    return found - 2**32 if found >= 2**31 else found


@pytest.mark.parametrize("leftmost", [False, True])
def test_equal_hashes_change_no_draft(device: str, isa: str, leftmost: bool) -> None:
    """Many bigrams of the row have one hash: each has its own entry, and the text decides."""
    clashes = [(colliding(5, 4, other), other) for other in range(100, 140)]
    filler = iter(range(1000, 4000))
    row: list[int] = []
    for pair in [(4, 5), *clashes[:30]]:
        row += [*pair, next(filler), next(filler)]
    index = poisoned_index(1, 4000, device)
    options: dict[str, Any] = {"leftmost": leftmost, "index": index}
    for pair in [(4, 5), clashes[29], clashes[33], clashes[0], clashes[0], (4, 5), clashes[33]]:
        row += [*pair]
        counts = propose([row], [2], 2, (2, 2), device, 400, **options)[1]
        assert counts == [0 if pair == clashes[33] and row.count(pair[1]) == 1 else 2]
        row += [next(filler), next(filler)]
    assert index.state.tolist()[0][0] > 100
    # Too many clashes in a row: the index counts as full, and the drafts are the same.
    clashes = [(colliding(5, 4, other), other) for other in range(5000, 5100)]
    row = [token for pair in clashes for token in (*pair, next(filler))]
    index = poisoned_index(1, 4000, device)
    for pair in (clashes[70], clashes[3], clashes[99]):
        for _ in range(2):
            propose([[*row, *pair]], [2], 2, (2, 2), device, 400, leftmost=leftmost, index=index)
    assert index.state.tolist()[0][0] < 0


@pytest.mark.parametrize("vocab", [3, 30, 3000])
def test_long_rows_have_the_same_drafts_alone_and_in_a_batch(
    device: str, on_cuda: bool, isa: str, vocab: int
) -> None:
    rows = [torch.randint(0, vocab, (int(n),)).tolist() for n in torch.randint(0, 3000, (60,))]
    limits = torch.randint(0, 7, (60,)).tolist()
    results = []
    for num_threads in (1,) if on_cuda else (1, 2, 3):
        specops.set_num_threads(num_threads)
        results.append(propose(rows, limits, 5, (1, 4), device))
        assert results[0] == results[-1]
    index = NgramIndex.empty(60, 3003, device=device, scan_tokens=100)
    for _ in range(2 if on_cuda else 14):  # until everything is indexed
        assert propose(rows, limits, 5, (1, 4), device, 3003, index=index) == results[0]
    assert sum(results[0][1]) > 0
    for b in (0, 17, 59):  # alone, with another width of the buffer
        alone = propose([rows[b]], [limits[b]], 5, (1, 4), device, max_len=4000)
        assert alone == ([results[0][0][b]], [results[0][1][b]])


@pytest.mark.parametrize(
    "distance", [1, 2, 63, 64, 65, 127, 129, 1000, 1024, 4095, 4097, 8193, 20000]
)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_matches_are_found_at_every_distance(
    device: str, isa: str, distance: int, size: int
) -> None:
    """The only occurrence is at the start of the row or in its middle."""
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
        ({"max_ngram_size": 2.5}, r"max_ngram_size must be an int or int32 \[batch=\d\], got 2\.5"),
        ({"leftmost": 2}, r"leftmost must be 0 or 1, got 2"),
        ({"leftmost": [0, -1]}, r"leftmost\[1\] must be 0 or 1, got -1"),
        ({"num_given_drafts": [0, 4]}, r"num_given_drafts\[1\] must be in 0 \.\. k = 3, got 4"),
        ({"num_given_drafts": [0, -1]}, r"num_given_drafts\[1\] must be in 0 \.\. k = 3, got -1"),
        *(
            (
                {"max_total_draft_tokens": total},
                f"max_total_draft_tokens must be an int.*, got {total}",
            )
            for total in (-1, -2, 2.0, True)
        ),
        *(
            ({"index": {size: value}}, f"index.{size} must be an int of at least 0, got {value}")
            for size in ("scan_tokens", "index_tokens")
            for value in (-1, -(2**31), 0.5)
        ),
        ({"index": 3}, "index must be a NgramIndex, or None, got 3"),
    ],
)
def test_invalid_arguments_leave_out_untouched(
    device: str, on_cuda: bool, change: dict[str, object], message: str
) -> None:
    """On CUDA, a fault in the data is reported afterwards, and its request gets no drafts."""
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
    if isinstance(change.get("index"), dict):
        tensors["index"] = ngram.NgramIndex.empty(2, 8, device=device, **change["index"])
    reported = on_cuda and "\\[" in message.split()[0]
    if reported:  # the message of a reported code lacks the index
        message = message.split()[0].partition("\\[")[0] + " must be "
    with expect_fault(reported, "^ngram_propose: " + message):
        ngram.ngram_propose(token_ids, **tensors, draft_token_ids=out, num_draft_tokens=counts)  # type: ignore[arg-type]
    if reported:
        at_fault = 0 if change.get("lens") == [-1, 8] else 1
        assert counts.tolist()[at_fault] == 0 and out.tolist()[at_fault] == [-1] * 3
        assert counts.tolist()[1 - at_fault] > 0
    else:
        assert bool((out == 77).all()) and bool((counts == 77).all())
