# SPDX-License-Identifier: Apache-2.0
"""Table of the functions, classes and fields of vLLM that the plug-in depends on, and its check.

vLLM's internals move between versions. Before the plug-in changes anything, it looks up each entry
and compares it with the version that the table was written for. A mismatch is an error. Classes
that are only imported, such as vLLM's linear kernels, are not listed.
"""

import dis
import importlib
import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from specops.integrations.vllm.v2_kernels import kernels

# Version that the tests run; releases of this series are accepted, if their hooks match.
TESTED = "0.32.0"
# Part of the hooks that vLLM's V2 model runner needs.
SECOND_RUNNER = "v2"


@dataclass(frozen=True)
class Hook:
    """A function, class or field of vLLM that the plug-in depends on.

    Attributes:
        part: part of SPECOPS_VLLM that needs it; "" for all parts; SECOND_RUNNER for vLLM's V2
            model runner.
        target: module:name.
        use: how the plug-in uses it: "registered" through vLLM's API; "subclassed" by a class that
            is registered; "replaced"; "called"; "read".
        names: for a function, all its parameters in order, or only the passed ones if `use` is
            "called"; for a class, the fields and methods used.
    """

    part: str
    target: str
    use: str
    names: tuple[str, ...]


def _hook(part: str, use: str, target: str, names: str) -> Hook:
    return Hook(part, target, use, tuple(names.split()))


_BACKEND = "vllm.v1.attention.backend"
_CPU_ATTN = "vllm.v1.attention.backends.cpu_attn"
_LAYERS = "vllm.model_executor.layers"
_RUNNER = "vllm.v1.worker.gpu_model_runner"
_WORKER = "vllm.v1.worker.cpu_worker:CPUWorker"
_V2 = "vllm.v1.worker.gpu"
_EXPERTS = f"{_LAYERS}.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod"
_ROUTER = f"{_LAYERS}.fused_moe.router.cpu_router:CPURouter"


def _layers(names: str) -> tuple[str, ...]:
    return tuple(f"{_LAYERS}.{name}" for name in names.split())


