# SPDX-License-Identifier: Apache-2.0
"""Command-line options of an engine, defined once for all commands that have them.

An omitted option is absent from the settings, so that EngineConfig's default applies.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from specops.api.config import ALL_METHODS, EngineConfig
from specops.api.methods import METHODS
from specops.api.methods.checks import QUANTIZATIONS
from specops.api.speculative_config import SpeculativeConfig
from specops.cli import byte_size, shown_bytes
from specops.cli.fastdeploy import translated
from specops.cli.hub import is_name, path_of, resolved

# Titles of groups of options, as in the table of docs/server.md.
MODEL = "the model"
WEIGHTS = "packed weights on disk"
DEVICES = "where and how it runs"
PROCESSES = "several processes"
CACHE = "batches and the KV cache"
DRAFTS = "drafts"
DEFAULTS = "defaults of requests"
ADAPTERS = "LoRA adapters"
SERVICE = "the service"
LIMITS = "limits"


def group(parser: argparse.ArgumentParser, title: str) -> argparse._ArgumentGroup:
    """Return the parser's group of options with this title; add the group if there is none."""
    groups = (one for one in parser._action_groups if one.title == title)
    return next(groups, None) or parser.add_argument_group(title)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that select the model, its dtypes and its device."""
    add = group(parser, MODEL).add_argument
    add(
        "--model",
        metavar="PATH",
        help="Hugging Face directory, GGUF file, name ORG/NAME of a model of the Hub, or "
        "ORG/NAME:QUANTIZATION for one of its GGUF files, such as ORG/NAME:Q4_K_M (default: the "
        "bundled model)",
    )
    add(
        "--revision",
        metavar="NAME",
        help="branch, tag or commit of a model of the Hub (default: its main branch)",
    )
    add(
        "--dtype",
        type=str.lower,
        choices=("auto", "bfloat16", "float32"),
        help="dtype of activations and unquantized weights (default: the checkpoint's)",
    )
    add(
        "--kv-cache-dtype",
        type=str.lower,
        choices=("auto", "int8", "fp8_e4m3"),
        help="dtype of the KV cache; 8 bits take half the memory (default: the model's)",
    )
    add(
        "--quantization",
        type=str.lower,
        choices=QUANTIZATIONS,
        help="quantize the weights of projections while loading: to 8 bits, to 4, or experts to 4 "
        "and the rest to 8 (default: none)",
    )
    add(
        "--quantize-head",
        type=str.lower,
        choices=QUANTIZATIONS,
        help="quantize the weights of the LM head while loading (default: none)",
    )
    add = group(parser, WEIGHTS).add_argument
    add(
        "--weight-cache",
        metavar="DIR",
        help="directory that stores a CPU's packed weights, so that the next start takes seconds, "
        "or none (default: the user's cache, for GGUF files and checkpoints of at least 256 MiB)",
    )
    add(
        "--weight-cache-bytes",
        type=byte_size,
        metavar="SIZE",
        help="maximum size of the weight cache; the least recently used files are removed "
        f"(default: {shown_bytes(EngineConfig.weight_cache_bytes)})",
    )
    add = group(parser, DEVICES).add_argument
    add(
        "--device",
        metavar="NAME",
        help="auto, cpu, cuda or cuda:N (default: auto, which prefers a GPU)",
    )
    add(
        "--num-threads",
        type=int,
        metavar="N",
        help="number of CPU threads (default: all usable CPUs)",
    )
    add(
        "--isa",
        metavar="NAME",
        help="instruction set of the CPU kernels: portable, avx2, avx512, avx512_bf16, amx, neon "
        "or neon_bf16 (default: the best that this CPU and --numerics permit)",
    )
    add(
        "--numerics",
        type=str.lower,
        choices=("native", "portable"),
        help="native: the fastest kernels of this CPU; portable: kernels whose results have the "
        "same bits on every CPU (default: native)",
    )


def add_draft_lengths(parser: argparse.ArgumentParser) -> None:
    """Add the options that set the number of drafts."""
    add = group(parser, DRAFTS).add_argument
    add(
        "--num-speculative-tokens",
        type=int,
        metavar="K",
        help="number of drafts per step (default: 4)",
    )
    add(
        "--num-model-steps",
        type=int,
        metavar="N",
        help="number of drafts from MTP modules (default: all, or 1 if another method continues "
        "them)",
    )


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add every option of an engine that serves requests."""
    add_model_options(parser)
    group(parser, SERVICE).add_argument(
        "--served-model-name",
        nargs="+",
        action="extend",
        metavar="NAME",
        help="names of the model in the API; requests may use any of them, and answers have the "
        "first (default: the directory's name)",
    )
    add = group(parser, DRAFTS).add_argument
    add(
        "--speculative-config",
        metavar="JSON",
        help="speculative configuration of requests that do not set their own (default: "
        '\'{"method": "ngram", "num_speculative_tokens": 4}\')',
    )
    add(
        "--methods",
        nargs="+",
        action="extend",
        metavar="NAME",
        help="further methods with weights that requests may choose besides the one of "
        "--speculative-config, or all that the model supports (default: all for the bundled "
        "model, none for another)",
    )
    add(
        "--suffix-corpus",
        metavar="PATH",
        help="text file, or folder of text files, from which suffix decoding drafts",
    )
    add(
        "--suffix-cache",
        metavar="FILE",
        help="file in which suffix decoding stores the responses that it drafts from: loaded at "
        "the start if it exists, saved at the end and every few minutes",
    )
    group(parser, DEVICES).add_argument(
        "--enforce-eager",
        action="store_true",
        default=None,
        help="do not use CUDA graphs: launch every kernel separately",
    )
    group(parser, MODEL).add_argument(
        "--load-format",
        type=str.lower,
        choices=("auto", "dummy"),
        help="weights to load; dummy creates random weights for measurements (default: the "
        "checkpoint's)",
    )
    add = group(parser, DEFAULTS).add_argument
    add(
        "--logprobs-mode",
        type=str.lower,
        choices=("raw_logprobs", "processed_logprobs"),
        help="logprobs of the model's logits (raw), or of the distribution that is sampled "
        "(default: raw)",
    )
    add(
        "--json-whitespace",
        type=str.lower,
        choices=("bounded", "any", "none"),
        help="whitespace between the tokens of constrained JSON: at most a space, or a line break "
        "and indentation (bounded); any amount; or none (default: bounded)",
    )
    add(
        "--seed",
        type=int,
        metavar="N",
        help="seed from which the seeds of requests without one are drawn (default: a random one)",
    )
    _add_ranks(parser)
    _add_sizes(parser)


