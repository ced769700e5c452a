# SPDX-License-Identifier: Apache-2.0
"""Checks that refuse a vLLM engine, before it serves, if any part of it cannot be exact.

A model is checked layer by layer. Layers of vLLM are accepted only if they are known to be
row-identical: a row has the same bits in any batch. A model's own layers are accepted only if their
ops are (`op_check`). Anything else is refused by name.
"""

from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any

from specops.integrations.vllm.hooks import (
    ATTENTION_LAYER,
    EXACT_LAYERS,
    EXPERTS_LAYER,
    EXPERTS_RUNNER,
    LINEAR_LAYERS,
    QUANT_METHODS,
    REPLACED_LAYERS,
)
from specops.integrations.vllm.settings import VERIFY_VARIABLE

_SHARED_MEMORY = "_CPUSHMDistributed"
_LAYER_PACKAGE = "vllm.model_executor.layers"
_OUR_ATTENTION = "specops.integrations.vllm.attention:SpecopsAttentionImpl"
_OUR_LINEAR = "specops.integrations.vllm.packed_linear:PackedLinear"
_OUR_EXPERTS = "specops.integrations.vllm.experts:SpecopsExperts"
_OUR_ROUTER = "specops.integrations.vllm.experts:SpecopsRouter"
_OUR_KERNELS = (
    "specops.integrations.vllm.quantized_linear:SpecopsWna16Kernel",
    "specops.integrations.vllm.quantized_linear:SpecopsInt8Kernel",
)
_PLAIN_TORCH = frozenset({"Identity", "ModuleList", "ModuleDict", "Sequential"})
_LOGITS_PROCESSORS = "vllm.logits_processors"  # entry points, all of which vLLM loads
_LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")
_STATE_SPACE_PACKAGE = f"{_LAYER_PACKAGE}.mamba"


class NotExactError(RuntimeError):
    """Error: specops cannot make a part of the engine exact."""


def faults_of_config(config: Any, parts: Collection[str]) -> list[str]:
    """Return the settings with which an engine cannot be exact."""
    faults = []
    if config.lora_config is not None:
        faults.append("LoRA")
    if config.scheduler_config.async_scheduling:
        faults.append("asynchronous scheduling")
    parallel = config.parallel_config
    for name in ("pipeline_parallel_size", "decode_context_parallel_size"):
        if getattr(parallel, name) > 1:
            faults.append(f"{name} {getattr(parallel, name)}")
    if config.kv_transfer_config is not None:
        # Connectors compare only names of layouts, and specops' pages differ under vLLM's name.
        faults.append(f"the KV connector {config.kv_transfer_config.kv_connector}")
    model = config.model_config
    if model.runner_type != "generate":
        faults.append(f"the runner {model.runner_type}")
    if "sampling" in parts:
        if model.logprobs_mode not in _LOGPROBS_MODES:
            faults.append(f"logprobs_mode {model.logprobs_mode}")
        if model.logits_processors:
            faults.append("custom logits processors")
        installed = sorted(one.name for one in entry_points(group=_LOGITS_PROCESSORS))
        if installed:
            faults.append(f"logits processors of installed packages ({', '.join(installed)})")
        if model.return_sampling_mask:
            faults.append("return_sampling_mask")
        if config.watermark_config is not None:
            faults.append("watermarking")
        if model.enable_prompt_embeds:
            faults.append("prompt embeddings")
        speculative = config.speculative_config
        if speculative is not None and speculative.rejection_sample_method != "standard":
            method = speculative.rejection_sample_method
            faults.append(f"rejection_sample_method {method} (use {VERIFY_VARIABLE} instead)")
    return faults


def faults_of_ranks(group: Any) -> list[str]:
    """Return the forms of tensor parallelism that cannot be exact.

    Up to two ranks, a sum has only one order. With more, vLLM's shared-memory collectives add in a
    fixed order, but gloo's order depends on an element's position in the batch.

    Args:
        group: vLLM's group of ranks.
    """
    kind = type(getattr(group.device_communicator, "dist_module", None)).__name__
    if group.world_size <= 2 or kind == _SHARED_MEMORY:
        return []
    ranks = f"tensor_parallel_size {group.world_size} over gloo"
    return [f"{ranks} (use shared memory or at most 2 ranks)"]


