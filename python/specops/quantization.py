# SPDX-License-Identifier: Apache-2.0
"""Quantized weights: the common form of every quantized checkpoint format.

A checkpoint reader, or `quantize_weight`, makes a `QuantizedWeight`; `dense.pack_weight` converts
it to the layout that `dense.linear` reads; `dequantize_weight` returns its real values.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from specops._checks import check_kind, describe

VALUE_DTYPES = {"int8": torch.int8, "int4": torch.uint8, "fp8": torch.float8_e4m3fn}
FP8_BLOCK = 128  # a block of 128 outputs by 128 inputs shares a scale

_LEAST = {"int8": -128, "int4": -8}
_MOST = {"int8": 127, "int4": 7}
_INT4_ZERO = 8  # the int4 value of 0 without a table
# Number of elements of a weight that are processed at once, in float32: they stay in the L2 cache.
_AT_ONCE = 1 << 18


class QuantizedWeight(NamedTuple):
    """A quantized weight.

    Element (n, k) of the weight is

        value(values[n, k]) * scales[n, k // group] + offsets[n, k // group]

    Attributes:
        kind: "int8", "int4" or "fp8".
        values: quantized values [num_outputs, num_inputs]: int8 for int8; uint8, 0 to 15, one per
            byte, for int4; float8_e4m3fn without NaN for fp8. Rows may be strided.
        scales: float32 [num_outputs, groups]; for fp8 with groups [ceil(num_outputs / 128),
            groups]: one row per block of 128 outputs.
        offsets: float32 [num_outputs, groups], for int8 and int4: minus a zero point times its
            scale, or a minimum; None: no offsets.
        group: inputs that share a scale: 0, all of them; otherwise 16 or a multiple of 32, for fp8
            128. groups is ceil(num_inputs / group), or 1.
        code_values: int8 [16], number that each int4 value stands for; None: value - 8.
        input_order: int32 [num_inputs]: column k of `values` belongs to input input_order[k] of a
            row (GPTQ's desc_act); None: to input k.
    """

    kind: str
    values: Tensor
    scales: Tensor
    offsets: Tensor | None = None
    group: int = 0
    code_values: Tensor | None = None
    input_order: Tensor | None = None


def quantize_weight(weight: Tensor, *, kind: str = "int8", group: int = 0) -> QuantizedWeight:
    """Quantize a weight to int8 or int4, as FastDeploy does.

    Same as `reference.quantize_weight`. With one scale per output, quantized values and scales are
    those of FastDeploy's WINT8 and WINT4 on its GPU path. `peak` is the largest magnitude of an
    output's weights; `most` is 127 for int8 and 7 for int4:

        value = round(weight / peak * most), ties away from zero
        scale = peak / most, rounded to the dtype of `weight`

    With groups, values and scales are those of FastDeploy's Machete path. `least` is -128 or -8:

        scale = max(largest / most, smallest / least) of the group, at least 0
        value = round(weight / scale), ties to even, in [least, most]

    Args:
        weight: [num_outputs, num_inputs], float32, bfloat16 or float16. Rows may be strided.
        kind: "int8" or "int4".
        group: inputs that share a scale: 0, all of them; otherwise 16 or a multiple of 32.

    Returns:
        The quantized weight, one byte per value; it shares no memory with `weight`.

    Raises:
        ValueError: a shape, dtype, kind or group differs from the above.

    Note:
        If all weights of a scale are zero, its values and the scale are 0. If one is infinite or
        NaN, the scale is NaN and the values are 0. The call takes memory for a few rows in float32.

    Source: FastDeploy, weight_quantize (scale for each output) and machete_mm.py (groups).
    """
    op = "quantize_weight"
    if kind not in _MOST:
        raise ValueError(f"{op}: kind must be 'int8' or 'int4', got {describe(kind)}")
    check_matrix(op, "weight", weight)
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"{op}: weight must be float32, bfloat16 or float16, got " + describe(weight)
        )
    _check_group(op, kind, group)
    num_outputs, num_inputs = weight.shape
    quantized = torch.empty(weight.shape, dtype=VALUE_DTYPES[kind], device=weight.device)
    scales = torch.empty(
        (num_outputs, num_groups(num_inputs, group)), dtype=torch.float32, device=weight.device
    )
    rows = max(1, _AT_ONCE // max(1, num_inputs))
    zero = _INT4_ZERO if kind == "int4" else 0
    for first in range(0, num_outputs, rows):
        part = weight.detach()[first : first + rows]
        if group == 0:
            values, scales[first : first + rows] = _by_output(part, _MOST[kind])
        else:
            values, scales[first : first + rows] = _by_group(part, kind, group)
        quantized[first : first + rows] = values.add_(zero)
    return QuantizedWeight(kind, quantized, scales, group=group)


def _by_output(part: Tensor, most: int) -> tuple[Tensor, Tensor]:
    wide = part.float()
    peak = wide.abs().amax(1, keepdim=True) if wide.shape[1] else wide.new_zeros(len(wide), 1)
    scales = (peak / most).to(part.dtype).float()
    scaled = (wide / peak * most).nan_to_num_(0)  # NaN of 0 / 0, and of non-finite weights
    whole = scaled.abs().floor()
    whole += scaled.abs() - whole >= 0.5
    return whole.copysign_(scaled), scales.masked_fill_(scales.isinf(), torch.nan)


def _by_group(part: Tensor, kind: str, group: int) -> tuple[Tensor, Tensor]:
    num_outputs, num_inputs = part.shape
    count = num_groups(num_inputs, group)
    padded = part.new_zeros((num_outputs, count * group), dtype=torch.float32)
    padded[:, :num_inputs] = part
    groups = padded.view(num_outputs, count, group)
    if count == 0:
        return padded, groups.new_zeros(num_outputs, 0)
    low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    scales = torch.maximum(high / _MOST[kind], low / _LEAST[kind]).clamp_(min=0)
    scales.masked_fill_(scales.isinf(), torch.nan)
    values = (groups / scales).nan_to_num_(0, 0, 0).round_().clamp_(_LEAST[kind], _MOST[kind])
    return values.view(num_outputs, -1)[:, :num_inputs], scales[:, :, 0]


def dequantize_weight(weight: QuantizedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the real values of a quantized weight, by the formula of `QuantizedWeight`.

    Same as `reference.dequantize_weight`: in float32, the product rounded, then the sum.

    Args:
        weight: quantized weight of any kind.
        dtype: dtype of the result, to which float32 is rounded.

    Returns:
        [num_outputs, num_inputs], in the order of a row's inputs: column input_order[k] comes from
        column k of `values`.

    Raises:
        ValueError: the fields of `weight` do not agree.
    """
    check_quantized("dequantize_weight", weight)
    kind, quantized, scales, offsets, _, table, order = weight
    num_outputs, num_inputs = quantized.shape
    out = torch.empty((num_outputs, num_inputs), dtype=dtype, device=quantized.device)
    rows = max(1, _AT_ONCE // max(1, num_inputs))
    rows = -(-rows // FP8_BLOCK) * FP8_BLOCK
    for first in range(0, num_outputs, rows):
        part = quantized[first : first + rows]
        if kind == "int4":
            values = part.float() - _INT4_ZERO if table is None else table.float()[part.long()]
        else:
            values = part.float()
        values *= _spread(scales, weight, first, len(part))
        if offsets is not None:
            values += _spread(offsets, weight, first, len(part))
        if order is None:
            out[first : first + rows] = values
        else:
            out[first : first + rows, order.long()] = values.to(dtype)
    return out


def _spread(scales: Tensor, weight: QuantizedWeight, first: int, count: int) -> Tensor:
    """Return the scales of `count` outputs from `first` on, expanded to one per input."""
    if weight.kind == "fp8" and weight.group:
        scales = scales[first // FP8_BLOCK :].repeat_interleave(FP8_BLOCK, 0)[:count]
    else:
        scales = scales[first : first + count]
    num_inputs = weight.values.shape[1]
    if weight.group == 0:
        return scales.expand(-1, num_inputs)
    spread = scales[:, :, None].expand(-1, -1, weight.group)
    return spread.reshape(count, -1)[:, :num_inputs]


def num_groups(num_inputs: int, group: int) -> int:
    """Return the number of scales per output."""
    return -(-num_inputs // group) if group else 1


def check_quantized(op: str, weight: QuantizedWeight) -> None:
    """Check the kind, dtypes, shapes, values and input order of a quantized weight.

    Raises:
        ValueError: a field is not as `QuantizedWeight` requires; the message names it.
    """
    check_kind(op, "weight", weight, QuantizedWeight)
    if weight.kind not in VALUE_DTYPES:
        names = ", ".join(map(repr, VALUE_DTYPES))
        raise ValueError(f"{op}: weight.kind must be one of {names}, got {describe(weight.kind)}")
    check_matrix(op, "weight.values", weight.values)
    _check_group(op, weight.kind, weight.group, "weight.group")
    num_outputs, num_inputs = weight.values.shape
    groups = num_groups(num_inputs, weight.group)
    blocks = -(-num_outputs // FP8_BLOCK) if weight.kind == "fp8" and weight.group else num_outputs
    is_int, is_int4 = weight.kind != "fp8", weight.kind == "int4"
    _check_field(op, "values", weight, VALUE_DTYPES[weight.kind], (num_outputs, num_inputs))
    _check_field(op, "scales", weight, torch.float32, (blocks, groups))
    _check_field(op, "offsets", weight, torch.float32, (num_outputs, groups), is_int)
    _check_field(op, "code_values", weight, torch.int8, (16,), is_int4)
    _check_field(op, "input_order", weight, torch.int32, (num_inputs,), True)
    if is_int4 and weight.values.numel() and weight.values.amax() > 15:
        raise ValueError(f"{op}: weight.values must be 0 to 15, got {int(weight.values.amax())}")
    if not is_int and bool((weight.values.view(torch.uint8) & 0x7F == 0x7F).any()):
        raise ValueError(f"{op}: weight.values must not be NaN, got NaN")
    if weight.input_order is not None and not torch.equal(
        weight.input_order.sort().values.cpu(), torch.arange(num_inputs, dtype=torch.int32)
    ):
        raise ValueError(
            f"{op}: weight.input_order must be a permutation of 0 to {num_inputs - 1}, got another "
            "tensor"
        )


def check_matrix(op: str, name: str, weight: Tensor) -> None:
    """Check that a tensor has two dimensions.

    Raises:
        ValueError: `weight` has another number of dimensions, or is no tensor.
    """
    if not isinstance(weight, Tensor) or weight.is_nested or weight.dim() != 2:
        raise ValueError(f"{op}: {name} must be [num_outputs, num_inputs], got {describe(weight)}")


def _check_group(op: str, kind: str, group: int, name: str = "group") -> None:
    allowed = isinstance(group, int) and not isinstance(group, bool) and 0 <= group < 2**31
    if kind == "fp8":
        if not allowed or group not in (0, FP8_BLOCK):
            raise ValueError(
                f"{op}: {name} must be 0 or {FP8_BLOCK} for kind fp8, got {describe(group)}"
            )
    elif not allowed or (group % 32 and group != 16):
        raise ValueError(f"{op}: {name} must be 0, 16 or a multiple of 32, got {describe(group)}")


def _check_field(
    op: str,
    field: str,
    weight: QuantizedWeight,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    optional: bool | None = None,
) -> None:
    """Check dtype, shape and device of a field.

    optional: None if the field is required, True if it may be None, False if it must be None.
    """
    value = getattr(weight, field)
    if optional is not None and value is None:
        return
    if optional is False:
        raise ValueError(f"{op}: weight.{field} must be None for kind {weight.kind}, got Tensor")
    is_right = isinstance(value, Tensor) and value.dtype == dtype and value.shape == shape
    if not is_right or value.device != weight.values.device:
        expected = f"{describe(dtype)} {list(shape)} on {weight.values.device}"
        raise ValueError(f"{op}: weight.{field} must be {expected}, got {describe(value)}")
