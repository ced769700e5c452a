# SPDX-License-Identifier: Apache-2.0
"""Dense layers of a transformer block, with the same bits of a row in every batch.

Every output row is computed with a reduction order that depends only on the shape of the layer: a
row has the same bits alone, in a batch, or in the middle of a prefill chunk.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from specops import _C
from specops._checks import check_int, check_kind, describe, empty, try_or_none
from specops._huge_pages import ask_for_huge_pages
from specops.argument_groups import (
    ModuleRows as ModuleRows,
)
from specops.argument_groups import (
    TokenTables as TokenTables,
)
from specops.quantization import (
    FP8_BLOCK,
    VALUE_DTYPES,
    QuantizedWeight,
    check_matrix,
    check_quantized,
    num_groups,
)

# Up to this many rows, CUDA kernels stream the weights past all rows and need no workspace.
_MAX_STREAMED_ROWS = 16
# Counters at the start of a workspace, one per output tile: finished leaves (partial sums).
_WORKSPACE_COUNTERS = 128
# Rows of a tile of rounded rows; a workspace has whole tiles.
TILE_ROWS = 64


class PackedWeight(NamedTuple):
    """A weight in the layout `linear` reads; made by `pack_weight`.

    Attributes:
        kind: "plain" for unquantized weights; or "int8", "int4" or "fp8" for quantized values with
            scales.
        data: the packed values; their layout is private to `linear` and may change.
        scales: float32 scales of quantized values: [num_outputs] for integers with one scale per
            output, otherwise packed like `data`; None for a plain weight.
        num_outputs: rows of the original weight.
        num_inputs: columns of the original weight.
        activation: if set, the first half of the outputs are gates and the other half ups, and
            `linear` returns `activation(gate) * up`.
        offsets: float32, packed like scales in groups; or None.
        group: inputs that share a scale; 0: all of them.
        activations: type to which `linear` rounds rows before it multiplies: "int16", "int8" or
            "float" (no rounding).
        input_order: int32 [num_inputs], the input of a row that each column of the weight is
            multiplied with; None: the identity.
        code_values: int8 [16], number that each int4 value stands for; None: value - 8.
        workspace_per_row: floats of workspace that `linear` uses per row; 0 on cpu.
        max_workspace_rows: largest number of rows for which `linear` uses a workspace; 0 on cpu.
    """

    kind: str
    data: Tensor
    scales: Tensor | None
    num_outputs: int
    num_inputs: int
    activation: str | None = None
    offsets: Tensor | None = None
    group: int = 0
    activations: str = "float"
    input_order: Tensor | None = None
    code_values: Tensor | None = None
    workspace_per_row: int = 0
    max_workspace_rows: int = 0


def pack_weight(
    weight: Tensor | QuantizedWeight,
    *,
    activation: str | None = None,
    activations: str | None = None,
) -> PackedWeight:
    """Copy a weight into the layout `linear` reads.

    Args:
        weight: [num_outputs, num_inputs], bfloat16 or float32, on CUDA also float16; rows may be
            strided. Or a `QuantizedWeight`.
        activation: "silu", "gelu_tanh" or "swiglu_oai" for a weight whose first half of rows makes
            gates and the other half ups. `linear` then applies `silu_mul`, `gelu_tanh_mul` or
            `swiglu_oai_mul` to both halves, and its output is half as wide.
        activations: type to which `linear` rounds rows. For int8 and int4 weights "int16", per 128
            inputs (default of int8), or "int8", per 32 inputs (default of int4); for other weights
            "float": no rounding.

    Returns:
        The packed copy. It has as many bytes as `weight` (int4: half a byte per value), after
        num_outputs (with an activation: each half of it) and num_inputs are rounded up. On the CPU,
        num_outputs is rounded to 16 and, for bfloat16 and fp8, num_inputs to 2; for int8 and int4,
        they are rounded to 64 and 16. On CUDA, num_outputs is rounded to 32, and num_inputs to 64
        for 16-bit types and to 128 for quantized values. Scales and offsets of groups are packed
        separately. `weight` may be freed; only `code_values`, `input_order` and scales of whole
        outputs are referenced instead of copied.

    Raises:
        ValueError: a shape, dtype, layout, device or value differs from the above.

    Note:
        Packing permutes values and changes none.
    """
    if isinstance(weight, QuantizedWeight):
        return _pack_quantized(weight, activation, activations)
    if activations not in (None, "float"):
        got = describe(activations)
        raise ValueError(f"pack_weight: activations must be 'float' for a plain weight, got {got}")
    check_matrix("pack_weight", "weight", weight)
    if weight.dtype in VALUE_DTYPES.values():
        raise ValueError(
            f"pack_weight: weight must be real, or a QuantizedWeight, got {describe(weight)}"
        )
    num_outputs, num_inputs = weight.shape
    *shape, _, _, workspace_per_row, max_workspace_rows = _C.packed_weight_layout(
        weight.device.type,
        "plain",
        weight.element_size(),
        num_outputs,
        num_inputs,
        activation,
        0,
        "float",
    )
    data = ask_for_huge_pages(torch.empty(shape, dtype=weight.dtype, device=weight.device))
    _C.pack_weight(weight, data, activation)
    return PackedWeight(
        "plain",
        data,
        None,
        num_outputs,
        num_inputs,
        activation,
        workspace_per_row=workspace_per_row,
        max_workspace_rows=max_workspace_rows,
    )


_ACTIVATIONS = {"int8": ("int16", "int8"), "int4": ("int8", "int16"), "fp8": ("float",)}


def _pack_quantized(
    weight: QuantizedWeight, activation: str | None, activations: str | None
) -> PackedWeight:
    check_quantized("pack_weight", weight)
    kind, values, scales, offsets, group, code_values, input_order = weight
    allowed = _ACTIVATIONS[kind]
    if activations is None:
        activations = allowed[0]
    if activations not in allowed:
        names = " or ".join(map(repr, allowed))
        raise ValueError(
            f"pack_weight: activations must be {names} for kind {kind}, got {describe(activations)}"
        )
    num_outputs, num_inputs = values.shape
    if offsets is not None and group == 0:  # kernels take offsets per group: use one large group
        group = max(1, -(-num_inputs // 128)) * 128
        groups = num_groups(num_inputs, group)
        scales, offsets = scales[:, :groups], offsets[:, :groups]
    *shape, scale_block, turn, workspace_per_row, max_workspace_rows = _C.packed_weight_layout(
        values.device.type, kind, 1, num_outputs, num_inputs, activation, group, activations
    )
    data = ask_for_huge_pages(torch.empty(shape, dtype=values.dtype, device=values.device))
    _C.pack_weight(values, data, activation)
    if kind == "fp8" and group:
        scales = scales.repeat_interleave(FP8_BLOCK, 0)[:num_outputs]
    if scale_block:
        scales = _in_blocks(scales, activation, scale_block, turn)
        offsets = None if offsets is None else _in_blocks(offsets, activation, scale_block, turn)
    else:
        scales = scales[:, 0].contiguous()
    return PackedWeight(
        kind,
        data,
        scales,
        num_outputs,
        num_inputs,
        activation,
        offsets,
        group,
        activations,
        input_order,
        code_values,
        workspace_per_row,
        max_workspace_rows,
    )


def _in_blocks(scales: Tensor, activation: str | None, block: int, turn: int) -> Tensor:
    """Repack [num_outputs, groups] as [blocks, groups, block], alternating `turn` gates and ups."""
    num_outputs, groups = scales.shape
    halves = 2 if activation else 1
    width = num_outputs // halves
    turns = -(-width // turn)
    padded = scales.new_zeros(halves, turns * turn, groups)
    padded[:, :width] = scales.view(halves, width, groups)
    ordered = padded.view(halves, turns, turn, groups).transpose(0, 1)
    blocks = -(-halves * turns * turn // block)
    out = scales.new_zeros(blocks * block, groups)
    out[: halves * turns * turn] = ordered.reshape(halves * turns * turn, groups)
    return out.view(blocks, block, groups).transpose(1, 2).contiguous()


def linear(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """Multiply rows with a packed weight: `x @ weight.T + bias`.

    Same as `reference.linear` on the weight before packing: products summed in fp32, bias added
    last, rounded once. With a weight packed with an activation, the result has the same bits as
    `silu_mul`, `gelu_tanh_mul` or `swiglu_oai_mul` after `linear`.

    For int8 and int4 weights, the same as `reference.quantized_linear`, bit for bit, on every
    device and instruction set. Rows are rounded to integers in groups of consecutive inputs:

        int16, 128 inputs:  step = 2 ** (floor(log2(peak)) - 14), integers = x / step
        int8, 32 inputs:    step = peak / 127, integers = x * (127 / peak)

    with peak the largest magnitude of the group, each operation rounded to float32, integers to the
    nearest, ties to even. A piece is gcd(group of the weight, group of the row) inputs, so that it
    has one step and one scale (and offset) per output. Over the pieces in order, from total = 0:

        total = fma(float32(sum(integers * values)), step * scale, total)
        total = fma(float32(sum(integers)), step * offset, total)            where there are offsets

    and then the bias. If an output has one scale and no offset, `step` replaces `step * scale`, and
    the total is multiplied by the scale at the end.

    With int16 the error of an input is at most 2 ** -15 of the largest input of its group, and zero
    for a bfloat16 of at least 1/128 of the largest (float16: 1/16); each piece adds one more
    rounding. Magnitudes below 2^-126 count as zeros; so do int8 groups whose peak is below 2^-100.
    A row with an infinity or a NaN becomes NaN, no other row does.

    For fp8 weights, the same as `reference.quantized_linear`, within rounding: the sums of 128
    inputs are those of a plain weight, and total = fma(sum, scale, total). On CUDA a float32 is
    multiplied as the sum of three bfloat16.

    Args:
        x: [rows, num_inputs], dtype of the weight; for quantized weights bfloat16 or float32, on
            CUDA also float16. Rows may be strided.
        weight: [num_outputs, num_inputs], packed by `pack_weight`.
        bias: [num_outputs], dtype of `x`; or None.
        out: [rows, num_outputs], dtype of `x`, or float32; with an activation: [rows,
            num_outputs / 2], dtype of `x`. Allocated when absent.
        out_dtype: dtype of an `out` to be allocated; that of `x` when absent.
        workspace: [floats], float32, for CUDA; see `linear_workspace_size`. With a plain weight, it
            holds partial sums when few rows and outputs would leave the device idle. With an int8
            or int4 weight, it holds many rows after rounding, so that they are rounded once.
            Allocated when absent; a short one is not used, which costs only time. It begins with
            counters, which must be zero and are zero again afterwards; the checks and rules for the
            workspace of `append_attention` apply.

    Returns:
        `out`.

    Raises:
        ValueError: a shape, dtype, layout or device differs from the above. On CUDA an index of
            `weight.input_order` that is out of range is reported by `specops.check_errors`, and the
            input counts as zero.

    Note:
        Deterministic. Each output element is one chain of additions over the inputs in order. On
        CUDA, for a plain weight, there are up to four chains, which start at inputs fixed by
        num_inputs alone and are added in order. The bits do not depend on the number of rows, on
        the row's index, on the other outputs, on threads or on the workspace.
    """
    check_kind("linear", "weight", weight, PackedWeight, " of pack_weight")
    if out_dtype is not None:
        _check_out_dtype(out_dtype, x, weight, out)
    if out is None:
        width = weight.num_outputs // 2 if weight.activation else weight.num_outputs
        # The op rejects negative sizes itself.
        out = empty(lambda: ((x.shape[0], max(width, 0)), out_dtype, x))
    if workspace is None and weight.max_workspace_rows > 0:
        floats = try_or_none(lambda: linear_workspace_size(x.shape[0], weight))
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
        own = try_or_none(lambda: x.dtype) or torch.float32
        allowed = {own} if weight.activation else {own, torch.float32}
    if not isinstance(out_dtype, torch.dtype) or out_dtype not in allowed:
        names = " or ".join(sorted(map(describe, allowed)))
        raise ValueError(f"linear: out_dtype must be {names}, got {describe(out_dtype)}")


def linear_workspace_size(num_rows: int, weight: PackedWeight) -> int:
    """Return the workspace size, in floats, with which `linear` is fastest.

    Args:
        num_rows: rows of `x`.
        weight: packed by `pack_weight`.

    Returns:
        The size; 0 if no workspace is ever used: on cpu, and for few rows. It suffices for every
        call with at most `num_rows` rows; calls with different weights may share one workspace, one
        after the other. For int8 and int4 weights, it grows with the number of rows and takes 1.25
        bytes (with int16 activations 2.25) per row and input. The workspace begins with counters:
        allocate it with zeros; every call leaves the counters zero.

    Raises:
        ValueError: num_rows is negative, or weight is not packed.
    """
    check_int("linear_workspace_size", "num_rows", num_rows)
    check_kind("linear_workspace_size", "weight", weight, PackedWeight, " of pack_weight")
    rows = min(num_rows, weight.max_workspace_rows)
    if rows <= _MAX_STREAMED_ROWS:
        return 0
    tiles = (rows + TILE_ROWS - 1) // TILE_ROWS
    return _WORKSPACE_COUNTERS + tiles * TILE_ROWS * weight.workspace_per_row


def linear_kernels(num_rows: int) -> list[str]:
    """Return the names of the CUDA kernels that support this number of rows of 16-bit types.

    Args:
        num_rows: rows of `x`, at least 0.

    Returns:
        Names for `set_linear_kernel`. They contain the numbers of outputs and rows per warp
        (`stream_32x8`) or per block (`tile_128x64`).
    """
    return _C.linear_kernels(num_rows)


def set_linear_kernel(kernel: str | None) -> None:
    """Choose the CUDA kernel of `linear` for 16-bit types (for tests and benchmarks).

    The choice never changes a bit of a result. `linear` rejects a number of rows, an `x` or a
    device that the chosen kernel does not support. The choice has no effect on float32, which has
    only one kernel, and on the CPU.

    Args:
        kernel: one of `linear_kernels`; None, the default: the kernel that suits the shape.

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
    """Normalize rows by their root mean square; with `residual`, first add `x` to it IN PLACE.

    Same as `reference.rms_norm`, with the same roundings as Llama and Qwen3 in transformers:

        hidden = residual = residual + x   # or x, without a residual; rounded to the dtype
        out = (hidden / sqrt(mean(hidden ** 2) + eps)).to(dtype) * weight

    Args:
        x: [rows, width], float32, bfloat16 or float16. Rows may be strided.
        weight: [width], dtype of `x`.
        eps: added to the mean square; finite, at least 0.
        residual: [rows, width], dtype of `x`, or None; becomes `residual + x`.
        out: [rows, width], dtype of `x`; may be `x` itself. Allocated when absent.

    Returns:
        `out`.

    Raises:
        ValueError: a shape, dtype, layout or device differs from the above.

    Note:
        Mutates `residual`. Deterministic; a row is summed in one fixed tree.

    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization".
    """
    if out is None:
        out = empty(lambda: (x.shape, None, x))
    _C.rms_norm(x, weight, eps, residual, out)
    return out


