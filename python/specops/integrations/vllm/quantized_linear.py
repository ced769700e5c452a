# SPDX-License-Identifier: Apache-2.0
"""vLLM's linear layers with 4-bit and 8-bit integer weights, by `specops.dense.linear`.

vLLM reads checkpoints of GPTQ, AWQ and compressed-tensors and asks the first registered kernel that
can implement a layer to multiply. A row is rounded to 16-bit integers in groups of 128 inputs, even
if a checkpoint asks for 8-bit activations.

This module imports vLLM, so only the plug-in imports it, in a process of vLLM.
"""

import os
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.kernels import linear as vllm_linear
from vllm.model_executor.layers.quantization.utils.w8a8_utils import convert_to_channelwise
from vllm.model_executor.parameter import permute_param_layout_
from vllm.platforms import PlatformEnum
from vllm.scalar_type import scalar_types

from specops import dense
from specops.checkpoints.bits import even_groups, unpacked
from specops.checkpoints.integers import integer_weight
from specops.integrations.vllm import threads
from specops.integrations.vllm.packed_linear import free, multiply, put
from specops.quantization import QuantizedWeight

_BITS = {
    scalar_types.uint4: 4,
    scalar_types.uint4b8: 4,
    scalar_types.uint8: 8,
    scalar_types.uint8b128: 8,
}
_DISABLED = "VLLM_DISABLED_KERNELS"
_PACKED = "specops_packed"


def register() -> None:
    """Register the kernels, and disable vLLM's own ones for CPUs, which would be asked first."""
    cpu = PlatformEnum.CPU
    names = os.environ.get(_DISABLED, "").split(",")
    for of_vllm in (vllm_linear._POSSIBLE_KERNELS, vllm_linear._POSSIBLE_INT8_KERNELS):
        names += [kernel.__name__ for kernel in of_vllm.get(cpu, [])]
    os.environ[_DISABLED] = ",".join(filter(None, names))
    vllm_linear.register_linear_kernel(SpecopsWna16Kernel, cpu, "mp")
    vllm_linear.register_linear_kernel(SpecopsInt8Kernel, cpu, "int8")


class SpecopsWna16Kernel(vllm_linear.MPLinearKernel):  # type: ignore[misc]
    """Product with packed weights of 4 or 8 bits: GPTQ, AWQ and compressed-tensors."""

    @classmethod
    def get_min_capability(cls) -> int:
        """Return -1: no GPU is needed."""
        return -1

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        """Return whether specops supports a layer's type and groups, and why not."""
        if c.weight_type not in _BITS:
            return False, f"weight_type must be one of {list(_BITS)}, got {c.weight_type}"
        if c.group_size not in (-1, 16) and c.group_size % 32:
            return False, f"group_size must be -1, 16 or a multiple of 32, got {c.group_size}"
        return True, None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Pack the layer's weight, and free the unpacked tensors."""
        bits = _BITS[self.config.weight_type]
        words, scales, zeros = self._get_weight_params(layer)
        permute_param_layout_(words, input_dim=0, output_dim=1, packed_dim=0)
        permute_param_layout_(scales, input_dim=0, output_dim=1)
        values = unpacked(words.data.T, bits)
        scales = scales.data.T.float().contiguous()
        points = None
        if self.config.zero_points:
            assert zeros is not None
            permute_param_layout_(zeros, input_dim=1, output_dim=0, packed_dim=0)
            points = unpacked(zeros.data.T, bits).T
        count = scales.shape[1]
        groups = even_groups(values.shape[1], count)
        if groups is None:
            raise ValueError(
                f"specops: {type(layer).__name__} must have groups of one size, got "
                f"{values.shape[1]} inputs in {count} groups"
            )
        _pack(layer, integer_weight(bits, values, scales, points, groups))
        for name in (self.w_q_name, self.w_s_name, self.w_zp_name):
            free(layer, name)

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply rows by the layer's weight."""
        return multiply(x, getattr(layer, _PACKED), bias)


class SpecopsInt8Kernel(vllm_linear.Int8ScaledMMLinearKernel):  # type: ignore[misc]
    """Product with int8 weights; scales and zero points of activations are not used."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Return whether this machine is supported."""
        return True, None

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        """Return whether specops supports a layer: always."""
        return True, None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Pack the layer's weight, and free the unpacked tensors."""
        weight, scales, *_ = self._get_layer_params(layer)
        if not self.config.is_channelwise:
            scales = convert_to_channelwise(scales, layer.logical_widths)
        scales = scales.data.float().reshape(-1, 1).contiguous()
        _pack(layer, QuantizedWeight("int8", weight.data, scales))
        for name in self.layer_param_names:
            free(layer, name)

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply rows by the layer's weight."""
        return multiply(x, getattr(layer, _PACKED), bias)


def _pack(layer: nn.Module, weight: QuantizedWeight) -> None:
    threads.start()
    packed = dense.pack_weight(weight, activations="int16")
    setattr(layer, _PACKED, put(getattr(layer, _PACKED, None), packed))
