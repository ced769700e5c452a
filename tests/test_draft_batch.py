# SPDX-License-Identifier: Apache-2.0
"""Ops that prepare the rows of a draft module: their indices, cache slots and inputs."""

import random
from dataclasses import asdict
from typing import Any

import pytest
import torch
from shared_fixtures import expect_fault
from specops import batching, dense, reference
from specops.batching import DraftIndices
from specops.dense import ModuleRows, TokenTables
from torch import Tensor

pytestmark = pytest.mark.no_bf16

POISON = -(1 << 30)


def ints(values: list[int], device: str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def check(got: DraftIndices, want: dict[str, Tensor]) -> None:
    for name, tensor in asdict(got).items():
        assert tensor.dtype == want[name].dtype, name
        assert torch.equal(tensor.cpu(), want[name]), name


class Step:
    """A target's step with random requests, and their state after it.

    kind 0: idle; 1: a chunk inside a prompt; 2: the last chunk of a prompt; 3: verification of
    drafts, some of which are rejected; 4: as 3, for a request that does not draft.
    """

    def __init__(self, kinds: list[int], *, page_size: int, window: int, seed: int) -> None:
        rng = random.Random(seed)
        batch = len(kinds)
        self.num_slots = batch + 3
        slots = rng.sample(range(self.num_slots), batch)
        qo_lens, kv_lens, redraft, lens = [], [], [], [0] * self.num_slots
        limits = [rng.randrange(4) for _ in range(self.num_slots)]
        for b, kind in enumerate(kinds):
            begin = rng.randrange(2, 70)
            qo_len = 0 if kind == 0 else rng.randrange(1, 40) if kind < 3 else rng.randrange(1, 7)
            known = begin + qo_len + 1
            if kind == 1:
                known += rng.randrange(0, 9)
            elif kind >= 3:
                known -= rng.randrange(qo_len)
            lens[slots[b]] = known
            qo_lens.append(qo_len)
            kv_lens.append(begin + qo_len)
            redraft.append(min(window, begin, rng.randrange(4)))
            if kind == 4:
                slots[b] = -1
        indptr, indices = [0], []
        for kv_len in kv_lens:
            # Pages for a few drafts, not always for all of them.
            pages = (kv_len + page_size - 1) // page_size + rng.randrange(2)
            indices += rng.sample(range(1000), pages)
            indptr.append(len(indices))
        qo_indptr = [0]
        for qo_len in qo_lens:
            qo_indptr.append(qo_indptr[-1] + qo_len)
        self.rows = qo_indptr[-1]
        self.ints = {
            "slots": slots,
            "qo_indptr": qo_indptr,
            "kv_lens": kv_lens,
            "redraft_lens": redraft,
            "kv_indptr": indptr,
            "kv_indices": [*indices, POISON],
            "lens": lens,
            "max_draft_tokens": limits,
        }

    def tensors(self, device: str) -> dict[str, Tensor]:
        return {name: ints(values, device) for name, values in self.ints.items()}


STEPS = [
    [3],
    [2],
    [0, 3, 1, 2, 4, 0, 3, 3, 1],
    [1, 2, 3, 4] * 9,
    [3] * 300,
]


@pytest.mark.parametrize("page_size,window", [(16, 0), (32, 3), (7, 64)])
@pytest.mark.parametrize("case", range(len(STEPS)))
def test_prepare_draft_batch_matches_the_reference(
    device: str, isa: str, case: int, page_size: int, window: int
) -> None:
    step = Step(STEPS[case], page_size=page_size, window=window, seed=case)
    options = {"page_size": page_size, "window": window}
    arguments, cpu = step.tensors(device), step.tensors("cpu")
    want = reference.prepare_draft_batch(**cpu, **options, total_rows=step.rows + 900)
    got = batching.prepare_draft_batch(**arguments, **options, total_rows=step.rows + 900)
    check(got, want)
    check(batching.prepare_draft_batch(**arguments, **options, out=got), want)
    del arguments["redraft_lens"]
    cpu["redraft_lens"].zero_()
    want = reference.prepare_draft_batch(**cpu, **options, total_rows=step.rows)
    check(batching.prepare_draft_batch(**arguments, **options), want)


@pytest.mark.parametrize("ahead,chained", [(1, False), (3, False), (3, True)])
@pytest.mark.parametrize("case", range(len(STEPS)))
def test_advance_draft_batch_matches_the_reference(
    device: str, isa: str, case: int, ahead: int, chained: bool
) -> None:
    """All passes of a step are compared; slots without a request are unchanged.

    Each chained module drafts from the rows of the first pass.
    """
    page_size, k = 16, 4
    step = Step(STEPS[case], page_size=page_size, window=0, seed=case)
    arguments, cpu = step.tensors(device), step.tensors("cpu")
    options = {"page_size": page_size, "total_rows": step.rows + 1, "window": 0}
    rows = batching.prepare_draft_batch(
        **{**arguments, "redraft_lens": arguments["redraft_lens"] * 0}, **options
    )
    drafts = torch.full((step.num_slots, k), 99, dtype=torch.int32, device=device)
    counts = torch.full((step.num_slots,), 99, dtype=torch.int32, device=device)
    batch = len(STEPS[case])
    names = ("slots", "kv_indptr", "kv_indices", "lens", "max_draft_tokens")
    for index in range(k):
        sampled = torch.randint(0, 50, (batch,), dtype=torch.int32)
        want_drafts, want_counts, want = reference.advance_draft_batch(
            sampled,
            rows.last_rows.cpu(),
            *(cpu[name] for name in names),
            page_size=page_size,
            step=index,
            ahead=ahead,
            draft_token_ids=drafts.cpu(),
            num_draft_tokens=counts.cpu(),
        )
        out = DraftIndices.empty(batch, device=device)
        last = index + 1 == k
        following = batching.advance_draft_batch(
            sampled.to(device),
            rows.last_rows,
            *(arguments[name] for name in names),
            page_size=page_size,
            step=index,
            ahead=ahead,
            draft_token_ids=drafts,
            num_draft_tokens=counts,
            out=None if last else out,
        )
        assert following is (None if last else out)
        assert torch.equal(drafts.cpu(), want_drafts) and torch.equal(counts.cpu(), want_counts)
        if not last:
            check(out, want)
        rows = rows if chained else out
    idle = [slot for slot in range(step.num_slots) if slot not in step.ints["slots"]]
    assert bool((drafts[idle] == 99).all()) and bool((counts[idle] == 99).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window,width", [(1, 8), (3, 5), (64, 256)])
def test_keep_hidden_rows_matches_the_reference(
    device: str, isa: str, window: int, width: int, dtype: torch.dtype
) -> None:
    step = Step(STEPS[2], page_size=16, window=window, seed=7)
    wide = torch.randn(step.rows, width + 3).to(dtype)
    kept = torch.randn(step.num_slots, window, width).to(dtype)
    names = ("slots", "qo_indptr", "kv_lens", "lens")
    want = reference.keep_hidden_rows(
        wide[:, :width], *(step.tensors("cpu")[name] for name in names), kept
    )
    assert not torch.equal(want, kept)
    got = kept.clone().to(device)
    arguments = step.tensors(device)
    batching.keep_hidden_rows(wide.to(device)[:, :width], *(arguments[name] for name in names), got)
    assert torch.equal(got.cpu(), want)


def mtp_input_arguments(
    dtype: torch.dtype, width: int, *, ahead: int = 1, seed: int = 3
) -> dict[str, Any]:
    """Return arguments of mtp_input after a step, with rows that run again and padding."""
    step = Step(STEPS[2], page_size=16, window=5, seed=seed)
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    rows = reference.prepare_draft_batch(
        **step.tensors("cpu"), page_size=16, window=5, total_rows=step.rows + 40
    )
    lens = step.tensors("cpu")["lens"]
    token_ids = torch.full((step.num_slots, 130), 10**6, dtype=torch.int32)
    for slot, known in enumerate(lens.tolist()):
        token_ids[slot, :known] = torch.randint(0, 50, (known,), generator=generator).int()
    drafts = torch.randint(0, 50, (step.num_slots, 2), generator=generator).int()
    drafts[::2, 1] = -1
    return {
        "rows": ModuleRows(**{name: rows[name] for name in ModuleRows._fields}),
        "tokens": TokenTables(step.tensors("cpu")["slots"], token_ids, lens, drafts),
        "embedding": random(50, width),
        "embedding_norm": random(width),
        "hidden_norm": random(width),
        "hidden": random(step.rows, width + 4)[:, :width],
        "kept": random(step.num_slots, 5, width),
        "eps": 1e-6,
        "ahead": ahead,
    }


def to(case: dict[str, Any], device: str) -> dict[str, Any]:
    def moved(value: Any) -> Any:
        if isinstance(value, tuple):
            return type(value)(*map(moved, value))
        return value.to(device) if isinstance(value, Tensor) else value

    return {name: moved(value) for name, value in case.items()}


@pytest.mark.parametrize("hidden_first,mask", [(False, False), (True, True)])
@pytest.mark.parametrize("ahead", [1, 3])
@pytest.mark.parametrize(
    "dtype,width", [(torch.float32, 40), (torch.bfloat16, 64), (torch.float16, 7)]
)
def test_mtp_input_matches_the_reference(
    device: str,
    isa: str,
    dtype: torch.dtype,
    width: int,
    ahead: int,
    hidden_first: bool,
    mask: bool,
) -> None:
    case = mtp_input_arguments(dtype, width, ahead=ahead)
    options = {"hidden_first": hidden_first, "mask_first_position": mask}
    got = dense.mtp_input(**to(case, device), **options).cpu()
    want = reference.mtp_input(**case, **options)
    torch.testing.assert_close(got, want, rtol=2e-2 if dtype != torch.float32 else 1e-5, atol=1e-6)
    padding = case["rows"].row_to_request < 0
    assert bool(padding.any()) and not bool(got[padding].any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_halves_of_mtp_input_equal_rms_norms(device: str, isa: str, dtype: torch.dtype) -> None:
    """The unfused ops are gather, shift, embedding, and two norms."""
    case = mtp_input_arguments(dtype, 72)
    rows, tables = case["rows"], case["tokens"]
    got = dense.mtp_input(**to(case, device)).cpu()
    tokens, states = [], []
    for request, position, source in zip(
        *(of_rows.tolist() for of_rows in rows),
        strict=True,
    ):
        if request < 0:
            continue
        slot = int(tables.slots[request])
        text = tables.token_ids[slot, : int(tables.lens[slot])].tolist()
        tokens.append(text[position + 1])
        kept = case["kept"].flatten(0, 1)
        states.append(case["hidden"][source] if source >= 0 else kept[-2 - source])
    embedded = dense.embedding(ints(tokens, device), case["embedding"].to(device))
    first = dense.rms_norm(embedded, case["embedding_norm"].to(device), 1e-6)
    second = dense.rms_norm(torch.stack(states).to(device), case["hidden_norm"].to(device), 1e-6)
    assert torch.equal(got[rows.row_to_request >= 0], torch.cat([first, second], dim=1).cpu())


def test_mtp_input_rows_are_independent(device: str, isa: str) -> None:
    case = mtp_input_arguments(torch.bfloat16, 64)
    whole = dense.mtp_input(**to(case, device)).cpu()
    for row in torch.randperm(len(whole))[:5].tolist():
        alone = ModuleRows(*(of_rows[row : row + 1] for of_rows in case["rows"]))
        got = dense.mtp_input(**to({**case, "rows": alone}, device)).cpu()
        assert torch.equal(got[0], whole[row])


def fault_message(
    op: str, argument: str, message: str, on_cuda: bool, element: int | str, got: int
) -> str:
    """Return the message for an invalid element; CUDA names only the argument and the rule."""
    if on_cuda:
        return f"^{op}: {argument} must be {message}.*, got "
    return rf"^{op}: {argument}\[{element}\] must be {message}.*, got {got}$"


@pytest.mark.parametrize(
    "argument,value,message",
    [
        ("slots", 12, "-1 or a row of lens"),
        ("redraft_lens", 9, "at least 0, at most window"),
        ("redraft_lens", -1, "at least 0, at most window"),
        ("kv_lens", 1, "at least the request's (3 )?rows"),
        ("lens", 0, "more than the (17 )?positions before"),
        ("qo_indptr", -1, "non-decreasing from 0"),
        ("kv_indptr", 10**6, "non-decreasing from 0"),
        ("kv_indptr", 1, "wide enough for the pages of the (18 )?positions"),
        ("kv_indices", -5, "a page id"),
    ],
)
def test_prepare_draft_batch_reports_invalid_data(
    device: str, on_cuda: bool, argument: str, value: int, message: str
) -> None:
    """The invalid request has no rows; the other request keeps its rows."""
    good: dict[str, list[int]] = {
        "slots": [1, 0],
        "qo_indptr": [0, 3, 5],
        "kv_lens": [20, 30],
        "redraft_lens": [2, 0],
        "kv_indptr": [0, 2, 4],
        "kv_indices": [3, 4, 5, 6],
        "lens": [31, 19],
        "max_draft_tokens": [2, 2],
    }
    index = {"lens": 1, "kv_indptr": 1, "kv_indices": 1}.get(argument, 0)
    bad = {name: list(values) for name, values in good.items()}
    bad[argument][index] = value
    out = DraftIndices.empty(2, total_rows=8, device=device)
    before = out.positions.clone()
    with expect_fault(
        on_cuda, fault_message("prepare_draft_batch", argument, message, on_cuda, index, value)
    ):
        batching.prepare_draft_batch(
            **{name: ints(values, device) for name, values in bad.items()},
            page_size=16,
            window=4,
            total_rows=8,
            out=out,
        )
    if not on_cuda:
        assert torch.equal(out.positions, before)
        return
    want = {**good, "slots": [-1, 0]}
    if argument == "kv_indptr":  # the page lists of both requests share this bound
        want |= {"kv_indptr": [0, 1, 4]} if value == 1 else {"slots": [-1, -1]}
    check(
        out,
        reference.prepare_draft_batch(
            **{name: ints(values) for name, values in want.items()},
            page_size=16,
            window=4,
            total_rows=8,
        ),
    )


def test_prepare_draft_batch_reports_too_few_rows(device: str, on_cuda: bool) -> None:
    step = Step(STEPS[2], page_size=16, window=0, seed=2)
    enough = reference.prepare_draft_batch(
        **step.tensors("cpu"), page_size=16, total_rows=step.rows
    )
    count = int(enough["qo_indptr"][-1])
    out = DraftIndices.empty(len(STEPS[2]), total_rows=count - 1, device=device)
    with expect_fault(on_cuda, "^prepare_draft_batch: total_rows must be at least"):
        batching.prepare_draft_batch(
            **step.tensors(device), page_size=16, total_rows=count - 1, out=out
        )


@pytest.mark.parametrize(
    "argument,value,message",
    [
        ("slots", 7, "-1 or a row of lens"),
        ("lens", 0, "at least ahead - step"),
        ("kv_indptr", -1, "non-decreasing from 0"),
        ("kv_indices", -5, "a page id"),
    ],
)
def test_advance_draft_batch_reports_invalid_data(
    device: str, on_cuda: bool, argument: str, value: int, message: str
) -> None:
    arguments = {
        "sampled_token_ids": [8, 9],
        "last_rows": [4, 7],
        "slots": [1, 0],
        "kv_indptr": [0, 2, 4],
        "kv_indices": [3, 4, 5, 6],
        "lens": [31, 20],
        "max_draft_tokens": [3, 3],
    }
    arguments[argument][1] = value
    drafts = torch.full((2, 3), 50, dtype=torch.int32, device=device)
    counts = ints([50, 50], device)
    out = DraftIndices.empty(2, device=device)
    with expect_fault(
        on_cuda, fault_message("advance_draft_batch", argument, message, on_cuda, 1, value)
    ):
        batching.advance_draft_batch(
            **{name: ints(values, device) for name, values in arguments.items()},
            page_size=16,
            step=0,
            ahead=1,
            draft_token_ids=drafts,
            num_draft_tokens=counts,
            out=out,
        )
    if not on_cuda:
        assert bool((drafts == 50).all()) and counts.tolist() == [50, 50]


def test_advance_draft_batch_refuses_inconsistent_arguments(device: str) -> None:
    rows = DraftIndices.empty(1)
    arrays = [ints([0]), ints([0]), ints([0]), ints([0, 1]), ints([0]), ints([5]), ints([2])]
    options = {"page_size": 16, "ahead": 1, "num_draft_tokens": ints([0])}
    options["draft_token_ids"] = torch.zeros(1, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match="step must be below k = 2, got 2"):
        batching.advance_draft_batch(*arrays, **options, step=2, out=rows)
    for name in list(vars(rows))[1:]:
        part = DraftIndices(**{**vars(rows), name: None})
        with pytest.raises(ValueError, match="given together with draft_qo_indptr, got None"):
            batching.advance_draft_batch(*arrays, **options, step=0, out=part)
    part = DraftIndices(**{**vars(rows), "qo_indptr": None})
    with pytest.raises(ValueError, match="None without draft_qo_indptr, got a tensor"):
        batching.advance_draft_batch(*arrays, **options, step=0, out=part)


def test_mtp_input_reports_invalid_data(device: str, on_cuda: bool) -> None:
    for name, value, message in (
        ("tokens.token_ids", 50, r"-1 or in \[0, vocab"),
        ("rows.source_rows", 10**6, "a row of hidden"),
        ("rows.row_to_request", 99, "-1 or below batch"),
        ("rows.positions", -1, "at least 0"),
    ):
        case = mtp_input_arguments(torch.float32, 16)
        rows, tables = case["rows"], case["tokens"]
        row = int((rows.row_to_request >= 0).nonzero()[0])
        if name == "tokens.token_ids":
            slot = int(tables.slots[rows.row_to_request[row]])
            position = int(rows.positions[row]) + 1
            tables.token_ids[slot, position] = value
            element = f"{slot}, {position}"
        else:
            getattr(rows, name.removeprefix("rows."))[row] = value
            element = str(row)
        with expect_fault(
            on_cuda, fault_message("mtp_input", name, message, on_cuda, element, value)
        ):
            out = dense.mtp_input(**to(case, device))
        if on_cuda:
            assert not bool(out[row].any())
