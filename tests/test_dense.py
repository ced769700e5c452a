# SPDX-License-Identifier: Apache-2.0
"""Ops of the dense family match the reference, and their rows are batch-invariant."""

from collections.abc import Callable, Iterator

import pytest
import specops
import torch
from shared_fixtures import assert_close, expect_fault
from specops import dense, reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
GATED = {
    "silu": dense.silu_mul,
    "gelu_tanh": dense.gelu_tanh_mul,
    "swiglu_oai": dense.swiglu_oai_mul,
}
COUNTERS = 128  # first elements of linear's workspace


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows,width", [(0, 64), (1, 64), (5, 77), (1500, 128)])
@pytest.mark.no_bf16
@pytest.mark.parametrize("activation", GATED)
@pytest.mark.pairwise
def test_gated_mul_matches_the_reference(
    device: str, isa: str, dtype: torch.dtype, rows: int, width: int, activation: str
) -> None:
    gate_up = (4 * torch.randn(rows, 2 * width)).to(dtype).to(device)
    out = GATED[activation](gate_up)
    assert out.shape == (rows, width)
    if rows:
        assert_close(reference.dense.GATED[activation], out, gate_up)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.no_bf16
def test_gated_mul_supports_extreme_gates(device: str, isa: str, activation: str) -> None:
    """The square or exponential of a gate may overflow, and a gate may be NaN."""
    gate = torch.tensor([1e30, -1e30, 3e19, -3e19, 90.0, -90.0, 1e-30, -1e-30, 0.0, torch.nan])
    out = GATED[activation](torch.cat([gate, torch.ones(10)])[None].to(device)).cpu()[0]
    assert torch.equal(out[[0, 2, 4]], gate[[0, 2, 4]])
    assert (out[[1, 3, 5]] == 0).all() and out[8] == 0 and out[9].isnan()
    torch.testing.assert_close(out[6:8], gate[6:8] / 2, rtol=1e-6, atol=0)


@pytest.mark.no_bf16
def test_swiglu_oai_clamps_gate_and_up(device: str, isa: str) -> None:
    """A gate has no lower bound, and NaN stays NaN."""
    extremes = [7.0, 8.0, 1e30, torch.inf, -torch.inf, torch.nan]
    gate, up = torch.tensor(extremes + [1.0] * 6), torch.tensor([1.0] * 6 + extremes)
    out = dense.swiglu_oai_mul(torch.cat([gate, up])[None].to(device)).cpu()[0]
    most = 7 * torch.sigmoid(torch.tensor(1.702 * 7)) * 2
    assert torch.equal(out[:4], out[:1].expand(4)) and abs(out[0] - most) < 1e-5
    assert torch.equal(out[6:10], out[6:7].expand(4)) and out[10] == out[6] * -6 / 8
    assert out[5].isnan() and out[11].isnan()


@pytest.mark.no_bf16
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows,heads,dim", [(0, 2, 64), (1, 1, 16), (5, 3, 77), (1500, 1, 128)])
@pytest.mark.parametrize("activation,has_norm", [("sigmoid", False), ("silu", True)])
@pytest.mark.pairwise
def test_output_gate_matches_the_reference(
    device: str,
    isa: str,
    dtype: torch.dtype,
    rows: int,
    heads: int,
    dim: int,
    activation: str,
    has_norm: bool,
) -> None:
    x, gate = (3 * torch.randn(2, rows, heads, dim)).to(dtype).to(device)
    for gates in (gate, gate[..., :1].contiguous()):
        norm = torch.randn(dim).to(dtype).to(device) if has_norm else None
        out = dense.output_gate(x, gates, activation, norm_weight=norm)
        assert out.shape == x.shape

        def op(x: torch.Tensor, gates: torch.Tensor, *norm: torch.Tensor) -> torch.Tensor:
            weight = norm[0] if norm else None
            return reference.output_gate(x, gates, activation, norm_weight=weight)

        if rows:
            assert_close(op, out, x, gates, *([] if norm is None else [norm]))


@pytest.mark.no_bf16
@pytest.mark.parametrize("dtype", DTYPES)
def test_output_gate_rows_keep_their_bits(device: str, isa: str, dtype: torch.dtype) -> None:
    """Calls agree: rows alone, strided rows between poison, in place, norm and gate apart."""
    wide = torch.full((2, 9, 100), torch.nan, dtype=dtype)
    wide[:, :, 2:98] = torch.randn(2, 9, 96).to(dtype)
    x, gate = wide.to(device)[:, :, 2:98].unflatten(2, (3, 32))
    norm = torch.randn(32).to(dtype).to(device)
    for weight in (None, norm):
        want = dense.output_gate(x, gate, "silu", norm_weight=weight)
        alone = [
            dense.output_gate(x[i : i + 1], gate[i : i + 1], "silu", norm_weight=weight)
            for i in range(9)
        ]
        assert torch.equal(torch.cat(alone), want)
        own = x.contiguous()
        assert dense.output_gate(own, gate, "silu", norm_weight=weight, out=own) is own
        assert torch.equal(own, want)
    heads = dense.rms_norm(x.contiguous().view(27, 32), norm, 1e-6).view(9, 3, 32)
    assert torch.equal(dense.output_gate(heads, gate, "silu"), want)