def add_adapter_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of an engine that loads LoRA adapters."""
    add = group(parser, ADAPTERS).add_argument
    add(
        "--enable-lora",
        action="store_true",
        default=None,
        help="let requests choose LoRA adapters (default: if some are loaded or may be)",
    )
    add(
        "--lora-modules",
        nargs="+",
        action="extend",
        type=lora_module,
        metavar="NAME=PATH",
        help="LoRA adapters to load, as NAME=PATH of a directory in PEFT's format or as JSON "
        '\'{"name": "NAME", "path": "PATH"}\'; requests choose one by its name as their model',
    )
    add(
        "--max-lora-rank",
        type=int,
        metavar="N",
        help=f"largest rank of an adapter (default: {EngineConfig.max_lora_rank})",
    )
    add(
        "--max-loras",
        type=int,
        metavar="N",
        help="maximum number of loaded adapters; a step may use all of them (default: "
        f"{EngineConfig.max_loras})",
    )


def lora_module(text: str) -> tuple[str, str]:
    """Parse an adapter of `--lora-modules`: NAME=PATH, or vLLM's JSON form.

    Raises:
        argparse.ArgumentTypeError: `text` is neither.
    """
    name, _, path = text.partition("=")
    if text.startswith("{"):
        try:
            fields = json.loads(text)
        except ValueError:
            fields = {}
        fields.pop("base_model_name", None)  # the server has one model
        name, path = (fields.pop(key, None) for key in ("name", "path"))
        if fields or not isinstance(name, str) or not isinstance(path, str):
            name = path = ""
    if not name or not path:
        raise argparse.ArgumentTypeError(
            f'must be NAME=PATH or {{"name": "NAME", "path": "PATH"}}, got {text}'
        )
    return name, path


def _add_ranks(parser: argparse.ArgumentParser) -> None:
    add = group(parser, PROCESSES).add_argument
    add(
        "--tensor-parallel-size",
        type=int,
        metavar="N",
        help="number of processes over which the model is sharded (default: 1)",
    )
    add(
        "--exact-across-tp",
        type=int,
        metavar="N",
        help="number of virtual tensor-parallel ranks, a power of two: engines with the same "
        "number give the same bits (default: --tensor-parallel-size)",
    )
    add(
        "--enable-expert-parallel",
        action="store_true",
        default=None,
        help="give each tensor-parallel rank whole experts (default: a shard of every expert)",
    )


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    default, add = EngineConfig, group(parser, CACHE).add_argument
    group(parser, MODEL).add_argument(
        "--max-model-len",
        type=int,
        metavar="N",
        help="maximum number of tokens of a prompt and its output together (default: the model's)",
    )
    add(
        "--max-num-seqs",
        type=int,
        metavar="N",
        help=f"number of requests that run at a time (default: {default.max_num_seqs})",
    )
    add(
        "--max-num-batched-tokens",
        type=int,
        metavar="N",
        help=f"number of rows per step (default: {default.max_num_batched_tokens}); prompts get at "
        "most 128 of them on a CPU, and 2,048 on a GPU",
    )
    add(
        "--page-size",
        type=int,
        choices=(16, 32, 64),
        help=f"tokens per KV page (default: {default.page_size})",
    )
    add(
        "--num-pages",
        type=int,
        metavar="N",
        help="number of KV pages (default: enough for --max-num-seqs requests)",
    )
    add(
        "--state-cache-bytes",
        type=byte_size,
        metavar="SIZE",
        help="memory for the states of prefixes, for a model with linear attention (default: a "
        "quarter of the size of the KV cache)",
    )
    add(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="share the pages of equal prefixes (default: yes)",
    )
    group(parser, DEVICES).add_argument(
        "--enable-cascade-attention",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="read pages that several requests share only once (default: yes)",
    )
    group(parser, LIMITS).add_argument(
        "--max-waiting",
        type=int,
        metavar="N",
        help="number of requests that may wait; further ones are refused with status 429 "
        f"(default: {default.max_waiting})",
    )


def plain_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that were set, in the form `EngineConfig.from_plain` takes.

    Args:
        args: result of a parser with all or some of these options.

    Raises:
        ValueError: the model or a drafter does not exist.
    """
    settings = {
        field.name: getattr(args, field.name)
        for field in fields(EngineConfig)
        if getattr(args, field.name, None) is not None
    }
    if "speculative_config" in settings:
        settings["speculative_config"] = translated(settings["speculative_config"])
    if "served_model_name" in settings:
        if not all(name.strip() for name in settings["served_model_name"]):
            raise ValueError("--served-model-name must hold names, got an empty one")
        settings["served_model_name"] = settings["served_model_name"][0]
    name, revision = settings.get("model"), getattr(args, "revision", None)
    if name is not None and is_name(name):
        settings["model"] = path_of(name, revision)
        settings.setdefault("served_model_name", name)  # the cached directory's name is a digest
    elif revision is not None:
        raise ValueError(
            f"--revision needs a model of the Hugging Face Hub, ORG/NAME, got {name or 'none'}"
        )
    if settings.get("speculative_config") is not None:
        settings["speculative_config"] = resolved(settings["speculative_config"])
    return settings


def require_effective_drafts(settings: Mapping[str, Any]) -> None:
    """Refuse a field of the speculative configuration that has no effect.

    Args:
        settings: settings of a server, as returned by `plain_settings`.

    Raises:
        ValueError: a field has no effect, or the configuration is invalid.
    """
    if (text := settings.get("speculative_config")) is not None:
        config = SpeculativeConfig.from_json(text)
        loaded = settings.get("methods") or ()
        config.require_effect(json.loads(text), METHODS if ALL_METHODS in loaded else loaded)


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that were set, as keyword arguments of EngineConfig.

    Args:
        args: result of a parser with all or some of these options.

    Raises:
        ValueError: the model does not exist, or the speculative configuration is invalid.
    """
    settings = plain_settings(args)
    if settings.get("speculative_config") is not None:
        text = settings["speculative_config"]
        settings["speculative_config"] = SpeculativeConfig.from_json(text)
    return settings
