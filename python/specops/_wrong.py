# SPDX-License-Identifier: Apache-2.0
"""How wrappers look at their arguments before the op has checked them."""

from collections.abc import Callable
from typing import Any


def unless_wrong(make: Callable[[], Any]) -> Any:
    """Returns `make()`, or None where arguments are of kinds that it cannot work with.

    The op that is called next names the argument and says what it must be.
    """
    try:
        return make()
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return None
