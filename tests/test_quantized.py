# SPDX-License-Identifier: Apache-2.0
"""Quantized weights: quantization, dequantization and the exact bits of `linear`."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import simt
import specops
import torch
from shared_fixtures import every_isa, expect_fault
from specops import dense, quantization, reference
from specops.quantization import QuantizedWeight, dequantize_weight, quantize_weight
from test_dense import COUNTERS, GATED
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Case(NamedTuple):
    """Kind of weight, and rounding of the rows that multiply it."""

    kind: str = "int8"
    group: int = 0
    activations: str = "int16"
    offsets: bool = False
    table: bool = False
    order: bool = False


BY_OUTPUT = Case()
INTEGERS = [
    BY_OUTPUT,
    Case("int8", 128),
    Case("int8", 16, offsets=True, order=True),
    Case("int8", 0, "int8"),
    Case("int8", 64, "int8", offsets=True),
    Case("int4", 128, "int8"),
    Case("int4", 32, "int8", offsets=True, order=True),
    Case("int4", 16, "int8", table=True),
    Case("int4", 0, "int8", offsets=True),
    Case("int4", 96, "int16", offsets=True),
    Case("int4", 128, "int16", table=True, order=True),
]
# Weights of which CUDA rounds many rows once: every kernel.
TILED = [
    BY_OUTPUT,
    Case("int8", 128),
    Case("int8", 32),
    Case("int8", 0, "int8"),
    Case("int8", 96, "int8", order=True),
    Case("int4", 128, "int8"),
    Case("int4", 32, "int8", offsets=True, order=True),
    Case("int4", 128, "int8", table=True),
    Case("int4", 128, "int16"),
    Case("int4", 0, "int16", offsets=True),
    Case("int4", 256, "int16", table=True),
]
FP8 = [Case("fp8", 0, "float"), Case("fp8", 128, "float", order=True)]


@pytest.fixture
def row_dtype(request: pytest.FixtureRequest, on_cuda: bool) -> torch.dtype:
    """Return the dtype of the rows. Skip float16 on the CPU, which has no kernels for it."""
    dtype: torch.dtype = request.node.callspec.params["dtype"]
    if dtype == torch.float16 and not on_cuda:
        pytest.skip("float16 rows are for CUDA")
    return dtype


def make_rows(device: str, rows: int, num_inputs: int, dtype: torch.dtype) -> Tensor:
    x = torch.randn(rows, num_inputs) * torch.randn(rows, num_inputs).exp()
    return x.to(dtype).to(device)


def make_weight(case: Case, device: str, num_outputs: int, num_inputs: int) -> QuantizedWeight:
    """Return random quantized values of the full range."""
    shape, groups = (num_outputs, num_inputs), quantization.num_groups(num_inputs, case.group)
    if case.kind == "fp8":
        quantized = (torch.randn(shape) * 20).to(torch.float8_e4m3fn)
    elif case.kind == "int8":
        quantized = torch.randint(-128, 128, shape, dtype=torch.int8)
    else:
        quantized = torch.randint(0, 16, shape, dtype=torch.uint8)
    of_blocks = case.kind == "fp8" and case.group
    scales = torch.rand(-(-num_outputs // 128) if of_blocks else num_outputs, groups) / 100
    offsets = torch.randn(num_outputs, groups) / 20
    table = torch.randint(-128, 128, (16,), dtype=torch.int8)
    order = torch.randperm(num_inputs).int()
    return QuantizedWeight(
        case.kind,
        quantized.to(device),
        scales.to(device),
        offsets.to(device) if case.offsets else None,
        case.group,
        table.to(device) if case.table else None,
        order.to(device) if case.order else None,
    )


def make(
    case: Case, device: str, rows: int, num_inputs: int, num_outputs: int, dtype: torch.dtype
) -> tuple[Tensor, QuantizedWeight, Tensor]:
    """Return rows, a weight and a bias."""
    x = make_rows(device, rows, num_inputs, dtype)
    bias = torch.randn(num_outputs).to(dtype).to(device)
    return x, make_weight(case, device, num_outputs, num_inputs), bias


# Quantized values and scales


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind,group", [("int8", 0), ("int8", 32), ("int4", 0), ("int4", 64)])
@pytest.mark.parametrize("num_outputs,num_inputs", [(0, 5), (3, 0), (1, 1), (40, 77), (16, 256)])
def test_quantized_values_and_scales_equal_the_reference(
    dtype: torch.dtype, kind: str, group: int, num_outputs: int, num_inputs: int
) -> None:
    """The rows of the weight are strided."""
    wide = torch.full((num_outputs, num_inputs + 3), torch.nan, dtype=dtype)
    weight = wide[:, 1:-2]
    weight.copy_(torch.randn(num_outputs, num_inputs))
    got = quantize_weight(weight, kind=kind, group=group)
    quantization.check_quantized("test", got)
    assert dense.pack_weight(got).kind == got.kind == kind
    if num_inputs == 0:
        assert not got.scales.any()
        return
    want = reference.quantize_weight(weight, kind=kind, group=group)
    assert torch.equal(got.values, want.values) and torch.equal(got.scales, want.scales)
    values = got.values.int() - (8 if kind == "int4" else 0)
    most = {"int8": 127, "int4": 7}[kind] + (group > 0)
    assert num_outputs == 0 or most - 1 <= values.abs().amax() <= most


def test_large_weight_is_quantized_in_parts_with_the_same_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = torch.randn(300, 60)
    whole = quantize_weight(weight, kind="int4", group=32)
    values = dequantize_weight(whole)
    monkeypatch.setattr(quantization, "_AT_ONCE", 7 * 60)
    parts = quantize_weight(weight, kind="int4", group=32)
    assert torch.equal(parts.values, whole.values) and torch.equal(parts.scales, whole.scales)
    assert torch.equal(dequantize_weight(parts), values)


def test_rounding_per_output_by_hand() -> None:
    """Ties round away from zero. Values are computed with the scale before its own rounding."""
    weight = torch.tensor([[127.0, 0.5, -0.5, 2.5, -126.5, 126.49, 0.4999, -1.0]])
    q = quantize_weight(weight)
    assert q.scales.tolist() == [[1.0]] and q.values.tolist() == [[127, 1, -1, 3, -127, 126, 0, -1]]
    # 1/127 of it is not representable in bfloat16
    peak = torch.tensor([[1.0078125, 0.50390625]]).bfloat16()
    q = quantize_weight(peak)
    scale = (peak[0, 0].float() / 127).bfloat16().float()
    assert q.scales.item() == scale != peak[0, 0].float() / 127
    assert q.values.tolist() == [[127, 64]]
    q = quantize_weight(torch.tensor([[7.0, 0.5, -6.5, 1.49, -0.2]]), kind="int4")
    assert q.scales.item() == 1 and (q.values.int() - 8).tolist() == [[7, 1, -7, 1, 0]]


def test_rounding_per_group_by_hand() -> None:
    """Ties round to even, and -8 is used. A group's scale depends on its own weights alone."""
    weight = torch.zeros(1, 36)
    weight[0, :6] = torch.tensor([-8.0, 6.5, 0.5, 1.5, -2.5, 7.4])
    weight[0, 32:] = torch.tensor([14.0, -15.0, 3.0, 0.0])
    q = quantize_weight(weight, kind="int4", group=32)
    assert q.scales.tolist() == [[7.4000000954 / 7, 2.0]] or q.scales[0, 1] == 2.0
    assert (q.values[0, 32:].int() - 8).tolist() == [7, -8, 2, 0]  # -7.5 to -8, 1.5 to 2
    q = quantize_weight(weight[:, :5], kind="int4", group=32)
    assert q.scales.item() == 1.0 and (q.values[0].int() - 8).tolist() == [-8, 6, 0, 2, -2]
    q = quantize_weight(-torch.ones(1, 32), kind="int8", group=32)
    assert q.scales.item() == 1 / 128 and (q.values == -128).all()


