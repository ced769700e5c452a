# SPDX-License-Identifier: Apache-2.0
"""Reader of LoRA adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.

Everything that would change a result and is not supported is refused by name.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from specops import dense, moe
from specops.api.errors import ModelError
from specops.checkpoints.safetensors import is_lfs_pointer
from specops.dense import PackedWeight
from specops.engine.models.adapters import (
    Adapter,
    AdapterBank,
    AdapterSite,
    LowRankPart,
    LowRankProduct,
)
from specops.engine.models.families.fields import count, flag, mapping, number
from specops.engine.models.transformer import Transformer

_CONFIG, _WEIGHTS, _PICKLE = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
)
_PREFIX = "base_model.model."  # prefix of all tensor names of PEFT
_TENSOR = re.compile(r"(.+)\.lora_([AB])\.weight")
_OF_LAYER = re.compile(r".*\blayers\.\d+\.")  # prefix of names, up to the name in a layer
_PATTERN = re.compile(r"\^?[\w.]+")  # a pattern that is a module name or its end
# Fields that are read, and fields that change no result once an adapter is trained.
_READ = {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"}
_WITHOUT_EFFECT = {
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_dropout",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
}
# Accepted values of fields that would change results, besides false, null and empty ones.
_ACCEPTED: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none",),
    # Other initializations replace the weights of the base model.
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),
}
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def read_adapter(directory: str | Path, name: str, model: Transformer, *, max_rank: int) -> Adapter:
    """Read a LoRA adapter.

    Factors in bfloat16 stay bfloat16 if the model is bfloat16; all others become float32.

    Args:
        directory: directory of the adapter.
        name: name by which requests choose it.
        model: model that the adapter changes, loaded as adaptable.
        max_rank: largest supported rank of a module.

    Raises:
        ModelError: a file is missing or damaged, the adapter does not fit the model, or it needs
            something that is not supported.
    """
    directory = Path(directory)
    try:
        config = _config_of(directory)
        tensors, digest = _tensors_of(directory, config)
        ranks = _Ranks(config, max_rank)
        bank = AdapterBank(_products(tensors, ranks, model))
        return Adapter(name=name, digest=digest, bank=bank)
    except ModelError as error:
        raise ModelError(f"adapter {name!r} of {directory}: {error}") from None


def _config_of(directory: Path) -> Mapping[str, Any]:
    """Read adapter_config.json; refuse fields that would change results."""
    try:
        text = (directory / _CONFIG).read_text(encoding="utf-8")
        config = json.loads(text)
    except OSError as error:
        raise ModelError(f"{_CONFIG} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{_CONFIG} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{_CONFIG} must be a JSON object, got {type(config).__name__}")
    if config.get("peft_type") != "LORA":
        raise ModelError(f"peft_type must be LORA, got {config.get('peft_type')!r:.60}")
    for field, value in config.items():
        if field in _READ or field in _WITHOUT_EFFECT or value in (None, False, [], {}):
            continue
        accepted = _ACCEPTED.get(field, ())
        if not any(type(value) is type(one) and value == one for one in accepted):
            name = {"use_dora": "DoRA (use_dora)"}.get(field, field)
            expected = " or ".join(map(repr, accepted)) or "absent, false or empty"
            raise ModelError(f"{name} is not supported: it must be {expected}, got {value!r:.60}")
    return config


class _Ranks:
    """Rank and scale of each module, as a configuration states them."""

    def __init__(self, config: Mapping[str, Any], max_rank: int) -> None:
        try:
            self._rank = count(config, "r")
            self._alpha = number("lora_alpha", config["lora_alpha"], or_zero=True)
        except KeyError as error:
            raise ModelError(f"{_CONFIG}: {error} is missing") from None
        self._is_rooted = flag(config, "use_rslora")
        self._max_rank = max_rank
        self._ranks, self._alphas = (
            _patterns(config, field) for field in ("rank_pattern", "alpha_pattern")
        )

    def of(self, module: str) -> tuple[int, float]:
        """Return the rank and the scale of a module."""
        key = _match(self._ranks, module)
        rank = self._rank if key is None else count(self._ranks, key)
        if rank > self._max_rank:
            raise ModelError(
                f"the rank of {module} must be at most max_lora_rank={self._max_rank}, got {rank}; "
                "raise max_lora_rank"
            )
        key = _match(self._alphas, module)
        alpha = self._alpha
        if key is not None:
            alpha = number(f"alpha_pattern.{key}", self._alphas[key], or_zero=True)
        return rank, alpha / (math.sqrt(rank) if self._is_rooted else rank)


def _patterns(config: Mapping[str, Any], field: str) -> dict[str, Any]:
    patterns = mapping(config, field)
    for key in patterns:
        if not _PATTERN.fullmatch(key):
            raise ModelError(f"{field} must have names of modules as keys, got {key!r:.60}")
    return patterns


def _match(patterns: Iterable[str], module: str) -> str | None:
    """Return the first pattern that names a module or ends its name, as PEFT does."""
    for key in patterns:
        name = key.removeprefix("^")
        if module == name or (key == name and module.endswith(f".{name}")):
            return key
    return None


def _tensors_of(
    directory: Path, config: Mapping[str, Any]
) -> tuple[dict[str, dict[str, Tensor]], str]:
    """Return the factors "A" and "B" of each module, and the digest of the adapter."""
    path = directory / _WEIGHTS
    if not path.is_file():
        hint = ""
        if (directory / _PICKLE).exists():
            hint = f"; {_PICKLE} is a pickled file, which is not read: save it as safetensors"
        raise ModelError(f"{_WEIGHTS} is missing{hint}")
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    modules: dict[str, dict[str, Tensor]] = {}
    try:
        with safe_open(path, framework="pt") as file:
            names = sorted(file.keys())
            tensors = {name: file.get_tensor(name) for name in names}
    except Exception as error:  # safetensors raises its own error type for damaged files
        if is_lfs_pointer(path):
            raise ModelError(
                f"{_WEIGHTS} is a git-lfs pointer, not the file itself; run `git lfs pull` there"
            ) from None
        raise ModelError(f"{_WEIGHTS} is not a safetensors file: {error}") from None
    for name, tensor in tensors.items():
        found = _TENSOR.fullmatch(name)
        if found is None:
            raise ModelError(
                f"tensor {name} is not supported: only lora_A and lora_B of linear modules are"
            )
        if tensor.dtype not in _DTYPES or tensor.dim() != 2:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ModelError(
                f"tensor {name} must be a matrix of bfloat16, float16 or float32, got {kind} "
                f"{list(tensor.shape)}"
            )
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy())
        modules.setdefault(found[1].removeprefix(_PREFIX), {})[found[2]] = tensor
    if not modules:
        raise ModelError(f"{_WEIGHTS} holds no tensors")
    return modules, digest.hexdigest()[:16]


def _products(
    tensors: Mapping[str, Mapping[str, Tensor]], ranks: _Ranks, model: Transformer
) -> dict[AdapterSite, LowRankProduct]:
    """Return the packed weights of an adapter by site; refuse modules without a site."""
    prefixes = sorted({place.prefix for place in model.config.places}, key=len, reverse=True)
    places: dict[str, list[tuple[AdapterSite, int]]] = {}
    for site in (site for layer in model.layers for site in layer.sites):
        for index, part in enumerate(site.parts):
            name = _relative(site.prefix + part, prefixes)
            places.setdefault(name, []).append((site, index))
    by_site: dict[AdapterSite, dict[int, str]] = {}
    for module in tensors:
        name = _relative(module, prefixes)
        if name not in places:
            parts = dict.fromkeys(_OF_LAYER.sub("", place) for place in places)
            raise ModelError(
                f"module {module} cannot be adapted; of this model, adapters may change "
                f"{', '.join(parts)} of {model.config.num_layers} layers"
            )
        for site, index in places[name]:
            if index in by_site.setdefault(site, {}):
                raise ModelError(f"module {module} has two adapters")
            by_site[site][index] = module
    return {
        site: _product(site, dict(sorted(parts.items())), tensors, ranks, model)
        for site, parts in by_site.items()
    }


def _relative(module: str, prefixes: Sequence[str]) -> str:
    """Return a module's name without the prefix of the model, which depends on its class."""
    for prefix in prefixes:
        if module.startswith(prefix):
            return module.removeprefix(prefix)
    return module


