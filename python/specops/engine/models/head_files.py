# SPDX-License-Identifier: Apache-2.0
"""Readers of draft head weights, also from pickled tensors and files with unusual names."""

from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from specops.api.errors import ModelError
from specops.checkpoints.gguf import gguf_files
from specops.engine.models.weights import WeightSettings, WeightSource


def read_tensors(path: Path) -> Any:
    """Return the content of a safetensors file or of a file pickled by torch.

    Reading a pickle yields only tensors and runs no code from it.

    Raises:
        ModelError: the file is damaged or not of these formats.
    """
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the two libraries raise various errors
        raise ModelError(f"{path}: not a file of tensors: {error}") from error


class HeadFile(WeightSource):
    """Weight source for one file: safetensors, or pickled by torch.

    Args:
        path: path of the file.
        settings: settings for reading.

    Raises:
        ModelError: the file is damaged or not of these formats.
    """

    def __init__(self, path: Path, settings: WeightSettings) -> None:
        super().__init__(settings)
        self._path, self.where = path, f"{path}: "
        found = read_tensors(path)
        if not isinstance(found, dict) or not all(
            isinstance(name, str) and isinstance(one, Tensor) for name, one in found.items()
        ):
            raise ModelError(f"{path}: expected tensors by name, got {type(found).__name__}")
        self._tensors: dict[str, Tensor] = found

    def names(self) -> Set[str]:
        """Return the names of all tensors."""
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


def open_head(directory: Path, settings: WeightSettings, files: Sequence[str]) -> WeightSource:
    """Return the weights of a draft head.

    Args:
        directory: the head's directory.
        settings: settings for reading.
        files: additional file names to try after the usual ones of a model.

    Raises:
        ModelError: none of the files exists, one is damaged, or random weights are requested.
    """
    if not directory.is_dir():
        raise ModelError(f"{directory}: no such directory")
    if settings.load_format == "dummy":
        raise ModelError(f"{directory}: a draft head needs load_format auto, got dummy")
    names = ("model.safetensors", "model.safetensors.index.json")
    if not any((directory / name).is_file() for name in names):
        for name in files:
            if (directory / name).is_file():
                return HeadFile(directory / name, settings)
        if files and not gguf_files(directory):
            raise ModelError(f"{directory}: no {', '.join((*names, *files[:-1]))} or {files[-1]}")
    return settings.open(directory)


def refuse_unread(source: WeightSource, directory: Path, what: str, left: Sequence[str]) -> None:
    """Reject tensors that were not read.

    Args:
        source: source of the weights, after loading.
        directory: the head's directory.
        what: name of the head with its article, for the error message.
        left: name suffixes of tensors that may stay unread.

    Raises:
        ModelError: another tensor was not read.
    """
    for name in sorted(source.names()):
        if name not in source.read and not name.endswith((*left, "\0")):
            raise ModelError(f"{directory}: tensor {name} is not used by {what}")
