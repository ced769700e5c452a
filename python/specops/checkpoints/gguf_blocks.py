# SPDX-License-Identifier: Apache-2.0
"""Decoders of GGUF's quantized types. No value changes.

Source: github.com/ggml-org/ggml (src/ggml-common.h, src/ggml-quants.c).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from specops.checkpoints.bits import low_then_high
from specops.checkpoints.floats import E2M1_DOUBLED, MX_GROUP, halved_e8m0
from specops.quantization import QuantizedWeight

_AS_THEY_ARE = torch.arange(16, dtype=torch.int8)
_IQ4_NL = torch.tensor(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.int8
)


def _split(octets: Tensor, width: int) -> Tensor:
    """Split the last dimension into pieces of `width`."""
    return octets.reshape(*octets.shape[:-1], -1, width)


def _halves(octets: Tensor) -> Tensor:
    """Read pairs of bytes as float16, and convert them to float32."""
    return octets.contiguous().view(torch.float16).squeeze(-1).float()


def _q4_0(blocks: Tensor) -> QuantizedWeight:
    """Decode Q4_0: float16 scale; 16 bytes with elements 0-15 in low and 16-31 in high halves."""
    values = low_then_high(blocks[..., 2:])
    return QuantizedWeight("int4", values.flatten(1), _halves(blocks[..., :2]), None, 32)


def _q4_1(blocks: Tensor) -> QuantizedWeight:
    """Decode Q4_1: float16 scale and minimum; bytes as in Q4_0."""
    values = low_then_high(blocks[..., 4:])
    least = _halves(blocks[..., 2:4])
    scales = _halves(blocks[..., :2])
    return QuantizedWeight("int4", values.flatten(1), scales, least, 32, _AS_THEY_ARE)


def _iq4_nl(blocks: Tensor) -> QuantizedWeight:
    """Decode IQ4_NL: like Q4_0, but the 4-bit numbers are indices into a table of values."""
    return _q4_0(blocks)._replace(code_values=_IQ4_NL)


def _mxfp4(blocks: Tensor) -> QuantizedWeight:
    """Decode MXFP4: E8M0 scale; 16 bytes of e2m1, in halves as in Q4_0."""
    values = low_then_high(blocks[..., 1:])
    scales = halved_e8m0(blocks[..., 0])
    return QuantizedWeight("int4", values.flatten(1), scales, None, MX_GROUP, E2M1_DOUBLED)


def _five_bits(blocks: Tensor) -> Tensor:
    """Read 5-bit values: 4 bytes of highest bits, element j at bit j; 16 bytes as in Q4_0."""
    high = (blocks[..., :4, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return (low_then_high(blocks[..., 4:]) | high.flatten(-2) << 4).to(torch.int8)


def _q5_0(blocks: Tensor) -> QuantizedWeight:
    """Decode Q5_0: float16 scale; five-bit values, minus 16."""
    values = _five_bits(blocks[..., 2:]) - 16
    return QuantizedWeight("int8", values.flatten(1), _halves(blocks[..., :2]), None, 32)


def _q5_1(blocks: Tensor) -> QuantizedWeight:
    """Decode Q5_1: float16 scale and minimum; five-bit values."""
    values = _five_bits(blocks[..., 4:])
    least = _halves(blocks[..., 2:4])
    return QuantizedWeight("int8", values.flatten(1), _halves(blocks[..., :2]), least, 32)


def _q8_0(blocks: Tensor) -> QuantizedWeight:
    """Decode Q8_0: float16 scale; 32 one-byte values."""
    values = blocks[..., 2:].view(torch.int8)
    return QuantizedWeight("int8", values.flatten(1), _halves(blocks[..., :2]), None, 32)


def _scales_and_minimums(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales and offsets [N, 8 for each block] of blocks of 256 elements.

    A block starts with two float16 factors, of the scales and of the minimums. Then 12 bytes hold
    eight scales and eight minimums of 6 bits. The first four scales are in the low six bits of
    bytes 0 to 3, the first four minimums in those of bytes 4 to 7. The other scales and minimums
    have their low four bits in the halves of bytes 8 to 11, and their high two bits in the high two
    bits of bytes 0 to 7.
    """
    units = blocks[..., :4].contiguous().view(torch.float16).float()
    first, second, rest = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((first & 63, (rest & 15) | (first >> 6) << 4), -1)
    least = torch.cat((second & 63, (rest >> 4) | (second >> 6) << 4), -1)
    return (units[..., :1] * scales).flatten(1), -(units[..., 1:] * least).flatten(1)


