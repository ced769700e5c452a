# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention (MLA): all heads share one short latent per token as key and value.

The absorbed form is used: each query head is multiplied by the matrix that would expand the latents
to keys. So attention runs on the latents, and its result is expanded to values afterwards. Prefill,
decoding and verification all use this form, so that their results have the same bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from specops import attention, dense
from specops.attention import LATENT_DIM
from specops.dense import PackedWeight
from specops.engine.models.batch import LayerBatch
from specops.engine.models.blocks.block import AttentionBlock, BlockLoader, NewRows, Norm, Rope
from specops.engine.models.blocks.row_parallel import RowParallelLinear, load_row_parallel
from specops.engine.models.kv import KvSpec, LayerKv
from specops.engine.models.shards import Shard

_NORM_EPS = 1e-6  # epsilon of the norms inside the block; independent of the model's


@dataclass(frozen=True)
class LatentViews:
    """Activations of a step's rows."""

    low_rank: Tensor  # [rows, q_rank]; empty if queries have a single projection
    q: Tensor  # [rows, num_qo_heads, nope_dim + rope_dim]
    q_rows: Tensor  # `q` as a matrix
    kv: Tensor  # [rows, LATENT_DIM + rope_dim]
    absorbed: Tensor  # [rows, num_qo_heads, LATENT_DIM + rope_dim]
    attended: Tensor  # [rows, num_qo_heads, LATENT_DIM]
    values: Tensor  # [rows, num_qo_heads, value_dim]
    value_rows: Tensor  # `values` as a matrix
    of_head: Tensor  # [rows, LATENT_DIM], scratch for one head at a time
    value_of_head: Tensor  # [rows, value_dim], scratch for one head at a time


@dataclass(frozen=True)
class LatentShape:
    """Head count and dimensions of this rank."""

    num_qo_heads: int
    q_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int

    def views(self, new: NewRows) -> LatentViews:
        """Return views of the activation buffers that `new` makes."""
        heads, key_dim = self.num_qo_heads, LATENT_DIM + self.rope_dim
        q = new("qkv", heads * (self.nope_dim + self.rope_dim))
        values = new("values", heads * self.value_dim)
        rows = len(q)
        return LatentViews(
            low_rank=new("low_rank", self.q_rank),
            q=q.view(rows, heads, self.nope_dim + self.rope_dim),
            q_rows=q,
            kv=new("latent", key_dim),
            absorbed=new("q_rotated", heads * key_dim).view(rows, heads, key_dim),
            attended=new("attended", heads * LATENT_DIM).view(rows, heads, LATENT_DIM),
            values=values.view(rows, heads, self.value_dim),
            value_rows=values,
            of_head=new("of_head", LATENT_DIM),
            value_of_head=new("value_of_head", self.value_dim),
        )


@dataclass(frozen=True, kw_only=True)
class LatentWeights:
    """Weights of a latent attention block; biases may be None."""

    q_low_rank: PackedWeight | None  # None: queries have a single projection
    q_low_rank_bias: Tensor | None
    q_norm: Norm | None
    q: PackedWeight
    kv: PackedWeight
    kv_bias: Tensor | None
    kv_norm: Tensor
    key_of_head: Sequence[PackedWeight]  # [LATENT_DIM, nope_dim] each: converts a query
    value_of_head: Sequence[PackedWeight]  # [value_dim, LATENT_DIM] each
    o: RowParallelLinear


class LatentAttention(AttentionBlock):
    """Latent attention with packed projections, and separate key and value weights per head."""

    sliding_window = None

    def __init__(
        self,
        config: "LatentAttentionConfig",
        shape: LatentShape,
        kv: KvSpec,
        weights: LatentWeights,
        cos_sin: Tensor,
    ) -> None:
        self.shape = self._shape = shape
        self.kv = kv
        self._config, self._weights, self._cos_sin = config, weights, cos_sin

    @property
    def weights(self) -> Sequence[PackedWeight]:
        """Packed projections of this block."""
        weights = self._weights
        optional = [] if weights.q_low_rank is None else [weights.q_low_rank]
        return (
            *optional,
            weights.q,
            weights.kv,
            *weights.key_of_head,
            *weights.value_of_head,
            *weights.o.shards,
        )

    def workspace_size(self, rows: int, batch: int, pages: int, page_size: int) -> int:
        """Return how many floats of attention workspace steps of up to these sizes need."""
        q_shape = (rows, self._shape.num_qo_heads, self.kv.head_dim)
        cache_shape = (pages, page_size, 1, self.kv.head_dim)
        device = self._cos_sin.device
        return attention.attention_workspace_size(q_shape, cache_shape, pages, batch, device)

    def append_kv(self, x: Tensor, batch: LayerBatch, cache: LayerKv, views: LatentViews) -> None:
        """Write the latents and rotated keys of the rows to the cache; also rotate the queries."""
        weights, sums = self._weights, batch.sums
        dense.linear(x, weights.kv, weights.kv_bias, out=views.kv, workspace=sums)
        attention.rope_append_latent(
            views.absorbed,
            views.kv,
            cache.k,
            batch.cache_slots,
            batch.positions,
            self._cos_sin,
            interleaved=self._config.interleaved,
            norm_weight=weights.kv_norm,
            norm_eps=_NORM_EPS,
            q_out=views.absorbed,
        )

    def run(
        self, x: Tensor, batch: LayerBatch, cache: LayerKv, views: LatentViews, out: Tensor
    ) -> None:
        """Write latents and keys to the cache, then compute attention into `out`."""
        weights, sums = self._weights, batch.sums
        self._absorb(x, sums, views)
        self.append_kv(x, batch, cache, views)
        attention.append_attention(
            views.absorbed,
            cache.paged,
            batch.paged,
            sm_scale=self._config.sm_scale,
            is_causal=batch.is_causal,
            prefixes=batch.prefixes,
            out=views.attended,
            workspace=batch.workspace,
        )
        for head, weight in enumerate(weights.value_of_head):
            dense.linear(views.attended[:, head], weight, out=views.value_of_head, workspace=sums)
            views.values[:, head].copy_(views.value_of_head)
        weights.o.run(views.value_rows, out, sums)

    def _absorb(self, x: Tensor, sums: Tensor | None, views: LatentViews) -> None:
        """Compute the absorbed queries of the rows, without RoPE."""
        weights, nope = self._weights, self._config.nope_dim
        if weights.q_low_rank is not None and weights.q_norm is not None:
            low_rank = views.low_rank
            dense.linear(
                x, weights.q_low_rank, weights.q_low_rank_bias, out=low_rank, workspace=sums
            )
            x = dense.rms_norm(low_rank, *weights.q_norm, out=low_rank)
        dense.linear(x, weights.q, out=views.q_rows, workspace=sums)
        for head, weight in enumerate(weights.key_of_head):
            dense.linear(views.q[:, head, :nope], weight, out=views.of_head, workspace=sums)
            views.absorbed[:, head, :LATENT_DIM].copy_(views.of_head)
        views.absorbed[..., LATENT_DIM:].copy_(views.q[..., nope:])