def output_gate(
    x: Tensor,
    gate: Tensor,
    activation: str = "sigmoid",
    *,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply the outputs of attention heads by a gate, optionally after an RMSNorm.

    Same as `reference.output_gate`. For each head of a row:

        y = rms_norm(x, norm_weight, norm_eps)   # or x, without a norm; rounded to the dtype
        out = y * sigmoid(gate)                  # or y * silu(gate); in fp32, rounded once

    Args:
        x: [rows, heads, dim], float32, bfloat16 or float16. Rows may be strided.
        gate: [rows, heads, dim], or [rows, heads, 1] for one gate a head; dtype of `x`. Rows may be
            strided.
        activation: activation of the gate, "sigmoid" or "silu".
        norm_weight: [dim], dtype of `x`; None: no norm.
        norm_eps: added to the mean square; finite, at least 0.
        out: [rows, heads, dim], dtype of `x`; may be `x` itself, not `gate`. Allocated when absent.

    Returns:
        `out`.

    Raises:
        ValueError: a shape, dtype, layout or device differs from the above.

    Note:
        Deterministic; a head is summed in the same fixed tree as in `rms_norm`.

    Source: Qiu et al. 2025, "Gated Attention for Large Language Models"; with a norm: Yang, Kautz
    and Hatamizadeh 2024, "Gated Delta Networks".
    """
    if out is None:
        out = empty(lambda: (x.shape, None, x))
    _C.output_gate(x, gate, activation, norm_weight, norm_eps, out)
    return out


def embedding(token_ids: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Gather one row of `weight` per token id.

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
    """Apply the gated activation `silu(gate) * up`.

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
    """Apply the gated activation `gelu(gate) * up`, with the tanh form of gelu.

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

    Source: Hendrycks and Gimpel 2016, "Gaussian Error Linear Units"; gated: Shazeer 2020; used by
    Gemma.
    """
    if out is None:
        out = empty(lambda: ((gate_up.shape[0], gate_up.shape[-1] // 2), None, gate_up))
    _C.gelu_tanh_mul(gate_up, out)
    return out


def swiglu_oai_mul(gate_up: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Apply the gated activation of gpt-oss, with clamped gates and ups.

        gate = min(gate, 7)
        up   = min(max(up, -7), 7)
        out  = gate * sigmoid(1.702 * gate) * (up + 1)

    Same as `reference.swiglu_oai_mul`: computed in fp32, rounded once to the dtype of `gate_up`.

    Args:
        gate_up: [rows, 2 * width], float32, bfloat16 or float16. Each row holds gate, then up; rows
            may be strided.
        out: [rows, width], dtype of `gate_up`. Allocated when absent.

    Returns:
        `out`.

    Raises:
        ValueError: a shape, dtype, layout or device differs from the above.

    Note:
        Deterministic; elementwise. NaN stays NaN.

    Source: OpenAI's gpt-oss.
    """
    if out is None:
        out = empty(lambda: ((gate_up.shape[0], gate_up.shape[-1] // 2), None, gate_up))
    _C.swiglu_oai_mul(gate_up, out)
    return out


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
    out: Tensor | None = None,
) -> Tensor:
    """Compute the input of an MTP module's projection from shifted tokens and hidden states.

    Same as `reference.mtp_input`. For a row at position i of a request in slot s:

        token = (token_ids[s, :lens[s]] + draft_token_ids[s])[i + ahead], or zeros without a token
        state = hidden[source_rows[row]], or flattened_kept[-2 - source_rows[row]]
        out   = rms_norm(embedding[token], embedding_norm) | rms_norm(state, hidden_norm)

    flattened_kept is `kept` with its first two dimensions merged. A row without a request is zeros.

    Args:
        rows: rows of the pass.
        tokens: tokens and drafts of every request.
        embedding: [vocab, width], float32, bfloat16 or float16.
        embedding_norm: [width], dtype of `embedding`.
        hidden_norm: [width], dtype of `embedding`.
        hidden: [hidden rows, width], dtype of `embedding`; rows may be strided.
        eps: epsilon of both norms; finite, at least 0.
        ahead: index of the module, from 1: its tokens are this many positions after the row.
        kept: [num_slots, window, width], dtype of `embedding`, written by
            `batching.keep_hidden_rows`; may be absent if no row refers to it.
        hidden_first: whether the hidden state's half comes first (MiMo).
        mask_first_position: whether position 0 uses zeros for its token, as some engines do.
        out: [rows, 2 * width], dtype of `embedding`. Allocated when absent.

    Returns:
        `out`.

    Raises:
        ValueError: a shape, dtype, layout or device differs from the above; a request, slot,
            length, source row or token id is out of range. Nothing has been written then. On CUDA
            wrong values are reported by `specops.check_errors`; such a row is zeros.

    Note:
        Deterministic; each half is normalized to the same bits as by `rms_norm`.

    Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 2.2, equation 21.
    """
    if out is None:
        out = empty(
            lambda: (
                (rows.row_to_request.numel(), 2 * embedding.shape[1]),
                None,
                embedding,
            )
        )
    _C.mtp_input(
        rows,
        tokens,
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
