# SPDX-License-Identifier: Apache-2.0
"""Mamba-2: each request has a fixed-size state per head, no KV cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from specops import dense, linear_attention
from specops.engine.models.batch import LayerBatch
from specops.engine.models.blocks.block import BlockLoader, NewRows, StateBlock
from specops.engine.models.blocks.column_parallel import (
    ColumnParallelLinear,
    load_column_parallel,
)
from specops.engine.models.blocks.row_parallel import RowParallelLinear, load_row_parallel
from specops.engine.models.kv import LayerStates, StateSpec

_HEADS = "heads of Mamba-2"


@dataclass(frozen=True)
class Mamba2Views:
    """Activations of a step's rows."""

    projected: Tensor  # z|x|b|c|dt
    z: Tensor  # view of projected, [rows, num_heads, head_dim]
    xbc: Tensor  # view of projected
    dt: Tensor  # view of projected, [rows, num_heads]
    mixed: Tensor  # x|b|c after the convolution
    x: Tensor  # view of mixed, [rows, num_heads, head_dim]
    b: Tensor  # view of mixed, [rows, num_groups, state_dim]
    c: Tensor  # view of mixed, [rows, num_groups, state_dim]
    heads: Tensor  # [rows, num_heads, head_dim], outputs of the heads
    head_rows: Tensor  # `heads` as [rows, inner_size]
    groups: Tensor  # `heads` as [rows * num_groups, inner_size / num_groups]


