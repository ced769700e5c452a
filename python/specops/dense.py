# SPDX-License-Identifier: Apache-2.0
"""The row-identical dense layers of a transformer block.

Every output row is computed with a reduction order that depends on the shape of the layer alone: a
row has the same bits alone, in a batch, or in the middle of a prefill chunk.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from specops import _C
from specops._wrong import check_int, check_kind, describe, empty, unless_wrong

# Up to so many rows CUDA kernels stream weights past all of them, and need no workspace.
_MAX_STREAMED_ROWS = 16
# The head of a workspace: of how many leaves of a tile's sums are there.
_WORKSPACE_COUNTERS = 128
# Numbers of a weight that are rounded at once, in float32.
_QUANTIZED_AT_ONCE = 1 << 22


class PackedWeight(NamedTuple):
    """A weight in the layout `linear` reads; made by `pack_weight` or `quantize_weight`.

    Attributes:
        kind: "plain", the weight's own numbers, or "int8", codes and a scale for each output.
        data: the packed numbers; their layout is `linear`'s own and may change.
        scales: [num_outputs], float32, of kind "int8"; None of a plain weight.
        num_outputs: rows of the original weight.
        num_inputs: columns of the original weight.
        activation: if any, its outputs are gates, then as many ups, of which `linear` makes
            `activation(gate) * up`.
        num_leaves: of how many chains of additions a sum is made; 1 on cpu, up to 4 on CUDA.
        max_split_rows: up to how many rows `linear` gains from a workspace; 0 on cpu.
    """

    kind: str
    data: Tensor
    scales: Tensor | None
    num_outputs: int
    num_inputs: int
    activation: str | None = None
    num_leaves: int = 1
    max_split_rows: int = 0


def quantize_weight(
    weight: Tensor, *, kind: str = "int8", activation: str | None = None
) -> PackedWeight:
    """Rounds a weight to 8-bit codes with a scale for each output, packed for `linear`.

    The codes and scales are FastDeploy's WINT8, as its GPU path makes them, and those of
    `reference.quantize_weight`: with peak the largest magnitude of an output's weights,

        code  = round(weight / peak * 127), ties away from zero
        scale = peak / 127, rounded to the dtype of `weight`

    Args:
        weight: [num_outputs, num_inputs], float32, bfloat16 or float16. Rows may be strided.
        kind: "int8".
        activation: as in `pack_weight`.

    Returns:
        The packed codes: a byte a number, num_outputs and num_inputs rounded up as in
        `pack_weight`, and 4 bytes an output. `weight` may be freed.

    Raises:
        ValueError: a shape, dtype, layout or device differs from the above.

    Note:
        An output whose weights are all zero has codes and scale 0; one with an infinity or a NaN
        has scale NaN, and `linear` makes NaN of it. Takes memory for a few rows in float32.
    """
    if kind != "int8":
        raise ValueError(f"quantize_weight: kind must be 'int8', got {describe(kind)}")
    _check_matrix("quantize_weight", weight)
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            "quantize_weight: weight must be float32, bfloat16 or float16, got " + describe(weight)
        )
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
    rows = max(1, _QUANTIZED_AT_ONCE // max(1, weight.shape[1]))
    for first in range(0, len(weight), rows):
        part = weight.detach()[first : first + rows].float()
        peak = part.abs().amax(1) if part.shape[1] else part.new_zeros(len(part))
        scales[first : first + rows] = (peak / 127).to(weight.dtype)
        scaled = (part / peak[:, None] * 127).nan_to_num_(0)  # 0 / 0, and where no number is right
        whole = scaled.abs().floor()
        whole += scaled.abs() - whole >= 0.5
        codes[first : first + rows] = whole.copysign_(scaled)
    scales.masked_fill_(scales.isinf(), torch.nan)
    return pack_weight(codes, scales=scales, activation=activation)


def pack_weight(
    weight: Tensor, *, scales: Tensor | None = None, activation: str | None = None
) -> PackedWeight:
    """Copies a weight into the layout `linear` reads.

    Args:
        weight: [num_outputs, num_inputs], bfloat16 or float32, on CUDA also float16; or codes in
            int8, of which each stands for code * scale. Rows may be strided.
        scales: [num_outputs], float32: of codes, and of nothing else. They are kept, not copied.
        activation: of a weight whose first half of rows makes gates and the other half ups: "silu"
            or "gelu_tanh". `linear` then returns `activation(gate) * up`, half as wide.

    Returns:
        The packed copy. It takes the bytes of `weight`, with num_outputs (with an activation: each
        half of it) rounded up to 16 and, for bfloat16, num_inputs to 2; on CUDA to 32 and 64.
        Codes: num_inputs to 2, on CUDA 16. `weight` may be freed.

    Raises:
        ValueError: a shape, dtype, layout or device differs from the above.

    Note:
        A permutation: no number changes.
    """
    _check_matrix("pack_weight", weight)
    num_outputs, num_inputs = weight.shape
    kind = "int8" if weight.dtype == torch.int8 else "plain"
    *shape, num_leaves, max_split_rows = _C.packed_weight_layout(
        weight.device.type, weight.element_size(), num_outputs, num_inputs, activation
    )
    data = torch.empty(shape, dtype=weight.dtype, device=weight.device)
    _C.pack_weight(weight, scales, data, activation)
    sizes = (num_outputs, num_inputs)
    return PackedWeight(kind, data, scales, *sizes, activation, num_leaves, max_split_rows)


def _check_matrix(op: str, weight: Tensor) -> None:
    if not isinstance(weight, Tensor) or weight.is_nested or weight.dim() != 2:
        raise ValueError(f"{op}: weight must be [num_outputs, num_inputs], got {describe(weight)}")


def linear(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """Multiplies rows with a packed weight: `x @ weight.T + bias`.

    Same as `reference.linear` on the weight before packing: products summed in fp32, bias added
    last, rounded once. A weight packed with an activation makes `silu_mul` or `gelu_tanh_mul` of
    that, to the same bits as that op after it.

    With int8 codes, the same as `reference.int8_linear`, bit for bit, on every device and
    instruction set. A group is 128 inputs of a row, from a multiple of 128 on:

        step     = 2 ** (floor(log2(largest magnitude of the group)) - 14)
        integers = x / step, rounded to 16 bits, ties to even
        total    = total + float32(sum(integers * codes)) * step       over the groups in order
        out      = total * scale + bias                        each operation rounded to float32

    So an input is off by at most 2 ** -15 of the largest of its group, and not at all if it is a
    bfloat16 of at least 1/128 of that (float16: 1/16); the rest is one rounding a group. Magnitudes
    below 2 ** -126 count as zeros. A row with an infinity or a NaN becomes NaN, no other row does.

    Args:
        x: [rows, num_inputs], dtype of the weight; with int8 codes bfloat16 or float32, on CUDA
            also float16. Rows may be strided.
        weight: [num_outputs, num_inputs], packed by `pack_weight` or `quantize_weight`.
        bias: [num_outputs], dtype of `x`; or None.
        out: [rows, num_outputs], dtype of `x`, or float32; with an activation: [rows,
            num_outputs / 2], dtype of `x`. Allocated when absent.
        out_dtype: dtype of an `out` to be allocated; that of `x` when absent.
        workspace: [floats], float32, for partial sums when a CUDA device would be left idle by few
            rows and outputs; see `linear_workspace_size`. Allocated when absent; a short one means
            no splitting. Its head must be zero, and is zero again afterwards, as that of
            `append_attention` must be, and is looked at in the same way.

    Returns:
        `out`.

    Raises:
        ValueError: a shape, dtype, layout or device differs from the above.

    Note:
        Deterministic. Each output element is one chain of additions over the inputs in order (on
        CUDA: up to four such chains, begun at inputs fixed by num_inputs alone and added in order):
        its bits do not depend on the number of rows, on which row it is, on the other outputs, on
        threads or on the workspace.
    """
    check_kind("linear", "weight", weight, PackedWeight, " of pack_weight")
    if out_dtype is not None:
        _check_out_dtype(out_dtype, x, weight, out)
    if out is None:
        width = weight.num_outputs // 2 if weight.activation else weight.num_outputs
        # The op refuses sizes below 0.
        out = empty(lambda: ((x.shape[0], max(width, 0)), out_dtype, x))
    if workspace is None and weight.max_split_rows > 0:
        floats = unless_wrong(lambda: linear_workspace_size(x.shape[0], weight))
        if floats:
            workspace = torch.empty(floats, dtype=torch.float32, device=x.device)
            workspace[:_WORKSPACE_COUNTERS] = 0
    _C.linear(x, weight, bias, out, workspace)
    return out


def _check_out_dtype(
    out_dtype: torch.dtype, x: Tensor, weight: PackedWeight, out: Tensor | None
) -> None:
    if isinstance(out, Tensor):
        allowed = {out.dtype}
    else:
        own = unless_wrong(lambda: x.dtype) or torch.float32
        allowed = {own} if weight.activation else {own, torch.float32}
    if not isinstance(out_dtype, torch.dtype) or out_dtype not in allowed:
        names = " or ".join(sorted(map(describe, allowed)))
        raise ValueError(f"linear: out_dtype must be {names}, got {describe(out_dtype)}")


def linear_workspace_size(num_rows: int, weight: PackedWeight) -> int:
    """Returns a size of workspace, in floats, with which `linear` can split its sums.

    Args:
        num_rows: rows of `x`.
        weight: packed by `pack_weight`.

    Returns:
        The size; 0 where nothing is ever split: on cpu, and for few rows. It suffices for every
        call of no more rows, and may serve calls with any weights, one after the other. The head of
        the workspace counts arrivals: make it of zeros; every call leaves the zeros in place.

    Raises:
        ValueError: num_rows is negative, or weight is not packed.
    """
    check_int("linear_workspace_size", "num_rows", num_rows)
    check_kind("linear_workspace_size", "weight", weight, PackedWeight, " of pack_weight")
    rows = min(num_rows, weight.max_split_rows)
    if rows <= _MAX_STREAMED_ROWS:
        return 0
    return _WORKSPACE_COUNTERS + weight.num_leaves * rows * ((weight.num_outputs + 31) // 32 * 32)


def linear_kernels(num_rows: int) -> list[str]:
    """Returns the names of the CUDA kernels that can multiply so many rows of 16-bit types.

    Args:
        num_rows: rows of `x`, at least 0.

    Returns:
        Names for `set_linear_kernel`, with the outputs and rows that a warp (`stream_32x8`) or a
        block (`tile_128x64`) has.
    """
    return _C.linear_kernels(num_rows)


def set_linear_kernel(kernel: str | None) -> None:
    """Chooses the CUDA kernel of `linear` for 16-bit types (tests and benches).

    It never changes a bit. `linear` then refuses rows, an `x` or a device that the kernel cannot do
    with. float32 has one kernel only, and the cpu others: both do without.

    Args:
        kernel: one of `linear_kernels`; None: whichever suits the shape, the default.

    Raises:
        ValueError: the name is unknown.
    """
    _C.set_linear_kernel(kernel)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Normalises rows by their root mean square; with `residual`, first adds `x` to it IN PLACE.

    Same as `reference.rms_norm`, with its roundings, which are those of Llama and Qwen3 in
    transformers:

        hidden = residual = residual + x   # or x, without a residual; rounded to the dtype
        out = (hidden / sqrt(mean(hidden ** 2) + eps)).to(dtype) * weight

    Args:
        x: [rows, width], float32, bfloat16 or float16. Rows may be strided.
        weight: [width], dtype of `x`.
        eps: added to the mean square; finite, at least 0.
        residual: [rows, width], dtype of `x`; becomes `residual + x`. Or None.
        out: [rows, width], dtype of `x`; may be `x` itself. Allocated when absent.

    Returns:
        `out`.

    Raises:
        ValueError: a shape, dtype, layout or device differs from the above.

    Note:
        Mutates `residual`. Deterministic; a row is summed by one fixed tree.

    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization".
    """
    if out is None:
        out = empty(lambda: (x.shape, None, x))
    _C.rms_norm(x, weight, eps, residual, out)
    return out


