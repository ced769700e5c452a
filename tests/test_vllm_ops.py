# SPDX-License-Identifier: Apache-2.0
"""Torch ops that the plug-in for vLLM lets a model call, and their row identity."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from specops.integrations.vllm.op_check import OpCheck, look_at
from torch import Tensor, nn
from torch.nn import functional

ROUNDED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "abs": lambda x, y: x.abs(),
    "add": lambda x, y: x + y,
    "clamp": lambda x, y: x.clamp(-0.3, 0.7),
    "clamp_max": lambda x, y: x.clamp(max=0.7),
    "clamp_min": lambda x, y: x.clamp(min=-0.3),
    "div": lambda x, y: x / y,
    "div by a number": lambda x, y: x / 3,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "mul": lambda x, y: x * y,
    "mul in place": lambda x, y: x.clone().mul_(y),
    "mul by a number": lambda x, y: x * 0.1,
    "neg": lambda x, y: -x,
    "relu": lambda x, y: x.relu(),
    "rsub": lambda x, y: 1 - x,
    "sub": lambda x, y: x - y,
}
MOVES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "copies": lambda x, y: torch.cat([x[1:], y.t().reshape(x.shape)]).clone(),
    "types": lambda x, y: x.to(torch.bfloat16).type_as(y),
    "shapes": lambda x, y: x.unflatten(1, (2, 4)).chunk(2)[0].expand_as(y.view(3, 2, 4)[:2]),
    "masks": lambda x, y: torch.where(x > y, x, 0),
    "tokens": lambda x, y: x.argmax(-1) // 2,
    "nothing": lambda x, y: (x.shape, x.dtype),
}
COMPUTED: dict[str, tuple[Callable[[Tensor, Tensor], Any], list[str]]] = {
    "softplus": (lambda x, y: functional.softplus(x), ["aten::softplus"]),
    "silu": (lambda x, y: functional.silu(x) * y, ["aten::silu"]),
    "layer_norm": (lambda x, y: functional.layer_norm(x, x.shape[1:]), ["aten::native_layer_norm"]),
    "several": (lambda x, y: x.sigmoid().sum().exp() + y.sigmoid(), ["sigmoid", "sum", "exp"]),
    "two roundings": (lambda x, y: torch.add(x, y, alpha=0.3), ["aten::add"]),
    "a factor by position": (lambda x, y: torch.rsub(x, 2.0, 0.3), ["aten::rsub"]),
    "complex": (lambda x, y: torch.complex(x, y) * torch.complex(x, x), ["complex", "mul"]),
    "a number of one row for all": (lambda x, y: y * float(x[0, 0]), ["_local_scalar_dense"]),
    "a product": (lambda x, y: x @ y.t(), ["aten::mm"]),
    "compiled": (torch.compile(lambda x, y: x.sigmoid()), ["aten::sigmoid"]),
}


class Gate(nn.Module):
    """Layer that a model defines itself."""

    def __init__(self, function: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.function(x, y)


def found(function: Callable[[Tensor, Tensor], Any]) -> dict[type | None, list[str]]:
    """Return what the check notes for a layer."""
    x, y = torch.randn(2, 3, 8).unbind()
    gate = Gate(function)
    with torch.inference_mode(), OpCheck() as check:
        gate(x.clone(), y.clone())
    return check.found


@pytest.mark.parametrize("function", [*ROUNDED.values(), *MOVES.values()], ids=[*ROUNDED, *MOVES])
def test_ops_that_move_or_round_once_are_allowed(function: Callable[[Tensor, Tensor], Any]) -> None:
    assert found(function) == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 8, 100, 513])
@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.pairwise
def test_ops_that_round_once_are_row_identical(name: str, width: int, dtype: torch.dtype) -> None:
    """Each element of many rows has the bits that it has alone."""
    x, y = torch.randn(2, 9, width, generator=torch.Generator().manual_seed(1)).to(dtype).unbind()
    whole = ROUNDED[name](x, y)
    pairs = zip(x.flatten(), y.flatten(), strict=True)
    alone = torch.stack([ROUNDED[name](one.view(1), other.view(1))[0] for one, other in pairs])
    assert torch.equal(whole.flatten(), alone)


@pytest.mark.parametrize("name", COMPUTED)
def test_computing_ops_are_reported_with_their_layer(name: str) -> None:
    function, ops = COMPUTED[name]
    noted = found(function)
    assert list(noted) == [Gate]
    assert [got.endswith(op) for got, op in zip(noted[Gate], ops, strict=True)] == [True] * len(ops)


def test_function_outside_any_layer_is_reported() -> None:
    with OpCheck() as check:
        torch.randn(2).exp()
    assert check.found == {None: ["aten::randn", "aten::exp"]}


class Model(nn.Module):
    """Model that vLLM would compile, and whose head has a soft cap."""

    do_not_compile = False

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate(lambda x, y: x.sigmoid())
        self.was_compiled = False

    def forward(self, x: Tensor) -> Tensor:
        self.was_compiled |= not self.do_not_compile
        gated: Tensor = self.gate(x, x)
        return gated

    def compute_logits(self, x: Tensor) -> Tensor:
        return x.tanh()


def test_check_covers_the_model_but_not_its_drafter() -> None:
    model, sizes = Model(), []

    def dummy_run(num_tokens: int, is_profile: bool) -> tuple[Tensor, Tensor]:
        sizes.append(num_tokens)
        hidden = model(torch.ones(num_tokens, 3))
        hidden.erf()  # computed by a drafter
        return hidden, hidden[-1:]

    runner = SimpleNamespace(get_model=lambda: model, _dummy_run=dummy_run, max_num_tokens=2)
    check = OpCheck()
    look_at(runner, check)
    assert check.found == {Gate: ["aten::sigmoid"], Model: ["aten::tanh"]}
    assert sizes == [2] and not model.was_compiled
    assert not model.do_not_compile and "forward" not in vars(model)