@dataclass(frozen=True)
class Mamba2Shape:
    """Head counts and dimensions of this rank."""

    num_heads: int
    num_groups: int
    head_dim: int
    state_dim: int

    @property
    def inner_size(self) -> int:
        """Number of outputs of all heads."""
        return self.num_heads * self.head_dim

    @property
    def group_size(self) -> int:
        """Number of elements of b, or of c, over all groups."""
        return self.num_groups * self.state_dim

    @property
    def channels(self) -> int:
        """Number of channels of the convolution over x|b|c."""
        return self.inner_size + 2 * self.group_size

    def views(self, new: NewRows) -> Mamba2Views:
        """Return views of the activation buffers that `new` makes."""
        inner, groups = self.inner_size, self.group_size
        projected = new("qkv", inner + self.channels + self.num_heads)
        mixed = new("mixed", self.channels)
        outputs = new("attended", inner)
        rows = len(projected)
        heads = (rows, self.num_heads, self.head_dim)
        z, xbc, dt = torch.split(projected, [inner, self.channels, self.num_heads], 1)
        x, b, c = torch.split(mixed, [inner, groups, groups], 1)
        return Mamba2Views(
            projected=projected,
            z=z.view(heads),
            xbc=xbc,
            dt=dt,
            mixed=mixed,
            x=x.view(heads),
            b=b.view(rows, self.num_groups, self.state_dim),
            c=c.view(rows, self.num_groups, self.state_dim),
            heads=outputs.view(heads),
            head_rows=outputs,
            groups=outputs.view(rows * self.num_groups, inner // self.num_groups),
        )


@dataclass(frozen=True, kw_only=True)
class Mamba2Weights:
    """Weights of a Mamba-2 block; projection outputs are ordered like the views."""

    projection: ColumnParallelLinear
    scales: Tensor | None  # [projection outputs], factors on them
    conv: Tensor  # [taps, channels]
    conv_bias: Tensor | None  # [channels]
    a_log: Tensor  # float32 [num_heads]
    d: Tensor  # float32 [num_heads]
    dt_bias: Tensor  # float32 [num_heads]
    norm: Tensor | None  # [inner_size]
    o: RowParallelLinear


class Mamba2(StateBlock):
    """Mamba-2: a short convolution, the state space, a gate, and a norm over each group's heads.

    If there are more ranks than groups, several ranks compute the same group, since the norm needs
    all of its heads. Each of these ranks projects a part of the group's outputs.

    Args:
        shape: sizes of this rank.
        weights: weights of this rank.
        norm_eps: epsilon of the norm.
        all_groups: number of groups over all ranks.
        outputs: range of `Mamba2Views.head_rows` that this rank projects.
    """

    def __init__(
        self,
        shape: Mamba2Shape,
        weights: Mamba2Weights,
        norm_eps: float,
        all_groups: int,
        outputs: slice,
    ) -> None:
        self.shape = shape
        self._weights, self._norm_eps, self._outputs = weights, norm_eps, outputs
        self._ones = weights.conv.new_ones(shape.inner_size // shape.num_groups)
        self.kv = StateSpec(
            num_heads=shape.num_heads,
            num_key_heads=shape.num_groups,
            all_key_heads=all_groups,
            key_dim=shape.state_dim,
            value_dim=shape.head_dim,
            taps=len(weights.conv),
            dtype=weights.conv.dtype,
            values_first=True,
        )

    @property
    def projections(self) -> Sequence[ColumnParallelLinear | RowParallelLinear]:
        """Projections of this block."""
        return (self._weights.projection, self._weights.o)

    def run(
        self, x: Tensor, batch: LayerBatch, cache: LayerStates, views: Mamba2Views, out: Tensor
    ) -> None:
        """Continue from the state before each request's first row; store the states of its rows."""
        weights = self._weights
        weights.projection.run(x, views.projected, batch)
        if weights.scales is not None:
            views.projected.mul_(weights.scales)
        assert batch.slots is not None, "the rows are those of a model, not of a head"
        requests = batch.slots, batch.qo_indptr, batch.kv_lens
        linear_attention.causal_conv1d(
            views.xbc, weights.conv, cache.conv, *requests, bias=weights.conv_bias, out=views.mixed
        )
        linear_attention.selective_state_update(
            views.x,
            views.dt,
            views.b,
            views.c,
            weights.a_log,
            weights.d,
            weights.dt_bias,
            cache.states,
            *requests,
            out=views.heads,
        )
        dense.output_gate(views.heads, views.z, "silu", out=views.heads)
        if weights.norm is not None:
            # Each group has its own weights, so they are multiplied after the norm of all groups.
            dense.rms_norm(views.groups, self._ones, self._norm_eps, out=views.groups)
            views.head_rows.mul_(weights.norm)
        weights.o.run(views.head_rows[:, self._outputs], out, batch)


@dataclass(frozen=True, kw_only=True)
class Mamba2Config:
    """Configuration of a Mamba-2 block.

    Attributes:
        num_heads: heads of the whole model; a multiple of num_groups.
        num_groups: groups of heads of the whole model; the heads of a group share b and c.
        head_dim: inputs and outputs of a head.
        state_dim: elements of b, and of c.
        taps: taps (kernel size) of the convolution.
        has_conv_bias: whether the convolution has a bias.
        has_norm: whether the gated outputs of a group are normed.
        scales: factors on z, x, b, c and dt after the projection; None: all are 1.
    """

    kind: ClassVar[str] = "Mamba-2"

    num_heads: int
    num_groups: int
    head_dim: int
    state_dim: int
    taps: int
    has_conv_bias: bool = True
    has_norm: bool = True
    scales: tuple[float, ...] | None = None

    def without_window(self) -> "Mamba2Config":
        """Return this configuration: Mamba-2 has no sliding window."""
        return self

    def load(self, loader: BlockLoader, prefix: str) -> Mamba2:
        """Load the block whose tensor names begin with `prefix`.

        Raises:
            ModelError: a tensor is missing or has the wrong shape.
        """
        source, each = loader.source, self.num_heads // self.num_groups
        outputs = loader.sharding.of_rank(self.num_heads, _HEADS, self.head_dim)
        groups = loader.sharding.of_copies(self.num_groups, f"groups of {_HEADS}")
        heads = range(groups.start * each, groups.stop * each)
        whole = Mamba2Shape(self.num_heads, self.num_groups, self.head_dim, self.state_dim)
        local = Mamba2Shape(len(heads), len(groups), self.head_dim, self.state_dim)
        size, inner = whole.group_size, whole.inner_size
        own_groups = range(groups.start * self.state_dim, groups.stop * self.state_dim)
        own_inner = range(heads.start * self.head_dim, heads.stop * self.head_dim)
        begins = (0, inner, 2 * inner, 2 * inner + size, 2 * inner + 2 * size)  # z|x|b|c|dt
        parts = (own_inner, own_inner, own_groups, own_groups, heads)
        places = torch.cat(
            [
                torch.arange(begin + own.start, begin + own.stop, dtype=torch.int32)
                for begin, own in zip(begins, parts, strict=True)
            ]
        ).to(source.device)
        channels = places[len(own_inner) :][: local.channels].long() - inner

        def of_heads(name: str) -> Tensor:
            values = source.tensor(f"{prefix}{name}", self.num_heads, dtype=torch.float32)
            return values[heads.start : heads.stop].contiguous()

        conv = source.tensor(f"{prefix}conv1d.weight", whole.channels, 1, self.taps)[:, 0]
        conv_bias = None
        if self.has_conv_bias:
            conv_bias = source.bias(prefix, ("conv1d",), (whole.channels,))[channels]
        norm = scales = None
        if self.has_norm:
            norm = source.tensor(f"{prefix}norm.weight", inner)
            norm = norm[own_inner.start : own_inner.stop].contiguous()
        if self.scales is not None:
            sizes = torch.tensor([len(own) for own in parts])
            scales = torch.tensor(self.scales).repeat_interleave(sizes)
            scales = scales.to(source.dtype).to(source.device)
        weights = Mamba2Weights(
            projection=load_column_parallel(
                source,
                prefix,
                ("in_proj",),
                (inner + whole.channels + self.num_heads,),
                loader.hidden_size,
                rows=None if len(heads) == self.num_heads else places,
            ),
            conv=conv[channels].t().contiguous(),
            conv_bias=conv_bias,
            a_log=of_heads("A_log"),
            d=of_heads("D"),
            dt_bias=of_heads("dt_bias"),
            scales=scales,
            norm=norm,
            o=load_row_parallel(
                source,
                f"{prefix}out_proj",
                loader.hidden_size,
                self.num_heads,
                _HEADS,
                self.head_dim,
                has_bias=False,
                ranks=loader.ranks,
            ),
        )
        projected = slice(outputs.start - own_inner.start, outputs.stop - own_inner.start)
        return Mamba2(local, weights, loader.norm_eps, self.num_groups, projected)