def _product(
    site: AdapterSite,
    modules: Mapping[int, str],
    tensors: Mapping[str, Mapping[str, Tensor]],
    ranks: _Ranks,
    model: Transformer,
) -> LowRankProduct:
    """Return the packed weights of an adapter for the modules of one site."""
    factors = [tensors[module] for module in modules.values()]
    is_bf16 = all(one.dtype == torch.bfloat16 for pair in factors for one in pair.values())
    dtype = torch.bfloat16 if is_bf16 and model.dtype == torch.bfloat16 else torch.float32
    firsts: list[Tensor] = []
    parts: list[LowRankPart] = []
    begin = 0
    for part, module in modules.items():
        rank, scale = ranks.of(module)
        a = _factor(tensors, module, "A", (rank, site.inputs)).to(model.device, dtype)
        b = _factor(tensors, module, "B", (site.outputs[part], rank)).to(model.device, dtype)
        if (own := site.shard.inputs) is not None:
            a = a[:, own.start : own.stop]
        columns = site.columns_of(part)
        if site.is_transposed:
            ((_, rows),) = columns
            a, b = b[rows.to(model.device)].T, a.T
            columns = [(slice(site.inputs), torch.arange(site.inputs))]
        if math.frexp(scale)[0] == 0.5:  # a power of two scales without rounding
            b, scale = b * scale, 1.0
        firsts.append(a)
        own_ranks = slice(begin, begin + rank)
        for place, rows in columns:
            packed = _stacked(b[rows.to(model.device)].contiguous())
            scales = torch.tensor([scale], device=model.device)
            parts.append(LowRankPart(packed, own_ranks, place, scales, scale != 1.0))
        begin += rank
    return LowRankProduct(_stacked(torch.cat(firsts)), parts, dtype)


def _stacked(weight: Tensor) -> PackedWeight:
    """Return the packed weight of a bank with one adapter."""
    return moe.stack_experts([dense.pack_weight(weight)], 1)


def _factor(
    tensors: Mapping[str, Mapping[str, Tensor]], module: str, factor: str, shape: tuple[int, int]
) -> Tensor:
    tensor = tensors[module].get(factor)
    if tensor is None:
        raise ModelError(f"module {module} lacks lora_{factor}")
    if tuple(tensor.shape) != shape:
        raise ModelError(
            f"lora_{factor} of {module} must be {list(shape)}, got {list(tensor.shape)}"
        )
    return tensor