@pytest.mark.parametrize("kind,group", [("int8", 0), ("int4", 32)])
def test_zero_and_non_finite_outputs_affect_no_other_output(kind: str, group: int) -> None:
    """An all-zero output stays zero. An infinity or NaN makes its own output NaN."""
    weight = torch.randn(5, 20)
    weight[1], weight[2, 3], weight[3, 7] = 0, torch.inf, torch.nan
    q = quantize_weight(weight, kind=kind, group=group)
    got = dense.linear(torch.randn(4, 20), dense.pack_weight(q))
    assert q.scales[1] == 0
    assert (got[:, 1] == 0).all() and got[:, 2:4].isnan().all() and got[:, ::4].isfinite().all()


@pytest.mark.parametrize("case", [*INTEGERS, *FP8], ids=str)
def test_dequantized_weight_equals_the_reference_and_linear(case: Case) -> None:
    """`linear` may differ from the reference only by the rounding of the rows."""
    q = make_weight(case, "cpu", 150, 200)
    weight = dequantize_weight(q)
    assert torch.equal(weight, reference.dequantize_weight(q))
    assert torch.equal(dequantize_weight(q, torch.bfloat16), weight.bfloat16())
    ones = torch.eye(200)[::7]
    got = dense.linear(ones, dense.pack_weight(q, activations=case.activations))
    apart = q._replace(offsets=None), q._replace(scales=torch.zeros_like(q.scales))
    sizes = sum(dequantize_weight(one).abs() for one in apart)
    assert ((got.T - weight[:, ::7]).abs() <= 4 * 2.0**-24 * sizes[:, ::7]).all()


