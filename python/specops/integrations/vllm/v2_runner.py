# SPDX-License-Identifier: Apache-2.0
"""vLLM's V2 model runner on a CPU: kernels without Triton, specops' sampler and drafters.

This module imports vLLM, so only the worker imports it, in a process of vLLM.
"""

import functools
from collections.abc import Collection
from typing import Any

import torch
import vllm.v1.worker.gpu.model_runner as gpu_runner
from vllm.triton_utils import HAS_TRITON, triton
from vllm.triton_utils.dispatcher import register_kernels

from specops.integrations.vllm import hooks, v2_kernels
from specops.integrations.vllm.settings import CUSTOM_CLASS, VARIABLE
from specops.integrations.vllm.support import NotExactError
from specops.integrations.vllm.v2_drafters import ProposerSpeculator
from specops.integrations.vllm.v2_sampler import SpecopsPromptLogprobs, SpecopsSampler

# Proposers of vLLM's V1 model runner that take the place of vLLM's own drafters, by method.
_PROPOSERS = {
    "ngram": "specops.integrations.vllm.NgramProposer",
    "suffix": "specops.integrations.vllm.SuffixProposer",
}


@functools.cache
def prepare() -> None:
    """Replace Triton kernels, and let proposers draft; once per process.

    Raises:
        HookError: vLLM differs from the version the plug-in supports.
    """
    hooks.check(hooks.of_parts({hooks.SECOND_RUNNER}))
    if not hasattr(triton, "next_power_of_2"):  # vLLM's stand-in for Triton lacks it
        triton.next_power_of_2 = lambda count: 1 << max(0, count - 1).bit_length()
    register_kernels(v2_kernels.kernels())
    init_speculator = gpu_runner.init_speculator

    def with_proposers(vllm_config: Any, device: torch.device, req_states: Any) -> Any:
        config = vllm_config.speculative_config
        name = config.model if config.method == CUSTOM_CLASS else _PROPOSERS.get(config.method)
        if name is not None:
            return ProposerSpeculator(name, vllm_config, req_states)
        if not HAS_TRITON:
            raise NotExactError(
                f"specops: {config.method} drafts in vLLM's V2 model runner require Triton; "
                "set VLLM_USE_V2_MODEL_RUNNER=0"
            )
        return init_speculator(vllm_config, device, req_states)

    gpu_runner.init_speculator = with_proposers


def install(runner: Any, parts: Collection[str]) -> None:
    """Install specops' sampler in a runner whose model is loaded.

    Args:
        runner: vLLM's V2 model runner.
        parts: parts of SPECOPS_VLLM.

    Raises:
        NotExactError: the runner shards sampling over ranks or counts NaNs, or neither Triton nor
            the part sampling is available.
    """
    if isinstance(runner.speculator, ProposerSpeculator):
        runner.draft_tokens_handler = runner.speculator
    if "sampling" not in parts:
        if not HAS_TRITON:
            raise NotExactError(
                "specops: vLLM's V2 model runner requires Triton or the part sampling, got "
                f"neither; add it to {VARIABLE}"
            )
        return
    if runner.batch_sharder is not None:
        raise NotExactError("specops: cannot be exact with enable_batch_sharded_sampling")
    if runner.sampler.compute_nans:
        raise NotExactError("specops: sampling does not support VLLM_COMPUTE_NANS_IN_LOGITS in V2")
    runner.sampler = SpecopsSampler(runner)
    if runner.rejection_sampler is not None:
        runner.rejection_sampler = runner.sampler
    runner.prompt_logprobs_worker = SpecopsPromptLogprobs(runner.prompt_logprobs_worker)
