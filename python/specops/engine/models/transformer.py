# SPDX-License-Identifier: Apache-2.0
"""One Llama-like decoder (Llama, Mistral, Qwen2, Qwen3) as a sequence of specops calls.

The forward pass takes a ragged batch: any number of rows per request, prefill chunks beside decode
and verification rows. Activations live in one set of buffers, so that a step allocates nothing.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from specops import attention, batching, dense
from specops.dense import PackedWeight
from specops.engine.models.config import ModelConfig

# Row counts whose views of the buffers are kept. Decode and verification steps use few; chunks are
# larger and rarer, so when the table is full it starts anew rather than growing with every size.
_MAX_KEPT_VIEWS = 64

_LARGEST_PAGE = 64  # tokens


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
    gate_up: PackedWeight  # packed so that `linear` makes silu(gate) * up
    gate_up_bias: Tensor | None
    down: PackedWeight
    down_bias: Tensor | None
    sliding_window: int | None


@dataclass(frozen=True)
class LayerKv:
    """The paged key and value caches of one layer."""

    k: Tensor  # [num_pages, page_size, num_kv_heads, head_dim]
    v: Tensor
    # Of 8-bit caches, float32 [num_pages, page_size, num_kv_heads]; None: the model's dtype.
    k_scales: Tensor | None = None
    v_scales: Tensor | None = None

    @cached_property
    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """What moves when tokens move: the caches, and their scales as caches of width 1."""
        pairs = [(self.k, self.v)]
        if self.k_scales is not None and self.v_scales is not None:
            pairs.append((self.k_scales[..., None], self.v_scales[..., None]))
        return pairs


@dataclass(frozen=True)
class KvCache:
    """The paged key and value caches of all layers."""

    layers: list[LayerKv]

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.layers[0].k.shape[1]

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor of it, scales included."""
        of_layers = [(one.k, one.v, one.k_scales, one.v_scales) for one in self.layers]
        return [tensor for tensors in of_layers for tensor in tensors if tensor is not None]


@dataclass(slots=True, kw_only=True)
class LayerBatch:
    """What the layers need to know about the rows that they run over."""

    positions: Tensor  # int32 [rows]
    cache_slots: Tensor  # int64 [rows]
    qo_indptr: Tensor  # int32 [batch + 1]
    kv_indptr: Tensor  # int32 [batch + 1], pages
    kv_indices: Tensor  # int32 [pages]
    kv_lens: Tensor  # int32 [batch]
    # Both int32 [levels, batch]; None: nobody shares anything.
    prefix_leaders: Tensor | None = None
    prefix_lens: Tensor | None = None
    # Both int64 [copies]: what is copied in the caches behind the rows. None: nothing.
    from_slots: Tensor | None = None
    to_slots: Tensor | None = None
    # Both float32, for every layer, as they run one after the other; None: allocated per layer.
    workspace: Tensor | None = None  # [workspace_size()], for attention
    sums: Tensor | None = None  # [sums_size()], for the projections


@dataclass(slots=True, kw_only=True)
class StepBatch(LayerBatch):
    """The rows of one step of the target."""

    token_ids: Tensor  # int32 [rows]


class Activations:
    """The first rows of the buffers that a step writes its activations to."""

    def __init__(self, buffers: "_Buffers", rows: int, config: ModelConfig) -> None:
        qo_heads, kv_heads, dim = config.num_qo_heads, config.num_kv_heads, config.head_dim
        self.residual = buffers.residual[:rows]
        self.normed = buffers.normed[:rows]
        self.branch = buffers.branch[:rows]
        self.qkv = buffers.qkv[:rows]
        heads = self.qkv.view(rows, qo_heads + 2 * kv_heads, dim)
        self.q = heads[:, :qo_heads]
        self.k = heads[:, qo_heads : qo_heads + kv_heads]
        self.v = heads[:, qo_heads + kv_heads :]
        self.q_rotated = buffers.q_rotated[:rows].view(rows, qo_heads, dim)
        self.attended_rows = buffers.attended[:rows]
        self.attended = self.attended_rows.view(rows, qo_heads, dim)
        self.activated = buffers.activated[:rows]