# `linear`: the bits of the reference on every device and instruction set


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", INTEGERS, ids=str)
@pytest.mark.pairwise("cpu-*-dtype2")
def test_linear_has_the_bits_of_the_reference(
    device: str, isa: str, row_dtype: torch.dtype, dtype: torch.dtype, case: Case
) -> None:
    """Rows are strided with NaN between them. Memory after the output stays unchanged."""
    for rows, num_inputs, num_outputs in [
        (0, 8, 8),
        (2, 0, 5),
        (1, 1, 1),
        (3, 7, 17),
        (5, 127, 33),
        (8, 128, 64),
        (9, 129, 20),
        (20, 1030, 50),
        (70, 260, 130),
    ]:
        x, q, bias = make(case, device, rows, num_inputs, num_outputs, dtype)
        packed = dense.pack_weight(q, activations=case.activations)
        wide = torch.full((rows, num_inputs + 3), torch.nan, dtype=dtype, device=device)
        wide[:, 1:-2] = x
        plain = reference.quantized_linear(x, q, None, torch.float32, activations=case.activations)
        for given, out_dtype in [(None, torch.float32), (bias, dtype)]:
            want = (plain if given is None else plain + given.float()).to(out_dtype)
            assert torch.equal(dense.linear(x, packed, given, out_dtype=out_dtype), want)
            slack = torch.full((rows * num_outputs + 64,), 7.0, dtype=out_dtype, device=device)
            out = slack[: rows * num_outputs].view(rows, num_outputs)
            dense.linear(wide[:, 1:-2], packed, given, out=out)
            assert torch.equal(out, want) and (slack[rows * num_outputs :] == 7.0).all()


@pytest.mark.parametrize("case", [*INTEGERS[::3], *FP8], ids=str)
def test_rows_keep_their_bits(
    device: str, isa: str, on_cuda: bool, place: Callable[[int, int], None], case: Case
) -> None:
    """Compare rows alone, in every batch and on 1 to 3 threads.

    The two layers split work differently. On a CPU, more than 512 rows are rounded in parts.
    """
    for num_outputs, num_inputs in [(72, 300)] if on_cuda else [(1500, 130), (40, 1030)]:
        many = 20 if on_cuda else 70 if case.kind == "fp8" else 530
        x, q, bias = make(case, device, many, num_inputs, num_outputs, torch.bfloat16)
        packed = dense.pack_weight(q, activations=case.activations)
        whole = dense.linear(x, packed, bias)
        if case.kind != "fp8":
            want = reference.quantized_linear(x, q, bias, activations=case.activations)
            assert torch.equal(whole, want)
        for num_threads in (1, 2, 3):
            place(num_threads, num_threads)  # fewer SMs are kept busy by wider tiles
            for rows in [1, 5, 8, 9] if on_cuda else [*range(1, 20), 33, 64]:
                first = (7 * rows) % (many + 1 - rows)
                got = dense.linear(x[first : first + rows], packed, bias)
                assert torch.equal(got, whole[first : first + rows]), (num_threads, rows)


