# SPDX-License-Identifier: Apache-2.0
"""`linear` on AMX tiles: on a CPU that has them, or with software instructions (amx_model.h).

No bit of a row depends on the other rows, on threads, strides or the position of an output. Bits
follow Intel's description of the instructions; for int8 and int4 weights, they equal those of the
other instruction sets.
"""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import specops
import torch
from specops import dense, reference
from specops.dense import PackedWeight
from specops.quantization import QuantizedWeight
from test_quantized import INTEGERS, Case, make
from torch import Tensor

pytestmark = pytest.mark.ci

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (
    "tests/amx_linear.cpp",
    "csrc/dense/linear_amx_cpu.cpp",
    "csrc/gemm/gemm_range_amx_cpu.cpp",
    "csrc/common/parallel.cpp",
    "csrc/common/cpus.cpp",
)
FLAGS = "-std=c++20 -O2 -Wall -Wextra -Werror -ffp-contract=off -fno-math-errno -shared -fPIC"
MODEL = "-pthread -DSPECOPS_ISA=amx_model -DSPECOPS_AMX_MODEL -Icsrc -Itests"
ACTIVATIONS = (None, "silu", "gelu_tanh", "swiglu_oai")  # in the order of C++'s Activation
LEAF = 32  # inputs of one product of tiles

Linear = Callable[..., Tensor]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Compile the kernel with software in place of the instructions."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("no C++ compiler here")
    path = tmp_path_factory.mktemp("amx") / "amx_linear.so"
    command = [compiler, *FLAGS.split(), *MODEL.split(), *SOURCES, "-o", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return ctypes.CDLL(str(path))


@pytest.fixture(params=["model", "instructions"])
def linear(request: pytest.FixtureRequest) -> Iterator[Linear]:
    """Yield dense.linear with software instructions, and with those of the CPU."""
    if request.param == "model":
        yield from with_the_model(request.getfixturevalue("library"))
    elif "amx" in specops.supported_isas():
        yield from with_the_instructions()
    else:
        pytest.skip("this CPU has no AMX")


def with_the_instructions() -> Iterator[Linear]:
    def call(
        x: Tensor,
        weight: PackedWeight,
        bias: Tensor | None = None,
        out_dtype: torch.dtype = torch.float32,
        threads: int = 1,
    ) -> Tensor:
        specops.set_num_threads(threads)
        return dense.linear(x, weight, bias, out_dtype=out_dtype)

    isa, threads = specops.get_isa(), specops.get_num_threads()
    specops.set_isa("amx")
    yield call
    specops.set_isa(isa)
    specops.set_num_threads(threads)


class WeightParams(ctypes.Structure):
    """WeightParams of csrc/gemm/weight.h."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("data", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("group", ctypes.c_int64),
        ("row_numbers", ctypes.c_int32),
        ("input_order", ctypes.c_void_p),
        ("code_values", ctypes.c_void_p),
        ("num_outputs", ctypes.c_int64),
        ("num_inputs", ctypes.c_int64),
        ("activation", ctypes.c_int32),
    )

    def __init__(self, weight: PackedWeight) -> None:
        super().__init__(
            ("plain", "int8", "int4").index(weight.kind),
            address(weight.data),
            address(weight.scales),
            address(weight.offsets),
            weight.group,
            ("float", "int16", "int8").index(weight.activations),
            address(weight.input_order),
            address(weight.code_values),
            weight.num_outputs,
            weight.num_inputs,
            ACTIVATIONS.index(weight.activation),
        )


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def with_the_model(library: ctypes.CDLL) -> Iterator[Linear]:
    def call(
        x: Tensor,
        weight: PackedWeight,
        bias: Tensor | None = None,
        out_dtype: torch.dtype = torch.float32,
        threads: int = 1,
    ) -> Tensor:
        width = weight.num_outputs // 2 if weight.activation else weight.num_outputs
        # Outputs that are not written stay NaN; the memory behind them must stay NaN.
        memory = torch.full((x.shape[0] * width + 64,), torch.nan, dtype=out_dtype)
        library.set_threads(threads)
        library.linear(
            ctypes.c_void_p(x.data_ptr()),
            ctypes.byref(WeightParams(weight)),
            ctypes.c_void_p(address(bias)),
            ctypes.c_void_p(memory.data_ptr()),
            *(ctypes.c_int64(n) for n in (x.shape[0], x.stride(0))),
            *(ctypes.c_bool(dtype == torch.float32) for dtype in (x.dtype, out_dtype)),
        )
        assert memory[-64:].isnan().all()
        return memory[:-64].view(x.shape[0], width)

    isa = specops.get_isa()
    specops.set_isa("portable")  # as the rest of the library is compiled
    yield call
    specops.set_isa(isa)
    library.set_threads(1)


def sums_of_tdpbf16ps(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias, summed in the order of TDPBF16PS.

    Each addition is computed in float64, where products are exact, and then rounded to float32.
    Unless the float64 sum is inexact and near a tie, the result is that of a single rounding.
    """
    pad = -x.shape[1] % LEAF
    x, weight = (torch.nn.functional.pad(t, (0, pad)).double() for t in (x, weight))
    sums = torch.zeros(x.shape[0], weight.shape[0])
    for first in range(0, x.shape[1], LEAF):
        halves = []
        for parity in (0, 1):
            chain = torch.zeros_like(sums)
            for k in range(first + parity, first + LEAF, 2):
                chain = (chain.double() + x[:, k, None] * weight[None, :, k]).float()
            halves.append(chain)
        sums = sums + (halves[0] + halves[1])
    return sums if bias is None else sums + bias.float()


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape).bfloat16()


