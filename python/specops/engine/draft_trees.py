# SPDX-License-Identifier: Apache-2.0
"""Trees of drafts on the host: how two chains make one, and how many chains one is.

Nodes are verified in preorder (`batching.preorder`). Then a tree is a few chains, one behind the
other (`batching.tree_chains`), and its first nodes are a chain as well.
"""

from collections.abc import Sequence


def join_chains(
    first: Sequence[int], second: Sequence[int], room: int, chance: float, second_chance: float
) -> tuple[list[int], list[int], list[float]]:
    """Makes a tree of two chains: of what they have in common once, of both where they disagree.

    Args:
        first: tokens of a chain.
        second: of another, which is not as good.
        room: most nodes; kept are those with the highest chance that all up to them are right.
        chance: that a token is right when those before it are.
        second_chance: that the second chain's token is, where they disagree.

    Returns:
        The tokens, the likeliest first; of each the place of the one it hangs on, or -1; and the
        chance that it is right when those it hangs on are.
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
    return tokens, parents, [own for *_, own in kept]


def num_chains(parents: Sequence[int]) -> int:
    """How many chains a tree in preorder is verified as."""
    return 1 + sum(parent != node - 1 for node, parent in enumerate(parents))


def first_chain(parents: Sequence[int]) -> int:
    """How many of its first nodes are a chain."""
    return next((node for node, parent in enumerate(parents) if parent != node - 1), len(parents))
