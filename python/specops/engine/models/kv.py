# SPDX-License-Identifier: Apache-2.0
"""KV caches: per-token data on pages and per-request states in slots, for each layer."""

import math
import mmap
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from specops.attention import PagedKv


class KvBytes(NamedTuple):
    """Memory that the caches of layers take.

    Attributes:
        per_token: bytes per token on pages.
        per_slot: bytes per running request that do not depend on its length.
        per_prefix: bytes per prefix with stored states.
    """

    per_token: int = 0
    per_slot: int = 0
    per_prefix: int = 0


class CacheCapacity(NamedTuple):
    """Capacity of a cache.

    Attributes:
        num_pages: number of pages.
        page_size: tokens of a page.
        num_slots: number of request slots.
        num_drafts: maximum number of drafts that a step verifies for one request.
        num_prefix_states: number of prefixes whose states can be stored, for linear attention.
    """

    num_pages: int
    page_size: int
    num_slots: int = 1
    num_drafts: int = 0
    num_prefix_states: int = 0


class TensorShard(NamedTuple):
    """One rank's shard of a tensor whose third axis holds heads.

    Attributes:
        tensor: [pages or slots, rows, this rank's heads, ...].
        all_heads: number of heads over all ranks; `shard_range` returns this rank's range.
        widths: elements per head on the third axis, for each part such as q, k and v. The parts
            lie one after the other, each with all heads of the rank.
    """

    tensor: Tensor
    all_heads: int
    widths: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class KvSpec:
    """Per-token cache of an attention layer.

    Attributes:
        num_heads: number of key heads, and of value heads.
        all_heads: number of different heads over all ranks; several ranks may hold the same head.
        head_dim: elements of a head.
        dtype: dtype of the elements. 8-bit elements have a float32 scale per token and head.
        has_values: False: values are part of the keys, as in latent attention.
        window: number of positions that a row attends to; None: all.
        is_shared: whether the layer has no cache of its own, but reads that of the last earlier
            layer that has one and the same window.
    """

    num_heads: int
    all_heads: int
    head_dim: int
    dtype: torch.dtype
    has_values: bool = True
    window: int | None = None
    is_shared: bool = False

    @property
    def has_scales(self) -> bool:
        """True if the elements have scales."""
        return self.dtype.itemsize == 1

    @property
    def bytes_per_token(self) -> int:
        """Bytes that the layer stores per token, including scales."""
        return 0 if self.is_shared else self.bytes_read_per_token

    @property
    def bytes_read_per_token(self) -> int:
        """Bytes that the layer reads per token, including scales."""
        head_bytes = self.head_dim * self.dtype.itemsize
        if self.has_scales:
            head_bytes += torch.float32.itemsize
        return (1 + self.has_values) * self.num_heads * head_bytes

    def bytes_per_slot(self, num_drafts: int) -> int:
        """Return 0: the layer stores nothing per slot."""
        return 0

    def new(self, capacity: CacheCapacity, device: torch.device) -> "LayerKv":
        """Allocate the pages of one layer."""
        slots = (capacity.num_pages, capacity.page_size, self.num_heads)

        def cache() -> Tensor:
            return _zeros((*slots, self.head_dim), self.dtype, device)

        def scales() -> Tensor | None:
            return _zeros(slots, torch.float32, device) if self.has_scales else None

        if not self.has_values:
            return LayerKv(self.all_heads, cache(), None, scales(), None)
        return LayerKv(self.all_heads, cache(), cache(), scales(), scales())