SHAPES = [(64, 32), (64, 96), (200, 64), (16, 32), (1, 1), (17, 31), (100, 77), (40, 1030), (5, 0)]


@pytest.mark.parametrize("outputs,inputs", SHAPES)
@pytest.mark.parametrize("use_bias", [False, True])
def test_bits_follow_the_description_of_the_instructions(
    linear: Linear, outputs: int, inputs: int, use_bias: bool
) -> None:
    weight, bias = numbers(outputs, inputs), numbers(outputs) if use_bias else None
    packed = dense.pack_weight(weight)
    for rows in (0, 1, 5, 16, 17, 32, 33, 70):
        x = numbers(rows, inputs)
        want = sums_of_tdpbf16ps(x, weight, bias)
        assert torch.equal(linear(x, packed, bias), want)
        assert torch.equal(linear(x, packed, bias, torch.bfloat16), want.bfloat16())


@pytest.mark.parametrize("outputs,inputs", [(1024, 256), (100, 77), (40, 1030), (2500, 64)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.fast("*-None-*", "*-swiglu_oai-[14]0*", "*-gelu_tanh-*-77", "*-silu-2500-*")
def test_rows_keep_their_bits(
    linear: Linear, outputs: int, inputs: int, activation: str | None
) -> None:
    weight = dense.pack_weight(numbers(outputs, inputs), activation=activation)
    bias, x = numbers(outputs), numbers(150, inputs)
    dtype = torch.bfloat16
    alone = torch.cat([linear(x[i : i + 1], weight, bias, dtype) for i in range(len(x))])
    for rows in (2, 5, 8, 15, 16, 17, 31, 32, 33, 64, 150):
        for threads in (1, 2, 3, 16):
            first = (7 * rows) % (len(x) - rows + 1)
            got = linear(x[first : first + rows], weight, bias, dtype, threads)
            assert torch.equal(got, alone[first : first + rows])


def test_neighbors_and_strides_change_no_bit(linear: Linear) -> None:
    weight = numbers(70, 77)
    x = numbers(40, 77)
    want = linear(x, dense.pack_weight(weight))
    # Rows far apart, off every alignment, with NaN between them.
    memory = torch.full((40 * 90 + 1,), torch.nan, dtype=torch.bfloat16)
    apart = memory[1:].view(40, 90)[:, :77]
    apart.copy_(x)
    assert torch.equal(linear(apart, dense.pack_weight(weight)), want)
    # The bits of an output do not depend on its position or on other outputs.
    shuffled = torch.randperm(70)
    assert torch.equal(linear(x, dense.pack_weight(weight[shuffled])), want[:, shuffled])
    alone = linear(x, dense.pack_weight(weight[33:34]))
    assert torch.equal(alone, want[:, 33:34])
    x[7], weight[9] = torch.inf, torch.nan
    spoiled = linear(x, dense.pack_weight(weight))
    rows = torch.arange(40) != 7
    outputs = torch.arange(70) != 9
    assert torch.equal(spoiled[rows][:, outputs], want[rows][:, outputs])
    assert not spoiled[7].isfinite().any() and spoiled[:, 9].isnan().all()


@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
def test_gated_outputs_are_the_activation_of_plain_outputs(linear: Linear, activation: str) -> None:
    weight, bias, x = numbers(160, 70), numbers(160), numbers(37, 70)
    apart = linear(x, dense.pack_weight(weight), bias, torch.bfloat16)
    got = linear(x, dense.pack_weight(weight, activation=activation), bias, torch.bfloat16)
    want = reference.dense.GATED[activation](apart.double())
    assert torch.allclose(got.double(), want, rtol=2**-8, atol=1e-12)  # the error of 1 + tanh


def test_denormals_are_zeros(linear: Linear) -> None:
    tiny = torch.full((3, 32), 1e-39).bfloat16()
    assert (tiny != 0).all()
    ones = torch.ones(20, 32).bfloat16()
    assert not linear(tiny, dense.pack_weight(ones)).any()
    small = torch.full((3, 32), 2.0**-70).bfloat16()
    got = linear(small, dense.pack_weight(torch.full((20, 32), 2.0**-70).bfloat16()))
    assert not got.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", INTEGERS, ids=str)
def test_quantized_weights_have_the_bits_of_other_instruction_sets(
    linear: Linear, dtype: torch.dtype, case: Case
) -> None:
    """Cover more rows than vectors multiply, whole and partial tiles, and several threads."""
    for rows, num_inputs, num_outputs in [
        (9, 7, 17),
        (16, 129, 64),
        (33, 320, 130),
        (70, 1030, 50),
        (530, 40, 20),
    ]:
        x, q, bias = make(case, "cpu", rows, num_inputs, num_outputs, dtype)
        packed = dense.pack_weight(q, activations=case.activations)
        want = reference.quantized_linear(x, q, bias, torch.float32, activations=case.activations)
        for threads in (1, 3):
            assert torch.equal(linear(x, packed, bias, torch.float32, threads), want)
        alone = linear(x[3:13] if rows > 12 else x, packed, bias)
        assert torch.equal(alone, want[3:13] if rows > 12 else want)
    if case.group % 32 == 0 and not case.order:
        gated = dense.pack_weight(q, activation="silu", activations=case.activations)
        apart = linear(x, packed, bias, dtype)
        assert torch.equal(linear(x, gated, bias, dtype), dense.silu_mul(apart))


@pytest.mark.parametrize("activations", ["int16", "int8"])
def test_extreme_quantized_values_and_rows(linear: Linear, activations: str) -> None:
    """Bytes of either sign are extreme; infinities and NaN change only their own rows."""
    q = QuantizedWeight("int8", torch.full((40, 256), 127, dtype=torch.int8), torch.ones(40, 1))
    q.values[1::3], q.values[2::3, ::2] = -128, -1
    x = torch.full((20, 256), 127.0 if activations == "int8" else 32767.0)
    x[1::2] = -x[1::2] - int(activations == "int16")
    x[5, ::2], x[6, 1::2] = 255.0, -256.0
    packed = dense.pack_weight(q, activations=activations)
    want = reference.quantized_linear(x, q, None, torch.float32, activations=activations)
    assert torch.equal(linear(x, packed), want)
    x[7, 3], x[9, 200] = torch.inf, torch.nan
    spoiled = linear(x, packed)
    rows = torch.tensor([r not in (7, 9) for r in range(20)])
    assert torch.equal(spoiled[rows], want[rows]) and spoiled[~rows].isnan().all()


def test_compiled_kernels_have_the_tile_instructions() -> None:
    """Compile the same files without the software instructions."""
    compiler, objdump = shutil.which(os.environ.get("CXX", "c++")), shutil.which("objdump")
    if compiler is None or objdump is None or os.uname().machine != "x86_64":
        pytest.skip("needs a compiler for x86-64, and objdump")
    flags = "-std=c++20 -O1 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mfma -mf16c"
    sets = "-mamx-tile -mamx-bf16 -mamx-int8 -DSPECOPS_ISA=amx -DSPECOPS_ISA_amx=1 -Icsrc"
    # In AT&T's syntax: weights, inputs, sums.
    products = (
        ("tdpbf16ps %tmm6, %tmm4, %tmm0", "tdpbf16ps %tmm7, %tmm5, %tmm3"),
        ("tdpbssd %tmm6, %tmm4, %tmm0", "tdpbusd %tmm7, %tmm5, %tmm3"),
    )
    for source, own in zip(SOURCES[1:3], products, strict=True):
        command = [compiler, *flags.split(), *sets.split(), "-S", source, "-o", "-"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        for name in ("ldtilecfg", "tilerelease", "tilezero", "tileloadd", "tilestored"):
            assert f"\t{name}" in done.stdout
        assert all(line in done.stdout for line in own)
