# SPDX-License-Identifier: Apache-2.0
"""The tensors of one module, as a decoder takes them."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from specops.checkpoints.errors import ModelError

# Suffixes of tensors about activations and caches, which are ignored: activations are not rounded
# as these say, and an 8-bit cache has scales of its own. The names are those of compressed-tensors,
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
    """The tensors of one module.

    Args:
        where: the directory, for messages.
        name: of the module.
        suffixes: what its tensors' names have behind it.
        read: returns the tensor of a suffix.
        settings: what the checkpoint says of its quantization.

    Attributes:
        name: of the module.
        settings: likewise.
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
        """Read a tensor.

        Args:
            suffix: of its name.
            dtypes: of which it must have one.
            dims: that it must have.

        Raises:
            ModelError: it is missing, or has another dtype or another number of dimensions.
        """
        if suffix not in self._left:
            self.refuse(f"tensor {self.name}.{suffix} is missing")
        self._left.remove(suffix)
        tensor = self._read(suffix)
        if tensor.dtype not in dtypes:
            wanted = " or ".join(str(one).removeprefix("torch.") for one in dtypes)
            self._refuse_tensor(suffix, wanted, str(tensor.dtype).removeprefix("torch."))
        if dims is not None and tensor.dim() != dims:
            self._refuse_tensor(suffix, f"of {dims} dimensions", str(list(tensor.shape)))
        return tensor

    def take_scales(self, suffix: str) -> Tensor:
        """Read scales, and returns them in float32."""
        kinds = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
        return self.take(suffix, *kinds).float()

    def check_shape(self, suffix: str, tensor: Tensor, *shape: int) -> None:
        """Refuse a tensor of another shape."""
        if tuple(tensor.shape) != shape:
            self._refuse_tensor(suffix, str(list(shape)), str(list(tensor.shape)))

    def done(self) -> None:
        """Refuse tensors that nothing has read."""
        for suffix in sorted(self._left - ACTIVATION_SCALES - {"bias"}):
            self.refuse(f"tensor {self.name}.{suffix} has no place in a weight of this format")

    def refuse(self, sentence: str) -> NoReturn:
        """Raise a ModelError that names the directory and the method of quantization."""
        method = self.settings.get("quant_method")
        by = "" if method is None else f" (quant_method {method})"
        raise ModelError(f"{self._where}: {sentence}{by}")

    def _refuse_tensor(self, suffix: str, wanted: str, got: str) -> NoReturn:
        self.refuse(f"tensor {self.name}.{suffix} must be {wanted}, got {got}")
