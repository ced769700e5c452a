# SPDX-License-Identifier: Apache-2.0
"""GGUF checkpoints: tensors of one or several files by the names of Hugging Face."""

import math
import re
from collections.abc import Callable, Iterator, Set
from functools import partial
from pathlib import Path

import torch

from specops.checkpoints.checkpoint import Checkpoint
from specops.checkpoints.errors import ModelError
from specops.checkpoints.gguf_blocks import DECODERS
from specops.checkpoints.gguf_directory import ROPE_FACTORS
from specops.checkpoints.gguf_file import TYPES, parts_of, read_gguf
from specops.checkpoints.gguf_names import (
    Layout,
    Weight,
    experts_name,
    layer_name,
    layouts,
    model_name,
    projections_of_experts,
)

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_LAYER = re.compile(r"blk\.(\d+)\.(.+)")


def gguf_files(directory: Path) -> list[Path]:
    """Return the GGUF files of a directory without safetensors files, in order; [] for none.

    Raises:
        ModelError: there are files of several models.
    """
    if any(directory.glob("*.safetensors*")):
        return []
    files = sorted(directory.glob("*.gguf"))
    if files and files != parts_of(files[0]):
        names = ", ".join(file.name for file in files)
        raise ModelError(
            f"{directory}: expected one GGUF file, or the files of one model, got {names}"
        )
    return files


class GgufCheckpoint(Checkpoint):
    """The tensors of a GGUF model, mapped into memory.

    Args:
        path: path of the file, or of the first of several.

    Raises:
        ModelError: a file is damaged, or has a tensor that no supported model uses.
    """

    def __init__(self, path: Path) -> None:
        file = read_gguf(path, with_tokenizer=False)
        self._path = path
        self._data = {
            one: torch.from_file(str(one), shared=False, size=one.stat().st_size, dtype=torch.uint8)
            for one in parts_of(path)
        }
        self._tensors = file.tensors
        try:
            own = layouts(file.metadata)
        except ModelError as error:
            raise ModelError(f"{path}: {error}") from None
        self._readers = dict(self._named(str(file.metadata.get("general.architecture")), own))
        # A file may also hold MTP modules, which are loaded separately.
        self.is_one_model = not any(".nextn." in name for name in file.tensors)

    def names(self) -> Set[str]:
        """Return all names."""
        return self._readers.keys()

    def load(self, name: str) -> Weight:
        """Read a weight or another tensor."""
        if name not in self._readers:
            raise ModelError(f"{self._path}: tensor {name} is missing from the file")
        try:
            return self._readers[name]()
        except ModelError as error:
            raise ModelError(f"{self._path}: tensor {name} {error}") from None

    def _named(
        self, architecture: str, own: dict[str, Layout]
    ) -> Iterator[tuple[str, Callable[[], Weight]]]:
        """Yield the name of each tensor, and a function that reads it."""
        names = {part: name for name, layout in own.items() for part in layout.parts}
        of_experts = projections_of_experts(architecture)
        for stored in self._tensors:
            match = _LAYER.fullmatch(stored)
            if stored == ROPE_FACTORS:
                continue
            if match is None:
                name_in_model = model_name(architecture, stored)
                if name_in_model is None:
                    raise self._unknown(stored)
                yield name_in_model, partial(self._decoded, stored)
                continue
            layer, part = f"model.layers.{match[1]}.", match[2]
            module, _, suffix = part.rpartition(".")
            if part in names:
                layout = own[names[part]]
                yield layer + names[part], partial(self._restored, f"blk.{match[1]}.", layout)
            elif module in of_experts and suffix in ("weight", "bias"):
                for name, read in self._of_experts(stored, of_experts[module]):
                    yield f"{layer}{experts_name(architecture)}{name}.{suffix}", read
            else:
                name_in_layer = layer_name(architecture, part)
                if name_in_layer is None:
                    raise self._unknown(stored)
                yield layer + name_in_layer, partial(self._decoded, stored)

    def _unknown(self, stored: str) -> ModelError:
        return ModelError(f"{self._path}: tensor {stored} is not used by any supported model")

    def _of_experts(
        self, stored: str, parts: tuple[str, ...]
    ) -> Iterator[tuple[str, Callable[[], Weight]]]:
        """Yield the names of the experts' parts in a tensor of all experts, and their readers."""
        shape = self._tensors[stored].shape
        if len(shape) < 2 or shape[1] % len(parts):
            raise ModelError(
                f"{self._path}: tensor {stored} must have a matrix of {' and '.join(parts)} for "
                f"each expert, got {list(shape)}"
            )
        count = shape[0] * len(parts)
        for index in range(count):
            expert, part = divmod(index, len(parts))
            yield f"{expert}.{parts[part]}", partial(self._decoded, stored, index, count)

    def _restored(self, prefix: str, layout: Layout) -> Weight:
        for part in layout.parts:
            if prefix + part not in self._tensors:
                raise ModelError(f"is incomplete: {prefix}{part} is missing from the file")
        stored = [self._decoded(prefix + part) for part in layout.parts]
        try:
            return layout.restore(*stored)
        except (AttributeError, IndexError, RuntimeError, TypeError) as error:
            shapes = " and ".join(
                str(list(self._tensors[prefix + one].shape)) for one in layout.parts
            )
            raise ModelError(f"does not fit the sizes in the metadata: it is {shapes}") from error

    def _decoded(self, stored: str, index: int | None = None, count: int = 1) -> Weight:
        """Decode a tensor of the file, or one of its `count` equal pieces.

        A quantized tensor with more than two dimensions is returned as a matrix.
        """
        tensor = self._tensors[stored]
        data = self._data[tensor.path][tensor.offset : tensor.offset + tensor.num_bytes]
        shape = tensor.shape
        if index is not None:
            data = data.view(count, -1)[index]
            shape = (shape[0] * shape[1] // count, *shape[2:])
        if tensor.type in _PLAIN:
            # Copy: the data may be unaligned in the file, and the mapping may be released.
            return data.clone().view(_PLAIN[tensor.type]).view(shape)
        decode = DECODERS.get(tensor.type)
        if decode is None or len(shape) < 2:
            known = ", ".join((*_PLAIN, *DECODERS))
            raise ModelError(
                f"is {list(shape)} of type {tensor.type}; supported types of matrices: {known}"
            )
        _, numbers, size = next(one for one in TYPES.values() if one[0] == tensor.type)
        return decode(data.view(math.prod(shape[:-1]), shape[-1] // numbers, size))
