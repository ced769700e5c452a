# SPDX-License-Identifier: Apache-2.0
"""Dense layers in plain PyTorch."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from specops.argument_groups import ModuleRows, TokenTables
from specops.quantization import QuantizedWeight


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return `silu(gate) * up` in fp32 (fp64 for fp64 input), rounded once."""
    wide = gate_up if gate_up.dtype == torch.float64 else gate_up.float()
    gate, up = wide.chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """Return `gelu(gate) * up` (tanh form) in fp32 (fp64 for fp64 input), rounded once."""
    wide = gate_up if gate_up.dtype == torch.float64 else gate_up.float()
    gate, up = wide.chunk(2, dim=-1)
    return (F.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)


def swiglu_oai_mul(gate_up: Tensor) -> Tensor:
    """Return the clamped gated activation of gpt-oss in fp32 (fp64 for fp64), rounded once."""
    wide = gate_up if gate_up.dtype == torch.float64 else gate_up.float()
    gate, up = wide.chunk(2, dim=-1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (gate * torch.sigmoid(1.702 * gate) * (up + 1)).to(gate_up.dtype)


GATED = {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul, "swiglu_oai": swiglu_oai_mul}


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    activation: str | None = None,
) -> Tensor:
    """Return `x @ weight.T + bias` in fp32 (fp64 for fp64 input), rounded once to out_dtype.

    activation: name of an op in `GATED` to apply to the result, or None.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    out = x.to(wide) @ weight.to(wide).T
    if bias is not None:
        out = out + bias.to(wide)
    out = out.to(out_dtype or x.dtype)
    return GATED[activation](out) if activation else out


_RANGES = {"int8": (-128, 127), "int4": (-8, 7)}


def quantize_weight(weight: Tensor, *, kind: str = "int8", group: int = 0) -> QuantizedWeight:
    """Quantize like FastDeploy's WINT8 and WINT4: one scale per output or per group of inputs."""
    least, most = _RANGES[kind]
    wide = weight.float()
    if group == 0:
        peak = wide.abs().amax(1, keepdim=True)
        scaled = torch.where(peak > 0, wide / peak, 0) * most
        values = scaled.double().abs().add(0.5).floor() * scaled.sign()  # adding 0.5 is exact
        scales = (peak / most).to(weight.dtype).float()
    else:
        groups = _in_groups(wide, group)
        high, low = groups.amax(2).clamp(min=0), groups.amin(2).clamp(max=0)
        scales = torch.maximum(high / most, low / least)
        by_input = scales.repeat_interleave(group, 1)[:, : wide.shape[1]]
        values = torch.where(by_input > 0, wide / by_input, 0).round().clamp(least, most)
    quantized = values.to(torch.int8) if kind == "int8" else (values + 8).to(torch.uint8)
    return QuantizedWeight(kind, quantized, scales, group=group)


def _code_values(weight: QuantizedWeight) -> Tensor:
    """Return the numbers that quantized values stand for: [num_outputs, num_inputs], float32."""
    if weight.code_values is not None:
        return weight.code_values.float()[weight.values.long()]
    return weight.values.float() - 8 if weight.kind == "int4" else weight.values.float()


def _by_input(scales: Tensor, weight: QuantizedWeight) -> Tensor:
    """Return the scale of each quantized value: [num_outputs, num_inputs]."""
    num_outputs, num_inputs = weight.values.shape
    if weight.kind == "fp8" and weight.group:
        scales = scales.repeat_interleave(128, 0)[:num_outputs]
    return scales.repeat_interleave(weight.group or num_inputs, 1)[:, :num_inputs]


