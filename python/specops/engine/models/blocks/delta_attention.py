# SPDX-License-Identifier: Apache-2.0
"""Linear attention by the gated delta rule with a decay per key channel, no KV cache."""

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

_HEADS = "heads of linear attention"


@dataclass(frozen=True)
class DeltaAttentionViews:
    """Activations of a step's rows."""

    projected: Tensor  # q|k|v
    mixed: Tensor  # q|k|v after the convolution
    heads: tuple[Tensor, Tensor, Tensor]  # views of mixed: q, k and v, [rows, num_heads, head_dim]
    low_rank: Tensor  # inputs of the second projections to decays and to gates
    low_rank_parts: tuple[Tensor, Tensor]  # views of low_rank, [rows, head_dim]
    decays: Tensor  # [rows, num_heads, head_dim]
    decay_rows: Tensor  # `decays` as a matrix
    strengths: Tensor  # [rows, num_heads]
    gates: Tensor  # [rows, num_heads, head_dim]
    gate_rows: Tensor  # `gates` as a matrix
    attended: Tensor  # [rows, num_heads, head_dim]
    attended_rows: Tensor  # `attended` as a matrix


@dataclass(frozen=True)
class DeltaAttentionShape:
    """Head count and dimension of this rank."""

    num_heads: int
    head_dim: int

    @property
    def size(self) -> int:
        """Number of elements of all heads of a row."""
        return self.num_heads * self.head_dim

    def views(self, new: NewRows) -> DeltaAttentionViews:
        """Return views of the activation buffers that `new` makes."""
        projected, mixed = (new(name, 3 * self.size) for name in ("qkv", "mixed"))
        low_rank = new("low_rank", 2 * self.head_dim)
        decays, gates, attended = (new(name, self.size) for name in ("decays", "gates", "attended"))
        heads = (len(projected), self.num_heads, self.head_dim)
        q, k, v = torch.split(mixed, self.size, 1)
        of_decays, of_gates = torch.split(low_rank, self.head_dim, 1)
        return DeltaAttentionViews(
            projected=projected,
            mixed=mixed,
            heads=(q.view(heads), k.view(heads), v.view(heads)),
            low_rank=low_rank,
            low_rank_parts=(of_decays, of_gates),
            decays=decays.view(heads),
            decay_rows=decays,
            strengths=new("strengths", self.num_heads),
            gates=gates.view(heads),
            gate_rows=gates,
            attended=attended.view(heads),
            attended_rows=attended,
        )


@dataclass(frozen=True, kw_only=True)
class DeltaAttentionWeights:
    """Weights of a delta attention block; projection outputs are ordered like the views."""

    qkv: ColumnParallelLinear
    low_rank: ColumnParallelLinear
    decays: ColumnParallelLinear
    strengths: ColumnParallelLinear
    gates: ColumnParallelLinear
    conv: Tensor  # [taps, channels]
    a_log: Tensor  # float32 [num_heads]
    dt_bias: Tensor  # float32 [num_heads, head_dim]
    norm: Tensor  # [head_dim]
    o: RowParallelLinear


