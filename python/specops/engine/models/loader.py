# SPDX-License-Identifier: Apache-2.0
"""Loader of Hugging Face directories (config.json, safetensors files) into packed weights."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from specops.api.errors import ModelError
from specops.api.methods.checks import QUANTIZATIONS
from specops.checkpoints.directory import open_checkpoint, weight_files
from specops.engine.models.blocks.block import BlockLoader, RopeTables
from specops.engine.models.blocks.per_layer import load_per_layer_embeddings
from specops.engine.models.config import ModelConfig, Place
from specops.engine.models.dry_run import dry_run
from specops.engine.models.families import read_model_config
from specops.engine.models.loading import log_loading
from specops.engine.models.shards import Shard, Sharding
from specops.engine.models.transformer import Transformer
from specops.engine.models.weight_cache import WeightCache
from specops.engine.models.weights import Checkpoint, WeightSettings, WeightSource
from specops.engine.parallel.ranks import ALONE, Ranks

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_KV_CACHE_DTYPES = {"auto": None, "int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}

# Names in config.json of op arguments, for error messages.
_FIELD_OF_ARGUMENT = {
    "num_qo_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "rotary_dim": "head_dim * partial_rotary_factor",
    "theta": "rope_theta",
}
_NARROW = 16  # value of sizes that no op restricts, in the dry run
_LARGEST_PAGE = 64  # tokens per page


def load_model(
    directory: str | Path,
    *,
    dtype: str = "auto",
    max_model_len: int | None = None,
    device: torch.device | str = "cpu",
    load_format: str = "auto",
    kv_cache_dtype: str = "auto",
    quantization: str = "none",
    quantize_head: str = "none",
    weight_cache: WeightCache | None = None,
    ranks: Ranks = ALONE,
    is_adaptable: bool = False,
) -> Transformer:
    """Load a checkpoint of any supported model family.

    Args:
        directory: a Hugging Face directory with config.json and safetensors files, whose weights
            may be quantized; or a directory made from a GGUF file.
        dtype: "bfloat16", "float32", or "auto" for the checkpoint's dtype.
        max_model_len: number of positions to support; None: the model's limit.
        device: device of the weights.
        load_format: "auto"; or "dummy" for random weights, which need no file but config.json.
        kv_cache_dtype: "int8", "fp8_e4m3", or "auto" for the dtype of the weights.
        quantization: format to which the layers' projections are quantized, unless the file has
            quantized them; see `WeightSettings`.
        quantize_head: the same for the LM head. A tied embedding is not quantized.
        weight_cache: cache of packed weights; None: no cache.
        ranks: tensor-parallel ranks over which the model is sharded; loads this rank's shard.
        is_adaptable: whether requests may use LoRA adapters.

    Raises:
        ModelError: a file or tensor is missing, damaged or misshapen, the model is unsupported, an
            op does not support its shapes, or it cannot be sharded over the ranks.
    """
    directory = Path(directory)
    if not directory.is_dir():
        if directory.exists():
            raise ModelError(
                f"model must be a Hugging Face directory or a .gguf file, got the file {directory}"
            )
        raise ModelError(f"{directory}: no such directory")
    config = read_model_config(directory)
    file = directory / "config.json"
    _check_experts(config, ranks)
    if max_model_len is not None and max_model_len > config.max_model_len:
        raise ModelError(
            f"max_model_len must be at most the model's {config.max_model_len}, got {max_model_len}"
        )
    _check_choice("kv_cache_dtype", kv_cache_dtype, tuple(_KV_CACHE_DTYPES))
    _check_choice("quantization", quantization, QUANTIZATIONS)
    _check_choice("quantize_head", quantize_head, QUANTIZATIONS)
    is_mixed = quantization == "wint4" and config.wint4_is_mixed
    if config.dtype is None and dtype == "auto" and load_format != "dummy":
        config = replace(config, dtype=_stored_dtype(config, directory))
    kind = _dtype_of(config, dtype, file)
    kv_kind = _KV_CACHE_DTYPES[kv_cache_dtype] or kind
    settings = WeightSettings(
        dtype=kind,
        device=torch.device(device),
        load_format=load_format,
        quantization="mix_quant" if is_mixed else quantization,
        quantize_head=quantize_head,
        cache=weight_cache,
    )
    _refuse_what_ops_refuse(config, settings, kv_kind, file)
    source = settings.open(directory)
    loaded = None
    if ranks.rank == 0 and load_format != "dummy":
        num_bytes = sum((directory / name).stat().st_size for name in weight_files(directory))
        loaded = log_loading(directory, num_bytes, str(kind).removeprefix("torch."))
    model = build(
        config, source, kv_kind, max_model_len or config.max_model_len, ranks, loaded, is_adaptable
    )
    _refuse_unread(config, source)
    return model


def _check_experts(config: ModelConfig, ranks: Ranks) -> None:
    has_experts = any(layer.mlp.has_experts for layer in config.layers)
    if ranks.has_whole_experts and not has_experts:
        raise ModelError("enable_expert_parallel must be off for a model without experts, got on")


def _refuse_unread(config: ModelConfig, source: WeightSource) -> None:
    """Reject layer tensors in the checkpoint that the model does not use."""
    if isinstance(source, Checkpoint):
        prefix = place_of(config, source).prefix
        source.refuse_unread(tuple(f"{prefix}layers.{i}." for i in range(config.num_layers)))


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        *most, last = choices
        raise ModelError(f"{name} must be {', '.join(most)} or {last}, got {value}")


def _dtype_of(config: ModelConfig, dtype: str, file: Path) -> torch.dtype:
    """Return the dtype of weights and states. Errors name `file`, which is config.json."""
    chosen = (config.dtype or "float32") if dtype == "auto" else dtype
    if not isinstance(chosen, str) or chosen not in _DTYPES:
        where = f"{file}: " if dtype == "auto" else ""
        raise ModelError(
            f"{where}dtype must be bfloat16 or float32, got {chosen!s:.60}; pass dtype to convert "
            "the checkpoint"
        )
    return _DTYPES[chosen]


def _stored_dtype(config: ModelConfig, directory: Path) -> str | None:
    """Return the dtype of the embedding in the checkpoint, or None if it is quantized or missing.

    If config.json names no dtype, transformers uses the dtype of the tensors as well.
    """
    checkpoint = open_checkpoint(directory)
    names = (f"{place.embedding_name}.weight" for place in config.places)
    return next((checkpoint.dtype(name) for name in names if name in checkpoint.names()), None)


def head_name(config: ModelConfig, source: WeightSource) -> str:
    """Return the name of the LM head, without ".weight".

    If config.json ties the head to the embedding but the checkpoint has a separate head, the
    separate head is used, as in transformers.
    """
    place = place_of(config, source)
    is_tied = config.tie_word_embeddings and f"{place.head}.weight" not in source.names()
    return place.embedding_name if is_tied else place.head


def place_of(config: ModelConfig, source: WeightSource) -> Place:
    """Return the place whose embedding is in the source, or the family's first place."""
    names = source.names()
    found = [one for one in config.places if f"{one.embedding_name}.weight" in names]
    return found[0] if found else config.places[0]


