# SPDX-License-Identifier: Apache-2.0
"""Tensors of one module, as the decoders of quantization formats read them."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from specops.checkpoints.errors import ModelError

# Suffixes of scales of activations and KV caches, which are ignored: activations are not rounded
# with them, and an 8-bit cache computes its own scales. The names are those of compressed-tensors,
# AutoFP8, ModelOpt (k_proj.k_scale), Quark (output_scale) and FBGEMM (input_scale_ub).
ACTIVATION_SCALES = frozenset(
    {
        "input_scale",
        "input_zero_point",
        "input_global_scale",
        "input_scale_ub",
        "output_scale",
        "output_zero_point",
        "kv_scale",
        "q_scale",
        "prob_scale",
        "k_scale",
        "k_zero_point",
        "v_scale",
        "v_zero_point",
    }
)


class Module:
    """Tensors of one module, for the decoder of its quantization format.

    The decoder must read every tensor: an unread one means that the format is not fully supported.

    Args:
        where: the directory, for error messages.
        name: name of the module.
        suffixes: suffixes of its tensors' names, after the module's name.
        read: returns the tensor of a suffix.
        settings: quantization settings of the checkpoint.

    Attributes:
        name: name of the module.
        settings: quantization settings of the checkpoint.
    """

    def __init__(
        self,
        where: str,
        name: str,
        suffixes: Iterable[str],
        read: Callable[[str], Tensor],
        settings: Mapping[str, Any],
    ) -> None:
        self._where, self.name, self.settings = where, name, settings
        self._left, self._read = set(suffixes), read

    def __contains__(self, suffix: str) -> bool:
        return suffix in self._left

    def take(self, suffix: str, *dtypes: torch.dtype, dims: int | None = None) -> Tensor:
        """Read a tensor, and mark it as read.

        Args:
            suffix: suffix of its name.
            dtypes: allowed dtypes.
            dims: required number of dimensions; None: any.

        Raises:
            ModelError: the tensor is missing, or has another dtype or number of dimensions.
        """
        if suffix not in self._left:
            self.refuse(f"tensor {self.name}.{suffix} is missing")
        self._left.remove(suffix)
        tensor = self._read(suffix)
        if tensor.dtype not in dtypes:
            expected = " or ".join(str(one).removeprefix("torch.") for one in dtypes)
            self._refuse_tensor(suffix, expected, str(tensor.dtype).removeprefix("torch."))
        if dims is not None and tensor.dim() != dims:
            self._refuse_tensor(suffix, f"of {dims} dimensions", str(list(tensor.shape)))
        return tensor

    def take_scales(self, suffix: str) -> Tensor:
        """Read scales, and return them in float32."""
        kinds = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
        return self.take(suffix, *kinds).float()

    def check_shape(self, suffix: str, tensor: Tensor, *shape: int) -> None:
        """Raise a ModelError if a tensor has another shape."""
        if tuple(tensor.shape) != shape:
            self._refuse_tensor(suffix, str(list(shape)), str(list(tensor.shape)))

    def done(self) -> None:
        """Raise a ModelError if the decoder has not read all tensors."""
        for suffix in sorted(self._left - ACTIVATION_SCALES - {"bias"}):
            self.refuse(f"tensor {self.name}.{suffix} is not used by this quantization format")

    def refuse(self, sentence: str) -> NoReturn:
        """Raise a ModelError that names the directory and the quantization method."""
        method = self.settings.get("quant_method")
        by = "" if method is None else f" (quant_method {method})"
        raise ModelError(f"{self._where}: {sentence}{by}")

    def _refuse_tensor(self, suffix: str, expected: str, got: str) -> NoReturn:
        self.refuse(f"tensor {self.name}.{suffix} must be {expected}, got {got}")
