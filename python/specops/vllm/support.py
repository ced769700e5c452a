# SPDX-License-Identifier: Apache-2.0
"""What of a vLLM engine cannot be exact: refused, in a sentence, before it serves.

A model is looked at layer by layer. Only layers that are known to be row-identical are let through;
what nobody has looked at is refused by its name.
"""

from collections.abc import Collection
from typing import Any

from specops.vllm.settings import VERIFY_VARIABLE

# Layers that compute nothing, or whose own computation is elementwise on tokens, copies of rows, or
# row-identical by test (rotary embedding).
_EXACT = frozenset(
    {
        "ApplyRotaryEmb",
        "LogitsProcessor",
        "RotaryEmbedding",
        "LinearScalingRotaryEmbedding",
        "Llama3RotaryEmbedding",
        "YaRNScalingRotaryEmbedding",
    }
)
_LINEAR = frozenset(
    {
        "ColumnParallelLinear",
        "MergedColumnParallelLinear",
        "ParallelLMHead",
        "QKVParallelLinear",
        "ReplicatedLinear",
        "RowParallelLinear",
        "VocabParallelEmbedding",
    }
)
# By the part that computes them: vLLM's class, and ours in its place.
_REPLACED = {
    "RMSNorm": ("norm", "SpecopsRMSNorm"),
    "SiluAndMul": ("activation", "SpecopsSiluAndMul"),
}
_UNQUANTISED = frozenset({"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"})
_SHARED_MEMORY = "_CPUSHMDistributed"
_LAYER_PACKAGE = "vllm.model_executor.layers"
_PLAIN_TORCH = frozenset({"Identity", "ModuleList", "ModuleDict", "Sequential"})
_LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")


class NotExactError(RuntimeError):
    """The engine has something that specops cannot make exact."""


def faults_of_config(config: Any, parts: Collection[str]) -> list[str]:
    """What of an engine's configuration cannot be exact."""
    found = []
    if config.lora_config is not None:
        found.append("LoRA")
    if config.scheduler_config.async_scheduling:
        found.append("asynchronous scheduling")
    parallel = config.parallel_config
    for name in ("pipeline_parallel_size", "decode_context_parallel_size"):
        if getattr(parallel, name) > 1:
            found.append(f"{name} {getattr(parallel, name)}")
    model = config.model_config
    if "sampling" in parts:
        if model.logprobs_mode not in _LOGPROBS_MODES:
            found.append(f"logprobs_mode {model.logprobs_mode}")
        if model.logits_processors:
            found.append("custom logits processors")
        if config.watermark_config is not None:
            found.append("watermarking")
        if model.enable_prompt_embeds:
            found.append("prompt embeddings")
        speculative = config.speculative_config
        if speculative is not None and speculative.rejection_sample_method != "standard":
            method = speculative.rejection_sample_method
            found.append(f"rejection_sample_method {method} ({VERIFY_VARIABLE} names ours)")
    return found


def faults_of_ranks(group: Any) -> list[str]:
    """What of tensor parallelism cannot be exact.

    A sum of two numbers has one order. More of them vLLM's shared memory adds up in one order, but
    gloo in one that depends on where a number stands in the batch.

    Args:
        group: vLLM's group of ranks.
    """
    kind = type(getattr(group.device_communicator, "dist_module", None)).__name__
    if group.world_size <= 2 or kind == _SHARED_MEMORY:
        return []
    return [f"tensor_parallel_size {group.world_size} over gloo (shared memory or 2 ranks are)"]


def faults_of_model(model: Any, parts: Collection[str]) -> list[str]:
    """What of a model's layers cannot be exact, each kind once."""
    found: dict[str, None] = {}
    for name, module in model.named_modules():
        fault = _fault_of_layer(module, parts)
        if fault is not None:
            found.setdefault(f"{fault} (first: {name or 'the model'})")
    kinds: dict[str, str] = {}
    for sentence in found:
        kinds.setdefault(sentence.partition(" (first")[0], sentence)
    return list(kinds.values())


def _fault_of_layer(module: Any, parts: Collection[str]) -> str | None:
    kind = type(module)
    name = kind.__name__
    if kind.__module__.startswith("torch.nn"):
        if name in _PLAIN_TORCH:
            return None
        return f"torch.nn.{name}, which is not known to be row-identical"
    if name in _REPLACED:
        part, _ = _REPLACED[name]
        return f"{name} of vLLM in place of specops'" if part in parts else None
    if not kind.__module__.startswith(_LAYER_PACKAGE):
        return None  # a container, or ours
    if name in _LINEAR:
        method = type(getattr(module, "quant_method", None)).__name__
        return None if method in _UNQUANTISED else f"{name} with {method}"
    if name == "Attention":
        impl = type(module.impl).__name__
        if "attention" in parts and impl != "SpecopsAttentionImpl":
            return f"attention by {impl}"
        return None
    return None if name in _EXACT else f"{name}, which is not known to be row-identical"
