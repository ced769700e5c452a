# SPDX-License-Identifier: Apache-2.0
"""Bounds on the rounding error of a float32 computation, independent of the order of summation.

The error of one float32 run is no good bound: it would be too strict if a library happens to sum in
a good order, and too lax for a bad one. So a run of plain torch code is repeated with every result
rounded at random (Monte Carlo arithmetic, Parker 1997): each torch operation inside
`RandomRounding` gets an error as large as float32 causes in its natural worst order, one term after
the other, and the errors propagate through the rest of the code as real ones do. The bound is the
largest error of a few such runs against float64.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

UNIT = torch.finfo(torch.float32).eps / 2  # largest relative error of one rounding
RUNS = 4
MANY = 4096  # from this many results on, the largest error of one run is reliable
# Allowance for differences of exp and similar functions among libraries, on values around 1.
FLOOR = 1e-5

_EXACT = {
    "neg",
    "abs",
    "clone",
    "_to_copy",
    "copy_",
    "index",
    "gather",
    "index_select",
    "embedding",
    "cat",
    "stack",
    "where",
    "masked_fill",
    "fill_",
    "zero_",
    "max",
    "min",
    "amax",
    "amin",
    "arange",
    "zeros",
    "zeros_like",
    "new_zeros",
    "ones",
    "ones_like",
    "full",
    "full_like",
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_full",
    "scalar_tensor",
    "clamp",
    "index_put_",
    "relu",
    "sort",
    "topk",
    "tril",
    "triu",
    "constant_pad_nd",
    "repeat",
    "flip",
    "lift_fresh",
    "lift_fresh_copy",
    "_unsafe_view",
    "set_",
    "argmax",
    "roll",
    "maximum",
}


class RandomRounding(TorchDispatchMode):
    """Mode that adds to every float32 result of torch an error that float32 arithmetic may have."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not isinstance(result, Tensor) or result.dtype != torch.float32:
            assert "attention" not in name and "native_layer_norm" not in name, name
            return result
        assert "attention" not in name, f"{name} hides its sums: take the plain implementation"
        if func.is_view or name in _EXACT:
            return result
        return self._rounded(result, self._error(name, result, args, kwargs or {}))

    def _rounded(self, result: Tensor, error: Tensor) -> Tensor:
        """Add a random part of the error to the result; exact values and infinities stay."""
        generator = self.generators.get(result.device)
        if generator is None:
            generator = torch.Generator(result.device).manual_seed(self.seed)
            self.generators[result.device] = generator
        noise = torch.empty_like(result).uniform_(-1, 1, generator=generator).mul_(error)
        return result.add_(noise.nan_to_num_(0, 0, 0))

    def _error(self, name: str, result: Tensor, args: Any, kwargs: Any) -> Tensor:
        """Return the largest error of one result, given exact inputs."""
        if name in ("mm", "bmm"):
            return sum_error(result, args[0].square() @ args[1].square(), args[0].shape[-1])
        if name in ("addmm", "baddbmm"):
            bias, a, b = args
            squares = a.square() @ b.square() + bias.square()
            return sum_error(result, squares, a.shape[-1] + 1)
        if name in ("sum", "mean"):
            terms = args[0]
            length = max(terms.numel() // max(result.numel(), 1), 1)
            squares = func_like(name, terms.square(), args, kwargs)
            # A mean is a sum and a division by its length.
            return sum_error(result, squares / (length if name == "mean" else 1), length)
        if name in ("cumsum", "prod", "var", "norm", "linalg_vector_norm"):
            raise AssertionError(f"{name}: its error has no model yet")
        relative = 2 * UNIT * result.abs()  # one unit in the last place
        if name in ("_softmax", "_log_softmax", "logsumexp"):
            # A sum of positive terms, then a division or a logarithm.
            terms = args[0]
            softmax = "softmax" in name
            length = terms.shape[args[1]] if softmax else terms.numel() // max(result.numel(), 1)
            share = UNIT * (length / 3) ** 0.5
            return relative + share * (result.abs() if name == "_softmax" else 1)
        return relative


def func_like(name: str, terms: Tensor, args: Any, kwargs: Any) -> Tensor:
    """Apply the same reduction to other terms."""
    function: Callable[..., Tensor] = getattr(torch, name)
    return function(terms, *args[1:], **kwargs)


def sum_error(total: Tensor, squares: Tensor, length: int) -> Tensor:
    """Return the error of adding `length` terms one by one; `squares` is the sum of their squares.

    Every addition rounds the sum so far, s_k: random signs make the total error UNIT * sqrt(sum of
    s_k^2). In a random order, s_k is k/n of the total with a spread of at most sqrt(k) terms;
    summed over k, that is n/3 of the total's square and n/2 of the squares of the terms.
    """
    return UNIT * (length * (total.square() / 3 + squares / 2)).sqrt()


def rounding_errors(op: Callable[[], Sequence[Tensor]], truth: Sequence[Tensor]) -> list[float]:
    """Return the largest error of each result of `op()`, by torch's and by random rounding."""
    runs = [op()]
    for seed in range(RUNS if min(one.numel() for one in truth) < MANY else 1):
        with RandomRounding(seed):
            runs.append(op())
    errors = [[distance(*pair) for pair in zip(run, truth, strict=True)] for run in runs]
    return [max(of_runs) for of_runs in zip(*errors, strict=True)]


def distance(got: Tensor, truth: Tensor) -> float:
    """Return the largest difference of two tensors; equal infinities count as equal."""
    if got.numel() == 0:
        return 0.0
    got, truth = got.double(), truth.double()
    return torch.where(got == truth, 0.0, got - truth).abs().max().item()


def assert_error_at_most(error: float, rounding: float) -> None:
    """Assert that an error is at most twice what rounding alone causes."""
    allowed = 2 * rounding + FLOOR
    assert error <= allowed, f"max error {error:.3e}, allowed {allowed:.3e}"
