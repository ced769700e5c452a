# SPDX-License-Identifier: Apache-2.0
"""Draft trees on the host: making them from chains, and counting their chains.

Nodes are verified in preorder (`batching.preorder`). In this order a tree is a few chains, one
after the other (`batching.tree_chains`), and its first nodes form a chain as well.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

# The target agrees with a drafter's likeliest token more often than its probability says. Among
# powers 1 to 3, power 3 was best on the bundled model: 1 to 3 % more tokens per step than power 1.
_SHARPNESS = 3.0


class DraftTree(NamedTuple):
    """Draft tokens of a tree, the likeliest first."""

    token_ids: list[int]
    parents: list[int]  # index of each node's parent, or -1
    acceptance_probs: list[float]  # probability that each is accepted if its ancestors are


# Arguments: the likeliest (token, probability) pairs of each draft, and the node limit.
TreeMaker = Callable[[Sequence[Sequence[tuple[int, float]]], int], DraftTree]


def join_chains(
    first: Sequence[int], second: Sequence[int], room: int, chance: float, second_chance: float
) -> DraftTree:
    """Merge two chains into a tree that holds their common prefix once and then both branches.

    Args:
        first: tokens of the better chain.
        second: tokens of the other chain.
        room: node limit; the nodes with the highest probability of their whole path are kept.
        chance: probability that a token is accepted if those before it are.
        second_chance: the same for the second chain's token where the chains diverge.
    """
    shared = 0
    while shared < min(len(first), len(second)) and first[shared] == second[shared]:
        shared += 1
    branch = second_chance if shared < len(first) else chance
    # (-path probability, chain, depth, own probability): in sorted order parents come first.
    nodes = [(-(chance ** (depth + 1)), 0, depth, chance) for depth in range(len(first))]
    for depth in range(shared, len(second)):
        own = branch if depth == shared else chance
        nodes.append((-(chance**depth) * branch, 1, depth, own))
    tokens: list[int] = []
    parents: list[int] = []
    last = [-1, -1]  # last node of each chain so far
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
    """Make a tree from a chain and a second token at each of its positions.

    Args:
        chain: its tokens, each with the probability that it is accepted if those before it are.
        others: the second tokens with their probabilities.
        room: node limit; the nodes with the highest probability of their whole path are kept.
    """
    candidates: list[tuple[float, float, int, int]] = []  # (path prob., own prob., depth, token)
    path = 1.0
    for depth, ((token, chance), (other, its_chance)) in enumerate(zip(chain, others, strict=True)):
        first, second = _sharpened(chance, its_chance)
        candidates.append((path * second, its_chance, depth, other))
        path *= first
        candidates.append((path, chance, depth, token))
    # Probabilities fall along a path, and ties go to the chain's own tokens: parents come first.
    order = sorted(range(len(candidates)), key=lambda i: (-candidates[i][0], 1 - i % 2))[:room]
    on_chain = {-1: -1}  # by depth, node index of the chain's token
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
    """Make a tree of the likeliest paths from drafts that do not depend on each other.

    Args:
        places: for each draft, its likeliest tokens with their probabilities, in descending order.
        room: node limit; the nodes whose paths have the highest product of probabilities are kept.

    Source: "DDTree", arXiv 2604.12989: a tree of the best prefixes of a block.
    """
    tokens: list[int] = []
    parents: list[int] = []
    acceptance_probs: list[float] = []
    # (-path probability, depth, parent node, rank among the tokens of this depth)
    left = [(-places[0][0][1], 0, -1, 0)] if places else []
    while left and len(tokens) < room:
        path, depth, parent, rank = heapq.heappop(left)
        token, chance = places[depth][rank]
        node = len(tokens)
        tokens.append(token)
        parents.append(parent)
        acceptance_probs.append(chance)
        if rank + 1 < len(places[depth]):
            above = path / chance if chance else 0.0
            entry = (above * places[depth][rank + 1][1], depth, parent, rank + 1)
            heapq.heappush(left, entry)
        if depth + 1 < len(places):
            heapq.heappush(left, (path * places[depth + 1][0][1], depth + 1, node, 0))
    return DraftTree(tokens, parents, acceptance_probs)


Path = tuple[int, ...]


class Branch(NamedTuple):
    """A node of one of several trees that are merged."""

    path: Path  # tokens from the root to the node, its own token last
    chance: float  # probability that the whole path is accepted; at most its parent's
    source: int  # index of the drafter that proposed it


def paths_of(token_ids: Sequence[int], parents: Sequence[int], behind: Path = ()) -> list[Path]:
    """Return the paths of a tree's nodes.

    Args:
        token_ids: of the nodes.
        parents: index of each node's parent, which precedes it, or -1.
        behind: path that is prepended to nodes without a parent.
    """
    paths: list[Path] = []
    for token, parent in zip(token_ids, parents, strict=True):
        paths.append((paths[parent] if parent >= 0 else behind) + (token,))
    return paths


def merge_trees(branches: Iterable[Branch], room: int) -> tuple[DraftTree, list[int]]:
    """Merge several trees into one tree of the likeliest paths.

    Args:
        branches: the nodes of all trees. Equal paths become one node, which keeps the source with
            the highest probability, the first in a tie. The parent of each node must be included.
        room: node limit.

    Returns:
        The tree, and the source of each node.
    """
    surest: dict[Path, Branch] = {}
    for one in branches:
        if one.path not in surest or one.chance > surest[one.path].chance:
            surest[one.path] = one
    # Probabilities fall along a path, and ties go to the shorter path: parents come first.
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
    """Make a tree of a fixed shape from drafts that do not depend on each other.

    Args:
        paths: for each node, the ranks of the tokens on its path: path [0, 2] is the third token of
            the second draft, after the first token of the first draft. Each path's prefix must
            precede it in the list.
        places: for each draft, its likeliest tokens with their probabilities, in descending order.
        room: node limit; the first nodes are kept.

    Source: Cai et al. 2024, arXiv 2401.10774, section 2.3: static trees of candidates.
    """
    nodes: dict[tuple[int, ...], int] = {(): -1}
    tokens: list[int] = []
    parents: list[int] = []
    acceptance_probs: list[float] = []
    for path in paths:
        if len(tokens) == room:
            break
        if len(path) > len(places):
            continue
        token, chance = places[len(path) - 1][path[-1]]
        parents.append(nodes[tuple(path[:-1])])
        nodes[tuple(path)] = len(tokens)
        tokens.append(token)
        acceptance_probs.append(chance)
    return DraftTree(tokens, parents, acceptance_probs)


def _sharpened(first: float, second: float) -> tuple[float, float]:
    """Return sharpened probabilities of two tokens; all other tokens count as a third one."""
    others = max(1.0 - first - second, 0.0)
    weights = [chance**_SHARPNESS for chance in (first, second, others)]
    return weights[0] / sum(weights), weights[1] / sum(weights)


def num_chains(parents: Sequence[int]) -> int:
    """Return the number of chains that a tree in preorder is verified as."""
    return 1 + sum(parent != node - 1 for node, parent in enumerate(parents))


def first_chain(parents: Sequence[int]) -> int:
    """Return how many of a tree's first nodes form a chain."""
    return next((node for node, parent in enumerate(parents) if parent != node - 1), len(parents))
