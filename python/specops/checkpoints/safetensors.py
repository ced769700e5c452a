# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of safetensors files, with plain and quantized modules of any formats."""

import json
from collections.abc import Callable, Set
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from specops.checkpoints import floats, integers
from specops.checkpoints.checkpoint import Checkpoint
from specops.checkpoints.errors import ModelError
from specops.checkpoints.module import Module
from specops.checkpoints.quantization_config import quantization_settings
from specops.checkpoints.stored_tensor import TORCH_DTYPES, StoredTensor, stored_tensors
from specops.quantization import QuantizedWeight

# Suffixes of tensors that identify a quantized module.
_MARKS = frozenset(
    {"weight_packed", "qweight", "weight_scale", "weight_scale_inv", "weight_zero_point"}
)
# Dtypes of quantized values, which cannot be read without scales.
_NO_NUMBERS = (torch.int8, torch.uint8, torch.float8_e5m2)
# Tensors that hold all experts: part -> projections in it; and the suffixes of MXFP4's tensors.
_STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
# Granite's modules that hold all experts in one weight: module -> projections in it.
_STACKED_MODULES = {"input_linear": ("gate_proj", "up_proj"), "output_linear": ("down_proj",)}
_BLOCKS, _SCALES, _BIAS = "_blocks", "_scales", "_bias"
_FLOATS = ("F64", "F32", "BF16", "F16")
_LFS = b"version https://git-lfs"  # the beginning of a git-lfs pointer file
_LONGEST_NAME = 255  # characters of a file name


class _Rows(NamedTuple):
    """Location of one projection's outputs in a tensor that holds all experts.

    There are two layouts. Experts with biases have weights [experts, inputs, outputs] (in MXFP4
    [experts, outputs, inputs]) with alternating gate and up outputs. Other experts have [experts,
    outputs, inputs] with all gate outputs first.
    """

    expert: int
    part: int
    parts: int
    takes_turns: bool

    def of(self, outputs: Tensor) -> Tensor:
        """Select the projection's outputs."""
        if self.takes_turns:
            return outputs[self.part :: self.parts]
        return outputs.chunk(self.parts)[self.part]


