# SPDX-License-Identifier: Apache-2.0
"""vLLM's entry point into specops: switches on what SPECOPS_VLLM names.

vLLM calls `register` once in each of its processes, before any model is made. It ignores a plug-in
that cannot be imported, so this module imports nothing that could be missing.
"""

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

from specops.vllm import compiled, hooks, support, threads
from specops.vllm.settings import EXACT, PARTS, VARIABLE, parts_of, strategy_of

# vLLM's choice between its two model runners. The plug-in knows the first one.
_SECOND_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
_logger = logging.getLogger("vllm.specops")
_registered: frozenset[str] | None = None


def switched_on() -> frozenset[str]:
    """The parts that `register` has switched on in this process; none if vLLM did not call it."""
    return _registered or frozenset()


def register() -> None:
    """Switches the parts of SPECOPS_VLLM on; without it, does nothing.

    Raises:
        ValueError: SPECOPS_VLLM or SPECOPS_VLLM_VERIFY has an unknown word.
        HookError: vLLM is not as the plug-in knows it. Nothing has been changed then.
    """
    global _registered
    parts = parts_of()
    if not parts or _registered is not None:
        return
    strategy = strategy_of()
    threads.remember_mask()
    threads.rest_numba()
    os.environ.setdefault(_SECOND_RUNNER, "0")
    import vllm

    hooks.check(hooks.of_parts(parts))
    if not vllm.__version__.startswith(hooks.TESTED):
        _logger.warning(
            "specops.vllm is tested with vLLM %s; this is %s, whose hooks look the same.",
            hooks.TESTED,
            vllm.__version__,
        )
    for part, switch_on in _SWITCHES.items():
        if part in parts:
            switch_on()
    _check_models(parts)
    _registered = parts
    _logger.info(
        "specops computes: %s%s%s.",
        ", ".join(part for part in PARTS if part in parts),
        f" (drafts are verified by {strategy})" if "sampling" in parts else "",
        "" if len(parts) == len(PARTS) else f" (not all: only {VARIABLE}={EXACT} is exact)",
    )


def _switch_attention() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(
        AttentionBackendEnum.CPU_ATTN, "specops.vllm.attention.SpecopsAttentionBackend"
    )


def _switch_norm() -> None:
    from vllm.model_executor.custom_op import CustomOp

    from specops.vllm.layers import SpecopsRMSNorm

    CustomOp.register_oot(SpecopsRMSNorm, name="RMSNorm")


def _switch_activation() -> None:
    from vllm.model_executor.custom_op import CustomOp

    from specops.vllm.layers import SpecopsSiluAndMul

    CustomOp.register_oot(SpecopsSiluAndMul, name="SiluAndMul")


def _switch_linear() -> None:
    import vllm.model_executor.layers.utils as utils

    from specops.vllm.layers import use_packed_linear

    utils.dispatch_cpu_unquantized_gemm = use_packed_linear


def _switch_sampling() -> None:
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import SamplingParams
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from specops.vllm.request_parameters import refused
    from specops.vllm.sample_step import sample_step

    GPUModelRunner._sample = sample_step
    verify = SamplingParams.verify

    @functools.wraps(verify)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        verify(self, *args, **kwargs)
        wrong = refused(self)
        if wrong is not None:
            raise VLLMValidationError(f"specops.vllm: sampling cannot carry out {wrong}")

    SamplingParams.verify = checked


_SWITCHES: dict[str, Callable[[], None]] = {
    "norm": _switch_norm,
    "activation": _switch_activation,
    "linear": _switch_linear,
    "attention": _switch_attention,
    "sampling": _switch_sampling,
}


def _check_models(parts: frozenset[str]) -> None:
    """Has every model looked at when it is loaded, if all parts are on: it must be exact then."""
    from vllm.distributed import get_tp_group
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.cpu_worker import CPUWorker

    init_device = CPUWorker.init_device

    @functools.wraps(init_device)
    def checked_runner(self: Any) -> None:
        if self.use_v2_model_runner:
            raise support.NotExactError(
                "specops.vllm: cannot be exact with vLLM's second model runner, which "
                f"{_SECOND_RUNNER}=1, watermarking and HiSparse choose"
            )
        init_device(self)

    CPUWorker.init_device = checked_runner
    load_model = CPUModelRunner.load_model

    @functools.wraps(load_model)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        faults = support.faults_of_config(self.vllm_config, parts)
        faults += compiled.faults_of(self.vllm_config)
        if not faults or len(parts) < len(PARTS):
            compiled.prepare(self.vllm_config, parts)
            load_model(self, *args, **kwargs)
            faults += support.faults_of_model(self.model, parts)
            faults += support.faults_of_ranks(get_tp_group())
        if faults and len(parts) == len(PARTS):
            raise support.NotExactError(f"specops.vllm: cannot be exact with {'; '.join(faults)}")
        for fault in faults:
            _logger.warning("specops.vllm: not exact: %s.", fault)
        if len(parts) == len(PARTS):
            threads.rest_openmp()

    CPUModelRunner.load_model = checked
