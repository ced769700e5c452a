# SPDX-License-Identifier: Apache-2.0
"""The memory of steps: blocks that all steps share, and the arrays that a step has in them."""

import math
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specops.engine.device import Device
from specops.engine.memory.step_shape import StepShape

# Shapes whose views (17 KB each), or graphs, are kept; the one not used for longest goes first.
_MAX_KEPT_STEPS, _MAX_KEPT_GRAPHS = 1024, 128
_MAX_KEPT_VIEWS = 4096  # of a block
_ALIGNMENT = 128  # of every array in a block, in bytes
_NUMPY: dict[torch.dtype, Any] = {
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.float32: np.float32,
}


S = TypeVar("S")  # a step


class Block:
    """Memory that all steps share, with the views of it that their arrays have had.

    Most arrays of two shapes lie at the same place; making a view takes longer than finding it.

    Attributes:
        device: its bytes, as kernels see them.
        host: as the host sees them; None: there is no host side.
    """

    def __init__(self, device: Tensor, host: Tensor | None = None) -> None:
        self.device, self.host = device, host
        self._memory = None if host is None else host.numpy()
        self._views: dict[tuple[torch.dtype, int, tuple[int, ...]], tuple[Tensor, Any]] = {}

    def view(
        self, dtype: torch.dtype, offset: int, shape: tuple[int, ...]
    ) -> tuple[Tensor, NDArray[Any] | None]:
        """Returns an array at some offset, as kernels see it and as the host does."""
        key = (dtype, offset, shape)
        found = self._views.get(key)
        if found is None:
            if len(self._views) >= _MAX_KEPT_VIEWS:
                self._views.clear()
            host = None
            if self._memory is not None:
                host = np.ndarray(shape, _NUMPY[dtype], self._memory, offset)
            found = self._views[key] = _view(self.device, dtype, offset, shape), host
        return found


def _view(block: Tensor, dtype: torch.dtype, offset: int, shape: tuple[int, ...]) -> Tensor:
    strides = (1,) if len(shape) == 1 else (shape[1], 1)
    return torch.as_strided(block.view(dtype), shape, strides, offset // dtype.itemsize)


class Array:
    """One array of a step. Its memory is there once its layout has been placed.

    Attributes:
        host: as the host sees it, where there is a host side.
        device: as kernels see it.
        num_bytes: the bytes it takes.
    """

    __slots__ = ("_shape", "device", "dtype", "host", "num_bytes", "offset")

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.dtype, self._shape = dtype, shape
        self.num_bytes = dtype.itemsize * math.prod(shape)
        self.offset = 0  # in its block
        self.host: Any  # an array of numpy
        self.device: Tensor

    def place(self, block: Block) -> None:
        """Lays the array into a block."""
        self.device, self.host = block.view(self.dtype, self.offset, self._shape)


class Layout:
    """Arrays one behind the other, from some offset of a block on."""

    def __init__(self, begin: int = 0) -> None:
        self.begin = self.end = begin
        self._arrays: list[Array] = []

    def int32(self, *shape: int) -> Array:
        """Adds an array of int32, of one dimension or two."""
        return self._add(Array(torch.int32, shape))

    def int64(self, *shape: int) -> Array:
        """Adds an array of int64, likewise."""
        return self._add(Array(torch.int64, shape))

    def float32(self, *shape: int) -> Array:
        """Adds an array of float32, likewise."""
        return self._add(Array(torch.float32, shape))

    def add(self, dtype: torch.dtype, *shape: int) -> Array:
        """Adds an array of a dtype, which the host may see where numpy has it, too."""
        return self._add(Array(dtype, shape))

    def append(self, other: "Layout") -> None:
        """Takes over another layout's arrays."""
        for array in other._arrays:
            self._add(array)

    def _add(self, array: Array) -> Array:
        array.offset = -(-self.end // _ALIGNMENT) * _ALIGNMENT
        self.end = array.offset + array.num_bytes
        self._arrays.append(array)
        return array

    def place(self, block: Block) -> None:
        """Gives every array its memory."""
        for array in self._arrays:
            array.place(block)


class StepMemory(Generic[S]):
    """The blocks that the steps use one after the other, and the steps made so far.

    Args:
        device: where the blocks live.
        most: the largest step there is.
    """

    def __init__(self, device: Device, most: StepShape) -> None:
        self.device = device
        self.most = most
        self.num_captures = 0
        self._blocks: dict[str, Block] = {}
        self._steps: dict[StepShape, S] = {}  # least recently used first
        # Of these, the one used most recently, and its shape.
        self._last: S | None = None
        self._last_shape: StepShape | None = None

    def find(self, shape: StepShape) -> S | None:
        """Returns the step of a shape if it is there."""
        if self._last_shape == shape:  # as it mostly is
            return self._last
        step = self._steps.pop(shape, None)
        if step is not None:
            self._steps[shape] = self._last = step
            self._last_shape = shape
        return step

    def keep(self, shape: StepShape, step: S) -> None:
        """Keeps a step for the next of its shape."""
        most = _MAX_KEPT_GRAPHS if self.device.captures else _MAX_KEPT_STEPS
        while len(self._steps) >= most:
            del self._steps[next(iter(self._steps))]
        self._steps[shape] = self._last = step
        self._last_shape = shape

    def forget(self) -> None:
        """Drops all steps: what they use has moved."""
        self._steps.clear()
        self._last = self._last_shape = None

    def place(self, **layouts: Sequence[Layout]) -> None:
        """Gives layouts their memory, by the names of blocks; of a block the last one ends last."""
        # All blocks before any view: steps are dropped where one grows, and so may their views be.
        for name, of_block in layouts.items():
            self.block(name, of_block[-1].end)
        for name, of_block in layouts.items():
            for layout in of_block:
                layout.place(self._blocks[name])

    def block(self, name: str, num_bytes: int) -> Block:
        """Returns a block of at least so many bytes.

        A block grows when it must, and then all steps are dropped.

        Args:
            name: "exchange" has a host side. "scratch", "workspace" (for attention) and "sums" (for
                projections) are the device's alone; ops find the latter two as they left them, and
                zeros in the beginning.
            num_bytes: bytes needed.
        """
        have = self._blocks.get(name)
        if have is None or have.device.numel() < num_bytes:
            old = 0 if have is None else have.device.numel()
            # Ahead of the need, so that it seldom grows.
            size = max(num_bytes, old + min(old, 64 << 20), 4096)
            size = -(-size // _ALIGNMENT) * _ALIGNMENT
            self.forget()
            if name == "exchange":
                host = self.device.host_block(size).zero_()  # ranks compare all of it
                have = Block(self.device.device_block(size, host), host)
            elif name in ("workspace", "sums"):
                have = Block(self.device.workspace(size))
            else:
                have = Block(self.device.device_block(size))
            self._blocks[name] = have
        return have
