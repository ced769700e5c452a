# SPDX-License-Identifier: Apache-2.0
"""The product that the plug-in gives vLLM's linear layers: packing, repacking and faults."""

from typing import Any

import pytest
import torch
from specops import dense
from specops.integrations.vllm.packed_linear import pack_again, use_packed_linear
from torch import Tensor, nn


def made(weight: Tensor, remove_weight: bool) -> Any:
    """Return a layer of vLLM after its weight was loaded."""
    layer: Any = nn.Module()
    layer.weight = nn.Parameter(weight.clone(), requires_grad=False)
    use_packed_linear(layer, remove_weight)
    return layer


X, OLD, NEW = torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(1)).unbind()


def product(weight: Tensor) -> Tensor:
    return dense.linear(X, dense.pack_weight(weight))


@pytest.mark.parametrize("remove_weight", [True, False])
def test_weight_is_packed_and_then_removed_or_kept(remove_weight: bool) -> None:
    layer = made(OLD, remove_weight)
    assert (layer.weight.numel() == 0) == remove_weight
    assert torch.equal(layer.cpu_linear(X, layer.weight), product(OLD))


def test_reloaded_weight_is_packed_in_place() -> None:
    """A compiled graph may hold the packed weight."""
    layer = made(OLD, True)
    held = layer.cpu_linear._packed.data
    layer.weight = nn.Parameter(NEW.clone(), requires_grad=False)
    use_packed_linear(layer, True)
    pack_again(layer.modules())
    assert torch.equal(layer.cpu_linear(X, layer.weight), product(NEW))
    assert layer.cpu_linear._packed.data is held


def test_kept_weight_is_repacked_after_a_write() -> None:
    layer, unused = made(OLD, False), made(OLD, False)
    with torch.inference_mode():
        layer.cpu_linear(X, layer.weight)
    layer.weight.data.copy_(NEW)
    pack_again([layer, unused, nn.Identity()])
    assert torch.equal(layer.cpu_linear(X, layer.weight), product(NEW))
    assert unused.cpu_linear._packed is None


@pytest.mark.parametrize(
    "weight, what",
    [
        (torch.zeros(4, 4).half(), "2 dimensions of torch.float16 on cpu"),
        (torch.zeros(4, 1, 4), "3 dimensions of torch.float32 on cpu"),
        (torch.zeros(4, 4, device="meta"), "2 dimensions of torch.float32 on meta"),
    ],
)
def test_unsupported_weight_is_reported_as_a_fault(weight: Tensor, what: str) -> None:
    layer = made(weight, True)
    assert layer.weight.shape == weight.shape
    assert layer.cpu_linear.specops_faults == [
        f"Module with a weight of {what} "
        "(linear requires 2 dimensions of bfloat16 or float32 on cpu)"
    ]
