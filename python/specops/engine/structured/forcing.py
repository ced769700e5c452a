# SPDX-License-Identifier: Apache-2.0
"""Drafts and the tokens that a grammar forces, put together.

A forced token is certain: the target chooses it with probability one, whatever was drafted there.
So putting it in the place of a draft changes no law, as long as nobody asks what the draft was
drawn from.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from specops.engine.structured.matching import GrammarState


@dataclass(frozen=True, slots=True)
class CompletedDrafts:
    """Drafts as a tree; a chain is one whose parents are each the one before.

    Attributes:
        token_ids: of each draft.
        parents: of each, one before it, or -1: the last token.
        sources: which of the drafts before it each is; -1: it is forced.
    """

    token_ids: list[int]
    parents: list[int]
    sources: list[int]


def complete(
    state: GrammarState, token_ids: Sequence[int], parents: Sequence[int] | None, limit: int
) -> CompletedDrafts | None:
    """Puts the tokens that are forced next in front of drafts, and those forced later behind.

    Args:
        state: where the request stands; as it was, afterwards.
        token_ids: the drafts.
        parents: of each, one before it, or -1; None: they are a chain.
        limit: most drafts there may be.

    Returns:
        The drafts with the forced tokens; None where they stay as they are.
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
    """Goes down along the forced tokens: the node that is reached, and how many of them it took."""
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
    """The forced tokens as a chain, and behind them what hangs on `node`, where they end."""
    length = min(len(forced), limit)
    made = CompletedDrafts(list(forced[:length]), list(range(-1, length - 1)), [-1] * length)
    if node is None:
        return made
    at = node  # of the drafts that the forced tokens repeat
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
    """A chain, and what is forced behind the part of it that fits, in the place of the rest."""
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
