# SPDX-License-Identifier: Apache-2.0
"""libggml-specops.so: a row of a product or of attention has the same bits among any other rows.

Operations that the library leaves to ggml have this property, too; those that it takes over do not.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from ggml import LIBRARY, Ggml
from specops.checkpoints.gguf_blocks import DECODERS
from specops.integrations import llamacpp as integration
from specops.reference.dense import quantized_linear

pytestmark = pytest.mark.ci

PACKED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL")
IN_PLACE = ("F32", "F16", "BF16", "Q2_K", "Q3_K", "Q4_K", "Q8_0")  # read where they are
BATCHES = (2, 5, 8, 33, 64)
ROWS = max(BATCHES)
INPUTS, OUTPUTS, KV, HEAD = 512, 72, 320, 64
ROUNDING = 2.0**-24  # relative error of one float32 operation

Matrix = np.ndarray


@pytest.fixture(scope="module")
def ggml() -> Ggml:
    return Ggml()


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(0)


def changed_rows(compute: Callable[[int, int], Matrix]) -> Iterator[int]:
    """Yield batch sizes with a row that differs from the same row alone.

    Args:
        compute: returns the results of rows [begin, end).
    """
    alone = [compute(row, row + 1).tobytes() for row in range(ROWS)]
    for size in BATCHES:
        rows = compute(0, size).reshape(size, -1)
        if any(row.tobytes() != alone[i] for i, row in enumerate(rows)):
            yield size


def operation(ggml: Ggml, name: str, *params: Any) -> Callable[..., Any]:
    return lambda context, *tensors: ggml.call(f"ggml_{name}", context, *tensors, *params)


def masks(width: int, first: int) -> Matrix:
    """Return masks of rows of one sequence, of which row i sees first + i tokens."""
    seen = np.arange(width)[None, :] < first + np.arange(ROWS)[:, None]
    return np.where(seen, 0, -np.inf).astype(np.float16)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", PACKED)
def test_packed_weight_gives_a_row_the_same_bits(
    ggml: Ggml, random: np.random.Generator, kind: str, threads: int
) -> None:
    weight = ggml.quantize(kind, random.standard_normal((OUTPUTS, INPUTS)))
    x = random.standard_normal((ROWS, INPUTS))

    def compute(begin: int, end: int) -> Matrix:
        inputs = [(kind, (INPUTS, OUTPUTS), weight), ("F32", (INPUTS, end - begin), x[begin:end])]
        product = operation(ggml, "mul_mat")
        return ggml.compute("specops", product, inputs, packed=0, threads=threads)

    assert not list(changed_rows(compute))


@pytest.mark.parametrize("kind", PACKED)
def test_packed_weight_has_the_bits_of_the_reference(
    ggml: Ggml, random: np.random.Generator, kind: str
) -> None:
    weight = ggml.quantize(kind, random.standard_normal((OUTPUTS, INPUTS)))
    x = random.standard_normal((5, INPUTS)).astype(np.float32)
    inputs = [(kind, (INPUTS, OUTPUTS), weight), ("F32", (INPUTS, 5), x)]
    got = ggml.compute("specops", operation(ggml, "mul_mat"), inputs, packed=0)
    blocks = torch.from_numpy(weight).view(OUTPUTS, INPUTS // (256 if "_K" in kind else 32), -1)
    want = quantized_linear(torch.from_numpy(x), DECODERS[kind](blocks), activations="int8")
    assert np.array_equal(got.reshape(5, OUTPUTS), want.numpy())


@pytest.mark.parametrize("kind", IN_PLACE)
def test_weight_in_place_gives_a_row_the_same_bits(
    ggml: Ggml, random: np.random.Generator, kind: str
) -> None:
    weight = ggml.quantize(kind, random.standard_normal((OUTPUTS, INPUTS)))
    x = random.standard_normal((ROWS, INPUTS)).astype(np.float32)

    def compute(begin: int, end: int) -> Matrix:
        inputs = [(kind, (INPUTS, OUTPUTS), weight), ("F32", (INPUTS, end - begin), x[begin:end])]
        return ggml.compute("specops", operation(ggml, "mul_mat"), inputs)

    assert not list(changed_rows(compute))
    numbers = ggml.numbers(kind, weight, INPUTS).astype(np.float64)
    most = INPUTS * ROUNDING * (np.abs(x[:5]) @ np.abs(numbers).T)
    assert (np.abs(compute(0, 5).reshape(5, OUTPUTS) - x[:5] @ numbers.T) <= most).all()


def test_experts_give_a_row_the_same_bits(ggml: Ggml, random: np.random.Generator) -> None:
    experts, used = 4, 2
    weight = ggml.quantize("Q4_K", random.standard_normal((experts * OUTPUTS, INPUTS)))
    x = random.standard_normal((ROWS, INPUTS))
    ids = np.stack([random.permutation(experts)[:used] for _ in range(ROWS)])

    def compute(begin: int, end: int) -> Matrix:
        inputs = [
            ("Q4_K", (INPUTS, OUTPUTS, experts), weight),
            ("F32", (INPUTS, 1, end - begin), x[begin:end]),
            ("I32", (used, end - begin), ids[begin:end]),
        ]
        return ggml.compute("specops", operation(ggml, "mul_mat_id"), inputs, packed=0)

    assert not list(changed_rows(compute))
    one = [("Q4_K", (INPUTS, OUTPUTS), weight.reshape(experts, OUTPUTS, -1)[ids[3, 1]])]
    one.append(("F32", (INPUTS, 1), x[3]))
    alone = ggml.compute("specops", operation(ggml, "mul_mat"), one, packed=0)
    assert np.array_equal(compute(3, 4).reshape(used, OUTPUTS)[1], alone)


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
@pytest.mark.parametrize("soft_cap", [0.0, 30.0])
def test_attention_gives_a_row_the_same_bits(
    ggml: Ggml, random: np.random.Generator, kind: str, soft_cap: float
) -> None:
    heads, kv_heads = 4, 2
    keys, values = (
        ggml.quantize(kind, random.standard_normal((kv_heads * KV, HEAD))) for _ in range(2)
    )
    queries = random.standard_normal((heads, ROWS, HEAD)).astype(np.float32)
    seen = masks(KV, 200)

    def compute(begin: int, end: int) -> Matrix:
        inputs = [
            ("F32", (HEAD, end - begin, heads), queries[:, begin:end]),
            (kind, (HEAD, KV, kv_heads), keys),
            (kind, (HEAD, KV, kv_heads), values),
            ("F16", (KV, end - begin), seen[begin:end]),
        ]
        attention = operation(ggml, "flash_attn_ext", HEAD**-0.5, 0.0, soft_cap)
        return ggml.compute("specops", attention, inputs)

    assert not list(changed_rows(compute))
    got = compute(0, ROWS).reshape(ROWS, heads, HEAD)
    k, v = (
        ggml.numbers(kind, data, HEAD).astype(np.float64).reshape(kv_heads, KV, HEAD)
        for data in (keys, values)
    )
    for head in range(heads):
        own = head // (heads // kv_heads)
        scores = HEAD**-0.5 * queries[head] @ k[own].T
        if soft_cap:
            scores = soft_cap * np.tanh(scores / soft_cap)
        weights = np.exp(scores + seen - (scores + seen).max(1, keepdims=True))
        want = weights @ v[own] / weights.sum(1, keepdims=True)
        of_scores = 2 * HEAD * ROUNDING * HEAD**-0.5 * (np.abs(queries[head]) @ np.abs(k[own]).T)
        most = (2 * of_scores.max() + (KV + 16) * ROUNDING) * np.abs(v[own]).max()
        assert np.abs(got[:, head] - want).max() <= most


def test_cells_of_other_sequences_change_no_bit(ggml: Ggml, random: np.random.Generator) -> None:
    """The tokens of a sequence keep their order in the KV cache, and may lie apart."""
    keys, values = random.standard_normal((2, KV, HEAD)).astype(np.float16)
    query = random.standard_normal(HEAD)

    def attend(places: Matrix, width: int) -> Matrix:
        seen = np.full(width, -np.inf)
        seen[places] = 0
        cells = np.full((2, width, HEAD), 7.0, np.float16)
        cells[:, places] = keys, values
        inputs = [
            ("F32", (HEAD, 1, 1), query),
            *(("F16", (HEAD, width, 1), data) for data in cells),
            ("F16", (width, 1), seen),
        ]
        build = operation(ggml, "flash_attn_ext", HEAD**-0.5, 0.0, 0.0)
        return ggml.compute("specops", build, inputs)

    together = attend(np.arange(KV), KV)
    apart = attend(np.sort(random.permutation(3 * KV)[:KV]), 3 * KV)
    assert np.array_equal(together, apart)


@pytest.mark.parametrize("backend", ["specops", "CPU"])
@pytest.mark.parametrize("kind", ["F16", "F32"])
def test_softmax_gives_a_row_the_same_bits(
    ggml: Ggml, random: np.random.Generator, backend: str, kind: str
) -> None:
    scores, seen = random.standard_normal((ROWS, KV)), masks(KV, 200)

    def compute(begin: int, end: int) -> Matrix:
        shape = (KV, end - begin)
        inputs = [("F32", shape, scores[begin:end]), (kind, shape, seen[begin:end])]
        return ggml.compute(backend, operation(ggml, "soft_max_ext", 0.1, 0.0), inputs)

    assert not list(changed_rows(compute))


# Operations that stay ggml's own: name, parameters, and number of inputs of the same shape.
LEFT_TO_GGML = [
    ("rms_norm", (1e-6,), 1),
    ("norm", (1e-6,), 1),
    ("scale", (0.3,), 1),
    ("l2_norm", (1e-6,), 1),
    ("clamp", (-1.0, 1.0), 1),
    ("argsort", (1,), 1),
    *((name, (), 1) for name in ("sqr", "sqrt", "sum_rows", "cont")),
    *((name, (), 1) for name in ("silu", "gelu", "sigmoid", "tanh", "relu", "exp", "softplus")),
    *((name, (), 2) for name in ("add", "sub", "mul", "div")),
    ("geglu_split", (), 2),
    ("swiglu_split", (), 2),
]


@pytest.mark.parametrize(("name", "params", "count"), LEFT_TO_GGML)
@pytest.mark.parametrize("threads", [1, 2])
def test_operation_left_to_ggml_gives_a_row_the_same_bits(
    ggml: Ggml,
    random: np.random.Generator,
    name: str,
    params: tuple[float | int, ...],
    count: int,
    threads: int,
) -> None:
    rows = np.abs(random.standard_normal((count, ROWS, INPUTS)))  # for roots

    def compute(begin: int, end: int) -> Matrix:
        inputs = [("F32", (INPUTS, end - begin), data[begin:end]) for data in rows]
        return ggml.compute("CPU", operation(ggml, name, *params), inputs, threads=threads)

    assert not list(changed_rows(compute))


@pytest.mark.parametrize("mode", [0, 2])
def test_rope_of_ggml_gives_a_row_the_same_bits(
    ggml: Ggml, random: np.random.Generator, mode: int
) -> None:
    rows, positions = random.standard_normal((ROWS, 4, HEAD)), np.arange(100, 100 + ROWS)
    params = (HEAD, mode, 2048, 10000.0, 1.0, 0.0, 1.0, 32.0, 1.0)

    def compute(begin: int, end: int) -> Matrix:
        inputs = [
            ("F32", (HEAD, 4, end - begin), rows[begin:end]),
            ("I32", (end - begin,), positions[begin:end]),
        ]
        return ggml.compute("CPU", operation(ggml, "rope_ext", None, *params), inputs)

    assert not list(changed_rows(compute))


@pytest.mark.parametrize("kind", [*PACKED, "F16"])
def test_embedding_of_ggml_gives_a_row_the_same_bits(
    ggml: Ggml, random: np.random.Generator, kind: str
) -> None:
    table = ggml.quantize(kind, random.standard_normal((OUTPUTS, INPUTS)))
    ids = random.integers(0, OUTPUTS, ROWS)

    def compute(begin: int, end: int) -> Matrix:
        inputs = [(kind, (INPUTS, OUTPUTS), table), ("I32", (end - begin,), ids[begin:end])]
        return ggml.compute("CPU", operation(ggml, "get_rows"), inputs)

    assert not list(changed_rows(compute))


def test_import_refuses_a_library_that_is_not_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    missing = tmp_path / LIBRARY.name
    monkeypatch.setattr(integration, "_BUILT", missing)
    want = f"{missing} does not exist; build it with: make -C tools llamacpp"
    with pytest.raises(ImportError, match=re.escape(want)):
        integration.register()
