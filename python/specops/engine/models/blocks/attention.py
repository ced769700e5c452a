# SPDX-License-Identifier: Apache-2.0
"""Grouped-query attention: several query heads share each key/value head."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from specops import attention, dense
from specops.attention import PagedKv
from specops.engine.models.batch import LayerBatch
from specops.engine.models.blocks.block import AttentionBlock, BlockLoader, NewRows, Rope
from specops.engine.models.blocks.column_parallel import (
    ColumnParallelLinear,
    load_column_parallel,
)
from specops.engine.models.blocks.row_parallel import RowParallelLinear, load_row_parallel
from specops.engine.models.kv import KvSpec, LayerKv
from specops.engine.models.shards import Shard

_QKV = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True)
class AttentionViews:
    """Activations of a step's rows."""

    qkv: Tensor
    q: Tensor  # view of qkv, [rows, num_qo_heads, head_dim]
    k: Tensor  # view of qkv, [rows, num_kv_heads, head_dim]; no heads if the cache is shared
    v: Tensor  # view of qkv like k, or k itself
    v_normed: Tensor | None  # normed copy of v, [rows, num_kv_heads, head_dim]
    gate: Tensor | None  # view of qkv, [rows, num_qo_heads, head_dim]: output gate
    q_rotated: Tensor  # [rows, num_qo_heads, head_dim]
    attended: Tensor  # [rows, num_qo_heads, head_dim]
    attended_rows: Tensor  # `attended` as [rows, num_qo_heads * head_dim]


