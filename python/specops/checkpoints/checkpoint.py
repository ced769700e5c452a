# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint is to those who load models."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Set
from types import MappingProxyType
from typing import Any

from torch import Tensor

from specops.quantization import QuantizedWeight


class Checkpoint(ABC):
    """Tensors by the names that Hugging Face's models have for them, one for each weight.

    Attributes:
        is_one_model: whether it holds nothing else, such as a vision tower or MTP modules.
        settings: what is said elsewhere of how weights are stored in its files.
    """

    is_one_model = False
    settings: Mapping[str, Any] = MappingProxyType({})

    @abstractmethod
    def names(self) -> Set[str]:
        """Return all names; a quantized weight has the one name that it would have otherwise."""

    def dtype(self, name: str) -> str | None:
        """Return the dtype of a tensor of floats as torch calls it; None: it is of another kind."""
        return None

    @abstractmethod
    def load(self, name: str) -> Tensor | QuantizedWeight:
        """Read a weight, or another tensor.

        Raises:
            ModelError: it is missing, or cannot be decoded.
        """
