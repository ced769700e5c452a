# SPDX-License-Identifier: Apache-2.0
"""Weights as codes: what checkpoints hold and `dense.pack_weight` packs."""

from typing import NamedTuple

import torch
from torch import Tensor

# Rows and columns of a block of an fp8 weight that share a scale.
FP8_BLOCK = 128


class QuantizedWeight(NamedTuple):
    """A weight as codes.

    Input k of output n stands for

        value(codes[n, k]) * scales[n, k // group] + offsets[n, k // group]

    Attributes:
        kind: "int8", "int4" or "fp8".
        codes: [num_outputs, num_inputs]: int8; "int4": uint8, 0 to 15, one a byte; "fp8":
            float8_e4m3fn.
        scales: float32 [num_outputs, ceil(num_inputs / group)]; "fp8": one for each block of 128
            outputs and 128 inputs, [ceil(num_outputs / 128), ceil(num_inputs / 128)].
        offsets: float32, as `scales`, of "int8" and "int4": from zero points or minimums.
        group: inputs that share a scale: 16, a multiple of 32, or 0 for all of them.
        code_values: int8 [16], of "int4": what each code stands for; None: code - 8.
        input_order: int32 [num_inputs]: input k of the codes is input input_order[k] of the layer;
            None: they are in its order.
    """

    kind: str
    codes: Tensor
    scales: Tensor
    offsets: Tensor | None = None
    group: int = 0
    code_values: Tensor | None = None
    input_order: Tensor | None = None


def dequantize_weight(weight: QuantizedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns the numbers that codes stand for.

    Args:
        weight: of any kind.
        dtype: of the result.

    Returns:
        [num_outputs, num_inputs], in the order of the layer's inputs: the product with the scale
        rounded to float32, then the sum with the offset, then rounded to `dtype`.
    """
    kind, codes, scales, offsets, group, code_values, input_order = weight
    num_outputs, num_inputs = codes.shape
    if kind == "int4":
        values = codes - 8.0 if code_values is None else code_values.float()[codes.int()]
    else:
        values = codes.float()
    if kind == "fp8":
        group = FP8_BLOCK
        scales = scales.repeat_interleave(FP8_BLOCK, 0)[:num_outputs]
    numbers = values * _of_inputs(scales, group, num_inputs)
    if offsets is not None:
        numbers += _of_inputs(offsets, group, num_inputs)
    if input_order is not None:
        numbers[:, input_order.long()] = numbers.clone()
    return numbers.to(dtype)


def _of_inputs(of_groups: Tensor, group: int, num_inputs: int) -> Tensor:
    """What groups have, for each of their inputs."""
    if group == 0:
        return of_groups
    return of_groups.repeat_interleave(group, 1)[:, :num_inputs]