@pytest.mark.parametrize("case", [BY_OUTPUT, Case("int4", 128, "int8"), *FP8], ids=str)
def test_shares_of_long_rows_keep_their_bits(
    device: str, on_cuda: bool, place: Callable[[int, int], None], case: Case
) -> None:
    """CUDA divides the inputs of narrow layers among four warps or, if SMs would idle, eight."""
    if not on_cuda:
        pytest.skip("CPU kernels do not divide inputs")
    in_interpreter = device == "cpu"
    for rows in (5, 13):
        x, q, bias = make(case, device, rows, 3149, 70, torch.bfloat16)
        packed = dense.pack_weight(q, activations=case.activations)
        outs, barriers = [], []
        for sms in (1, 3):  # there are three blocks
            place(sms, 1)
            if in_interpreter:
                simt.load().reset_counters()
            outs.append(dense.linear(x, packed, bias))
            if in_interpreter:
                counts = simt.load().counters()
                barriers.append(counts["barriers"] / counts["launches"])
        assert torch.equal(*outs)
        if in_interpreter:
            assert barriers[1] < 0.7 * barriers[0], "eight warps meet half as often"
        if case.kind != "fp8":
            assert torch.equal(
                outs[0], reference.quantized_linear(x, q, bias, activations=case.activations)
            )


@pytest.mark.parametrize("case", TILED, ids=str)
def test_rounding_many_rows_once_keeps_their_bits(
    device: str, on_cuda: bool, place: Callable[[int, int], None], case: Case
) -> None:
    """With a workspace, CUDA rounds rows once for all outputs. A short workspace is not used."""
    if not on_cuda:
        pytest.skip("CPU kernels need no workspace")
    place(1, 1)  # one SM is kept busy by the smallest layer
    for rows, num_inputs, num_outputs, dtype, activation in [
        (33, 300, 40, torch.bfloat16, None),
        (64, 96, 130, torch.float32, None),
        (130, 257, 12, torch.float16, "silu"),
    ]:
        x, q, bias = make(case, device, rows, num_inputs, num_outputs, dtype)
        x[3, 5], x[30, num_inputs - 1], x[8] = torch.nan, torch.inf, 0
        want = reference.quantized_linear(x, q, bias, activations=case.activations)
        assert want[3].isnan().all() and want[30].isnan().all()
        wide = torch.full((rows, num_inputs + 1), torch.nan, dtype=dtype, device=device)
        wide[:, 1:] = x
        packed = dense.pack_weight(q, activation=activation, activations=case.activations)
        if activation is not None:
            want = GATED[activation](want)
        floats = dense.linear_workspace_size(rows, packed)
        for size in (floats, floats - 4, 3):
            workspace = torch.full((size,), torch.nan, device=device)
            workspace[:COUNTERS] = 0
            got = dense.linear(wide[:, 1:], packed, bias, workspace=workspace)
            assert torch.allclose(got, want, rtol=0, atol=0, equal_nan=True), (rows, size)
            assert not workspace[:COUNTERS].any()
            if device == "cpu":  # in the interpreter, where the number of SMs is known
                assert workspace[COUNTERS:].isnan().all() == (size < floats)


def test_many_rows_without_inputs_are_the_bias(device: str, isa: str) -> None:
    x, q, bias = make(BY_OUTPUT, device, 40, 0, 6, torch.bfloat16)
    assert torch.equal(dense.linear(x, dense.pack_weight(q), bias), bias.expand(40, 6))


