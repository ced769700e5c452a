# SPDX-License-Identifier: Apache-2.0
"""The execution contract: all that the bits of an engine's outputs depend on, and a digest of it.

Two engines with the same digest give a request with the same seed the same tokens and the same
bits of logprobs, as long as drafts are verified by `target_match`, the default. What is not in it
changes no bit: drafters and their settings, batches, chunks, threads, pages. Under other ways to
verify, and under forced acceptance, tokens depend on the drafts (docs/exactness.md, "The execution
contract").
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

import specops
from specops.checkpoints.directory import weight_files
from specops.engine.engine import Engine
from specops.engine.machine import LEAF_TOKENS

# What of an engine's configuration it depends on.
OPTIONS = (
    *("model", "device", "dtype", "kv_cache_dtype", "quantization", "quantize_head"),
    *("tensor_parallel_size", "exact_across_tp", "enable_expert_parallel"),
    *("load_format", "logprobs_mode", "json_whitespace"),
)

_PIECE = 1 << 20  # bytes of a file at once

# Sums over the vocabulary are made of sums over so many logits, float32 as the engine's are.
_SAMPLING_LEAF_TOKENS = {"cpu": 1024, "cuda": 512}


def contract_of(engine: Engine) -> dict[str, Any]:
    """Returns what an engine's bits depend on.

    Args:
        engine: whose model's files are read once, as a whole.

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
            "digest": _model_digest(Path(config.model_dir), config.load_format),
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


def _model_digest(directory: Path, load_format: str) -> str:
    """Of the configuration and the weights; random ones follow from the configuration."""
    whole = hashlib.sha256()
    names = ["config.json"]
    if load_format == "dummy":
        whole.update(b"random weights")
    else:
        names += weight_files(directory)
    for name in names:
        with open(directory / name, "rb") as file:
            while piece := file.read(_PIECE):
                whole.update(piece)
    return whole.hexdigest()[:16]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