def faults_of_ops(model: Any) -> list[str]:
    """Return the distinct features of a model that specops' layers do not support."""
    faults: dict[str, None] = {}
    for module in model.modules():
        parts = (getattr(module, name, None) for name in ("impl", "cpu_linear", "router"))
        for holder in (module, *parts):
            faults.update(dict.fromkeys(getattr(holder, "specops_faults", ())))
    return list(faults)


def faults_of_layers(
    model: Any, parts: Collection[str], computed: Mapping[type | None, Sequence[str]]
) -> list[str]:
    """Return the kinds of layers of a model that cannot be exact, each once.

    Args:
        model: the loaded model.
        parts: parts of SPECOPS_VLLM.
        computed: forbidden torch ops that a layer calls itself, by the layer's class.
    """
    faults: dict[str, str] = {}
    rest = dict(computed)
    for name, module in model.named_modules():
        ops = rest.pop(type(module), None)
        fault = _fault_of_layer(module, parts)
        if fault is None and ops is not None:
            fault = _computes(type(module).__name__, ops)
        if fault is not None:
            faults.setdefault(fault, f"{fault} (first: {name or 'the model'})")
    others = [_computes(kind.__name__ if kind else "a function", ops) for kind, ops in rest.items()]
    return [*faults.values(), *others]


def _computes(name: str, ops: Sequence[str]) -> str:
    return f"{name}, which computes {', '.join(ops)} itself"


def _fault_of_layer(module: Any, parts: Collection[str]) -> str | None:
    kind = type(module)
    name, full_name = kind.__name__, _full_name(module)
    if kind.__module__.startswith("torch.nn"):
        if name in _PLAIN_TORCH:
            return None
        return f"torch.nn.{name}, which is not known to be row-identical"
    if not kind.__module__.startswith(_LAYER_PACKAGE):
        return None  # a layer of specops, or of the model's file, whose ops `op_check` checks
    if full_name in REPLACED_LAYERS:
        is_wrong = REPLACED_LAYERS[full_name] in parts
        return f"{name} of vLLM in place of specops'" if is_wrong else None
    if full_name in LINEAR_LAYERS:
        return _fault_of_linear(module, parts)
    if full_name == ATTENTION_LAYER:
        is_ours = "attention" not in parts or _full_name(module.impl) == _OUR_ATTENTION
        return None if is_ours else f"attention by {type(module.impl).__name__}"
    if full_name in (EXPERTS_LAYER, EXPERTS_RUNNER):
        return _fault_of_experts(module, parts)
    if full_name in EXACT_LAYERS:
        return None
    if kind.__module__.startswith(_STATE_SPACE_PACKAGE):
        return f"{name}, a state-space layer"
    return f"{name}, which is not known to be row-identical"


def _fault_of_linear(module: Any, parts: Collection[str]) -> str | None:
    name, method = type(module).__name__, getattr(module, "quant_method", None)
    if _full_name(method) not in QUANT_METHODS:
        # compressed-tensors has a scheme between a layer and its kernel.
        scheme = getattr(module, "scheme", method)
        is_ours = _full_name(getattr(scheme, "kernel", None)) in _OUR_KERNELS
        return None if is_ours else f"{name} with {type(scheme).__name__}"
    product = getattr(module, "cpu_linear", None)
    if "linear" in parts and _full_name(product) != _OUR_LINEAR:
        return f"{name} whose product is not specops'"
    return None


def _fault_of_experts(module: Any, parts: Collection[str]) -> str | None:
    if "linear" not in parts:
        return None
    if _full_name(module) == EXPERTS_RUNNER:
        is_ours = _full_name(module.router) == _OUR_ROUTER
        return None if is_ours else f"experts chosen by {type(module.router).__name__}"
    method = module.quant_method
    is_ours = _full_name(method) == _OUR_EXPERTS
    return None if is_ours else f"experts computed by {type(method).__name__}"


def _full_name(value: Any) -> str:
    return f"{type(value).__module__}:{type(value).__qualname__}"
