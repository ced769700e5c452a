# SPDX-License-Identifier: Apache-2.0
"""The product of one of vLLM's linear layers, or of its head, by `specops.dense.linear`."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from specops import dense
from specops.vllm import threads

_DTYPES = (torch.bfloat16, torch.float32)


class PackedLinear:
    """What vLLM calls as a layer's `cpu_linear`.

    Attributes:
        specops_faults: why the layer's weight cannot be multiplied with. Nobody calls it then.
    """

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._packed: dense.PackedWeight | None = None
        self.specops_faults: list[str] = []
        weight = layer.weight
        if weight.dim() != 2 or weight.dtype not in _DTYPES or weight.is_meta:
            self.specops_faults.append(
                f"{type(layer).__name__} with a weight of {weight.dim()} dimensions of "
                f"{weight.dtype} on {weight.device} (linear takes 2 of bfloat16 or float32 on cpu)"
            )

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiplies rows.

        Args:
            x: [.., inputs].
            weight: the layer's, of which the packed one is used.
            bias: [outputs].

        Returns:
            [.., outputs].
        """
        packed = self._packed
        if packed is None:
            packed = self.pack()
        if x.dim() == 2:
            return dense.linear(x, packed, bias)
        out = dense.linear(x.reshape(-1, x.shape[-1]), packed, bias)
        return out.view(*x.shape[:-1], packed.num_outputs)

    def pack(self) -> dense.PackedWeight:
        """Packs the layer's weight as it is now, IN PLACE where it was packed before.

        A compiled graph may hold the tensor.
        """
        packed = dense.pack_weight(self._layer.weight.detach())
        if self._packed is None:
            self._packed = packed
        else:
            with torch.inference_mode():  # the head is packed in a step, which is in it
                self._packed.data.copy_(packed.data)
        return self._packed

    def pack_again(self) -> None:
        """Packs a weight that the layer has kept, if it was packed: it may have changed."""
        if self._packed is not None and self._layer.weight.numel() > 0:
            self.pack()


def use_packed_linear(layer: Any, remove_weight: bool) -> None:
    """Takes the place of vLLM's `dispatch_cpu_unquantized_gemm`: gives a layer its product.

    vLLM calls it when the weight has been loaded, and when it has been loaded again. A weight that
    must stay (an embedding, which may be the head, too) is packed when it is first multiplied with,
    so that an embedding alone costs nothing more. A weight that cannot be packed stays as well: the
    model is refused once it is loaded.

    Args:
        layer: with `weight`, and room for `cpu_linear`.
        remove_weight: whether nobody else needs the weight.
    """
    product = getattr(layer, "cpu_linear", None)
    if not isinstance(product, PackedLinear):
        product = layer.cpu_linear = PackedLinear(layer)
    if product.specops_faults:
        return
    threads.start()
    if remove_weight:
        product.pack()
        nothing = torch.empty(0, dtype=layer.weight.dtype)
        layer.weight = nn.Parameter(nothing, requires_grad=False)


def pack_again(modules: Iterable[Any]) -> None:
    """Packs anew what modules have kept, after their weights were loaded again.

    Weights that nobody has kept were packed by `use_packed_linear` as they came.
    """
    for module in modules:
        product = getattr(module, "cpu_linear", None)
        if isinstance(product, PackedLinear):
            product.pack_again()
