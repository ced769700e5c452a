# SPDX-License-Identifier: Apache-2.0
"""Small numbers in larger ones, and weights whose inputs are in groups of any order."""

from typing import NamedTuple

import torch
from torch import Tensor


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Return the fields of words, lowest bits first.

    Args:
        words: int32 [rows, count].
        bits: of a field: 4 or 8.

    Returns:
        uint8 [rows, count * 32 / bits].
    """
    octets = words.contiguous().view(torch.uint8)  # lowest first, as on every machine that runs
    if bits == 8:
        return octets
    return torch.stack((octets & 15, octets >> 4), -1).flatten(1)


def low_then_high(octets: Tensor) -> Tensor:
    """Return the low halves of the last dimension's bytes, then the high ones."""
    return torch.cat((octets & 15, octets >> 4), -1)


class Groups(NamedTuple):
    """Groups of inputs that share a scale.

    Attributes:
        size: inputs of each but the last, or 0: one group has them all.
        order: int32: the inputs, group by group; None: they lie so already.
    """

    size: int
    order: Tensor | None


def groups_of(index: Tensor, count: int) -> Groups | None:
    """Find the groups of inputs.

    Args:
        index: [num_inputs], of each input the group.
        count: how many groups there are.

    Returns:
        Them; None where they are not of one size, but for the last, or not in [0, count).
    """
    index = index.long()
    if int(index.min()) < 0 or int(index.max()) >= count:
        return None
    sizes = index.bincount(minlength=count)
    size = int(sizes[0])
    if bool((sizes[:-1] != size).any()) or not 0 < int(sizes[-1]) <= size:
        return None
    order = index.argsort(stable=True)
    is_sorted = bool((order.diff() > 0).all())
    return Groups(0 if count == 1 else size, None if is_sorted else order.to(torch.int32))


def even_groups(num_inputs: int, count: int, size: int | None = None) -> Groups | None:
    """Find the groups of inputs that lie in order.

    Args:
        num_inputs: how many inputs there are.
        count: how many groups.
        size: of a group, where the last one may be smaller.

    Returns:
        Them; None where `count` groups of one size do not make `num_inputs`.
    """
    if count == 1:
        return Groups(0, None)
    if size and -(-num_inputs // size) == count:
        return Groups(size, None)
    return Groups(num_inputs // count, None) if num_inputs % count == 0 else None
