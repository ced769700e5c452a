# SPDX-License-Identifier: Apache-2.0
"""What layers keep: of a token on pages, of a request in its slot; and the tensors that hold it."""

import math
import mmap
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor


class KvBytes(NamedTuple):
    """Bytes of what layers keep.

    Attributes:
        per_token: on pages.
        per_slot: of a request, whatever its length.
        per_prefix: of one whose states are kept.
    """

    per_token: int = 0
    per_slot: int = 0
    per_prefix: int = 0


class CacheRoom(NamedTuple):
    """For how much there is to be room.

    Attributes:
        num_pages: of tokens.
        page_size: tokens of a page.
        num_slots: requests that run at once.
        num_drafts: most drafts that a step verifies for one of them.
        num_kept: prefixes whose states are kept, of layers with linear attention.
    """

    num_pages: int
    page_size: int
    num_slots: int = 1
    num_drafts: int = 0
    num_kept: int = 0


class Share(NamedTuple):
    """What a rank has of a tensor whose third axis has heads.

    Attributes:
        tensor: [pages or slots, rows, this rank's heads, ...].
        all_heads: of all ranks; which of them are this rank's, `parallel.ranks.dealt` says.
        widths: elements of that axis that a head has in each part: parts, like those of q|k|v, lie
            behind each other, and each has all of the rank's heads.
    """

    tensor: Tensor
    all_heads: int
    widths: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class KvSpec:
    """What a layer keeps of a token.

    Attributes:
        num_heads: heads of keys, and as many of values.
        all_heads: those of all ranks; some may have the same.
        head_dim: elements of a head.
        dtype: of the elements. Those of 8 bits have a float32 scale per token and head.
        has_values: False: values are part of the keys, as in latent attention.
    """

    num_heads: int
    all_heads: int
    head_dim: int
    dtype: torch.dtype
    has_values: bool = True

    @property
    def has_scales(self) -> bool:
        """Whether elements need a scale."""
        return self.dtype.itemsize == 1

    @property
    def bytes_per_token(self) -> int:
        """The bytes that a token takes."""
        head_bytes = self.head_dim * self.dtype.itemsize
        if self.has_scales:
            head_bytes += torch.float32.itemsize
        return (1 + self.has_values) * self.num_heads * head_bytes

    def bytes_per_slot(self, num_drafts: int) -> int:
        """The bytes that a request takes beside: none."""
        return 0

    def new(self, room: CacheRoom, device: torch.device) -> "LayerKv":
        """Allocates the pages of one layer."""
        slots = (room.num_pages, room.page_size, self.num_heads)

        def cache() -> Tensor:
            return _zeros((*slots, self.head_dim), self.dtype, device)

        def scales() -> Tensor | None:
            return _zeros(slots, torch.float32, device) if self.has_scales else None

        if not self.has_values:
            return LayerKv(self.all_heads, cache(), None, scales(), None)
        return LayerKv(self.all_heads, cache(), cache(), scales(), scales())


@dataclass(frozen=True, kw_only=True)
class StateSpec:
    """What a layer with linear attention keeps of a request, however long it is.

    Each row that a step may accept last leaves its own, by its position, so that drafts which are
    rejected need no rollback; see `specops.linear_attention`.

    Attributes:
        num_heads: states, of [key_dim, value_dim] float32 each.
        num_key_heads: heads of queries and keys, each of as many states.
        all_key_heads: those of all ranks.
        key_dim: rows of a state.
        value_dim: columns of one.
        taps: of the convolution.
        dtype: of what is convolved.
    """

    bytes_per_token: ClassVar[int] = 0

    num_heads: int
    num_key_heads: int
    all_key_heads: int
    key_dim: int
    value_dim: int
    taps: int
    dtype: torch.dtype

    def bytes_per_slot(self, num_drafts: int) -> int:
        """The bytes that a request takes, with so many drafts a step."""
        conv, states = self._shapes(CacheRoom(0, 0, 1, num_drafts))
        return math.prod(conv) * self.dtype.itemsize + math.prod(states) * torch.float32.itemsize

    def new(self, room: CacheRoom, device: torch.device) -> "LayerStates":
        """Allocates what the slots of one layer keep."""
        conv, states = self._shapes(room)
        of_key = self.num_heads // self.num_key_heads
        return LayerStates(
            _zeros(conv, self.dtype, device),
            _zeros(states, torch.float32, device),
            self.all_key_heads,
            ((self.key_dim, self.key_dim, of_key * self.value_dim), (of_key,)),
        )

    def _shapes(self, room: CacheRoom) -> tuple[tuple[int, ...], tuple[int, ...]]:
        window = max(room.num_drafts + self.taps - 1, 1)
        heads = (self.num_heads, self.key_dim, self.value_dim)
        slots = room.num_slots
        channels = 2 * self.num_key_heads * self.key_dim + self.num_heads * self.value_dim
        return (slots, window, channels), (slots, room.num_drafts + 1, *heads)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on the CPU the system makes a page of memory when it is first written to."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not num_bytes:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


