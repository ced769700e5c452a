# SPDX-License-Identifier: Apache-2.0
"""FlashInfer in this process, on the memory of our own cases: both are timed in one run, in turn.

It compiles its kernels at first use, which takes minutes. What does not run, cannot be captured
or computes something else raises `Refused` with the reason, which the bench writes down.
"""

import inspect
from collections.abc import Callable
from functools import cache as cached
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

Call = Callable[[], object]

# Of the root mean square of a result in bf16. Rounded weights and partial results make less than
# half of it; one row that sees a few tokens too many makes several times as much.
MOST_DIFFERENCE = 0.01


class Refused(Exception):
    """Why a path of a peer is not among the figures."""


@cached
def module() -> ModuleType:
    """The package.

    Raises:
        Refused: it is not installed, or fails on a need of its own.
    """
    try:
        import flashinfer
    except Exception as error:
        raise Refused(f"no FlashInfer: {_in_words(error)}") from None
    return flashinfer  # type: ignore[no-any-return]


def named(path: str) -> Any:
    """A function or class of the package by its dotted name; Refused if this version lacks it."""
    found: Any = module()
    for part in path.split("."):
        found = getattr(found, part, None)
        if found is None:
            raise Refused(f"this FlashInfer has no {path}")
    return found


def given(function: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """Those arguments that this version's function takes."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return arguments
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in arguments.items() if name in names}


def made(build: Callable[[], list[Call]]) -> list[Call]:
    """The calls that `build` plans, whatever it fails on told as Refused."""
    try:
        return build()
    except Refused:
        raise
    except Exception as error:
        raise Refused(_in_words(error)) from None


def working(calls: list[Call], result: Tensor | None = None, wanted: Tensor | None = None) -> None:
    """Runs the first call (kernels are compiled then) and captures it.

    Args:
        calls: what would be timed.
        result: where the first call leaves its result; None: nothing to compare.
        wanted: what it should be like.

    Raises:
        Refused: it fails, cannot be captured, or the result is another.
    """
    try:
        calls[0]()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                calls[0]()
    except Exception as error:
        raise Refused(_in_words(error)) from None
    if result is None or wanted is None:
        return
    difference = (result.double() - wanted.double()).square().mean().sqrt()
    share = float(difference / wanted.double().square().mean().sqrt())
    if not share <= MOST_DIFFERENCE:
        raise Refused(f"its result differs from ours by {share:.3f} of the root mean square")


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"
