# SPDX-License-Identifier: Apache-2.0
"""When Python looks for garbage: seldom, for everybody waits meanwhile.

A request's objects go when it ends: nothing here makes circles of references, and a test holds
that. So Python's search finds nothing, and only bounds what an unknown circle could cost.
"""

import gc

# Python looks among what is new after so many objects more than there were, and among older ones
# after so many such looks. Five hundred connections with their requests are fewer. With its own
# values (700, 10, 10), or with (5000, 20, 50), everybody waited for up to 90 ms at a time beside
# 256 streams that came and went.
_THRESHOLDS = 50_000, 20, 50


def search_seldom() -> None:
    """Sets what there is by now aside for good, and the thresholds of the searches from now on."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
