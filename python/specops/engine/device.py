# SPDX-License-Identifier: Apache-2.0
"""Devices that run steps: host and device memory, copies between them, and CUDA graphs.

The engine uses devices only through the class `Device`. On the CPU, host and device memory are the
same, and a step is a sequence of calls. On CUDA, a step is one copy to the GPU, a captured graph,
one copy back and one wait.
"""

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import specops
from specops.api.errors import EngineError

logger = logging.getLogger(__name__)

# The kernels use bfloat16 mma and cp.async instructions, which exist from this architecture on.
_LEAST_CAPABILITY = (8, 0)


def raise_reported(code: int) -> None:
    """Raise the error that a kernel has reported; do nothing if the code is 0.

    Raises:
        ValueError: the code is not 0; the message names the op and the reason.
    """
    if code:
        raise ValueError(specops.error_sentence(code) or f"a kernel reported code {code}")


class Device:
    """Interface between the runner and a device, implemented for the CPU.

    Attributes:
        device: torch device of the tensors.
        is_async: whether kernels run after the call that launches them. Host and device memory are
            then separate, invalid data is reported with a step's results, and steps are padded to a
            few shapes. On the CPU, calls compute at once and there is one memory.
        captures: whether steps of a padded shape may be captured and replayed.
    """

    device = torch.device("cpu")
    is_async = False
    captures = False

    def host_buffer(self, num_bytes: int) -> Tensor:
        """Return a new uint8 buffer that the host reads and writes."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def device_buffer(self, num_bytes: int, host: Tensor | None = None) -> Tensor:
        """Return a uint8 buffer that kernels read and write; the counterpart of `host` if given."""
        return self.host_buffer(num_bytes) if host is None else host

    def workspace(self, num_bytes: int) -> Tensor:
        """Return a zeroed buffer for ops that expect counters of zero and reset them to zero."""
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)

    def copy_in(self, buffer: Tensor, host: Tensor, num_bytes: int) -> None:
        """Start copying the first bytes of a host buffer to its device counterpart."""

    def copy_out(self, host: Tensor, buffer: Tensor, num_bytes: int) -> None:
        """Start copying the first bytes of a device buffer back, after all earlier work."""

    def wait(self) -> None:
        """Wait for all launched work."""

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        """Record the work that `launch` starts; return a function that replays it."""
        return launch

    def free_bytes(self) -> int:
        """Return the bytes that can still be allocated; a huge number if that is unknown."""
        try:
            lines = Path("/proc/meminfo").read_text().splitlines()
        except OSError:
            return 1 << 62
        sizes = dict(line.split(":", 1) for line in lines)
        return int(sizes.get("MemAvailable", f"{1 << 52} kB").split()[0]) << 10


class CudaDevice(Device):
    """One NVIDIA GPU. All work goes to the calling thread's current stream of this GPU.

    Args:
        index: index of the GPU.
        graphs: capture repeated steps as CUDA graphs.
    """

    is_async = True

    def __init__(self, index: int, *, graphs: bool) -> None:
        self.device = torch.device("cuda", index)
        self.captures = graphs
        self._done: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        # Captures run on a side stream. All graphs allocate from one pool: replays never overlap,
        # so graphs can reuse each other's memory.
        self._side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle() if graphs else None

    def host_buffer(self, num_bytes: int) -> Tensor:
        """Return a new buffer of pinned host memory, which can be copied asynchronously."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def device_buffer(self, num_bytes: int, host: Tensor | None = None) -> Tensor:
        """Return a new buffer of GPU memory."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def copy_in(self, buffer: Tensor, host: Tensor, num_bytes: int) -> None:
        """Start one copy to the GPU."""
        buffer[:num_bytes].copy_(host[:num_bytes], non_blocking=True)

    def copy_out(self, host: Tensor, buffer: Tensor, num_bytes: int) -> None:
        """Start one copy from the GPU."""
        host[:num_bytes].copy_(buffer[:num_bytes], non_blocking=True)

    def wait(self) -> None:
        """Wait for the stream without holding the GIL."""
        self._done.record(torch.cuda.current_stream(self.device))
        self._done.synchronize()

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        """Capture a CUDA graph and return a function that replays it.

        Raises:
            EngineError: `launch` does something that cannot be captured.
        """
        graph = torch.cuda.CUDAGraph()
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        try:
            with torch.cuda.stream(self._side):
                # Other threads, such as a server's, may call CUDA during the capture.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    launch()
                except BaseException:
                    with contextlib.suppress(RuntimeError):  # keep the first error, which says more
                        graph.capture_end()
                    raise
                graph.capture_end()
        except (RuntimeError, ValueError) as error:
            raise EngineError(
                f"a step could not be captured as a CUDA graph: {error}; use --enforce-eager "
                "to run without graphs"
            ) from error
        torch.cuda.current_stream(self.device).wait_stream(self._side)

        def replay() -> None:
            with torch.cuda.device(self.device):
                graph.replay()

        return replay

    def free_bytes(self) -> int:
        """Return the bytes free in the driver plus those that torch reserves but does not use."""
        free, _ = torch.cuda.mem_get_info(self.device)
        reserved = torch.cuda.memory_reserved(self.device)
        return int(free + reserved - torch.cuda.memory_allocated(self.device))


def open_device(name: str, *, graphs: bool = True) -> Device:
    """Return the device with a given name.

    Args:
        name: "cpu", "cuda" (the first GPU), "cuda:N", or "auto": the first GPU if this build
            and this machine can use it, else the CPU.
        graphs: let a GPU capture repeated steps as CUDA graphs.

    Raises:
        ValueError: the name is unknown, or the device cannot be used.
    """
    if name == "cpu":
        return Device()
    if name == "auto":
        reason = _why_no_cuda(0)
        if reason is None:
            return CudaDevice(0, graphs=graphs)
        logger.debug("device auto selected cpu: %s", reason)
        return Device()
    kind, _, number = name.partition(":")
    if (
        kind != "cuda"
        or (number and not (number.isascii() and number.isdecimal()))
        or name[-1:] == ":"
    ):
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}")
    reason = _why_no_cuda(int(number or 0))
    if reason is not None:
        raise ValueError(f"device {name} is not available: {reason}; use device cpu")
    return CudaDevice(int(number or 0), graphs=graphs)


def _why_no_cuda(index: int) -> str | None:
    """Return why a GPU cannot be used, or None if it can."""
    if not specops.has_cuda():
        return "this build has no CUDA kernels"
    if not torch.cuda.is_available():
        return "torch finds no NVIDIA GPU"
    count = torch.cuda.device_count()
    if index >= count:
        return f"there {'is 1 GPU' if count == 1 else f'are {count} GPUs'}, counted from 0"
    capability = torch.cuda.get_device_capability(index)
    if capability < _LEAST_CAPABILITY:
        return (
            f"its compute capability is {capability[0]}.{capability[1]}, and the kernels need "
            f"{_LEAST_CAPABILITY[0]}.{_LEAST_CAPABILITY[1]}"
        )
    return None
