# SPDX-License-Identifier: Apache-2.0
"""Trees of drafts on the host: how chains make one, and how many chains one is.

Nodes are verified in preorder (`batching.preorder`). Then a tree is a few chains, one behind the
other (`batching.tree_chains`), and its first nodes are a chain as well.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

# The target agrees with what a drafter holds likeliest more often than that says. Of powers 1 to 3
# the last brought most on the bundled model: 1 to 3 % more tokens a step than the first.
_SHARPNESS = 3.0


class DraftTree(NamedTuple):
    """Drafts, the likeliest first."""

    token_ids: list[int]
    parents: list[int]  # of each, the place of the one that it hangs on, or -1
    chances: list[float]  # that each is right when those it hangs on are


# Of the likeliest tokens of each draft with their chances, and the most nodes.
TreeMaker = Callable[[Sequence[Sequence[tuple[int, float]]], int], DraftTree]


def join_chains(
    first: Sequence[int], second: Sequence[int], room: int, chance: float, second_chance: float
) -> DraftTree:
    """Makes a tree of two chains: of what they have in common once, of both where they disagree.

    Args:
        first: tokens of a chain.
        second: of another, which is not as good.
        room: most nodes; kept are those with the highest chance that all up to them are right.
        chance: that a token is right when those before it are.
        second_chance: that the second chain's token is, where they disagree.
    """
    shared = 0
    while shared < min(len(first), len(second)) and first[shared] == second[shared]:
        shared += 1
    branch = second_chance if shared < len(first) else chance
    # (minus the chance of the path, chain, depth, own chance): sorted, parents precede.
    nodes = [(-(chance ** (depth + 1)), 0, depth, chance) for depth in range(len(first))]
    for depth in range(shared, len(second)):
        own = branch if depth == shared else chance
        nodes.append((-(chance**depth) * branch, 1, depth, own))
    tokens: list[int] = []
    parents: list[int] = []
    last = [-1, -1]  # of each chain's nodes so far
    kept = sorted(nodes)[:room]
    for _, chain, depth, _ in kept:
        parents.append(last[chain])
        last[chain] = len(tokens)
        tokens.append((first, second)[chain][depth])
        if chain == 0 and depth < shared:
            last[1] = last[0]
    return DraftTree(tokens, parents, [own for *_, own in kept])


def branch_chain(
    chain: Sequence[tuple[int, float]], others: Sequence[tuple[int, float]], room: int
) -> DraftTree:
    """Makes a tree of a chain and a second token in each of its places.

    Args:
        chain: its tokens, with the chance that each is right when those before it are.
        others: the other tokens, with theirs.
        room: most nodes; kept are those with the highest chance that all up to them are right.
    """
    candidates: list[tuple[float, float, int, int]] = []  # path's chance, its own, depth, token
    path = 1.0
    for depth, ((token, chance), (other, its_chance)) in enumerate(zip(chain, others, strict=True)):
        first, second = _sharpened(chance, its_chance)
        candidates.append((path * second, its_chance, depth, other))
        path *= first
        candidates.append((path, chance, depth, token))
    # Chances fall along a path, and the chain's own come first: parents precede.
    order = sorted(range(len(candidates)), key=lambda i: (-candidates[i][0], 1 - i % 2))[:room]
    on_chain = {-1: -1}  # by depth, the places of the chain's drafts
    tokens: list[int] = []
    parents: list[int] = []
    for place, i in enumerate(order):
        _, _, depth, token = candidates[i]
        if i % 2:
            on_chain[depth] = place
        tokens.append(token)
        parents.append(on_chain[depth - 1])
    return DraftTree(tokens, parents, [candidates[i][1] for i in order])


def joint_tree(places: Sequence[Sequence[tuple[int, float]]], room: int) -> DraftTree:
    """Makes a tree of drafts that do not depend on each other: of the likeliest paths.

    Args:
        places: of each draft, its likeliest tokens with their chances, the likeliest first.
        room: most nodes; kept are those whose paths have the highest product of chances.

    Source: "DDTree", arXiv 2604.12989: a tree of the best prefixes of a block.
    """
    tokens: list[int] = []
    parents: list[int] = []
    chances: list[float] = []
    # (minus the path's chance, depth, node that it hangs on, rank among the tokens of its place)
    left = [(-places[0][0][1], 0, -1, 0)] if places else []
    while left and len(tokens) < room:
        path, depth, parent, rank = heapq.heappop(left)
        token, chance = places[depth][rank]
        node = len(tokens)
        tokens.append(token)
        parents.append(parent)
        chances.append(chance)
        if rank + 1 < len(places[depth]):
            above = path / chance if chance else 0.0
            entry = (above * places[depth][rank + 1][1], depth, parent, rank + 1)
            heapq.heappush(left, entry)
        if depth + 1 < len(places):
            heapq.heappush(left, (path * places[depth + 1][0][1], depth + 1, node, 0))
    return DraftTree(tokens, parents, chances)


Path = tuple[int, ...]


class Branch(NamedTuple):
    """A node of one of several trees that are merged."""

    path: Path  # the tokens that lead there, its own the last
    chance: float  # that all of these are right; at most that of what the path goes on from
    source: int  # whose it is


def paths_of(token_ids: Sequence[int], parents: Sequence[int], behind: Path = ()) -> list[Path]:
    """Returns the paths of a tree's nodes.

    Args:
        token_ids: of the nodes.
        parents: of each, the place of the one before it that it hangs on, or -1.
        behind: the path that nodes without a parent hang on.
    """
    paths: list[Path] = []
    for token, parent in zip(token_ids, parents, strict=True):
        paths.append((paths[parent] if parent >= 0 else behind) + (token,))
    return paths


def merge_trees(branches: Iterable[Branch], room: int) -> tuple[DraftTree, list[int]]:
    """Makes one tree of several, of the likeliest paths.

    Args:
        branches: the nodes of all. Equal paths become one node, which is its surest source's, the
            first's among equals. What a path goes on from is among the nodes of its tree.
        room: most nodes.

    Returns:
        The tree, and the source of each node.
    """
    surest: dict[Path, Branch] = {}
    for one in branches:
        if one.path not in surest or one.chance > surest[one.path].chance:
            surest[one.path] = one
    # Chances fall along a path, and among equals the shorter ones come first: parents precede.
    order = sorted(surest.values(), key=lambda one: (-one.chance, len(one.path), one.path))[:room]
    places = {one.path: place for place, one in enumerate(order)}
    whole = {one.path: one.chance for one in order}
    tree = DraftTree(
        [one.path[-1] for one in order],
        [places.get(one.path[:-1], -1) for one in order],
        [one.chance / (whole.get(one.path[:-1], 1.0) or 1.0) for one in order],
    )
    return tree, [one.source for one in order]


def static_tree(
    paths: Sequence[Sequence[int]], places: Sequence[Sequence[tuple[int, float]]], room: int
) -> DraftTree:
    """Makes a tree of given shape of drafts that do not depend on each other.

    Args:
        paths: of each node, the ranks of the tokens that lead there: a path [0, 2] is the third
            token of the second draft behind the first one of the first. What a path goes on from
            stands before it.
        places: of each draft, its likeliest tokens with their chances, the likeliest first.
        room: most nodes; kept are the first ones.

    Source: Cai et al. 2024, arXiv 2401.10774, section 2.3: static trees of candidates.
    """
    nodes: dict[tuple[int, ...], int] = {(): -1}
    tokens: list[int] = []
    parents: list[int] = []
    chances: list[float] = []
    for path in paths:
        if len(tokens) == room:
            break
        if len(path) > len(places):
            continue
        token, chance = places[len(path) - 1][path[-1]]
        parents.append(nodes[tuple(path[:-1])])
        nodes[tuple(path)] = len(tokens)
        tokens.append(token)
        chances.append(chance)
    return DraftTree(tokens, parents, chances)


def _sharpened(first: float, second: float) -> tuple[float, float]:
    """The chances of two tokens by which a tree's nodes are chosen, all others being one third."""
    others = max(1.0 - first - second, 0.0)
    weights = [chance**_SHARPNESS for chance in (first, second, others)]
    return weights[0] / sum(weights), weights[1] / sum(weights)


def num_chains(parents: Sequence[int]) -> int:
    """How many chains a tree in preorder is verified as."""
    return 1 + sum(parent != node - 1 for node, parent in enumerate(parents))


def first_chain(parents: Sequence[int]) -> int:
    """How many of its first nodes are a chain."""
    return next((node for node, parent in enumerate(parents) if parent != node - 1), len(parents))