# vLLM layers that a model may use unchanged: they compute nothing, work elementwise, copy rows, or
# are row-identical by test (rotary embedding).
EXACT_LAYERS = _layers(
    "logits_processor:LogitsProcessor "
    "fused_moe.runner.shared_experts:SharedExperts "
    "rotary_embedding.base:RotaryEmbedding "
    "rotary_embedding.common:ApplyRotaryEmb "
    "rotary_embedding.linear_scaling_rope:LinearScalingRotaryEmbedding "
    "rotary_embedding.llama3_rope:Llama3RotaryEmbedding "
    "rotary_embedding.yarn_scaling_rope:YaRNScalingRotaryEmbedding"
)
LINEAR_LAYERS = _layers(
    "linear:ColumnParallelLinear "
    "linear:MergedColumnParallelLinear "
    "linear:QKVParallelLinear "
    "linear:ReplicatedLinear "
    "linear:RowParallelLinear "
    "vocab_parallel_embedding:ParallelLMHead "
    "vocab_parallel_embedding:VocabParallelEmbedding "
    "fused_moe.router.gate_linear:GateLinear"
)
QUANT_METHODS = _layers(
    "linear:UnquantizedLinearMethod vocab_parallel_embedding:UnquantizedEmbeddingMethod"
)
ATTENTION_LAYER, EXPERTS_LAYER, EXPERTS_RUNNER = _layers(
    "attention.attention:Attention "
    "fused_moe.routed_experts:RoutedExperts "
    "fused_moe.runner.moe_runner:MoERunner"
)
# vLLM layers that specops replaces -> the part of SPECOPS_VLLM that replaces them.
REPLACED_LAYERS = dict(
    zip(_layers("layernorm:RMSNorm activation:SiluAndMul"), ("norm", "activation"), strict=True)
)

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
        f"{_CPU_ATTN}:CPUAttentionBackendImpl.do_kv_cache_update",
        "self layer key value kv_cache slot_mapping",
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
        "subclassed",
        f"{_BACKEND}:AttentionMetadataBuilder.build_for_drafting",
        "self common_attn_metadata draft_index",
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
        "linear",
        "registered",
        "vllm.model_executor.custom_op:CustomOp.register_oot",
        "_decorated_op_cls name",
    ),
    _hook("linear", "subclassed", f"{_EXPERTS}.process_weights_after_loading", "self layer"),
    _hook(
        "linear",
        "subclassed",
        f"{_EXPERTS}.forward_native",
        "self layer x topk_weights topk_ids shared_experts shared_experts_input",
    ),
    _hook(
        "linear",
        "subclassed",
        f"{_ROUTER}._compute_routing",
        "self hidden_states router_logits indices_type input_ids",
    ),
    _hook(
        "linear",
        "read",
        _ROUTER,
        "top_k global_num_experts use_grouped_topk num_expert_group topk_group renormalize "
        "scoring_func routed_scaling_factor e_score_correction_bias custom_routing_function "
        "_hash_indices_table eplb_state",
    ),
    _hook(
        "linear",
        "read",
        f"{_LAYERS}.fused_moe.config:FusedMoEConfig",
        "activation swiglu_limit has_bias in_dtype dp_size is_sequence_parallel",
    ),
    _hook("linear", "read", EXPERTS_RUNNER, "router"),
    _hook(
        "linear",
        "read",
        EXPERTS_LAYER,
        "quant_method expert_map local_num_experts apply_router_weight_on_input",
    ),
    _hook(
        "sampling",
        "replaced",
        f"{_RUNNER}:GPUModelRunner._sample",
        "self logits spec_decode_metadata",
    ),
    _hook(
        "sampling",
        "read",
        f"{_RUNNER}:GPUModelRunner",
        "requests input_batch sampler model_config",
    ),
    _hook(
        "sampling",
        "read",
        "vllm.v1.worker.gpu_input_batch:InputBatch",
        "req_ids generators num_tokens_no_spec_cpu_tensor token_ids_cpu_tensor sampling_metadata",
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
        "num_prompt_tokens sampling_params",
    ),
    _hook("sampling", "read", "vllm.v1.sample.sampler:Sampler", "logprobs_mode"),
    _hook(
        "sampling",
        "read",
        "vllm.v1.sample.metadata:SamplingMetadata",
        "max_num_logprobs",
    ),
    _hook(
        "sampling",
        "read",
        "vllm.v1.outputs:SamplerOutput",
        "sampled_token_ids logprobs_tensors",
    ),
    _hook(
        "sampling",
        "read",
        "vllm.v1.outputs:LogprobsTensors",
        "logprob_token_ids logprobs selected_token_ranks",
    ),
    _hook(
        "sampling",
        "read",
        "vllm.sampling_params:SamplingParams",
        "temperature top_k top_p min_p seed repetition_penalty presence_penalty frequency_penalty "
        "logit_bias bad_words_token_ids allowed_token_ids min_tokens all_stop_token_ids extra_args",
    ),
    _hook(
        "sampling",
        "subclassed",
        "vllm.platforms.cpu:CpuPlatform.validate_request",
        "processed_inputs params",
    ),
    _hook(
        "sampling",
        "read",
        "vllm.v1.engine.input_processor:InputProcessor.assign_request_id",
        "request",
    ),
    _hook("", "read", "vllm.platforms.interface:Platform", "is_cpu"),
    _hook(
        "",
        "read",
        "vllm.config.compilation:CompilationConfig",
        "mode backend custom_ops inductor_compile_config",
    ),
    _hook(
        "",
        "read",
        "vllm.config.vllm:VllmConfig",
        "compilation_config additional_config lora_config scheduler_config parallel_config "
        "model_config watermark_config speculative_config kv_transfer_config",
    ),
    _hook("", "read", "vllm.config.scheduler:SchedulerConfig", "async_scheduling"),
    _hook(
        "",
        "read",
        "vllm.config.parallel:ParallelConfig",
        "pipeline_parallel_size decode_context_parallel_size",
    ),
    _hook(
        "",
        "read",
        "vllm.config.model:ModelConfig",
        "runner_type seed logprobs_mode logits_processors enable_prompt_embeds "
        "return_sampling_mask",
    ),
    _hook("", "read", "vllm.config.speculative:SpeculativeConfig", "rejection_sample_method"),
    _hook(
        "",
        "read",
        "vllm.distributed.parallel_state:GroupCoordinator",
        "world_size device_communicator",
    ),
    _hook(
        "",
        "read",
        "vllm.distributed.device_communicators.cpu_communicator:CpuCommunicator",
        "dist_module",
    ),
    _hook(
        "",
        "read",
        "vllm.distributed.device_communicators.cpu_communicator:_CPUSHMDistributed.__init__",
        "self communicator",
    ),
    _hook("", "read", "vllm.v1.worker.cpu_worker:CPUWorker", "use_v2_model_runner"),
    _hook(
        "", "subclassed", "vllm.platforms.cpu:CpuPlatform.check_and_update_config", "vllm_config"
    ),
    _hook("", "replaced", "vllm.config.vllm:VllmConfig._validate_v2_model_runner", "self"),
    _hook(
        "",
        "called",
        "vllm.config.vllm:VllmConfig._get_v2_model_runner_unsupported_features",
        "self",
    ),
    _hook("", "subclassed", f"{_WORKER}.init_device", "self"),
    _hook("", "subclassed", f"{_WORKER}.load_model", "self load_dummy_weights"),
    _hook("", "read", "vllm.v1.worker.cpu_model_runner:CPUModelRunner", "get_model max_num_tokens"),
    _hook("", "called", f"{_RUNNER}:GPUModelRunner._dummy_run", "self num_tokens is_profile"),
    _hook("linear", "subclassed", f"{_WORKER}.reload_weights", "self args kwargs"),
    _hook(
        "linear",
        "called",
        f"{_RUNNER}:GPUModelRunner.reload_weights",
        "weights_iterator weights_path is_checkpoint_format",
    ),
    _hook("linear", "subclassed", f"{_WORKER}.finish_weight_update", "self"),
    *(_hook("", "read", layer, "") for layer in (*EXACT_LAYERS, *QUANT_METHODS)),
    *(_hook("", "read", layer, "quant_method") for layer in LINEAR_LAYERS),
    _hook("", "read", ATTENTION_LAYER, "impl"),
    *(_hook(part, "read", layer, "") for layer, part in REPLACED_LAYERS.items()),
    *(
        _hook(
            SECOND_RUNNER,
            "registered",
            ":".join(name.rsplit(".", 1)),
            " ".join(inspect.signature(kernel).parameters),
        )
        for name, kernel in kernels().items()
    ),
    _hook(
        SECOND_RUNNER,
        "called",
        "vllm.triton_utils.dispatcher:register_kernels",
        "overrides",
    ),
    _hook(
        SECOND_RUNNER,
        "replaced",
        f"{_V2}.model_runner:init_speculator",
        "vllm_config device req_states",
    ),
    _hook(
        SECOND_RUNNER,
        "read",
        f"{_V2}.model_runner:GPUModelRunner",
        "get_model max_num_tokens model_config req_states sampler rejection_sampler speculator "
        "draft_tokens_handler batch_sharder prompt_logprobs_worker",
    ),
    _hook(
        SECOND_RUNNER,
        "called",
        f"{_V2}.model_runner:GPUModelRunner._dummy_run",
        "self num_tokens skip_attn is_profile",
    ),
    _hook(
        SECOND_RUNNER,
        "read",
        f"{_V2}.input_batch:InputBatch",
        "num_reqs req_ids idx_mapping_np cu_num_logits_np seq_lens input_ids logits_indices",
    ),
    _hook(
        SECOND_RUNNER,
        "read",
        f"{_V2}.states:RequestState",
        "all_token_ids total_len prefill_len prompt_len",
    ),
    _hook(
        SECOND_RUNNER,
        "replaced",
        f"{_V2}.sample.sampler:Sampler.__call__",
        "self logits input_batch",
    ),
    _hook(
        SECOND_RUNNER,
        "replaced",
        f"{_V2}.sample.sampler:Sampler.add_request",
        "self req_idx sampling_params",
    ),
    _hook(SECOND_RUNNER, "replaced", f"{_V2}.sample.sampler:Sampler.apply_staged_writes", "self"),
    _hook(
        SECOND_RUNNER,
        "read",
        f"{_V2}.sample.sampler:Sampler",
        "sampling_states logprobs_mode compute_nans",
    ),
    _hook(
        SECOND_RUNNER,
        "read",
        f"{_V2}.sample.prompt_logprob:PromptLogprobsWorker",
        "uses_prompt_logprobs num_prompt_logprobs",
    ),
    _hook(
        SECOND_RUNNER,
        "subclassed",
        f"{_V2}.sample.prompt_logprob:PromptLogprobsWorker.compute_prompt_logprobs",
        "self logits_fn hidden_states input_batch all_token_ids num_computed_tokens prompt_lens",
    ),
    _hook(
        SECOND_RUNNER,
        "replaced",
        f"{_V2}.spec_decode.rejection_sampler:RejectionSampler.__call__",
        "self logits input_batch draft_logits invalid_drafts",
    ),
    _hook(
        SECOND_RUNNER,
        "read",
        f"{_V2}.sample.output:SamplerOutput",
        "sampled_token_ids logprobs_tensors num_nans num_sampled num_rejected",
    ),
    _hook(
        SECOND_RUNNER,
        "subclassed",
        f"{_V2}.spec_decode.speculator:BaseSpeculator.propose",
        "self input_batch attn_metadata slot_mappings last_hidden_states aux_hidden_states "
        "num_sampled num_rejected last_sampled next_prefill_tokens temperature seeds dp_sync_state "
        "dummy_run skip_attn_for_dummy_run mm_inputs is_profile num_speculative_tokens",
    ),
    _hook(
        SECOND_RUNNER,
        "replaced",
        f"{_V2}.spec_decode.utils:DraftTokensHandler.set_draft_tokens",
        "self input_batch draft_tokens",
    ),
    _hook(
        SECOND_RUNNER,
        "replaced",
        f"{_V2}.spec_decode.utils:DraftTokensHandler.get_draft_tokens",
        "self",
    ),
    _hook(SECOND_RUNNER, "read", "vllm.v1.outputs:DraftTokenIds", "req_ids draft_token_ids"),
)


