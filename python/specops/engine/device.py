# SPDX-License-Identifier: Apache-2.0
"""Where a step runs: the host's and the device's memory, the copies between them, and graphs.

The engine knows devices by this protocol alone. On the CPU both memories are one and a step is a
sequence of calls; on CUDA a step is one copy in, a captured graph, one copy out and one wait.
"""

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import specops
from specops.engine.errors import EngineError

logger = logging.getLogger(__name__)

# mma with bfloat16 and cp.async, which the kernels are made of, came with this architecture.
_LEAST_CAPABILITY = (8, 0)


def raise_reported(code: int) -> None:
    """Raises what a kernel has reported; 0 is nothing.

    Raises:
        ValueError: with the op's sentence.
    """
    if code:
        raise ValueError(specops.error_sentence(code) or f"a kernel reported code {code}")


class Device:
    """What the runner needs of a device. This one is the CPU: calls compute, in one memory.

    Attributes:
        device: where tensors live.
        is_async: kernels run after the call that asks for them. Host and device memory are two,
            wrong data is reported with a step's results, and steps are padded to a few shapes.
        captures: steps of a padded shape may be captured and replayed.
    """

    device = torch.device("cpu")
    is_async = False
    captures = False

    def host_block(self, num_bytes: int) -> Tensor:
        """Allocates bytes that the host reads and writes."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def device_block(self, num_bytes: int, host: Tensor | None = None) -> Tensor:
        """Allocates bytes that kernels read and write; with `host`, its counterpart."""
        return self.host_block(num_bytes) if host is None else host

    def workspace(self, num_bytes: int) -> Tensor:
        """Allocates zeros for ops that count in memory, and leave zeros where they did."""
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)

    def copy_in(self, block: Tensor, host: Tensor, num_bytes: int) -> None:
        """Begins to copy the first bytes of a host block to its counterpart."""

    def copy_out(self, host: Tensor, block: Tensor, num_bytes: int) -> None:
        """Begins to copy the first bytes of a counterpart back, after all work begun before."""

    def wait(self) -> None:
        """Waits for everything begun."""

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        """Records what `launch` starts, without running it; the result starts it again."""
        return launch

    def free_bytes(self) -> int:
        """Returns the memory that could still be allocated; very much where nobody says."""
        try:
            lines = Path("/proc/meminfo").read_text().splitlines()
        except OSError:
            return 1 << 62
        sizes = dict(line.split(":", 1) for line in lines)
        return int(sizes.get("MemAvailable", f"{1 << 52} kB").split()[0]) << 10


class CudaDevice(Device):
    """One NVIDIA GPU. All work goes to the calling thread's current stream of the device.

    Args:
        index: number of the GPU.
        graphs: capture the steps that repeat.
    """

    is_async = True

    def __init__(self, index: int, *, graphs: bool) -> None:
        self.device = torch.device("cuda", index)
        self.captures = graphs
        self._done: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        # Captures run beside the current stream, and what they allocate shares one pool: replays
        # follow each other, so no graph needs another's memory.
        self._side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle() if graphs else None

    def host_block(self, num_bytes: int) -> Tensor:
        """Allocates pinned memory, which the GPU reads while the host goes on."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def device_block(self, num_bytes: int, host: Tensor | None = None) -> Tensor:
        """Allocates memory of the GPU."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def copy_in(self, block: Tensor, host: Tensor, num_bytes: int) -> None:
        """Begins one copy to the GPU."""
        block[:num_bytes].copy_(host[:num_bytes], non_blocking=True)

    def copy_out(self, host: Tensor, block: Tensor, num_bytes: int) -> None:
        """Begins one copy from the GPU."""
        host[:num_bytes].copy_(block[:num_bytes], non_blocking=True)

    def wait(self) -> None:
        """Waits for the stream, without holding the interpreter lock."""
        self._done.record(torch.cuda.current_stream(self.device))
        self._done.synchronize()

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        """Captures a CUDA graph.

        Raises:
            EngineError: something in `launch` cannot be captured.
        """
        graph = torch.cuda.CUDAGraph()
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        try:
            with torch.cuda.stream(self._side):
                # Another thread, such as a server's, may do with CUDA what it likes meanwhile.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    launch()
                except BaseException:
                    with contextlib.suppress(RuntimeError):  # the first error says more
                        graph.capture_end()
                    raise
                graph.capture_end()
        except (RuntimeError, ValueError) as error:
            raise EngineError(
                f"a step could not be captured as a CUDA graph: {error}; --enforce-eager runs "
                "without graphs"
            ) from error
        torch.cuda.current_stream(self.device).wait_stream(self._side)

        def replay() -> None:
            with torch.cuda.device(self.device):
                graph.replay()

        return replay

    def free_bytes(self) -> int:
        """Returns what the driver has left and what torch holds without using it."""
        free, _ = torch.cuda.mem_get_info(self.device)
        reserved = torch.cuda.memory_reserved(self.device)
        return int(free + reserved - torch.cuda.memory_allocated(self.device))


def open_device(name: str, *, graphs: bool = True) -> Device:
    """Returns the device of a name.

    Args:
        name: "cpu", "cuda" (the first GPU), "cuda:N", or "auto": the first GPU where this build
            and this machine can use one, and the CPU elsewhere.
        graphs: let a GPU capture the steps that repeat.

    Raises:
        ValueError: the name is none of these, or there is no such device to be used.
    """
    if name == "cpu":
        return Device()
    if name == "auto":
        reason = _why_no_cuda(0)
        if reason is None:
            return CudaDevice(0, graphs=graphs)
        logger.debug("device auto is cpu: %s", reason)
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
        raise ValueError(f"device {name} cannot be used: {reason}; device cpu can")
    return CudaDevice(int(number or 0), graphs=graphs)


def _why_no_cuda(index: int) -> str | None:
    """What is missing for a GPU to be used, or None."""
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
