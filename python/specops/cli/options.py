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
from specops.cli.fastdeploy import translated
from specops.cli.hub import directory_of, is_name, resolved


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the model: which one, its dtypes, its device."""
    add = parser.add_argument
    add(
        "--model",
        metavar="PATH",
        help="Hugging Face directory, GGUF file, or ORG/NAME of a model of the Hub "
        "(default: the bundled model)",
    )
    add(
        "--device",
        metavar="NAME",
        help="auto, cpu, cuda or cuda:N (default: auto, a GPU where one can be used)",
    )
    add(
        "--dtype",
        type=str.lower,
        choices=("auto", "bfloat16", "float32"),
        help="(default: the checkpoint's)",
    )
    add(
        "--kv-cache-dtype",
        type=str.lower,
        choices=("auto", "int8", "fp8_e4m3"),
        help="of keys and values: 8 bits take half the memory (default: the model's)",
    )
    add(
        "--quantization",
        type=str.lower,
        choices=QUANTIZATIONS,
        help="of projections, as they are loaded: 8 bits a number, 4, or 4 of experts and 8 of "
        "all else (default: none)",
    )
    add(
        "--quantize-head",
        type=str.lower,
        choices=QUANTIZATIONS,
        help="of the LM head, as it is loaded (default: none)",
    )
    add(
        "--weight-cache",
        metavar="DIR",
        help="where a CPU's packed weights are kept, so that the next start takes seconds, or none "
        "(default: the user's cache, for checkpoints of 256 MiB and more)",
    )
    add(
        "--weight-cache-bytes",
        type=int,
        metavar="N",
        help="most bytes of it; what was not used for longest makes room "
        f"(default: {EngineConfig.weight_cache_bytes})",
    )
    add("--num-threads", type=int, metavar="N", help="CPU threads (default: all usable)")


def add_draft_lengths(parser: argparse.ArgumentParser) -> None:
    """Add the options that set the number of drafts."""
    add = parser.add_argument
    add("--num-speculative-tokens", type=int, metavar="K", help="drafts of a step (default: 4)")
    add(
        "--num-model-steps",
        type=int,
        metavar="N",
        help="drafts of MTP modules (default: all, and 1 where something else continues them)",
    )


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add every option of an engine that serves requests."""
    add = parser.add_argument
    add_model_options(parser)
    add("--served-model-name", metavar="NAME", help="name clients use (default: the directory's)")
    add(
        "--speculative-config",
        metavar="JSON",
        help='for requests that do not choose, e.g. \'{"method": "ngram", '
        '"num_speculative_tokens": 4}\' (default: this one)',
    )
    add(
        "--methods",
        nargs="+",
        action="extend",
        metavar="NAME",
        help="methods with weights that requests may choose beside those of --speculative-config, "
        "or all that the model can run (default: all of the bundled model, none of another)",
    )
    add(
        "--enforce-eager",
        action="store_true",
        default=None,
        help="on a GPU: no CUDA graphs, every kernel is launched on its own",
    )
    add(
        "--load-format",
        type=str.lower,
        choices=("auto", "dummy"),
        help="dummy makes random weights for measurements (default: the checkpoint's)",
    )
    add(
        "--logprobs-mode",
        type=str.lower,
        choices=("raw_logprobs", "processed_logprobs"),
        help="logprobs of the model's logits, or of the sampled distribution (default: raw)",
    )
    add(
        "--json-whitespace",
        type=str.lower,
        choices=("bounded", "any", "none"),
        help="between the tokens of constrained JSON: at most a space, or a line end and "
        "indentation; any amount; or none (default: bounded)",
    )
    _add_ranks(parser)
    _add_sizes(parser)
    add("--seed", type=int, metavar="N", help="makes the seeds of requests without one repeatable")
    add(
        "--suffix-corpus",
        metavar="PATH",
        help="text file, or folder of them, that suffix decoding drafts from",
    )
    add(
        "--suffix-cache",
        metavar="FILE",
        help="where suffix decoding keeps the responses it drafts from: loaded at the start if it "
        "is there, saved at the end and every few minutes",
    )


def _add_ranks(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--tensor-parallel-size",
        type=int,
        metavar="N",
        help="processes that compute the model together, each with a share of it (default: 1)",
    )
    add(
        "--exact-across-tp",
        type=int,
        metavar="N",
        help="give the bits of N of these, however many there are: a power of two (default: "
        "those of as many as there are)",
    )
    add(
        "--enable-expert-parallel",
        action="store_true",
        default=None,
        help="of these, each has whole experts rather than a part of each (default: a part)",
    )


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    default, add = EngineConfig, parser.add_argument
    add("--max-model-len", type=int, metavar="N", help="longest prompt and output together")
    add("--max-num-seqs", type=int, metavar="N", help=f"(default: {default.max_num_seqs})")
    add(
        "--max-num-batched-tokens",
        type=int,
        metavar="N",
        help=f"rows of one step (default: {default.max_num_batched_tokens}); prompts get at most "
        "128 of them on a CPU, and 2,048 on a GPU",
    )
    add("--page-size", type=int, choices=(16, 32, 64), help=f"(default: {default.page_size})")
    add("--num-pages", type=int, metavar="N", help="KV pages (default: enough for the requests)")
    add(
        "--state-cache-bytes",
        type=int,
        metavar="N",
        help="for states of prefixes, of a model with linear attention (default: a quarter of what "
        "the cache takes)",
    )
    add(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="share the pages of equal prefixes (default: yes)",
    )
    add(
        "--enable-cascade-attention",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="read the pages that requests share once for all of them (default: yes)",
    )
    add(
        "--max-waiting",
        type=int,
        metavar="N",
        help=f"requests that may wait, further ones get 429 (default: {default.max_waiting})",
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
    name = settings.get("model")
    if name is not None and is_name(name):
        settings["model"] = directory_of(name)
        settings.setdefault("served_model_name", name)  # the directory's name is a digest
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
