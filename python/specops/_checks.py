# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments that a wrapper reads before it calls the op, which checks the rest."""

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def try_or_none(read: Callable[[], T]) -> T | None:
    """Return `read()`, or None if it raises because an argument has the wrong type.

    The wrapper then calls the op, which reports the argument. `read` must not allocate large
    tensors, because torch's error for running out of memory must reach the caller.
    """
    try:
        return read()
    except Exception:
        return None


def empty(read: Callable[[], tuple[Sequence[int], torch.dtype | None, Tensor]]) -> Any:
    """Allocate a tensor for an op's output, with a shape and dtype read from its arguments.

    `read` returns a shape, a dtype and a tensor on the device to use, whose dtype replaces None.
    Return None if `read` raises, as in `try_or_none`: the op then reports the argument.
    """
    try:
        shape, dtype, like = read()
        make = like.new_empty
    except Exception:
        return None
    if like.is_nested:
        return None
    # Sizes are passed one by one: torch reads a tuple more slowly. No op returns a scalar.
    return make(*shape, dtype=dtype) if shape else None


def describe(value: object) -> str:
    """Return the text after "got" in an error message, in the form that the ops use."""
    if isinstance(value, Tensor) and not value.is_nested:
        return f"{describe(value.dtype)} {list(value.shape)}"
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if value is None or isinstance(value, int | float | str):
        text = try_or_none(lambda: repr(value))  # fails for ints above Python's digit limit
        if text is not None:
            return text if len(text) <= 80 else text[:80] + "..."
    return type(value).__name__


def check_int(op: str, name: str, value: Any, least: int = 0) -> None:
    """Check a size before the wrapper allocates a tensor with it.

    Raises:
        ValueError: `value` is not an int32 of at least `least`. Ops use the same sentence.
    """
    number = value
    if not isinstance(value, int) and not hasattr(value, "__dlpack__"):  # such as numpy scalars
        number = try_or_none(lambda: operator.index(value))
    is_int = isinstance(number, int) and not isinstance(number, bool)
    if not is_int or not least <= number < 2**31:
        raise ValueError(
            f"{op}: {name} must be an int32 of at least {least}, got {describe(value)}"
        )


def check_kind(op: str, name: str, value: object, kind: type, source: str = "") -> None:
    """Check the type of an argument before the wrapper reads its fields.

    Raises:
        ValueError: `value` is not a `kind`.
    """
    if not isinstance(value, kind):
        raise ValueError(f"{op}: {name} must be a {kind.__name__}{source}, got {describe(value)}")
