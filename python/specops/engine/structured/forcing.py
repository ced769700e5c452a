# SPDX-License-Identifier: Apache-2.0
"""Merging of drafts with forced tokens, for which a grammar leaves no choice.

The target chooses a forced token with probability one, so drafting it instead of another token does
not change the output distribution. This requires that verification does not use the distribution
that the replaced draft was drawn from.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from specops.engine.structured.matching import GrammarState


@dataclass(frozen=True, slots=True)
class CompletedDrafts:
    """Drafts merged with forced tokens.

    Attributes:
        token_ids: the drafts.
        num_given: number of leading tokens that are original drafts; the others are forced.
    """

    token_ids: list[int]
    num_given: int


def complete(state: GrammarState, token_ids: Sequence[int], limit: int) -> CompletedDrafts | None:
    """Replace drafts that differ from the tokens forced next, or append tokens forced later.

    Args:
        state: grammar state of the request; unchanged on return.
        token_ids: the drafts.
        limit: maximum number of drafts of the result.

    Returns:
        The drafts with the forced tokens; None if nothing changes.
    """
    if limit <= 0:
        return None
    drafts, forced, count = list(token_ids), state.forced(), 0
    if drafts[: len(forced)] == forced:
        while count < len(drafts) and state.advance(drafts[count]):
            count += 1
        forced = state.forced() if count < limit else []
        state.go_back(count)
        if not forced:
            return None
    completed = drafts[:count] + forced[: limit - count]
    return None if completed == drafts else CompletedDrafts(completed, count)
