# SPDX-License-Identifier: Apache-2.0
"""Merging of drafts with tokens that a grammar forces.

The target chooses a forced token with probability one, whatever was drafted there. So replacing a
draft by it does not change the output distribution, as long as verification does not use the
distribution that the draft was drawn from.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from specops.engine.structured.matching import GrammarState


@dataclass(frozen=True, slots=True)
class CompletedDrafts:
    """Drafts as a tree; in a chain, each draft's parent is the draft before it.

    Attributes:
        token_ids: token of each draft.
        parents: index of each draft's parent, which precedes it; -1: the last token.
        sources: index of each draft among the original drafts; -1: a forced token.
    """

    token_ids: list[int]
    parents: list[int]
    sources: list[int]


def complete(
    state: GrammarState, token_ids: Sequence[int], parents: Sequence[int] | None, limit: int
) -> CompletedDrafts | None:
    """Put tokens that are forced next before the drafts, and tokens forced later after them.

    Args:
        state: grammar state of the request; unchanged on return.
        token_ids: the drafts.
        parents: index of each draft's parent, or -1; None: the drafts are a chain.
        limit: most drafts of the result.

    Returns:
        The drafts with the forced tokens; None if nothing changes.
    """
    if limit <= 0:
        return None
    forced = state.forced()
    is_chain = parents is None
    if parents is None:
        parents = range(-1, len(token_ids) - 1)
    drafts = CompletedDrafts(list(token_ids), list(parents), list(range(len(token_ids))))
    node, matched = _follow(drafts, forced)
    if forced and (not is_chain or matched < len(forced)):
        drafts = _behind_forced(drafts, forced, node if matched == len(forced) else None, limit)
    if is_chain and (not forced or matched == len(forced)):
        drafts = _continued(state, drafts, limit)
    is_same = drafts.token_ids == list(token_ids) and drafts.parents == list(parents)
    return None if is_same else drafts


def _follow(drafts: CompletedDrafts, forced: Sequence[int]) -> tuple[int, int]:
    """Follow the forced tokens down the tree; return the last node and the number of matches."""
    node = -1
    for count, token in enumerate(forced):
        below = (
            child
            for child in range(node + 1, len(drafts.token_ids))
            if drafts.parents[child] == node and drafts.token_ids[child] == token
        )
        found = next(below, None)
        if found is None:
            return node, count
        node = found
    return node, len(forced)


def _behind_forced(
    drafts: CompletedDrafts, forced: Sequence[int], node: int | None, limit: int
) -> CompletedDrafts:
    """Return the forced tokens as a chain, followed by the subtree below `node`, where they end."""
    length = min(len(forced), limit)
    made = CompletedDrafts(list(forced[:length]), list(range(-1, length - 1)), [-1] * length)
    if node is None:
        return made
    at = node  # draft that equals the forced token
    for place in range(len(forced) - 1, -1, -1):
        if place < length:
            made.sources[place] = at
        at = drafts.parents[at]
    place_of = {node: len(forced) - 1}
    for child in range(node + 1, len(drafts.token_ids)):
        if drafts.parents[child] in place_of and len(made.token_ids) < limit:
            place_of[child] = len(made.token_ids)
            made.parents.append(place_of[drafts.parents[child]])
            made.token_ids.append(drafts.token_ids[child])
            made.sources.append(drafts.sources[child])
    return made


def _continued(state: GrammarState, drafts: CompletedDrafts, limit: int) -> CompletedDrafts:
    """Return the fitting part of a chain, followed by the tokens that are forced after it."""
    count = 0
    while count < len(drafts.token_ids) and state.advance(drafts.token_ids[count]):
        count += 1
    forced = state.forced()[: limit - count] if count < limit else []
    state.go_back(count)
    if not forced:
        return drafts
    length = count + len(forced)
    return CompletedDrafts(
        drafts.token_ids[:count] + forced,
        list(range(-1, length - 1)),
        drafts.sources[:count] + [-1] * len(forced),
    )
