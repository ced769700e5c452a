# SPDX-License-Identifier: Apache-2.0
"""Where the weights of a model come from: safetensors files, or random numbers.

A source gives a projection as one packed weight, in whatever kind it decides; norms, biases and
embeddings are tensors.
"""

import json
import zlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from specops import dense
from specops.dense import PackedWeight
from specops.engine.errors import ModelError

QUANTIZATIONS = ("none", "wint8")

_SEED = 1  # of random weights


class WeightSource(ABC):
    """The weights of a model by name.

    Attributes:
        dtype: of the tensors that it gives.
        device: where they are.
        quantization: of projections, as they are loaded: "none"; or "wint8", 8 bits a number and a
            scale for each output, as FastDeploy makes them.
        norm_offset: added to every norm weight, before it is rounded to the dtype: 1 where a
            checkpoint holds w of norms that multiply with 1 + w.
        read: the names that were asked for.
    """

    def __init__(
        self, dtype: torch.dtype, device: torch.device, quantization: str = "none"
    ) -> None:
        self.dtype, self.device, self.quantization = dtype, device, quantization
        self.norm_offset = 0.0
        self.read: set[str] = set()

    @abstractmethod
    def names(self) -> Collection[str]:
        """Returns the names of all tensors, as far as they are known."""

    @abstractmethod
    def _load(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Returns one tensor of this shape, in any dtype and on any device."""

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Returns one tensor.

        Args:
            name: of the tensor.
            shape: what it must have.
            dtype: what it is given in; None: that of the source.

        Raises:
            ModelError: it is missing, or has another shape.
        """
        return self._placed(self._named(name, shape), dtype)

    def norm(self, name: str, width: int) -> Tensor:
        """Returns the weight [width] of a norm."""
        weight = self._named(name, (width,))
        if self.norm_offset:
            weight = weight.float() + self.norm_offset
        return self._placed(weight)

    def bias(self, prefix: str, parts: Sequence[str], outputs: Sequence[int]) -> Tensor:
        """Returns the bias of a projection; see `linear`."""
        named = zip(parts, outputs, strict=True)
        return torch.cat([self.tensor(f"{prefix}{part}.bias", size) for part, size in named])

    def linear(
        self,
        prefix: str,
        parts: Sequence[str],
        outputs: Sequence[int],
        inputs: int,
        *,
        activation: str | None = None,
    ) -> PackedWeight:
        """Returns a projection.

        Args:
            prefix: what the names of its parts begin with.
            parts: modules whose outputs lie side by side, such as q_proj, k_proj and v_proj.
            outputs: outputs of each part.
            inputs: inputs of all of them.
            activation: of two parts, a gate and an up: `dense.linear` then makes
                `activation(gate) * up`; see `dense.pack_weight`.
        """
        named = zip(parts, outputs, strict=True)
        weights = [self.tensor(f"{prefix}{part}.weight", size, inputs) for part, size in named]
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        if self.quantization == "wint8":
            return dense.quantize_weight(weight, kind="int8", activation=activation)
        return dense.pack_weight(weight, activation=activation)

    def _named(self, name: str, shape: tuple[int, ...]) -> Tensor:
        self.read.add(name)
        return self._load(name, shape)

    def _placed(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return tensor.to(dtype or self.dtype).contiguous().to(self.device)


class Checkpoint(WeightSource):
    """The tensors of a directory, read on demand from the files that hold them.

    Args:
        directory: with safetensors files.
        dtype: of the tensors that it gives, whatever the files have.
        device: where they are put.
        stack: closes the files.
        quantization: see `WeightSource`.

    Raises:
        ModelError: a file is missing or damaged.
    """

    def __init__(
        self,
        directory: Path,
        dtype: torch.dtype,
        device: torch.device,
        stack: ExitStack,
        quantization: str = "none",
    ) -> None:
        super().__init__(dtype, device, quantization)
        self._directory = directory
        self._where: dict[str, Any] = {}
        for name in weight_files(directory):
            try:
                handle = stack.enter_context(safe_open(directory / name, framework="pt"))
            except Exception as error:  # safetensors raises its own error type for damaged files
                raise ModelError(f"{directory / name}: not a safetensors file: {error}") from error
            self._where.update(dict.fromkeys(handle.keys(), handle))

    def names(self) -> Collection[str]:
        """Returns the names of all tensors."""
        return self._where.keys()

    def _load(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._where:
            raise ModelError(f"{self._directory}: tensor {name} is missing from the checkpoint")
        tensor: Tensor = self._where[name].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{self._directory}: tensor {name} must be {list(shape)}, got {list(tensor.shape)}"
            )
        return tensor


class RandomWeights(WeightSource):
    """Weights in the shapes of a model, made on the device: each always the same, by its name.

    Matrices are scaled so that activations neither grow nor vanish with depth.
    """

    def __init__(
        self, dtype: torch.dtype, device: torch.device, quantization: str = "none"
    ) -> None:
        super().__init__(dtype, device, quantization)
        self._generator = torch.Generator(device)

    def names(self) -> Collection[str]:
        """Returns no names: it has whatever it is asked for."""
        return ()

    def norm(self, name: str, width: int) -> Tensor:
        """Returns ones."""
        return torch.ones(width, dtype=self.dtype, device=self.device)

    def bias(self, prefix: str, parts: Sequence[str], outputs: Sequence[int]) -> Tensor:
        """Returns zeros."""
        return torch.zeros(sum(outputs), dtype=self.dtype, device=self.device)

    def _load(self, name: str, shape: tuple[int, ...]) -> Tensor:
        weight = torch.empty(shape, dtype=self.dtype, device=self.device)
        generator = self._generator.manual_seed(zlib.crc32(name.encode(), _SEED))
        return weight.normal_(std=shape[-1] ** -0.5, generator=generator)


def weight_files(directory: Path) -> list[str]:
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
