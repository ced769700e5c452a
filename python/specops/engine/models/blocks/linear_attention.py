# SPDX-License-Identifier: Apache-2.0
"""Linear attention by the gated delta rule: each request has a fixed-size state, no KV cache."""

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
from specops.engine.models.shards import Shard
from specops.engine.models.weights import WeightSource

_KEY_HEADS = "heads of keys in linear attention"


@dataclass(frozen=True)
class LinearAttentionViews:
    """Activations of a step's rows."""

    projected: Tensor  # q|k|v|z
    qkv: Tensor  # view of projected
    z: Tensor  # view of projected, [rows, num_value_heads, value_dim]
    ba: Tensor  # b|a
    b: Tensor  # view of ba, [rows, num_value_heads]
    a: Tensor  # view of ba, [rows, num_value_heads]
    mixed: Tensor  # q|k|v after the convolution
    q: Tensor  # view of mixed, [rows, num_key_heads, key_dim]
    k: Tensor  # view of mixed, [rows, num_key_heads, key_dim]
    v: Tensor  # view of mixed, [rows, num_value_heads, value_dim]
    attended: Tensor  # [rows, num_value_heads, value_dim]
    attended_rows: Tensor  # `attended` as [rows, num_value_heads * value_dim]


@dataclass(frozen=True)
class LinearAttentionShape:
    """Head counts and dimensions of this rank."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int

    @property
    def key_size(self) -> int:
        """Number of elements of all keys of a row."""
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Number of elements of all values of a row."""
        return self.num_value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Number of channels of the convolution over q|k|v."""
        return 2 * self.key_size + self.value_size

    def views(self, new: NewRows) -> LinearAttentionViews:
        """Return views of the activation buffers that `new` makes."""
        projected = new("qkv", self.channels + self.value_size)
        mixed = new("mixed", self.channels)
        ba = new("ba", 2 * self.num_value_heads)
        attended = new("attended", self.value_size)
        rows = len(projected)
        keys = (rows, self.num_key_heads, self.key_dim)
        values = (rows, self.num_value_heads, self.value_dim)
        q, k, v = torch.split(mixed, [self.key_size, self.key_size, self.value_size], 1)
        return LinearAttentionViews(
            projected=projected,
            qkv=projected[:, : self.channels],
            z=projected[:, self.channels :].view(values),
            ba=ba,
            b=ba[:, : self.num_value_heads],
            a=ba[:, self.num_value_heads :],
            mixed=mixed,
            q=q.view(keys),
            k=k.view(keys),
            v=v.view(values),
            attended=attended.view(values),
            attended_rows=attended,
        )


@dataclass(frozen=True, kw_only=True)
class LinearAttentionWeights:
    """Weights of a linear attention block; projection outputs are ordered like the views."""

    projection: ColumnParallelLinear
    ba: ColumnParallelLinear
    conv: Tensor  # [taps, channels]
    a_log: Tensor  # float32 [num_value_heads]
    dt_bias: Tensor  # float32 [num_value_heads]
    norm: Tensor  # [value_dim]
    o: RowParallelLinear


class LinearAttention(StateBlock):
    """Linear attention: a short convolution, the gated delta rule, a norm and a gate per head."""

    def __init__(
        self,
        shape: LinearAttentionShape,
        weights: LinearAttentionWeights,
        norm_eps: float,
        all_key_heads: int,
    ) -> None:
        self.shape = shape
        self._weights, self._norm_eps = weights, norm_eps
        self.kv = StateSpec(
            num_heads=shape.num_value_heads,
            num_key_heads=shape.num_key_heads,
            all_key_heads=all_key_heads,
            key_dim=shape.key_dim,
            value_dim=shape.value_dim,
            taps=len(weights.conv),
            dtype=weights.conv.dtype,
        )

    @property
    def projections(self) -> Sequence[ColumnParallelLinear | RowParallelLinear]:
        """Projections of this block."""
        return (self._weights.projection, self._weights.ba, self._weights.o)

    def run(
        self,
        x: Tensor,
        batch: LayerBatch,
        cache: LayerStates,
        views: LinearAttentionViews,
        out: Tensor,
    ) -> None:
        """Continue from the state before each request's first row; store the states of its rows."""
        weights = self._weights
        weights.projection.run(x, views.projected, batch)
        weights.ba.run(x, views.ba, batch)
        assert batch.slots is not None, "the rows are those of a model, not of a head"
        requests = batch.slots, batch.qo_indptr, batch.kv_lens
        linear_attention.causal_conv1d(
            views.qkv, weights.conv, cache.conv, *requests, out=views.mixed
        )
        linear_attention.gated_delta_rule(
            views.q,
            views.k,
            views.v,
            views.a,
            views.b,
            weights.a_log,
            weights.dt_bias,
            cache.states,
            *requests,
            out=views.attended,
        )
        dense.output_gate(
            views.attended,
            views.z,
            "silu",
            norm_weight=weights.norm,
            norm_eps=self._norm_eps,
            out=views.attended,
        )
        weights.o.run(views.attended_rows, out, batch)


