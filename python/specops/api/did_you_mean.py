# SPDX-License-Identifier: Apache-2.0
"""Suggestions for misspelled names in error messages."""

import difflib
from collections.abc import Iterable

_MAX_NAME = 64  # characters; comparing a longer name would take long


def did_you_mean(name: str, known: Iterable[str], cutoff: float) -> str:
    """Return "; did you mean NAME?" with the known name nearest to `name`; "" if none is near.

    Args:
        name: the misspelled name.
        known: names that exist.
        cutoff: least similarity, from 0 to 1.
    """
    if len(name) > _MAX_NAME:
        return ""
    nearest = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=cutoff)
    return f"; did you mean {nearest[0]}?" if nearest else ""
