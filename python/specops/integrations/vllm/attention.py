# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU attention by `specops.attention.append_attention`, on vLLM's unchanged KV cache.

vLLM allocates one tensor [blocks, num_kv_heads, block_size, 2 * head_dim] per layer and moves only
whole blocks. The layout inside a block is the backend's choice: here a page of keys [block_size,
num_kv_heads, head_dim], then a page of values. The tensor is viewed, without a copy, as twice as
many pages: block b's keys are page 2 * b of the whole tensor, and its values are page 2 * b of a
view that starts one page later.

This module imports vLLM, so only vLLM's registry imports it, by the name the plug-in registers.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from specops.attention import (
    PagedBatch,
    PagedKv,
    append_attention,
    attention_workspace_size,
)
from specops.integrations.vllm import threads

HEAD_DIMS = [64, 96, 128, 256]
PAGE_SIZES = [16, 32, 64]


class SpecopsAttentionBackend(CPUAttentionBackend):  # type: ignore[misc]
    """Attention backend that replaces vLLM's CPU backend under its name."""

    forward_includes_kv_cache_update = True

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        """Return the page sizes that the op supports; vLLM splits larger blocks into these."""
        return PAGE_SIZES

    @staticmethod
    def get_impl_cls() -> type["SpecopsAttentionImpl"]:
        """Return the class of each layer's implementation."""
        return SpecopsAttentionImpl

    @staticmethod
    def get_builder_cls() -> type["SpecopsMetadataBuilder"]:
        """Return the class that builds a step's metadata."""
        return SpecopsMetadataBuilder


@dataclass(frozen=True)
class _Slots:
    """Destination rows of new keys and values, counted in rows of all pages.

    Attributes:
        rows: [written], int64. Input rows that are written; None: all.
        keys: [written], int64. Destination rows of the keys.
        values: [written], int64. Destination rows of the values.
    """

    rows: Tensor | None
    keys: Tensor
    values: Tensor

    @classmethod
    def of(cls, slot_mapping: Tensor, page_size: int) -> "_Slots":
        """Convert vLLM's slots; a slot of -1 marks a row that is not written."""
        slots = slot_mapping.to(torch.int64)
        rows = None
        if len(slots) and int(slots.min()) < 0:
            rows = (slots >= 0).nonzero()[:, 0]
            slots = slots[rows]
        keys = slots + slots // page_size * page_size
        return cls(rows, keys, keys + page_size)


@dataclass
class SpecopsAttentionMetadata:
    """A step's batch in the op's format, shared by all layers of a group.

    Attributes:
        num_actual_tokens: rows of the step.
        qo_indptr: [batch + 1], int32.
        kv_indptr: [batch + 1], int32. Every request has as many pages as the longest one.
        kv_indices: [pages], int32. Pages of the keys; the pages of the values have the same
            numbers. Entries past a request's last page are arbitrary.
        kv_lens: [batch], int32.
        causal: whether a row attends to no later position. vLLM's DFlash reads this attribute.
        slots: destinations of the new keys and values.
        workspaces: workspace of the op, by the shapes of q and the cache.
    """

    num_actual_tokens: int
    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    kv_lens: Tensor
    causal: bool
    slots: _Slots
    workspaces: dict[tuple[torch.Size, torch.Size], Tensor | None]


