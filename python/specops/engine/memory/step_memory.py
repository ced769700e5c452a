# SPDX-License-Identifier: Apache-2.0
"""Memory of steps: buffers shared by all steps, and the arrays of a step within the buffers."""

import math
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specops.engine.device import Device
from specops.engine.memory.step_shape import StepShape

# Capacity of the LRU cache in steps: without CUDA graphs (17 KB of views each), and with graphs.
_MAX_KEPT_STEPS, _MAX_KEPT_GRAPHS = 1024, 128
_MAX_KEPT_VIEWS = 4096  # most cached views per buffer
_ALIGNMENT = 128  # bytes; alignment of each array in a buffer
_NUMPY: dict[torch.dtype, Any] = {
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.float32: np.float32,
}


S = TypeVar("S")  # type of a step


class Buffer:
    """Memory that all steps share, with a cache of views into it.

    Most arrays lie at the same offset in steps of different shapes, and looking up a view is faster
    than creating one.

    Attributes:
        device: block in device memory.
        host: its counterpart in host memory, or None.
    """

    def __init__(self, device: Tensor, host: Tensor | None = None) -> None:
        self.device, self.host = device, host
        self._memory = None if host is None else host.numpy()
        self._views: dict[tuple[torch.dtype, int, tuple[int, ...]], tuple[Tensor, Any]] = {}

    def view(
        self, dtype: torch.dtype, offset: int, shape: tuple[int, ...]
    ) -> tuple[Tensor, NDArray[Any] | None]:
        """Return the array at an offset: the device tensor, and the host array or None."""
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


def _view(buffer: Tensor, dtype: torch.dtype, offset: int, shape: tuple[int, ...]) -> Tensor:
    strides = (1,) if len(shape) == 1 else (shape[1], 1)
    return torch.as_strided(buffer.view(dtype), shape, strides, offset // dtype.itemsize)


class Array:
    """One array of a step. It gets its memory when its layout is placed.

    Attributes:
        host: numpy array in host memory, if the buffer has a host side.
        device: tensor in device memory.
        num_bytes: size in bytes.
    """

    __slots__ = ("_exists", "_shape", "device", "dtype", "host", "num_bytes", "offset")

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...], exists: bool = True) -> None:
        self.dtype, self._exists = dtype, exists
        self._shape = shape = shape if exists else (0,) * len(shape)
        self.num_bytes = dtype.itemsize * math.prod(shape)
        self.offset = 0  # offset in its buffer
        self.host: Any  # a numpy array
        self.device: Tensor

    def place(self, buffer: Buffer) -> None:
        """Bind the array to its memory in a buffer."""
        self.device, self.host = buffer.view(self.dtype, self.offset, self._shape)

    @property
    def optional(self) -> Tensor | None:
        """Tensor in device memory; None if the step does not need the array."""
        return self.device if self._exists else None


class Layout:
    """Consecutive arrays in a buffer, from offset `begin` on."""

    def __init__(self, begin: int = 0) -> None:
        self.begin = self.end = begin
        self._arrays: list[Array] = []

    def int32(self, *shape: int, when: int = True) -> Array:
        """Add an int32 array of one or two dimensions; it is empty if `when` is 0."""
        return self.add(torch.int32, *shape, when=when)

    def int64(self, *shape: int) -> Array:
        """Add an int64 array of one or two dimensions."""
        return self.add(torch.int64, *shape)

    def float32(self, *shape: int, when: int = True) -> Array:
        """Add a float32 array of one or two dimensions; it is empty if `when` is 0."""
        return self.add(torch.float32, *shape, when=when)

    def add(self, dtype: torch.dtype, *shape: int, when: int = True) -> Array:
        """Add an array of any dtype; in a buffer with a host side, numpy must support the dtype."""
        return self._add(Array(dtype, shape, bool(when)))

    def append(self, other: "Layout") -> None:
        """Append another layout's arrays to this one."""
        for array in other._arrays:
            self._add(array)

    def _add(self, array: Array) -> Array:
        array.offset = -(-self.end // _ALIGNMENT) * _ALIGNMENT
        self.end = array.offset + array.num_bytes
        self._arrays.append(array)
        return array

    def place(self, buffer: Buffer) -> None:
        """Bind every array to its memory in a buffer."""
        for array in self._arrays:
            array.place(buffer)


class StepMemory(Generic[S]):
    """Buffers that steps use one after the other, and a cache of the steps built so far.

    Args:
        device: device of the buffers.
        most: shape of the largest step.
    """

    def __init__(self, device: Device, most: StepShape) -> None:
        self.device = device
        self.most = most
        self.num_captures = 0
        self._buffers: dict[str, Buffer] = {}
        self._steps: dict[StepShape, S] = {}  # least recently used first
        # The most recently used step, and its shape.
        self._last: S | None = None
        self._last_shape: StepShape | None = None

    def find(self, shape: StepShape) -> S | None:
        """Return the cached step of a shape, or None."""
        if self._last_shape == shape:  # the usual case
            return self._last
        step = self._steps.pop(shape, None)
        if step is not None:
            self._steps[shape] = self._last = step
            self._last_shape = shape
        return step

    def keep(self, shape: StepShape, step: S) -> None:
        """Cache a step for later steps of the same shape."""
        most = _MAX_KEPT_GRAPHS if self.device.captures else _MAX_KEPT_STEPS
        while len(self._steps) >= most:
            del self._steps[next(iter(self._steps))]
        self._steps[shape] = self._last = step
        self._last_shape = shape

    def forget(self) -> None:
        """Drop all steps, because memory that they use has moved."""
        self._steps.clear()
        self._last = self._last_shape = None

    def place(self, **layouts: Sequence[Layout]) -> None:
        """Place layouts in the named buffers; a buffer is as large as its last layout requires."""
        # Grow all buffers before making a view: a buffer that grows invalidates views and steps.
        for name, of_buffer in layouts.items():
            self.buffer(name, of_buffer[-1].end)
        for name, of_buffer in layouts.items():
            for layout in of_buffer:
                layout.place(self._buffers[name])

    def buffer(self, name: str, num_bytes: int) -> Buffer:
        """Return a buffer of at least `num_bytes` bytes.

        If the buffer has to grow, all steps are dropped.

        Args:
            name: "arrays" has a host side. "scratch", "workspace" (of attention) and "sums"
                (workspace of linear layers) are in device memory only. The latter two start as
                zeros and keep their contents between calls.
            num_bytes: bytes needed.
        """
        have = self._buffers.get(name)
        if have is None or have.device.numel() < num_bytes:
            old = 0 if have is None else have.device.numel()
            # Allocate more than needed, so that it rarely grows.
            size = max(num_bytes, old + min(old, 64 << 20), 4096)
            size = -(-size // _ALIGNMENT) * _ALIGNMENT
            self.forget()
            if name == "arrays":
                # Zeroed, since ranks compare all bytes.
                host = self.device.host_buffer(size).zero_()
                have = Buffer(self.device.device_buffer(size, host), host)
            elif name in ("workspace", "sums"):
                have = Buffer(self.device.workspace(size))
            else:
                have = Buffer(self.device.device_buffer(size))
            self._buffers[name] = have
        return have
