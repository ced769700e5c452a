# SPDX-License-Identifier: Apache-2.0
"""FlashInfer in this process, on the memory of our own cases: both are timed in turn in one run.

It compiles its kernels at first use, which takes minutes. A path that does not run, cannot be
captured or computes a different result raises `Refused` with the reason, which the benchmark
records.
"""

import inspect
from collections.abc import Callable
from functools import cache as cached
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

Call = Callable[[], object]

# Relative to the root mean square of a bf16 result. Rounded weights and partial results cause less
# than half of it; one row that sees a few tokens too many causes several times as much.
MOST_DIFFERENCE = 0.01


class Refused(Exception):
    """Error that says why a path of a peer is not among the figures."""


@cached
def module() -> ModuleType:
    """Return the package.

    Raises:
        Refused: it is not installed, or one of its dependencies fails.
    """
    try:
        import flashinfer
    except Exception as error:
        raise Refused(f"no FlashInfer: {_in_words(error)}") from None
    return flashinfer  # type: ignore[no-any-return]


def named(path: str) -> Any:
    """Return a function or class of the package by dotted name; Refused if it is missing."""
    found: Any = module()
    for part in path.split("."):
        found = getattr(found, part, None)
        if found is None:
            raise Refused(f"this FlashInfer has no {path}")
    return found


def given(function: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """Return the arguments that the function of the installed version accepts."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return arguments
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in arguments.items() if name in names}


def made(build: Callable[[], list[Call]]) -> list[Call]:
    """Return the calls that `build` plans; raise Refused for any error in it."""
    try:
        return build()
    except Refused:
        raise
    except Exception as error:
        raise Refused(_in_words(error)) from None


def working(calls: list[Call], result: Tensor | None = None, wanted: Tensor | None = None) -> None:
    """Run the first call (kernels are compiled then) and capture it.

    Args:
        calls: the calls to time.
        result: output of the first call; None if there is nothing to compare.
        wanted: expected output.

    Raises:
        Refused: it fails, cannot be captured, or the result differs.
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
