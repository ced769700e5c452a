# SPDX-License-Identifier: Apache-2.0
"""Ops of mixtures of experts: equal to their references, and row identity."""

from typing import Any

import pytest
import specops
import torch
from shared_fixtures import assert_close, expect_fault
from specops import dense, moe, reference
from specops.dense import PackedWeight
from specops.quantization import quantize_weight
from test_quantized import FP8, INTEGERS, TILED, Case, make_weight
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Routing options by model family.
ROUTES: dict[str, dict[str, Any]] = {
    "qwen3": {"min_sum": 0.0},
    "qwen3_plain": {},
    "ernie4_5": {"bias": True, "min_sum": 1e-12},
    "glm4": {"scoring": "sigmoid", "bias": True, "min_sum": 1e-20, "scale": 2.5},
    "deepseek_v3": {
        "scoring": "sigmoid",
        "bias": True,
        "num_groups": 8,
        "top_k_groups": 4,
        "min_sum": 1e-20,
        "scale": 2.5,
    },
    "deepseek_v2": {"num_groups": 8, "top_k_groups": 3, "scale": 16.0},
}


def route_options(family: str, experts: int, device: str) -> dict[str, Any]:
    options = dict(ROUTES[family])
    if options.pop("bias", False):
        options["bias"] = (torch.randn(experts) / 4).to(device)
    return options


# moe_route


@pytest.mark.no_bf16
@pytest.mark.parametrize("family", ROUTES)
@pytest.mark.parametrize("rows,experts,top_k", [(0, 16, 2), (3, 16, 6), (70, 128, 8), (9, 1000, 3)])
@pytest.mark.pairwise
def test_moe_route(device: str, isa: str, family: str, rows: int, experts: int, top_k: int) -> None:
    logits = (2 * torch.randn(rows, experts)).to(device)
    options = route_options(family, experts, device)
    ids, weights = moe.moe_route(logits, top_k, **options)
    assert ids.dtype == torch.int32 and ids.shape == weights.shape == (rows, top_k)
    assert torch.equal(ids, reference.moe_route(logits, top_k, **options)[0])
    if rows:
        assert_close(lambda x: reference.moe_route(x, top_k, **options)[1], weights, logits)


@pytest.mark.no_bf16
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_equal_scores_go_to_the_lowest_expert(device: str, isa: str, scoring: str) -> None:
    def chosen(logits: list[float], top_k: int, **options: Any) -> list[int]:
        row = torch.tensor([logits], dtype=torch.float32, device=device)
        ids, weights = moe.moe_route(row, top_k, scoring=scoring, **options)
        want = reference.moe_route(row, top_k, scoring=scoring, **options)[0]
        assert torch.equal(ids, want) and not (weights < 0).any()
        return ids[0].tolist()

    assert chosen([0.0] * 40, 3) == [0, 1, 2]
    assert chosen([0.0] * 33 + [1.0] * 7, 3) == [33, 34, 35]
    assert chosen([0, 1, 1, 0, 1, 1, 0, 1], 4) == [1, 2, 4, 5]
    # Groups 1 and 3 are equal. Group 2 is worse, although it has the best expert.
    grouped = [0, 0, 2, 2, 2.5, -9, 2, 2]
    assert chosen(grouped, 1, num_groups=4, top_k_groups=1) == [2]
    assert chosen(grouped, 3, num_groups=4, top_k_groups=2) == [2, 3, 6]
    bias = torch.tensor([0.0, 0, 0, 0, 0, 9, 0, 9], device=device)
    assert chosen(grouped, 2, bias=bias) == [5, 7]
    # No expert of another group is chosen, even if the scores in the chosen group are low.
    low = torch.tensor([-8.0, -8.0, -20.0, 20.0], device=device)
    assert chosen([1, 1, 1, -9], 2, num_groups=2, top_k_groups=1, bias=low) == [2, 3]


@pytest.mark.no_bf16
def test_nonfinite_router_logits_stay_in_their_rows(device: str, isa: str) -> None:
    """A NaN is chosen last; the whole softmax of its row is NaN."""
    logits = torch.randn(6, 50, device=device)
    logits[1, 7] = torch.nan
    logits[3] = torch.nan
    logits[4, 9] = torch.inf
    alone = [moe.moe_route(row[None], 4) for row in logits]
    ids, weights = moe.moe_route(logits, 4)
    assert torch.equal(ids, torch.cat([one[0] for one in alone]))
    assert torch.equal(weights.nan_to_num(9), torch.cat([one[1] for one in alone]).nan_to_num(9))
    for row in (1, 3, 4):
        assert ids[row].tolist() == [0, 1, 2, 3] and weights[row].isnan().all()
    assert not weights[[0, 2, 5]].isnan().any()
    ids, weights = moe.moe_route(logits, 4, scoring="sigmoid")
    assert 7 not in ids[1].tolist() and not weights[1].isnan().any() and 9 in ids[4].tolist()


