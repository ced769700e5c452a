# SPDX-License-Identifier: Apache-2.0
"""Record of the ops that the tests of a run called on each device, checked by test_devices.py.

With pytest-xdist, every worker reports its own calls to the controller, which checks them.
"""

from collections import defaultdict
from types import ModuleType
from typing import Any

import specops
import torch

HAS_GPU = specops.has_cuda() and torch.cuda.is_available()
# Devices for which the op tests of this run are collected.
DEVICES = ("cpu", "simt", "cuda") if HAS_GPU else ("cpu", "simt")

# (file of the test, device) -> ops that were called and returned
calls: dict[tuple[str, str], set[str]] = defaultdict(set)
# True in a pytest-xdist worker, which runs only a part of the tests.
in_worker = False
# Files whose tests all run in this session.
whole_files: set[str] = set()


class Recorded:
    """Stand-in for `_C` that records every call that returns and refuses some ops."""

    def __init__(
        self,
        module: ModuleType | Any,
        file: str,
        device: str,
        refused: frozenset[str] = frozenset(),
    ) -> None:
        self._module = module
        self._ops = calls[file, device]
        self._refused = refused

    def __getattr__(self, name: str) -> Any:
        assert name not in self._refused, f"{name} has bf16 products: no_bf16 does not hold"
        value = getattr(self._module, name)
        if not callable(value):
            return value

        def call(*args: Any) -> Any:
            result = value(*args)
            self._ops.add(name)
            return result

        return call


def packed() -> list[Any]:
    """Return what a worker reports to the controller, in serializable types."""
    return [[[*key, sorted(ops)] for key, ops in calls.items()], sorted(whole_files)]


def merge(reported: list[Any]) -> None:
    """Add the report of a worker."""
    for file, device, ops in reported[0]:
        calls[file, device] |= set(ops)
    whole_files.update(reported[1])


def missing(op: str, file: str) -> list[str]:
    """Return the devices on which no test of the file called the op."""
    return [device for device in DEVICES if op not in calls[file, device]]
