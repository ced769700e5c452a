# SPDX-License-Identifier: Apache-2.0
"""Ops of the batching family match the reference and FastDeploy's example, and report errors."""

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import specops
import torch
from shared_fixtures import expect_fault
from specops import batching, reference
from specops.batching import BatchIndices, DraftTree, OutputMode
from torch import Tensor

pytestmark = pytest.mark.no_bf16

NONE, LAST, ALL = OutputMode.NONE, OutputMode.LAST, OutputMode.ALL
BAD_PAGE = -(1 << 30)


def ints(values: list[int], device: str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def make_batch(
    qo_lens: list[int], kv_lens: list[int], modes: list[int], page_size: int, device: str = "cpu"
) -> dict[str, Tensor]:
    """Return a page table of shuffled pages; entries that no row of the step uses are poisoned."""
    counts = [(kv_len + page_size - 1) // page_size for kv_len in kv_lens]
    pages = torch.randperm(sum(counts) + 3).int().tolist()
    indptr, indices = [0], []
    for count, qo_len, kv_len in zip(counts, qo_lens, kv_lens, strict=True):
        before = (kv_len - qo_len) // page_size if qo_len else count
        touched = [pages.pop() for _ in range(before, count)]
        indices += [BAD_PAGE] * before + touched + [BAD_PAGE]
        indptr.append(len(indices))
    return {
        "qo_lens": ints(qo_lens, device),
        "kv_lens": ints(kv_lens, device),
        "output_modes": ints(modes, device),
        "kv_indptr": ints(indptr, device),
        "kv_indices": ints([*indices, BAD_PAGE], device),
    }


def check(got: BatchIndices, want: dict[str, Tensor]) -> None:
    for name, tensor in asdict(got).items():
        if name not in want:
            assert tensor is None, name
            continue
        assert tensor.dtype == want[name].dtype, name
        assert torch.equal(tensor.cpu(), want[name]), name


def random_lengths(batch: int) -> tuple[list[int], list[int], list[int]]:
    kinds = torch.randint(0, 4, (batch,)).tolist()
    qo_lens = [(0, 1, 6, 37)[kind] for kind in kinds]
    kv_lens = [qo + int(torch.randint(0, 200, ())) for qo in qo_lens]
    modes = [(LAST, LAST, ALL, int(torch.randint(0, 3, ())))[kind] for kind in kinds]
    return qo_lens, kv_lens, modes


@pytest.mark.parametrize("page_size", [16, 32, 64, 7])
@pytest.mark.parametrize("batch,max_seq_len", [(1, 4096), (9, None), (33, 40), (300, 4096)])
def test_prepare_batch_matches_the_reference(
    device: str, isa: str, page_size: int, batch: int, max_seq_len: int | None
) -> None:
    qo_lens, kv_lens, modes = random_lengths(batch)
    arguments = make_batch(qo_lens, kv_lens, modes, page_size, device)
    total_rows = sum(qo_lens) + 5
    options = {
        "page_size": page_size,
        "total_rows": total_rows,
        "num_output_rows": total_rows,
        "max_seq_len": max_seq_len,
    }
    got = batching.prepare_batch(**arguments, **options)
    check(got, reference.prepare_batch(**arguments, **options))


def test_prepare_batch_allocates_no_row_too_many(device: str, isa: str) -> None:
    """Without sizes the arrays fit the step; with `out` its capacities count."""
    arguments = make_batch(
        [3, 2, 0, 0, 5], [11, 2, 0, 9, 5], [ALL, LAST, LAST, ALL, NONE], 16, device
    )
    exact = {"page_size": 16, "total_rows": 10, "num_output_rows": 4, "max_seq_len": 16}
    want = reference.prepare_batch(**arguments, **exact)
    check(batching.prepare_batch(**arguments, page_size=16, max_seq_len=16), want)
    out = BatchIndices.empty(5, total_rows=12, num_output_rows=9, device=device)
    assert batching.prepare_batch(**arguments, page_size=16, out=out) is out
    check(out, reference.prepare_batch(**arguments, page_size=16, total_rows=12, num_output_rows=9))


@pytest.mark.parametrize("total_rows", [2201, 70_000])
def test_prepare_batch_supports_more_than_1500_rows(device: str, isa: str, total_rows: int) -> None:
    arguments = make_batch([1500, 1, 700], [1500, 900, 800], [LAST, LAST, ALL], 16, device)
    options = {"page_size": 16, "num_output_rows": 702, "max_seq_len": 1500}
    options["total_rows"] = total_rows
    got = batching.prepare_batch(**arguments, **options)
    check(got, reference.prepare_batch(**arguments, **options))


def test_prepare_batch_matches_fastdeploys_example(device: str, isa: str) -> None:
    """Request 0 has outputs for all rows, and request 1 for its last row."""
    arguments = make_batch([3, 2], [3 + 8, 2], [ALL, LAST], 16, device)
    got = batching.prepare_batch(
        **arguments, page_size=16, total_rows=5, num_output_rows=6, max_seq_len=16
    )
    assert got.row_to_request.tolist() == [0, 0, 0, 1, 1]
    assert got.qo_indptr.tolist() == [0, 3, 5]
    assert got.positions.tolist() == [8, 9, 10, 0, 1]
    assert got.output_indptr.tolist() == [0, 3, 4]
    assert got.output_rows.tolist() == [0, 1, 2, 4, -1, -1]
    assert got.output_row_to_request.tolist() == [0, 0, 0, 1, -1, -1]
    assert got.output_cum_offsets is not None and got.output_padding_offset is not None
    assert got.output_cum_offsets.tolist() == [0, 16 - 3]
    assert got.output_padding_offset.tolist() == [0, 0, 0, 13, -1, -1]
    # The token ids of FastDeploy's test, picked from its padded input by row and local position.
    padded = [[10, 11, 12, 13], [200, 201, 202, 203]]
    local = [r - int(got.qo_indptr[b]) for r, b in enumerate(got.row_to_request.tolist())]
    ids = [padded[b][i] for b, i in zip(got.row_to_request.tolist(), local, strict=True)]
    assert ids == [10, 11, 12, 200, 201]


@pytest.mark.parametrize("max_seq_len", [37, 64, 100_000])
def test_padding_offsets_give_request_and_position(device: str, isa: str, max_seq_len: int) -> None:
    qo_lens, kv_lens, modes = random_lengths(50)
    arguments = make_batch(qo_lens, kv_lens, modes, 16, device)
    got = batching.prepare_batch(
        **arguments, page_size=16, total_rows=2000, num_output_rows=2000, max_seq_len=max_seq_len
    )
    assert got.output_padding_offset is not None and got.output_cum_offsets is not None
    count = int(got.output_indptr[-1])
    assert count > 50
    rows = torch.arange(count)
    v = rows + got.output_padding_offset[:count]
    requests = got.output_row_to_request[:count].long()
    assert torch.equal(v // max_seq_len, requests)
    assert torch.equal(v % max_seq_len, rows - got.output_indptr[requests])
    first = torch.arange(50) * max_seq_len - got.output_cum_offsets
    assert torch.equal(first, got.output_indptr[:-1].long())
    # FastDeploy defines it as the total padding of all earlier requests.
    lens = got.output_indptr.diff()
    assert torch.equal(got.output_cum_offsets[1:], (max_seq_len - lens).cumsum(0)[:-1].int())


@pytest.mark.parametrize("batch", [0, 1, 4])
def test_prepare_batch_supports_empty_and_idle_batches(device: str, isa: str, batch: int) -> None:
    arguments = make_batch([0] * batch, [70] * batch, [LAST] * batch, 16, device)
    got = batching.prepare_batch(
        **arguments, page_size=16, total_rows=3, num_output_rows=2, max_seq_len=8
    )
    assert got.qo_indptr.tolist() == [0] * (batch + 1)
    assert got.output_indptr.tolist() == [0] * (batch + 1)
    for values in (got.row_to_request, got.positions, got.cache_slots):
        assert values.tolist() == [-1] * 3
    assert got.output_rows.tolist() == [-1] * 2


def test_requests_do_not_depend_on_each_other(device: str, isa: str) -> None:
    qo_lens, kv_lens, modes = random_lengths(20)
    arguments = make_batch(qo_lens, kv_lens, modes, 16, device)
    options = {"page_size": 16, "total_rows": 2000, "num_output_rows": 2000}
    full = batching.prepare_batch(**arguments, **options)
    for b in range(20):
        alone = {name: arguments[name][b : b + 1] for name in ("qo_lens", "kv_lens")}
        single = batching.prepare_batch(
            **alone,
            output_modes=arguments["output_modes"][b : b + 1],
            kv_indptr=arguments["kv_indptr"][b : b + 2],
            kv_indices=arguments["kv_indices"],
            **options,
        )
        first, last = int(full.qo_indptr[b]), int(full.qo_indptr[b + 1])
        assert torch.equal(single.positions[: last - first], full.positions[first:last])
        assert torch.equal(single.cache_slots[: last - first], full.cache_slots[first:last])


def test_out_is_written_and_returned(device: str, isa: str) -> None:
    out = BatchIndices.empty(2, total_rows=8, num_output_rows=8, max_seq_len=32, device=device)
    for tensor in asdict(out).values():
        assert tensor is not None
    for tensor in vars(out).values():
        tensor.fill_(77)
    arguments = make_batch([3, 2], [11, 2], [ALL, LAST], 16, device)
    options = {"page_size": 16, "total_rows": 8, "num_output_rows": 8, "max_seq_len": 32}
    assert batching.prepare_batch(**arguments, **options, out=out) is out
    check(out, reference.prepare_batch(**arguments, **options))


GOOD: dict[str, Any] = {
    "qo_lens": [3, 2],
    "kv_lens": [20, 2],
    "output_modes": [2, 1],
    "kv_indptr": [0, 2, 3],
    "kv_indices": [5, 1, 0],
    "page_size": 16,
    "total_rows": 5,
    "num_output_rows": 4,
    "max_seq_len": 32,
}


@pytest.mark.parametrize(
    "change,message",
    [
        ({"qo_lens": [3, -1]}, r"qo_lens\[1\] must be at least 0, got -1"),
        ({"kv_lens": [2, 2]}, r"kv_lens\[0\] must be at least qo_lens\[0\] = 3 .*got 2"),
        ({"kv_lens": [20, -5]}, r"kv_lens\[1\] must be .*got -5"),
        ({"output_modes": [2, 3]}, r"output_modes\[1\] must be 0 \(none\).*got 3"),
        ({"output_modes": [-1, 1]}, r"output_modes\[0\] must be .*got -1"),
        (
            {"kv_lens": [33, 2]},
            r"kv_indptr\[1\] must be wide enough .* kv_lens = 33, which end at 3, got 2",
        ),
        (
            {"kv_indptr": [0, 2, 4]},
            r"kv_indptr\[2\] must be non-decreasing .* = 2 .* kv_indices = 3, got 4",
        ),
        ({"kv_indptr": [0, 2, 1]}, r"kv_indptr\[2\] must be non-decreasing .* = 2 .*, got 1"),
        ({"kv_indptr": [-1, 2, 3]}, r"kv_indptr\[0\] must be non-decreasing from 0, .*, got -1"),
        ({"kv_indices": [5, -1, 0]}, r"kv_indices\[1\] must be a page id, at least 0, got -1"),
        ({"total_rows": 4}, r"total_rows must be at least 5, the sum of qo_lens, got 4"),
        ({"num_output_rows": 3}, r"num_output_rows must be at least 4, .*got 3"),
        (
            {"max_seq_len": 2},
            r"max_seq_len must be at least the 3 output rows .* request 0, got 2",
        ),
        ({"max_seq_len": 0}, r"max_seq_len must be an int of at least 1, got 0"),
        ({"max_seq_len": 2**31 - 1}, r"max_seq_len must be small enough .*got 2147483647"),
        ({"page_size": 0}, r"page_size must be an int32 of at least 1, got 0"),
    ],
)
def test_refused_calls_leave_out_unchanged(
    device: str, on_cuda: bool, change: dict[str, Any], message: str
) -> None:
    """On CUDA, errors in the data are reported later and `out` is written."""
    arguments = {**GOOD, **change}
    out = BatchIndices.empty(
        2,
        total_rows=arguments["total_rows"],
        num_output_rows=arguments["num_output_rows"],
        max_seq_len=32,
        device=device,
    )
    for tensor in vars(out).values():
        tensor.fill_(77)
    arguments = {
        name: ints(value, device) if isinstance(value, list) else value
        for name, value in arguments.items()
    }
    is_data_error = re.match(r".*\\\[|total_rows|num_output_rows|.*output rows", message)
    reported = on_cuda and is_data_error is not None
    if reported:  # CUDA names the argument without its index
        message = message.split()[0].partition("\\[")[0] + " must be "
    with expect_fault(reported, "^prepare_batch: " + message):
        batching.prepare_batch(**arguments, out=out)
    for name, tensor in vars(out).items():
        assert bool((tensor == 77).all()) != reported, name


@pytest.mark.parametrize(
    "change,qo_indptr,output_indptr,wrong_rows",
    [
        ({"qo_lens": [-1, 2, 3]}, [0, 0, 2, 5], [0, 0, 1, 4], []),
        ({"kv_lens": [1, 2, 40]}, [0, 3, 5, 8], [0, 0, 1, 4], [0, 1, 2]),
        ({"kv_lens": [33, 2, 40]}, [0, 3, 5, 8], [0, 0, 1, 4], [0, 1, 2]),
        ({"output_modes": [2, 7, 2]}, [0, 3, 5, 8], [0, 3, 3, 6], [3, 4]),
        ({"kv_indptr": [0, 2, 9, 6]}, [0, 3, 5, 8], [0, 3, 3, 3], [3, 4, 5, 6, 7]),
        ({"kv_indptr": [-1, 2, 3, 6]}, [0, 3, 5, 8], [0, 0, 1, 4], [0, 1, 2]),
        ({"max_seq_len": 2}, [0, 3, 5, 8], [0, 0, 1, 1], [0, 1, 2, 5, 6, 7]),
        ({"total_rows": 4}, [0, 3, 4, 4], [0, 3, 4, 7], []),
        ({"num_output_rows": 5}, [0, 3, 5, 8], [0, 3, 4, 5], []),
    ],
)
def test_invalid_requests_do_not_affect_the_others(
    device: str,
    on_cuda: bool,
    change: dict[str, Any],
    qo_indptr: list[int],
    output_indptr: list[int],
    wrong_rows: list[int],
) -> None:
    """On CUDA, rows of an invalid request become padding, and other rows are correct."""
    if not on_cuda:
        pytest.skip("the CPU refuses the whole call (test_refused_calls_leave_out_unchanged)")
    good: dict[str, Any] = {
        "qo_lens": [3, 2, 3],
        "kv_lens": [20, 2, 40],
        "output_modes": [2, 1, 2],
        "kv_indptr": [0, 2, 3, 6],
        "kv_indices": [5, 1, 0, 7, 8, 9],
        "page_size": 16,
        "total_rows": 9,
        "num_output_rows": 8,
        "max_seq_len": 32,
    }
    clean = batching.prepare_batch(
        **{name: ints(v, device) if isinstance(v, list) else v for name, v in good.items()}
    )
    arguments = {
        name: ints(value, device) if isinstance(value, list) else value
        for name, value in {**good, **change}.items()
    }
    with expect_fault(True, "^prepare_batch: .* must be "):
        got = batching.prepare_batch(**arguments)
    assert got.qo_indptr.tolist() == qo_indptr
    assert got.output_indptr.tolist() == output_indptr
    requests = got.row_to_request.tolist()
    for row, request in enumerate(requests):
        first = qo_indptr[request] if request >= 0 else row
        if row in wrong_rows or row >= qo_indptr[-1]:
            assert request == -1 and got.positions[row] == -1 and got.cache_slots[row] == -1
            continue
        where = int(clean.qo_indptr[request]) + row - first
        assert got.positions[row] == clean.positions[where]
        assert got.cache_slots[row] == clean.cache_slots[where]
    for output, row in enumerate(got.output_rows.tolist()):
        exists = output < output_indptr[-1] and (output < 3 or "total_rows" not in change)
        assert (row >= 0) == exists
        assert row < 0 or requests[row] == got.output_row_to_request[output]


@pytest.mark.parametrize("batch,max_seq_len", [(0, None), (9, 64), (300, None)])
def test_cache_slots_are_minus_1_without_a_page_table(
    device: str, isa: str, batch: int, max_seq_len: int | None
) -> None:
    """All other outputs are the same as with a page table."""
    qo_lens, kv_lens, modes = random_lengths(batch)
    arguments = make_batch(qo_lens, kv_lens, modes, 16, device)
    total_rows = sum(qo_lens) + 5
    options = {"total_rows": total_rows, "num_output_rows": total_rows, "max_seq_len": max_seq_len}
    want = reference.prepare_batch(**arguments, page_size=16, **options)
    want["cache_slots"].fill_(-1)
    lengths = {name: arguments[name] for name in ("qo_lens", "kv_lens", "output_modes")}
    check(batching.prepare_batch(**lengths, **options), want)
    assert torch.equal(
        reference.prepare_batch(**lengths, **options)["cache_slots"], want["cache_slots"]
    )


def test_documented_example_runs() -> None:
    text = (Path(__file__).resolve().parent.parent / "docs" / "ops.md").read_text()
    section = text.split("## Block tables")[1].split("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.S)
    exec(compile(code, "docs/ops.md", "exec"), {})


@pytest.mark.parametrize("left_out", ["kv_indptr", "kv_indices", "page_size"])
def test_page_table_arguments_are_required_together(device: str, left_out: str) -> None:
    arguments = {n: ints(v, device) if isinstance(v, list) else v for n, v in GOOD.items()}
    with pytest.raises(ValueError, match=f"^prepare_batch: {left_out} must be .*, got None$"):
        batching.prepare_batch(**{**arguments, left_out: None})


def test_invalid_pages_are_skipped(device: str, on_cuda: bool) -> None:
    arguments = make_batch([3, 2], [34, 2], [ALL, LAST], 16, device)
    arguments["kv_indices"][2] = -5  # page of positions 32 and 33
    with expect_fault(on_cuda, r"^prepare_batch: kv_indices.* must be .*page id"):
        got = batching.prepare_batch(**arguments, page_size=16, total_rows=5, num_output_rows=5)
    if on_cuda:
        assert got.positions.tolist() == [31, 32, 33, 0, 1]
        assert (got.cache_slots >= 0).tolist() == [True, False, False, True, True]


def test_padding_arrays_need_max_seq_len(device: str) -> None:
    out = BatchIndices.empty(2, total_rows=5, num_output_rows=4, max_seq_len=32, device=device)
    arguments = {n: ints(v, device) if isinstance(v, list) else v for n, v in GOOD.items()}
    with pytest.raises(ValueError, match="prepare_batch: max_seq_len must be given when"):
        batching.prepare_batch(**{**arguments, "max_seq_len": None}, out=out)
    out.output_cum_offsets = None
    with pytest.raises(ValueError, match="prepare_batch: output_cum_offsets must be int32"):
        batching.prepare_batch(**arguments, out=out)


def make_tokens(qo_lens: list[int], num_drafts: list[int], device: str) -> dict[str, Any]:
    """Return a step's rows and token tables, with poison in entries that no row uses.

    The last num_drafts[b] of qo_lens[b] rows are drafts; -1 means one row more than tokens.
    """
    batch, num_slots = len(qo_lens), len(qo_lens) + 3
    slots = torch.randperm(num_slots)[:batch].int()
    lens = torch.full((num_slots,), BAD_PAGE, dtype=torch.int32)
    width = max([*num_drafts, 0]) + 2
    drafts = torch.full((batch, width), BAD_PAGE, dtype=torch.int32)
    table = torch.full((num_slots, max([*qo_lens, 0]) + 60), BAD_PAGE, dtype=torch.int32)
    requests, positions = [], []
    for b, (qo_len, count) in enumerate(zip(qo_lens, num_drafts, strict=True)):
        slot = int(slots[b])
        known = qo_len - count
        first = int(torch.randint(0, 50, ()))
        if qo_len:
            lens[slot] = first + known
        table[slot, first : first + known] = torch.randint(0, 1000, (known,)).int()
        drafts[b, :count] = torch.randint(0, 1000, (count,)).int()
        requests += [b] * qo_len
        positions += range(first, first + qo_len)
    # Rows in random order with padding between them, and a table with wider rows.
    order = torch.randperm(len(requests) + 5)
    wide = torch.cat([table, torch.full((num_slots, 3), BAD_PAGE, dtype=torch.int32)], dim=1)
    return {
        "row_to_request": ints([*requests, *[-1] * 5])[order].to(device),
        "positions": ints([*positions, *[BAD_PAGE] * 5])[order].to(device),
        "slots": slots.to(device),
        "token_ids": wide.to(device)[:, :-3],
        "lens": lens.to(device),
        "draft_token_ids": drafts.to(device),
    }


@pytest.mark.parametrize(
    "qo_lens,num_drafts",
    [
        ([], []),
        ([1], [0]),
        ([4, 1, 0, 37, 2], [3, 0, 0, 0, 2]),
        ([1] * 600 + [9] * 100 + [1500], [0] * 600 + [8] * 100 + [0]),
        ([2100, 3], [0, 2]),
    ],
    ids=["empty", "one", "ragged", "decode", "prefill"],
)
def test_gather_input_ids_matches_the_reference(
    device: str, isa: str, qo_lens: list[int], num_drafts: list[int]
) -> None:
    arguments = make_tokens(qo_lens, num_drafts, device)
    want = reference.gather_input_ids(**{n: t.cpu() for n, t in arguments.items()})
    for num_threads in (1, 2, 3):
        specops.set_num_threads(num_threads)
        assert torch.equal(batching.gather_input_ids(**arguments).cpu(), want)
    canary = torch.full((len(want) + 1,), 7, dtype=torch.int32, device=device)
    assert batching.gather_input_ids(**arguments, out=canary[:-1]).data_ptr() == canary.data_ptr()
    assert torch.equal(canary[:-1].cpu(), want) and int(canary[-1]) == 7
    alone = {**arguments, "row_to_request": arguments["row_to_request"][3:4]}
    alone["positions"] = arguments["positions"][3:4]
    assert torch.equal(batching.gather_input_ids(**alone).cpu(), want[3:4])
    if not any(num_drafts):
        assert torch.equal(
            batching.gather_input_ids(**{**arguments, "draft_token_ids": None}).cpu(), want
        )


def test_gather_input_ids_supports_chunks_decoding_and_drafts_in_one_step(
    device: str, isa: str
) -> None:
    texts = [[10, 11, 12, 13, 14], [20, 21, 22], [30, 31, 32, 33]]
    table = torch.full((3, 8), BAD_PAGE, dtype=torch.int32)
    for slot, text in zip((2, 0, 1), texts, strict=True):
        table[slot, : len(text)] = ints(text)
    indices = batching.prepare_batch(
        **make_batch([3, 1, 3], [4, 3, 6], [NONE, LAST, ALL], 16, device),
        page_size=16,
        total_rows=8,
        num_output_rows=4,
    )
    got = batching.gather_input_ids(
        indices.row_to_request,
        indices.positions,
        ints([2, 0, 1], device),
        table.to(device),
        ints([3, 4, 5], device),
        ints([BAD_PAGE] * 4 + [7, 8], device).view(3, 2),
    )
    assert got.tolist() == [11, 12, 13, 22, 33, 7, 8, 0]


@pytest.mark.parametrize(
    "change,message,wrong_rows",
    [
        ({"row_to_request": [0, 2, 1]}, r"row_to_request\[1\] must be .*= 2, got 2", [1]),
        ({"row_to_request": [0, -2, 1]}, r"row_to_request\[1\] must be .*, got -2", [1]),
        ({"slots": [2, 3]}, r"slots\[1\] must be a row of lens, below 3.*, got 3", [2]),
        ({"slots": [2, -1]}, r"slots\[1\] must be a row of lens, .*, got -1", [2]),
        ({"lens": [2, 5, 7]}, r"lens\[2\] must be .* max_len = 6, got 7", [0, 1]),
        ({"lens": [-1, 5, 6]}, r"lens\[0\] must be at least 0 .*, got -1", [2]),
        ({"positions": [0, -1, 3]}, r"positions\[1\] must be at least 0 .*, got -1", [1]),
        ({"positions": [0, 1, 4]}, r"positions\[2\] must be .*lens\[0\] \+ k = 4, got 4", [2]),
        ({"positions": [0, 1, 2**31 - 1]}, r"positions\[2\] must be .*, got 2147483647", [2]),
        ({"drafts": [5, 5, 5, -1]}, r"draft_token_ids\[1, 1\] must be .*, got -1", [2]),
        ({"text": -7}, r"token_ids\[2, 1\] must be a token id.*, got -7", [1]),
    ],
)
def test_gather_input_ids_reports_invalid_data(
    device: str, on_cuda: bool, change: dict[str, Any], message: str, wrong_rows: list[int]
) -> None:
    """The CPU writes nothing; CUDA writes 0 for invalid rows and the right ids for the others."""
    good = {"row_to_request": [0, 0, 1], "positions": [0, 1, 3], "slots": [2, 0]}
    good |= {"lens": [2, 5, 6], "drafts": [5, 5, 5, 6]}
    values_by_name = {**good, **change}
    table = torch.arange(18, dtype=torch.int32).view(3, 6) + 100
    table[2, 1] = values_by_name.pop("text", table[2, 1])
    arguments = {name: ints(values, device) for name, values in values_by_name.items()}
    drafts = arguments.pop("drafts").view(2, 2)
    out = ints([77, 77, 77], device)
    if on_cuda:
        message = message.split("\\[")[0] + ".* must be .*, got "
    with expect_fault(on_cuda, "^gather_input_ids: .*" + message):
        batching.gather_input_ids(
            **arguments, token_ids=table.to(device), draft_token_ids=drafts, out=out
        )
    want = [0 if row in wrong_rows else id for row, id in enumerate((112, 113, 6))]
    assert out.tolist() == (want if on_cuda else [77, 77, 77])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows,width,count", [(0, 8, 3), (1, 1, 0), (7, 129, 20), (1600, 64, 1555)])
def test_gather_output_rows_matches_the_reference(
    device: str, isa: str, dtype: torch.dtype, rows: int, width: int, count: int
) -> None:
    wide = torch.full((rows, width + 5), float("nan"), dtype=dtype, device=device)
    wide[:, 2 : width + 2] = torch.randn(rows, width)
    hidden = wide[:, 2 : width + 2]
    output_rows = torch.randint(-1, rows, (count,)).int().to(device)
    want = reference.gather_output_rows(hidden, output_rows)
    for num_threads in (1, 2, 3):
        specops.set_num_threads(num_threads)
        assert torch.equal(batching.gather_output_rows(hidden, output_rows), want)
    canary = torch.full((count + 1, width), 7.0, dtype=dtype, device=device)
    batching.gather_output_rows(hidden, output_rows, out=canary[:count])
    assert torch.equal(canary[:count], want) and bool((canary[count:] == 7).all())


@pytest.mark.parametrize("bad", [-2, 4, 2**31 - 1])
def test_gather_output_rows_refuses_invalid_rows(device: str, on_cuda: bool, bad: int) -> None:
    hidden = torch.randn(4, 8, device=device)
    out = torch.full((3, 8), 7.0, device=device)
    got = "another value" if on_cuda else str(bad)
    with expect_fault(on_cuda, rf"output_rows.* must be -1 or a row .*got {got}"):
        batching.gather_output_rows(hidden, ints([0, bad, 3], device), out=out)
    if on_cuda:
        assert torch.equal(out, torch.stack([hidden[0], torch.zeros_like(hidden[0]), hidden[3]]))
    else:
        assert bool((out == 7).all())


def random_tree(nodes: int, kind: str) -> list[int]:
    """Return the parents of a chain, a star, a binary tree or a random tree."""
    draw = {
        "chain": lambda node: node - 1,
        "star": lambda node: -1,
        "binary": lambda node: (node - 2) // 2 if node > 1 else -1,
        "random": lambda node: int(torch.randint(-1, node, ())) if node else -1,
    }[kind]
    return [draw(node) for node in range(nodes)]


def make_trees(counts: list[int], nodes: int, device: str) -> dict[str, Tensor]:
    """Return one tree per request, alternating all kinds; unused entries are poisoned."""
    kinds = ["random", "chain", "star", "binary"]
    parents = torch.full((len(counts), nodes), 2**31 - 1, dtype=torch.int32)
    for b, count in enumerate(counts):
        parents[b, :count] = ints(random_tree(count, kinds[b % 4]))
    return {
        "parents": parents.to(device),
        "num_draft_tokens": ints(counts, device),
        "positions": torch.randint(0, 5000, (len(counts),)).int().to(device),
    }


def check_tree(got: DraftTree, want: dict[str, Tensor]) -> None:
    for name, tensor in vars(got).items():
        assert tensor.dtype == torch.int32
        assert torch.equal(tensor.cpu(), want[name]), name


@pytest.mark.parametrize("batch", [0, 1, 9])
@pytest.mark.parametrize("nodes", [0, 1, 7, 31, 32, 63, 64, 200])
@pytest.mark.pairwise
def test_build_tree_matches_the_reference(device: str, isa: str, batch: int, nodes: int) -> None:
    counts = [nodes, nodes, nodes, nodes, 0, *torch.randint(0, nodes + 1, (4,)).tolist()][:batch]
    trees = make_trees(counts, nodes, device)
    want = reference.build_tree(**trees)
    for num_threads in (1, 2, 3):
        specops.set_num_threads(num_threads)
        check_tree(batching.build_tree(**trees), want)
    # Each tree alone, into the caller's memory, with a canary behind it.
    for b in range(batch):
        longer = DraftTree.empty(2, nodes, device=device)
        for tensor in vars(longer).values():
            tensor.fill_(77)
        out = DraftTree(**{name: tensor[:1] for name, tensor in vars(longer).items()})
        alone = {name: tensor[b : b + 1] for name, tensor in trees.items()}
        assert batching.build_tree(**alone, out=out) is out
        check_tree(out, {name: tensor[b : b + 1] for name, tensor in want.items()})
        assert all(bool((tensor[1] == 77).all()) for tensor in vars(longer).values())


def test_build_tree_supports_many_requests(device: str, isa: str, on_cuda: bool) -> None:
    counts = torch.randint(0, 5, (60 if on_cuda else 1500,)).tolist()
    trees = make_trees(counts, 4, device)
    check_tree(batching.build_tree(**trees), reference.build_tree(**trees))


def test_build_tree_matches_its_documented_example(device: str) -> None:
    tree = batching.build_tree(
        ints([-1, -1, 0], device).view(1, 3), ints([3], device), ints([10], device)
    )
    assert tree.depths.tolist() == [[0, 1, 1, 2]]
    assert tree.row_positions.tolist() == [[10, 11, 11, 12]]
    assert tree.ancestor_mask.tolist() == [[[0b0001], [0b0011], [0b0101], [0b1011]]]
    assert tree.first_child.tolist() == [[0, 2, -1, -1]]
    assert tree.next_sibling.tolist() == [[1, -1, -1]]
    assert tree.sibling_index.tolist() == [[0, 1, 0]]


@pytest.mark.parametrize(
    "change,message",
    [
        ({"parents": [[-1, 0, 1], [-1, 1, 0]]}, r"parents\[1, 1\] must be -1 or a node .*got 1"),
        ({"parents": [[-1, 0, 1], [0, -1, 0]]}, r"parents\[1, 0\] must be -1 or a node .*got 0"),
        ({"parents": [[-1, 0, 1], [-1, -2, 0]]}, r"parents\[1, 1\] must be .*got -2"),
        ({"num_draft_tokens": [3, 4]}, r"num_draft_tokens\[1\] must be at least 0 .*got 4"),
        ({"num_draft_tokens": [3, -1]}, r"num_draft_tokens\[1\] must be at least 0 .*got -1"),
        ({"positions": [5, -1]}, r"positions\[1\] must be at least 0.*got -1"),
        ({"positions": [5, 2**31 - 3]}, r"positions\[1\] must be at least 0.*got 2147483645"),
    ],
)
def test_build_tree_reports_invalid_data(
    device: str, on_cuda: bool, change: dict[str, Any], message: str
) -> None:
    """The CPU writes nothing; on CUDA, the invalid request becomes a root without nodes."""
    good = {"parents": [[-1, 0, 1], [-1, 0, -1]], "num_draft_tokens": [3, 3], "positions": [5, 6]}
    inputs = {
        name: torch.tensor(value, dtype=torch.int32, device=device)
        for name, value in {**good, **change}.items()
    }
    out = DraftTree.empty(2, 3, device=device)
    for tensor in vars(out).values():
        tensor.fill_(77)
    if on_cuda:
        message = message.split()[0].partition("\\[")[0] + " must be "
    with expect_fault(on_cuda, "^build_tree: " + message):
        batching.build_tree(**inputs, out=out)
    if not on_cuda:
        assert all(bool((tensor == 77).all()) for tensor in vars(out).values())
        return
    inputs["num_draft_tokens"][1] = 0
    check_tree(out, reference.build_tree(**inputs))


def test_build_tree_refuses_too_many_nodes(device: str) -> None:
    with pytest.raises(ValueError, match=r"parents must be of at most 8192 nodes, got 8193"):
        batching.build_tree(
            torch.zeros(0, 8193, dtype=torch.int32, device=device),
            ints([], device),
            ints([], device),
        )
