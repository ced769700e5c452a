# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters: low-rank products that are added to the projections of a request's rows.

For a row x with an adapter (A, B, scale) on a projection whose result is y:

    low = A x               rounded to the adapter's dtype
    y   = y + scale * B low  float32, each operation rounded; then y is rounded to its dtype

Adapters of one layout form a bank, and both products are `moe.moe_linear`: the adapters of a bank
take the place of experts. Rows of `moe_linear` do not depend on one another. So a row has the same
bits whatever the adapters of the other rows of its step are. Rows without an adapter are not
touched: adding zero would change the sign of a negative zero.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from specops import moe
from specops.dense import PackedWeight
from specops.engine.models.shards import WHOLE, Shard


@dataclass(frozen=True, kw_only=True, eq=False)
class AdapterSite:
    """Place for an adapter's product: the modules of one, possibly fused, projection.

    A rank has a site for each of its packed weights. A shard of the outputs needs the whole first
    factor, and the rows of the second factor for these outputs. A shard of the inputs needs the
    columns of the first factor for these inputs, and the whole second factor.

    Attributes:
        prefix: name prefix of the modules, such as "model.layers.0.self_attn.".
        parts: names of the modules, such as q_proj, k_proj and v_proj.
        outputs: outputs of each module, on all ranks.
        inputs: inputs of all modules, on all ranks.
        order: int32. For each output of the projection, its index among the outputs of the
            shard's concatenated modules; None: the modules follow one another.
        shard: the outputs and inputs that the packed weight has.
        is_transposed: whether the packed weight is transposed: its inputs are outputs of the only
            module in `parts`, and its outputs are that module's inputs.
    """

    prefix: str
    parts: Sequence[str]
    outputs: Sequence[int]
    inputs: int
    order: Tensor | None = None
    shard: Shard = WHOLE
    is_transposed: bool = False

    def columns_of(self, part: int) -> list[tuple[slice, Tensor]]:
        """Return the ranges of the projection's outputs that belong to a module.

        Each range has the int64 indices of the module's outputs in it.
        """
        shards = self.shard.outputs or list(map(range, self.outputs))
        begin, size = sum(map(len, shards[:part])), len(shards[part])
        rows = torch.arange(shards[part].start, shards[part].stop)
        if self.order is None:
            return [(slice(begin, begin + size), rows)]
        order = self.order.cpu().long() - begin
        places = torch.nonzero((order >= 0) & (order < size)).flatten()
        cuts = (torch.nonzero(places.diff() != 1).flatten() + 1).tolist()
        return [
            (slice(int(run[0]), int(run[-1]) + 1), rows[order[run]])
            for run in torch.tensor_split(places, cuts)
        ]


@dataclass(frozen=True)
class LowRankPart:
    """Second factors of a bank's adapters for a range of a projection's outputs.

    Attributes:
        b: [adapters, outputs of the range, rank], from `moe.stack_experts`.
        ranks: range of the first product that belongs to this part.
        columns: range of the projection's outputs.
        scales: float32 [adapters], factors on the product.
        is_scaled: whether a scale differs from 1.
    """

    b: PackedWeight
    ranks: slice
    columns: slice
    scales: Tensor
    is_scaled: bool


@dataclass(frozen=True)
class LowRankProduct:
    """Weights of a bank's adapters at one site.

    Attributes:
        a: first factors of all adapted modules, concatenated: [adapters, sum of ranks, inputs].
        parts: second factors.
        dtype: dtype of both factors.
    """

    a: PackedWeight
    parts: Sequence[LowRankPart]
    dtype: torch.dtype

    @property
    def layout(self) -> object:
        """Sizes, dtype and ranges that all adapters of a bank share."""
        parts = [(one.b.num_outputs, str(one.ranks), str(one.columns)) for one in self.parts]
        return self.a.num_outputs, self.a.num_inputs, self.dtype, parts

    def add(self, x: Tensor, out: Tensor, group: "AdapterRows") -> None:
        """Add the products of some rows of `x` to the same rows of `out`."""
        rows = group.rows
        low = moe.moe_linear(x[rows].to(self.dtype), self.a, group.indptr)
        changed = out[rows]  # a view for a slice, a copy for indices
        for part in self.parts:
            ranks = low[:, part.ranks]
            delta = moe.moe_linear(ranks, part.b, group.indptr, out_dtype=torch.float32)
            if part.is_scaled:
                # Multiply first: a fused multiply-add might be used for some rows only.
                delta *= part.scales[group.members, None]
            columns = changed[:, part.columns]
            columns += delta  # computed in float32
        if isinstance(rows, Tensor):
            out[rows] = changed


