# SPDX-License-Identifier: Apache-2.0
"""Weights in 8-bit codes: the codes, and `linear` of them, which has its reference's bits."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import specops
import torch
from conftest import every_isa
from specops import dense, reference
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ACTIVATIONS = ("silu", "gelu_tanh")


@pytest.fixture
def row_dtype(request: pytest.FixtureRequest, on_cuda: bool) -> torch.dtype:
    """The dtype of a case's rows; the kernels of the cpu have no float16."""
    dtype: torch.dtype = request.node.callspec.params["dtype"]
    if dtype == torch.float16 and not on_cuda:
        pytest.skip("float16 rows are for CUDA")
    return dtype


def make(
    device: str, rows: int, num_inputs: int, num_outputs: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows, codes of the full range, scales and a bias."""
    x = torch.randn(rows, num_inputs) * torch.randn(rows, num_inputs).exp()
    codes = torch.randint(-127, 128, (num_outputs, num_inputs), dtype=torch.int8)
    scales, bias = torch.rand(num_outputs) / 100, torch.randn(num_outputs)
    return x.to(dtype).to(device), codes.to(device), scales.to(device), bias.to(dtype).to(device)


# codes and scales


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_outputs,num_inputs", [(0, 5), (3, 0), (1, 1), (40, 77), (16, 256)])
def test_codes(dtype: torch.dtype, num_outputs: int, num_inputs: int) -> None:
    """Strided rows, too, and in parts."""
    wide = torch.full((num_outputs, num_inputs + 3), torch.nan, dtype=dtype)
    weight = wide[:, 1:-2]
    weight.copy_(torch.randn(num_outputs, num_inputs))
    packed = dense.quantize_weight(weight, activation=None)
    assert packed.kind == "int8" and packed.scales is not None
    if num_inputs == 0:
        assert not packed.scales.any()
        return
    codes, scales = reference.quantize_weight(weight)
    assert torch.equal(packed.scales, scales)
    assert torch.equal(packed.data, dense.pack_weight(codes, scales=scales).data)
    assert num_outputs == 0 or codes.abs().amax() == 127


def test_a_large_weight_is_rounded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(50, 60)
    whole = dense.quantize_weight(weight)
    monkeypatch.setattr(dense, "_QUANTIZED_AT_ONCE", 7 * 60)
    parts = dense.quantize_weight(weight)
    assert torch.equal(parts.data, whole.data)
    assert parts.scales is not None and whole.scales is not None
    assert torch.equal(parts.scales, whole.scales)


def dequantized(packed: dense.PackedWeight) -> Tensor:
    """What `linear` makes of the unit rows: an output's code times its scale."""
    return dense.linear(torch.eye(packed.num_inputs), packed).T


def test_codes_by_hand() -> None:
    """Ties go away from zero; scales are rounded, and codes made of the scale before that."""
    weight = torch.tensor([[127.0, 0.5, -0.5, 2.5, -126.5, 126.49, 0.4999, -1.0]])
    packed = dense.quantize_weight(weight)
    codes = torch.tensor([[127.0, 1, -1, 3, -127, 126, 0, -1]])
    assert packed.scales is not None and packed.scales.tolist() == [1.0]
    assert torch.equal(dequantized(packed), codes)
    peak = torch.tensor([[1.0078125, 0.50390625]]).bfloat16()  # its 127th is no bfloat16
    packed = dense.quantize_weight(peak)
    scale = (peak[0, 0].float() / 127).bfloat16().float()
    assert packed.scales is not None and packed.scales.item() == scale != peak[0, 0].float() / 127
    assert torch.equal(dequantized(packed), torch.tensor([[127.0, 64.0]]) * scale)


def test_outputs_without_a_scale() -> None:
    """All zeros are zeros; what has no largest number makes NaN of its output alone."""
    weight = torch.randn(5, 20)
    weight[1], weight[2, 3], weight[3, 7] = 0, torch.inf, torch.nan
    packed = dense.quantize_weight(weight)
    got = dense.linear(torch.randn(4, 20), packed)
    assert packed.scales is not None and packed.scales[1] == 0
    assert (got[:, 1] == 0).all() and got[:, 2:4].isnan().all() and got[:, ::4].isfinite().all()


# linear: the reference's bits on every device and instruction set


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rows,num_inputs,num_outputs",
    [
        (0, 8, 8),
        (2, 0, 5),
        (1, 1, 1),
        (3, 7, 17),
        (5, 127, 33),
        (8, 128, 64),
        (9, 129, 20),
        (20, 1030, 50),
        (70, 260, 130),
    ],
)
def test_bits_are_the_references(
    device: str,
    isa: str,
    row_dtype: torch.dtype,
    dtype: torch.dtype,
    rows: int,
    num_inputs: int,
    num_outputs: int,
) -> None:
    """From strided rows between NaN, into memory of which nothing else is written."""
    x, codes, scales, bias = make(device, rows, num_inputs, num_outputs, dtype)
    packed = dense.pack_weight(codes, scales=scales)
    wide = torch.full((rows, num_inputs + 3), torch.nan, dtype=dtype, device=device)
    wide[:, 1:-2] = x
    for given in (None, bias):
        for out_dtype in {dtype, torch.float32}:
            want = reference.int8_linear(x, codes, scales, given, out_dtype)
            assert torch.equal(dense.linear(x, packed, given, out_dtype=out_dtype), want)
            slack = torch.full((rows * num_outputs + 64,), 7.0, dtype=out_dtype, device=device)
            out = slack[: rows * num_outputs].view(rows, num_outputs)
            dense.linear(wide[:, 1:-2], packed, given, out=out)
            assert torch.equal(out, want) and (slack[rows * num_outputs :] == 7.0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_keep_their_bits(device: str, isa: str, on_cuda: bool, dtype: torch.dtype) -> None:
    """Alone and in every batch, on 1 to 3 threads, for two layers whose work is cut differently."""
    for num_outputs, num_inputs in [(40, 300)] if on_cuda else [(1500, 130), (40, 1030)]:
        many = 20 if on_cuda else 70
        x, codes, scales, bias = make(device, many, num_inputs, num_outputs, dtype)
        packed = dense.pack_weight(codes, scales=scales)
        whole = reference.int8_linear(x, codes, scales, bias)
        for num_threads in (1, 2, 3):
            specops.set_num_threads(num_threads)
            for rows in [1, 5, 8, 9] if on_cuda else [*range(1, 20), 33, 64]:
                first = (7 * rows) % (many + 1 - rows)
                got = dense.linear(x[first : first + rows], packed, bias)
                assert torch.equal(got, whole[first : first + rows]), (num_threads, rows)


def test_large_layers_have_the_same_bits_on_every_instruction_set() -> None:
    x, codes, scales, bias = make("cpu", 24, 2000, 1100, torch.bfloat16)
    packed = dense.pack_weight(codes, scales=scales)
    outs = [dense.linear(x, packed, bias) for _ in every_isa()]
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("rows,num_inputs,width", [(1, 5, 1), (5, 300, 40), (21, 140, 17)])
def test_gates(
    device: str,
    isa: str,
    dtype: torch.dtype,
    activation: str,
    rows: int,
    num_inputs: int,
    width: int,
) -> None:
    """The bits of the activation's op after `linear`."""
    x, codes, scales, bias = make(device, rows, num_inputs, 2 * width, dtype)
    gated = dense.silu_mul if activation == "silu" else dense.gelu_tanh_mul
    packed = dense.pack_weight(codes, scales=scales, activation=activation)
    for given in (None, bias):
        want = gated(reference.int8_linear(x, codes, scales, given))
        assert torch.equal(dense.linear(x, packed, given), want)


def test_wild_inputs(device: str, isa: str) -> None:
    """An infinity or NaN is its row's own; zeros, subnormals, the largest numbers, and ties."""
    x, codes, scales, _ = make(device, 12, 300, 40, torch.float32)
    packed = dense.pack_weight(codes, scales=scales)
    x[0], x[1, :128], x[2, 130:] = 0, 0, 0
    x[3] *= 1e-42  # subnormal, all of it
    x[4, ::3] *= 1e-42
    x[5] *= 2.0**-110
    x[6] = torch.randn(300).sign().to(device) * 1e33
    below = torch.nextafter(torch.tensor(2.0), torch.tensor(0.0))  # rounds to 2^15, which is kept
    x[7] = below * (1 - 2 * (torch.arange(300) % 2))
    x[8] = torch.arange(300).to(device) * 0.5 + 2.0**14  # ties
    want = reference.int8_linear(x, codes, scales)
    assert torch.equal(dense.linear(x, packed), want)
    assert not want[0].any() and not want[3].any() and want[1:3].all()
    x[9, 299], x[10, 5], x[11, 128] = torch.inf, torch.nan, -torch.inf
    spoilt = dense.linear(x, packed)
    assert torch.equal(spoilt[:9], want[:9])
    assert spoilt[9:].isnan().all()


def test_the_largest_sums_are_exact(device: str, isa: str) -> None:
    """Every product of a group at its largest: 128 * 32767 * 127 is no float32."""
    codes = torch.full((20, 128), 127, dtype=torch.int8, device=device)
    codes[1::2] = -127
    codes[3] = 126
    x = torch.full((3, 128), 32767.0, device=device)
    x[1] = -32768.0
    x[2, 1:] = 1.0
    got = dense.linear(x, dense.pack_weight(codes, scales=torch.ones(20, device=device)))
    assert torch.equal(got, (x.double() @ codes.double().T).float())


# how far from the weight's own numbers


def error_and_bounds(x: Tensor, codes: Tensor, scales: Tensor, out: Tensor) -> list[Tensor]:
    """The error of out, and its bounds by the sums' rounding and by the inputs'."""
    weight = codes.double() * scales.double()[:, None]
    exact = x.double() @ weight.T
    groups = x.shape[1] // 128
    sums = (groups + 3) * 2.0**-24 * (x.double().abs() @ weight.abs().T)
    peaks = x.double().abs().view(len(x), groups, 128).amax(2)
    sizes = weight.abs().view(len(weight), groups, 128).sum(2)
    return [(out.double() - exact).abs(), sums, 2.0**-15 * peaks @ sizes.T]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_errors_are_within_what_is_documented(device: str, dtype: torch.dtype) -> None:
    x, codes, scales, _ = make(device, 30, 640, 50, dtype)
    out = dense.linear(x, dense.pack_weight(codes, scales=scales), out_dtype=torch.float32)
    error, sums, inputs = error_and_bounds(x, codes, scales, out)
    assert (error <= sums + inputs).all()
    assert (error > sums).any()  # inputs far below the largest are rounded
    # Near the largest only float32 is.
    x = (x.sign() * (1 + 100 * x.abs() / (1 + x.abs()))).to(dtype)
    out = dense.linear(x, dense.pack_weight(codes, scales=scales), out_dtype=torch.float32)
    error, sums, inputs = error_and_bounds(x, codes, scales, out)
    assert (error <= (sums if dtype == torch.bfloat16 else sums + inputs)).all()


def test_quantized_weights_are_near_their_own(device: str) -> None:
    """Half a code each: the error of rounding, not of a wrong code."""
    weight = (torch.randn(60, 512) / 20).bfloat16().to(device)
    x = torch.randn(9, 512, device=device).bfloat16()
    packed = dense.quantize_weight(weight)
    assert packed.scales is not None
    error = dense.linear(x, packed, out_dtype=torch.float32) - x.float() @ weight.float().T
    one = packed.scales * 0.3 * 512**0.5  # the standard deviation of the codes' rounding
    assert (error.abs() < 6 * one).all() and error.std() > 0.3 * one.mean()


def test_the_example_of_the_documents() -> None:
    text = (Path(__file__).resolve().parent.parent / "docs" / "weights.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(code, "docs/weights.md", "exec"), {})


def test_quantized_weights_refuse(device: str, on_cuda: bool) -> None:
    x, codes, scales, bias = make(device, 3, 8, 6, torch.bfloat16)
    packed = dense.pack_weight(codes, scales=scales)
    cases: list[tuple[Callable[[], object], str]] = [
        (
            lambda: dense.pack_weight(codes),
            r"pack_weight: scales must be float32 .num_outputs=6\], got None",
        ),
        (
            lambda: dense.pack_weight(codes, scales=scales[:5]),
            r"pack_weight: scales must be float32 .num_outputs=6\], got float32 \[5\]",
        ),
        (
            lambda: dense.pack_weight(codes, scales=scales.double()),
            "pack_weight: scales must be .* got float64",
        ),
        (
            lambda: dense.pack_weight(x, scales=scales[:3]),
            "pack_weight: scales must be None of a plain weight, got Tensor float32",
        ),
        (
            lambda: dense.quantize_weight(x, kind="int4"),
            "quantize_weight: kind must be 'int8', got 'int4'",
        ),
        (lambda: dense.quantize_weight(codes), "quantize_weight: weight must be float32, .* int8"),
        (lambda: dense.quantize_weight(x[0]), "quantize_weight: weight must be .num_outputs"),
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
