# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters: low-rank products that are added to the projections of a request's rows.

For a row x with an adapter (A, B, scale) on a projection whose result is y:

    low = A x               rounded to the adapter's dtype
    y   = y + scale * B low  float32, each operation rounded; then y is rounded to its dtype

Both products are `dense.linear`, whose rows do not depend on other rows. So a row has the same bits
whatever the adapters of the other rows of its step are. Rows without an adapter are not touched:
adding zero would change the sign of a negative zero.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specops import dense
from specops.dense import PackedWeight


@dataclass(frozen=True, kw_only=True, eq=False)
class AdapterSite:
    """Place for an adapter's product: the modules of one, possibly fused, projection.

    Attributes:
        prefix: name prefix of the modules, such as "model.layers.0.self_attn.".
        parts: names of the modules, such as q_proj, k_proj and v_proj.
        outputs: outputs of each module.
        inputs: inputs of all modules.
        order: int32, the output of the concatenated modules that each output of the projection is;
            None: the modules follow one another.
    """

    prefix: str
    parts: tuple[str, ...]
    outputs: tuple[int, ...]
    inputs: int
    order: Tensor | None = None

    def columns_of(self, part: int) -> list[tuple[slice, Tensor]]:
        """Return the ranges of the projection's outputs that belong to a module.

        Each range has the int64 indices of the module's outputs in it.
        """
        begin, size = sum(self.outputs[:part]), self.outputs[part]
        if self.order is None:
            return [(slice(begin, begin + size), torch.arange(size))]
        order = self.order.cpu().long() - begin
        places = torch.nonzero((order >= 0) & (order < size)).flatten()
        cuts = (torch.nonzero(places.diff() != 1).flatten() + 1).tolist()
        return [
            (slice(int(run[0]), int(run[-1]) + 1), order[run])
            for run in torch.tensor_split(places, cuts)
        ]


@dataclass(frozen=True)
class LowRankPart:
    """Second factor of an adapter for a range of a projection's outputs.

    Attributes:
        b: [outputs of the range, rank].
        ranks: range of the first product that belongs to this part.
        columns: range of the projection's outputs.
        scale: factor on the product; 1 if `b` includes it.
    """

    b: PackedWeight
    ranks: slice
    columns: slice
    scale: float


@dataclass(frozen=True)
class LowRankProduct:
    """Weights of an adapter at one site.

    Attributes:
        a: first factors of all adapted modules, concatenated: [sum of ranks, inputs].
        parts: second factors.
        dtype: dtype of both factors.
    """

    a: PackedWeight
    parts: Sequence[LowRankPart]
    dtype: torch.dtype

    def add(self, x: Tensor, out: Tensor, rows: slice | Tensor) -> None:
        """Add the product of some rows of `x` to the same rows of `out`."""
        low = dense.linear(x[rows].to(self.dtype), self.a)
        changed = out[rows]  # a view for a slice, a copy for indices
        for part in self.parts:
            delta = dense.linear(low[:, part.ranks], part.b, out_dtype=torch.float32)
            if part.scale != 1.0:
                # Apart from the sum: whether a fused multiply-add is used may depend on the row.
                delta *= part.scale
            columns = changed[:, part.columns]
            columns += delta  # computed in float32
        if isinstance(rows, Tensor):
            out[rows] = changed


@dataclass(frozen=True, kw_only=True, eq=False)
class Adapter:
    """LoRA adapter of a model. Running requests hold it, so it may be unloaded at any time.

    Attributes:
        name: name by which requests choose it.
        digest: digest of its configuration and its weights.
        products: its weights by site.
    """

    name: str
    digest: str
    products: Mapping[AdapterSite, LowRankProduct]


@dataclass(frozen=True)
class AdapterRows:
    """Rows of a step that use one adapter: a range, or int64 indices on the device."""

    adapter: Adapter
    rows: slice | Tensor


def adapter_rows(
    ranges: Mapping[Adapter, Sequence[range]], device: torch.device
) -> list[AdapterRows]:
    """Return the rows of each adapter of a step.

    Args:
        ranges: nonempty ascending ranges of rows, by adapter.
        device: device of the step.
    """
    found = []
    for adapter, own in ranges.items():
        rows: slice | Tensor = slice(own[0].start, own[-1].stop)
        if sum(map(len, own)) != own[-1].stop - own[0].start:
            rows = torch.tensor([row for one in own for row in one], device=device)
        found.append(AdapterRows(adapter, rows))
    return found


def add_adapters(groups: Sequence[AdapterRows], site: AdapterSite, x: Tensor, out: Tensor) -> None:
    """Add the products of a step's adapters to a projection, in place.

    Args:
        groups: rows with adapters; other rows keep their bits.
        site: the projection.
        x: [rows, inputs], input of the projection.
        out: [rows, outputs], its result.
    """
    for group in groups:
        product = group.adapter.products.get(site)
        if product is not None:
            product.add(x, out, group.rows)