class HookError(RuntimeError):
    """Error: the installed vLLM differs from the version that the plug-in was written for."""


def of_parts(parts: Collection[str]) -> list[Hook]:
    """Return the hooks that these parts of SPECOPS_VLLM need."""
    return [hook for hook in HOOKS if not hook.part or hook.part in parts]


def find(target: str) -> Any:
    """Return the object that a hook's `target` names.

    Raises:
        HookError: it does not exist.
    """
    module, _, names = target.partition(":")
    try:
        value: Any = importlib.import_module(module)
        for name in names.split("."):
            value = getattr(value, name)
    except (ImportError, AttributeError) as error:
        raise HookError(f"specops: vLLM has no {target} ({error})") from None
    return value


def fault_of(hook: Hook) -> str | None:
    """Return how a hook mismatches the installed vLLM; None if it matches."""
    try:
        value: Any = find(hook.target)
    except HookError as error:
        return str(error)
    if inspect.isclass(value):
        fields = _fields_of(value)
        missing = [name for name in hook.names if name not in fields]
        return f"specops: {hook.target} has no {', '.join(missing)}" if missing else None
    parameters = list(inspect.signature(value).parameters)
    if hook.use == "called":
        missing = [name for name in hook.names if name not in parameters]
        return f"specops: {hook.target} does not take {', '.join(missing)}" if missing else None
    if parameters == list(hook.names):
        return None
    expected = ", ".join(hook.names)
    return f"specops: {hook.target} must take ({expected}), got ({', '.join(parameters)})"


def _fields_of(kind: type) -> set[str]:
    """Return the fields of a class: declared, defined, or assigned in its constructor."""
    fields = set(dir(kind))
    for base in kind.__mro__:
        fields.update(inspect.get_annotations(base))
        for name in ("__init__", "__post_init__"):
            made_by = base.__dict__.get(name)
            if inspect.isfunction(made_by):
                steps = dis.get_instructions(inspect.unwrap(made_by))
                fields.update(step.argval for step in steps if step.opname == "STORE_ATTR")
    return fields


def check_version(version: str) -> None:
    """Refuse a vLLM of another series than the tested one.

    Raises:
        HookError: the version differs in more than its last number.
    """
    series = TESTED.rpartition(".")[0]
    if not version.startswith(f"{series}."):
        raise HookError(f"specops: supports vLLM {series}, got {version}")


def check(hooks: Sequence[Hook]) -> None:
    """Compare every hook with the installed vLLM.

    Raises:
        HookError: some hooks do not match; the message names all of them.
    """
    faults = [fault for fault in map(fault_of, hooks) if fault is not None]
    if faults:
        raise HookError("; ".join(faults))
