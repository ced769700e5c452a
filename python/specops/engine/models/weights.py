# SPDX-License-Identifier: Apache-2.0
"""Where the weights of a model come from: safetensors files, or random numbers.

A source gives a projection as one packed weight, in whatever kind it decides; norms, biases and
embeddings are tensors.
"""

import json
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from specops import dense, moe
from specops.dense import PackedWeight
from specops.engine.errors import ModelError
from specops.engine.models.weight_cache import CachedWeights, WeightCache
from specops.quantization import quantize_weight

_SEED = 1  # of random weights
_COPIED_BYTES = 1 << 20  # of tensors up to this no file is kept mapped


@dataclass(frozen=True, kw_only=True)
class WeightSettings:
    """How the weights of a model are read, and those of its drafters.

    Attributes:
        dtype: of the tensors.
        device: where they are put.
        load_format: "auto" reads checkpoints; "dummy" makes random numbers in their place.
        quantization: of the layers' projections, as they are loaded: "none"; or "wint8", 8 bits a
            number and a scale for each output, as FastDeploy makes them.
        quantize_head: the same of the LM head.
        cache: keeps packed weights; None: they are packed each time.
    """

    dtype: torch.dtype
    device: torch.device
    load_format: str = "auto"
    quantization: str = "none"
    quantize_head: str = "none"
    cache: WeightCache | None = None

    def open(self, directory: Path) -> "WeightSource":
        """Returns the weights of a directory.

        Raises:
            ModelError: a file is missing or damaged.
        """
        return RandomWeights(self) if self.load_format == "dummy" else Checkpoint(directory, self)

    def of_drafter(self, quantization: str | None) -> "WeightSettings":
        """Returns those of a drafter's own weights.

        Args:
            quantization: of all that it has, its head too; None: as the target's.
        """
        if quantization is None:
            return self
        return replace(self, quantization=quantization, quantize_head=quantization)


class WeightSource(ABC):
    """The weights of a model by name.

    Attributes:
        settings: how they are read.
        dtype, device: of these.
        norm_offset: added to every norm weight, before it is rounded to the dtype: 1 where a
            checkpoint holds w of norms that multiply with 1 + w.
        read: the names that were asked for.
        cached: where packed weights are kept; None: they are packed when they are asked for.
    """

    def __init__(self, settings: WeightSettings) -> None:
        self.settings = settings
        self.dtype, self.device = settings.dtype, settings.device
        self.norm_offset = 0.0
        self.read: set[str] = set()
        self.cached: CachedWeights | None = None

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

    def integers(self, name: str, *shape: int) -> Tensor:
        """Returns one tensor as it is in the file, on the CPU: of ids, which have no dtype here."""
        return self._named(name, shape).cpu()

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
        quantization: str | None = None,
        rows: Tensor | None = None,
    ) -> PackedWeight:
        """Returns a projection.

        Args:
            prefix: what the names of its parts begin with.
            parts: modules whose outputs lie side by side, such as q_proj, k_proj and v_proj.
            outputs: outputs of each part.
            inputs: inputs of all of them.
            activation: of two parts, a gate and an up: `dense.linear` then makes
                `activation(gate) * up`; see `dense.pack_weight`.
            quantization: of this one; None: that of the layers' projections.
            rows: int32 [kept outputs], on the device: which outputs to keep; None: all.
        """
        names = [f"{prefix}{part}.weight" for part in parts]
        quantization = quantization or self.settings.quantization

        def make() -> PackedWeight:
            return self._pack(names, outputs, inputs, activation, quantization, rows)

        kept = None if rows is None else rows.tolist()
        return self._kept(names, outputs, inputs, activation, quantization, kept, make=make)

    def experts(
        self,
        prefix: str,
        num_experts: int,
        parts: Sequence[str],
        outputs: Sequence[int],
        inputs: int,
        *,
        activation: str | None = None,
    ) -> PackedWeight:
        """Returns a projection of each expert, one behind the other; see `moe.stack_experts`.

        Args:
            prefix: what the names of all experts begin with; the expert's number follows.
            num_experts: how many there are.
            parts, outputs, inputs, activation: of one; see `linear`.
        """
        each = [[f"{prefix}{e}.{part}.weight" for part in parts] for e in range(num_experts)]
        quantization = self.settings.quantization

        def make() -> PackedWeight:
            packed = (self._pack(one, outputs, inputs, activation, quantization) for one in each)
            return moe.stack_experts(packed, num_experts)

        names = [name for one in each for name in one]
        return self._kept(names, outputs, inputs, activation, quantization, "experts", make=make)

    def _pack(
        self,
        names: Sequence[str],
        outputs: Sequence[int],
        inputs: int,
        activation: str | None,
        quantization: str,
        rows: Tensor | None = None,
    ) -> PackedWeight:
        named = zip(names, outputs, strict=True)
        weights = [self.tensor(name, size, inputs) for name, size in named]
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        if rows is not None:
            weight = weight[rows.long()]
        if quantization == "wint8":
            return dense.pack_weight(quantize_weight(weight), activation=activation)
        return dense.pack_weight(weight, activation=activation)

    def _kept(
        self, names: Sequence[str], *what: Any, make: Callable[[], PackedWeight]
    ) -> PackedWeight:
        """What `make` returns, or what it returned when the same was asked for before."""
        self.read.update(names)
        if self.cached is None:
            return make()
        return self.cached.get(json.dumps([names, str(self.dtype), *what]), make)

    def _named(self, name: str, shape: tuple[int, ...]) -> Tensor:
        self.read.add(name)
        return self._load(name, shape)

    def _placed(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return tensor.to(dtype or self.dtype).contiguous().to(self.device)


class Checkpoint(WeightSource):
    """The tensors of a directory, read on demand from the files that hold them.

    A file is mapped for each tensor anew: what was read of it is given back with the tensor. A
    large tensor that stays as it is in the file, such as an embedding, takes what is read of it.

    Args:
        directory: with safetensors files.
        settings: how they are read.

    Raises:
        ModelError: a file is missing or damaged.
    """

    def __init__(self, directory: Path, settings: WeightSettings) -> None:
        super().__init__(settings)
        self._directory = directory
        self._where: dict[str, Path] = {}
        files = [directory / name for name in weight_files(directory)]
        for path in files:
            try:
                with safe_open(path, framework="pt") as file:
                    self._where.update(dict.fromkeys(file.keys(), path))
            except Exception as error:  # safetensors raises its own error type for damaged files
                raise ModelError(f"{path}: not a safetensors file: {error}") from error
        # A GPU packs weights as fast as it is given them.
        if settings.cache is not None and settings.device.type == "cpu":
            self.cached = settings.cache.of(files)

    def names(self) -> Collection[str]:
        """Returns the names of all tensors."""
        return self._where.keys()

    def _load(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._where:
            raise ModelError(f"{self._directory}: tensor {name} is missing from the checkpoint")
        with safe_open(self._where[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{self._directory}: tensor {name} must be {list(shape)}, got {list(tensor.shape)}"
            )
        return tensor.clone() if tensor.nbytes <= _COPIED_BYTES else tensor


class RandomWeights(WeightSource):
    """Weights in the shapes of a model, made on the device: each always the same, by its name.

    Matrices are scaled so that activations neither grow nor vanish with depth.
    """

    def __init__(self, settings: WeightSettings) -> None:
        super().__init__(settings)
        self._generator = torch.Generator(self.device)

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