@pytest.mark.no_bf16
@pytest.mark.parametrize("family", ["ernie4_5", "deepseek_v3"])
def test_router_rows_keep_their_bits(device: str, isa: str, family: str) -> None:
    options = route_options(family, 64, device)
    logits = torch.randn(40, 64, device=device)
    alone = [moe.moe_route(row[None], 6, **options) for row in logits]
    wide = torch.full((40, 70), torch.nan, device=device)
    wide[:, 3:67] = logits
    for threads in (1, 2, 3):
        specops.set_num_threads(threads)
        for first, last in ((0, 40), (5, 6), (7, 30)):
            ids, weights = moe.moe_route(wide[first:last, 3:67], 6, **options)
            assert torch.equal(ids, torch.cat([one[0] for one in alone[first:last]]))
            assert torch.equal(weights, torch.cat([one[1] for one in alone[first:last]]))


# moe_sort and moe_combine


@pytest.mark.no_bf16
@pytest.mark.parametrize(
    "rows,top_k,experts", [(0, 2, 3), (1, 1, 1), (7, 3, 5), (300, 8, 64), (1600, 1, 2)]
)
def test_moe_sort(device: str, isa: str, rows: int, top_k: int, experts: int) -> None:
    ids = torch.randint(-1, experts, (rows, top_k), dtype=torch.int32)
    want = reference.moe_sort(ids, experts)
    order = moe.ExpertOrder.empty(rows, top_k, experts, device)
    order.row_indices.fill_(-7)
    got = moe.moe_sort(ids.to(device), experts, order=order)
    assert got is order
    count = int(want[0][-1])
    assert torch.equal(got.expert_indptr.cpu(), want[0])
    assert torch.equal(got.row_indices[:count].cpu(), want[1])
    assert (got.row_indices[count:] == -7).all()
    assert torch.equal(got.places.cpu(), want[2])


def test_expert_ids_out_of_range_are_reported(device: str, on_cuda: bool) -> None:
    ids = torch.tensor([[0, 3], [-1, 2]], dtype=torch.int32, device=device)
    ids[0, 1] = 4
    words = "moe_sort: expert_ids.* must be -1 or below num_experts"
    with expect_fault(on_cuda, words):
        order = moe.moe_sort(ids, 4)
    if on_cuda:
        assert order.places.tolist() == [[0, -1], [-1, 1]]
        assert order.expert_indptr.tolist() == [0, 1, 1, 2, 2]


@pytest.mark.no_bf16
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_shared", [False, True])
@pytest.mark.parametrize("rows,top_k,width", [(0, 2, 8), (3, 0, 5), (5, 3, 77), (20, 8, 300)])
@pytest.mark.pairwise
def test_moe_combine(
    device: str,
    isa: str,
    dtype: torch.dtype,
    has_shared: bool,
    rows: int,
    top_k: int,
    width: int,
) -> None:
    """Results equal the reference bit for bit, also for a row alone."""
    pairs = rows * top_k
    out, weights = torch.randn(pairs, width), torch.rand(rows, top_k)
    places = torch.randperm(pairs).view(rows, top_k).int()
    if top_k == 3:
        places[1, 1] = places[2, :] = -1
        out[torch.tensor([one not in places for one in range(pairs)])] = torch.nan
    shared = torch.randn(rows, width) if has_shared else None
    want = reference.moe_combine(out, places, weights, shared, dtype)
    moved = [None if one is None else one.to(device) for one in (out, places, weights, shared)]
    assert torch.equal(moe.moe_combine(*moved, dtype=dtype).cpu(), want)  # type: ignore[arg-type]
    for row in range(min(rows, 3)):
        own = None if shared is None else shared[row : row + 1].to(device)
        args = [one[row : row + 1].to(device) for one in (places, weights)]
        assert torch.equal(
            moe.moe_combine(out.to(device), *args, own, dtype=dtype).cpu(), want[row : row + 1]
        )


