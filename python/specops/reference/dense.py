# SPDX-License-Identifier: Apache-2.0
"""The dense layers in plain PyTorch."""

import torch
import torch.nn.functional as F
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` in fp32 (fp64 for fp64 input), rounded once."""
    wide = gate_up if gate_up.dtype == torch.float64 else gate_up.float()
    gate, up = wide.chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """`gelu(gate) * up`, gelu by tanh, in fp32 (fp64 for fp64 input), rounded once."""
    wide = gate_up if gate_up.dtype == torch.float64 else gate_up.float()
    gate, up = wide.chunk(2, dim=-1)
    return (F.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)


GATED = {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul}


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    activation: str | None = None,
) -> Tensor:
    """`x @ weight.T + bias` in fp32 (fp64 for fp64 input), rounded once to out_dtype.

    activation: then `silu_mul` or `gelu_tanh_mul` of that.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    out = x.to(wide) @ weight.to(wide).T
    if bias is not None:
        out = out + bias.to(wide)
    out = out.to(out_dtype or x.dtype)
    return GATED[activation](out) if activation else out


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (codes in int8, scales in float32): FastDeploy's WINT8, one scale for each output."""
    wide = weight.float()
    peak = wide.abs().amax(1, keepdim=True)
    scaled = torch.where(peak > 0, wide / peak, 0) * 127
    nearest = scaled.double().abs().add(0.5).floor() * scaled.sign()  # in float64 0.5 is exact
    return nearest.to(torch.int8), (peak / 127).to(weight.dtype).float()[:, 0]


def _in_groups(rows: Tensor) -> Tensor:
    """[rows, inputs] as [rows, groups, 128], zeros behind the last input."""
    padded = F.pad(rows, (0, -rows.shape[1] % 128))
    return padded.reshape(len(rows), padded.shape[1] // 128, 128)


def integer_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (integers of 16 bits in float64 [rows, groups, 128], the step of each group).

    A group's step is the power of two by which its largest magnitude lies in [2^14, 2^15).
    """
    groups = _in_groups(x.float())
    peak = groups.abs().amax(2, keepdim=True)
    _, exponent = torch.frexp(peak.clamp(2.0**-111))  # peak = mantissa in [0.5, 1) * 2^exponent
    step = torch.ldexp(torch.ones_like(peak), exponent - 15)
    step = torch.where(peak.isfinite(), step, torch.nan)
    return (groups.double() / step).round().clamp(-32768, 32767), step


def int8_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    activation: str | None = None,
) -> Tensor:
    """`linear` of 8-bit codes, bit for bit: exact sums of 128 inputs, then one chain of these."""
    integers, step = integer_rows(x)
    wide = _in_groups(codes.double())
    total = torch.zeros(len(x), len(codes), device=x.device)
    for group in range(integers.shape[1]):
        exact = integers[:, group] @ wide[:, group].T  # below 2^29, so float64 has it whole
        total = total + exact.float() * step[:, group]
    out = total * scales
    if bias is not None:
        out = out + bias.float()
    out = out.to(out_dtype or x.dtype)
    return GATED[activation](out) if activation else out


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns (the normalised rows, the new residual, which is x where there was none).

    hidden = residual + x, in the dtype; hidden / sqrt(mean(hidden^2) + eps) in fp32 (fp64 for fp64
    input), rounded to the dtype, then times weight in the dtype.
    """
    hidden = x if residual is None else residual + x
    wide = hidden if hidden.dtype == torch.float64 else hidden.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype), hidden


def embedding(token_ids: Tensor, weight: Tensor) -> Tensor:
    """Row token_ids[i] of weight."""
    return weight[token_ids.long()]


def mtp_input(
    row_to_request: Tensor,
    positions: Tensor,
    source_rows: Tensor,
    slots: Tensor,
    token_ids: Tensor,
    lens: Tensor,
    draft_token_ids: Tensor,
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
    """norm(embedding of the token `ahead` of the row) beside norm(the state at the row)."""
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
