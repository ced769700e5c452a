# SPDX-License-Identifier: Apache-2.0
"""Directories of safetensors files, whose modules may be quantized, each in a way of its own."""

import json
from collections.abc import Callable, Mapping, Set
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from specops.engine.checkpoints import floats, integers
from specops.engine.checkpoints.checkpoint import Checkpoint
from specops.engine.checkpoints.module import Module
from specops.engine.errors import ModelError
from specops.quantization import QuantizedWeight

# Tensors that make a module a quantized one.
_MARKS = frozenset(
    {"weight_packed", "qweight", "weight_scale", "weight_scale_inv", "weight_zero_point"}
)
# Codes: what they stand for nobody says.
_NO_NUMBERS = (torch.int8, torch.uint8, torch.float8_e5m2)
_BLOCKS, _SCALES = "_blocks", "_scales"  # of fused experts in MXFP4
_COPIED_BYTES = 1 << 20  # of tensors up to this no file is kept mapped


class _Facts(NamedTuple):
    """What a file says of a tensor: its dtype, by safetensors' name, and its shape."""

    dtype: str
    shape: list[int]


class SafetensorsCheckpoint(Checkpoint):
    """The tensors of a directory, read on demand from the files that hold them.

    A file is mapped for each tensor anew: what was read of it is given back with the tensor. A
    large tensor that stays as it is in the file, such as an embedding, takes what is read of it.

    Args:
        directory: with safetensors files.

    Raises:
        ModelError: a file is missing or damaged.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._where: dict[str, Path] = {}
        self._facts: dict[str, _Facts] = {}
        for name in safetensors_files(directory):
            try:
                with safe_open(directory / name, framework="pt") as file:
                    for tensor in file.keys():  # noqa: SIM118
                        part = file.get_slice(tensor)
                        self._where[tensor] = directory / name
                        self._facts[tensor] = _Facts(part.get_dtype(), part.get_shape())
            except Exception as error:  # safetensors raises its own error type for damaged files
                raise ModelError(f"{directory / name}: not a safetensors file: {error}") from error
        self.settings = _quantization_settings(directory)
        self._readers: dict[str, Callable[[], Tensor | QuantizedWeight]] = {}
        suffixes: dict[str, list[str]] = {}
        for name in self._where:
            module, _, suffix = name.rpartition(".")
            suffixes.setdefault(module, []).append(suffix)
        for module, own in suffixes.items():
            self._add_module(module, own)

    def names(self) -> Set[str]:
        """Returns all names."""
        return self._readers.keys()

    def load(self, name: str) -> Tensor | QuantizedWeight:
        """Reads a weight, or another tensor."""
        if name not in self._readers:
            raise ModelError(f"{self._directory}: tensor {name} is missing from the checkpoint")
        return self._readers[name]()

    def _add_module(self, module: str, suffixes: list[str]) -> None:
        prefix = f"{module}." if module else ""
        is_quantized = not _MARKS.isdisjoint(suffixes) or self._is_fp8(f"{prefix}weight")
        blocks = [one.removesuffix(_BLOCKS) for one in suffixes if one.endswith(_BLOCKS)]
        fused = [one for one in blocks if one + _SCALES in suffixes]
        for part in fused:
            self._add_experts(prefix, part)
        decoded = {part + suffix for part in fused for suffix in (_BLOCKS, _SCALES)}
        for suffix in suffixes:
            if suffix == "bias" or not (is_quantized or suffix in decoded):
                name = prefix + suffix
                self._readers[name] = partial(self._plain, name)
        if is_quantized:
            self._readers[f"{prefix}weight"] = partial(self._decoded, module, suffixes)

    def _is_fp8(self, name: str) -> bool:
        return name in self._facts and self._facts[name].dtype == "F8_E4M3"

    def _tensor(self, name: str, index: int | None = None) -> Tensor:
        """A tensor, or one part of its first dimension."""
        with safe_open(self._where[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name) if index is None else file.get_slice(name)[index]
        return tensor.clone() if tensor.nbytes <= _COPIED_BYTES else tensor

    def _plain(self, name: str) -> Tensor:
        tensor = self._tensor(name)
        if tensor.dtype in _NO_NUMBERS:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ModelError(f"{self._directory}: tensor {name} is {kind}, but has no scales")
        return tensor

    def _decoded(self, name: str, suffixes: list[str]) -> Tensor | QuantizedWeight:
        module = Module(
            str(self._directory),
            name,
            suffixes,
            lambda suffix: self._tensor(f"{name}.{suffix}" if name else suffix),
            self.settings,
        )
        weight = self._decoder(name, suffixes)(module)
        module.done()
        return weight

    def _decoder(
        self, name: str, suffixes: list[str]
    ) -> Callable[[Module], Tensor | QuantizedWeight]:
        if "qweight" in suffixes:
            return integers.qweight
        if "weight_packed" in suffixes:
            is_bytes = self._facts[f"{name}.weight_packed"].dtype == "U8"
            return floats.mxfp4 if is_bytes else integers.pack_quantized
        is_fp8 = self._is_fp8(f"{name}.weight")
        return floats.fp8 if is_fp8 else integers.plain_integers

    def _add_experts(self, prefix: str, part: str) -> None:
        """Experts in one tensor, as gpt-oss has them: each gets the name of one of its own."""
        count = self._facts[f"{prefix}{part}{_BLOCKS}"].shape[0]
        names = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
        for expert in range(count):
            for first, own in enumerate(names):
                self._readers[f"{prefix}{expert}.{own}.weight"] = partial(
                    self._expert, prefix, part, expert, first, len(names)
                )

    def _expert(
        self, prefix: str, part: str, expert: int, first: int, step: int
    ) -> QuantizedWeight:
        """One expert's rows: of gate and up every other, gates first."""
        module = Module(
            str(self._directory),
            f"{prefix}{part}",
            (_BLOCKS, _SCALES),
            lambda suffix: self._tensor(f"{prefix}{part}{suffix}", expert),
            self.settings,
        )
        blocks = module.take(_BLOCKS, torch.uint8, dims=3)[first::step]
        scales = module.take(_SCALES, torch.uint8, dims=2)[first::step]
        return floats.of_e2m1(module, blocks.flatten(1), scales)


def safetensors_files(directory: Path) -> list[str]:
    """Returns the names of a checkpoint's safetensors files, in order.

    Raises:
        ModelError: there are none, or one that the index names is missing.
    """
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = sorted(set(weight_map.values()))
    elif (directory / "model.safetensors").is_file():
        files = ["model.safetensors"]
    else:
        raise ModelError(f"{directory}: no model.safetensors and no model.safetensors.index.json")
    for name in files:
        if not (directory / name).is_file():
            raise ModelError(f"{directory}: {name} is named in the index but missing")
    return files


def _quantization_settings(directory: Path) -> Mapping[str, Any]:
    """What config.json, or else quantize_config.json, says of how weights are stored."""
    for name, field in (("config.json", "quantization_config"), ("quantize_config.json", None)):
        if not (directory / name).is_file():
            continue
        try:
            found = json.loads((directory / name).read_text(encoding="utf-8"))
            settings = found if field is None else found.get(field)
        except (ValueError, AttributeError) as error:
            raise ModelError(f"{directory / name}: not a JSON object: {error}") from error
        if isinstance(settings, dict) and settings:
            return settings
    return {}
