# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention (MLA): all heads share one short latent per token as key and value.

The absorbed form is used: each query head is multiplied by the matrix that would expand the latents
to keys. So attention runs on the latents, and its result is expanded to values afterwards. Prefill,
decoding and verification all use this form, so that their results have the same bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from specops import attention, dense
from specops.attention import LATENT_DIM
from specops.engine.models.adapters import AdapterSite
from specops.engine.models.batch import LayerBatch
from specops.engine.models.blocks.block import AttentionBlock, BlockLoader, NewRows, Norm, Rope
from specops.engine.models.blocks.column_parallel import (
    ColumnParallelLinear,
    load_column_parallel,
)
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

    q_low_rank: ColumnParallelLinear | None  # None: queries have a single projection
    q_norm: Norm | None
    q: ColumnParallelLinear
    kv: ColumnParallelLinear
    kv_norm: Tensor
    key_of_head: Sequence[ColumnParallelLinear]  # [LATENT_DIM, nope_dim] each: converts a query
    value_of_head: Sequence[ColumnParallelLinear]  # [value_dim, LATENT_DIM] each
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
    def projections(self) -> Sequence[ColumnParallelLinear | RowParallelLinear]:
        """Projections of this block."""
        weights = self._weights
        optional = [] if weights.q_low_rank is None else [weights.q_low_rank]
        of_heads = (*weights.key_of_head, *weights.value_of_head)
        return (*optional, weights.q, weights.kv, *of_heads, weights.o)

    def workspace_size(self, rows: int, batch: int, pages: int, page_size: int) -> int:
        """Return how many floats of attention workspace steps of up to these sizes need."""
        q_shape = (rows, self._shape.num_qo_heads, self.kv.head_dim)
        cache_shape = (pages, page_size, 1, self.kv.head_dim)
        device = self._cos_sin.device
        return attention.attention_workspace_size(q_shape, cache_shape, pages, batch, device)

    def append_kv(self, x: Tensor, batch: LayerBatch, cache: LayerKv, views: LatentViews) -> None:
        """Write the latents and rotated keys of the rows to the cache; also rotate the queries."""
        weights = self._weights
        weights.kv.run(x, views.kv, batch)
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
        weights = self._weights
        self._absorb(x, batch, views)
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
        for head, value in enumerate(weights.value_of_head):
            value.run(views.attended[:, head], views.value_of_head, batch)
            views.values[:, head].copy_(views.value_of_head)
        weights.o.run(views.value_rows, out, batch)

    def _absorb(self, x: Tensor, batch: LayerBatch, views: LatentViews) -> None:
        """Compute the absorbed queries of the rows, without RoPE."""
        weights, nope = self._weights, self._config.nope_dim
        if weights.q_low_rank is not None and weights.q_norm is not None:
            low_rank = views.low_rank
            weights.q_low_rank.run(x, low_rank, batch)
            x = dense.rms_norm(low_rank, *weights.q_norm, out=low_rank)
        weights.q.run(x, views.q_rows, batch)
        for head, key in enumerate(weights.key_of_head):
            key.run(views.q[:, head, :nope], views.of_head, batch)
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

        def load(name: str, size: int, inputs: int, **how: Any) -> ColumnParallelLinear:
            return load_column_parallel(source, prefix, (name,), (size,), inputs, **how)

        q_low_rank = q_norm = None
        if self.q_rank is not None:
            inputs, q_name = self.q_rank, "q_b_proj"
            q_low_rank = load("q_a_proj", inputs, hidden, has_bias=self.has_bias)
            q_norm = Norm(source.norm(f"{prefix}q_a_layernorm.weight", inputs), _NORM_EPS)

        local_heads = loader.sharding.of_rank(heads, "heads of queries")
        per_head, q_dim = self.nope_dim + self.value_dim, self.nope_dim + self.rope.dim
        shard = Shard(outputs=(range(local_heads.start * q_dim, local_heads.stop * q_dim),))
        expanding = source.tensor(f"{prefix}kv_b_proj.weight", heads * per_head, LATENT_DIM)

        def of_head(begin: int, end: int, is_key: bool) -> ColumnParallelLinear:
            weight = expanding[begin:end]
            site = AdapterSite(
                prefix=prefix,
                parts=("kv_b_proj",),
                outputs=(heads * per_head,),
                inputs=LATENT_DIM,
                shard=Shard(outputs=(range(begin, end),)),
                is_transposed=is_key,
            )
            packed = dense.pack_weight(weight.T.contiguous() if is_key else weight)
            return ColumnParallelLinear(packed, None, site)

        keys = [(head * per_head, head * per_head + self.nope_dim) for head in local_heads]
        weights = LatentWeights(
            q_low_rank=q_low_rank,
            q_norm=q_norm,
            q=load(q_name, heads * q_dim, inputs, shard=shard),
            kv=load("kv_a_proj_with_mqa", key_dim, hidden, has_bias=self.has_bias),
            kv_norm=source.norm(f"{prefix}kv_a_layernorm.weight", LATENT_DIM),
            key_of_head=[of_head(*key, is_key=True) for key in keys],
            value_of_head=[of_head(end, end + self.value_dim, is_key=False) for _, end in keys],
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
