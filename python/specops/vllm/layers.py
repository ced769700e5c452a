# SPDX-License-Identifier: Apache-2.0
"""vLLM's layers, computed by specops: unquantised linear layers and the head, norms, activations.

Imports vLLM: only the plug-in imports this module, in a process of vLLM.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm

from specops import dense
from specops.vllm import threads

_LINEAR_DTYPES = (torch.bfloat16, torch.float32)


def use_packed_linear(layer: Any, remove_weight: bool) -> None:
    """Takes the place of vLLM's `dispatch_cpu_unquantized_gemm`: gives a layer its product.

    A weight that must stay (an embedding, which may be the head, too) is packed when it is first
    multiplied with, so that an embedding alone costs nothing more.

    Args:
        layer: with `weight`, and room for `cpu_linear`.
        remove_weight: whether nobody else needs the weight.

    Raises:
        ValueError: the weight is no matrix, or of a dtype that `linear` does not have.
    """
    weight = layer.weight
    if weight.is_meta:
        layer.cpu_linear = nn.functional.linear
        return
    if weight.dim() != 2 or weight.dtype not in _LINEAR_DTYPES:
        raise ValueError(
            "specops.vllm: linear takes a matrix of bfloat16 or float32, got a weight "
            f"{list(weight.shape)} of {weight.dtype} in {type(layer).__name__}"
        )
    threads.start()
    num_outputs, dtype = weight.shape[0], weight.dtype
    if remove_weight:
        packed = dense.pack_weight(weight.detach())
        layer.weight = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)
        layer.cpu_linear = _product(lambda: packed, num_outputs)
        return
    made: list[dense.PackedWeight] = []

    def when_needed() -> dense.PackedWeight:
        if not made:
            made.append(dense.pack_weight(layer.weight.detach()))
        return made[0]

    layer.cpu_linear = _product(when_needed, num_outputs)


def _product(
    packed: Callable[[], dense.PackedWeight], num_outputs: int
) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    def cpu_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.dim() == 2:
            return dense.linear(x, packed(), bias)
        out = dense.linear(x.reshape(-1, x.shape[-1]), packed(), bias)
        return out.view(*x.shape[:-1], num_outputs)

    return cpu_linear


class SpecopsRMSNorm(RMSNorm):  # type: ignore[misc]
    """vLLM's RMSNorm by `specops.dense.rms_norm`.

    Raises:
        ValueError: the sum is not of the whole width, or there is no weight.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.variance_size_override is not None or not self.has_weight:
            raise ValueError("specops.vllm: norm needs a weight, and the whole width for its sum")

    def forward_native(
        self, x: Tensor, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Normalises the last dimension; with a residual, first adds `x` to it, IN PLACE."""
        weight, eps = self.weight, self.variance_epsilon
        if x.dim() == 2:
            out = dense.rms_norm(x, weight, eps, residual=residual)
        else:
            rows = x.reshape(-1, x.shape[-1])
            sums = None if residual is None else residual.view(rows.shape)
            out = dense.rms_norm(rows, weight, eps, residual=sums).view(x.shape)
        return out if residual is None else (out, residual)

    forward_cpu = forward_native


class SpecopsSiluAndMul(SiluAndMul):  # type: ignore[misc]
    """vLLM's SiluAndMul by `specops.dense.silu_mul`."""

    def forward_native(self, x: Tensor) -> Tensor:
        """Gates: x is gate, then up."""
        if x.dim() == 2:
            return dense.silu_mul(x)
        out = dense.silu_mul(x.reshape(-1, x.shape[-1]))
        return out.view(*x.shape[:-1], -1)

    forward_cpu = forward_native
