# SPDX-License-Identifier: Apache-2.0
"""Interface of checkpoints for model loaders."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Set
from types import MappingProxyType
from typing import Any

from torch import Tensor

from specops.quantization import QuantizedWeight


class Checkpoint(ABC):
    """Tensors by the names that Hugging Face models use; a quantized weight is one tensor.

    Attributes:
        is_one_model: whether the checkpoint holds one model only, without parts such as a vision
            tower or MTP modules.
        settings: quantization settings of the checkpoint, which describe how weights are stored.
    """

    is_one_model = False
    settings: Mapping[str, Any] = MappingProxyType({})

    @abstractmethod
    def names(self) -> Set[str]:
        """Return all names; a quantized weight has the name of the unquantized weight."""

    def dtype(self, name: str) -> str | None:
        """Return torch's name of a tensor's dtype; None if the tensor is not of plain floats."""
        return None

    @abstractmethod
    def load(self, name: str) -> Tensor | QuantizedWeight:
        """Read a weight or another tensor.

        Raises:
            ModelError: the tensor is missing, or cannot be decoded.
        """
