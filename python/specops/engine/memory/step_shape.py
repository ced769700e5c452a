# SPDX-License-Identifier: Apache-2.0
"""Shapes of steps, and the buckets that shapes are rounded up to if steps are captured."""

from collections.abc import Hashable
from typing import NamedTuple


class StepShape(NamedTuple):
    """All sizes of a step. Everything else is data, which differs between steps of one shape."""

    batch: int  # number of requests
    rows: int
    outputs: int  # number of rows with logits
    width: int  # maximum number of drafts that a request verifies
    pages: int  # number of entries of all page lists
    logprobs: int = -1  # number of alternatives for each emitted token; -1: no log-probabilities
    proposals: int = 0  # maximum drafts that a request may get for the next step
    features: int = 0  # `Feature` bits of its requests
    prefix_levels: int = 0  # number of levels of groups that share prefixes
    masks: int = 0  # number of token masks of constrained outputs
    # Names of the drafters that run on the device after the target, with the key from `plan`.
    drafters: tuple[tuple[str, Hashable], ...] = ()
    reports_stages: bool = False  # whether the number of drafts after each drafter is reported


def rounded(shape: StepShape, most: StepShape) -> StepShape:
    """Return the bucket of a step that only decodes and verifies.

    Rows are rounded up to at most the number of rows with which all requests of the bucket verify
    all their drafts. So such a step has no padding rows, for any number of drafts.

    Args:
        shape: shape of the step; all its rows have logits.
        most: shape of the largest step.
    """
    batch = min(bucket(shape.batch), most.batch)
    rows = min(bucket(shape.rows, finest=16), batch * (1 + shape.width), most.rows)
    pages = page_capacity(shape.pages, most.pages)
    return shape._replace(batch=batch, rows=rows, outputs=rows, pages=pages)


def page_capacity(pages: int, most: int) -> int:
    """Round a number of pages up to a bucket that changes rarely while requests grow."""
    return min(max(bucket(pages), 64), max(most, pages))


def bucket(value: int, finest: int = 1) -> int:
    """Round up to a power of two or, above `finest` > 1, to a multiple of 1/8 of that power."""
    power = 1 << (value - 1).bit_length() if value > 1 else 1
    if value <= finest or finest == 1:
        return power
    step = max(power // 8, 8)
    return -(-value // step) * step