@dataclass(frozen=True, kw_only=True)
class LinearAttentionConfig:
    """Configuration of a linear attention block.

    Attributes:
        num_key_heads: query/key heads of the whole model.
        num_value_heads: value heads of the whole model; a multiple of num_key_heads.
        key_dim: elements of a query or key.
        value_dim: elements of a value.
        taps: taps (kernel size) of the convolution.
        is_fused: whether files store q, k, v and z in one tensor, interleaved by key head, and b
            and a in a second one; False: q|k|v, z, b and a are four tensors.
    """

    kind: ClassVar[str] = "linear attention"

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    is_fused: bool = True

    def without_window(self) -> "LinearAttentionConfig":
        """Return this configuration: linear attention has no sliding window."""
        return self

    @property
    def _values_of_key(self) -> int:
        """Number of value heads per key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def _widths(self) -> Sequence[int]:
        """Number of outputs of q, k, v and z per key head."""
        values = self._values_of_key * self.value_dim
        return (self.key_dim, self.key_dim, values, values)

    def load(self, loader: BlockLoader, prefix: str) -> LinearAttention:
        """Load the block whose tensor names begin with `prefix`.

        Raises:
            ModelError: a tensor is missing or has the wrong shape.
        """
        source = loader.source
        heads = loader.sharding.of_rank(self.num_key_heads, _KEY_HEADS)
        whole, local = self._shape(self.num_key_heads), self._shape(len(heads))
        own_values = _times(heads, self._values_of_key)

        def of_heads(name: str) -> Tensor:
            values = source.tensor(f"{prefix}{name}", self.num_value_heads, dtype=torch.float32)
            return values[own_values.start : own_values.stop].contiguous()

        conv = source.tensor(f"{prefix}conv1d.weight", whole.channels, 1, self.taps)[:, 0]
        places = self._places(heads, conv.device)[: local.channels].long()
        make = self._fused if self.is_fused else self._apart
        projection, ba = make(source, prefix, loader.hidden_size, heads)
        weights = LinearAttentionWeights(
            projection=projection,
            ba=ba,
            conv=conv[places].t().contiguous(),
            a_log=of_heads("A_log"),
            dt_bias=of_heads("dt_bias"),
            norm=source.tensor(f"{prefix}norm.weight", self.value_dim),
            o=load_row_parallel(
                source,
                f"{prefix}out_proj",
                loader.hidden_size,
                self.num_key_heads,
                _KEY_HEADS,
                self._widths[-1],
                has_bias=False,
                ranks=loader.ranks,
            ),
        )
        return LinearAttention(local, weights, loader.norm_eps, self.num_key_heads)

    def _shape(self, key_heads: int) -> LinearAttentionShape:
        value_heads = key_heads * self._values_of_key
        return LinearAttentionShape(key_heads, value_heads, self.key_dim, self.value_dim)

    def _places(self, heads: range, device: torch.device) -> Tensor:
        """Return the int32 indices in q|k|v|z of the outputs of some key heads."""
        places, begin = [], 0
        for width in self._widths:
            own = _times(heads, width)
            places.append(torch.arange(begin + own.start, begin + own.stop, dtype=torch.int32))
            begin += self.num_key_heads * width
        return torch.cat(places).to(device)

    def _fused(
        self, source: WeightSource, prefix: str, hidden: int, heads: range
    ) -> tuple[ColumnParallelLinear, ColumnParallelLinear]:
        """Load q|k|v|z and b|a from files that interleave them by key head."""

        def load(
            name: str, widths: Sequence[int], quantization: str | None
        ) -> ColumnParallelLinear:
            width = sum(widths)
            places = torch.arange(len(heads) * width, dtype=torch.int32, device=source.device)
            parts = torch.split(places.view(len(heads), width), list(widths), 1)
            return load_column_parallel(
                source,
                prefix,
                (name,),
                (self.num_key_heads * width,),
                hidden,
                quantization=quantization,
                rows=torch.cat([part.flatten() for part in parts]),
                shard=Shard(outputs=(_times(heads, width),)),
            )

        each = self._values_of_key
        return load("in_proj_qkvz", self._widths, None), load("in_proj_ba", (each, each), "none")

    def _apart(
        self, source: WeightSource, prefix: str, hidden: int, heads: range
    ) -> tuple[ColumnParallelLinear, ColumnParallelLinear]:
        """Load q|k|v|z and b|a from files that store q|k|v, z, b and a as separate tensors."""
        whole = self._shape(self.num_key_heads)
        is_whole = len(heads) == self.num_key_heads
        own_values = _times(heads, self._values_of_key)
        projection = load_column_parallel(
            source,
            prefix,
            ("in_proj_qkv", "in_proj_z"),
            (whole.channels, whole.value_size),
            hidden,
            rows=None if is_whole else self._places(heads, source.device),
        )
        ba = load_column_parallel(
            source,
            prefix,
            ("in_proj_b", "in_proj_a"),
            (self.num_value_heads, self.num_value_heads),
            hidden,
            quantization="none",
            shard=Shard(outputs=(own_values, own_values)),
        )
        return projection, ba


def _times(heads: range, width: int) -> range:
    """Return the range of elements of a range of heads with `width` elements each."""
    return range(heads.start * width, heads.stop * width)
