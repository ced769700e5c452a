# SPDX-License-Identifier: Apache-2.0
"""Which ops the tests of a run called on which device; test_devices.py asks at its end.

With pytest-xdist every worker knows its own calls alone: they go to the controller, which asks.
"""

from collections import defaultdict
from types import ModuleType
from typing import Any

DEVICES = ("cpu", "simt", "cuda")

# (file of the test, device) -> ops that were called and returned
calls: dict[tuple[str, str], set[str]] = defaultdict(set)
# Whether other processes run the rest of the tests of this run.
in_worker = False
# Files whose tests all run in this session: (test and parameters, device) of each.
whole_files: dict[str, set[tuple[str, str]]] = {}


def test_and_device(item: Any) -> tuple[str, str]:
    """What a collected test is but for its device, and the device; "" for a test without one."""
    if not hasattr(item, "callspec"):
        return item.name, ""
    params = {k: v for k, v in item.callspec.params.items() if k not in ("device", "isa")}
    return f"{item.originalname} {params}", str(item.callspec.params.get("device", ""))


class Recorded:
    """Looks like `_C` or a stand-in for it, and notes every call that returns; refuses some."""

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
    """What a worker tells the controller, in types that travel."""
    return [
        [[*key, sorted(ops)] for key, ops in calls.items()],
        [[file, sorted(tests)] for file, tests in whole_files.items()],
    ]


def merge(told: list[Any]) -> None:
    """Adds what a worker has told."""
    for file, device, ops in told[0]:
        calls[file, device] |= set(ops)
    for file, tests in told[1]:
        whole_files[file] = {(test, device) for test, device in tests}


def missing(op: str, file: str) -> list[str]:
    """The devices on which no test of the file called the op.

    Without a GPU the cuda tests are skipped, so there the simt tests stand in: each must have its
    twin on cuda, the same body with the same parameters.
    """
    lacking = [device for device in DEVICES[:2] if op not in calls[file, device]]
    ran_on_cuda = any(calls[other, "cuda"] for other in whole_files)
    if ran_on_cuda:
        return lacking + ["cuda"] * (op not in calls[file, "cuda"])
    tests = whole_files[file]
    simt, cuda = ({test for test, on in tests if on == device} for device in ("simt", "cuda"))
    return lacking + ["cuda"] * ("simt" in lacking or not simt <= cuda)
