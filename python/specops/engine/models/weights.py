# SPDX-License-Identifier: Apache-2.0
"""Sources of a model's weights: safetensors files, or random numbers.

A source returns a projection as one packed weight, in the format that its file or the settings
specify. Norms, biases and embeddings are plain tensors.
"""

import json
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specops import dense, moe
from specops.api.errors import ModelError
from specops.checkpoints.directory import open_checkpoint, weight_files
from specops.checkpoints.fused import fused, rows_of
from specops.checkpoints.module import ACTIVATION_SCALES
from specops.dense import PackedWeight
from specops.engine.models.shards import WHOLE, Shard, inputs_of, outputs_of
from specops.engine.models.weight_cache import CachedWeights, WeightCache
from specops.quantization import QuantizedWeight, dequantize_weight, quantize_weight

_SEED = 1  # seed of random weights
# Name suffixes of ignored tensors: RoPE tables, which are computed, and scales of activations.
_NO_WEIGHTS = (".rotary_emb.inv_freq", *(f".{suffix}" for suffix in sorted(ACTIVATION_SCALES)))
# Formats of experts and of all other projections, for a mixed setting.
_OF_EXPERTS, _OF_DENSE = {"mix_quant": "wint4"}, {"mix_quant": "wint8"}


@dataclass(frozen=True, kw_only=True)
class WeightSettings:
    """Settings for reading the weights of a model and of its drafters.

    Attributes:
        dtype: dtype of the tensors.
        device: device of the tensors.
        load_format: "auto" reads checkpoints; "dummy" makes random numbers instead.
        quantization: format of the layers' projections, applied while loading: "none", or
            FastDeploy's "wint8", 8 bits per number and a scale per output; "wint4", 4 bits and a
            scale per 128 inputs of an output (64 if 128 does not divide them); or "mix_quant",
            wint4 for experts and wint8 for everything else.
        quantize_head: the same for the LM head.
        cache: disk cache of packed weights; None: weights are packed on each load.
    """

    dtype: torch.dtype
    device: torch.device
    load_format: str = "auto"
    quantization: str = "none"
    quantize_head: str = "none"
    cache: WeightCache | None = None

    def open(self, directory: Path) -> "WeightSource":
        """Return the source of the weights in a directory.

        Raises:
            ModelError: a file is missing or damaged.
        """
        return RandomWeights(self) if self.load_format == "dummy" else Checkpoint(directory, self)

    def of_drafter(self, quantization: str | None) -> "WeightSettings":
        """Return the settings for a drafter's own weights.

        Args:
            quantization: format of all its projections and its LM head; None: the target's.
        """
        if quantization is None:
            return self
        return replace(self, quantization=quantization, quantize_head=quantization)


