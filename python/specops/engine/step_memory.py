# SPDX-License-Identifier: Apache-2.0
"""The memory of steps: blocks that all steps share, and the arrays that a step has in them."""

import math
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specops.engine.device import Device
from specops.engine.step_shape import StepShape

# Shapes whose views, or graphs, are kept; the one not used for longest goes first.
_MAX_KEPT_STEPS, _MAX_KEPT_GRAPHS = 1024, 128
_ALIGNMENT = 128  # of every array in a block, in bytes
_NUMPY: dict[torch.dtype, Any] = {
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.float32: np.float32,
}


class _HasShape(Protocol):
    shape: StepShape


S = TypeVar("S", bound=_HasShape)


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
        self.host: NDArray[Any]
        self.device: Tensor

    def place(self, device: Tensor, host: NDArray[np.uint8] | None) -> None:
        """Lays the array into a block, and into its counterpart on the host.

        Args:
            device: the block, as elements of the array's dtype.
            host: the bytes of the counterpart.
        """
        self.device = self._view(device)
        if host is not None:
            self.host = np.ndarray(self._shape, _NUMPY[self.dtype], host, self.offset)

    def host_tensor(self, host: Tensor) -> Tensor:
        """The host's side as a tensor."""
        return self._view(host.view(self.dtype))

    def _view(self, elements: Tensor) -> Tensor:
        shape = self._shape
        strides = (1,) if len(shape) == 1 else (shape[1], 1)
        return torch.as_strided(elements, shape, strides, self.offset // self.dtype.itemsize)


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

    def place(self, device: Tensor, host: Tensor | None = None) -> None:
        """Gives every array its memory."""
        elements = {dtype: device.view(dtype) for dtype in {one.dtype for one in self._arrays}}
        memory = None if host is None else host.numpy()
        for array in self._arrays:
            array.place(elements[array.dtype], memory)


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
        self._blocks: dict[str, tuple[Tensor, Tensor]] = {}  # host and device; the same on the CPU
        self._steps: dict[StepShape, S] = {}  # least recently used first
        self._last: S | None = None  # of these, the one used most recently

    def find(self, shape: StepShape) -> S | None:
        """Returns the step of a shape if it is there."""
        if self._last is not None and self._last.shape == shape:  # as it mostly is
            return self._last
        step = self._steps.pop(shape, None)
        if step is not None:
            self._steps[shape] = self._last = step
        return step

    def keep(self, shape: StepShape, step: S) -> None:
        """Keeps a step for the next of its shape."""
        most = _MAX_KEPT_GRAPHS if self.device.captures else _MAX_KEPT_STEPS
        while len(self._steps) >= most:
            del self._steps[next(iter(self._steps))]
        self._steps[shape] = self._last = step

    def forget(self) -> None:
        """Drops all steps: what they use has moved."""
        self._steps.clear()
        self._last = None

    def block(self, name: str, num_bytes: int) -> tuple[Tensor, Tensor]:
        """Returns a block's host and device sides, of at least so many bytes.

        A block grows when it must, and then all steps are dropped.

        Args:
            name: "exchange" has two sides. "scratch" and "workspace" are the device's alone; ops
                find their workspace as they left it, and zeros in the beginning.
            num_bytes: bytes needed.
        """
        have = self._blocks.get(name)
        if have is None or have[1].numel() < num_bytes:
            old = 0 if have is None else have[1].numel()
            # Ahead of the need, so that it seldom grows.
            size = max(num_bytes, old + min(old, 64 << 20), 4096)
            size = -(-size // _ALIGNMENT) * _ALIGNMENT
            self.forget()
            if name == "exchange":
                host = self.device.host_block(size)
                have = host, self.device.device_block(size, host)
            elif name == "workspace":
                have = (self.device.workspace(size),) * 2
            else:
                have = (self.device.device_block(size),) * 2
            self._blocks[name] = have
        return have
