# SPDX-License-Identifier: Apache-2.0
"""Loads a Hugging Face directory: config.json and safetensors files, into packed weights."""

import json
import re
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from specops import dense
from specops.engine.errors import ModelError
from specops.engine.models.config import ModelConfig
from specops.engine.models.dry_run import dry_run
from specops.engine.models.transformer import Layer, Transformer

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_KV_CACHE_DTYPES = {"auto": None, "int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}

# Arguments of the ops that config.json calls otherwise.
_FIELD_OF_ARGUMENT = {
    "num_qo_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "rotary_dim": "head_dim * partial_rotary_factor",
    "theta": "rope_theta",
}
_NARROW = 16  # sizes that no op restricts, in the dry run


class Source(Protocol):
    """Where the tensors of a model come from."""

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns one tensor, on the device it is meant for."""


class Checkpoint:
    """The tensors of a directory by name, read on demand from the files that hold them."""

    def __init__(self, directory: Path, device: torch.device, stack: ExitStack) -> None:
        self._directory = directory
        self._device = device
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

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns one tensor in `dtype`; its presence and shape are checked."""
        if name not in self._where:
            raise ModelError(f"{self._directory}: tensor {name} is missing from the checkpoint")
        tensor: Tensor = self._where[name].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{self._directory}: tensor {name} must be {list(shape)}, got {list(tensor.shape)}"
            )
        return tensor.to(dtype).contiguous().to(self._device)


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


class RandomWeights:
    """Weights in the shapes of a model, made on the device from a fixed seed.

    Matrices are scaled so that activations neither grow nor vanish with depth.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._generator = torch.Generator(device).manual_seed(0)

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns normal numbers for a matrix, ones for a norm, zeros for a bias."""
        if name.endswith(".bias"):
            return torch.zeros(shape, dtype=dtype, device=self._device)
        if len(shape) == 1:
            return torch.ones(shape, dtype=dtype, device=self._device)
        weight = torch.empty(shape, dtype=dtype, device=self._device)
        return weight.normal_(std=shape[1] ** -0.5, generator=self._generator)