def _q4_k(blocks: Tensor) -> QuantizedWeight:
    """Decode Q4_K: scales, minimums; 32 bytes hold 32 elements in low, 32 in high halves."""
    scales, least = _scales_and_minimums(blocks)
    values = low_then_high(_split(blocks[..., 16:], 32))
    return QuantizedWeight("int4", values.flatten(1), scales, least, 32, _AS_THEY_ARE)


def _q5_k(blocks: Tensor) -> QuantizedWeight:
    """Decode Q5_K: like Q4_K, with 32 bytes of highest bits first: bit i is for group i."""
    scales, least = _scales_and_minimums(blocks)
    low = low_then_high(_split(blocks[..., 48:], 32))
    high = (blocks[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    values = (_split(low.flatten(-2), 32) | high << 4).to(torch.int8)
    return QuantizedWeight("int8", values.flatten(1), scales, least, 32)


def _q6_k(blocks: Tensor) -> QuantizedWeight:
    """Decode Q6_K.

    A block has 128 bytes of low four bits, 64 bytes of high two bits, 16 signed one-byte scales and
    a float16 factor of the scales. For each half of 128 elements there are 64 bytes with elements 0
    to 63 in the low halves and 64 to 127 in the high halves; and 32 bytes with the high bits of
    elements j, j + 32, j + 64 and j + 96.
    """
    low = low_then_high(_split(blocks[..., :128], 64))
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    high = (_split(blocks[..., 128:192], 32)[..., None, :] >> shifts) & 3
    values = (low | high.flatten(-2) << 4).to(torch.int8) - 32
    units = _halves(blocks[..., 208:])
    scales = units[..., None] * blocks[..., 192:208].contiguous().view(torch.int8)
    return QuantizedWeight("int8", values.flatten(1), scales.flatten(1), None, 16)


def _pairs_of_bits(octets: Tensor) -> Tensor:
    """Read 2-bit values: of each 32 bytes, bits 0-1 are elements 0-31, bits 2-3 the next 32."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    return ((_split(octets, 32)[..., None, :] >> shifts) & 3).flatten(-3)


def _q2_k(blocks: Tensor) -> QuantizedWeight:
    """Decode Q2_K: 16 bytes of 4-bit scales and minimums; 2-bit values; a float16 factor of each.

    Sixteen elements share a scale, in the low half of its byte, and a minimum, in the high half.
    """
    least, units = blocks[..., :16] >> 4, blocks[..., 80:].contiguous().view(torch.float16).float()
    scales = (units[..., :1] * (blocks[..., :16] & 15)).flatten(1)
    offsets = -(units[..., 1:] * least).flatten(1)
    values = _pairs_of_bits(blocks[..., 16:80])
    return QuantizedWeight("int4", values.flatten(1), scales, offsets, 16, _AS_THEY_ARE)


def _q3_k(blocks: Tensor) -> QuantizedWeight:
    """Decode Q3_K: 32 bytes of highest bits, 64 bytes of low bits, scales, and a float16 factor.

    Bit i of the highest bits is for group i of 32 elements; 4 is subtracted where it is unset. The
    16 scales have 6 bits, minus 32: the low four in the halves of bytes 0 to 7, first the low
    halves; the high two in bytes 8 to 11, two bits of each byte for four scales.
    """
    high = (blocks[..., None, :32] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    # The value minus 4 for an unset bit, plus 8 as in every int4 weight.
    values = _pairs_of_bits(blocks[..., 32:96]) + 4 + (high.flatten(-2) << 2)
    low, rest = low_then_high(blocks[..., 96:104]), blocks[..., None, 104:108]
    top = ((rest >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]) & 3).flatten(-2)
    scales = _halves(blocks[..., 108:])[..., None] * ((low | top << 4).to(torch.int8) - 32)
    return QuantizedWeight("int4", values.flatten(1), scales.flatten(1), None, 16)


def _iq4_xs(blocks: Tensor) -> QuantizedWeight:
    """Decode IQ4_XS: values as in IQ4_NL, with eight scales of 6 bits, minus 32.

    After a float16 factor come two bytes with the scales' high two bits and four bytes with their
    low four bits, the first scale lowest.
    """
    pairs = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)
    top = ((blocks[..., 2:4, None] >> pairs) & 3).flatten(-2)
    low = torch.stack((blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4), -1).flatten(-2)
    scales = _halves(blocks[..., :2])[..., None] * ((low | top << 4).to(torch.int8) - 32)
    values = low_then_high(_split(blocks[..., 8:], 16))
    return QuantizedWeight("int4", values.flatten(1), scales.flatten(1), None, 32, _IQ4_NL)


DECODERS: dict[str, Callable[[Tensor], QuantizedWeight]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
