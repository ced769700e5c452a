# SPDX-License-Identifier: Apache-2.0
"""Decoders of integer weights: compressed-tensors (packed and plain), GPTQ and AWQ.

Sources: compressed-tensors 0.20 (compressors/pack_quantized, naive_quantized), gptqmodel 7.7
(nn_modules/qlinear), AutoAWQ (modules/linear/gemm.py).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specops.checkpoints.bits import Groups, even_groups, groups_of, unpacked
from specops.checkpoints.module import Module
from specops.checkpoints.quantization_config import (
    AUTO_ROUND,
    AUTO_ROUND_LAYOUTS,
    AWQ,
    GPTQ,
    method_of,
)
from specops.quantization import QuantizedWeight

_INTEGERS = (torch.int32, torch.int64)
_BITS = (4, 8)
# Bit field i of an AWQ word holds output _AWQ_ORDER[i] of eight outputs; _AWQ_FIELD is the inverse.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_AWQ_FIELD = torch.tensor(_AWQ_ORDER).argsort()


def pack_quantized(module: Module) -> QuantizedWeight:
    """Decode compressed-tensors' pack-quantized.

        weight_packed      int32 [N, ceil(K * bits / 32)], fields along K
        weight_scale       [N, groups], [N, 1] or [1]
        weight_shape       int64 [2]: N, K
        weight_zero_point  int32 [ceil(N * bits / 32), groups], fields along N; if asymmetric
        weight_g_idx       int32 [K], in older files: the group of each input

    Each field holds a number (value or zero point) plus 2^(bits - 1).
    """
    shape = module.take("weight_shape", *_INTEGERS, dims=1)
    module.check_shape("weight_shape", shape, 2)
    rows, inputs = (int(one) for one in shape)
    packed = module.take("weight_packed", torch.int32, dims=2)
    bits = next((one for one in _BITS if packed.shape[1] == -(-inputs * one // 32)), None)
    if bits is None:
        module.refuse(
            f"tensor {module.name}.weight_packed must hold {inputs} numbers of 4 or 8 bits a row, "
            f"got {packed.shape[1]} words"
        )
    module.check_shape("weight_packed", packed, rows, packed.shape[1])
    values = unpacked(packed, bits)[:, :inputs]
    scales = _scales_of_rows(module, rows)
    count = scales.shape[1]
    zeros = None
    if "weight_zero_point" in module:
        words = module.take("weight_zero_point", torch.int32, dims=2)
        module.check_shape("weight_zero_point", words, -(-rows * bits // 32), count)
        zeros = unpacked(words.T, bits)[:, :rows].T
    groups = even_groups(inputs, count)
    if "weight_g_idx" in module:
        index = module.take("weight_g_idx", *_INTEGERS, dims=1)
        module.check_shape("weight_g_idx", index, inputs)
        if bool((index != -1).any()):  # -1 everywhere: unused
            groups = groups_of(index, count)
    return _integers(module, bits, values, scales, zeros, groups)


def plain_integers(module: Module) -> QuantizedWeight:
    """Decode compressed-tensors' int-quantized: unpacked int8 values."""
    values = module.take("weight", torch.int8, dims=2)
    scales = _scales_of_rows(module, len(values))
    zeros = None
    if "weight_zero_point" in module:
        zeros = module.take("weight_zero_point", torch.int8).reshape(-1, scales.shape[1]).float()
        zeros = zeros.expand_as(scales) + 128
    shifted = (values.to(torch.int16) + 128).to(torch.uint8)
    groups = even_groups(values.shape[1], scales.shape[1])
    return _integers(module, 8, shifted, scales, zeros, groups)


