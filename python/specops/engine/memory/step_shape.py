# SPDX-License-Identifier: Apache-2.0
"""The sizes of a step, and the few that steps are rounded up to where they are captured."""

from collections.abc import Hashable
from typing import NamedTuple


class TreeShape(NamedTuple):
    """Sizes of the trees of drafts of a step."""

    chains: int  # of trees; a request without one is a chain
    pages: int  # entries of the chains' page lists
    copies: int  # tokens that chains have on pages of their own


class StepShape(NamedTuple):
    """All sizes of a step. What is not a size of it is data and may differ in every step."""

    batch: int  # requests
    rows: int
    outputs: int  # rows with logits
    width: int  # most drafts a request verifies
    pages: int  # entries of the page lists
    logprobs: int = -1  # -1: none; otherwise the alternatives beside each emitted token
    proposals: int = 0  # most drafts that a request may be given for the next step
    features: int = 0  # `Feature`, of its requests
    prefix_levels: int = 0  # of groups that share prefixes
    trees: TreeShape | None = None  # None: all drafts are chains
    masks: int = 0  # of tokens, where an output is constrained
    # The drafters that have work behind the target, in their order, each with what it says of it.
    drafters: tuple[tuple[str, Hashable], ...] = ()
    reports_stages: bool = False  # how many drafts there are behind each of them


def rounded(shape: StepShape, most: StepShape) -> StepShape:
    """Rounds a step that only decodes and verifies up to one of a few shapes.

    Rows have a ladder of their own, and the rung of a full verification of every request is always
    on it: so every number of drafts has graphs of its size, whatever its relation to the ladder.

    Args:
        shape: of the step; all its rows have logits.
        most: the largest step there is.
    """
    batch = min(rung(shape.batch), most.batch)
    rows = min(rung(shape.rows, finest=16), batch * (1 + shape.width), most.rows)
    pages = page_capacity(shape.pages, most.pages)
    if shape.trees is not None:
        chains, entries, copies = map(rung, shape.trees)
        shape = shape._replace(trees=TreeShape(chains, max(entries, 64), max(copies, 64)))
    return shape._replace(batch=batch, rows=rows, outputs=rows, pages=pages)


def page_capacity(pages: int, most: int) -> int:
    """Rounds a number of pages up, so that it changes rarely while requests grow."""
    return min(max(rung(pages), 64), max(most, pages))


def rung(value: int, finest: int = 1) -> int:
    """The next power of two, or above `finest` the next of 8 steps between powers of two."""
    power = 1 << (value - 1).bit_length() if value > 1 else 1
    if value <= finest or finest == 1:
        return power
    step = max(power // 8, 8)
    return -(-value // step) * step