@dataclass(frozen=True, kw_only=True)
class StateSpec:
    """Per-request state of a layer, of a size independent of the text length.

    The layer has linear attention or Mamba-2, whose groups are key heads and whose heads are value
    heads.

    A step stores a state for each row that may turn out to be the last accepted one, at the row's
    position, so rejected drafts need no rollback; see `specops.linear_attention`.

    Attributes:
        num_heads: number of value heads. Each has a state, float32 [key_dim, value_dim].
        num_key_heads: number of query/key heads; each serves the same number of value heads.
        all_key_heads: number of key heads over all ranks.
        key_dim: rows of a state.
        value_dim: columns of a state.
        taps: taps (kernel size) of the convolution.
        dtype: dtype of the convolution's input.
        values_first: whether the convolution's channels are v|k|q, not q|k|v.
    """

    bytes_per_token: ClassVar[int] = 0
    bytes_read_per_token: ClassVar[int] = 0

    num_heads: int
    num_key_heads: int
    all_key_heads: int
    key_dim: int
    value_dim: int
    taps: int
    dtype: torch.dtype
    values_first: bool = False

    def bytes_per_slot(self, num_drafts: int) -> int:
        """Return the bytes per request if steps verify up to `num_drafts` drafts."""
        conv, states = self._shapes(CacheCapacity(0, 0, 1, num_drafts))
        return math.prod(conv) * self.dtype.itemsize + math.prod(states) * torch.float32.itemsize

    def new(self, capacity: CacheCapacity, device: torch.device) -> "LayerStates":
        """Allocate the slots of one layer."""
        conv, states = self._shapes(capacity)
        of_key = self.num_heads // self.num_key_heads
        widths = (self.key_dim, self.key_dim, of_key * self.value_dim)
        return LayerStates(
            _zeros(conv, self.dtype, device),
            _zeros(states, torch.float32, device),
            self.all_key_heads,
            (widths[::-1] if self.values_first else widths, (of_key,)),
        )

    def _shapes(self, capacity: CacheCapacity) -> tuple[tuple[int, ...], tuple[int, ...]]:
        window = max(capacity.num_drafts + self.taps - 1, 1)
        heads = (self.num_heads, self.key_dim, self.value_dim)
        slots = capacity.num_slots
        channels = 2 * self.num_key_heads * self.key_dim + self.num_heads * self.value_dim
        return (slots, window, channels), (slots, capacity.num_drafts + 1, *heads)


@dataclass(frozen=True)
class ParallelSpec:
    """Cache of a layer that has keys and values, and states beside them."""

    kv: KvSpec
    states: StateSpec

    @property
    def bytes_per_token(self) -> int:
        """Bytes per token on pages."""
        return self.kv.bytes_per_token

    @property
    def bytes_read_per_token(self) -> int:
        """Bytes per token that attention reads."""
        return self.kv.bytes_read_per_token

    def bytes_per_slot(self, num_drafts: int) -> int:
        """Return the bytes per request if steps verify up to `num_drafts` drafts."""
        return self.states.bytes_per_slot(num_drafts)

    def new(self, capacity: CacheCapacity, device: torch.device) -> "ParallelKv":
        """Allocate the pages and slots of one layer."""
        return ParallelKv(self.kv.new(capacity, device), self.states.new(capacity, device))


@dataclass(frozen=True)
class NoKvSpec:
    """Cache of a layer without attention: nothing."""

    bytes_per_token: ClassVar[int] = 0
    bytes_read_per_token: ClassVar[int] = 0

    def bytes_per_slot(self, num_drafts: int) -> int:
        """Return 0."""
        return 0

    def new(self, capacity: CacheCapacity, device: torch.device) -> "NoKv":
        """Allocate nothing."""
        return NoKv()


AnyKvSpec = KvSpec | StateSpec | ParallelSpec | NoKvSpec


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros; on a CPU, the system allocates memory pages only when they are written to."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not num_bytes:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


@dataclass(frozen=True)
class LayerKv:
    """Paged key and value caches of one layer."""

    all_heads: int  # number of heads over all ranks
    k: Tensor  # [num_pages, page_size, num_kv_heads, head_dim]
    v: Tensor | None  # None: values are part of the keys
    # Float32 [num_pages, page_size, num_kv_heads]; None: the cache is not 8-bit.
    k_scales: Tensor | None = None
    v_scales: Tensor | None = None

    @property
    def paged(self) -> PagedKv:
        """The tensors as an argument of the ops of `specops.attention`."""
        return PagedKv(self.k, self.v, self.k_scales, self.v_scales)

    @cached_property
    def pairs(self) -> list[tuple[Tensor, Tensor | None]]:
        """Pairs of k and v tensors to copy when tokens move; scales count as caches of width 1."""
        pairs = [(self.k, self.v)]
        if self.k_scales is not None:
            v_scales = None if self.v_scales is None else self.v_scales[..., None]
            pairs.append((self.k_scales[..., None], v_scales))
        return pairs

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the layer, including scales."""
        tensors = (self.k, self.v, self.k_scales, self.v_scales)
        return [tensor for tensor in tensors if tensor is not None]

    @property
    def shards(self) -> list[TensorShard]:
        """This rank's shard of each tensor."""
        return [TensorShard(tensor, self.all_heads, (1,)) for tensor in self.tensors]


