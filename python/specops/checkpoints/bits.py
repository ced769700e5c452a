# SPDX-License-Identifier: Apache-2.0
"""Unpacking of 4-bit and 8-bit integers from words, and groups of inputs that share a scale."""

from typing import NamedTuple

import torch
from torch import Tensor


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Unpack the bit fields of int32 words, lowest bits first.

    Args:
        words: int32 [rows, count].
        bits: size of a field: 4 or 8.

    Returns:
        uint8 [rows, count * 32 / bits].
    """
    octets = words.contiguous().view(torch.uint8)  # all supported machines are little-endian
    if bits == 8:
        return octets
    return torch.stack((octets & 15, octets >> 4), -1).flatten(1)


def low_then_high(octets: Tensor) -> Tensor:
    """Return the low four bits of the last dimension's bytes, then the high four bits."""
    return torch.cat((octets & 15, octets >> 4), -1)


class Groups(NamedTuple):
    """Groups of inputs that share a scale.

    Attributes:
        size: number of inputs of a group (the last group may have fewer); 0: one group of all
            inputs.
        order: int32 [num_inputs], the input indices group by group; None: groups are consecutive.
    """

    size: int
    order: Tensor | None


def groups_of(index: Tensor, count: int) -> Groups | None:
    """Return the groups of inputs, given each input's group index (GPTQ's g_idx).

    Args:
        index: [num_inputs], the group of each input.
        count: number of groups.

    Returns:
        The groups; None if an index is outside [0, count), or if groups other than the last differ
        in size.
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
    """Return the groups of consecutive inputs.

    Args:
        num_inputs: number of inputs.
        count: number of groups.
        size: size of a group, if known; the last group may then be smaller.

    Returns:
        The groups; None if `num_inputs` cannot be divided into `count` groups of one size.
    """
    if count == 1:
        return Groups(0, None)
    if size and -(-num_inputs // size) == count:
        return Groups(size, None)
    return Groups(num_inputs // count, None) if num_inputs % count == 0 else None