class SpecopsMetadataBuilder(AttentionMetadataBuilder[SpecopsAttentionMetadata]):  # type: ignore[misc]
    """Builder of each step's metadata."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.page_size = int(kv_cache_spec.block_size)
        if self.page_size not in PAGE_SIZES:
            raise ValueError(
                f"specops: block_size must be one of {PAGE_SIZES}, got {self.page_size}"
            )

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> SpecopsAttentionMetadata:
        """Return the step's metadata: each request's pages, and the slots of its new tokens.

        Raises:
            ValueError: the batch is not causal.
        """
        if common_attn_metadata.causal is not True:
            raise ValueError(
                "specops: attention supports only causal batches, got one that is not causal"
            )
        return self._metadata_of(common_attn_metadata)

    def build_for_drafting(
        self, common_attn_metadata: CommonAttentionMetadata, draft_index: int
    ) -> SpecopsAttentionMetadata:
        """Return the metadata for a drafter's batch, which may be non-causal."""
        return self._metadata_of(common_attn_metadata)

    def _metadata_of(self, common: CommonAttentionMetadata) -> SpecopsAttentionMetadata:
        if not isinstance(common.causal, bool):
            raise ValueError(
                "specops: causal must be equal for all requests of a batch, got both values"
            )
        widest = -(-int(common.max_seq_len) // self.page_size)
        blocks = common.block_table_tensor[: common.num_reqs, :widest]
        widest = blocks.shape[1]
        kv_indptr = torch.arange(0, common.num_reqs * widest + 1, widest, dtype=torch.int32)
        return SpecopsAttentionMetadata(
            num_actual_tokens=common.num_actual_tokens,
            qo_indptr=common.query_start_loc[: common.num_reqs + 1],
            kv_indptr=kv_indptr,
            kv_indices=(2 * blocks).flatten(),
            kv_lens=common.seq_lens[: common.num_reqs],
            causal=common.causal,
            slots=_Slots.of(common.slot_mapping[: common.num_actual_tokens], self.page_size),
            workspaces={},
        )


class SpecopsAttentionImpl(AttentionImpl):  # type: ignore[misc]
    """The attention of one layer.

    Attributes:
        specops_faults: unsupported options of the layer. If there are any, the engine does not
            start.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        unsupported = {
            f"heads of {head_size} (supported: {HEAD_DIMS})": head_size not in HEAD_DIMS,
            "ALiBi slopes": alibi_slopes is not None,
            f"a soft cap of {logits_soft_cap}": bool(logits_soft_cap),
            "sinks": sinks is not None,
            f"the type {attn_type}": attn_type != AttentionType.DECODER,
            f"the cache dtype {kv_cache_dtype}": kv_cache_dtype != "auto",
        }
        self.specops_faults = [
            f"attention with {name}" for name, is_required in unsupported.items() if is_required
        ]
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self._pages: _Pages | None = None
        threads.start()

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: SpecopsAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write keys and values to the cache and attend.

        Args:
            layer: the layer.
            query: [tokens, num_heads, head_dim].
            key: [tokens, num_kv_heads, head_dim]; None if the layer shares another layer's cache.
            value: like `key`.
            kv_cache: [blocks, num_kv_heads, block_size, 2 * head_dim].
            attn_metadata: metadata of the step; None in a run that only measures memory.
            output: [tokens, num_heads, head_dim]. Written.
            output_scale: scale of a quantized output, which is not supported; must be None.
            output_block_scale: like `output_scale`.

        Returns:
            `output`.

        Raises:
            ValueError: a quantized output is requested.
        """
        if output_scale is not None or output_block_scale is not None:
            raise ValueError("specops: attention does not support a quantized output")
        if attn_metadata is None:
            return output
        pages = self._pages_of(kv_cache)
        num_tokens = attn_metadata.num_actual_tokens
        if len(query) != num_tokens:
            query, output_rows = query[:num_tokens], output[:num_tokens]
        else:
            output_rows = output
        if self.kv_sharing_target_layer_name is None and key is not None and value is not None:
            _write(pages.slots, key[:num_tokens], value[:num_tokens], attn_metadata.slots)
        append_attention(
            query,
            PagedKv(pages.keys, pages.values),
            PagedBatch(
                attn_metadata.qo_indptr,
                attn_metadata.kv_indptr,
                attn_metadata.kv_indices,
                attn_metadata.kv_lens,
            ),
            sm_scale=self.scale,
            sliding_window=self.sliding_window,
            is_causal=attn_metadata.causal,
            out=output_rows,
            workspace=_workspace(query, pages, attn_metadata),
        )
        return output

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write keys and values without attention, as vLLM does for the context of a DFlash head.

        Args:
            layer: the layer.
            key: [tokens, num_kv_heads, head_dim].
            value: like `key`.
            kv_cache: [blocks, num_kv_heads, block_size, 2 * head_dim].
            slot_mapping: [tokens], int64. Counted in tokens of all blocks; -1: not written.
        """
        slots = _Slots.of(slot_mapping, kv_cache.shape[2])
        _write(self._pages_of(kv_cache).slots, key, value, slots)

    def _pages_of(self, kv_cache: Tensor) -> "_Pages":
        if self._pages is None or self._pages.kv_cache is not kv_cache:
            self._pages = _Pages.of(kv_cache, self.head_size)
        return self._pages


@dataclass(frozen=True)
class _Pages:
    """Views of a layer's cache for the op.

    Attributes:
        kv_cache: vLLM's tensor, [blocks, num_kv_heads, block_size, 2 * head_dim].
        keys: [2 * blocks - 1, block_size, num_kv_heads, head_dim]; block b's keys are page 2 * b.
        values: the same pages from the second on, so that block b's values are page 2 * b, too.
        slots: [slots, num_kv_heads, head_dim]. Rows of all pages.
    """

    kv_cache: Tensor
    keys: Tensor
    values: Tensor
    slots: Tensor

    @classmethod
    def of(cls, kv_cache: Tensor, head_dim: int) -> "_Pages":
        num_blocks, num_kv_heads, page_size, _ = kv_cache.shape
        pages = kv_cache.view(2 * num_blocks, page_size, num_kv_heads, head_dim)
        return cls(kv_cache, pages[:-1], pages[1:], pages.view(-1, num_kv_heads, head_dim))


def _write(pages: Tensor, key: Tensor, value: Tensor, slots: _Slots) -> None:
    """Copy keys and values to their slots."""
    if slots.rows is not None:
        key, value = key[slots.rows], value[slots.rows]
    pages.index_copy_(0, slots.keys, key)
    pages.index_copy_(0, slots.values, value)


def _workspace(q: Tensor, pages: _Pages, metadata: SpecopsAttentionMetadata) -> Tensor | None:
    """Return the op's workspace, allocated once per step for all layers of the same shape."""
    shape = (q.shape, pages.keys.shape)
    if shape not in metadata.workspaces:
        size = attention_workspace_size(
            q.shape, pages.keys.shape, len(metadata.kv_indices), len(metadata.kv_lens)
        )
        metadata.workspaces[shape] = torch.empty(size, dtype=torch.float32) if size else None
    return metadata.workspaces[shape]
