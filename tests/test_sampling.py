# SPDX-License-Identifier: Apache-2.0
"""`sample` and `top_logprobs` against their references."""

import math
from functools import cache
from typing import Any

import pytest
import simt
import specops
import torch
from sampling_cases import by_field, mixed_params, on_device, positions_from, row_params
from shared_fixtures import expect_fault
from specops import _C, reference, sampling
from specops.sampling import Purpose
from torch import Tensor

pytestmark = pytest.mark.no_bf16

INF = math.inf


def sample(logits: Tensor, positions: Tensor, params: dict[str, Tensor], **more: Any) -> Tensor:
    """Call `sampling.sample` on the device of the logits and return the tokens on the CPU."""
    device = logits.device
    params = on_device(params, device)
    return by_field(sampling.sample)(logits, positions.to(device), **params, **more).cpu()


def with_logprobs(logits: Tensor, positions: Tensor, params: dict[str, Tensor]) -> list[Tensor]:
    logprobs = torch.full((len(logits),), 7.0, device=logits.device)
    return [sample(logits, positions, params, logprobs=logprobs), logprobs.cpu()]


# Known answers published with Random123 (kat_vectors, philox4x32 10).
@pytest.mark.parametrize(
    "seed,counter,expected",
    [
        (0, [0] * 4, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (2**64 - 1, [2**32 - 1] * 4, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            0x299F31D0A4093822,
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_known_answers(seed: int, counter: list[int], expected: list[int]) -> None:
    assert reference.philox4x32(seed, counter) == expected
    assert _C.philox4x32(seed, counter) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "rows,vocab", [(0, 32), (1, 1), (1, 4096), (60, 77), (1500, 40), (24, 5000)]
)
@pytest.mark.pairwise
def test_sample_equals_the_reference(
    device: str, isa: str, dtype: torch.dtype, rows: int, vocab: int
) -> None:
    logits = (3 * torch.randn(rows, vocab)).to(dtype).to(device)
    positions = positions_from(5, rows)
    params = mixed_params(rows)
    expected_logprobs = torch.zeros(rows, dtype=torch.float64)
    expected = by_field(reference.sample)(
        logits.cpu(), positions, logprobs=expected_logprobs, **params
    )
    token_ids, logprobs = with_logprobs(logits, positions, params)
    assert torch.equal(token_ids, expected)
    assert (logprobs - expected_logprobs).abs().max() < 1e-5 if rows else True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("begin", [100, 101])
def test_sample_does_not_read_between_strided_rows(
    device: str, isa: str, dtype: torch.dtype, begin: int
) -> None:
    """Rows have the same bits at any alignment."""
    wide = torch.full((9, 3001), 1e30, device=device, dtype=dtype)
    wide[:, begin : begin + 2033] = torch.randn(9, 2033)
    view = wide[:, begin : begin + 2033]
    positions, params = positions_from(0, 9), mixed_params(9)
    got = with_logprobs(view, positions, params)
    for a, b in zip(got, with_logprobs(view.contiguous(), positions, params), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("start,step", [(0, 1), (9000, 1), (7, 40_000)])
def test_row_identity(device: str, isa: str, on_cuda: bool, start: int, step: int) -> None:
    """A row has the same bits alone, in another slot, in a batch and on one to three threads."""
    rows, vocab = 13, 9001
    logits = torch.randn(rows, vocab, device=device)
    positions = torch.arange(rows, dtype=torch.int32) * step + start
    params = mixed_params(rows)
    expected = with_logprobs(logits, positions, params)
    for threads in (1, 2, 3) if not on_cuda else (1,):
        specops.set_num_threads(threads)
        for got, want in zip(with_logprobs(logits, positions, params), expected, strict=True):
            assert torch.equal(got, want)
        for row in range(rows):
            alone = {name: column[row : row + 1] for name, column in params.items()}
            got = with_logprobs(logits[row : row + 1], positions[row : row + 1], alone)
            assert torch.equal(torch.cat(got), torch.cat([x[row : row + 1] for x in expected]))
        order = torch.randperm(rows)
        shuffled = {name: column[order] for name, column in params.items()}
        for got, want in zip(
            with_logprobs(logits[order], positions[order], shuffled), expected, strict=True
        ):
            assert torch.equal(got, want[order])


LARGE_CASES = [
    {"top_k": k, "top_p": p, "min_p": m, "temperature": t}
    for k, p, m in [
        (17, 1.0, 0.0),
        (5000, 0.37, 0.0),
        (20_000, 1.0, 0.0),
        (30_000, 0.83, 0.0),
        (0, 0.31, 0.0),
        (0, 0.9, 0.0),
        (0, 0.9, 0.2),
        (0, 1.0, 0.05),
    ]
    for t in (1.0, 1e30)
]


@cache
def large_case(kind: str) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Return rows too long for a list of candidates.

    Each kind strains the selection differently.
    """
    cases, vocab = LARGE_CASES, 40_003
    if kind == "huge":
        cases, vocab = LARGE_CASES[4:12], 600_001
    if kind == "wide":  # more leaves than a CUDA block keeps in its shared memory
        cases, vocab = LARGE_CASES[5:13:2], 270_001
    logits = torch.randn(len(cases), vocab)
    if kind == "peaked":
        logits *= 4
    elif kind == "tied":  # more tokens share a logit than a list holds
        logits = logits.sign()
    elif kind == "tail":  # one leaf holds most of the mass; the rest is -inf, NaN or far below
        logits[:, :39_000] = -30.0
        logits[:, :20_000] = math.nan
        logits[:, :10_000] = -INF
    params = row_params(len(cases), **{name: [case[name] for case in cases] for name in cases[0]})
    positions = positions_from(3, len(cases))
    return logits, params, by_field(reference.sample)(logits, positions, **params)


@pytest.mark.parametrize("kind", ["flat", "peaked", "tied", "tail", "wide"])
@pytest.mark.fast("cpu-*", "simt-t*", ci=("simt-*",))
def test_sample_from_a_large_vocabulary(device: str, isa: str, on_cuda: bool, kind: str) -> None:
    """At a huge temperature all retained tokens weigh the same, so one token more or less shows."""
    check_large_case(device, on_cuda, kind, slice(0, None, 3 if on_cuda else 1))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["flat", "peaked", "tied", "tail", "huge"])
def test_sample_from_every_large_vocabulary(
    device: str, isa: str, on_cuda: bool, kind: str
) -> None:
    check_large_case(device, on_cuda, kind, slice(None))


def check_large_case(device: str, on_cuda: bool, kind: str, rows: slice) -> None:
    logits, params, expected = large_case(kind)
    positions = positions_from(3, len(logits))[rows].clone()
    logits, expected = logits[rows].to(device), expected[rows]
    params = {name: column[rows].clone() for name, column in params.items()}
    got = with_logprobs(logits, positions, params)
    assert torch.equal(got[0], expected)
    for threads in () if on_cuda else (1, 3):
        specops.set_num_threads(threads)
        again = with_logprobs(logits, positions, params)
        assert torch.equal(torch.stack(again), torch.stack(got))


def test_sample_supports_offsets_beyond_32_bits(
    device: str, on_cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offsets between rows pass 2^32 elements. The memory between them is never touched."""
    if on_cuda and device == "cpu":  # the interpreter: each schedule would copy that memory
        simt.load().set_regions([])
        monkeypatch.setattr(sampling, "_C", simt.load())
    stride = 2**31 + 8
    try:
        memory = torch.empty(2 * stride + 64, dtype=torch.bfloat16, device=device)
    except RuntimeError:
        pytest.skip("needs 8 GiB of address space")
    logits = memory.as_strided((3, 64), (stride, 1))
    logits.copy_(torch.randn(3, 64))
    params = row_params(3, top_k=[0, 5, 1])
    expected = by_field(reference.sample)(logits.cpu(), positions_from(0, 3), **params)
    assert logits.stride(0) * 2 > 2**32
    assert torch.equal(sample(logits, positions_from(0, 3), params), expected)


def kept_by_sampling(row: Tensor, draws: int = 800, **filters: Any) -> set[int]:
    """Sample one row at many positions, and return the distinct tokens."""
    logits = row.expand(draws, -1).contiguous()
    params = row_params(draws, seeds=5, **filters)
    return set(sample(logits, positions_from(0, draws), params).tolist())


def test_top_k_keeps_exactly_k_with_ties_to_the_lower_id(device: str, isa: str) -> None:
    row = torch.tensor([1.0, 2.0, 2.0, 0.5, 2.0, 2.0, 1.0], device=device)
    assert kept_by_sampling(row, top_k=3) == {1, 2, 4}
    assert kept_by_sampling(row, top_k=5) == {0, 1, 2, 4, 5}
    assert kept_by_sampling(row, top_k=7) == set(range(7))
    flat = torch.zeros(3000, device=device)
    assert kept_by_sampling(flat, top_k=4) == {0, 1, 2, 3}


def test_top_p_keeps_the_smallest_prefix(device: str, isa: str) -> None:
    probs = torch.tensor([0.05, 0.25, 0.25, 0.05, 0.25, 0.15], device=device)
    row = probs.log()
    assert kept_by_sampling(row, top_p=0.0) == {1}
    assert kept_by_sampling(row, top_p=0.2) == {1}
    assert kept_by_sampling(row, top_p=0.45) == {1, 2}
    assert kept_by_sampling(row, top_p=0.7) == {1, 2, 4}
    assert kept_by_sampling(row, top_p=0.8) == {1, 2, 4, 5}
    assert kept_by_sampling(row, top_p=0.92) == {0, 1, 2, 4, 5}
    assert kept_by_sampling(row, top_p=1.0) == set(range(6))
    # half of a flat row, rounded up, and across leaves
    flat = torch.zeros(2100, device=device)
    assert max(kept_by_sampling(flat, top_p=1050.5 / 2100)) <= 1050


def test_top_p_is_renormalized_after_top_k(device: str, isa: str) -> None:
    row = torch.tensor([0.4, 0.3, 0.2, 0.1], device=device).log()
    assert kept_by_sampling(row, top_p=0.5) == {0, 1}
    assert kept_by_sampling(row, top_k=2, top_p=0.5) == {0}


@pytest.mark.parametrize(
    "filters", [{"top_p": 0.9}, {"top_p": 0.2}, {"top_k": 2}, {"top_k": 3, "top_p": 0.8}]
)
def test_zeros_of_both_signs_are_tied(device: str, isa: str, filters: dict[str, float]) -> None:
    rows = 120
    logits = torch.tensor([-0.0, 0.0, -1.0])[torch.randint(3, (rows, 5))]
    params = row_params(rows, **filters)
    positions = positions_from(0, rows)
    got, logprobs = with_logprobs(logits.to(device), positions, params)
    assert torch.equal(got, by_field(reference.sample)(logits, positions, **params))
    assert (logprobs <= 0).all()


def test_min_p_is_relative_to_the_likeliest_token(device: str, isa: str) -> None:
    row = torch.tensor([0.1, 0.5, 0.3, 0.1], device=device).log()
    assert kept_by_sampling(row, min_p=0.5) == {1, 2}
    assert kept_by_sampling(row, min_p=1.0) == {1}
    assert kept_by_sampling(row, min_p=0.1) == {0, 1, 2, 3}


def test_greedy_ties_go_to_the_lowest_id(device: str, isa: str) -> None:
    logits = torch.full((3, 5000), -1.0, device=device)
    logits[0, [4999, 70, 1500]] = 2.0
    logits[1, [1030, 1029]] = 2.0
    params = row_params(3, temperature=0.0)
    assert sample(logits, positions_from(0, 3), params).tolist() == [70, 1029, 0]


def test_extreme_temperatures_select_the_best_or_any_token(device: str, isa: str) -> None:
    row = torch.linspace(-3, 3, 64, device=device)
    for temperature in (1e-45, 1e-30, 1e-4):
        assert kept_by_sampling(row, draws=50, temperature=temperature) == {63}
    hot = kept_by_sampling(row, temperature=3.4e38)
    assert hot == set(range(64))


def test_nan_and_infinite_logits_follow_the_reference(device: str, isa: str) -> None:
    nan = math.nan
    logits = torch.tensor(
        [
            [nan, -INF, nan, -INF, nan],
            [-INF] * 5,
            [nan, 1.0, -INF, nan, -INF],
            [0.0, INF, nan, INF, 5.0],
            [nan, -INF, 2.0, 2.0, nan],
        ],
        device=device,
    )
    for temperature in (0.0, 1.0):
        for filters in (
            {},
            {"top_k": 2},
            {"top_p": 0.7},
            {"min_p": 0.1},
            {"top_k": 4, "top_p": 0.4},
        ):
            params = row_params(5, temperature=temperature, seeds=11, **filters)
            expected_logprobs = torch.zeros(5, dtype=torch.float64)
            expected = by_field(reference.sample)(
                logits.cpu(), positions_from(0, 5), logprobs=expected_logprobs, **params
            )
            token_ids, logprobs = with_logprobs(logits, positions_from(0, 5), params)
            assert torch.equal(token_ids, expected)
            assert token_ids[:3].tolist() == [0, 0, 1]
            assert logprobs[:2].tolist() == [-INF, -INF]
            torch.testing.assert_close(logprobs.double(), expected_logprobs, rtol=0, atol=1e-6)


def test_seeds_are_unsigned_bit_patterns(device: str) -> None:
    seed = 2**64 - 3
    logits = torch.zeros(1, 4096, device=device)
    params = row_params(1, seeds=[seed - 2**64])
    token = sample(logits, torch.tensor([17], dtype=torch.int32), params)
    assert int(token) == int(reference.philox_uniform(seed, 17, 3) * 4096)


def test_choices_and_positions_draw_independently(device: str) -> None:
    logits = torch.zeros(64, 4096, device=device)
    same = torch.zeros(64, dtype=torch.int32)
    params = row_params(64, seeds=3, choice_index=list(range(64)))
    assert len(set(sample(logits, same, params).tolist())) > 55
    params = row_params(64, seeds=3)
    assert len(set(sample(logits, positions_from(0, 64), params).tolist())) > 55


@pytest.mark.parametrize("filters", [{}, {"top_k": 9}, {"top_p": 0.8}, {"temperature": 0.5}])
@pytest.mark.fast("cpu-*", "simt-filters2", ci=("simt-*",))
def test_sampled_tokens_follow_the_distribution(
    device: str, isa: str, on_cuda: bool, filters: dict[str, Any]
) -> None:
    row = torch.randn(24)
    draws = 4_000 if on_cuda else 20_000
    params = row_params(draws, seeds=123, **filters)
    logits = row.expand(draws, -1).contiguous().to(device)
    tokens = sample(logits, positions_from(0, draws), params)
    weights, kept = reference.kept_tokens(
        row,
        filters.get("temperature", 1.0),
        filters.get("top_k", 0),
        filters.get("top_p", 1.0),
        0.0,
    )
    expected = draws * (weights * kept) / (weights * kept).sum()
    counts = torch.bincount(tokens.long(), minlength=24).double()
    assert (counts[~kept] == 0).all()
    chi_square = float((((counts - expected) ** 2) / expected)[kept].sum())
    freedom = int(kept.sum()) - 1
    assert freedom >= 5
    # five standard deviations above a chi-square's mean
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)


# ---- probs ----


@pytest.mark.parametrize("rows,vocab", [(9, 300), (1, 300), (5, 4100)])
def test_sample_writes_strided_probs(
    device: str, isa: str, on_cuda: bool, rows: int, vocab: int
) -> None:
    """A step of a draft table is written in place, with the bits of a contiguous one."""
    logits, positions = torch.randn(rows, vocab).to(device), positions_from(5, rows)
    params = mixed_params(rows)
    want = torch.full((rows, vocab), 7.0, device=device)
    tokens = sample(logits, positions, params, probs=want, purpose=Purpose.DRAFT)
    expected = torch.zeros(rows, vocab, dtype=torch.float64)
    by_field(reference.sample)(
        logits.cpu(), positions, probs=expected, purpose=Purpose.DRAFT, **params
    )
    torch.testing.assert_close(want.cpu().double(), expected, rtol=1e-5, atol=1e-6)
    table = torch.full((rows + 2, 3, vocab), 7.0, device=device)
    got = sample(logits, positions, params, probs=table[:rows, 1], purpose=Purpose.DRAFT)
    assert torch.equal(got, tokens) and torch.equal(table[:rows, 1], want)
    params["top_p"][0] = 2.0  # on CUDA only this row is cleared
    with expect_fault(on_cuda, r"sample: sampling.top_p.* must be within"):
        sample(logits, positions, params, probs=table[:rows, 1], purpose=Purpose.DRAFT)
    if on_cuda:
        want[0] = 0.0
    assert torch.equal(table[:rows, 1], want)
    table[:rows, 1] = 7.0
    assert (table == 7.0).all()


# ---- top_logprobs ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "rows,vocab,n",
    [(0, 9, 2), (3, 9, 0), (3, 9, 9), (7, 5000, 20), (2, 50_000, 20_000), (1500, 70, 5)],
)
@pytest.mark.pairwise
def test_top_logprobs_equal_the_reference(
    device: str, isa: str, dtype: torch.dtype, rows: int, vocab: int, n: int
) -> None:
    logits = (3 * torch.randn(rows, vocab)).to(dtype).to(device)
    token_ids, logprobs, lse = (x.cpu() for x in sampling.top_logprobs(logits, n))
    expected = reference.top_logprobs(logits.cpu(), n)
    assert torch.equal(token_ids, expected[0])
    torch.testing.assert_close(logprobs, expected[1], rtol=0, atol=4e-6)
    torch.testing.assert_close(lse, expected[2], rtol=0, atol=4e-6)


def test_top_logprobs_of_ties_nan_and_infinity(device: str, isa: str) -> None:
    logits = torch.zeros(4, 3000, device=device)
    logits[1, [2999, 40, 1700]] = 1.0
    logits[2] = math.nan
    logits[3] = math.nan
    logits[3, 6] = INF
    token_ids, logprobs, lse = sampling.top_logprobs(logits, 4)
    assert token_ids.tolist() == [[0, 1, 2, 3], [40, 1700, 2999, 0], [0, 1, 2, 3], [6, 0, 1, 2]]
    assert logprobs[2].tolist() == [-INF] * 4 and float(lse[2]) == -INF
    assert logprobs[3].tolist() == [0.0, -INF, -INF, -INF]


def test_top_logprobs_has_the_bits_of_sample(device: str, isa: str) -> None:
    logits = torch.randn(6, 2000, device=device)
    token_ids, logprobs, _ = sampling.top_logprobs(logits, 1)
    got = with_logprobs(logits, positions_from(0, 6), row_params(6, temperature=0.0))
    assert torch.equal(token_ids[:, 0].cpu(), got[0])
    assert torch.equal(logprobs[:, 0].cpu(), got[1])


# ---- absent parameters ----


def test_sample_without_parameters_is_greedy(device: str, isa: str) -> None:
    logits = torch.randn(5, 700, device=device)
    positions = positions_from(0, 5)
    want = with_logprobs(logits, positions, row_params(5, temperature=0.0))
    got = with_logprobs(logits, positions, {})
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("filters", [{}, {"top_k": 7}, {"top_p": 0.7}, {"min_p": 0.2}])
def test_sample_treats_absent_filters_as_off(
    device: str, isa: str, filters: dict[str, Any]
) -> None:
    logits = torch.randn(40, 700, device=device)
    params = row_params(40, temperature=0.8, choice_index=0, **filters)
    want = sample(logits, positions_from(0, 40), params)
    params = {name: params[name] for name in ("temperature", "seeds", *filters)}
    assert torch.equal(sample(logits, positions_from(0, 40), params), want)


def test_workspace_of_many_rows_serves_few(device: str, on_cuda: bool) -> None:
    """Many rows get a block each.

    Few rows are each split over blocks, which needs more workspace.
    """
    logits = torch.randn(40, 20_000).to(device)
    workspace = sampling.sampling_workspace(logits, 3)
    for rows in (40, 1, 40, 3):
        positions = torch.zeros(rows, dtype=torch.int32, device=device)
        got = sampling.sample(logits[:rows], positions, workspace=workspace)
        assert torch.equal(got.long(), logits[:rows].argmax(-1))


def test_min_p_works_at_the_highest_temperature(device: str) -> None:
    """min-p keeps every finite logit, and nothing else narrows the choice."""
    logits = torch.randn(3, 9001)
    logits[0, 9000], logits[1, :] = 100.0, -3e38
    step = {"temperature": 3e38, "top_p": 1.0, "min_p": 1e-6}
    args = {name: torch.full((3,), value, device=device) for name, value in step.items()}
    args["top_k"] = torch.zeros(3, dtype=torch.int32, device=device)
    args["seeds"] = torch.arange(3, device=device)
    positions = torch.zeros(3, dtype=torch.int32, device=device)
    got = by_field(sampling.sample)(logits.to(device), positions, **args)
    assert torch.equal(got, by_field(reference.sample)(logits.to(device), positions, **args))


# ---- errors ----


@pytest.mark.parametrize(
    "change,message",
    [
        ({"temperature": -0.5}, r"sample: sampling.temperature.* must be finite and at least 0"),
        ({"temperature": math.nan}, r"temperature.* must be finite"),
        ({"top_k": -2}, r"top_k.* must be at least 1, or 0 or -1 for off, got"),
        ({"top_p": 1.5}, r"top_p.* must be within \[0, 1\], got"),
        ({"min_p": math.nan}, r"min_p.* must be within \[0, 1\], got"),
    ],
)
def test_sample_refuses_values(
    device: str, on_cuda: bool, change: dict[str, float], message: str
) -> None:
    logits = torch.zeros(2, 5, device=device)
    with expect_fault(on_cuda, message):
        tokens = sample(logits, positions_from(0, 2), row_params(2, **change))
    if on_cuda:
        assert tokens.tolist() == [-1, -1]


def test_sample_refuses_shapes_and_dtypes(device: str) -> None:
    params = on_device(row_params(2), device)
    logits, positions = torch.zeros(2, 5, device=device), positions_from(0, 2).to(device)
    with pytest.raises(ValueError, match=r"positions must be int32 \[rows=2\], got int64 \[2\]"):
        by_field(sampling.sample)(logits, positions.long(), **params)
    with pytest.raises(ValueError, match=r"logits must be float32\|bfloat16"):
        by_field(sampling.sample)(logits.half(), positions, **params)
    with pytest.raises(ValueError, match="between 1 and"):
        by_field(sampling.sample)(logits[:, :0], positions, **params)


def test_parameters_without_effect_are_refused(device: str) -> None:
    logits, positions = torch.zeros(2, 5, device=device), positions_from(0, 2).to(device)
    params = on_device(row_params(2), device)
    for top_p in (params["top_p"], 0.5):
        with pytest.raises(ValueError, match=r"top_p must be None without temperature .greedy"):
            sampling.sample(logits, positions, sampling=sampling.SamplingTensors(top_p=top_p))


def test_seeds_are_required_above_temperature_zero(device: str, on_cuda: bool) -> None:
    logits, positions = torch.randn(3, 5, device=device), positions_from(0, 3).to(device)
    best = logits.argmax(-1).int()
    temperature = torch.zeros(3, device=device)
    assert torch.equal(
        sampling.sample(
            logits, positions, sampling=sampling.SamplingTensors(temperature=temperature)
        ),
        best,
    )
    assert torch.equal(
        sampling.sample(
            logits, positions, sampling=sampling.SamplingTensors(temperature=0.0, choice_index=2)
        ),
        best,
    )
    temperature[1] = 0.5
    for given in (temperature, 0.5):
        with expect_fault(
            on_cuda, "sample: sampling.seeds must be given where a temperature is above 0"
        ):
            tokens = sampling.sample(
                logits, positions, sampling=sampling.SamplingTensors(temperature=given)
            )
            assert tokens.tolist()[1] == -1 and (given is not temperature or tokens[0] == best[0])


def test_one_number_applies_to_all_rows(device: str, isa: str) -> None:
    logits, positions = torch.randn(20, 900, device=device), positions_from(3, 20).to(device)
    seeds = torch.arange(20, device=device)
    numbers = {"temperature": 0.75, "top_k": 300, "top_p": 0.875, "min_p": 0.0625}
    numbers |= {"typical_p": 0.96875, "choice_index": 3}
    columns = on_device(row_params(20, **numbers), device)
    del columns["seeds"]
    columns["typical_p"] = torch.full((20,), 0.96875, device=device)
    want = by_field(sampling.sample)(logits, positions, seeds=seeds, **columns)
    assert torch.equal(by_field(sampling.sample)(logits, positions, seeds=seeds, **numbers), want)
    for name, number in numbers.items():
        mixed = {**columns, name: number}
        assert torch.equal(
            by_field(sampling.sample)(logits, positions, seeds=seeds, **mixed), want
        ), name


def test_top_logprobs_refuses_more_than_the_vocabulary(device: str) -> None:
    with pytest.raises(ValueError, match=r"n must be an int in 0 \.\. 5, got 6"):
        sampling.top_logprobs(torch.zeros(2, 5, device=device), 6)
