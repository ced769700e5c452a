# SPDX-License-Identifier: Apache-2.0
"""Memory of weights in large pages.

A kernel reads every page of a weight once a step, and where a page lies is in no cache by then.
With pages of 4 KiB, under a hypervisor above all, finding them took up to a third of a product's
time.
"""

import ctypes
import mmap

from torch import Tensor

_HUGE = 2 << 20
_ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux alone has it


def ask_for_huge_pages(tensor: Tensor) -> Tensor:
    """Asks the system for huge pages where a tensor lies, and returns the tensor.

    It is best asked before the memory is touched first. Nothing depends on whether the system has
    any: the advice changes no byte. Tensors below 2 MiB and those of other devices are left alone.
    """
    size = tensor.nbytes
    if _ADVICE is None or type(tensor) is not Tensor or not tensor.is_cpu or size < _HUGE:
        return tensor
    begin = (
        tensor.data_ptr() // _HUGE * _HUGE
    )  # what shares its first page and its last has it, too
    end = -(-(tensor.data_ptr() + size) // _HUGE) * _HUGE
    ctypes.CDLL(None).madvise(
        ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), ctypes.c_int(_ADVICE)
    )
    return tensor