def load_model(
    directory: str | Path,
    *,
    dtype: str = "auto",
    max_model_len: int | None = None,
    device: torch.device | str = "cpu",
    load_format: str = "auto",
    kv_cache_dtype: str = "auto",
) -> Transformer:
    """Loads a Llama, Mistral, Qwen2, Qwen3, MiMo or dense GLM-4.5 checkpoint.

    Args:
        directory: a Hugging Face directory with config.json and safetensors files.
        dtype: "bfloat16", "float32", or "auto" for the checkpoint's own.
        max_model_len: positions to prepare; the model's own limit when absent.
        device: where the weights live.
        load_format: "auto"; or "dummy" for random weights, which need no file but config.json.
        kv_cache_dtype: "auto" for that of the weights, "int8" or "fp8_e4m3".

    Raises:
        ModelError: a file or tensor is missing, damaged or misshapen, the kind is unsupported, or
            an op does not run the model's shapes.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise ModelError(f"{directory}: no such directory")
    config = ModelConfig.from_dir(directory)
    file = directory / "config.json"
    chosen = config.dtype if dtype == "auto" else dtype
    if chosen not in _DTYPES:
        where = f"{file}: " if dtype == "auto" else ""
        raise ModelError(
            f"{where}dtype must be bfloat16 or float32, got {chosen}; pass dtype to convert the "
            "checkpoint"
        )
    if max_model_len is not None and max_model_len > config.max_model_len:
        raise ModelError(
            f"max_model_len must be at most the model's {config.max_model_len}, got {max_model_len}"
        )
    if kv_cache_dtype not in _KV_CACHE_DTYPES:
        raise ModelError(
            f"kv_cache_dtype must be {', '.join(_KV_CACHE_DTYPES)}, got {kv_cache_dtype}"
        )
    kind, kv_kind = _DTYPES[chosen], _KV_CACHE_DTYPES[kv_cache_dtype]
    device = torch.device(device)
    _refuse_what_ops_refuse(config, kind, kv_kind, device, file)
    with ExitStack() as stack:
        source: Source = (
            RandomWeights(device)
            if load_format == "dummy"
            else Checkpoint(directory, device, stack)
        )
        return _build(config, source, kind, kv_kind, max_model_len or config.max_model_len)


def _build(
    config: ModelConfig,
    source: Source,
    dtype: torch.dtype,
    kv_cache_dtype: torch.dtype | None,
    max_model_len: int,
) -> Transformer:
    hidden, vocab = config.hidden_size, config.vocab_size
    embedding = source.get("model.embed_tokens.weight", (vocab, hidden), dtype)
    head = embedding
    if not config.tie_word_embeddings:
        head = source.get("lm_head.weight", (vocab, hidden), dtype)
    return Transformer(
        config=config,
        dtype=dtype,
        max_model_len=max_model_len,
        embedding=embedding,
        layers=list(_layers(config, source, dtype)),
        final_norm=source.get("model.norm.weight", (hidden,), dtype),
        lm_head=dense.pack_weight(head),
        kv_cache_dtype=kv_cache_dtype,
    )


def _refuse_what_ops_refuse(
    config: ModelConfig,
    dtype: torch.dtype,
    kv_cache_dtype: torch.dtype | None,
    device: torch.device,
    file: Path,
) -> None:
    """Runs a narrow model with the heads, windows and positions of `config`, before it is read."""
    windows = tuple(dict.fromkeys(config.sliding_windows))  # one layer for each
    narrow = replace(
        config,
        vocab_size=_NARROW,
        hidden_size=_NARROW,
        intermediate_size=_NARROW,
        num_layers=len(windows),
        sliding_windows=windows,
    )
    try:
        dry_run(_build(narrow, RandomWeights(device), dtype, kv_cache_dtype, max_model_len=1))
    except ValueError as error:
        op, _, sentence = str(error).partition(": ")
        sentence = re.sub(r"\w+", lambda word: _FIELD_OF_ARGUMENT.get(word[0], word[0]), sentence)
        raise ModelError(f"{file}: {sentence} ({op})") from error


def _layers(config: ModelConfig, checkpoint: Source, dtype: torch.dtype) -> Iterator[Layer]:
    for index in range(config.num_layers):
        window = config.sliding_windows[index]
        yield load_layer(config, checkpoint, f"model.layers.{index}.", dtype, window)


def load_layer(
    config: ModelConfig,
    checkpoint: Source,
    prefix: str,
    dtype: torch.dtype,
    sliding_window: int | None,
) -> Layer:
    """Reads the decoder layer whose tensors begin with `prefix`, and packs its projections."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size = config.num_qo_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim

    def get(name: str, *shape: int) -> Tensor:
        return checkpoint.get(prefix + name, shape, dtype)

    projections = (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size))
    qkv = torch.cat([get(f"self_attn.{name}.weight", size, hidden) for name, size in projections])
    gate_up = torch.cat([get(f"mlp.{n}.weight", inner, hidden) for n in ("gate_proj", "up_proj")])
    qkv_bias = gate_up_bias = None
    if config.qkv_bias:
        qkv_bias = torch.cat([get(f"self_attn.{name}.bias", size) for name, size in projections])
    if config.mlp_bias:
        gate_up_bias = torch.cat([get(f"mlp.{n}.bias", inner) for n in ("gate_proj", "up_proj")])
    return Layer(
        input_norm=get("input_layernorm.weight", hidden),
        qkv=dense.pack_weight(qkv),
        qkv_bias=qkv_bias,
        q_norm=get("self_attn.q_norm.weight", config.head_dim) if config.qk_norm else None,
        k_norm=get("self_attn.k_norm.weight", config.head_dim) if config.qk_norm else None,
        o=dense.pack_weight(get("self_attn.o_proj.weight", hidden, q_size)),
        o_bias=get("self_attn.o_proj.bias", hidden) if config.o_bias else None,
        post_norm=get("post_attention_layernorm.weight", hidden),
        gate_up=dense.pack_weight(gate_up, gate_up=True),
        gate_up_bias=gate_up_bias,
        down=dense.pack_weight(get("mlp.down_proj.weight", hidden, inner)),
        down_bias=get("mlp.down_proj.bias", hidden) if config.mlp_bias else None,
        sliding_window=sliding_window,
    )
