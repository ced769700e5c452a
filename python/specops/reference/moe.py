# SPDX-License-Identifier: Apache-2.0
"""Mixture-of-experts ops in plain PyTorch."""

from itertools import pairwise

import torch
from torch import Tensor

from specops.reference.dense import linear


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
) -> tuple[Tensor, Tensor]:
    """Return (expert ids in ascending order [rows, top_k], their weights).

    The experts with the largest score + bias in the best groups are chosen; ties go to the lowest
    id. The weights are the scores without the bias.
    """
    scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    keys = (scores if bias is None else scores + bias).nan_to_num(-torch.inf, torch.inf, -torch.inf)
    rows, experts = keys.shape
    if num_groups > 1:
        grouped = keys.view(rows, num_groups, experts // num_groups)
        best = _first(grouped.topk(2)[0].sum(-1), top_k_groups)
        is_in = torch.zeros(rows, num_groups, dtype=torch.bool, device=keys.device)
        is_in.scatter_(1, best, True)
        # Experts outside the best groups come last, even if the others are -inf.
        order = _first(keys, experts)
        outside = (~is_in).repeat_interleave(experts // num_groups, 1).gather(1, order)
        ids = order.gather(1, outside.sort(dim=-1, stable=True)[1])[:, :top_k]
    else:
        ids = _first(keys, top_k)
    ids = ids.sort(-1)[0]
    weights = scores.gather(1, ids)
    if min_sum is not None:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=min_sum)
    return ids.int(), weights * scale


def _first(keys: Tensor, count: int) -> Tensor:
    """Return the indices of the largest keys; unlike torch.topk, ties go to the lowest index."""
    order: Tensor = keys.sort(dim=-1, descending=True, stable=True)[1]
    return order[:, :count]


def moe_sort(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (expert_indptr, row_indices, places); see `specops.moe.moe_sort`."""
    ids = expert_ids.flatten().long()
    counts = torch.bincount(ids[ids >= 0], minlength=num_experts)
    order = torch.where(ids < 0, num_experts, ids).argsort(stable=True)[: int(counts.sum())]
    places = torch.full_like(ids, -1)
    places[order] = torch.arange(len(order), device=ids.device)
    indptr = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    rows = order // max(expert_ids.shape[1], 1)
    return indptr.int(), rows.int(), places.view_as(expert_ids).int()


def moe_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    expert_indptr: Tensor,
    row_indices: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    activation: str | None = None,
) -> Tensor:
    """Apply each expert to its rows; weight is [num_experts, num_outputs, num_inputs]."""
    parts = []
    rows = x if row_indices is None else x[row_indices.long()]
    ends = expert_indptr.tolist()
    for expert, (begin, end) in enumerate(pairwise(ends)):
        own = None if bias is None else bias[expert]
        part = rows[begin:end]
        parts.append(linear(part, weight[expert], own, out_dtype, activation=activation))
    return torch.cat(parts)


def moe_combine(
    expert_out: Tensor,
    places: Tensor,
    expert_weights: Tensor,
    shared: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Sum each row's weighted expert outputs in order, add `shared`, and round once."""
    total = expert_out.new_zeros(len(places), expert_out.shape[1])
    for k in range(places.shape[1]):
        place = places[:, k].long()
        product = expert_weights[:, k, None] * expert_out[place.clamp(min=0)]
        total = torch.where((place < 0)[:, None], total, total + product)
    if shared is not None:
        total = total + shared
    return total.to(out_dtype or expert_out.dtype)