class SafetensorsCheckpoint(Checkpoint):
    """The tensors of a directory, read on demand from the files that hold them.

    A large tensor that is used unchanged, such as an embedding, takes memory only for the parts
    that are read.

    Args:
        directory: directory with safetensors files.

    Raises:
        ModelError: a file is missing or damaged.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tensors: dict[str, StoredTensor] = {}
        for name in safetensors_files(directory):
            try:
                self._tensors |= stored_tensors(directory / name)
            except Exception as error:  # safetensors raises its own error type for damaged files
                if is_lfs_pointer(directory / name):
                    raise ModelError(
                        f"{directory / name} is a git-lfs pointer, not the file itself; run "
                        "`git lfs pull` there"
                    ) from None
                raise ModelError(f"{directory / name}: not a safetensors file: {error}") from error
        self.settings = quantization_settings(directory)
        self._readers: dict[str, Callable[[], Tensor | QuantizedWeight]] = {}
        suffixes: dict[str, list[str]] = {}
        for name in self._tensors:
            module, _, suffix = name.rpartition(".")
            suffixes.setdefault(module, []).append(suffix)
        for module, own in suffixes.items():
            self._add_module(module, own)

    def names(self) -> Set[str]:
        """Return all names."""
        return self._readers.keys()

    def dtype(self, name: str) -> str | None:
        """Return torch's name of a tensor's dtype; None if the tensor is not of plain floats."""
        tensor = self._tensors.get(name)
        return TORCH_DTYPES[tensor.dtype] if tensor and tensor.dtype in _FLOATS else None

    def load(self, name: str) -> Tensor | QuantizedWeight:
        """Read a weight or another tensor."""
        if name not in self._readers:
            tail = name.partition(".")[2]
            others = [one for one in self._readers if tail and one.partition(".")[2] == tail]
            hint = f", which has {others[0]}" if others else ""
            raise ModelError(
                f"{self._directory}: tensor {name} is missing from the checkpoint{hint}"
            )
        return self._readers[name]()

    def _add_module(self, module: str, suffixes: list[str]) -> None:
        prefix = f"{module}." if module else ""
        is_quantized = not _MARKS.isdisjoint(suffixes) or self._is_fp8(f"{prefix}weight")
        stacked: set[str] = set()
        for part in _STACKED:
            stacked |= self._add_experts(prefix, part, set(suffixes))
        stacked |= self._add_expert_module(module, suffixes)
        for suffix in suffixes:
            if suffix == "bias" or not (is_quantized or suffix in stacked):
                name = prefix + suffix
                self._readers[name] = partial(self._plain, name)
        if is_quantized:
            self._readers[f"{prefix}weight"] = partial(self._decoded, module, suffixes)

    def _is_fp8(self, name: str) -> bool:
        return name in self._tensors and self._tensors[name].dtype == "F8_E4M3"

    def _plain(self, name: str) -> Tensor:
        tensor = self._tensors[name].read()
        if tensor.dtype in _NO_NUMBERS:
            kind = str(tensor.dtype).removeprefix("torch.")
            method = self.settings.get("quant_method")
            by = "" if method is None else f" (quant_method {method})"
            raise ModelError(f"{self._directory}: tensor {name} is {kind} and needs scales{by}")
        return tensor

    def _decoded(self, name: str, suffixes: list[str]) -> Tensor | QuantizedWeight:
        module = Module(
            str(self._directory),
            name,
            suffixes,
            lambda suffix: self._tensors[f"{name}.{suffix}" if name else suffix].read(),
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
            is_bytes = self._tensors[f"{name}.weight_packed"].dtype == "U8"
            return floats.mxfp4 if is_bytes else integers.pack_quantized
        is_fp8 = self._is_fp8(f"{name}.weight")
        return floats.fp8 if is_fp8 else integers.plain_integers

    def _add_experts(self, prefix: str, part: str, suffixes: set[str]) -> set[str]:
        """Add a name per expert and projection for a tensor that holds all experts.

        Returns:
            The suffixes of the tensors that are read this way.
        """
        blocks = {part + _BLOCKS, part + _SCALES}
        read: Callable[[str, _Rows], Tensor | QuantizedWeight]
        if blocks <= suffixes:
            own, read = blocks, self._mxfp4_of_expert
        elif part in suffixes and len(self._tensors[prefix + part].shape) == 3:
            own, read = {part}, self._floats_of_expert
        else:
            return set()
        bias = part + _BIAS
        takes_turns = bias in suffixes
        names = _STACKED[part]
        for expert in range(self._tensors[prefix + min(own)].shape[0]):
            for index, name in enumerate(names):
                which = _Rows(expert, index, len(names), takes_turns or own == blocks)
                one = f"{prefix}{expert}.{name}"
                self._readers[f"{one}.weight"] = partial(read, prefix + part, which)
                if bias in suffixes:
                    self._readers[f"{one}.bias"] = partial(
                        self._bias_of_expert, prefix + bias, which
                    )
        return own | ({bias} & suffixes)

    def _add_expert_module(self, module: str, suffixes: list[str]) -> set[str]:
        """Do the same as `_add_experts` for a module whose weight holds all experts."""
        parent, _, last = module.rpartition(".")
        weight, names = f"{module}.weight", _STACKED_MODULES.get(last)
        if names is None or "weight" not in suffixes or len(self._tensors[weight].shape) != 3:
            return set()
        for expert in range(self._tensors[weight].shape[0]):
            for index, name in enumerate(names):
                which = _Rows(expert, index, len(names), False)
                read = partial(self._floats_of_expert, weight, which)
                self._readers[f"{parent}.experts.{expert}.{name}.weight"] = read
        return {"weight"}

    def _mxfp4_of_expert(self, name: str, which: _Rows) -> QuantizedWeight:
        module = Module(
            str(self._directory),
            name,
            (_BLOCKS, _SCALES),
            lambda suffix: self._tensors[f"{name}{suffix}"].read(which.expert),
            self.settings,
        )
        blocks = which.of(module.take(_BLOCKS, torch.uint8, dims=3))
        scales = which.of(module.take(_SCALES, torch.uint8, dims=2))
        return floats.of_e2m1(module, blocks.flatten(1), scales)

    def _floats_of_expert(self, name: str, which: _Rows) -> Tensor:
        if (dtype := self._tensors[name].dtype) not in _FLOATS:
            raise ModelError(
                f"{self._directory}: tensor {name} of all experts must be of floats, or in MXFP4, "
                f"got {dtype}"
            )
        weight = self._tensors[name].read(which.expert)
        return which.of(weight.T if which.takes_turns else weight)

    def _bias_of_expert(self, name: str, which: _Rows) -> Tensor:
        return which.of(self._tensors[name].read(which.expert))


def is_lfs_pointer(path: Path) -> bool:
    """Return whether a file is a git-lfs pointer, as left by a clone without git-lfs."""
    with open(path, "rb") as file:
        return file.read(len(_LFS)) == _LFS


def _other_weights(directory: Path) -> str:
    """Return advice if the directory has weights in unsupported files, else ""."""
    found = sorted(
        path.name
        for pattern in (
            "pytorch_model*.bin",
            "consolidated*",
            "*.safetensors",
            "*.pth",
            "*.msgpack",
        )
        for path in directory.glob(pattern)
    )
    if not found:
        return ""
    how = "take a revision with model.safetensors"
    if found[-1].endswith(".bin"):
        how += ", or save it with transformers' save_pretrained"
    return f", but {found[0]}, which is not read: {how}"


def safetensors_files(directory: Path) -> list[str]:
    """Return the names of a checkpoint's safetensors files, in order.

    Raises:
        ModelError: there are no such files, or a file that the index names is missing.
    """
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            found = json.loads(index.read_text(encoding="utf-8"))
            files = sorted({str(name) for name in found["weight_map"].values()})
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ModelError(f"{index}: weight_map must map each tensor to a file name") from error
    elif (directory / "model.safetensors").is_file():
        files = ["model.safetensors"]
    else:
        raise ModelError(
            f"{directory}: no model.safetensors and no model.safetensors.index.json"
            f"{_other_weights(directory)}"
        )
    for name in files:
        if len(name) > _LONGEST_NAME or not (directory / name).is_file():
            raise ModelError(
                f"{directory}: {name:.60} is listed in the index, but the file is missing"
            )
    return files
