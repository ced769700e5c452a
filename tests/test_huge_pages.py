# SPDX-License-Identifier: Apache-2.0
"""Weights request huge pages where the system has them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from specops import moe
from specops._huge_pages import ask_for_huge_pages
from specops.dense import pack_weight
from specops.engine.models import WeightCache
from torch import Tensor

pytestmark = pytest.mark.usefixtures("empty_disk")

MAPS = Path("/proc/self/smaps")


def requests_huge_pages(tensor: Tensor) -> bool:
    """Return whether huge pages were requested for the middle of a tensor's memory."""
    middle, inside = tensor.data_ptr() + tensor.nbytes // 2, False
    for line in MAPS.read_text().splitlines():
        first, *others = line.split()
        if not first.endswith(":"):
            begin, end = (int(address, 16) for address in first.split("-"))
            inside = begin <= middle < end
        elif inside and first == "VmFlags:":
            return "hg" in others
    raise AssertionError(f"no mapping has {middle:x}")


def packed(folder: Path) -> Tensor:
    return pack_weight(torch.ones(1024, 4096)).data


def stacked(folder: Path) -> Tensor:
    return moe.stack_experts([pack_weight(torch.ones(256, 4096))] * 4, 4).data


def mapped(folder: Path) -> Tensor:
    (folder / "model").write_bytes(b"a checkpoint")
    cache = WeightCache(folder / "cache", 1 << 30).of([folder / "model"])
    assert cache is not None
    return cache.get("w", lambda: pack_weight(torch.ones(1024, 4096))).data


@pytest.mark.skipif(
    not MAPS.exists() or not Path("/sys/kernel/mm/transparent_hugepage").exists(),
    reason="the system has no huge pages, or does not say where",
)
@pytest.mark.parametrize("make", [packed, stacked, mapped])
def test_weights_request_huge_pages(make: Callable[[Path], Tensor], tmp_path: Path) -> None:
    assert requests_huge_pages(make(tmp_path))


def test_small_tensors_are_returned_unchanged() -> None:
    small = torch.zeros(1000)
    assert ask_for_huge_pages(small) is small
