# SPDX-License-Identifier: Apache-2.0
"""Keys and values on pages: what a layer keeps of a token, and the tensors that hold it."""

import math
import mmap
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class KvSpec:
    """What a layer keeps of a token.

    Attributes:
        num_heads: heads of keys, and as many of values.
        head_dim: elements of a head.
        dtype: of the elements. Those of 8 bits have a float32 scale per token and head.
        has_values: False: values are part of the keys, as in latent attention.
    """

    num_heads: int
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

    def new(self, num_pages: int, page_size: int, device: torch.device) -> "LayerKv":
        """Allocates the pages of one layer."""
        slots = (num_pages, page_size, self.num_heads)

        def cache() -> Tensor:
            return _zeros((*slots, self.head_dim), self.dtype, device)

        def scales() -> Tensor | None:
            return _zeros(slots, torch.float32, device) if self.has_scales else None

        if not self.has_values:
            return LayerKv(cache(), None, scales(), None)
        return LayerKv(cache(), cache(), scales(), scales())


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


@dataclass(frozen=True)
class KvCache:
    """The paged key and value caches of layers, which may differ in all but the page size."""

    layers: list[LayerKv]
    page_size: int  # tokens of a page

    @classmethod
    def new(
        cls, specs: Iterable[KvSpec], num_pages: int, page_size: int, device: torch.device
    ) -> "KvCache":
        """Allocates the pages of every layer."""
        return cls([spec.new(num_pages, page_size, device) for spec in specs], page_size)

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor of it, scales included."""
        of_layers = [(one.k, one.v, one.k_scales, one.v_scales) for one in self.layers]
        return [tensor for tensors in of_layers for tensor in tensors if tensor is not None]
