# SPDX-License-Identifier: Apache-2.0
"""The execution contract: everything that an engine's output bits depend on, and its digest.

Two engines with the same digest give a request with the same seed the same tokens and the same
bits of logprobs, if drafts are verified by `target_match`, the default. The contract of a request
with a LoRA adapter also has the digest of the adapter (`api.contract.with_adapter`). What is not in
the contract changes no bit: drafters and their settings, batching, chunked prefill, threads, pages.
With other verification methods, and with forced acceptance, tokens depend on the drafts
(docs/exactness.md, "The execution contract").
"""

import contextlib
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import specops
from specops.api.config import EngineConfig
from specops.checkpoints.directory import weight_files
from specops.engine.engine import Engine
from specops.engine.machine import LEAF_TOKENS
from specops.engine.models.weight_cache import WeightCache, digest_of_bytes

# The options of an engine's configuration that the contract depends on.
OPTIONS = (
    "model",
    "device",
    "numerics",
    "dtype",
    "kv_cache_dtype",
    "quantization",
    "quantize_head",
    "tensor_parallel_size",
    "exact_across_tp",
    "enable_expert_parallel",
    "load_format",
    "logprobs_mode",
    "json_whitespace",
)

# Number of logits per partial sum of a sum over the vocabulary, in float32.
_SAMPLING_LEAF_TOKENS = {"cpu": 1024, "cuda": 512}


def contract_of(engine: Engine) -> dict[str, Any]:
    """Return the execution contract of an engine.

    Args:
        engine: the engine. Its model's files are read unless the weight cache has their digests.

    Returns:
        A JSON object: "specops", the version; "kernels", the compiled code and its compiler;
        "torch", the version that computes the RoPE table; "device", the numerics of the CPU kernels
        or the GPU: "portable" for `specops.portable_isas()`, whose results are equal, or another
        instruction set; "model", the digest of its configuration and weights, the dtypes of weights
        and of the KV cache, and the quantization of projections and of the head;
        "attention_leaf_tokens", the number of tokens after which attention rounds;
        "sampling_leaf_tokens", the number of logits after which sums over the vocabulary round;
        "num_virtual_ranks", the number of virtual TP ranks; "has_whole_experts", whether each
        virtual TP rank has whole experts; "logprobs_mode" and "json_whitespace", as configured; and
        "digest", the digest of all of these.
    """
    config = engine.config
    kind = engine.device.partition(":")[0]
    facts: dict[str, Any] = {
        "specops": specops.__version__,
        "kernels": specops.runtime.build_facts(),
        "torch": str(torch.__version__),  # a plain str, not torch's subclass
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
        "num_virtual_ranks": config.num_virtual_ranks,
        "has_whole_experts": config.enable_expert_parallel,
        "logprobs_mode": config.logprobs_mode,
        "json_whitespace": config.json_whitespace,
    }
    return {**facts, "digest": _digest(json.dumps(facts, sort_keys=True).encode())}


def _device(name: str) -> dict[str, str]:
    if name == "cpu":
        isa = specops.get_isa()
        return {"kind": "cpu", "numerics": "portable" if isa in specops.portable_isas() else isa}
    properties = torch.cuda.get_device_properties(name)
    capability = f"{properties.major}.{properties.minor}"
    return {"kind": "cuda", "name": properties.name, "compute_capability": capability}


def _model_digest(config: EngineConfig) -> str:
    """Return the digest of config.json and the weights; config.json determines random weights."""
    directory = Path(config.model_dir)
    digests = [digest_of_bytes(directory / "config.json")]
    if config.load_format == "dummy":
        digests.append("random weights")
    else:
        digests += _digests_of([directory / name for name in weight_files(directory)], config)
    return _digest(json.dumps(digests).encode())


def _digests_of(files: Sequence[Path], config: EngineConfig) -> list[str]:
    """Return each file's digest, from the weight cache if possible, since hashing is slow."""
    cache = WeightCache.of_setting(config.weight_cache, config.weight_cache_bytes)
    if cache is not None:
        with contextlib.suppress(OSError):  # if the cache is unusable, hash the files
            if (digests := cache.digests(files)) is not None:
                return digests
    return [digest_of_bytes(file) for file in files]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
