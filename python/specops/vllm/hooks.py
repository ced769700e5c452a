# SPDX-License-Identifier: Apache-2.0
"""The one table of what the plug-in touches in vLLM, and the check that it is where it was.

vLLM's inner functions move between versions. Before anything is changed, each is looked up and its
parameters are compared with those that the plug-in was written for. What has moved is an error.
"""

import importlib
import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

# The version that the tests run.
TESTED = "0.32.0"


@dataclass(frozen=True)
class Hook:
    """Something of vLLM's.

    Attributes:
        part: of SPECOPS_VLLM; "" is all of them.
        target: module:name.
        how: "registered" with a function that vLLM offers for it; "subclassed", by a class that is
            registered; "replaced"; "wrapped": called, with a check before or after it; "read".
        names: of its parameters, in order; or of fields that must be among a class's.
    """

    part: str
    target: str
    how: str
    names: tuple[str, ...]


def _hook(part: str, how: str, target: str, names: str) -> Hook:
    return Hook(part, target, how, tuple(names.split()))


_BACKEND = "vllm.v1.attention.backend"
_CPU_ATTN = "vllm.v1.attention.backends.cpu_attn"
_LAYERS = "vllm.model_executor.layers"
_RUNNER = "vllm.v1.worker.gpu_model_runner"

HOOKS = (
    _hook(
        "attention",
        "registered",
        "vllm.v1.attention.backends.registry:register_backend",
        "backend class_path is_mamba",
    ),
    _hook(
        "attention",
        "subclassed",
        f"{_CPU_ATTN}:CPUAttentionBackendImpl.__init__",
        "self num_heads head_size scale num_kv_heads alibi_slopes sliding_window kv_cache_dtype "
        "logits_soft_cap attn_type kv_sharing_target_layer_name sinks",
    ),
    _hook(
        "attention",
        "subclassed",
        f"{_CPU_ATTN}:CPUAttentionBackendImpl.forward",
        "self layer query key value kv_cache attn_metadata output output_scale output_block_scale",
    ),
    _hook(
        "attention",
        "subclassed",
        f"{_BACKEND}:AttentionMetadataBuilder.__init__",
        "self kv_cache_spec layer_names vllm_config device",
    ),
    _hook(
        "attention",
        "subclassed",
        f"{_BACKEND}:AttentionMetadataBuilder.build",
        "self common_prefix_len common_attn_metadata fast_build",
    ),
    _hook(
        "attention",
        "read",
        f"{_BACKEND}:CommonAttentionMetadata",
        "query_start_loc seq_lens num_reqs num_actual_tokens max_seq_len block_table_tensor "
        "slot_mapping causal",
    ),
    _hook(
        "norm",
        "registered",
        "vllm.model_executor.custom_op:CustomOp.register_oot",
        "_decorated_op_cls name",
    ),
    _hook("norm", "subclassed", f"{_LAYERS}.layernorm:RMSNorm.forward_native", "self x residual"),
    _hook(
        "activation",
        "registered",
        "vllm.model_executor.custom_op:CustomOp.register_oot",
        "_decorated_op_cls name",
    ),
    _hook("activation", "subclassed", f"{_LAYERS}.activation:SiluAndMul.forward_cpu", "self x"),
    _hook("activation", "subclassed", f"{_LAYERS}.activation:SiluAndMul.forward_native", "x"),
    _hook(
        "linear",
        "replaced",
        f"{_LAYERS}.utils:dispatch_cpu_unquantized_gemm",
        "layer remove_weight",
    ),
    _hook("linear", "read", f"{_LAYERS}.utils:cpu_unquantized_gemm", "layer x weight bias"),
    _hook(
        "sampling",
        "replaced",
        f"{_RUNNER}:GPUModelRunner._sample",
        "self logits spec_decode_metadata",
    ),
    _hook(
        "sampling",
        "read",
        "vllm.v1.spec_decode.metadata:SpecDecodeMetadata",
        "draft_token_ids num_draft_tokens cu_num_sampled_tokens",
    ),
    _hook(
        "sampling",
        "read",
        "vllm.v1.worker.gpu_input_batch:CachedRequestState",
        "req_id sampling_params output_token_ids",
    ),
    _hook(
        "sampling",
        "read",
        "vllm.v1.sample.metadata:SamplingMetadata",
        "max_num_logprobs",
    ),
    _hook(
        "sampling",
        "read",
        "vllm.v1.outputs:LogprobsTensors",
        "logprob_token_ids logprobs selected_token_ranks",
    ),
    _hook(
        "sampling",
        "wrapped",
        "vllm.sampling_params:SamplingParams.verify",
        "self model_config speculative_config structured_outputs_config tokenizer",
    ),
    _hook(
        "",
        "read",
        "vllm.config.compilation:CompilationConfig",
        "mode backend custom_ops inductor_compile_config",
    ),
    _hook("", "read", "vllm.config.vllm:VllmConfig", "compilation_config additional_config"),
    _hook(
        "",
        "read",
        "vllm.distributed.device_communicators.cpu_communicator:_CPUSHMDistributed.__init__",
        "self communicator",
    ),
    _hook("", "wrapped", "vllm.v1.worker.cpu_worker:CPUWorker.init_device", "self"),
    _hook(
        "",
        "wrapped",
        "vllm.v1.worker.cpu_model_runner:CPUModelRunner.load_model",
        "self load_dummy_weights",
    ),
)


class HookError(RuntimeError):
    """vLLM is not as the plug-in knows it."""


def of_parts(parts: Collection[str]) -> list[Hook]:
    """The hooks that these parts of SPECOPS_VLLM need."""
    return [hook for hook in HOOKS if not hook.part or hook.part in parts]


def find(target: str) -> Any:
    """What a target names.

    Raises:
        HookError: it is not there.
    """
    module, _, names = target.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for name in names.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        raise HookError(f"specops.vllm: vLLM has no {target} ({error})") from None
    return found


def fault_of(hook: Hook) -> str | None:
    """What is different about a hook in the vLLM that is installed; None: nothing."""
    try:
        found: Any = find(hook.target)
    except HookError as error:
        return str(error)
    if inspect.isclass(found):
        named_tuple: Any = getattr(found, "_fields", None)
        fields: Any = named_tuple or getattr(found, "__dataclass_fields__", ())
        missing = [name for name in hook.names if name not in fields]
        return f"specops.vllm: {hook.target} has no {', '.join(missing)}" if missing else None
    got = list(inspect.signature(found).parameters)
    if got == list(hook.names):
        return None
    expected = ", ".join(hook.names)
    return f"specops.vllm: {hook.target} must take ({expected}), got ({', '.join(got)})"


def check(hooks: Sequence[Hook]) -> None:
    """Compares every hook with the vLLM that is installed.

    Raises:
        HookError: one of them has moved; the sentence names all that have.
    """
    faults = [fault for fault in map(fault_of, hooks) if fault is not None]
    if faults:
        raise HookError("; ".join(faults))