@pytest.mark.parametrize("case", [one for one in INTEGERS if not one.order], ids=str)
def test_products_of_shards_equal_the_product_of_the_whole(isa: str, case: Case) -> None:
    """Split the outputs anywhere and the inputs at a group boundary.

    Rows and scales are chosen so that float32 holds every sum exactly. So another order of
    additions changes no bit, but a value missing from a shard does.
    """
    q = make_weight(case, "cpu", 150, 768)
    x = torch.randint(-8, 9, (6, 768)).bfloat16()
    x[:, ::32] = 127
    power = torch.exp2(torch.randint(-2, 2, q.scales.shape))
    q = q._replace(scales=power, offsets=None if q.offsets is None else power.flip(0))

    def product(outputs: slice, inputs: slice) -> Tensor:
        size, groups = q.group or 768, slice(None)
        if q.group:
            groups = slice(inputs.start // size, inputs.stop // size)
        part = q._replace(
            values=q.values[outputs, inputs].contiguous(),
            scales=q.scales[outputs, groups].contiguous(),
            offsets=None if q.offsets is None else q.offsets[outputs, groups].contiguous(),
        )
        packed = dense.pack_weight(part, activations=case.activations)
        return dense.linear(x[:, inputs].contiguous(), packed, out_dtype=torch.float32)

    every = slice(0, 768)
    whole = product(slice(0, 150), every)
    parts = [product(slice(0, 37), every), product(slice(37, 150), every)]
    assert torch.equal(torch.cat(parts, 1), whole)
    first, second = (product(slice(0, 150), one) for one in (slice(0, 384), slice(384, 768)))
    assert torch.equal(first + second, whole)


@pytest.mark.parametrize("case", INTEGERS[::2], ids=str)
def test_large_layers_have_the_same_bits_on_every_instruction_set(case: Case) -> None:
    x, q, bias = make(case, "cpu", 24, 2000, 1100, torch.bfloat16)
    packed = dense.pack_weight(q, activations=case.activations)
    outs = [dense.linear(x, packed, bias) for _ in every_isa()]
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize("case", INTEGERS, ids=str)
def test_products_without_vnni_have_the_same_bits(case: Case) -> None:
    """CPUs of avx2, avx512 or neon may or may not have dot products of 8-bit integers."""
    for rows in (1, 5, 8, 40):
        x, q, bias = make(case, "cpu", rows, 700, 300, torch.bfloat16)
        packed = dense.pack_weight(q, activations=case.activations)
        for isa in every_isa():
            expected = dense.linear(x, packed, bias)
            specops._C.use_vnni(False)
            try:
                assert torch.equal(dense.linear(x, packed, bias), expected), (isa, rows)
            finally:
                specops._C.use_vnni(True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", GATED)
@pytest.mark.parametrize("case", [*INTEGERS[::3], *FP8], ids=str)
@pytest.mark.pairwise
def test_fused_gate_has_the_bits_of_the_separate_op(
    device: str, isa: str, dtype: torch.dtype, activation: str, case: Case
) -> None:
    gated = GATED[activation]
    for rows, num_inputs, width in [(1, 5, 1), (5, 300, 40), (21, 140, 17)]:
        x, q, bias = make(case, device, rows, num_inputs, 2 * width, dtype)
        packed = dense.pack_weight(q, activation=activation, activations=case.activations)
        apart = dense.pack_weight(q, activations=case.activations)
        for given in (None, bias):
            assert torch.equal(dense.linear(x, packed, given), gated(dense.linear(x, apart, given)))


@pytest.mark.parametrize("case", [BY_OUTPUT, *INTEGERS[3:6]], ids=str)
def test_extreme_inputs_equal_the_reference(device: str, isa: str, case: Case) -> None:
    """Inputs are zeros, subnormals, the largest numbers and ties.

    Infinity and NaN affect only their own row.
    """
    x, q, _ = make(case, device, 12, 300, 40, torch.float32)
    packed = dense.pack_weight(q, activations=case.activations)
    x[0], x[1, :128], x[2, 130:] = 0, 0, 0
    x[3] *= 1e-42  # entirely subnormal
    x[4, ::3] *= 1e-42
    x[5] *= 2.0**-110
    x[6] = torch.randn(300).sign().to(device) * 1e33
    # rounds to 2^15, which is not clamped
    below = torch.nextafter(torch.tensor(2.0), torch.tensor(0.0))
    x[7] = below * (1 - 2 * (torch.arange(300) % 2))
    x[8] = torch.arange(300).to(device) * 0.5 + 2.0**14  # ties
    want = reference.quantized_linear(x, q, activations=case.activations)
    assert torch.equal(dense.linear(x, packed), want)
    assert not want[0].any() and not want[3].any() and want[1:3].all()
    x[9, 299], x[10, 5], x[11, 128] = torch.inf, torch.nan, -torch.inf
    spoilt = dense.linear(x, packed)
    assert torch.equal(spoilt[:9], want[:9])
    assert spoilt[9:].isnan().all()


@pytest.mark.parametrize("activations", ["int16", "int8"])
@pytest.mark.parametrize("kind,values", [("int8", None), ("int4", None), ("int4", [-128, 127] * 8)])
def test_largest_sums_are_exact(
    device: str, isa: str, kind: str, activations: str, values: list[int] | None
) -> None:
    """Every product of a group has its largest magnitude. float32 cannot hold all such sums."""
    quantized = torch.full((20, 128), 127, dtype=torch.int8, device=device)
    quantized[1::2], quantized[3] = -128, 126
    table = None if values is None else torch.tensor(values, dtype=torch.int8, device=device)
    if kind == "int4":
        quantized = torch.randint(0, 2, (20, 128), dtype=torch.uint8, device=device)
        quantized[1], quantized[2] = 15, 0
    q = QuantizedWeight(kind, quantized, torch.ones(20, 1, device=device), code_values=table)
    x = torch.full((3, 128), 127.0 if activations == "int8" else 32767.0, device=device)
    x[1] = -x[1] - int(activations == "int16")
    x[2, 1:] = 1.0
    got = dense.linear(x, dense.pack_weight(q, activations=activations))
    assert torch.equal(got, (x.double() @ dequantize_weight(q).double().T).float())


# Error bounds


def error_and_bounds(x: Tensor, weight: Tensor, out: Tensor) -> list[Tensor]:
    """Return the error of `out` and its bounds from rounding of the sums and of the inputs."""
    weight = weight.double()
    exact = x.double() @ weight.T
    groups = x.shape[1] // 128
    sums = (groups + 3) * 2.0**-24 * (x.double().abs() @ weight.abs().T)
    peaks = x.double().abs().view(len(x), groups, 128).amax(2)
    sizes = weight.abs().view(len(weight), groups, 128).sum(2)
    return [(out.double() - exact).abs(), sums, 2.0**-15 * peaks @ sizes.T]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_errors_stay_within_the_documented_bounds(device: str, dtype: torch.dtype) -> None:
    x, q, _ = make(BY_OUTPUT, device, 30, 640, 50, dtype)
    packed, weight = dense.pack_weight(q), q.values.double() * q.scales.double()
    out = dense.linear(x, packed, out_dtype=torch.float32)
    error, sums, inputs = error_and_bounds(x, weight, out)
    assert (error <= sums + inputs).all()
    assert (error > sums).any()  # inputs far below the largest are rounded
    # Inputs near the largest are exact in bfloat16. Only float32 inputs are rounded.
    x = (x.sign() * (1 + 100 * x.abs() / (1 + x.abs()))).to(dtype)
    out = dense.linear(x, packed, out_dtype=torch.float32)
    error, sums, inputs = error_and_bounds(x, weight, out)
    assert (error <= (sums if dtype == torch.bfloat16 else sums + inputs)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", FP8, ids=str)
def test_fp8_linear_rounds_only_its_sums(
    device: str, isa: str, row_dtype: torch.dtype, dtype: torch.dtype, case: Case
) -> None:
    """Allow the rounding of sums over 128 inputs and over blocks. Test every fp8 value."""
    for rows, num_inputs, num_outputs in [(1, 1, 1), (3, 77, 130), (9, 300, 40), (20, 600, 70)]:
        x, q, bias = make(case, device, rows, num_inputs, num_outputs, dtype)
        given = bias if rows == 9 else None
        got = dense.linear(x, dense.pack_weight(q), given, out_dtype=torch.float32).double()
        wide = None if given is None else given.double()
        want = reference.quantized_linear(x.double(), q, wide, torch.float64)
        sizes = x.double().abs() @ dequantize_weight(q, torch.float64).abs().T
        assert ((got - want).abs() <= (sizes + 4) * 2.0**-24 * 140).all()
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    every = every[every.float().isfinite()].view(-1, 1).to(device)
    q = QuantizedWeight("fp8", every, torch.full((len(every), 1), 0.5, device=device))
    one = torch.ones(1, 1, dtype=dtype, device=device)
    got = dense.linear(one, dense.pack_weight(q), out_dtype=torch.float32)
    assert torch.equal(got[0], every[:, 0].float() * 0.5)


def test_quantization_error_is_rounding_error(device: str) -> None:
    """Each quantized value is off by at most half a step."""
    weight = (torch.randn(60, 512) / 20).bfloat16().to(device)
    x = torch.randn(9, 512, device=device).bfloat16()
    q = quantize_weight(weight)
    error = dense.linear(x, dense.pack_weight(q), out_dtype=torch.float32)
    error -= x.float() @ weight.float().T
    one = q.scales[:, 0] * 0.3 * 512**0.5  # the standard deviation of the rounding errors
    assert (error.abs() < 6 * one).all() and error.std() > 0.3 * one.mean()


def test_documented_example_runs() -> None:
    text = (Path(__file__).resolve().parent.parent / "docs" / "weights.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(code, "docs/weights.md", "exec"), {})


# Errors


@pytest.mark.parametrize(
    "field,value,words",
    [
        ("kind", "int5", "weight.kind must be one of 'int8', 'int4', 'fp8', got 'int5'"),
        (
            "values",
            torch.zeros(6),
            r"weight.values must be \[num_outputs, num_inputs\], got float32",
        ),
        ("values", torch.zeros(6, 8), r"weight.values must be uint8 \[6, 8\] on cpu, got float32"),
        (
            "values",
            torch.full((6, 8), 16, dtype=torch.uint8),
            "weight.values must be 0 to 15, got 16",
        ),
        (
            "scales",
            torch.zeros(5, 1),
            r"weight.scales must be float32 \[6, 1\] .*, got float32 \[5",
        ),
        ("scales", None, "weight.scales must be .*, got None"),
        ("offsets", torch.zeros(6, 2), r"weight.offsets must be float32 \[6, 1\] "),
        ("group", 8, "weight.group must be 0, 16 or a multiple of 32, got 8"),
        ("group", True, "weight.group must be .*, got True"),
        ("code_values", torch.zeros(16), r"weight.code_values must be int8 \[16\] .* got float32"),
        ("input_order", torch.arange(8), r"weight.input_order must be int32 \[8\] .* got int64"),
        (
            "input_order",
            torch.tensor([0, 1, 2, 3, 4, 5, 6, 6], dtype=torch.int32),
            "weight.input_order must be a permutation of 0 to 7",
        ),
    ],
)
def test_inconsistent_fields_are_refused(field: str, value: object, words: str) -> None:
    q = make_weight(Case("int4", 32, offsets=True), "cpu", 6, 8)._replace(**{field: value})
    for name, call in (
        ("pack_weight", dense.pack_weight),
        ("dequantize_weight", dequantize_weight),
    ):
        with pytest.raises(ValueError, match=f"^{name}: {words}"):
            call(q)


def test_fields_that_a_kind_does_not_support_are_refused() -> None:
    fp8, int8 = make_weight(FP8[1], "cpu", 6, 8), make_weight(BY_OUTPUT, "cpu", 6, 8)
    nan = torch.full((6, 8), torch.nan).to(torch.float8_e4m3fn)
    for q, words in (
        (fp8._replace(group=32), "weight.group must be 0 or 128 for kind fp8, got 32"),
        (
            fp8._replace(offsets=torch.zeros(6, 1)),
            "weight.offsets must be None for kind fp8, got Tensor",
        ),
        (fp8._replace(values=nan), "weight.values must not be NaN, got NaN"),
        (
            int8._replace(code_values=torch.zeros(16, dtype=torch.int8)),
            "weight.code_values must be None for kind int8, got Tensor",
        ),
    ):
        with pytest.raises(ValueError, match=f"^pack_weight: {words}"):
            dense.pack_weight(q)
    with pytest.raises(ValueError, match=r"^pack_weight: weight must be a QuantizedWeight, got"):
        quantization.check_quantized("pack_weight", ())  # type: ignore[arg-type]
    for q, given, words in (
        (fp8, "int8", "'float' for kind fp8, got 'int8'"),
        (int8, "float", "'int16' or 'int8' for kind int8, got 'float'"),
        (torch.zeros(5, 4), "int8", "'float' for a plain weight, got 'int8'"),
    ):
        with pytest.raises(ValueError, match=f"^pack_weight: activations must be {words}"):
            dense.pack_weight(q, activations=given)


def test_invalid_arguments_are_refused(device: str, on_cuda: bool) -> None:
    x, q, bias = make(BY_OUTPUT, device, 3, 8, 6, torch.bfloat16)
    packed = dense.pack_weight(q)
    assert packed.scales is not None
    scales = packed.scales
    cases: list[tuple[Callable[[], object], str]] = [
        (
            lambda: dense.pack_weight(q.values),
            r"pack_weight: weight must be real, or a QuantizedWeight, got int8 \[6, 8\]",
        ),
        (
            lambda: quantize_weight(x, kind="fp8"),
            "quantize_weight: kind must be 'int8' or 'int4', got 'fp8'",
        ),
        (lambda: quantize_weight(q.values), "quantize_weight: weight must be float32, .* int8"),
        (lambda: quantize_weight(x[0]), "quantize_weight: weight must be .num_outputs"),
        (lambda: quantize_weight(x, group=24), "quantize_weight: group must be 0, 16 or"),
        (lambda: dense.linear(x.int(), packed), "linear: x must be bfloat16.*got int32"),
        (lambda: dense.linear(x[:, :7], packed), "linear: x must be .*num_inputs=8"),
        (lambda: dense.linear(x, packed, bias.float()), "linear: bias must be bfloat16"),
        (lambda: dense.linear(x, packed, out_dtype=torch.float16), "linear: out_dtype must be"),
        (
            lambda: dense.linear(x, packed._replace(scales=scales[::2]), bias),
            "linear: weight.scales must be float32 .num_outputs=6",
        ),
    ]
    if not on_cuda:
        cases.append((lambda: dense.linear(x.half(), packed), "linear: x must be .* got float16"))
    for call, words in cases:
        with pytest.raises(ValueError, match=words):
            call()


def test_weights_packed_for_another_device_are_refused(device: str, on_cuda: bool) -> None:
    """Layouts differ between devices. Each weight has 6 outputs and 8 inputs in groups of 32."""
    blocks = {"int8": 1024, "int4": 512} if on_cuda else {"int8": 4096, "int4": 2048}
    x = torch.zeros(3, 8, device=device)
    for case in (INTEGERS[4], INTEGERS[6]):
        own = dense.pack_weight(
            make_weight(case, device, 6, 8), activations=case.activations
        )._replace(input_order=None)
        other = own.data.new_zeros(1, 1, blocks[case.kind])
        with pytest.raises(ValueError, match=r"^linear: weight.data must be .*, got"):
            dense.linear(x, own._replace(data=other))


@pytest.mark.parametrize("input", [-1, 8])
def test_out_of_range_input_order_is_refused(device: str, on_cuda: bool, input: int) -> None:
    case = INTEGERS[6]
    packed = dense.pack_weight(make_weight(case, device, 6, 8), activations=case.activations)
    order = torch.tensor([0, 1, 2, input, 4, 5, 6, 7], dtype=torch.int32, device=device)
    words = r"linear: weight.input_order must be .*input"
    if not on_cuda:
        words = r"linear: weight.input_order must be inputs in 0 .. 7, got"
    with expect_fault(on_cuda, words):
        dense.linear(torch.zeros(3, 8, device=device), packed._replace(input_order=order))
