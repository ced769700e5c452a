# SPDX-License-Identifier: Apache-2.0
"""Settings of the CPU kernels (threads, instruction set), and launches and errors of CUDA kernels.

No setting makes results less reproducible: neither the thread count nor the overlap of kernels
ever changes a bit. Instruction sets outside `portable_isas()` may differ in the last bits.
"""

from typing import TYPE_CHECKING

from specops import _C
from specops._cpu_name import cpu_name

if TYPE_CHECKING:  # querying threads or instruction sets must not wait for the import of torch
    from torch import Tensor


def set_num_threads(num_threads: int) -> None:
    """Set how many threads a CPU op may use, the calling thread included.

    Args:
        num_threads: 1 to 1024. The default is the environment variable SPECOPS_NUM_THREADS, or else
            the smaller of the number of CPUs in this process's affinity mask and the CPU quota of
            its control groups (cgroups). With more threads than CPUs, work is still split for
            `num_threads`, but only as many threads run as there are CPUs.

    Raises:
        ValueError: num_threads is out of range, or SPECOPS_NUM_THREADS is no valid number.
    """
    _C.set_num_threads(num_threads)


def get_num_threads() -> int:
    """Return how many threads a CPU op may use, the calling thread included.

    Raises:
        ValueError: SPECOPS_NUM_THREADS, read at the first call of any op, is no valid number.
    """
    return _C.num_threads()


def supported_isas() -> list[str]:
    """Return the instruction sets that this build and this CPU support, plainest first.

    If the CPU has AMX, the call requests its tiles from Linux for the rest of the process.
    """
    return _C.supported_isas()


def portable_isas() -> list[str]:
    """Return the supported instruction sets whose results have the same bits, plainest first.

    These are "portable", "avx2", "avx512" and "neon": all of `supported_isas()` except those with
    products of bfloat16 pairs, which round differently on tiles and on ARM, and which count numbers
    below 2^-126 as zeros.
    """
    return [isa for isa in supported_isas() if isa in ("portable", "avx2", "avx512", "neon")]


def set_isa(isa: str) -> None:
    """Choose the instruction set of the CPU kernels.

    The default is the environment variable SPECOPS_ISA, or else the last of `supported_isas()`;
    Intel CPUs without "amx" use "avx512" instead of "avx512_bf16", because their dot products of
    bfloat16 pairs take twice as long. int8 and int4 weights use products of 8-bit integers (VNNI;
    on ARM SDOT and UDOT) on "avx2", "avx512" and "neon", too, if the CPU has them: they have the
    same bits.

    Args:
        isa: one of `supported_isas()`: "portable"; on x86 "avx2", "avx512", "avx512_bf16" and
            "amx"; on 64-bit ARM "neon" and "neon_bf16". "amx" is "avx512_bf16" with matrix products
            on tiles: bfloat16 `linear` has its own bits there, int8 and int4 products have the same
            bits as on every other instruction set.

    Raises:
        ValueError: the name is unknown, or this CPU does not support the instruction set.
    """
    _C.set_isa(isa)


def get_isa() -> str:
    """Return the instruction set of the CPU kernels.

    Raises:
        ValueError: SPECOPS_ISA is not one of `supported_isas()`.
    """
    return _C.active_isa()


def get_cpu_name() -> str:
    """Return the model of this machine's CPU, such as "AMD EPYC family 25"."""
    return cpu_name()


def build_facts() -> dict[str, str]:
    """Return the identity of this build.

    Returns:
        "source_digest", the digest of all kernel sources; "compiler", its name, version and target.
        Builds that agree in both compute the same bits on the same instruction set or GPU.
    """
    return {"source_digest": _C.source_digest, "compiler": _C.compiler}


def set_kernel_overlap(overlap: bool) -> None:
    """Choose whether a CUDA kernel may start while the previous one still runs (the default).

    From compute capability 9.0 on, every launch of specops allows this (CUDA's programmatic
    dependent launch): blocks of the next kernel start on SMs that have become free, `linear`
    prefetches its first weights, and then they wait for the previous kernel to end. No result
    changes, since no kernel reads or writes results before that. Older devices and CPU ops ignore
    the setting. A captured graph keeps the setting at its capture.

    Args:
        overlap: False makes every kernel start after the previous one has ended, for measurements
            and debugging.
    """
    _C.set_kernel_overlap(overlap)


def get_kernel_overlap() -> bool:
    """Return whether CUDA kernels may start while the previous one still runs."""
    return _C.kernel_overlap()


def has_cuda() -> bool:
    """Return whether this build has CUDA kernels."""
    return _C.has_cuda


def take_error(out: "Tensor") -> "Tensor":
    """Move the error code of `out`'s device INTO `out`, and clear it on the device.

    A CUDA kernel that finds invalid data (a token or page id out of range) skips the row and sets
    an error code; the first code stays. This op reads it in stream order without waiting, so that a
    step can return it with its results. On cpu the code is always 0: ops raise at once there.

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
    """Return the meaning of an error code of `take_error`, or None for 0."""
    return _C.error_sentence(code)


def check_errors(device_index: int = 0) -> None:
    """Wait for a CUDA device, and raise if a kernel found invalid data since the last check.

    Args:
        device_index: index of the CUDA device.

    Raises:
        ValueError: op, argument, expected and got of the first error, which is then cleared.
    """
    sentence = _C.error_sentence(_C.take_error_sync(device_index))
    if sentence is not None:
        raise ValueError(sentence)