class DeltaAttention(StateBlock):
    """Linear attention: a short convolution, the gated delta rule, and a gated norm per head."""

    def __init__(
        self,
        shape: DeltaAttentionShape,
        weights: DeltaAttentionWeights,
        norm_eps: float,
        all_heads: int,
    ) -> None:
        self.shape = shape
        self._weights, self._norm_eps = weights, norm_eps
        self.kv = StateSpec(
            num_heads=shape.num_heads,
            num_key_heads=shape.num_heads,
            all_key_heads=all_heads,
            key_dim=shape.head_dim,
            value_dim=shape.head_dim,
            taps=len(weights.conv),
            dtype=weights.conv.dtype,
        )

    @property
    def projections(self) -> Sequence[ColumnParallelLinear | RowParallelLinear]:
        """Projections of this block."""
        own = self._weights
        return (own.qkv, own.low_rank, own.decays, own.strengths, own.gates, own.o)

    def run(
        self,
        x: Tensor,
        batch: LayerBatch,
        cache: LayerStates,
        views: DeltaAttentionViews,
        out: Tensor,
    ) -> None:
        """Continue from the state before each request's first row; store the states of its rows."""
        weights = self._weights
        of_decays, of_gates = views.low_rank_parts
        weights.qkv.run(x, views.projected, batch)
        weights.low_rank.run(x, views.low_rank, batch)
        weights.strengths.run(x, views.strengths, batch)
        weights.decays.run(of_decays, views.decay_rows, batch)
        weights.gates.run(of_gates, views.gate_rows, batch)
        assert batch.slots is not None, "the rows are those of a model, not of a head"
        requests = batch.slots, batch.qo_indptr, batch.kv_lens
        linear_attention.causal_conv1d(
            views.projected, weights.conv, cache.conv, *requests, out=views.mixed
        )
        linear_attention.gated_delta_rule(
            *views.heads,
            views.decays,
            views.strengths,
            weights.a_log,
            weights.dt_bias,
            cache.states,
            *requests,
            out=views.attended,
        )
        dense.output_gate(
            views.attended,
            views.gates,
            norm_weight=weights.norm,
            norm_eps=self._norm_eps,
            out=views.attended,
        )
        weights.o.run(views.attended_rows, out, batch)


@dataclass(frozen=True, kw_only=True)
class DeltaAttentionConfig:
    """Configuration of a delta attention block.

    Attributes:
        num_heads: heads of the whole model.
        head_dim: elements of a query, key or value; also the rank of decays and gates.
        taps: taps (kernel size) of the convolution.
    """

    kind: ClassVar[str] = "linear attention with a decay per channel"

    num_heads: int
    head_dim: int
    taps: int

    def without_window(self) -> "DeltaAttentionConfig":
        """Return this configuration: linear attention has no sliding window."""
        return self

    def load(self, loader: BlockLoader, prefix: str) -> DeltaAttention:
        """Load the block whose tensor names begin with `prefix`.

        Raises:
            ModelError: a tensor is missing or has the wrong shape.
        """
        source, hidden, dim = loader.source, loader.hidden_size, self.head_dim
        size = self.num_heads * dim
        heads = loader.sharding.of_rank(self.num_heads, _HEADS)
        own = slice(heads.start * dim, heads.stop * dim)
        of_heads = range(own.start, own.stop)

        def expanding(name: str) -> ColumnParallelLinear:
            shard = Shard(outputs=(of_heads,))
            return load_column_parallel(source, prefix, (name,), (size,), dim, shard=shard)

        convs = [
            source.tensor(f"{prefix}{name}_conv1d.weight", size, 1, self.taps)[own, 0]
            for name in "qkv"
        ]
        a_log = source.tensor(f"{prefix}A_log", 1, 1, self.num_heads, 1, dtype=torch.float32)
        dt_bias = source.tensor(f"{prefix}dt_bias", size, dtype=torch.float32)
        weights = DeltaAttentionWeights(
            qkv=load_column_parallel(
                source,
                prefix,
                ("q_proj", "k_proj", "v_proj"),
                (size,) * 3,
                hidden,
                shard=Shard(outputs=(of_heads,) * 3),
            ),
            low_rank=load_column_parallel(
                source, prefix, ("f_a_proj", "g_a_proj"), (dim, dim), hidden
            ),
            decays=expanding("f_b_proj"),
            strengths=load_column_parallel(
                source,
                prefix,
                ("b_proj",),
                (self.num_heads,),
                hidden,
                quantization="none",
                shard=Shard(outputs=(heads,)),
            ),
            gates=expanding("g_b_proj"),
            conv=torch.cat(convs).t().contiguous(),
            a_log=a_log.flatten()[heads.start : heads.stop].contiguous(),
            dt_bias=dt_bias[own].view(len(heads), dim).contiguous(),
            norm=source.tensor(f"{prefix}o_norm.weight", dim),
            o=load_row_parallel(
                source,
                f"{prefix}o_proj",
                hidden,
                self.num_heads,
                _HEADS,
                dim,
                has_bias=False,
                ranks=loader.ranks,
            ),
        )
        shape = DeltaAttentionShape(len(heads), dim)
        return DeltaAttention(shape, weights, loader.norm_eps, self.num_heads)
