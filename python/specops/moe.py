# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: routing, one product per expert over its rows, and the weighted sum.

    ids, weights = moe_route(logits, top_k)
    order = moe_sort(ids, num_experts)
    gated = moe_linear(x, gate_up, order.expert_indptr, order.row_indices)
    out = moe_linear(gated, down, order.expert_indptr, out_dtype=torch.float32)
    y = moe_combine(out, order.places, weights, shared, dtype=x.dtype)

A row's bits depend on that row alone: not on the other rows, nor on how many rows its experts get.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from specops import _C
from specops._checks import check_int, check_kind, describe, empty, try_or_none
from specops._huge_pages import ask_for_huge_pages
from specops.dense import TILE_ROWS, PackedWeight, linear_workspace_size

# With more pairs per expert than this, CUDA rounds rows in advance, and multiplies tiles of them.
_EXPERT_ROWS = 8


class ExpertOrder(NamedTuple):
    """Order of (row, expert) pairs by expert, then by row; made by `moe_sort`.

    Attributes:
        expert_indptr: [num_experts + 1], int32; start of each expert's pairs.
        row_indices: [rows * top_k], int32; the row of each pair in this order. Entries after the
            last pair are unused.
        places: [rows, top_k], int32; index of each pair in this order, -1 without an expert.
    """

    expert_indptr: Tensor
    row_indices: Tensor
    places: Tensor

    @classmethod
    def empty(
        cls, rows: int, top_k: int, num_experts: int, device: torch.device | str = "cpu"
    ) -> "ExpertOrder":
        """Allocate the arrays, uninitialized.

        Args:
            rows: rows of `expert_ids`.
            top_k: experts per row.
            num_experts: number of experts.
            device: device of the arrays.
        """

        def ints(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        return cls(ints(num_experts + 1), ints(rows * top_k), ints(rows, top_k))


def moe_route(
    logits: Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    bias: Tensor | None = None,
    num_groups: int = 1,
    top_k_groups: int = 1,
    min_sum: float | None = None,
    scale: float = 1.0,
    expert_ids: Tensor | None = None,
    expert_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose the experts of each row and their weights.

    Same as `reference.moe_route`. For each row:

        score  = softmax(logits), or sigmoid(logits)
        key    = score + bias
        groups = the top_k_groups groups of experts whose two largest keys have the largest sums
        ids    = the top_k experts of these groups with the largest keys, in ascending order
        weight = score[ids], divided by max(sum(score[ids]), min_sum) unless that is None, * scale

    Ties of keys or sums go to the lower id. A NaN is chosen last. With softmax a NaN makes all
    scores NaN: then the first experts are chosen, with weights NaN.

    Args:
        logits: [rows, num_experts], float32; 1 to 1024 experts. Rows may be strided.
        top_k: experts per row.
        scoring: "softmax" or "sigmoid".
        bias: [num_experts], float32, or None; affects the choice, not the weights.
        num_groups: number of groups of equal size, at least two experts each; 1: no groups.
        top_k_groups: number of groups that a row may use; they must have at least top_k experts.
        min_sum: lower bound of the sum that a row's weights are divided by; None: no division.
        scale: factor of all weights; finite, at least 0.
        expert_ids: [rows, top_k], int32. Allocated when absent.
        expert_weights: [rows, top_k], float32. Allocated when absent.

    Returns:
        (expert_ids, expert_weights).

    Raises:
        ValueError: a shape, dtype, layout, device or number differs from the above.

    Note:
        Deterministic; a row depends on itself alone. Each device and instruction set has one fixed
        order of the sums over experts.

    Source: Fedus et al. 2021, "Switch Transformers"; groups and bias: DeepSeek-AI 2024,
    "DeepSeek-V3 Technical Report", section 2.1.2.
    """
    check_int("moe_route", "top_k", top_k)
    if expert_ids is None:
        expert_ids = empty(lambda: ((logits.shape[0], top_k), torch.int32, logits))
    if expert_weights is None:
        expert_weights = empty(lambda: ((logits.shape[0], top_k), torch.float32, logits))
    _C.moe_route(
        logits,
        top_k,
        bias,
        scoring,
        num_groups,
        top_k_groups,
        min_sum,
        scale,
        expert_ids,
        expert_weights,
    )
    return expert_ids, expert_weights


def moe_sort(
    expert_ids: Tensor, num_experts: int, *, order: ExpertOrder | None = None
) -> ExpertOrder:
    """Sort (row, expert) pairs by expert, then by row.

    Same as `reference.moe_sort`.

    Args:
        expert_ids: [rows, top_k], int32; -1: no expert.
        num_experts: number of experts, at least 1.
        order: arrays to write into. Allocated when absent.

    Returns:
        `order`.

    Raises:
        ValueError: a shape, dtype, layout or device differs from the above, or an id is outside
            [-1, num_experts). Nothing has been written then. On CUDA wrong ids are reported by
            `specops.check_errors`, and count as -1.

    Note:
        Deterministic; integer arithmetic only.
    """
    check_int("moe_sort", "num_experts", num_experts, 1)
    if order is None:
        sizes = try_or_none(lambda: (*expert_ids.shape, expert_ids.device))
        if sizes is None or len(sizes) != 3:  # the op reports the wrong argument
            order = ExpertOrder.empty(0, 0, num_experts)
        else:
            order = ExpertOrder.empty(sizes[0], sizes[1], num_experts, sizes[2])
    check_kind("moe_sort", "order", order, ExpertOrder)
    _C.moe_sort(expert_ids, num_experts, *order)
    return order


def stack_experts(weights: Iterable[PackedWeight], num_experts: int) -> PackedWeight:
    """Stack the packed weights of all experts for `moe_linear`.

    Args:
        weights: one for each expert, all of the same sizes and kind. The iterable is read one
            weight at a time, so that only one is in memory besides the result.
        num_experts: number of experts, at least 1.

    Returns:
        A packed weight with an additional first dimension in its tensors: [num_experts, ..].

    Raises:
        ValueError: weights differ in anything but their values, or their number is not num_experts.
    """
    check_int("stack_experts", "num_experts", num_experts, 1)
    stacked: PackedWeight | None = None
    count = 0
    for count, weight in enumerate(weights, 1):
        check_kind("stack_experts", "weights", weight, PackedWeight, " of pack_weight each")
        if weight.input_order is not None:
            raise ValueError("stack_experts: weights must have no input_order, got one")
        if stacked is None:
            stacked = _each_field(
                weight, lambda one: ask_for_huge_pages(one.new_empty(num_experts, *one.shape))
            )
        if count > num_experts:
            break
        _put(stacked, count - 1, weight)
    if stacked is None or count != num_experts:
        least = " or more" if count > num_experts else ""
        raise ValueError(f"stack_experts: weights must be {num_experts}, got {count}{least}")
    return stacked


def _put(stacked: PackedWeight, expert: int, weight: PackedWeight) -> None:
    for name, whole, one in zip(weight._fields, stacked, weight, strict=True):
        if isinstance(whole, Tensor) and isinstance(one, Tensor) and whole.dtype == one.dtype:
            if whole.shape[1:] == one.shape and whole.device == one.device:
                whole[expert].copy_(one)
                continue
        elif whole == one and not isinstance(one, Tensor):
            continue
        raise ValueError(
            f"stack_experts: weights must be alike, got {name} {describe(one)} of expert {expert}"
        )


def _each_field(weight: PackedWeight, change: Callable[[Tensor], Tensor]) -> PackedWeight:
    fields = [change(one) if isinstance(one, Tensor) else one for one in weight]
    return PackedWeight(*fields)  # type: ignore[arg-type]


def moe_linear(
    x: Tensor,
    weight: PackedWeight,
    expert_indptr: Tensor,
    row_indices: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """Multiply rows with the weights of the experts that they are routed to.

    Same as `reference.moe_linear`. For expert e and i from expert_indptr[e] to expert_indptr[e+1]:

        out[i] = dense.linear(x[row_indices[i]], weight[e], bias[e])

    with the same bits as `dense.linear`, for every kind of weight that `dense.linear` takes. (On
    amx `dense.linear` has special kernels for bfloat16; this op uses those of avx512_bf16 there.)

    Args:
        x: [rows, num_inputs], dtype as in `dense.linear`. Rows may be strided.
        weight: packed weight made by `stack_experts`.
        expert_indptr: [num_experts + 1], int32, from an `ExpertOrder`.
        row_indices: [pairs], int32, from the same `ExpertOrder`. None: row i of x is for pair i.
        bias: [num_experts, num_outputs], dtype of `x`; or None.
        out: [pairs, num_outputs], dtype of `x`, or float32; with an activation: [pairs,
            num_outputs / 2], dtype of `x`. Rows after the last pair are not written. Allocated
            when absent.
        out_dtype: dtype of an `out` to be allocated; that of `x` when absent.
        workspace: [floats], float32, for CUDA; see `moe_linear_workspace_size`. With an int8 or
            int4 weight, it holds many rows after rounding, so that they are rounded once. A short
            one is not used, which costs only time. Allocated when absent.

    Returns:
        `out`.

    Raises:
        ValueError: a shape, dtype, layout or device differs from the above, or an index is out of
            range. Nothing has been written then. On CUDA wrong indices are reported by
            `specops.check_errors`: such an expert has no rows, such a row is zeros.

    Note:
        Deterministic, like `dense.linear`. The weights of an expert are read once for all its rows
        (on CUDA: once for every 8 of them, or, with 16-bit, int8 or int4 weights and more than 8
        pairs per expert on average, for every 64 or 128); those of experts without rows are not
        read.
    """
    check_kind("moe_linear", "weight", weight, PackedWeight, " of stack_experts")
    if out is None:
        width = weight.num_outputs // 2 if weight.activation else weight.num_outputs
        pairs = x if row_indices is None else row_indices
        out = empty(lambda: ((pairs.shape[0], max(width, 0)), out_dtype, x))
    elif out_dtype is not None and try_or_none(lambda: out.dtype) != out_dtype:
        raise ValueError(f"moe_linear: out must be {describe(out_dtype)}, got {describe(out)}")
    if workspace is None and weight.max_workspace_rows > 0:
        floats = try_or_none(lambda: moe_linear_workspace_size(len(out), weight))
        if floats:
            workspace = torch.empty(floats, dtype=torch.float32, device=x.device)
    _C.moe_linear(x, weight, bias, expert_indptr, row_indices, out, workspace)
    return out


def moe_linear_workspace_size(num_pairs: int, weight: PackedWeight) -> int:
    """Return the workspace size, in floats, with which `moe_linear` is fastest.

    Args:
        num_pairs: rows of `out`.
        weight: packed weight made by `stack_experts`.

    Returns:
        The size; 0 if no workspace is ever used: on cpu, with weights that are not int8 or int4,
        and with at most 8 pairs per expert. It suffices for every call with at most `num_pairs`
        pairs. It takes 1.25 bytes (with int16 activations 2.25) per pair and input, as if each
        expert had up to 64 more pairs. Calls of `dense.linear` may use the same workspace, one
        after the other; this op leaves the counters at its start unchanged.

    Raises:
        ValueError: num_pairs is negative, or weight is not packed.
    """
    check_int("moe_linear_workspace_size", "num_pairs", num_pairs)
    check_kind("moe_linear_workspace_size", "weight", weight, PackedWeight, " of stack_experts")
    num_experts = len(weight.data)
    if weight.kind == "plain" or num_pairs <= num_experts * _EXPERT_ROWS:
        return 0
    tiles = num_pairs // TILE_ROWS + num_experts  # the last tile of an expert may be incomplete
    return linear_workspace_size(tiles * TILE_ROWS, weight)


def moe_combine(
    expert_out: Tensor,
    places: Tensor,
    expert_weights: Tensor,
    shared: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Sum the weighted outputs of each row's experts.

    Same as `reference.moe_combine`, bit for bit. For each row:

        total = 0
        total = total + expert_weights[k] * expert_out[places[k]]     for each k in order
        out   = total + shared                each operation rounded to float32, then to the dtype

    Args:
        expert_out: [pairs, width], float32; in the order of `moe_sort`.
        places: [rows, top_k], int32, from an `ExpertOrder`; -1: no expert.
        expert_weights: [rows, top_k], float32.
        shared: [rows, width], float32, or None; output of the experts shared by all rows.
        dtype: dtype of an `out` to be allocated; float32 when absent.
        out: [rows, width], float32, bfloat16 or float16. Allocated when absent.

    Returns:
        `out`.

    Raises:
        ValueError: a shape, dtype, layout or device differs from the above, or a place is out of
            range. Nothing has been written then. On CUDA wrong places are reported by
            `specops.check_errors`, and count as -1.

    Note:
        Deterministic. `moe_route` returns experts in ascending order, so that the sum depends only
        on the set of a row's experts.
    """
    if out is None:
        out = empty(lambda: ((places.shape[0], expert_out.shape[1]), dtype, expert_out))
    _C.moe_combine(expert_out, places, expert_weights, shared, out)
    return out
