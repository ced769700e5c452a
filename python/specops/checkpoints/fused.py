# SPDX-License-Identifier: Apache-2.0
"""Concatenation of weights along their outputs, without rounding."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from specops.checkpoints.errors import ModelError
from specops.quantization import FP8_BLOCK, QuantizedWeight


def fused(
    weights: Sequence[Tensor | QuantizedWeight], names: Sequence[str]
) -> Tensor | QuantizedWeight:
    """Concatenate weights that read the same inputs into one weight.

    Integer weights of different formats are converted to a common one: 8-bit values, the largest
    group size that divides all, and offsets if any part has them. No value changes.

    Args:
        weights: the weights to concatenate.
        names: names of the weights, for error messages.

    Raises:
        ModelError: only some weights are quantized, or only some are FP8; their inputs have
            different orders; or FP8 weights are not aligned to blocks.
    """
    if len(weights) == 1:
        return weights[0]
    plain = [one for one in weights if isinstance(one, Tensor)]
    if len(plain) == len(weights):
        return torch.cat(plain)
    if plain:
        _refuse(names, "some of them are quantized and some are not")
    parts = [one for one in weights if isinstance(one, QuantizedWeight)]
    kinds = {one.kind for one in parts}
    if kinds == {"fp8"}:
        if len({one.group for one in parts}) > 1:
            _refuse(names, "some of them have a scale for each block and some for each output")
        if parts[0].group and any(len(one.values) % FP8_BLOCK for one in parts[:-1]):
            _refuse(names, f"their outputs must be multiples of the FP8 block size {FP8_BLOCK}")
    elif "fp8" in kinds:
        _refuse(names, "some of them are FP8 and some are integers")
    else:
        if any(not _same(one.input_order, parts[0].input_order) for one in parts):
            _refuse(names, "their inputs are grouped in different orders (desc_act)")
        parts = _alike(parts)
    return parts[0]._replace(
        values=_joined([one.values for one in parts]),
        scales=torch.cat([one.scales for one in parts]),
        offsets=None
        if parts[0].offsets is None
        else torch.cat([one.offsets for one in parts if one.offsets is not None]),
    )


def rows_of(weight: Tensor | QuantizedWeight, rows: Tensor) -> Tensor | QuantizedWeight:
    """Return a weight with the selected outputs (rows), in any order.

    Raises:
        ModelError: the rows would split a block of outputs that share scales.
    """
    rows = rows.long()
    if isinstance(weight, Tensor):
        return weight[rows]
    scaled = rows
    if weight.kind == "fp8" and weight.group:
        firsts = rows[::FP8_BLOCK]
        whole = firsts[:, None] + torch.arange(FP8_BLOCK, device=rows.device)
        if (firsts % FP8_BLOCK).any() or not torch.equal(whole.flatten(), rows):
            raise ModelError(
                f"outputs of an FP8 weight must be selected in whole blocks of {FP8_BLOCK}"
            )
        scaled = firsts // FP8_BLOCK
    offsets = None if weight.offsets is None else weight.offsets[rows]
    values = weight.values.view(torch.uint8)[rows].view(weight.values.dtype)
    return weight._replace(values=values, scales=weight.scales[scaled], offsets=offsets)


def _refuse(names: Sequence[str], reason: str) -> None:
    raise ModelError(f"{', '.join(names)} cannot be fused into one projection: {reason}")


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def _joined(values: Sequence[Tensor]) -> Tensor:
    """Concatenate values as bytes: torch.cat does not support float8."""
    return torch.cat([one.view(torch.uint8) for one in values]).view(values[0].dtype)


def _alike(parts: Sequence[QuantizedWeight]) -> list[QuantizedWeight]:
    """Convert parts to one kind and one group size, with offsets in all parts or in none."""
    values = parts[0].code_values
    if any(one.kind != parts[0].kind or not _same(one.code_values, values) for one in parts):
        parts = [_in_bytes(one) for one in parts]
    group = math.gcd(*(one.group for one in parts))  # gcd(0, g) is g
    has_offsets = any(one.offsets is not None for one in parts)
    alike = []
    for one in parts:
        scales = _regrouped(one, one.scales, group)
        offsets = one.offsets
        if offsets is not None:
            offsets = _regrouped(one, offsets, group)
        elif has_offsets:
            offsets = torch.zeros_like(scales)
        alike.append(one._replace(scales=scales, offsets=offsets, group=group))
    return alike


def _in_bytes(weight: QuantizedWeight) -> QuantizedWeight:
    if weight.kind == "int8":
        return weight
    if weight.code_values is None:
        values = weight.values.to(torch.int8) - 8
    else:
        values = weight.code_values[weight.values.int()]
    return weight._replace(kind="int8", values=values, code_values=None)


def _regrouped(weight: QuantizedWeight, of_groups: Tensor, group: int) -> Tensor:
    """Repeat per-group values so that they apply to smaller groups."""
    if weight.group == group:
        return of_groups
    inputs = weight.values.shape[1]
    if weight.group == 0:
        return of_groups.repeat(1, -(-inputs // group))
    return of_groups.repeat_interleave(weight.group // group, 1)[:, : -(-inputs // group)]
