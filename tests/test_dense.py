# SPDX-License-Identifier: Apache-2.0
"""The dense family against its reference, and row identity."""

import pytest
import specops
import torch
from conftest import assert_close
from specops import dense, reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows,width", [(0, 64), (1, 64), (5, 77), (1500, 128)])
def test_silu_mul(device: str, isa: str, dtype: torch.dtype, rows: int, width: int) -> None:
    gate_up = (4 * torch.randn(rows, 2 * width)).to(dtype).to(device)
    out = dense.silu_mul(gate_up)
    assert out.shape == (rows, width)
    if rows:
        assert_close(reference.silu_mul, out, gate_up)


def test_silu_mul_strided_rows(device: str, isa: str) -> None:
    wide = torch.randn(6, 300, device=device)
    view = wide[:, 10:266]
    assert torch.equal(dense.silu_mul(view), dense.silu_mul(view.contiguous()))


# linear

LINEAR_DTYPES = [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, torch.float32)]


def make_linear(
    rows: int, num_inputs: int, num_outputs: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(rows, num_inputs).to(dtype)
    weight = (torch.randn(num_outputs, num_inputs) / max(num_inputs, 1) ** 0.5).to(dtype)
    return x, weight, torch.randn(num_outputs).to(dtype)


@pytest.mark.parametrize("dtype,out_dtype", LINEAR_DTYPES)
@pytest.mark.parametrize("use_bias", [False, True])
@pytest.mark.parametrize(
    "rows,num_inputs,num_outputs",
    [(0, 8, 8), (1, 0, 5), (1, 1, 1), (3, 7, 17), (5, 256, 384), (13, 129, 250), (1500, 64, 48)],
)
def test_linear(
    device: str,
    isa: str,
    dtype: torch.dtype,
    out_dtype: torch.dtype | None,
    use_bias: bool,
    rows: int,
    num_inputs: int,
    num_outputs: int,
) -> None:
    x, weight, bias = make_linear(rows, num_inputs, num_outputs, dtype)
    packed = dense.pack_weight(weight.to(device))
    out = dense.linear(x.to(device), packed, bias if use_bias else None, out_dtype=out_dtype)
    assert out.shape == (rows, num_outputs)
    assert out.dtype == (out_dtype or dtype)
    if rows:

        def op(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            wide = None if x.dtype == torch.float64 else out_dtype
            return reference.linear(x, weight, bias if use_bias else None, wide)

        assert_close(op, out, x, weight, bias)


def test_linear_wide_output(device: str) -> None:
    x, weight, _ = make_linear(2, 64, 151936, torch.bfloat16)
    out = dense.linear(x, dense.pack_weight(weight), out_dtype=torch.float32)
    torch.testing.assert_close(out, reference.linear(x, weight, None, torch.float32))


@pytest.mark.parametrize("dtype,out_dtype", LINEAR_DTYPES)
@pytest.mark.parametrize("num_inputs,num_outputs", [(256, 1024), (77, 100), (1030, 40)])
def test_linear_rows_keep_their_bits(
    device: str,
    isa: str,
    dtype: torch.dtype,
    out_dtype: torch.dtype | None,
    num_inputs: int,
    num_outputs: int,
) -> None:
    """A row alone, in every batch size, from strided rows, on 1 to 3 threads: the same bits."""
    x, weight, bias = make_linear(512, num_inputs, num_outputs, dtype)
    packed = dense.pack_weight(weight)
    alone = torch.cat([dense.linear(row[None], packed, bias, out_dtype=out_dtype) for row in x])
    wide = torch.full((512, num_inputs + 3), float("nan"), dtype=dtype)
    wide[:, 1:-2] = x
    for num_threads in (1, 2, 3):
        specops.set_num_threads(num_threads)
        for rows in [*range(1, 71), 512] if num_threads == 2 else [1, 5, 8, 64, 512]:
            first = (7 * rows) % (513 - rows)
            got = dense.linear(x[first : first + rows], packed, bias, out_dtype=out_dtype)
            assert torch.equal(got, alone[first : first + rows]), (num_threads, rows)
        got = dense.linear(wide[:, 1:-2], packed, bias, out_dtype=out_dtype)
        assert torch.equal(got, alone)


@pytest.mark.parametrize("dtype,out_dtype", LINEAR_DTYPES)
def test_linear_columns_keep_their_bits(
    device: str, isa: str, dtype: torch.dtype, out_dtype: torch.dtype | None
) -> None:
    """An output element depends on its own weight row only, wherever the block cuts fall."""
    x, weight, _ = make_linear(11, 96, 400, dtype)
    whole = dense.linear(x, dense.pack_weight(weight), out_dtype=out_dtype)
    for first, count in [(0, 1), (5, 33), (16, 160), (399, 1), (1, 399)]:
        part = dense.pack_weight(weight[first : first + count])
        got = dense.linear(x, part, out_dtype=out_dtype)
        assert torch.equal(got, whole[:, first : first + count])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_touches_only_its_own(device: str, isa: str, dtype: torch.dtype) -> None:
    """Neither what lies past a row of x nor what lies past out is read or written."""
    x, weight, bias = make_linear(9, 33, 21, dtype)
    wide = torch.full((9, 40), float("nan"), dtype=dtype)
    wide[:, :33] = x
    wide_weight = torch.full((21, 50), float("inf"), dtype=dtype)
    wide_weight[:, 4:37] = weight
    slack = torch.full((9 * 21 + 64,), 7.0, dtype=dtype)
    out = slack[: 9 * 21].view(9, 21)
    packed = dense.pack_weight(wide_weight[:, 4:37])
    assert dense.linear(wide[:, :33], packed, bias, out=out) is out
    assert torch.equal(out, dense.linear(x, dense.pack_weight(weight), bias))
    assert (slack[9 * 21 :] == 7.0).all()


def test_linear_refuses(device: str) -> None:
    x, weight, bias = make_linear(2, 8, 4, torch.bfloat16)
    packed = dense.pack_weight(weight)
    for call, words in [
        (lambda: dense.pack_weight(weight.half()), "pack_weight: weight must be bfloat16|float32"),
        (lambda: dense.pack_weight(weight[0]), "pack_weight: weight must be"),
        (lambda: dense.pack_weight(weight.T), "pack_weight: weight must be contiguous within"),
        (lambda: dense.linear(x.float(), packed), "linear: x must be bfloat16"),
        (lambda: dense.linear(x[:, :7], packed), "linear: x must be .*num_inputs=8"),
        (lambda: dense.linear(x, packed, bias[:3]), "linear: bias must be .*num_outputs=4"),
        (lambda: dense.linear(x, packed, bias.float()), "linear: bias must be bfloat16"),
        (lambda: dense.linear(x, packed, out_dtype=torch.float16), "linear: out must be"),
        (lambda: dense.linear(x, packed, out=x), "linear: out must be"),
        (
            lambda: dense.linear(x, packed, out=torch.empty(2, 4), out_dtype=torch.bfloat16),
            "linear: out_dtype must be",
        ),
    ]:
        with pytest.raises(ValueError, match=words.replace("|", r"\|")):
            call()


# rms_norm


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("use_residual", [False, True])
@pytest.mark.parametrize("rows,width", [(0, 64), (1, 1), (3, 77), (6, 1024), (1500, 48)])
def test_rms_norm(
    device: str, isa: str, dtype: torch.dtype, use_residual: bool, rows: int, width: int
) -> None:
    x = torch.randn(rows, width).to(dtype).to(device)
    weight = torch.randn(width).to(dtype).to(device)
    residual = (3 * torch.randn(rows, width)).to(dtype).to(device)
    expected_residual = residual + x
    updated = residual.clone() if use_residual else None
    out = dense.rms_norm(x, weight, 1e-6, residual=updated)
    if updated is not None:
        assert torch.equal(updated, expected_residual)
    if rows:
        hidden = expected_residual if use_residual else x
        assert_close(lambda h, w: reference.rms_norm(h, w, 1e-6)[0], out, hidden, weight)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_rounds_as_its_reference(device: str, isa: str, dtype: torch.dtype) -> None:
    """Rounded twice, at the same places: all but a few elements are equal to the bit."""
    x, residual = torch.randn(2, 40, 512).to(dtype)
    weight = torch.randn(512).to(dtype)
    expected, _ = reference.rms_norm(x, weight, 1e-5, residual)
    out = dense.rms_norm(x, weight, 1e-5, residual=residual)
    allowed = 0.9 if dtype == torch.float32 else 0.01
    assert (out != expected).float().mean() <= allowed
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [48, 77, 1024])
def test_rms_norm_rows_keep_their_bits(
    device: str, isa: str, dtype: torch.dtype, width: int
) -> None:
    wide = torch.full((300, width + 5), float("nan"), dtype=dtype)
    x = wide[:, 2:-3]
    x.copy_(torch.randn(300, width))
    weight = torch.randn(width).to(dtype)
    residual = torch.randn(300, width).to(dtype)
    alone, alone_residual = torch.empty_like(residual), residual.clone()
    for row in range(300):
        part = slice(row, row + 1)
        alone[part] = dense.rms_norm(x[part], weight, 1e-6, residual=alone_residual[part])
    for num_threads in (1, 2, 3):
        specops.set_num_threads(num_threads)
        updated = residual.clone()
        assert torch.equal(dense.rms_norm(x, weight, 1e-6, residual=updated), alone)
        assert torch.equal(updated, alone_residual)
    in_place = x.contiguous()
    expected = dense.rms_norm(x, weight, 1e-6)
    assert torch.equal(dense.rms_norm(in_place, weight, 1e-6, out=in_place), expected)


def test_rms_norm_refuses(device: str) -> None:
    x, weight = torch.randn(2, 8), torch.ones(8)
    for call, words in [
        (lambda: dense.rms_norm(x, weight[:7], 1e-6), "rms_norm: weight must be"),
        (lambda: dense.rms_norm(x, weight.half(), 1e-6), "rms_norm: weight must be float32"),
        (lambda: dense.rms_norm(x, weight, -1.0), "rms_norm: eps must be at least 0"),
        (lambda: dense.rms_norm(x, weight, 1e-6, residual=x[:1]), "rms_norm: residual must be"),
        (lambda: dense.rms_norm(x, weight, 1e-6, residual=x, out=x), "rms_norm: out must be"),
    ]:
        with pytest.raises(ValueError, match=words):
            call()


# embedding


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows,width", [(0, 8), (1, 3), (1500, 65)])
def test_embedding(device: str, isa: str, dtype: torch.dtype, rows: int, width: int) -> None:
    weight = torch.randn(50, width).to(dtype).to(device)
    token_ids = torch.randint(50, (rows,), dtype=torch.int32, device=device)
    out = dense.embedding(token_ids, weight)
    assert torch.equal(out, reference.embedding(token_ids, weight))


@pytest.mark.parametrize("bad", [-1, 50])
def test_embedding_refuses_unknown_ids(device: str, bad: int) -> None:
    weight = torch.randn(50, 4)
    out = torch.full((3, 4), 7.0)
    with pytest.raises(ValueError, match=rf"token_ids\[2\] must be in \[0, vocab=50\), got {bad}"):
        dense.embedding(torch.tensor([0, 1, bad], dtype=torch.int32), weight, out=out)
    assert (out == 7.0).all()
    with pytest.raises(ValueError, match="embedding: token_ids must be int32"):
        dense.embedding(torch.tensor([0, 1]), weight)
