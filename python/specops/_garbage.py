# SPDX-License-Identifier: Apache-2.0
"""Pause of Python's garbage collection while many objects are created."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Pause garbage collection in all threads.

    A start creates about a million objects and hardly any garbage. Python would visit all of them
    again and again, which takes a fifth of an import's time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