def test_places_out_of_range_are_reported(device: str, on_cuda: bool) -> None:
    out, weights = torch.ones(3, 40, device=device), torch.ones(2, 2, device=device)
    places = torch.tensor([[0, 3], [1, -2]], dtype=torch.int32, device=device)
    with expect_fault(on_cuda, "moe_combine: places.* must be -1 or a row of expert_out"):
        got = moe.moe_combine(out, places, weights)
    if on_cuda:
        assert (got == 1).all()


# moe_linear


def make_experts(count: int, outputs: int, inputs: int, dtype: torch.dtype, device: str) -> Tensor:
    return (torch.randn(count, outputs, inputs) / max(inputs, 1) ** 0.5).to(dtype).to(device)


def packed(weights: Tensor, activation: str | None = None) -> list[PackedWeight]:
    return [dense.pack_weight(one, activation=activation) for one in weights]


def quantized_experts(
    case: Case, count: int, outputs: int, inputs: int, activation: str | None, device: str
) -> list[PackedWeight]:
    return [
        dense.pack_weight(
            make_weight(case, device, outputs, inputs),
            activation=activation,
            activations=case.activations,
        )
        for _ in range(count)
    ]


PLAIN = Case("plain", activations="float")
KINDS = [PLAIN, *(case._replace(order=False) for case in [*INTEGERS, *FP8])]


def own_kernels(isa: str, dtype: torch.dtype) -> bool:
    """Return whether `linear` has kernels that `moe_linear` lacks."""
    return isa == "amx" and dtype == torch.bfloat16


@pytest.mark.parametrize("case", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "outputs,inputs,activation,use_bias",
    [
        (70, 130, None, True),
        (48, 33, None, False),
        (72, 64, "silu", False),
        (36, 129, "swiglu_oai", True),
    ],
)
@pytest.mark.pairwise("cpu-*-dtype2-*")
def test_rows_have_the_bits_of_their_expert_alone(
    device: str,
    isa: str,
    on_cuda: bool,
    case: Case,
    dtype: torch.dtype,
    outputs: int,
    inputs: int,
    activation: str | None,
    use_bias: bool,
) -> None:
    """Experts have any number of rows, including none, in any order and on any threads."""
    if dtype == torch.float16 and not on_cuda:
        pytest.skip("float16 is for CUDA")
    counts = [0, 1, 3, 0, 20, 8, 9, 0] if on_cuda else [0, 1, 3, 0, 70, 8, 17, 0]
    if case == PLAIN:
        each = packed(make_experts(8, outputs, inputs, dtype, device), activation)
    else:
        each = quantized_experts(case, 8, outputs, inputs, activation, device)
    stacked = moe.stack_experts(iter(each), 8)
    bias = torch.randn(8, outputs).to(dtype).to(device) if use_bias else None
    rows = 40
    wide = torch.full((rows, inputs + 5), torch.nan, dtype=dtype, device=device)
    wide[:, 2:-3] = torch.randn(rows, inputs).to(dtype)
    x = wide[:, 2:-3]
    indptr = torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32, device=device)
    indices = torch.randint(0, rows, (sum(counts) + 4,), dtype=torch.int32, device=device)
    indices[-4:] = 99  # without an expert
    for out_dtype in (None, torch.float32):
        if activation is not None and out_dtype is not None:
            continue
        want = torch.cat(
            [
                dense.linear(
                    x[indices[i].long()][None],
                    each[e],
                    None if bias is None else bias[e],
                    out_dtype=out_dtype,
                )
                for e in range(8)
                for i in range(int(indptr[e]), int(indptr[e + 1]))
            ]
        )
        for threads in (1,) if on_cuda else (1, 2, 3):
            specops.set_num_threads(threads)
            out = torch.full((len(indices), want.shape[1]), 7.0, dtype=want.dtype, device=device)
            got = moe.moe_linear(x, stacked, indptr, indices, bias, out=out)
            assert got is out and (out[-4:] == 7).all()
            if case != PLAIN or not own_kernels(isa, dtype):
                assert torch.equal(out[:-4], want)
        again = moe.moe_linear(
            x[indices[:-4].long()], stacked, indptr, None, bias, out_dtype=out_dtype
        )
        assert torch.equal(again, out[:-4])


