# SPDX-License-Identifier: Apache-2.0
"""Pause of Python's garbage collection while many objects are created."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Pause garbage collection, in all threads.

    A start creates millions of objects and hardly any garbage. Python would visit all objects again
    and again, which takes as long as creating them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