@dataclass(frozen=True, kw_only=True)
class LatentAttentionConfig:
    """Configuration of a latent attention block.

    Attributes:
        num_qo_heads: query heads of the whole model.
        q_rank: width between the two query projections; None: there is a single projection.
        nope_dim: elements of a query head that are not rotated.
        value_dim: elements of a head's value.
        sm_scale: factor on attention scores before the softmax.
        rope: rotary embedding of a query's other elements, and of the same number of key elements.
        interleaved: whether RoPE rotates adjacent elements instead of the two halves.
        has_bias: whether the input projections to low rank and the output projection have biases.
    """

    kind: ClassVar[str] = "multi-head latent attention"

    num_qo_heads: int
    q_rank: int | None
    nope_dim: int
    value_dim: int
    sm_scale: float
    rope: Rope
    interleaved: bool = False
    has_bias: bool = False

    def without_window(self) -> "LatentAttentionConfig":
        """Return this configuration: latent attention has no sliding window."""
        return self

    def load(self, loader: BlockLoader, prefix: str) -> LatentAttention:
        """Load the block whose tensor names begin with `prefix`.

        Raises:
            ModelError: a tensor is missing or has the wrong shape.
        """
        source, hidden, heads = loader.source, loader.hidden_size, self.num_qo_heads
        key_dim = LATENT_DIM + self.rope.dim
        inputs = hidden
        q_name = "q_proj"
        q_low_rank = q_norm = None
        if self.q_rank is not None:
            inputs, q_name = self.q_rank, "q_b_proj"
            q_low_rank = source.linear(prefix, ("q_a_proj",), (inputs,), hidden)
            q_norm = Norm(source.norm(f"{prefix}q_a_layernorm.weight", inputs), _NORM_EPS)

        def bias(name: str, size: int) -> Tensor | None:
            return source.bias(prefix, (name,), (size,)) if self.has_bias else None

        local_heads = loader.sharding.of_rank(heads, "heads of queries")
        per_head, q_dim = self.nope_dim + self.value_dim, self.nope_dim + self.rope.dim
        shard = Shard(outputs=(range(local_heads.start * q_dim, local_heads.stop * q_dim),))
        expanding = source.tensor(f"{prefix}kv_b_proj.weight", heads * per_head, LATENT_DIM)
        by_head = expanding.view(heads, per_head, LATENT_DIM)[local_heads.start : local_heads.stop]
        keys = [one[: self.nope_dim].T.contiguous() for one in by_head]
        weights = LatentWeights(
            q_low_rank=q_low_rank,
            q_low_rank_bias=bias("q_a_proj", inputs) if q_low_rank is not None else None,
            q_norm=q_norm,
            q=source.linear(prefix, (q_name,), (heads * q_dim,), inputs, shard=shard),
            kv=source.linear(prefix, ("kv_a_proj_with_mqa",), (key_dim,), hidden),
            kv_bias=bias("kv_a_proj_with_mqa", key_dim),
            kv_norm=source.norm(f"{prefix}kv_a_layernorm.weight", LATENT_DIM),
            key_of_head=[dense.pack_weight(key) for key in keys],
            value_of_head=[dense.pack_weight(one[self.nope_dim :]) for one in by_head],
            o=load_row_parallel(
                source,
                f"{prefix}o_proj",
                hidden,
                heads,
                "heads of queries",
                self.value_dim,
                has_bias=self.has_bias,
                ranks=loader.ranks,
            ),
        )
        kv = KvSpec(
            num_heads=1,
            all_heads=1,
            head_dim=key_dim,
            dtype=loader.kv_dtype,
            has_values=False,
        )
        ranks = (self.q_rank or 0, self.nope_dim, self.rope.dim, self.value_dim)
        shape = LatentShape(len(local_heads), *ranks)
        return LatentAttention(self, shape, kv, weights, loader.ropes.of(self.rope))