@pytest.mark.parametrize("counts", [[0, 65, 1, 20], [130, 0, 70]])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "outputs,inputs,activation,use_bias",
    [(134, 72, None, True), (36, 520, "silu", True), (130, 77, None, False)],
)
def test_many_rows_of_experts_have_the_bits_of_linear(
    device: str,
    on_cuda: bool,
    dtype: torch.dtype,
    counts: list[int],
    outputs: int,
    inputs: int,
    activation: str | None,
    use_bias: bool,
) -> None:
    """CUDA multiplies tiles of 64 or 128 rows. Rows of 77 inputs are not aligned: no tiles."""
    if not on_cuda:
        pytest.skip("CPU kernels have one form for every number of rows")
    experts, rows = len(counts), 50
    weights = packed(make_experts(experts, outputs, inputs, dtype, device), activation)
    stacked = moe.stack_experts(iter(weights), experts)
    bias = torch.randn(experts, outputs).to(dtype).to(device) if use_bias else None
    x = torch.randn(rows, inputs).to(dtype).to(device)
    indptr = torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32, device=device)
    indices = torch.randint(0, rows, (sum(counts),), dtype=torch.int32, device=device)
    want = torch.cat(
        [
            dense.linear(own, weights[e], None if bias is None else bias[e])
            for e, own in enumerate(x[indices.long()].split(counts))
        ]
    )
    assert torch.equal(moe.moe_linear(x, stacked, indptr, indices, bias), want)
    assert torch.equal(moe.moe_linear(x[indices.long()], stacked, indptr, None, bias), want)
    wrong = indices.clone()
    wrong[2] = rows
    with expect_fault(on_cuda, "moe_linear: row_indices.* must be a row of x"):
        got = moe.moe_linear(x, stacked, indptr, wrong, None)
    want = moe.moe_linear(x, stacked, indptr, indices, None)
    want[2] = 0
    assert torch.equal(got, want)


@pytest.mark.parametrize("case", [one for one in TILED if not one.order], ids=str)
def test_rounding_rows_of_experts_once_keeps_their_bits(
    device: str, on_cuda: bool, case: Case
) -> None:
    """With a workspace, CUDA rounds the rows of experts once. A short workspace is not used."""
    if not on_cuda:
        pytest.skip("CPU kernels need no workspace")
    for counts, inputs, outputs, dtype, activation in [
        ([0, 65, 1, 20], 300, 40, torch.bfloat16, None),
        ([40, 0, 70], 96, 130, torch.float32, None),
        ([30], 257, 12, torch.float16, "silu"),
    ]:
        experts, rows = len(counts), 50
        weights = quantized_experts(case, experts, outputs, inputs, activation, device)
        stacked = moe.stack_experts(iter(weights), experts)
        bias = torch.randn(experts, outputs).to(dtype).to(device)
        wide = torch.randn(rows, inputs + 1).to(dtype).to(device)
        x = wide[:, 1:]
        x[3, 5], x[30, inputs - 1], x[8] = torch.nan, torch.inf, 0
        indptr = torch.tensor([0, *torch.tensor(counts).cumsum(0)]).int().to(device)
        indices = torch.randint(0, rows, (sum(counts),), dtype=torch.int32, device=device)
        short = torch.zeros(4, device=device)  # for which linear has another kernel
        want = torch.cat(
            [
                dense.linear(own, weights[e], bias[e], workspace=short)
                for e, own in enumerate(x[indices.long()].split(counts))
            ]
        )
        floats = moe.moe_linear_workspace_size(sum(counts), stacked)
        for size in (floats, floats - 4):
            workspace = torch.full((size,), torch.nan, device=device)
            for own, rows_of_pairs in ((x, indices), (x[indices.long()], None)):
                got = moe.moe_linear(own, stacked, indptr, rows_of_pairs, bias, workspace=workspace)
                assert torch.allclose(got, want, rtol=0, atol=0, equal_nan=True), counts
            assert workspace.isnan().all() == (size < floats)


def test_workspaces_are_for_experts_with_many_rows(device: str, on_cuda: bool) -> None:
    def size(pairs: int, case: Case) -> int:
        weights = quantized_experts(case, 3, 40, 300, None, device)
        return moe.moe_linear_workspace_size(pairs, moe.stack_experts(iter(weights), 3))

    int8 = Case("int8", 128)
    sizes = [size(pairs, int8) for pairs in (0, 24, 25, 64, 10**6)]
    assert sizes[:2] == [0, 0] and sizes == sorted(sizes)
    assert bool(sizes[2]) == on_cuda
    assert size(1000, Case("int8", 16)) == size(1000, FP8[0]) == 0
    plain = moe.stack_experts(packed(torch.randn(3, 40, 300).to(device)), 3)
    assert moe.moe_linear_workspace_size(1000, plain) == 0


