# SPDX-License-Identifier: Apache-2.0
"""Helpers that let wrappers read their arguments before the op has checked them."""

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def unless_wrong(look: Callable[[], T]) -> T | None:
    """Return `look()`, or None if it raises because an argument has the wrong kind.

    The op that is called next reports the wrong argument and what it must be. `look` must not
    allocate anything as large as the caller's tensors: running out of memory is no wrong argument,
    and torch's own error must reach the caller.
    """
    try:
        return look()
    except Exception:
        return None


def empty(look: Callable[[], tuple[Sequence[int], torch.dtype | None, Tensor]]) -> Any:
    """Allocate a tensor for an op's output, with a shape and dtype read from its arguments.

    `look` returns a shape, a dtype (None: that of the third value) and a tensor on the device to
    use. Return None if `look` raises, as in `unless_wrong`: the op then reports the bad argument.
    """
    try:
        shape, dtype, beside = look()
        make = beside.new_empty
    except Exception:
        return None
    if beside.is_nested:
        return None
    # Sizes are passed one by one: torch reads a tuple more slowly. No op returns a scalar.
    return make(*shape, dtype=dtype) if shape else None


def describe(value: object) -> str:
    """Return the text for "got ..." in an error message, in the form that the ops use."""
    if isinstance(value, Tensor) and not value.is_nested:
        return f"{describe(value.dtype)} {list(value.shape)}"
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if value is None or isinstance(value, int | float | str):
        text = unless_wrong(lambda: repr(value))  # fails for ints above Python's digit limit
        if text is not None:
            return text if len(text) <= 80 else text[:80] + "..."
    return type(value).__name__


def check_int(op: str, name: str, value: Any, least: int = 0) -> None:
    """Check a size before the wrapper allocates a tensor with it.

    Raises:
        ValueError: `value` is no int32 of at least `least`; worded like the ops' own errors.
    """
    number = value
    if not isinstance(value, int) and not hasattr(value, "__dlpack__"):  # such as numpy scalars
        number = unless_wrong(lambda: operator.index(value))
    is_int = isinstance(number, int) and not isinstance(number, bool)
    if not is_int or not least <= number < 2**31:
        raise ValueError(
            f"{op}: {name} must be an int32 of at least {least}, got {describe(value)}"
        )


def check_kind(op: str, name: str, value: object, kind: type, source: str = "") -> None:
    """Check the type of an argument before the wrapper reads its fields.

    Raises:
        ValueError: `value` is no `kind`.
    """
    if not isinstance(value, kind):
        raise ValueError(f"{op}: {name} must be a {kind.__name__}{source}, got {describe(value)}")