def build(
    config: ModelConfig,
    source: WeightSource,
    kv_dtype: torch.dtype,
    max_model_len: int,
    ranks: Ranks = ALONE,
    loaded: Callable[[int, int], None] | None = None,
    is_adaptable: bool = False,
) -> Transformer:
    """Build a model from its config and weights.

    Args:
        config: the model's configuration.
        source: source of the weights.
        kv_dtype: dtype of keys and values on pages.
        max_model_len: number of positions to support.
        ranks: tensor-parallel ranks over which the model is sharded.
        loaded: called after each layer with the number of loaded layers and of all layers.
        is_adaptable: whether LoRA adapters may change the layers.

    Raises:
        ModelError: a tensor is missing, has the wrong shape, or cannot be sharded.
        ValueError: an op rejects a size.
    """
    # Round up to whole pages: drafting modules may run past the end of the longest text.
    max_positions = -(-max_model_len // _LARGEST_PAGE) * _LARGEST_PAGE
    source.norm_offset = config.norm_offset
    loader = BlockLoader(
        source=source,
        hidden_size=config.hidden_size,
        norm_eps=config.rms_norm_eps,
        kv_dtype=kv_dtype,
        ropes=RopeTables(max_positions, source.device, source.cached),
        ranks=ranks,
        is_adaptable=is_adaptable,
    )
    place = place_of(config, source)
    shape = (config.vocab_size, config.hidden_size)
    name = f"{place.embedding_name}.weight"
    embedding = source.embedding(name, *shape, scale=config.embedding_scale)
    lm_head = source.linear(
        "",
        (head_name(config, source),),
        shape[:1],
        config.hidden_size,
        quantization=source.settings.quantize_head,
        shard=Shard(outputs=(Sharding(ranks).of_vocabulary(config.vocab_size),)),
    )
    per_layer = None
    if config.per_layer_tokens:
        width = config.layers[0].per_layer_width
        per_layer = load_per_layer_embeddings(
            loader, place.prefix, config.per_layer_tokens, config.num_layers, width
        )
    layers = []
    for index, layer in enumerate(config.layers):
        layers.append(layer.load(loader, f"{place.prefix}layers.{index}."))
        if loaded is not None:
            loaded(index + 1, config.num_layers)
    return Transformer(
        config=config,
        max_model_len=max_model_len,
        embedding=embedding,
        layers=layers,
        final_norm=loader.norm(place.prefix + place.norm),
        lm_head=lm_head,
        kv_dtype=kv_dtype,
        settings=source.settings,
        cached=source.cached,
        ropes=loader.ropes,
        per_layer=per_layer,
        ranks=ranks,
    )


def _refuse_what_ops_refuse(
    config: ModelConfig, settings: WeightSettings, kv_dtype: torch.dtype, file: Path
) -> None:
    """Run a narrow dummy model with the heads, windows and positions of `config`.

    So unsupported sizes are found before any weight is read.

    Raises:
        ModelError: an op rejects a size.
    """
    try:
        source = replace(settings, load_format="dummy").open(file.parent)
        dry_run(build(config.narrowed(_NARROW), source, kv_dtype, max_model_len=1))
    except ValueError as error:
        op, _, sentence = str(error).partition(": ")
        sentence = re.sub(r"\w+", lambda word: _FIELD_OF_ARGUMENT.get(word[0], word[0]), sentence)
        raise ModelError(f"{file}: {sentence:.300} ({op})") from error