def dequantize_weight(weight: QuantizedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return value * scale + offset, each step in float32, with columns in input order."""
    out = _code_values(weight) * _by_input(weight.scales, weight)
    if weight.offsets is not None:
        out = out + _by_input(weight.offsets, weight)
    if weight.input_order is not None:
        out = out[:, weight.input_order.long().argsort()]
    return out.to(dtype)


def _in_groups(rows: Tensor, group: int) -> Tensor:
    """Reshape [rows, inputs] to [rows, groups, group], with zeros after the last input."""
    padded = F.pad(rows, (0, -rows.shape[1] % group))
    return padded.reshape(len(rows), padded.shape[1] // group, group)


def integer_rows(x: Tensor, activations: str = "int16") -> tuple[Tensor, Tensor]:
    """Round rows to integers: return float64 [rows, groups, 128 or 32] and the step per group.

    int16: a group's step is the power of two that scales its largest magnitude to [2^14, 2^15).
    int8: a group's step is its largest magnitude over 127.
    """
    groups = _in_groups(x.float(), 128 if activations == "int16" else 32)
    peak = groups.abs().amax(2, keepdim=True)
    if activations == "int16":
        _, exponent = torch.frexp(peak.clamp(2.0**-111))  # peak = mantissa in [0.5, 1) * 2^exponent
        step = torch.ldexp(torch.ones_like(peak), exponent - 15)
        integers = (groups.double() / step).round().clamp(-32768, 32767)
    else:
        counts, most = peak >= 2.0**-100, torch.full_like(peak, 127)
        step = torch.where(counts, peak / most, 0)
        # `most` is a tensor because torch computes 127 / peak as 127 * (1 / peak).
        inverse = torch.where(counts, most / peak, 0)
        integers = (groups * inverse).double().round()
    finite = peak.isfinite()
    return torch.where(finite, integers, 0), torch.where(finite, step, torch.nan)


def fused_multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return a * b + c of float32, rounded once.

    In float64 the product is exact. A float64 sum rounded to odd gives the same float32 as the
    exact sum (Boldo and Melquiond 2008).
    """
    product, c = a.double() * b.double(), c.double()
    sum = product + c
    part = sum - product
    error = (product - (sum - part)) + (c - part)
    is_even = sum.view(torch.int64) % 2 == 0
    toward = torch.where(error > 0, torch.inf, -torch.inf).double()
    odd = torch.where((error != 0) & is_even & sum.isfinite(), torch.nextafter(sum, toward), sum)
    return odd.float()


def quantized_linear(
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    activation: str | None = None,
    activations: str | None = None,
) -> Tensor:
    """Compute `linear` with a quantized weight: the op's bits for int8 and int4, close for fp8.

    activations: type to which rows are rounded, "int16" or "int8". None means "int16" for int8
    weights and "int8" for int4 weights.
    """
    if weight.input_order is not None:
        x = x[:, weight.input_order.long()]
    if weight.kind == "fp8":
        out = _in_blocks_of_128(x, weight)
    else:
        rounded = activations or {"int8": "int16", "int4": "int8"}[weight.kind]
        out = _in_pieces(x, weight, rounded)
    if bias is not None:
        out = out + bias.to(out.dtype)
    out = out.to(out_dtype or x.dtype)
    return GATED[activation](out) if activation else out


def _in_pieces(x: Tensor, weight: QuantizedWeight, activations: str) -> Tensor:
    """Sum each piece of the inputs exactly, then add the pieces in order by fused multiply-adds.

    A piece lies in one scale group of the weight and in one group of the row.
    """
    integers, step = integer_rows(x, activations)
    size = integers.shape[2]
    piece = math.gcd(weight.group, size)
    integers = integers.reshape(len(x), integers.shape[1] * size // piece, piece)
    values = _in_groups(_code_values(weight).double(), piece)
    total = torch.zeros(len(x), len(values), device=x.device)
    by_output = weight.group == 0 and weight.offsets is None
    for p in range(values.shape[1]):
        exact = (integers[:, p] @ values[:, p].T).float()  # below 2^29, so exact in float64
        row_step = step[:, p * piece // size]
        if by_output:
            total = fused_multiply_add(exact, row_step.expand_as(exact), total)
            continue
        group = p * piece // weight.group if weight.group else 0
        total = fused_multiply_add(exact, row_step * weight.scales[:, group], total)
        if weight.offsets is not None:
            sums = integers[:, p].sum(1, keepdim=True).float().expand_as(exact)
            total = fused_multiply_add(sums, row_step * weight.offsets[:, group], total)
    return total * weight.scales[:, 0] if by_output else total


def _in_blocks_of_128(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """Sum each block of 128 inputs, scale it, and add the blocks in fp32 (fp64 for fp64 input)."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    rows, values = _in_groups(x.to(wide), 128), _in_groups(_code_values(weight).to(wide), 128)
    scales = _in_groups(_by_input(weight.scales, weight).to(wide), 128)
    total = torch.zeros(len(x), len(values), dtype=wide, device=x.device)
    for block in range(values.shape[1]):
        total = total + (rows[:, block] @ values[:, block].T) * scales[:, block, 0]
    return total


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (the normalized rows, the new residual); without `residual` the latter is x.

    The new residual is hidden = residual + x in the dtype of x. Then hidden / sqrt(mean(hidden^2) +
    eps) is computed in fp32 (fp64 for fp64 input), rounded to the dtype of x, and multiplied by
    weight in that dtype.
    """
    hidden = x if residual is None else residual + x
    wide = hidden if hidden.dtype == torch.float64 else hidden.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype), hidden


def output_gate(
    x: Tensor,
    gate: Tensor,
    activation: str = "sigmoid",
    *,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
) -> Tensor:
    """Return `x`, optionally after `rms_norm`, times sigmoid(gate) or silu(gate) in fp32."""
    y = x if norm_weight is None else rms_norm(x, norm_weight, norm_eps)[0]
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    share = F.silu(gate.to(wide)) if activation == "silu" else torch.sigmoid(gate.to(wide))
    return (y.to(wide) * share).to(x.dtype)


def embedding(token_ids: Tensor, weight: Tensor) -> Tensor:
    """Return the row of `weight` for each token id."""
    return weight[token_ids.long()]


def mtp_input(
    rows: ModuleRows,
    tokens: TokenTables,
    embedding: Tensor,
    embedding_norm: Tensor,
    hidden_norm: Tensor,
    hidden: Tensor,
    *,
    eps: float,
    ahead: int = 1,
    kept: Tensor | None = None,
    hidden_first: bool = False,
    mask_first_position: bool = False,
) -> Tensor:
    """Return [rows, 2 * width]: a normalized embedding beside a normalized hidden state.

    The embedding is that of the token `ahead` positions after the row. It is zeros if there is no
    such token, and at position 0 with mask_first_position. `rows.source_rows` selects the hidden
    state. Rows without a request are zeros.
    """
    row_to_request, positions, source_rows = rows
    slots, token_ids, lens, draft_token_ids = tokens
    out = embedding.new_zeros(len(positions), 2, embedding.shape[1])
    for row, request in enumerate(row_to_request.tolist()):
        if request < 0:
            continue
        slot, position, source = int(slots[request]), int(positions[row]), int(source_rows[row])
        text = token_ids[slot, : int(lens[slot])].tolist() + draft_token_ids[slot].tolist()
        token = text[position + ahead] if position + ahead < len(text) else -1
        if token >= 0 and not (mask_first_position and position == 0):
            row_of = embedding[token][None]
            out[row, int(hidden_first)] = rms_norm(row_of, embedding_norm, eps)[0]
        if source >= 0:
            state = hidden[source]
        else:
            assert kept is not None
            state = kept.flatten(0, 1)[-2 - source]
        out[row, 1 - int(hidden_first)] = rms_norm(state[None], hidden_norm, eps)[0]
    return out.flatten(1)
