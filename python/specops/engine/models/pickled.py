# SPDX-License-Identifier: Apache-2.0
"""Weights of older draft heads, which are published as pickled tensors and not as safetensors."""

from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from torch import Tensor

from specops.engine.errors import ModelError
from specops.engine.models.weights import WeightSettings, WeightSource


class PickledWeights(WeightSource):
    """The tensors of a file that torch has pickled: tensors alone are read, and no code is run.

    Args:
        path: the file.
        settings: how they are read.

    Raises:
        ModelError: the file is damaged, or holds something else.
    """

    def __init__(self, path: Path, settings: WeightSettings) -> None:
        super().__init__(settings)
        self._path = path
        try:
            found = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises what its unpickler does
            raise ModelError(f"{path}: not a file of tensors alone: {error}") from error
        if not isinstance(found, dict) or not all(
            isinstance(name, str) and isinstance(one, Tensor) for name, one in found.items()
        ):
            raise ModelError(f"{path}: expected tensors by name, got {type(found).__name__}")
        self._tensors: dict[str, Tensor] = found

    def names(self) -> Collection[str]:
        """Returns the names of all tensors."""
        return self._tensors.keys()

    def _load(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._tensors:
            raise ModelError(f"{self._path}: tensor {name} is missing")
        tensor = self._tensors[name]
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{self._path}: tensor {name} must be {list(shape)}, got {list(tensor.shape)}"
            )
        return tensor


def open_draft_weights(
    directory: Path, settings: WeightSettings, pickles: Sequence[str]
) -> WeightSource:
    """Returns the weights of a draft head: of safetensors files, or of a pickled one.

    Args:
        directory: of the head.
        settings: how they are read.
        pickles: names that the pickled file may have; the first one that is there is read, if
            there are no safetensors files.

    Raises:
        ModelError: there is neither, or a file is damaged.
    """
    if settings.load_format != "dummy" and not any(directory.glob("*.safetensors")):
        for name in pickles:
            if (directory / name).is_file():
                return PickledWeights(directory / name, settings)
    return settings.open(directory)