def qweight(module: Module) -> QuantizedWeight:
    """Decode GPTQ or AWQ, distinguished by the shape of qweight.

    For N outputs and K inputs:

    scales   [groups, N]
    qzeros   int32 [groups, N * bits / 32]
    g_idx    int32 [K], optional, GPTQ only
    qweight  int32, GPTQ: [K * bits / 32, N], fields along K; w = scale * (value - zero), where
             version 1 stores zero - 1
             AWQ: [K, N / 8], eight outputs per word, in the order _AWQ_ORDER
    """
    scales = module.take_scales("scales")
    if scales.dim() != 2:
        module.refuse(
            f"tensor {module.name}.scales must be [groups, outputs], got {list(scales.shape)}"
        )
    count, rows = scales.shape
    words = module.take("qzeros", torch.int32, dims=2)
    bits = 32 * words.shape[1] // rows if rows else 0
    if bits not in _BITS:
        module.refuse(f"{module.name} must have 4 or 8 bits per weight, got {bits}")
    module.check_shape("qzeros", words, count, rows * bits // 32)
    packed = module.take("qweight", torch.int32, dims=2)
    is_gptq = packed.shape[1] == rows
    method = _layout_of(module.settings)
    if not is_gptq and (packed.shape[1] != words.shape[1] or bits != 4):
        module.refuse(
            f"tensor {module.name}.qweight must have {rows} columns (GPTQ) or "
            f"{words.shape[1]} (AWQ, 4 bits), got {list(packed.shape)} with {bits} bits"
        )
    if method in (GPTQ, AWQ) and is_gptq != (method == GPTQ):
        module.refuse(
            f"quant_method is {module.settings.get('quant_method')}, but {module.name}.qweight "
            f"{list(packed.shape)} has the layout of {'GPTQ' if is_gptq else 'AWQ'}"
        )
    zeros = unpacked(words, bits)
    if is_gptq:
        values = unpacked(packed.T, bits)
        if _gptq_version(module, zeros, bits) == "gptq":
            zeros = (zeros + 1) & (2**bits - 1)
    else:
        values, zeros = (
            one.view(len(one), -1, 8)[..., _AWQ_FIELD].flatten(1)
            for one in (unpacked(packed, bits), zeros)
        )
        values = values.T
    groups = even_groups(values.shape[1], count, module.settings.get("group_size"))
    if "g_idx" in module:
        index = module.take("g_idx", *_INTEGERS, dims=1)
        module.check_shape("g_idx", index, values.shape[1])
        groups = groups_of(index, count)
    return _integers(module, bits, values, scales.T.contiguous(), zeros.T, groups)


def _layout_of(settings: Mapping[str, Any]) -> str | None:
    """Return the layout named in the settings, GPTQ or AWQ; None if they name neither."""
    method = method_of(settings)
    if method == AUTO_ROUND:
        layout = AUTO_ROUND_LAYOUTS.get(settings.get("packing_format") or "")
        return None if layout is None else AWQ if layout == AWQ else GPTQ
    return method


def _gptq_version(module: Module, zeros: Tensor, bits: int) -> str:
    """Return the version of GPTQ's layout.

    Args:
        module: module with its settings.
        zeros: zero points as stored.
        bits: bits per weight.
    """
    settings = module.settings
    if not settings:
        module.refuse(
            f"{module.name} is GPTQ, but neither config.json (quantization_config) nor "
            "quantize_config.json names the version of the format, gptq or gptq_v2"
        )
    if method_of(settings) == AUTO_ROUND:
        packing = settings.get("packing_format")
        if packing:
            return AUTO_ROUND_LAYOUTS[packing]
        # Older files do not name the version. For symmetric weights, the stored zero point reveals
        # it.
        for version, middle in (("gptq", 2 ** (bits - 1) - 1), ("gptq_v2", 2 ** (bits - 1))):
            if bool((zeros == middle).all()):
                return version
        module.refuse(
            f"{module.name} is AutoRound with zero points, but quantization_config has no "
            f"packing_format; add one of {', '.join(AUTO_ROUND_LAYOUTS)}"
        )
    return str(settings.get("checkpoint_format") or settings.get("format") or "gptq")


def _scales_of_rows(module: Module, rows: int) -> Tensor:
    scales = module.take_scales("weight_scale")
    if scales.numel() == 1:
        return scales.reshape(1, 1).expand(rows, 1).contiguous()
    if scales.dim() == 1:
        scales = scales[:, None]
    if scales.dim() != 2 or len(scales) != rows:
        module.refuse(
            f"tensor {module.name}.weight_scale must be [{rows}, groups] or [1], got "
            f"{list(scales.shape)}"
        )
    return scales


def _integers(
    module: Module,
    bits: int,
    values: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    groups: Groups | None,
) -> QuantizedWeight:
    """Return a weight from values [N, K] and zero points [N, groups], each from 0 to 2^bits - 1."""
    if groups is None:
        module.refuse(
            f"{module.name} must have groups of one size, got {values.shape[1]} inputs in "
            f"{scales.shape[1]} groups"
        )
    if groups.size != 16 and groups.size % 32:
        module.refuse(
            f"{module.name} must have groups of 16 or a multiple of 32 inputs, got {groups.size}"
        )
    return integer_weight(bits, values, scales, zeros, groups)


def integer_weight(
    bits: int, values: Tensor, scales: Tensor, zeros: Tensor | None, groups: Groups
) -> QuantizedWeight:
    """Return the weight (value - zero) * scale.

    Args:
        bits: 4 or 8.
        values: uint8 [N, K], from 0 to 2^bits - 1.
        scales: float32 [N, groups].
        zeros: zero points [N, groups], in the range of the values; None: 2^(bits - 1).
        groups: the inputs that share a scale.
    """
    middle = 2 ** (bits - 1)
    offsets = None
    if zeros is not None and bool((zeros != middle).any()):
        offsets = -(zeros.float() - middle) * scales
    if bits == 8:
        values = (values.to(torch.int16) - middle).to(torch.int8)
    if groups.order is not None:
        values = values[:, groups.order.long()]
    kind = "int4" if bits == 4 else "int8"
    return QuantizedWeight(
        kind, values.contiguous(), scales, offsets, groups.size, input_order=groups.order
    )