class _Buffers:
    """The activations of up to `rows` rows."""

    def __init__(
        self, rows: int, config: ModelConfig, dtype: torch.dtype, device: torch.device
    ) -> None:
        def new(width: int) -> Tensor:
            return torch.empty(rows, width, dtype=dtype, device=device)

        heads = config.num_qo_heads + 2 * config.num_kv_heads
        self.rows = rows
        self.residual = new(config.hidden_size)
        self.normed = new(config.hidden_size)
        self.branch = new(config.hidden_size)
        self.qkv = new(heads * config.head_dim)
        self.q_rotated = new(config.num_qo_heads * config.head_dim)
        self.attended = new(config.num_qo_heads * config.head_dim)
        self.activated = new(config.intermediate_size)


class ActivationBuffers:
    """One set of buffers for steps of any size, so that a step allocates nothing."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._config, self._dtype, self._device = config, dtype, device
        self._buffers: _Buffers | None = None
        self._views: dict[int, Activations] = {}

    def reserve(self, rows: int) -> None:
        """Allocates the buffers of steps with up to `rows` rows, which then stay where they are."""
        if self._buffers is None or self._buffers.rows < rows:
            self._buffers = _Buffers(rows, self._config, self._dtype, self._device)
            self._views.clear()

    def first(self, rows: int) -> Activations:
        """Returns the first `rows` rows."""
        views = self._views.get(rows)
        if views is None:
            self.reserve(rows)
            assert self._buffers is not None
            if len(self._views) >= _MAX_KEPT_VIEWS:
                self._views.clear()
            views = self._views[rows] = Activations(self._buffers, rows, self._config)
        return views


class Transformer:
    """The model: weights, the RoPE table and the forward pass, on the device of the weights."""

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
        kv_cache_dtype: torch.dtype | None = None,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.kv_cache_dtype = dtype if kv_cache_dtype is None else kv_cache_dtype
        self.device = embedding.device
        self.max_model_len = max_model_len
        self.embedding = embedding
        self.lm_head = lm_head
        self._layers = layers
        # The norm that follows each layer: the next layer's input norm, or the final one.
        self._next_norms = [layer.input_norm for layer in layers[1:]] + [final_norm]
        # Up to the end of any page: drafting modules may run on behind the longest text.
        max_positions = -(-max_model_len // _LARGEST_PAGE) * _LARGEST_PAGE
        self._cos_sin = attention.rope_cos_sin(
            max_positions, config.rotary_dim, config.rope_theta, config.rope_scaling
        ).to(self.device)
        self._sm_scale = 1.0 / math.sqrt(config.head_dim)
        self._activations = ActivationBuffers(config, dtype, self.device)
        self._row_numbers = torch.empty(0, dtype=torch.int32, device=self.device)

    def reserve(self, rows: int) -> None:
        """Allocates the buffers of steps with up to `rows` rows, which then stay where they are."""
        self._activations.reserve(rows)
        if len(self._row_numbers) < rows:
            self._row_numbers = torch.arange(rows, dtype=torch.int32, device=self.device)

    def new_kv_cache(
        self, num_pages: int, page_size: int, num_layers: int | None = None
    ) -> KvCache:
        """Allocates the paged cache of every layer, or of another number of such layers."""
        config = self.config
        count = config.num_layers if num_layers is None else num_layers
        slots = (num_pages, page_size, config.num_kv_heads)

        def cache() -> Tensor:
            shape = (*slots, config.head_dim)
            return torch.zeros(shape, dtype=self.kv_cache_dtype, device=self.device)

        def scales() -> Tensor | None:
            return torch.zeros(slots, device=self.device) if self._has_scales else None

        return KvCache([LayerKv(cache(), cache(), scales(), scales()) for _ in range(count)])

    def kv_bytes_per_token(self) -> int:
        """Returns the bytes one cached token takes over all layers."""
        config = self.config
        head_bytes = config.head_dim * self.kv_cache_dtype.itemsize
        if self._has_scales:
            head_bytes += torch.float32.itemsize
        return 2 * config.num_kv_heads * head_bytes * config.num_layers

    @property
    def _has_scales(self) -> bool:
        return self.kv_cache_dtype.itemsize == 1

    def workspace_size(self, rows: int, batch: int, pages: int, cache: KvCache) -> int:
        """Returns the floats of workspace for steps of up to these sizes."""
        q_shape = (rows, self.config.num_qo_heads, self.config.head_dim)
        cache_shape = cache.layers[0].k.shape
        return attention.attention_workspace_size(q_shape, cache_shape, pages, batch, self.device)

    def sums_size(self, rows: int, outputs: int) -> int:
        """Returns the floats that projections split their sums with, the head of `outputs` too."""
        sizes = [dense.linear_workspace_size(outputs, self.lm_head)]
        for layer in self._layers[:1]:  # the others have the same shapes
            for weight in (layer.qkv, layer.o, layer.gate_up, layer.down):
                sizes.append(dense.linear_workspace_size(rows, weight))
        return max(sizes)

    def forward(
        self, batch: StepBatch, cache: KvCache, taps: Mapping[int, Tensor] | None = None
    ) -> Tensor:
        """Runs every layer over the rows of a step and writes their keys and values.

        Args:
            batch: the rows.
            cache: from `new_kv_cache`.
            taps: by layer, [rows, hidden_size]: receives the states that leave the layer.

        Returns:
            [rows, hidden_size], the state after the final norm (which the head and the MTP modules
            take). It is one of the model's own buffers: the next call overwrites it.
        """
        buffers = self._activations.first(batch.token_ids.shape[0])
        dense.embedding(batch.token_ids, self.embedding, out=buffers.residual)
        dense.rms_norm(
            buffers.residual,
            self._layers[0].input_norm,
            self.config.rms_norm_eps,
            out=buffers.normed,
        )
        for index, layer in enumerate(self._layers):
            self.run_layer(layer, batch, cache.layers[index], buffers)
            dense.rms_norm(
                buffers.branch,
                self._next_norms[index],
                self.config.rms_norm_eps,
                residual=buffers.residual,
                out=buffers.normed,
            )
            if taps and index in taps:
                rows = self.row_numbers(buffers.residual.shape[0])
                batching.gather_output_rows(buffers.residual, rows, out=taps[index])
        return buffers.normed

    def row_numbers(self, rows: int) -> Tensor:
        """Returns 0, 1, 2 and so on, int32 [rows]: always the same memory."""
        return self._row_numbers[:rows]

    def states(self, rows: int) -> Tensor:
        """Returns what `forward` returns for so many rows: always the same memory."""
        return self._activations.first(rows).normed

    def run_layer(
        self,
        layer: Layer,
        batch: LayerBatch,
        cache: LayerKv,
        buffers: Activations,
    ) -> None:
        """Runs one layer from `normed`, all but its last addition: `branch` is yet to be added.

        Its attention is added to `residual`; the norm that follows, which adds `branch`, is the
        caller's: it belongs to what comes next.
        """
        eps, sums = self.config.rms_norm_eps, batch.sums
        residual, normed, branch = buffers.residual, buffers.normed, buffers.branch
        dense.linear(normed, layer.qkv, layer.qkv_bias, out=buffers.qkv, workspace=sums)
        attention.rope_append_kv(
            buffers.q,
            buffers.k,
            buffers.v,
            cache.k,
            cache.v,
            batch.cache_slots,
            batch.positions,
            self._cos_sin,
            q_norm_weight=layer.q_norm,
            k_norm_weight=layer.k_norm,
            norm_eps=eps,
            k_scales=cache.k_scales,
            v_scales=cache.v_scales,
            q_out=buffers.q_rotated,
        )
        if batch.from_slots is not None and batch.to_slots is not None:
            for pair in cache.pairs:
                attention.copy_kv(*pair, batch.from_slots, batch.to_slots)
        attention.append_attention(
            buffers.q_rotated,
            cache.k,
            cache.v,
            batch.qo_indptr,
            batch.kv_indptr,
            batch.kv_indices,
            batch.kv_lens,
            sm_scale=self._sm_scale,
            sliding_window=layer.sliding_window,
            k_scales=cache.k_scales,
            v_scales=cache.v_scales,
            prefix_leaders=batch.prefix_leaders,
            prefix_lens=batch.prefix_lens,
            out=buffers.attended,
            workspace=batch.workspace,
        )
        dense.linear(buffers.attended_rows, layer.o, layer.o_bias, out=branch, workspace=sums)
        dense.rms_norm(branch, layer.post_norm, eps, residual=residual, out=normed)
        activated = buffers.activated
        dense.linear(normed, layer.gate_up, layer.gate_up_bias, out=activated, workspace=sums)
        dense.linear(activated, layer.down, layer.down_bias, out=branch, workspace=sums)

    def logits(
        self, hidden: Tensor, *, out: Tensor | None = None, sums: Tensor | None = None
    ) -> Tensor:
        """Returns the fp32 logits [rows, vocab_size] of rows that `forward` returned."""
        return dense.linear(hidden, self.lm_head, out=out, out_dtype=torch.float32, workspace=sums)
