# SPDX-License-Identifier: Apache-2.0
"""Huge pages for the memory of weights.

A kernel reads every page of a weight once per step, so each access misses the TLB. With pages of
4 KiB, especially under a hypervisor, address translation took up to a third of a matrix product's
time.
"""

import ctypes
import mmap

from torch import Tensor

_HUGE = 2 << 20
_ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)  # defined on Linux only


def ask_for_huge_pages(tensor: Tensor) -> Tensor:
    """Advise the system to back a CPU tensor with huge pages, and return the tensor.

    The advice works best before the memory is first touched. It changes no byte, and the system may
    ignore it. Tensors below 2 MiB and tensors on other devices are left alone.
    """
    size = tensor.nbytes
    if _ADVICE is None or type(tensor) is not Tensor or not tensor.is_cpu or size < _HUGE:
        return tensor
    # The range is rounded out to whole huge pages, so it may include neighboring data.
    begin = tensor.data_ptr() // _HUGE * _HUGE
    end = -(-(tensor.data_ptr() + size) // _HUGE) * _HUGE
    ctypes.CDLL(None).madvise(
        ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), ctypes.c_int(_ADVICE)
    )
    return tensor
