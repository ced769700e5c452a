# SPDX-License-Identifier: Apache-2.0
"""Settings of the CPU kernels: how many threads, and which instruction set.

Neither changes a result's reproducibility on one setting: the thread count never changes a bit; two
instruction sets may differ in the last bits, as two machines may.
"""

from specops import _C


def set_num_threads(num_threads: int) -> None:
    """Sets how many threads a CPU op may use, the calling thread included.

    Args:
        num_threads: 1 to 1024. The default is the number of CPUs this process may run on.

    Raises:
        ValueError: num_threads is out of range.
    """
    _C.set_num_threads(num_threads)


def get_num_threads() -> int:
    """Returns how many threads a CPU op may use, the calling thread included."""
    return _C.num_threads()


def supported_isas() -> list[str]:
    """Returns the instruction sets this build has and this CPU runs, plainest first."""
    return _C.supported_isas()


def set_isa(isa: str) -> None:
    """Chooses the instruction set of the CPU kernels (tests and benches; the best is the default).

    Args:
        isa: one of `supported_isas()`: "portable", "avx2", "avx512", "avx512_bf16".

    Raises:
        ValueError: the name is unknown, or this CPU cannot run it.
    """
    _C.set_isa(isa)


def get_isa() -> str:
    """Returns the instruction set the CPU kernels run on."""
    return _C.active_isa()
