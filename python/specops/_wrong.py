# SPDX-License-Identifier: Apache-2.0
"""How wrappers look at their arguments before the op has checked them."""

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def unless_wrong(look: Callable[[], T]) -> T | None:
    """Returns `look()`, or None where arguments are of kinds that it cannot work with.

    The op that is called next names the argument and says what it must be. `look` makes nothing
    that is as large as the caller's tensors: where memory runs out no argument is wrong, and
    torch's own error must come out.
    """
    try:
        return look()
    except Exception:
        return None


def empty(look: Callable[[], tuple[Sequence[int], torch.dtype | None, Tensor]]) -> Any:
    """Makes a tensor of the shape and dtype that `look` reads off arguments, beside a third one.

    dtype None: that of the third one. Returns None where it cannot read them, as in
    `unless_wrong`: then the op raises.
    """
    try:
        shape, dtype, beside = look()
        make = beside.new_empty
    except Exception:
        return None
    if beside.is_nested:
        return None
    # One by one: torch reads a tuple more slowly. No output of an op is a scalar.
    return make(*shape, dtype=dtype) if shape else None


def describe(value: object) -> str:
    """What an error says it has got, in the ops' own words."""
    if isinstance(value, Tensor) and not value.is_nested:
        return f"{describe(value.dtype)} {list(value.shape)}"
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if value is None or isinstance(value, int | float | str):
        text = unless_wrong(lambda: repr(value))  # of too many digits Python has none
        if text is not None:
            return text if len(text) <= 80 else text[:80] + "..."
    return type(value).__name__


def check_int(op: str, name: str, value: Any, least: int = 0) -> None:
    """Checks a size that the wrapper makes tensors of, in the ops' own words.

    Raises:
        ValueError: it is no int32 of at least `least`.
    """
    number = value
    if not isinstance(value, int) and not hasattr(value, "__dlpack__"):  # such as numpy's
        number = unless_wrong(lambda: operator.index(value))
    is_int = isinstance(number, int) and not isinstance(number, bool)
    if not is_int or not least <= number < 2**31:
        raise ValueError(
            f"{op}: {name} must be an int32 of at least {least}, got {describe(value)}"
        )


def check_kind(op: str, name: str, value: object, kind: type, source: str = "") -> None:
    """Checks an argument whose fields the wrapper reads.

    Raises:
        ValueError: it is no `kind`.
    """
    if not isinstance(value, kind):
        raise ValueError(f"{op}: {name} must be a {kind.__name__}{source}, got {describe(value)}")
