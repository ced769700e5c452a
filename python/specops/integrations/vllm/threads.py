# SPDX-License-Identifier: Apache-2.0
"""Start of specops' threads on the CPUs that vLLM assigned, and idling of other thread pools.

vLLM's OpenMP pins the main thread to one core, and new threads inherit the CPU mask of their
creator. So the mask is widened while specops' pool starts, and restored afterwards.
"""

import os
import re
import sys
from collections.abc import Mapping
from typing import Any

import torch

import specops
from specops import dense

# Environment variables by which vLLM binds its threads, and what it writes into them; which one
# depends on the OpenMP library. A user may have set one to something else.
_BINDINGS = {
    "KMP_AFFINITY": r"granularity=fine,explicit,proclist=\[([\d,]+)\]",
    "GOMP_CPU_AFFINITY": r"([\d ]+)",
    "OMP_PLACES": r"\{([\d,]+)\}",
}
# Variable for the number of numba's threads; vLLM's n-gram drafter is compiled with numba.
_NUMBA = "NUMBA_NUM_THREADS"
# Size of a product that is large enough to be split among any number of threads.
_ROWS, _WIDTH = 64, 1024

# vLLM's CPU worker replaces torch.set_num_threads by a no-op before it loads a model.
_set_openmp_threads = torch.set_num_threads

_first_mask: set[int] = set()
_started = False


def remember_mask() -> None:
    """Record the CPUs of the process before vLLM pins anything."""
    if not _first_mask:
        _first_mask.update(_usable_cpus())


def _usable_cpus() -> set[int]:
    """Return the CPUs that this thread may use; all if the OS does not bind threads (macOS)."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _bind(cpus: set[int]) -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cpus)


def bound_cpus(environment: Mapping[str, str]) -> set[int]:
    """Return the CPUs that vLLM's binding variables name; an empty set if there is no binding."""
    for name, form in _BINDINGS.items():
        found = re.fullmatch(form, environment.get(name, ""))
        if found:
            return {int(number) for number in re.findall(r"\d+", found[1])}
    return set()


def start() -> None:
    """Start specops' pool once: as many threads as torch has, on the CPUs of this process."""
    global _started
    if _started:
        return
    _started = True
    before = _usable_cpus()
    usable = _first_mask or before
    cpus = bound_cpus(os.environ) & usable or usable
    _bind(cpus)
    try:
        specops.set_num_threads(max(1, min(torch.get_num_threads(), len(cpus))))
        # Set the dtype, because vLLM has set torch's default dtype to the model's by now.
        weight = dense.pack_weight(torch.zeros(_WIDTH, _WIDTH, dtype=torch.float32))
        dense.linear(torch.zeros(_ROWS, _WIDTH, dtype=torch.float32), weight)
    finally:
        _bind(before)


def rest_openmp() -> None:
    """Make vLLM's and torch's own computations run on the calling thread.

    Two pools on the same cores delay each other: OpenMP threads spin after each parallel region,
    and a region waits for threads whose cores are busy. OpenMP's remaining work (rotary embedding,
    slots) is small, and every element of it is computed independently.
    """
    start()
    _set_openmp_threads(1)


def rest_numba() -> None:
    """Make numba start no threads, unless the environment sets their number.

    vLLM's n-gram drafter uses only one of them anyway. The others would busy-wait for work on the
    cores of specops' threads.
    """
    if _NUMBA in os.environ:
        return
    os.environ[_NUMBA] = "1"
    numba: Any = sys.modules.get("numba")
    if numba is None:
        return
    try:
        numba.config.reload_config()
    except RuntimeError:
        # numba's threads are already running; unset the variable, which numba reads at each
        # compilation.
        del os.environ[_NUMBA]
        numba.set_num_threads(1)
