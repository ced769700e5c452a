# SPDX-License-Identifier: Apache-2.0
"""Settings of the CPU kernels (threads, instruction set), and launches and faults of CUDA kernels.

No setting changes a result's reproducibility: neither the thread count nor the overlap of kernels
ever changes a bit; two instruction sets may differ in the last bits, as two machines may.
"""

from typing import TYPE_CHECKING

from specops import _C
from specops._cpu_name import cpu_name

if TYPE_CHECKING:  # whoever asks for threads or instruction sets need not wait for torch
    from torch import Tensor


def set_num_threads(num_threads: int) -> None:
    """Sets how many threads a CPU op may use, the calling thread included.

    Args:
        num_threads: 1 to 1024. The default is the environment's SPECOPS_NUM_THREADS, or else the
            number of CPUs in this process's mask, or the CPUs' worth of time that its control
            groups (cgroups) grant it, whichever is less. Of more threads than CPUs only as many
            run as there are CPUs: work is cut as for all of them.

    Raises:
        ValueError: num_threads is out of range, or SPECOPS_NUM_THREADS is no such number.
    """
    _C.set_num_threads(num_threads)


def get_num_threads() -> int:
    """Returns how many threads a CPU op may use, the calling thread included.

    Raises:
        ValueError: SPECOPS_NUM_THREADS, read at the first call of any op, is no number of threads.
    """
    return _C.num_threads()


def supported_isas() -> list[str]:
    """Returns the instruction sets this build has and this CPU runs, plainest first.

    If the CPU has AMX, this requests its tiles from Linux, for the rest of the process.
    """
    return _C.supported_isas()


def set_isa(isa: str) -> None:
    """Chooses the instruction set of the CPU kernels (tests and benches).

    The default is the last of `supported_isas()`, but "avx512" instead of "avx512_bf16" on CPUs by
    Intel without "amx", whose dot products of bfloat16 pairs take twice as long.

    Args:
        isa: one of `supported_isas()`: "portable"; on x86 "avx2", "avx512", "avx512_bf16" and
            "amx", which is "avx512_bf16" with `linear` of bfloat16 on tiles, whose bits are its
            own, and with products of int8 and int4 on tiles, whose bits are everyone's; on 64-bit
            ARM "neon", "neon_bf16".

    Raises:
        ValueError: the name is unknown, or this CPU cannot run it.
    """
    _C.set_isa(isa)


def get_isa() -> str:
    """Returns the instruction set the CPU kernels run on."""
    return _C.active_isa()


def get_cpu_name() -> str:
    """Returns the kind of this machine's CPU, such as "AMD EPYC family 25"."""
    return cpu_name()


def build_facts() -> dict[str, str]:
    """Returns what was compiled, and by what.

    Returns:
        "source_digest", of the sources of all kernels; "compiler", its name, version and target.
        Builds that agree in both compute the same bits on the same instruction set or GPU.
    """
    return {"source_digest": _C.source_digest, "compiler": _C.compiler}


def set_kernel_overlap(overlap: bool) -> None:
    """Chooses whether a CUDA kernel may start while the one before it still runs (the default).

    From compute capability 9.0 on, every launch of specops allows this (CUDA's programmatic
    dependent launch): blocks of the next kernel take places that have become free, `linear` asks
    for its first weights, and then they wait for the kernel before to end. No result changes, since
    no kernel reads or writes memory before that. Older devices and CPU ops ignore it. A captured
    graph keeps the setting at its capture.

    Args:
        overlap: False makes every kernel start after the one before it has ended, for measurements
            and when looking for a fault.
    """
    _C.set_kernel_overlap(overlap)


def get_kernel_overlap() -> bool:
    """Returns whether CUDA kernels may start while the one before them still runs."""
    return _C.kernel_overlap()


def has_cuda() -> bool:
    """Returns whether this build has CUDA kernels."""
    return _C.has_cuda


def take_error(out: "Tensor") -> "Tensor":
    """Moves the error code of the device `out` lives on INTO `out`, and clears it there.

    A CUDA kernel that meets wrong data (a token or page id out of range) skips the row and leaves a
    code, the first one staying. This op takes it without waiting, in the order of the stream, so
    that a step can bring it home with its results. On cpu it is always 0: ops raise at once there.

    Args:
        out: [1], int32. Receives 0, or a code for `error_sentence`.

    Returns:
        `out`.

    Raises:
        ValueError: a shape, dtype, layout or device differs from the above.
    """
    _C.take_error(out)
    return out


def error_sentence(code: int) -> str | None:
    """Returns the meaning of an error code of `take_error`, or None for 0."""
    return _C.error_sentence(code)


def check_errors(device_index: int = 0) -> None:
    """Waits for a CUDA device and raises if a kernel met wrong data since the last look.

    Args:
        device_index: number of the CUDA device.

    Raises:
        ValueError: op, argument, expected and got of the first fault; the fault is then forgotten.
    """
    sentence = _C.error_sentence(_C.take_error_sync(device_index))
    if sentence is not None:
        raise ValueError(sentence)
