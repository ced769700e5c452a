# SPDX-License-Identifier: Apache-2.0
"""Decoders of 8-bit and 4-bit floats: FP8 by blocks or channels, and MXFP4.

Sources: transformers 5.23 (integrations/finegrained_fp8.py, mxfp4.py), compressed-tensors 0.20
(compressors/naive_quantized, mxfp4), OCP's Microscaling Formats 1.0.
"""

import torch
from torch import Tensor

from specops.checkpoints.module import Module
from specops.quantization import FP8_BLOCK, QuantizedWeight

MX_GROUP = 32
# The e2m1 values times two, which makes them integers; scales are halved in return.
E2M1_DOUBLED = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]).to(
    torch.int8
)
_E8M0_BIAS, _E8M0_NAN = 127, 255


def fp8(module: Module) -> QuantizedWeight:
    """Decode `weight` in e4m3 with scales `weight_scale_inv` or `weight_scale`.

    Either tensor holds factors of the weight: one scale, one per output, or one per block of 128
    outputs and 128 inputs (blocks at the edges may be smaller).
    """
    values = module.take("weight", torch.float8_e4m3fn, dims=2)
    suffix = "weight_scale_inv" if "weight_scale_inv" in module else "weight_scale"
    if suffix not in module:
        module.refuse(
            f"tensor {module.name}.weight is float8_e4m3fn and needs scales; expected "
            f"tensor {module.name}.weight_scale or {module.name}.weight_scale_inv"
        )
    if bool((values.view(torch.uint8) & 0x7F == 0x7F).any()):
        module.refuse(f"tensor {module.name}.weight must not hold NaN")
    scales = module.take_scales(suffix)
    rows, inputs = values.shape
    blocks = (-(-rows // FP8_BLOCK), -(-inputs // FP8_BLOCK))
    shape = tuple(scales.shape)
    if shape != blocks and (scales.numel() == 1 or shape in ((rows,), (rows, 1))):
        scales = scales.reshape(-1, 1).expand(rows, 1).contiguous()
        return QuantizedWeight("fp8", values, scales)
    module.check_shape(suffix, scales, *blocks)
    block = module.settings.get("weight_block_size")
    if block is not None and list(block) != [FP8_BLOCK, FP8_BLOCK]:
        module.refuse(f"weight_block_size must be [{FP8_BLOCK}, {FP8_BLOCK}], got {block}")
    return QuantizedWeight("fp8", values, scales, group=FP8_BLOCK)


def mxfp4(module: Module) -> QuantizedWeight:
    """Decode compressed-tensors' mxfp4-pack-quantized.

    weight_packed  uint8 [N, K / 2]: two e2m1 values; the low half of a byte is the even input
    weight_scale   uint8 [N, K / 32], E8M0: 2^(byte - 127), 255 is NaN
    """
    for one in ("weight_global_scale", "weight_scale_2"):
        if one in module:
            module.refuse(f"{module.name} is NVFP4 (tensor {one}), which is not supported")
    packed = module.take("weight_packed", torch.uint8, dims=2)
    scales = module.take("weight_scale", torch.uint8, torch.float8_e8m0fnu, dims=2)
    return of_e2m1(module, packed, scales.view(torch.uint8))


def of_e2m1(module: Module, packed: Tensor, scales: Tensor) -> QuantizedWeight:
    """Return the weight of packed e2m1 bytes [N, K / 2] and E8M0 scales [N, K / 32]."""
    inputs = 2 * packed.shape[1]
    module.check_shape("weight_scale", scales, len(packed), -(-inputs // MX_GROUP))
    values = torch.stack((packed & 15, packed >> 4), -1).flatten(1)
    return QuantizedWeight(
        "int4", values, halved_e8m0(scales), None, MX_GROUP, code_values=E2M1_DOUBLED
    )


def halved_e8m0(scales: Tensor) -> Tensor:
    """Return half the value of each E8M0 byte, exact in float32."""
    exponents = scales.to(torch.int32) - (_E8M0_BIAS + 1)
    halves = torch.ldexp(torch.ones(scales.shape, dtype=torch.float64), exponents).float()
    return halves.masked_fill(scales == _E8M0_NAN, torch.nan)