@pytest.mark.parametrize("activation", GATED)
@pytest.mark.no_bf16
def test_gated_mul_supports_strided_rows(device: str, isa: str, activation: str) -> None:
    op = GATED[activation]
    wide = torch.randn(6, 300, device=device)
    for view in (wide[:, 10:266], wide[:, 4:260], wide[:, 7:171]):
        assert torch.equal(op(view), op(view.contiguous()))


@pytest.mark.parametrize("activation", GATED)
def test_gated_mul_supports_wide_rows(device: str, activation: str) -> None:
    op = GATED[activation]
    gate_up = torch.randn(2, 2 * 5000).to(device)
    whole = op(gate_up)
    assert_close(reference.dense.GATED[activation], whole, gate_up)
    part = torch.cat([gate_up[1:, :77], gate_up[1:, 5000:5077]], 1)
    assert torch.equal(op(part), whole[1:, :77])


# linear

LINEAR_DTYPES = [
    (torch.float32, None),
    (torch.bfloat16, None),
    (torch.bfloat16, torch.float32),
    (torch.float16, None),
]


def make_linear(
    device: str, rows: int, num_inputs: int, num_outputs: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(rows, num_inputs).to(dtype)
    weight = (torch.randn(num_outputs, num_inputs) / max(num_inputs, 1) ** 0.5).to(dtype)
    return x.to(device), weight.to(device), torch.randn(num_outputs).to(dtype).to(device)


@pytest.fixture
def linear_dtype(request: pytest.FixtureRequest, on_cuda: bool) -> torch.dtype:
    """Return the dtype of a case, and skip float16 on the CPU."""
    dtype: torch.dtype = request.node.callspec.params["dtype"]
    if dtype == torch.float16 and not on_cuda:
        pytest.skip("float16 weights are for CUDA")
    return dtype


@pytest.mark.parametrize("dtype,out_dtype", LINEAR_DTYPES)
@pytest.mark.parametrize("use_bias", [False, True])
@pytest.mark.parametrize(
    "rows,num_inputs,num_outputs",
    [
        (0, 8, 8),
        (1, 0, 5),
        (20, 0, 5),
        (1, 1, 1),
        (3, 7, 17),
        (5, 256, 384),
        (13, 129, 250),
        (1500, 64, 48),
    ],
)
@pytest.mark.pairwise("cpu-*-dtype3-*")
def test_linear_matches_the_reference(
    device: str,
    isa: str,
    linear_dtype: torch.dtype,
    dtype: torch.dtype,
    out_dtype: torch.dtype | None,
    use_bias: bool,
    rows: int,
    num_inputs: int,
    num_outputs: int,
) -> None:
    x, weight, bias = make_linear(device, rows, num_inputs, num_outputs, dtype)
    packed = dense.pack_weight(weight)
    out = dense.linear(x, packed, bias if use_bias else None, out_dtype=out_dtype)
    assert out.shape == (rows, num_outputs)
    assert out.dtype == (out_dtype or dtype)
    if rows:

        def op(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            wide = None if x.dtype == torch.float64 else out_dtype
            return reference.linear(x, weight, bias if use_bias else None, wide)

        assert_close(op, out, x, weight, bias)


@pytest.mark.parametrize("dtype", LINEAR_DTYPES[:2])
def test_comparison_detects_planted_faults(dtype: tuple[torch.dtype, torch.dtype | None]) -> None:
    """The error that `assert_close` allows is far smaller than that of a planted fault."""
    x, weight, bias = make_linear("cpu", 40, 256, 96, dtype[0])
    assert_close(reference.linear, reference.linear(x, weight, bias), x, weight, bias)
    faulty = {
        "a lost input": reference.linear(x[:, 1:], weight[:, 1:], bias),
        "a row too far": reference.linear(x, weight, bias).roll(1, 0),
        "no bias": reference.linear(x, weight),
        "swapped halves": reference.linear(x.roll(128, 1), weight, bias),
    }
    if dtype[0] == torch.float32:
        faulty["sums in bfloat16"] = reference.linear(x, weight, bias, torch.bfloat16)
    for name, out in faulty.items():
        with pytest.raises(AssertionError, match="max error"):
            assert_close(reference.linear, out, x, weight, bias)
            pytest.fail(name)
    for eps in (2e-5, 1e-4) if dtype[0] == torch.float32 else (1e-4,):  # near the variance
        small = x / 30
        ones = torch.ones(256, dtype=x.dtype)
        with pytest.raises(AssertionError, match="max error"):
            assert_close(
                lambda h, w: reference.rms_norm(h, w, 1e-5)[0],
                reference.rms_norm(small, ones, eps)[0],
                small,
                ones,
            )


def test_linear_supports_wide_outputs(device: str) -> None:
    x, weight, _ = make_linear(device, 2, 64, 151936, torch.bfloat16)
    out = dense.linear(x, dense.pack_weight(weight), out_dtype=torch.float32)

    def op(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return reference.linear(x, weight, None, None if x.dtype == torch.float64 else out.dtype)

    assert_close(op, out, x, weight)


@pytest.mark.parametrize("dtype,out_dtype", LINEAR_DTYPES)
@pytest.mark.parametrize("num_inputs,num_outputs", [(256, 1024), (77, 100), (1030, 40)])
@pytest.mark.pairwise("cpu-*-dtype3-*")
def test_linear_rows_keep_their_bits(
    device: str,
    isa: str,
    on_cuda: bool,
    linear_dtype: torch.dtype,
    dtype: torch.dtype,
    out_dtype: torch.dtype | None,
    num_inputs: int,
    num_outputs: int,
) -> None:
    """Rows run alone, in any batch size, strided, and on 1 to 3 threads."""
    many = 20 if on_cuda else 512
    batches = [1, 2, 5, 8, 9, 17] if on_cuda else [*range(1, 71), 512]
    if on_cuda:
        num_outputs = min(num_outputs, 136)
    x, weight, bias = make_linear(device, many, num_inputs, num_outputs, dtype)
    packed = dense.pack_weight(weight)
    alone = torch.cat([dense.linear(row[None], packed, bias, out_dtype=out_dtype) for row in x])
    wide = torch.full((many, num_inputs + 3), float("nan"), dtype=dtype, device=device)
    wide[:, 1:-2] = x
    for num_threads in (1, 2, 3):
        if on_cuda and num_threads != 2:
            continue
        specops.set_num_threads(num_threads)
        for rows in batches if num_threads == 2 else [1, 5, 8, 64, 512]:
            first = (7 * rows) % (many + 1 - rows)
            got = dense.linear(x[first : first + rows], packed, bias, out_dtype=out_dtype)
            assert torch.equal(got, alone[first : first + rows]), (num_threads, rows)
        got = dense.linear(wide[:, 1:-2], packed, bias, out_dtype=out_dtype)
        assert torch.equal(got, alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("num_inputs", [650, 1200, pytest.param(2112, marks=pytest.mark.slow)])
@pytest.mark.fast("fma-*", "hopper-*-1200-dtype0")
def test_linear_split_sums_keep_their_bits(
    device: str,
    accumulation: str,
    linear_dtype: torch.dtype,
    dtype: torch.dtype,
    num_inputs: int,
) -> None:
    """Sums have 2 to 4 leaves; rows run alone, streamed and tiled, with and without workspace."""
    x, weight, bias = make_linear(device, 130, num_inputs, 72, dtype)
    packed = dense.pack_weight(weight)
    whole = dense.linear(x, packed, bias)
    for row in (0, 3, 64, 129):
        assert torch.equal(dense.linear(x[row : row + 1], packed, bias), whole[row : row + 1])
    for first, rows in [(1, 2), (125, 5), (50, 8), (3, 9), (70, 16), (99, 17), (66, 64)]:
        got = dense.linear(x[first : first + rows], packed, bias)
        assert torch.equal(got, whole[first : first + rows]), rows
        workspace = torch.empty(3, dtype=torch.float32, device=device)  # too short
        got = dense.linear(x[first : first + rows], packed, bias, workspace=workspace)
        assert torch.equal(got, whole[first : first + rows]), rows


@pytest.mark.parametrize(
    "num_outputs,num_inputs,out_dtype", [(264, 600, torch.bfloat16), (500, 100, torch.float32)]
)
def test_linear_large_tiles_keep_their_bits(
    device: str, accumulation: str, num_outputs: int, num_inputs: int, out_dtype: torch.dtype
) -> None:
    """CUDA uses tiles of 256 outputs only if they fill the device."""
    x, weight, bias = make_linear(device, 140, num_inputs, num_outputs, torch.bfloat16)
    packed = dense.pack_weight(weight)
    workspace = torch.empty(3, device=device)  # too short to split anything
    whole = dense.linear(x, packed, bias, out_dtype=out_dtype, workspace=workspace)
    for row in (0, 70, 139):
        alone = dense.linear(x[row : row + 1], packed, bias, out_dtype=out_dtype)
        assert torch.equal(alone, whole[row : row + 1])
    some = dense.linear(x[37:67], packed, bias, out_dtype=out_dtype)
    assert torch.equal(some, whole[37:67])


@pytest.fixture
def force_linear(device: str) -> Iterator[Callable[[str | None], None]]:
    """Return a function that selects the kernel of `linear` for one test."""
    yield dense.set_linear_kernel
    dense.set_linear_kernel(None)


def has_large_blocks(device: str) -> bool:
    """Return whether a block can have enough shared memory for the largest tiles."""
    if device != "cuda":
        return True
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= 224 << 10


# Leaves of one stage and of many stages, and partial tiles of all sizes at the last row, output and
# input.
@pytest.mark.parametrize(
    "rows,num_inputs,num_outputs,dtype",
    [
        (1, 40, 24, torch.bfloat16),
        (8, 1100, 264, torch.float16),
        (16, 568, 40, torch.bfloat16),
        (66, 104, 300, torch.float16),
        (130, 1208, 72, torch.bfloat16),
        (70, 601, 40, torch.bfloat16),
    ],
)
def test_linear_kernels_keep_their_bits(
    device: str,
    on_cuda: bool,
    force_linear: Callable[[str | None], None],
    rows: int,
    num_inputs: int,
    num_outputs: int,
    dtype: torch.dtype,
) -> None:
    """Every kernel has the same bits, with and without a workspace."""
    if dtype == torch.float16 and not on_cuda:
        pytest.skip("float16 weights are for CUDA")
    x, weight, bias = make_linear(device, rows, num_inputs, num_outputs, dtype)
    packed = dense.pack_weight(weight)
    whole = dense.linear(x, packed, bias, out_dtype=torch.float32)
    workspace = torch.zeros(dense.linear_workspace_size(rows, packed), device=device)
    short = torch.zeros(3, device=device)
    names = dense.linear_kernels(rows)
    assert len(names) == 7 - 2 * (rows > 8) - 2 * (rows > 16)
    for name in names:
        if name == "tile_256x128" and not (num_inputs % 8 == 0 and has_large_blocks(device)):
            continue
        force_linear(name)
        for memory in (workspace, short):
            got = dense.linear(x, packed, bias, out_dtype=torch.float32, workspace=memory)
            assert torch.equal(got, whole), name
        assert not workspace[:COUNTERS].any()


def test_linear_reports_a_workspace_without_leading_zeros(device: str, on_cuda: bool) -> None:
    x, weight, _ = make_linear(device, 64, 1100, 40, torch.bfloat16)
    packed = dense.pack_weight(weight)
    workspace = torch.zeros(max(dense.linear_workspace_size(64, packed), 1), device=device)
    whole = dense.linear(x, packed, workspace=workspace)
    workspace[:COUNTERS] = 1.0
    if not on_cuda:  # a CPU uses no counters
        assert torch.equal(dense.linear(x, packed, workspace=workspace), whole)
        return
    with expect_fault(on_cuda, "linear: workspace must begin with 128 zeros"):
        dense.linear(x, packed, workspace=workspace)


@pytest.mark.slow
def test_linear_supports_more_tiles_than_counters(
    device: str, force_linear: Callable[[str | None], None]
) -> None:
    """There are 130 tiles of 64 rows, and counters for 65 tiles of 128 rows."""
    x, weight, _ = make_linear(device, 64 * 130, 576, 8, torch.bfloat16)
    packed = dense.pack_weight(weight)
    workspace = torch.zeros(dense.linear_workspace_size(x.shape[0], packed), device=device)
    whole = dense.linear(x, packed, workspace=workspace)
    force_linear("tile_128x64")
    assert torch.equal(dense.linear(x, packed, workspace=workspace), whole)
    assert not workspace[:COUNTERS].any()


def test_linear_kernels_refuse_unsupported_arguments(
    device: str, on_cuda: bool, force_linear: Callable[[str | None], None]
) -> None:
    x, weight, _ = make_linear(device, 17, 32, 8, torch.bfloat16)
    packed = dense.pack_weight(weight)
    words = f"kernel must be one of {', '.join(dense.linear_kernels(1))} or None, got 'x'"
    with pytest.raises(ValueError, match=f"set_linear_kernel: {words}"):
        force_linear("x")
    whole = dense.linear(x, packed)
    refusals = {
        "stream_32x16": (x, "linear: x must be 16 rows or fewer for the kernel stream_32x16.*17"),
        "stream_16x8": (x[:9], "linear: x must be 8 rows or fewer for the kernel stream_16x8.*9"),
        "tile_256x128": (
            torch.cat([x, x], 1)[:, 1:33],
            "linear: the kernel tile_256x128 reads rows of x on 16 bytes only",
        ),
    }
    for name, (wrong, message) in refusals.items():
        force_linear(name)
        if on_cuda:
            with pytest.raises(ValueError, match=message):
                dense.linear(wrong, packed)
        if name != "tile_256x128" or has_large_blocks(device):
            assert torch.equal(dense.linear(x[:8], packed), whole[:8])
    force_linear("stream_16x8")
    floats = dense.pack_weight(weight.float())  # float32 has one kernel
    assert dense.linear(x.float(), floats).shape == (17, 8)


def test_linear_wide_layers_keep_their_bits(device: str) -> None:
    """With nine or more rows, CUDA uses another schedule for wide layers."""
    x, weight, bias = make_linear(device, 12, 96, 16400, torch.bfloat16)
    packed = dense.pack_weight(weight)
    whole = dense.linear(x, packed, bias)
    assert torch.equal(dense.linear(x[3:4], packed, bias), whole[3:4])
    assert torch.equal(dense.linear(x[4:], packed, bias), whole[4:])


def test_linear_workspace_size_grows_with_rows(device: str, on_cuda: bool) -> None:
    """A workspace for the largest step must suffice for every step."""
    packed = dense.pack_weight(torch.randn(72, 1200).bfloat16().to(device))
    sizes = [dense.linear_workspace_size(n, packed) for n in (0, 1, 16, 17, 64, 1000, 10**6, 10**7)]
    assert sizes == sorted(sizes)
    if on_cuda:
        assert sizes[2] == 0 and sizes[-1] == sizes[-2]
        assert sizes[3] == sizes[4] == COUNTERS + 3 * 64 * 96
    else:
        assert not any(sizes)


@pytest.mark.slow
@pytest.mark.parametrize("num_outputs,rows", [(8100, 17), (40, 1200), (4200, 70), (700, 640)])
def test_linear_splits_keep_their_bits(device: str, num_outputs: int, rows: int) -> None:
    """The four leaves of a sum run in four blocks or in one."""
    x, weight, bias = make_linear(device, rows, 2048, num_outputs, torch.bfloat16)
    packed = dense.pack_weight(weight)
    whole = dense.linear(x, packed, bias)
    for row in range(0, rows, 23):
        assert torch.equal(dense.linear(x[row : row + 1], packed, bias), whole[row : row + 1])
    workspace = torch.empty(3, device=device)  # too short
    assert torch.equal(dense.linear(x, packed, bias, workspace=workspace), whole)


@pytest.mark.parametrize("dtype,out_dtype", LINEAR_DTYPES)
@pytest.mark.parametrize("num_inputs", [96, 1056])
def test_linear_columns_keep_their_bits(
    device: str,
    isa: str,
    linear_dtype: torch.dtype,
    dtype: torch.dtype,
    out_dtype: torch.dtype | None,
    num_inputs: int,
) -> None:
    """An output element depends on its own weight row only."""
    x, weight, _ = make_linear(device, 11, num_inputs, 400, dtype)
    whole = dense.linear(x, dense.pack_weight(weight), out_dtype=out_dtype)
    for first, count in [(0, 1), (5, 33), (16, 160), (399, 1), (1, 399)]:
        part = dense.pack_weight(weight[first : first + count])
        got = dense.linear(x, part, out_dtype=out_dtype)
        assert torch.equal(got, whole[:, first : first + count])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [9, 20])
def test_linear_reads_and_writes_only_its_arguments(
    device: str, isa: str, dtype: torch.dtype, rows: int
) -> None:
    x, weight, bias = make_linear(device, rows, 33, 21, dtype)
    wide = torch.full((rows, 40), float("nan"), dtype=dtype, device=device)
    wide[:, :33] = x
    wide_weight = torch.full((21, 50), float("inf"), dtype=dtype, device=device)
    wide_weight[:, 4:37] = weight
    slack = torch.full((rows * 21 + 64,), 7.0, dtype=dtype, device=device)
    out = slack[: rows * 21].view(rows, 21)
    packed = dense.pack_weight(wide_weight[:, 4:37])
    assert dense.linear(wide[:, :33], packed, bias, out=out) is out
    assert torch.equal(out, dense.linear(x, dense.pack_weight(weight), bias))
    assert (slack[rows * 21 :] == 7.0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [3, 20])
def test_linear_does_not_depend_on_alignment(device: str, dtype: torch.dtype, rows: int) -> None:
    x, weight, bias = make_linear(device, rows, 72, 48, dtype)
    expected = dense.linear(x, dense.pack_weight(weight), bias)
    for shift in (1, 2, 4, 8):

        def moved(tensor: torch.Tensor, shift: int = shift) -> torch.Tensor:
            memory = torch.full((tensor.numel() + shift,), float("nan"), dtype=dtype, device=device)
            memory[shift:] = tensor.flatten()
            return memory[shift:].view(tensor.shape)

        out = moved(torch.zeros_like(expected))
        dense.linear(moved(x), dense.pack_weight(moved(weight)), moved(bias), out=out)
        assert torch.equal(out, expected)


def test_linear_refuses_invalid_arguments(device: str, on_cuda: bool) -> None:
    x, weight, bias = make_linear(device, 2, 8, 4, torch.bfloat16)
    packed = dense.pack_weight(weight)
    dtypes = "bfloat16|float16|float32" if on_cuda else "bfloat16|float32"
    if not on_cuda:
        with pytest.raises(ValueError, match=r"pack_weight: weight must be .* got float16"):
            dense.pack_weight(weight.half())
    for call, words in [
        (lambda: dense.pack_weight(weight.int()), f"pack_weight: weight must be {dtypes}"),
        (lambda: dense.linear(x, packed, workspace=bias), "linear: workspace must be float32"),
        (lambda: dense.pack_weight(weight[0]), "pack_weight: weight must be"),
        (
            lambda: dense.pack_weight(weight.T),
            "pack_weight: weight must be made of contiguous rows",
        ),
        (lambda: dense.linear(x.float(), packed), "linear: x must be bfloat16"),
        (lambda: dense.linear(x[:, :7], packed), "linear: x must be .*num_inputs=8"),
        (lambda: dense.linear(x, packed, bias[:3]), "linear: bias must be .*num_outputs=4"),
        (lambda: dense.linear(x, packed, bias.float()), "linear: bias must be bfloat16"),
        (lambda: dense.linear(x, packed, out_dtype=torch.float16), "linear: out_dtype must be"),
        (lambda: dense.linear(x, packed, out=x), "linear: out must be"),
        (
            lambda: dense.linear(x, packed, out=bias[None], out_dtype=torch.float32),
            "linear: out_dtype must be",
        ),
    ]:
        with pytest.raises(ValueError, match=words.replace("|", r"\|")):
            call()


def test_linear_refuses_unaligned_memory_on_cuda(device: str, on_cuda: bool) -> None:
    """CUDA kernels load weights and partial sums as vectors; CPU kernels support any view."""
    x, weight, bias = make_linear(device, 80, 1100, 64, torch.bfloat16)
    packed = dense.pack_weight(weight)
    expected = dense.linear(x, packed, bias)

    def shifted(size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size + 1, dtype=dtype, device=device)[1:]

    floats = max(dense.linear_workspace_size(80, packed), 4)
    data = shifted(packed.data.numel(), torch.bfloat16).view(packed.data.shape).copy_(packed.data)
    calls = [
        lambda: dense.linear(x, packed, bias, workspace=shifted(floats, torch.float32)),
        lambda: dense.linear(x, packed._replace(data=data), bias),
    ]
    for call, name in zip(calls, ["workspace", "weight.data"], strict=True):
        if on_cuda:
            with pytest.raises(ValueError, match=f"linear: {name} must be aligned to 16 bytes"):
                call()
        else:
            assert torch.equal(call(), expected)


# linear with fused gate and up projections


def linear_then_gate(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str
) -> torch.Tensor:
    """Return the expected result of a fused activation, computed by two calls."""
    return GATED[activation](dense.linear(x, dense.pack_weight(weight), bias))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("use_bias", [False, True])
@pytest.mark.parametrize(
    "rows,num_inputs,width",
    [(0, 8, 8), (1, 0, 5), (1, 1, 1), (3, 7, 17), (5, 256, 192), (13, 129, 125), (300, 64, 22)],
)
@pytest.mark.pairwise("cpu-*-dtype2")
def test_linear_gate_up_equals_linear_and_gate(
    device: str,
    isa: str,
    linear_dtype: torch.dtype,
    dtype: torch.dtype,
    use_bias: bool,
    rows: int,
    num_inputs: int,
    width: int,
) -> None:
    x, weight, all_bias = make_linear(device, rows, num_inputs, 2 * width, dtype)
    bias = all_bias if use_bias else None
    for activation in GATED:
        slack = torch.full((rows * width + 64,), 7.0, dtype=dtype, device=device)
        out = slack[: rows * width].view(rows, width)
        packed = dense.pack_weight(weight, activation=activation)
        assert dense.linear(x, packed, bias, out=out) is out
        assert torch.equal(out, linear_then_gate(x, weight, bias, activation))
        assert torch.equal(dense.linear(x, packed, bias), out)
        assert (slack[rows * width :] == 7.0).all()
        if rows:

            def op(
                x: torch.Tensor,
                weight: torch.Tensor,
                bias: torch.Tensor,
                activation: str = activation,
            ) -> torch.Tensor:
                optional_bias = bias if use_bias else None
                return reference.linear(x, weight, optional_bias, activation=activation)

            assert_close(op, out, x, weight, all_bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "num_inputs,width,activation",
    [(256, 1000, "silu"), (77, 50, "swiglu_oai"), (77, 50, "gelu_tanh"), (1030, 24, "gelu_tanh")],
)
def test_linear_gate_up_rows_keep_their_bits(
    device: str,
    isa: str,
    on_cuda: bool,
    dtype: torch.dtype,
    num_inputs: int,
    width: int,
    activation: str,
) -> None:
    """Rows run alone, in batches, strided, and on 1 to 3 threads."""
    many = 18 if on_cuda else 130
    width = min(width, 60) if on_cuda else width
    x, weight, bias = make_linear(device, many, num_inputs, 2 * width, dtype)
    packed = dense.pack_weight(weight, activation=activation)
    whole = linear_then_gate(x, weight, bias, activation)
    wide = torch.full((many, num_inputs + 3), float("nan"), dtype=dtype, device=device)
    wide[:, 1:-2] = x
    for num_threads in (1, 2, 3):
        if on_cuda and num_threads != 2:
            continue
        specops.set_num_threads(num_threads)
        for rows in [1, 2, 5, 9, 17] if on_cuda else [1, 2, 3, 4, 5, 6, 7, 8, 9, 23, 64]:
            first = (7 * rows) % (many + 1 - rows)
            got = dense.linear(x[first : first + rows], packed, bias)
            assert torch.equal(got, whole[first : first + rows]), (num_threads, rows)
        assert torch.equal(dense.linear(wide[:, 1:-2], packed, bias), whole)


@pytest.mark.parametrize(
    "rows,num_inputs,width,dtype,activation",
    [
        (1, 40, 12, torch.bfloat16, "silu"),
        (8, 1100, 131, torch.float16, "gelu_tanh"),
        (16, 568, 20, torch.bfloat16, "gelu_tanh"),
        (66, 104, 149, torch.float16, "swiglu_oai"),
        (66, 104, 45, torch.bfloat16, "gelu_tanh"),
        (130, 1208, 35, torch.bfloat16, "silu"),
    ],
)
def test_linear_gate_up_kernels_keep_their_bits(
    device: str,
    on_cuda: bool,
    force_linear: Callable[[str | None], None],
    rows: int,
    num_inputs: int,
    width: int,
    dtype: torch.dtype,
    activation: str,
) -> None:
    """Every kernel has the same bits, with and without a workspace."""
    if dtype == torch.float16 and not on_cuda:
        pytest.skip("float16 weights are for CUDA")
    x, weight, bias = make_linear(device, rows, num_inputs, 2 * width, dtype)
    packed = dense.pack_weight(weight, activation=activation)
    whole = linear_then_gate(x, weight, bias, activation)
    workspace = torch.zeros(dense.linear_workspace_size(rows, packed), device=device)
    short = torch.zeros(3, device=device)
    for name in dense.linear_kernels(rows):
        if name == "tile_256x128" and not (num_inputs % 8 == 0 and has_large_blocks(device)):
            continue
        force_linear(name)
        for memory in (workspace, short):
            got = dense.linear(x, packed, bias, workspace=memory)
            assert torch.equal(got, whole), name
        assert not workspace[:COUNTERS].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [3, 20])
def test_linear_gate_up_does_not_depend_on_alignment(
    device: str, dtype: torch.dtype, rows: int
) -> None:
    x, weight, bias = make_linear(device, rows, 72, 48, dtype)
    packed = dense.pack_weight(weight, activation="gelu_tanh")
    expected = linear_then_gate(x, weight, bias, "gelu_tanh")
    for shift in (1, 2, 4, 8):
        memory = torch.full((rows * 24 + shift,), float("nan"), dtype=dtype, device=device)
        out = memory[shift:].view(rows, 24)
        dense.linear(x, packed, bias, out=out)
        assert torch.equal(out, expected)


def test_linear_gate_up_refuses_invalid_arguments(device: str) -> None:
    x, weight, bias = make_linear(device, 2, 8, 6, torch.bfloat16)
    packed = dense.pack_weight(weight, activation="silu")
    names = "'silu', 'gelu_tanh', 'swiglu_oai' or None"
    for call, words in [
        (
            lambda: dense.pack_weight(weight[:5], activation="gelu_tanh"),
            "pack_weight: weight must be .* 5",
        ),
        (
            lambda: dense.pack_weight(weight, activation="gelu"),
            f"pack_weight: activation must be {names}, got 'gelu'",
        ),
        (
            lambda: dense.pack_weight(weight, activation=True),  # type: ignore[arg-type]
            f"pack_weight: activation must be {names}, got True",
        ),
        (
            lambda: dense.linear(x, packed, out_dtype=torch.float32),
            "linear: out_dtype must be bfloat16",
        ),
        (lambda: dense.linear(x, packed, out=x[:, :6].contiguous()), "linear: out must be .*6"),
        (lambda: dense.linear(x, packed, bias[:3]), "linear: bias must be .*num_outputs=6"),
    ]:
        with pytest.raises(ValueError, match=words):
            call()


# rms_norm


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("use_residual", [False, True])
@pytest.mark.parametrize(
    "rows,width", [(0, 64), (1, 1), (3, 77), (6, 1024), (1500, 48), (2, 17003)]
)
@pytest.mark.no_bf16
@pytest.mark.pairwise
def test_rms_norm_matches_the_reference(
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


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.no_bf16
def test_rms_norm_rounds_like_the_reference(device: str, isa: str, dtype: torch.dtype) -> None:
    """Op and reference round twice at the same places, so at most 1 % of the elements differ."""
    x, residual = torch.randn(2, 40, 512).to(dtype).to(device)
    weight = torch.randn(512).to(dtype).to(device)
    expected, _ = reference.rms_norm(x, weight, 1e-5, residual)
    out = dense.rms_norm(x, weight, 1e-5, residual=residual)
    assert (out != expected).float().mean() <= 0.01
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [48, 77, 1024])
@pytest.mark.no_bf16
def test_rms_norm_rows_keep_their_bits(
    device: str, isa: str, on_cuda: bool, dtype: torch.dtype, width: int
) -> None:
    rows = 20 if on_cuda else 300
    wide = torch.full((rows, width + 5), float("nan"), dtype=dtype, device=device)
    x = wide[:, 2:-3]
    x.copy_(torch.randn(rows, width))
    weight = torch.randn(width).to(dtype).to(device)
    residual = torch.randn(rows, width).to(dtype).to(device)
    alone, alone_residual = torch.empty_like(residual), residual.clone()
    for row in range(rows):
        part = slice(row, row + 1)
        alone[part] = dense.rms_norm(x[part], weight, 1e-6, residual=alone_residual[part])
    for num_threads in (1, 2, 3):
        specops.set_num_threads(num_threads)
        updated = residual.clone()
        assert torch.equal(dense.rms_norm(x, weight, 1e-6, residual=updated), alone)
        assert torch.equal(updated, alone_residual)
    updated = residual.clone()
    assert torch.equal(dense.rms_norm(x.contiguous(), weight, 1e-6, residual=updated), alone)
    in_place = x.contiguous()
    expected = dense.rms_norm(x, weight, 1e-6)
    assert torch.equal(dense.rms_norm(in_place, weight, 1e-6, out=in_place), expected)


def test_rms_norm_refuses_invalid_arguments(device: str) -> None:
    x, weight = torch.randn(2, 8, device=device), torch.ones(8, device=device)
    for call, words in [
        (lambda: dense.rms_norm(x, weight[:7], 1e-6), "rms_norm: weight must be"),
        (lambda: dense.rms_norm(x, weight.half(), 1e-6), "rms_norm: weight must be float32"),
        (
            lambda: dense.rms_norm(x, weight, -1.0),
            "rms_norm: eps must be a finite number of at least 0",
        ),
        (lambda: dense.rms_norm(x, weight, 1e-6, residual=x[:1]), "rms_norm: residual must be"),
        (lambda: dense.rms_norm(x, weight, 1e-6, residual=x, out=x), "rms_norm: out must be"),
    ]:
        with pytest.raises(ValueError, match=words):
            call()


# embedding


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows,width", [(0, 8), (1, 3), (1500, 65), (3, 5000), (7, 66)])
@pytest.mark.no_bf16
def test_embedding_matches_the_reference(
    device: str, isa: str, dtype: torch.dtype, rows: int, width: int
) -> None:
    weight = torch.randn(50, width).to(dtype).to(device)
    token_ids = torch.randint(50, (rows,), dtype=torch.int32).to(device)
    out = dense.embedding(token_ids, weight)
    assert torch.equal(out, reference.embedding(token_ids, weight))


@pytest.mark.parametrize("bad", [-1, 50])
def test_embedding_refuses_unknown_ids(device: str, on_cuda: bool, bad: int) -> None:
    """The CPU writes nothing; CUDA writes zeros for the invalid row only."""
    weight = torch.randn(50, 4, device=device)
    token_ids = torch.tensor([0, 1, bad], dtype=torch.int32, device=device)
    out = torch.full((3, 4), 7.0, device=device)
    got = "another value" if on_cuda else bad
    vocab = "vocab" if on_cuda else r"vocab=50"
    with expect_fault(on_cuda, rf"token_ids.* must be in \[0, {vocab}\), got {got}"):
        dense.embedding(token_ids, weight, out=out)
    if on_cuda:
        assert torch.equal(out, torch.cat([weight[:2], torch.zeros_like(weight[:1])]))
    else:
        assert (out == 7.0).all()
    with pytest.raises(ValueError, match="embedding: token_ids must be int32"):
        dense.embedding(token_ids.long(), weight)