class WeightSource(ABC):
    """Source of a model's weights by tensor name.

    Attributes:
        settings: settings for reading.
        dtype, device: dtype and device from the settings.
        norm_offset: number added to every norm weight before rounding to the dtype: 1 if the
            checkpoint stores w of norms that multiply by 1 + w.
        read: names of the tensors that were read.
        cached: disk cache of packed weights; None: weights are packed on each load.
        where: start of error messages about tensors; it names the file or directory.
    """

    where = ""

    def __init__(self, settings: WeightSettings) -> None:
        self.settings = settings
        self.dtype, self.device = settings.dtype, settings.device
        self.norm_offset = 0.0
        self.read: set[str] = set()
        self.cached: CachedWeights | None = None

    @abstractmethod
    def names(self) -> Set[str]:
        """Return the names of all known tensors."""

    @abstractmethod
    def _load(self, name: str, shape: tuple[int, ...]) -> Tensor | QuantizedWeight:
        """Read one tensor of this shape; it may have any dtype and device."""

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return one tensor, dequantized if it is a quantized weight.

        Args:
            name: name of the tensor.
            shape: required shape.
            dtype: dtype of the result; None: the source's dtype.

        Raises:
            ModelError: the tensor is missing or has the wrong shape.
        """
        dtype = dtype or self.dtype
        return self._placed(self._named(name, shape, dtype), dtype)

    def embedding(self, name: str, *shape: int, scale: float = 1.0) -> Tensor:
        """Return an embedding, multiplied by `scale` and rounded.

        The result is cached unless the file holds the same tensor.

        Args:
            name: name of the tensor.
            shape: required shape.
            scale: factor, which is rounded to the source's dtype.

        Raises:
            ModelError: the tensor is missing or has the wrong shape.
        """

        def make() -> Tensor:
            table = self.tensor(name, *shape)
            if scale == 1.0:
                return table
            # bit-identical to scaling rows after the lookup
            factor = torch.tensor(scale, dtype=self.dtype)
            # A stored tensor may be a read-only mapping of the file; others were just made.
            return table * factor if self._is_stored(name) else table.mul_(factor)

        if self.cached is None or (scale == 1.0 and self._is_stored(name)):
            return make()
        self.read.add(name)
        return self.cached.table(
            json.dumps(["embedding", name, shape, str(self.dtype), scale]), make
        )

    def _is_stored(self, name: str) -> bool:
        """Return whether the file holds a tensor in the source's dtype."""
        return False

    def integers(self, name: str, *shape: int) -> Tensor:
        """Return an integer tensor, such as token ids, in the file's dtype, on the CPU."""
        self.read.add(name)
        ids = self._load(name, shape)
        if not isinstance(ids, Tensor):
            raise ModelError(
                f"{self.where}tensor {name} must be of integers, got a quantized weight"
            )
        return ids.cpu()

    def norm(self, name: str, width: int) -> Tensor:
        """Return the weight [width] of a norm."""
        weight = self._named(name, (width,), torch.float32)
        if self.norm_offset:
            weight = weight.float() + self.norm_offset
        return self._placed(weight)

    def bias(
        self, prefix: str, parts: Sequence[str], outputs: Sequence[int], *, shard: Shard = WHOLE
    ) -> Tensor:
        """Return the bias of a projection; see `linear`."""
        named = zip(parts, outputs, strict=True)
        biases = [self.tensor(f"{prefix}{part}.bias", size) for part, size in named]
        if shard.outputs is not None:
            shards = zip(biases, shard.outputs, strict=True)
            biases = [one[rows.start : rows.stop] for one, rows in shards]
        return torch.cat(biases)

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
        shard: Shard = WHOLE,
    ) -> PackedWeight:
        """Return a packed projection.

        Args:
            prefix: name prefix of the parts.
            parts: modules whose outputs are concatenated, such as q_proj, k_proj and v_proj.
            outputs: outputs of each part.
            inputs: inputs of all parts.
            activation: activation of gated projections with two parts, gate and up: `dense.linear`
                then computes `activation(gate) * up`; see `dense.pack_weight`.
            quantization: format of this projection; None: that of the layers' dense projections. A
                weight that is quantized in the file keeps its format.
            rows: int32 [selected outputs], on the device: outputs to select; None: all.
            shard: this rank's shard. Sharding does not change the values, except that quantization
                groups formed while loading end at the shard's border.

        Raises:
            ModelError: a tensor is missing, has the wrong shape, or cannot be sharded.
        """
        names = [f"{prefix}{part}.weight" for part in parts]
        quantization = quantization or self.settings.quantization
        quantization = _OF_DENSE.get(quantization, quantization)

        def make() -> PackedWeight:
            return self._pack(names, outputs, inputs, activation, quantization, shard, rows)

        selected = None if rows is None else rows.tolist()
        what = (outputs, inputs, activation, quantization, selected, shard.key)
        return self._cached_or_made(names, *what, make=make)

    def experts(
        self,
        prefix: str,
        which: range,
        parts: Sequence[str],
        outputs: Sequence[int],
        inputs: int,
        *,
        activation: str | None = None,
        shard: Shard = WHOLE,
    ) -> PackedWeight:
        """Return a packed projection of several experts, stacked; see `moe.stack_experts`.

        Args:
            prefix: name prefix of all experts, before the expert's number.
            which: numbers of the experts.
            parts, outputs, inputs, activation, shard: as for `linear`, for each expert.
        """
        each = [[f"{prefix}{e}.{part}.weight" for part in parts] for e in which]
        quantization = self.settings.quantization
        quantization = _OF_EXPERTS.get(quantization, quantization)

        def packed(names: Sequence[str]) -> PackedWeight:
            weight = self._pack(names, outputs, inputs, activation, quantization, shard)
            if weight.input_order is not None:
                module = names[0].removesuffix(".weight")
                raise ModelError(
                    f"{self.where}tensor {module}.g_idx must be absent, or list the groups in "
                    "order: GPTQ with desc_act is not supported for experts; quantize them with "
                    "desc_act false"
                )
            return weight

        def make() -> PackedWeight:
            return moe.stack_experts((packed(one) for one in each), len(which))

        names = [name for one in each for name in one]
        what = (outputs, inputs, activation, quantization, "experts", shard.key)
        return self._cached_or_made(names, *what, make=make)

    def expert_biases(
        self,
        prefix: str,
        which: range,
        parts: Sequence[str],
        outputs: Sequence[int],
        *,
        shard: Shard = WHOLE,
    ) -> Tensor:
        """Return the biases [len(which), outputs] of a projection; see `experts`."""
        each = (self.bias(f"{prefix}{e}.", parts, outputs, shard=shard) for e in which)
        return torch.stack(list(each))

    def _pack(
        self,
        names: Sequence[str],
        outputs: Sequence[int],
        inputs: int,
        activation: str | None,
        quantization: str,
        shard: Shard,
        rows: Tensor | None = None,
    ) -> PackedWeight:
        weights = [
            self._numbers(name, (size, inputs)) for name, size in zip(names, outputs, strict=True)
        ]
        if shard.outputs is not None:
            shards = zip(weights, shard.outputs, names, strict=True)
            weights = [outputs_of(*one) for one in shards]
        rounds = quantization != "none" and isinstance(weights[0], Tensor)
        if shard.inputs is not None and not rounds:  # read the shard's inputs only
            weights = [
                inputs_of(one, shard.inputs, name) for one, name in zip(weights, names, strict=True)
            ]
        weight = fused([self._on_device(one) for one in weights], names)
        if rows is not None:
            weight = rows_of(weight, rows)
        if rounds:
            weight = self._rounded(weight, quantization, shard.inputs)
            if shard.inputs is not None:
                weight = inputs_of(weight, shard.inputs, names[0])
        return self._packed(weight, quantization, activation)

    def _packed(
        self, weight: Tensor | QuantizedWeight, quantization: str, activation: str | None
    ) -> PackedWeight:
        """Return the packed weight; subclasses may use `quantization`."""
        return dense.pack_weight(weight, activation=activation)

    def _rounded(
        self, weight: Tensor | QuantizedWeight, quantization: str, inputs: range | None
    ) -> Tensor | QuantizedWeight:
        """Quantize a weight unless it is quantized; groups end at the borders of `inputs`."""
        if not isinstance(weight, Tensor):
            return weight
        if inputs is None:
            group = 64 if weight.shape[1] % 128 else 128
        else:
            group = next((size for size in (128, 64, 32) if not len(inputs) % size), 64)
        kind = {"wint8": ("int8", 0), "wint4": ("int4", group)}[quantization]
        return quantize_weight(weight, kind=kind[0], group=kind[1])

    def ignore(self, prefix: str) -> None:
        """Mark tensors with this name prefix as read: this rank or the model does not need them."""
        self.read.update(name for name in self.names() if name.startswith(prefix))

    def _cached_or_made(
        self, names: Sequence[str], *what: Any, make: Callable[[], PackedWeight]
    ) -> PackedWeight:
        """Return the cached result of `make` for this request, or call it."""
        self.read.update(names)
        if self.cached is None:
            return make()
        return self.cached.get(json.dumps([names, str(self.dtype), *what]), make)

    def _named(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Read a tensor; dequantize a quantized weight to `dtype`."""
        self.read.add(name)
        weight = self._numbers(name, shape)
        return weight if isinstance(weight, Tensor) else dequantize_weight(weight, dtype)

    def _numbers(self, name: str, shape: tuple[int, ...]) -> Tensor | QuantizedWeight:
        """Read a weight: a float tensor or a quantized weight.

        Raises:
            ModelError: the tensor is not of a float dtype.
        """
        weight = self._load(name, shape)
        if isinstance(weight, Tensor) and not weight.is_floating_point():
            raise ModelError(f"{self.where}tensor {name} must be of floats, got {weight.dtype}")
        return weight

    def _placed(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return tensor.to(dtype or self.dtype).contiguous().to(self.device)

    def _on_device(self, weight: Tensor | QuantizedWeight) -> Tensor | QuantizedWeight:
        if isinstance(weight, Tensor):
            return self._placed(weight)
        moved: dict[str, Any] = {
            name: one.to(self.device)
            for name, one in weight._asdict().items()
            if isinstance(one, Tensor)
        }
        return weight._replace(**moved)


class Checkpoint(WeightSource):
    """Weight source for a directory, which reads tensors from its files on demand.

    Args:
        directory: directory with safetensors files or a GGUF file.
        settings: settings for reading.

    Raises:
        ModelError: a file is missing or damaged.
    """

    def __init__(self, directory: Path, settings: WeightSettings) -> None:
        super().__init__(settings)
        self._directory, self.where = directory, f"{directory}: "
        self._checkpoint = open_checkpoint(directory)
        # Only CPU weights are cached: a GPU packs weights as fast as they are read.
        if settings.cache is not None and settings.device.type == "cpu":
            files = [directory / name for name in weight_files(directory)]
            how = json.dumps(dict(self._checkpoint.settings), sort_keys=True)
            self.cached = settings.cache.of(files, how)

    def names(self) -> Set[str]:
        """Return the names of all tensors."""
        return self._checkpoint.names()

    def _is_stored(self, name: str) -> bool:
        return self._checkpoint.dtype(name) == str(self.dtype).removeprefix("torch.")

    def refuse_unread(self, prefixes: tuple[str, ...]) -> None:
        """Reject unread tensors: they belong to parts of the model that specops does not support.

        Args:
            prefixes: name prefixes to check; ignored for a GGUF file, which holds one model only.

        Raises:
            ModelError: there is an unread tensor that is not a bias of zeros.
        """
        for name in sorted(self.names() - self.read):
            is_own = self._checkpoint.is_one_model or name.startswith(prefixes)
            if not is_own or name.endswith(_NO_WEIGHTS):
                continue
            weight = self._checkpoint.load(name)
            if not name.endswith(".bias") or not isinstance(weight, Tensor) or weight.any():
                raise ModelError(f"{self._directory}: tensor {name} is not used by the model")

    def _load(self, name: str, shape: tuple[int, ...]) -> Tensor | QuantizedWeight:
        weight = self._checkpoint.load(name)
        found = weight.shape if isinstance(weight, Tensor) else weight.values.shape
        if tuple(found) != shape:
            raise ModelError(
                f"{self._directory}: tensor {name} must be {list(shape)}, got {list(found)}"
            )
        return weight


class RandomWeights(WeightSource):
    """Source of random weights, made on the device; a tensor's name determines its values.

    Matrices are scaled so that activations neither grow nor vanish with depth.
    """

    def __init__(self, settings: WeightSettings) -> None:
        super().__init__(settings)
        self._generator = torch.Generator(self.device)

    def names(self) -> Set[str]:
        """Return an empty set, although every tensor exists."""
        return frozenset()

    def norm(self, name: str, width: int) -> Tensor:
        """Return ones, the neutral weight of a norm."""
        return torch.ones(width, dtype=self.dtype, device=self.device)

    def bias(
        self, prefix: str, parts: Sequence[str], outputs: Sequence[int], *, shard: Shard = WHOLE
    ) -> Tensor:
        """Return zeros as the bias."""
        sizes = outputs if shard.outputs is None else [len(one) for one in shard.outputs]
        return torch.zeros(sum(sizes), dtype=self.dtype, device=self.device)

    def _load(self, name: str, shape: tuple[int, ...]) -> Tensor:
        weight = torch.empty(shape, dtype=self.dtype, device=self.device)
        generator = self._generator.manual_seed(zlib.crc32(name.encode(), _SEED))
        return weight.normal_(std=shape[-1] ** -0.5, generator=generator)
