# SPDX-License-Identifier: Apache-2.0
"""Starts specops' threads on the CPUs that vLLM gave this process, and puts other pools to rest.

vLLM's OpenMP pins the main thread to one core, and a thread that is made later inherits its maker's
mask. So the mask is widened while the pool starts, and put back.
"""

import os
import re
import sys
from collections.abc import Mapping
from typing import Any

import torch

import specops
from specops import dense

# The variables with which vLLM binds its threads, by the loaded OpenMP.
_BINDINGS = ("KMP_AFFINITY", "GOMP_CPU_AFFINITY", "OMP_PLACES")
# How many threads numba starts, which vLLM's n-gram drafter is compiled by.
_NUMBA = "NUMBA_NUM_THREADS"
# A product large enough to be cut among any number of threads.
_ROWS, _WIDTH = 64, 1024

# vLLM's CPU worker makes torch's own do nothing before it loads a model.
_set_openmp_threads = torch.set_num_threads

_first_mask: set[int] = set()
_started = False


def remember_mask() -> None:
    """Notes the CPUs of the process before vLLM pins anything."""
    if not _first_mask:
        _first_mask.update(_usable_cpus())


def _usable_cpus() -> set[int]:
    """The CPUs of the calling thread; all where the system does not bind threads (macOS)."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _bind(cpus: set[int]) -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cpus)


def bound_cpus(environment: Mapping[str, str]) -> set[int]:
    """The CPUs that vLLM's binding names; none where it binds nothing."""
    for name in _BINDINGS:
        text = environment.get(name, "")
        numbers = re.search(r"proclist=\[([^]]*)\]", text) if "proclist" in text else None
        found = re.findall(r"\d+", numbers.group(1) if numbers else text)
        if found:
            return {int(number) for number in found}
    return set()


def start() -> None:
    """Starts the pool, once: as many threads as torch has, on the CPUs of this process."""
    global _started
    if _started:
        return
    _started = True
    before = _usable_cpus()
    cpus = bound_cpus(os.environ) or _first_mask or before
    _bind(cpus)
    try:
        specops.set_num_threads(max(1, min(torch.get_num_threads(), len(cpus))))
        # vLLM's default dtype is the model's meanwhile.
        weight = dense.pack_weight(torch.zeros(_WIDTH, _WIDTH, dtype=torch.float32))
        dense.linear(torch.zeros(_ROWS, _WIDTH, dtype=torch.float32), weight)
    finally:
        _bind(before)


def rest_openmp() -> None:
    """Makes vLLM's and torch's own computations run on the calling thread.

    Two pools on the same cores delay each other: an OpenMP thread spins after each of its parallel
    regions, and a region waits for threads whose core is taken. OpenMP's remaining work (rotary
    embedding, slots) is small, and every element of it is computed independently.
    """
    start()
    _set_openmp_threads(1)


def rest_numba() -> None:
    """Makes numba start no threads, unless the environment sets their number.

    vLLM's n-gram drafter works on one of them in any case. The others would wait for work on the
    cores of specops' threads, awake.
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
        # Its threads run already. It looks at the variable again whenever it compiles.
        del os.environ[_NUMBA]
        numba.set_num_threads(1)
