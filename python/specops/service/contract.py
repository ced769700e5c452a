# SPDX-License-Identifier: Apache-2.0
"""The execution contract: all that the bits of an engine's outputs depend on, and a digest of it.

Two engines with the same digest give a request with the same seed the same tokens and the same
bits of logprobs, as long as drafts are verified by `target_match`, the default. What is not in it
changes no bit: drafters and their settings, batches, chunks, threads, pages. Under other ways to
verify, and under forced acceptance, tokens depend on the drafts (docs/exactness.md, "The execution
contract").
"""

import contextlib
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import specops
from specops.checkpoints.directory import weight_files
from specops.engine.config import EngineConfig
from specops.engine.engine import Engine
from specops.engine.machine import LEAF_TOKENS
from specops.engine.models.weight_cache import WeightCache, digest_of_bytes

# What of an engine's configuration it depends on.
OPTIONS = (
    *("model", "device", "dtype", "kv_cache_dtype", "quantization", "quantize_head"),
    *("tensor_parallel_size", "exact_across_tp", "enable_expert_parallel"),
    *("load_format", "logprobs_mode", "json_whitespace"),
)

# Sums over the vocabulary are made of sums over so many logits, float32 as the engine's are.
_SAMPLING_LEAF_TOKENS = {"cpu": 1024, "cuda": 512}


def contract_of(engine: Engine) -> dict[str, Any]:
    """Returns what an engine's bits depend on.

    Args:
        engine: whose model's files are read, unless the weight cache remembers their digests.

    Returns:
        JSON: "specops", the version; "kernels", what was compiled and by what; "torch", the version
        that the RoPE table comes from; "device", the instruction set or the GPU; "model", the
        digest of its configuration and weights, the dtypes of weights and of keys and values, and
        how projections and the head are quantized;
        "attention_leaf_tokens", after how many tokens attention rounds; "sampling_leaf_tokens",
        after how many logits sums over the vocabulary round; "num_slices", summands of what ranks
        share; "has_whole_experts", whether those of experts are some experts' each; "logprobs_mode"
        and "json_whitespace", as configured; and "digest", of all that.
    """
    config = engine.config
    kind = engine.device.partition(":")[0]
    facts: dict[str, Any] = {
        "specops": specops.__version__,
        "kernels": specops.runtime.build_facts(),
        "torch": str(torch.__version__),  # a plain text, not torch's kind of one
        "device": _device(engine.device),
        "model": {
            "digest": _model_digest(config),
            "dtype": engine.model_dtype,
            "kv_cache_dtype": (
                engine.model_dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
            ),
            "quantization": config.quantization,
            "quantize_head": config.quantize_head,
        },
        "attention_leaf_tokens": LEAF_TOKENS[kind],
        "sampling_leaf_tokens": _SAMPLING_LEAF_TOKENS[kind],
        "num_slices": config.num_slices,
        "has_whole_experts": config.enable_expert_parallel,
        "logprobs_mode": config.logprobs_mode,
        "json_whitespace": config.json_whitespace,
    }
    return {**facts, "digest": _digest(json.dumps(facts, sort_keys=True).encode())}


def _device(name: str) -> dict[str, str]:
    if name == "cpu":
        return {"kind": "cpu", "instruction_set": specops.get_isa()}
    properties = torch.cuda.get_device_properties(name)
    capability = f"{properties.major}.{properties.minor}"
    return {"kind": "cuda", "name": properties.name, "compute_capability": capability}


def _model_digest(config: EngineConfig) -> str:
    """Of the configuration and the weights; random ones follow from the configuration."""
    directory = Path(config.model_dir)
    digests = [digest_of_bytes(directory / "config.json")]
    if config.load_format == "dummy":
        digests.append("random weights")
    else:
        digests += _digests_of([directory / name for name in weight_files(directory)], config)
    return _digest(json.dumps(digests).encode())


def _digests_of(files: Sequence[Path], config: EngineConfig) -> list[str]:
    """Of the bytes of each file: reading a large model takes longer than all else of a start."""
    cache = WeightCache.of_setting(config.weight_cache, config.weight_cache_bytes)
    if cache is not None:
        with contextlib.suppress(OSError):  # nothing can be remembered
            if (digests := cache.digests(files)) is not None:
                return digests
    return [digest_of_bytes(file) for file in files]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
