# SPDX-License-Identifier: Apache-2.0
"""vLLM's norms and activations, computed by specops.

This module imports vLLM, so only the plug-in imports it, in a process of vLLM.
"""

from typing import Any

from torch import Tensor
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm

from specops import dense


class SpecopsRMSNorm(RMSNorm):  # type: ignore[misc]
    """vLLM's RMSNorm by `specops.dense.rms_norm`.

    Attributes:
        specops_faults: reasons why the op cannot compute this layer.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.specops_faults: list[str] = []
        if self.variance_size_override is not None:
            self.specops_faults.append("an RMSNorm over a part of its width")
        if not self.has_weight:
            self.specops_faults.append("an RMSNorm without a weight")

    def forward_native(
        self, x: Tensor, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Normalize the last dimension; with a residual, first add `x` to the residual IN PLACE."""
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
        """Return silu(gate) * up for x = [gate, up] along the last dimension."""
        if x.dim() == 2:
            return dense.silu_mul(x)
        out = dense.silu_mul(x.reshape(-1, x.shape[-1]))
        return out.view(*x.shape[:-1], -1)

    forward_cpu = forward_native