def embedding(token_ids: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Gathers one row of `weight` per token id.

    Same as `reference.embedding`.

    Args:
        token_ids: [rows], int32.
        weight: [vocab, width], float32, bfloat16 or float16.
        out: [rows, width], dtype of `weight`. Allocated when absent.

    Returns:
        `out`.

    Raises:
        ValueError: a shape, dtype, layout or device differs from the above, or an id is outside
            [0, vocab), -1 included; nothing is written then.

    Note:
        Deterministic; a copy.
    """
    if out is None:
        out = empty(lambda: ((token_ids.shape[0], weight.shape[-1]), None, weight))
    _C.embedding(token_ids, weight, out)
    return out


def silu_mul(gate_up: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Applies the gated activation `silu(gate) * up`.

    Same as `reference.silu_mul`: computed in fp32, rounded once to the dtype of `gate_up`.

    Args:
        gate_up: [rows, 2 * width], float32, bfloat16 or float16. Each row holds gate, then up; rows
            may be strided.
        out: [rows, width], dtype of `gate_up`. Allocated when absent.

    Returns:
        `out`.

    Raises:
        ValueError: a shape, dtype, layout or device differs from the above.

    Note:
        Deterministic; elementwise.

    Source: Shazeer 2020, "GLU Variants Improve Transformer".
    """
    if out is None:
        out = empty(lambda: ((gate_up.shape[0], gate_up.shape[-1] // 2), None, gate_up))
    _C.silu_mul(gate_up, out)
    return out


def gelu_tanh_mul(gate_up: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Applies the gated activation `gelu(gate) * up`, gelu in its form with tanh.

        gelu(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3)))

    Same as `reference.gelu_tanh_mul`: computed in fp32, rounded once to the dtype of `gate_up`.

    Args:
        gate_up: [rows, 2 * width], float32, bfloat16 or float16. Each row holds gate, then up; rows
            may be strided.
        out: [rows, width], dtype of `gate_up`. Allocated when absent.

    Returns:
        `out`.

    Raises:
        ValueError: a shape, dtype, layout or device differs from the above.

    Note:
        Deterministic; elementwise.

    Source: Hendrycks and Gimpel 2016, "Gaussian Error Linear Units"; gated: Shazeer 2020. Gemma's.
    """
    if out is None:
        out = empty(lambda: ((gate_up.shape[0], gate_up.shape[-1] // 2), None, gate_up))
    _C.gelu_tanh_mul(gate_up, out)
    return out


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
    out: Tensor | None = None,
) -> Tensor:
    """Makes the input of a drafting module's projection: tokens shifted, states not.

    Same as `reference.mtp_input`. For a row at position i of a request in slot s:

        token = (token_ids[s, :lens[s]] + draft_token_ids[s])[i + ahead], zeros where there is none
        state = hidden[source_rows[row]], or kept[-2 - source_rows[row]] by its first two dimensions
        out   = rms_norm(embedding[token], embedding_norm) | rms_norm(state, hidden_norm)

    A row that is nobody's is zeros.

    Args:
        row_to_request: [rows], int32. Of `batching.DraftIndices`, as the next two; -1: none.
        positions: [rows], int32.
        source_rows: [rows], int32.
        slots: [batch], int32. Row of each request in the next three.
        token_ids: [num_slots, max_len], int32. Prompt and output of each request; rows may be
            strided.
        lens: [num_slots], int32. How many of them there are.
        draft_token_ids: [num_slots, k], int32. Drafts behind them; -1: none there.
        embedding: [vocab, width], float32, bfloat16 or float16.
        embedding_norm: [width], dtype of `embedding`.
        hidden_norm: [width], dtype of `embedding`.
        hidden: [hidden rows, width], dtype of `embedding`; rows may be strided.
        eps: of both norms; finite, at least 0.
        ahead: which module it is, from 1: how far ahead its tokens are.
        kept: [num_slots, window, width], dtype of `embedding`. As `batching.keep_hidden_rows` wrote
            it; absent: no row names it.
        hidden_first: Whether the state's half comes first (MiMo).
        mask_first_position: Whether position 0 takes zeros for its token, as some engines do.
        out: [rows, 2 * width], dtype of `embedding`. Allocated when absent.

    Returns:
        `out`.

    Raises:
        ValueError: a shape, dtype, layout or device differs from the above; a request, slot,
            length, source row or token id is out of range. Nothing has been written then. On CUDA
            wrong values are told by `specops.check_errors`; such a row is zeros.

    Note:
        Deterministic; each half is summed as `rms_norm` sums a row, to the same bits.

    Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 2.2, equation 21.
    """
    if out is None:
        out = empty(
            lambda: (
                (row_to_request.numel(), 2 * embedding.shape[1]),
                None,
                embedding,
            )
        )
    _C.mtp_input(
        row_to_request,
        positions,
        source_rows,
        slots,
        token_ids,
        lens,
        draft_token_ids,
        embedding,
        embedding_norm,
        hidden_norm,
        hidden,
        kept,
        eps,
        ahead,
        hidden_first,
        mask_first_position,
        out,
    )
    return out
