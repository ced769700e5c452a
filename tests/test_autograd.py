# SPDX-License-Identifier: Apache-2.0
"""Ops with gradients: the value has the op's bits, the gradient is that of PyTorch's formula."""

import json
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import specops.attention
import torch
from specops import autograd, dense
from specops.minimal import BUNDLED, MinimalEngine, Request
from torch import Tensor
from torch.nn import functional

DOCS = Path(__file__).parent.parent / "docs"
PAGE, EXAMPLE = DOCS / "training.md", DOCS / "examples" / "grpo.py"
LENS = [5, 1, 19]  # rows of each sequence; the last one needs two pages
DTYPES = [torch.float32, torch.bfloat16]


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_()


def gradients(value: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """Return the gradients of a weighted sum of all elements; the weights are fixed."""
    weights = torch.randn(value.shape, generator=torch.Generator().manual_seed(1))
    return list(torch.autograd.grad((value.float() * weights).sum(), inputs))


def rotated(x: Tensor, cos_sin: Tensor) -> Tensor:
    positions = torch.cat([torch.arange(n) for n in LENS])
    cos, sin = cos_sin[positions, None].chunk(2, -1)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def attention_in_fp32(q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor) -> Tensor:
    """Compute attention with explicit masks over all sequences at once."""
    sequence = torch.repeat_interleave(torch.arange(len(LENS)), torch.tensor(LENS))
    seen = (sequence[:, None] == sequence) & torch.ones(len(q), len(q)).tril().bool()
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (rotated(k, cos_sin), v))
    scores = torch.einsum("ihd,jhd->hij", rotated(q, cos_sin), k) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hij,jhd->ihd", weights, v)


def case_of(name: str, dtype: torch.dtype) -> tuple[Callable[..., Any], Any, Any, list[Tensor]]:
    """Return the function, the op and an independent formula of a case, and their inputs."""
    torch.manual_seed(0)
    n = sum(LENS)
    if name == "embedding":
        ids = torch.randint(0, 9, (n,), dtype=torch.int32)
        return (
            lambda w: autograd.embedding(ids, w),
            lambda w: dense.embedding(ids, w),
            lambda w: w[ids.long()],
            [randn(9, 32, dtype=dtype)],
        )
    if name == "rms_norm":
        return (
            lambda x, w: autograd.rms_norm(x, w, 1e-6),
            lambda x, w: dense.rms_norm(x, w, 1e-6),
            lambda x, w: functional.rms_norm(x, w.shape, w, 1e-6),
            [randn(n, 32, dtype=dtype), randn(32, dtype=dtype)],
        )
    if name.startswith("linear"):
        activation = "silu" if name == "linear-silu" else None

        def formula(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
            y = x @ w.T + b
            return y if activation is None else functional.silu(y[:, :16]) * y[:, 16:]

        return (
            lambda x, w, b: autograd.linear(x, w, b, activation=activation),
            lambda x, w, b: dense.linear(x, dense.pack_weight(w, activation=activation), b),
            formula,
            [randn(n, 64, dtype=dtype), randn(32, 64, dtype=dtype), randn(32, dtype=dtype)],
        )
    cos_sin = specops.attention.rope_cos_sin(32, 64, 10_000.0)
    return (
        lambda q, k, v: autograd.attention(q, k, v, LENS, cos_sin),
        None,
        lambda q, k, v: attention_in_fp32(q, k, v, cos_sin),
        [randn(n, heads, 64, dtype=dtype) for heads in (4, 2, 2)],
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["embedding", "rms_norm", "linear", "linear-silu", "attention"])
def test_values_are_the_ops_and_gradients_the_formulas(name: str, dtype: torch.dtype) -> None:
    function, op, formula, inputs = case_of(name, dtype)
    value = function(*inputs)
    if op is not None:
        assert torch.equal(value, op(*(x.detach() for x in inputs)))
        with pytest.raises(ValueError, match="requires_grad=True"):
            op(*inputs)
    wide = [x.detach().float().requires_grad_() for x in inputs]
    wanted = formula(*wide)
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(value.float(), wanted, rtol=tolerance, atol=tolerance)
    for found, right in zip(gradients(value, inputs), gradients(wanted, wide), strict=True):
        assert found.dtype == dtype
        largest = right.abs().max()
        torch.testing.assert_close(
            found.float() / largest, right / largest, rtol=tolerance, atol=tolerance
        )


def test_token_logprobs() -> None:
    torch.manual_seed(0)
    logits = randn(sum(LENS), 50)
    ids = torch.randint(0, 50, (sum(LENS),), dtype=torch.int32)
    value = autograd.token_logprobs(logits, ids, LENS)

    wide = logits.detach().clone().requires_grad_()
    logprobs = wide.log_softmax(-1)
    wanted, start = [], 0
    for length in LENS:
        wanted.append(torch.zeros(1))
        rows = torch.arange(start, start + length - 1)
        wanted.append(logprobs[rows, ids[rows + 1].long()])
        start += length
    torch.testing.assert_close(value, torch.cat(wanted))
    torch.testing.assert_close(
        gradients(value, [logits]), gradients(torch.cat(wanted), [wide]), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("lens", [[], [3, 0], [2, 2]], ids=str)
def test_lens_must_divide_the_rows(lens: list[int]) -> None:
    with pytest.raises(ValueError, match=r"token_logprobs: lens must be .* 3 rows, got"):
        autograd.token_logprobs(torch.zeros(3, 8), torch.zeros(3).int(), lens)
    with pytest.raises(ValueError, match=r"attention: lens must be .* 3 rows, got"):
        autograd.attention(*torch.zeros(3, 3, 2, 16), lens, torch.zeros(8, 16))


def test_a_trainer_computes_the_bits_of_the_rollout() -> None:
    policy = runpy.run_path(str(EXAMPLE))["Policy"](BUNDLED)
    requests = [Request([*range(40, 40 + 7 * i)], 24, temperature=1.0, seed=i) for i in range(1, 5)]
    list(MinimalEngine(method="mtp", num_drafts=3).generate(requests))
    logprobs = policy([request.prompt + request.token_ids for request in requests])
    start = 0
    for request in requests:
        start += len(request.prompt)
        end = start + len(request.token_ids)
        assert logprobs[start:end].tolist() == request.logprobs
        start = end
    logprobs.sum().backward()
    assert all(weight.grad.abs().max() > 0 for weight in policy.weights)


def test_the_page() -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    exec(code, {})


@pytest.mark.slow
def test_the_example_trains_without_a_gap(tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLE, "--steps", "2", "--out", tmp_path / "curve.json"]
    subprocess.run(command, check=True)
    curve = json.loads((tmp_path / "curve.json").read_text())
    assert [step["gap"] for step in curve] == [0.0, 0.0]
