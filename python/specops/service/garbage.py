# SPDX-License-Identifier: Apache-2.0
"""Thresholds of Python's garbage collection: raised, since a collection pauses every request.

A request's objects are freed when it ends: the code makes no reference cycles, which a test checks.
So a collection normally finds nothing; it only bounds the memory of unknown cycles.
"""

import gc

# Arguments of `gc.set_threshold`: number of new objects after which Python collects the youngest
# generation, and numbers of collections after which it collects the next older ones. Five hundred
# connections with their requests have fewer objects. With Python's defaults (700, 10, 10), or with
# (5000, 20, 50), all requests paused for up to 90 ms at a time while 256 streams came and went.
_THRESHOLDS = 50_000, 20, 50


def raise_gc_thresholds() -> None:
    """Exempt all present objects from garbage collection and raise the thresholds."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
