# SPDX-License-Identifier: Apache-2.0
"""One Llama-like decoder (Llama, Mistral, Qwen2, Qwen3) as a sequence of specops calls.

The forward pass takes a ragged batch: any number of rows per request, prefill chunks beside decode
and verification rows. Buffers are kept per row count, so that a decode step allocates nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specops import attention, dense
from specops.dense import PackedWeight
from specops.engine.models.config import ModelConfig

# Row counts whose buffers are kept. Decode and verification steps use few; chunks are larger and
# rarer, so when the table is full it starts anew rather than growing with every chunk size.
_MAX_KEPT_BUFFERS = 64


@dataclass(frozen=True)
class Layer:
    """The weights of one decoder layer; projections packed, q|k|v and gate|up fused."""

    input_norm: Tensor
    qkv: PackedWeight
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: PackedWeight
    o_bias: Tensor | None
    post_norm: Tensor
    gate_up: PackedWeight
    gate_up_bias: Tensor | None
    down: PackedWeight
    down_bias: Tensor | None
    sliding_window: int | None


@dataclass(frozen=True)
class KvCache:
    """The paged key and value caches, one pair per layer."""

    k: list[Tensor]  # each [num_pages, page_size, num_kv_heads, head_dim]
    v: list[Tensor]


@dataclass(frozen=True)
class StepBatch:
    """What the attention ops need to know about the rows of one step."""

    token_ids: Tensor  # int32 [rows]
    positions: Tensor  # int32 [rows]
    cache_slots: Tensor  # int64 [rows]
    qo_indptr: Tensor  # int32 [batch + 1]
    kv_indptr: Tensor  # int32 [batch + 1], pages
    kv_indices: Tensor  # int32 [pages]
    kv_lens: Tensor  # int32 [batch]


class _Buffers:
    """The activations of a step with a given number of rows."""

    def __init__(self, rows: int, config: ModelConfig, dtype: torch.dtype) -> None:
        qo_heads, kv_heads, dim = config.num_qo_heads, config.num_kv_heads, config.head_dim
        self.residual = torch.empty(rows, config.hidden_size, dtype=dtype)
        self.normed = torch.empty_like(self.residual)
        self.branch = torch.empty_like(self.residual)
        self.qkv = torch.empty(rows, (qo_heads + 2 * kv_heads) * dim, dtype=dtype)
        heads = self.qkv.view(rows, qo_heads + 2 * kv_heads, dim)
        self.q = heads[:, :qo_heads]
        self.k = heads[:, qo_heads : qo_heads + kv_heads]
        self.v = heads[:, qo_heads + kv_heads :]
        self.q_rotated = torch.empty(rows, qo_heads, dim, dtype=dtype)
        self.attended = torch.empty_like(self.q_rotated)
        self.attended_rows = self.attended.view(rows, qo_heads * dim)
        self.gate_up = torch.empty(rows, 2 * config.intermediate_size, dtype=dtype)
        self.activated = torch.empty(rows, config.intermediate_size, dtype=dtype)


class Transformer:
    """The model: weights, the RoPE table and the forward pass."""

    def __init__(
        self,
        *,
        config: ModelConfig,
        dtype: torch.dtype,
        max_model_len: int,
        embedding: Tensor,
        layers: list[Layer],
        final_norm: Tensor,
        lm_head: PackedWeight,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.max_model_len = max_model_len
        self._embedding = embedding
        self._layers = layers
        self._lm_head = lm_head
        # The norm that follows each layer: the next layer's input norm, or the final one.
        self._next_norms = [layer.input_norm for layer in layers[1:]] + [final_norm]
        self._cos_sin = attention.rope_cos_sin(
            max_model_len, config.rotary_dim, config.rope_theta, config.rope_scaling
        )
        self._buffers: dict[int, _Buffers] = {}

    def new_kv_cache(self, num_pages: int, page_size: int) -> KvCache:
        """Allocates the paged cache of every layer."""
        config = self.config
        shape = (num_pages, page_size, config.num_kv_heads, config.head_dim)

        def caches() -> list[Tensor]:
            return [torch.zeros(shape, dtype=self.dtype) for _ in self._layers]

        return KvCache(caches(), caches())

    def kv_bytes_per_token(self) -> int:
        """Returns the bytes one cached token takes over all layers."""
        config = self.config
        per_layer = 2 * config.num_kv_heads * config.head_dim * self.dtype.itemsize
        return per_layer * config.num_layers

    def forward(self, batch: StepBatch, cache: KvCache) -> Tensor:
        """Runs every layer over the rows of a step and writes their keys and values.

        Returns:
            [rows, hidden_size], the state after the final norm (which the head and the MTP modules
            take). It is one of the model's own buffers: the next call overwrites it.
        """
        rows = batch.token_ids.shape[0]
        buffers = self._buffers_for(rows)
        eps = self.config.rms_norm_eps
        residual, normed, branch = buffers.residual, buffers.normed, buffers.branch
        # One workspace serves every layer: they run one after the other.
        floats = attention.attention_workspace_size(
            buffers.q.shape, cache.k[0].shape, batch.kv_indices.shape[0], batch.kv_lens.shape[0]
        )
        workspace = torch.empty(floats, dtype=torch.float32)
        dense.embedding(batch.token_ids, self._embedding, out=residual)
        dense.rms_norm(residual, self._layers[0].input_norm, eps, out=normed)
        for index, layer in enumerate(self._layers):
            dense.linear(normed, layer.qkv, layer.qkv_bias, out=buffers.qkv)
            attention.rope_append_kv(
                buffers.q,
                buffers.k,
                buffers.v,
                cache.k[index],
                cache.v[index],
                batch.cache_slots,
                batch.positions,
                self._cos_sin,
                q_norm_weight=layer.q_norm,
                k_norm_weight=layer.k_norm,
                norm_eps=eps,
                q_out=buffers.q_rotated,
            )
            attention.append_attention(
                buffers.q_rotated,
                cache.k[index],
                cache.v[index],
                batch.qo_indptr,
                batch.kv_indptr,
                batch.kv_indices,
                batch.kv_lens,
                sliding_window=layer.sliding_window,
                out=buffers.attended,
                workspace=workspace,
            )
            dense.linear(buffers.attended_rows, layer.o, layer.o_bias, out=branch)
            dense.rms_norm(branch, layer.post_norm, eps, residual=residual, out=normed)
            dense.linear(normed, layer.gate_up, layer.gate_up_bias, out=buffers.gate_up)
            dense.silu_mul(buffers.gate_up, out=buffers.activated)
            dense.linear(buffers.activated, layer.down, layer.down_bias, out=branch)
            dense.rms_norm(branch, self._next_norms[index], eps, residual=residual, out=normed)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the fp32 logits [rows, vocab_size] of rows that `forward` returned."""
        return dense.linear(hidden, self._lm_head, out_dtype=torch.float32)

    def _buffers_for(self, rows: int) -> _Buffers:
        buffers = self._buffers.get(rows)
        if buffers is None:
            if len(self._buffers) >= _MAX_KEPT_BUFFERS:
                self._buffers.clear()
            buffers = self._buffers[rows] = _Buffers(rows, self.config, self.dtype)
        return buffers