@dataclass(frozen=True)
class AttentionShape:
    """Head counts and head size of this rank."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    has_gate: bool = False
    kv_parts: int = 2  # 2: keys and values; 1: values are the keys; 0: the cache is shared
    has_v_norm: bool = False

    def views(self, new: NewRows) -> AttentionViews:
        """Return views of the activation buffers that `new` makes."""
        qo_heads, dim = self.num_qo_heads, self.head_dim
        kv_heads = self.num_kv_heads if self.kv_parts else 0
        gated = qo_heads + self.kv_parts * kv_heads
        num_heads = gated + self.has_gate * qo_heads
        qkv = new("qkv", num_heads * dim)
        attended = new("attended", qo_heads * dim)
        heads = qkv.view(len(qkv), num_heads, dim)
        v_normed = None
        if self.has_v_norm:
            v_normed = new("v_normed", kv_heads * dim).view(len(qkv), kv_heads, dim)
        return AttentionViews(
            qkv=qkv,
            q=heads[:, :qo_heads],
            k=heads[:, qo_heads : qo_heads + kv_heads],
            v=heads[:, gated - kv_heads : gated],
            v_normed=v_normed,
            gate=heads[:, gated:] if self.has_gate else None,
            q_rotated=new("q_rotated", qo_heads * dim).view(len(qkv), qo_heads, dim),
            attended=attended.view(len(qkv), qo_heads, dim),
            attended_rows=attended,
        )


class Attention(AttentionBlock):
    """Grouped-query attention with packed projections; q, k, v and gates are one fused product."""

    def __init__(
        self, config: "AttentionConfig", shape: AttentionShape, kv: KvSpec,
        qkv: ColumnParallelLinear, o: RowParallelLinear, cos_sin: Tensor, *,
        q_norm: Tensor | None, k_norm: Tensor | None, v_norm: Tensor | None, norm_eps: float,
        sinks: Tensor | None,
    ) -> None:  # fmt: skip
        self.shape = self._shape = shape
        self.kv = kv
        self.sliding_window, self._is_causal = config.sliding_window, config.is_causal
        self._sm_scale, self._interleaved = config.sm_scale, config.interleaved
        self._qkv, self._o = qkv, o
        self._q_norm, self._k_norm, self._v_norm = q_norm, k_norm, v_norm
        self._norm_eps = norm_eps
        self._cos_sin, self._sinks = cos_sin, sinks

    @property
    def projections(self) -> Sequence[ColumnParallelLinear | RowParallelLinear]:
        """Projections of this block."""
        return (self._qkv, self._o)

    def workspace_size(self, rows: int, batch: int, pages: int, page_size: int) -> int:
        """Return how many floats of attention workspace steps of up to these sizes need."""
        q_shape = (rows, self._shape.num_qo_heads, self._shape.head_dim)
        cache_shape = (pages, page_size, self.kv.num_heads, self.kv.head_dim)
        device = self._cos_sin.device
        return attention.attention_workspace_size(q_shape, cache_shape, pages, batch, device)

    def append_kv(
        self, x: Tensor, batch: LayerBatch, cache: LayerKv, views: AttentionViews
    ) -> None:
        """Write the keys and values of the rows to the cache; also rotate the queries for `run`.

        A layer that reads another layer's cache only rotates the queries.
        """
        self._qkv.run(x, views.qkv, batch)
        v, paged = views.v, cache.paged
        if self._v_norm is not None and views.v_normed is not None:
            v = views.v_normed.copy_(v)
            heads = v.flatten(0, 1)
            dense.rms_norm(heads, self._v_norm, self._norm_eps, out=heads)
        if self.kv.is_shared:
            none = v.new_empty(*cache.k.shape[:2], 0, self._shape.head_dim)
            paged = PagedKv(none, none)
        attention.rope_append_kv(
            views.q,
            views.k,
            v,
            paged,
            batch.cache_slots,
            batch.positions,
            self._cos_sin,
            interleaved=self._interleaved,
            q_norm_weight=self._q_norm,
            k_norm_weight=self._k_norm,
            norm_eps=self._norm_eps,
            q_out=views.q_rotated,
        )

    def run(
        self, x: Tensor, batch: LayerBatch, cache: LayerKv, views: AttentionViews, out: Tensor
    ) -> None:
        """Write keys and values to the cache, then compute attention into `out`."""
        self.append_kv(x, batch, cache, views)
        attention.append_attention(
            views.q_rotated,
            cache.paged,
            batch.paged,
            sm_scale=self._sm_scale,
            sliding_window=self.sliding_window,
            is_causal=batch.is_causal or self._is_causal,
            sinks=self._sinks,
            prefixes=batch.prefixes,
            out=views.attended,
            workspace=batch.workspace,
        )
        if views.gate is not None:
            dense.output_gate(views.attended, views.gate, out=views.attended)
        self._o.run(views.attended_rows, out, batch)


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Configuration of a grouped-query attention block.

    Attributes:
        num_qo_heads: query heads of the whole model.
        num_kv_heads: key/value heads of the whole model.
        head_dim: elements of a head.
        sm_scale: factor on attention scores before the softmax.
        rope: rotary embedding.
        sliding_window: number of positions that a row attends to, including its own; None: all.
        is_causal: whether attention is causal even in a batch whose `is_causal` is False.
        qkv_bias: whether q_proj, k_proj and v_proj have biases.
        o_bias: whether o_proj has a bias.
        qk_norm: whether q and k are normalized per head.
        v_norm: whether v is normalized per head, without a weight.
        values_are_keys: whether v is k before its norm and RoPE, so there is no v_proj.
        shares_kv: whether the layer has no keys and values, but reads those of the last earlier
            layer that has some and the same sliding window.
        interleaved: RoPE rotates adjacent elements instead of the two halves of a head.
        has_sinks: whether each query head has an attention sink, a logit without a value.
        has_gate: whether q_proj outputs a gate of the head's output after the query of each head.
        input_size: input width of q, k and v projections; None: the hidden size.
    """

    kind: ClassVar[str] = "attention with a key for each head"

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    sm_scale: float
    rope: Rope
    sliding_window: int | None = None
    is_causal: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    v_norm: bool = False
    values_are_keys: bool = False
    shares_kv: bool = False
    interleaved: bool = False
    has_sinks: bool = False
    has_gate: bool = False
    input_size: int | None = None

    def without_window(self) -> "AttentionConfig":
        """Return this configuration without a sliding window."""
        return replace(self, sliding_window=None)

    def load(self, loader: BlockLoader, prefix: str) -> Attention:
        """Load the block whose tensor names begin with `prefix`.

        Raises:
            ModelError: a tensor is missing or has the wrong shape.
        """
        source, hidden, dim = loader.source, loader.hidden_size, self.head_dim
        q_size, kv_size = self.num_qo_heads * dim, self.num_kv_heads * dim
        of_q = (1 + self.has_gate) * dim
        kv_parts = 0 if self.shares_kv else 1 if self.values_are_keys else 2
        parts = _QKV[: 1 + kv_parts]
        sizes = (q_size // dim * of_q, kv_size, kv_size)[: len(parts)]
        own_q = loader.sharding.of_rank(self.num_qo_heads, "heads of queries", of_q)
        own_kv = loader.sharding.of_copies(self.num_kv_heads, "heads of keys", dim)
        shard = Shard(outputs=(own_q, own_kv, own_kv)[: len(parts)])
        shape = AttentionShape(
            num_qo_heads=len(own_q) // of_q,
            num_kv_heads=len(own_kv) // dim,
            head_dim=dim,
            has_gate=self.has_gate,
            kv_parts=kv_parts,
            has_v_norm=self.v_norm and not self.shares_kv,
        )
        order = _gates_last(shape, loader.source.device) if self.has_gate else None
        q_norm = k_norm = v_norm = sinks = None
        if self.qk_norm:
            q_norm = source.norm(f"{prefix}q_norm.weight", dim)
        if self.qk_norm and not self.shares_kv:
            k_norm = source.norm(f"{prefix}k_norm.weight", dim)
        if shape.has_v_norm:
            v_norm = torch.ones(dim, dtype=source.dtype, device=source.device)
        if self.shares_kv:  # some checkpoints hold them nevertheless
            for unused in ("k_proj.", "v_proj.", "k_norm."):
                source.ignore(prefix + unused)
        if self.has_sinks:
            sinks = source.tensor(f"{prefix}sinks", self.num_qo_heads, dtype=torch.float32)
            sinks = sinks[own_q.start // of_q : own_q.stop // of_q].contiguous()
        return Attention(
            self,
            shape,
            KvSpec(
                num_heads=shape.num_kv_heads,
                all_heads=self.num_kv_heads,
                head_dim=dim,
                dtype=loader.kv_dtype,
                window=self.sliding_window,
                is_shared=self.shares_kv,
            ),
            load_column_parallel(
                source,
                prefix,
                parts,
                sizes,
                self.input_size or hidden,
                has_bias=self.qkv_bias,
                rows=order,
                shard=shard,
            ),
            load_row_parallel(
                source,
                f"{prefix}o_proj",
                hidden,
                self.num_qo_heads,
                "heads of queries",
                dim,
                has_bias=self.o_bias,
                ranks=loader.ranks,
            ),
            loader.ropes.of(self.rope),
            q_norm=q_norm,
            k_norm=k_norm,
            v_norm=v_norm,
            norm_eps=loader.norm_eps,
            sinks=sinks,
        )


def _gates_last(shape: AttentionShape, device: torch.device) -> Tensor:
    """Return the int32 order of q|k|v outputs that moves the gates from q to the end."""
    q_size, kv_size = shape.num_qo_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    places = torch.arange(2 * (q_size + kv_size), dtype=torch.int32, device=device)
    q, gate = places[: 2 * q_size].view(shape.num_qo_heads, 2, shape.head_dim).unbind(1)
    return torch.cat([q.flatten(), places[2 * q_size :], gate.flatten()])