@dataclass(frozen=True)
class LayerStates:
    """Per-slot states of one layer with linear attention or Mamba-2."""

    conv: Tensor  # [num_slots, window, channels], inputs of the convolution
    states: Tensor  # float32 [num_slots, window, num_heads, key_dim, value_dim]
    all_key_heads: int  # number of key heads over all ranks
    widths: tuple[tuple[int, ...], ...]  # per tensor: elements per key head in each part

    @property
    def tensors(self) -> list[Tensor]:
        """Both tensors of the layer."""
        return [self.conv, self.states]

    @property
    def shards(self) -> list[TensorShard]:
        """This rank's shard of both tensors, by key heads."""
        both = zip(self.tensors, self.widths, strict=True)
        return [TensorShard(tensor, self.all_key_heads, widths) for tensor, widths in both]

    def copy(self, slot: int, to: "LayerStates", to_slot: int, num_tokens: int) -> None:
        """Copy a slot's state after `num_tokens` tokens to slot `to_slot` of `to`.

        Both objects store the state of position i at index i modulo their window. The positions of
        the smaller window are copied.
        """
        for own, other in zip(self.tensors, to.tensors, strict=True):
            window, other_window = own.shape[1], other.shape[1]
            for position in range(num_tokens - min(window, other_window), num_tokens):
                other[to_slot, position % other_window].copy_(own[slot, position % window])


class ParallelKv(NamedTuple):
    """Caches of one layer that has keys and values, and states beside them."""

    kv: LayerKv
    states: LayerStates

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the layer."""
        return [*self.kv.tensors, *self.states.tensors]


@dataclass(frozen=True)
class NoKv:
    """Empty cache of a layer without attention."""

    @property
    def tensors(self) -> list[Tensor]:
        """No tensors."""
        return []


@dataclass(frozen=True)
class KvCache:
    """Caches of all layers, which may differ in everything but the page size."""

    layers: list[Any]  # LayerKv, LayerStates, ParallelKv or NoKv; layers may share a LayerKv
    capacity: CacheCapacity
    # States of prefixes for each layer with LayerStates, in order, with windows for no drafts.
    prefix_states: list[LayerStates]

    @classmethod
    def new(
        cls,
        specs: Iterable[AnyKvSpec],
        capacity: CacheCapacity,
        device: torch.device,
    ) -> "KvCache":
        """Allocate the caches of every layer."""
        specs = list(specs)
        of_prefixes = capacity._replace(num_slots=capacity.num_prefix_states, num_drafts=0)
        states = [spec.states if isinstance(spec, ParallelSpec) else spec for spec in specs]
        prefix_states = [
            spec.new(of_prefixes, device) for spec in states if isinstance(spec, StateSpec)
        ]
        layers: list[Any] = []
        last_of_window: dict[int | None, LayerKv] = {}
        for spec in specs:
            if isinstance(spec, KvSpec) and spec.is_shared:
                layers.append(last_of_window[spec.window])
                continue
            layers.append(spec.new(capacity, device))
            if isinstance(spec, KvSpec):
                last_of_window[spec.window] = layers[-1]
        return cls(layers, capacity, prefix_states)

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.capacity.page_size

    @property
    def _distinct(self) -> list[Any]:
        """The caches without those of layers that share another layer's."""
        return list({id(layer): layer for layer in self.layers}.values())

    @property
    def _on_pages(self) -> list[LayerKv]:
        return [part for part in self._parts if isinstance(part, LayerKv)]

    @property
    def _states(self) -> list[LayerStates]:
        return [part for part in self._parts if isinstance(part, LayerStates)]

    @property
    def _parts(self) -> list[Any]:
        """Caches of all layers, those of a layer with several apart."""
        layers = (one if isinstance(one, ParallelKv) else (one,) for one in self._distinct)
        return [part for layer in layers for part in layer]

    def keep_states(self, slot: int, num_tokens: int, entry: int) -> None:
        """Copy a slot's states after `num_tokens` tokens to an entry of `prefix_states`."""
        for slots, entries in zip(self._states, self.prefix_states, strict=True):
            slots.copy(slot, entries, entry, num_tokens)

    def load_states(self, entry: int, num_tokens: int, slot: int) -> None:
        """Copy an entry's states after `num_tokens` tokens to the slot of a request."""
        for slots, entries in zip(self._states, self.prefix_states, strict=True):
            entries.copy(entry, slots, slot, num_tokens)

    @property
    def pairs(self) -> list[tuple[Tensor, Tensor | None]]:
        """`LayerKv.pairs` of all layers: tensors to copy when tokens move to other cache slots."""
        return [pair for layer in self._on_pages for pair in layer.pairs]

    @property
    def page_shards(self) -> list[TensorShard]:
        """Tensors that are indexed by pages."""
        return [shard for layer in self._on_pages for shard in layer.shards]

    @property
    def prefix_shards(self) -> list[TensorShard]:
        """Tensors that are indexed by entries of `prefix_states`."""
        return [shard for layer in self.prefix_states for shard in layer.shards]

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the cache."""
        layers = (*self._distinct, *self.prefix_states)
        return [tensor for layer in layers for tensor in layer.tensors]