def test_experts_beyond_a_warp_find_their_tiles(device: str, on_cuda: bool) -> None:
    if not on_cuda:
        pytest.skip("CPU kernels look up no tiles")
    weights = quantized_experts(Case("int4", 128, "int8"), 40, 4, 32, None, device)
    stacked = moe.stack_experts(iter(weights), 40)
    counts = [0] * 40
    counts[2], counts[31], counts[32], counts[39] = 65, 200, 1, 70
    indptr = torch.tensor([0, *torch.tensor(counts).cumsum(0)]).int().to(device)
    x = torch.randn(sum(counts), 32).bfloat16().to(device)
    short = torch.zeros(4, device=device)
    whole, parts = (moe.moe_linear(x, stacked, indptr, workspace=one) for one in (None, short))
    assert torch.equal(whole, parts)
    wrong = indptr.clone()
    wrong[33] = 0  # the last row of expert 31 is the last one that is computed
    out = torch.full_like(whole, 7)
    with expect_fault(on_cuda, "moe_linear: expert_indptr.* must be non-decreasing from 0"):
        moe.moe_linear(x, stacked, wrong, out=out)
    assert torch.equal(out[:265], whole[:265]) and (out[265:] == 7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moe_linear(device: str, isa: str, dtype: torch.dtype) -> None:
    weights = make_experts(5, 34, 70, dtype, device)
    bias = torch.randn(5, 34).to(dtype).to(device)
    x = torch.randn(20, 70).to(dtype).to(device)
    indptr, indices, _ = reference.moe_sort(torch.randint(0, 5, (20, 3)), 5)
    indptr, indices = indptr.to(device), indices.to(device)
    stacked = moe.stack_experts(packed(weights, "silu"), 5)

    def op(x: Tensor, weights: Tensor, bias: Tensor) -> Tensor:
        return reference.moe_linear(x, weights, bias, indptr, indices, activation="silu")

    assert_close(op, moe.moe_linear(x, stacked, indptr, indices, bias), x, weights, bias)


@pytest.mark.parametrize("rows,top_k", [(0, 2), (4, 0)])
def test_rows_without_experts(device: str, isa: str, rows: int, top_k: int) -> None:
    stacked = moe.stack_experts(packed(torch.randn(3, 6, 8).to(device)), 3)
    order = moe.moe_sort(torch.zeros(rows, top_k, dtype=torch.int32, device=device), 3)
    out = moe.moe_linear(torch.randn(rows, 8, device=device), stacked, *order[:2])
    assert out.shape == (0, 6)
    sums = moe.moe_combine(out, order.places, torch.ones(rows, top_k, device=device))
    assert torch.equal(sums, torch.zeros(rows, 6, device=device))


def test_indices_out_of_range_are_reported(device: str, on_cuda: bool) -> None:
    stacked = moe.stack_experts(packed(torch.ones(3, 4, 8).to(device)), 3)
    x = torch.ones(2, 8, device=device)

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    with expect_fault(on_cuda, "moe_linear: row_indices.* must be a row of x"):
        out = moe.moe_linear(x, stacked, ints(0, 1, 2, 3), ints(0, 2, 1))
    if on_cuda:
        assert out.tolist() == [[8.0] * 4, [0.0] * 4, [8.0] * 4]
    words = "moe_linear: expert_indptr.* must be non-decreasing from 0"
    for indptr in (ints(0, 2, 1, 3), ints(1, 2, 3, 3), ints(0, 1, 2, 4), ints(0, -1, 2, 3)):
        with expect_fault(on_cuda, words):
            moe.moe_linear(x, stacked, indptr, ints(0, 1, 1))


def test_stacked_experts_must_be_alike() -> None:
    weights = packed(torch.ones(2, 4, 8))
    for others, words in [
        ([*weights, dense.pack_weight(torch.ones(4, 9))], "num_inputs 9 of expert 2|data"),
        (
            [*weights, dense.pack_weight(quantize_weight(torch.ones(4, 8)))],
            "kind 'int8' of expert 2",
        ),
        ([*weights, dense.pack_weight(torch.ones(4, 8), activation="silu")], "expert 2"),
        (weights, "must be 3, got 2"),
        ([*weights, *weights], "must be 3, got 4 or more"),
        ([], "must be 3, got 0"),
        ([weights[0]._replace(input_order=torch.zeros(8).int())], "must have no input_order"),
        ([None], "must be a PackedWeight of pack_weight each, got None"),
    ]:
        with pytest.raises(ValueError, match=f"stack_experts: weights .*({words})"):
            moe.stack_experts(others, 3)  # type: ignore[arg-type]
