# SPDX-License-Identifier: Apache-2.0
"""Matrix product of vLLM's linear layers and LM head by `specops.dense.linear`."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from specops import dense
from specops.integrations.vllm import threads

DTYPES = (torch.bfloat16, torch.float32)


class PackedLinear:
    """Callable that vLLM uses as a layer's `cpu_linear`.

    Attributes:
        specops_faults: reasons why the layer's weight is unsupported. If there are any, the engine
            does not start.
    """

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._packed: dense.PackedWeight | None = None
        self.specops_faults: list[str] = []
        weight = layer.weight
        if weight.dim() != 2 or weight.dtype not in DTYPES or weight.is_meta:
            self.specops_faults.append(
                f"{type(layer).__name__} with a weight of {weight.dim()} dimensions of "
                f"{weight.dtype} on {weight.device} "
                "(linear requires 2 dimensions of bfloat16 or float32 on cpu)"
            )

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply rows by the layer's weight.

        Args:
            x: [.., inputs].
            weight: the layer's weight, which is ignored; the packed weight is used.
            bias: [outputs].

        Returns:
            [.., outputs].
        """
        return multiply(x, self._packed or self.pack(), bias)

    def pack(self) -> dense.PackedWeight:
        """Pack the layer's current weight, IN PLACE if it was packed before."""
        self._packed = put(self._packed, dense.pack_weight(self._layer.weight.detach()))
        return self._packed

    def pack_again(self) -> None:
        """Pack the layer's weight again after a reload, unless the layer's weight was freed."""
        if self._packed is not None and self._layer.weight.numel() > 0:
            self.pack()


def multiply(x: Tensor, weight: dense.PackedWeight, bias: Tensor | None) -> Tensor:
    """Multiply rows, [.., inputs], by a packed weight; return [.., outputs]."""
    if x.dim() == 2:
        return dense.linear(x, weight, bias)
    out = dense.linear(x.reshape(-1, x.shape[-1]), weight, bias)
    return out.view(*x.shape[:-1], weight.num_outputs)


def use_packed_linear(layer: Any, remove_weight: bool) -> None:
    """Attach a `PackedLinear` to a layer; replaces vLLM's `dispatch_cpu_unquantized_gemm`.

    vLLM calls this function whenever the weight has been loaded or reloaded. A weight that must be
    kept (an embedding, which may be the LM head as well) is packed at its first product, so that a
    mere embedding takes no extra memory. A weight that cannot be packed is also kept, and the model
    is refused after loading.

    Args:
        layer: layer with `weight`; `cpu_linear` is set.
        remove_weight: whether to free the weight, which nothing else uses.
    """
    product = getattr(layer, "cpu_linear", None)
    if not isinstance(product, PackedLinear):
        product = layer.cpu_linear = PackedLinear(layer)
    if product.specops_faults:
        return
    threads.start()
    if remove_weight:
        product.pack()
        free(layer, "weight")


def put(before: dense.PackedWeight | None, packed: dense.PackedWeight) -> dense.PackedWeight:
    """Return a packed weight, copied IN PLACE into the one that was packed before, if any.

    A compiled graph may hold references to the packed tensors.
    """
    if before is None:
        return packed
    with torch.inference_mode():  # the LM head is packed in a step, in inference mode
        for old, new in zip(before, packed, strict=True):
            if isinstance(old, Tensor):
                assert isinstance(new, Tensor)
                old.copy_(new)
    return before


def free(layer: Any, name: str | None) -> None:
    """Replace a parameter of a layer, if it exists, by an empty one."""
    parameter = getattr(layer, name or "", None)
    if isinstance(parameter, Tensor):
        empty = torch.empty(0, dtype=parameter.dtype)
        setattr(layer, str(name), nn.Parameter(empty, requires_grad=False))


def pack_again(modules: Iterable[Any]) -> None:
    """Pack again, after a reload, the weights that modules have kept.

    Other weights are packed by `use_packed_linear` when they are loaded.
    """
    for module in modules:
        product = getattr(module, "cpu_linear", None)
        if isinstance(product, PackedLinear):
            product.pack_again()