@dataclass(frozen=True, eq=False)
class AdapterBank:
    """Adapters of one layout, whose rows are computed together.

    Attributes:
        products: weights by site.
        size: number of adapters.
    """

    products: Mapping[AdapterSite, LowRankProduct]
    size: int = 1

    @property
    def layout(self) -> object:
        """Layouts of the products by site, which all adapters of a bank share."""
        return {site: product.layout for site, product in self.products.items()}


@dataclass(kw_only=True, eq=False)
class Adapter:
    """LoRA adapter of a model. Running requests hold it, so it may be unloaded at any time.

    Attributes:
        name: name by which requests choose it.
        digest: digest of its configuration and its weights.
        bank: bank with its weights.
        index: index of the adapter in the bank.
    """

    name: str
    digest: str
    bank: AdapterBank
    index: int = 0


def _weight_of(weight: PackedWeight, index: int) -> PackedWeight:
    """Return one of the weights that `moe.stack_experts` has stacked."""
    tensors: dict[str, Any] = {
        name: one[index] for name, one in weight._asdict().items() if isinstance(one, Tensor)
    }
    return weight._replace(**tensors)


def put_into_one_bank(adapters: Sequence[Adapter]) -> None:
    """Move adapters of one layout into a new bank; other adapters keep their old banks."""
    members = [(adapter.bank.products, adapter.index) for adapter in adapters]

    def stacked(weights: Iterable[PackedWeight]) -> PackedWeight:
        each = (
            _weight_of(weight, index) for weight, (_, index) in zip(weights, members, strict=True)
        )
        return moe.stack_experts(each, len(members))

    def product_of(site: AdapterSite) -> LowRankProduct:
        each = [products[site] for products, _ in members]
        parts = []
        for place, part in enumerate(each[0].parts):
            same = [one.parts[place] for one in each]
            scales = torch.stack(
                [one.scales[index] for one, (_, index) in zip(same, members, strict=True)]
            )
            is_scaled = any(one.is_scaled for one in same)
            b = stacked(one.b for one in same)
            parts.append(LowRankPart(b, part.ranks, part.columns, scales, is_scaled))
        return LowRankProduct(stacked(one.a for one in each), parts, each[0].dtype)

    bank = AdapterBank({site: product_of(site) for site in members[0][0]}, len(members))
    for index, adapter in enumerate(adapters):
        adapter.bank, adapter.index = bank, index


@dataclass(frozen=True)
class AdapterRows:
    """Rows of a step that use the adapters of one bank.

    Attributes:
        bank: the bank.
        rows: rows in the order of their adapters: a range, or int64 indices.
        indptr: int32 [adapters of the bank + 1], ranges of these rows by adapter.
        members: int64 [rows], the adapter of each of these rows.
    """

    bank: AdapterBank
    rows: slice | Tensor
    indptr: Tensor
    members: Tensor


def adapter_rows(
    ranges: Mapping[Adapter, Sequence[range]], device: torch.device
) -> list[AdapterRows]:
    """Return the rows of each bank in a step.

    Args:
        ranges: nonempty ascending ranges of rows, by adapter.
        device: device of the step.
    """
    banks: dict[AdapterBank, list[list[int]]] = {}
    for adapter, own in ranges.items():
        of_bank = banks.setdefault(adapter.bank, [[] for _ in range(adapter.bank.size)])
        of_bank[adapter.index] += (row for one in own for row in one)
    groups = []
    for bank, by_member in banks.items():
        places = [row for own in by_member for row in own]
        ends = [0, *accumulate(map(len, by_member))]
        members = [index for index, own in enumerate(by_member) for _ in own]
        rows: slice | Tensor = slice(places[0], places[-1] + 1)
        if places != list(range(places[0], places[-1] + 1)):
            rows = torch.tensor(places, device=device)
        indptr = torch.tensor(ends, dtype=torch.int32, device=device)
        groups.append(AdapterRows(bank, rows, indptr, torch.tensor(members, device=device)))
    return groups


def add_adapters(groups: Sequence[AdapterRows], site: AdapterSite, x: Tensor, out: Tensor) -> None:
    """Add the products of a step's adapters to a projection, in place.

    Args:
        groups: rows with adapters; other rows keep their bits.
        site: the projection.
        x: [rows, inputs], input of the projection.
        out: [rows, outputs], its result.
    """
    for group in groups:
        product = group.bank.products.get(site)
        if product is not None:
            product.add(x, out, group)