@dataclass(frozen=True)
class LayerKv:
    """The paged key and value caches of one layer."""

    all_heads: int  # of all ranks
    k: Tensor  # [num_pages, page_size, num_kv_heads, head_dim]
    v: Tensor | None  # None: values are part of the keys
    # Of 8-bit caches, float32 [num_pages, page_size, num_kv_heads]; None: the model's dtype.
    k_scales: Tensor | None = None
    v_scales: Tensor | None = None

    @cached_property
    def pairs(self) -> list[tuple[Tensor, Tensor | None]]:
        """What moves when tokens move: the caches, and their scales as caches of width 1."""
        pairs = [(self.k, self.v)]
        if self.k_scales is not None:
            v_scales = None if self.v_scales is None else self.v_scales[..., None]
            pairs.append((self.k_scales[..., None], v_scales))
        return pairs

    @property
    def tensors(self) -> list[Tensor]:
        """All of them, scales included."""
        tensors = (self.k, self.v, self.k_scales, self.v_scales)
        return [tensor for tensor in tensors if tensor is not None]

    @property
    def shares(self) -> list[Share]:
        """Which heads of each they have."""
        return [Share(tensor, self.all_heads, (1,)) for tensor in self.tensors]


@dataclass(frozen=True)
class LayerStates:
    """What the slots of one layer with linear attention keep."""

    conv: Tensor  # [num_slots, window, channels], the channels q|k|v
    states: Tensor  # float32 [num_slots, window, num_heads, key_dim, value_dim]
    all_key_heads: int  # of all ranks
    widths: tuple[tuple[int, ...], ...]  # of both, that a head of keys has in each part

    @property
    def tensors(self) -> list[Tensor]:
        """Both."""
        return [self.conv, self.states]

    @property
    def shares(self) -> list[Share]:
        """Which heads of keys they are of."""
        both = zip(self.tensors, self.widths, strict=True)
        return [Share(tensor, self.all_key_heads, widths) for tensor, widths in both]

    def copy(self, slot: int, to: "LayerStates", to_slot: int, num_tokens: int) -> None:
        """Copies what a request of so many tokens needs to go on, from a slot to one of `to`.

        Each keeps what position i left at i modulo its window, and the smaller window is enough.
        """
        for own, other in zip(self.tensors, to.tensors, strict=True):
            window, other_window = own.shape[1], other.shape[1]
            for position in range(num_tokens - min(window, other_window), num_tokens):
                other[to_slot, position % other_window].copy_(own[slot, position % window])


@dataclass(frozen=True)
class KvCache:
    """What layers keep, which may differ in all but the page size."""

    layers: list[Any]  # a LayerKv or LayerStates each
    room: CacheRoom
    # Of layers with LayerStates, in order: those of prefixes, as of requests without drafts.
    kept: list[LayerStates]

    @classmethod
    def new(
        cls, specs: Iterable[KvSpec | StateSpec], room: CacheRoom, device: torch.device
    ) -> "KvCache":
        """Allocates what every layer keeps."""
        specs = list(specs)
        of_prefixes = room._replace(num_slots=room.num_kept, num_drafts=0)
        kept = [spec.new(of_prefixes, device) for spec in specs if isinstance(spec, StateSpec)]
        return cls([spec.new(room, device) for spec in specs], room, kept)

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.room.page_size

    @property
    def _on_pages(self) -> list[LayerKv]:
        return [layer for layer in self.layers if isinstance(layer, LayerKv)]

    @property
    def _states(self) -> list[LayerStates]:
        return [layer for layer in self.layers if isinstance(layer, LayerStates)]

    def keep_states(self, slot: int, num_tokens: int, entry: int) -> None:
        """Copies the states behind the first tokens of a slot's request to an entry of `kept`."""
        for own, kept in zip(self._states, self.kept, strict=True):
            own.copy(slot, kept, entry, num_tokens)

    def load_states(self, entry: int, num_tokens: int, slot: int) -> None:
        """Copies the states behind so many tokens to the slot of a request that begins so."""
        for own, kept in zip(self._states, self.kept, strict=True):
            kept.copy(entry, own, slot, num_tokens)

    @property
    def pairs(self) -> list[tuple[Tensor, Tensor | None]]:
        """What moves when tokens move, of all layers."""
        return [pair for layer in self._on_pages for pair in layer.pairs]

    @property
    def page_shares(self) -> list[Share]:
        """The tensors that are indexed by pages."""
        return [share for layer in self._on_pages for share in layer.shares]

    @property
    def prefix_shares(self) -> list[Share]:
        """The tensors that are indexed by entries of `kept`."""
        return [share for layer in self.kept for share in layer.shares]

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor of it."""
        return [tensor for layer in (*self.layers, *self.kept) for tensor in layer.tensors]
