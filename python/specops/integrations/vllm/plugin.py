# SPDX-License-Identifier: Apache-2.0
"""vLLM's entry point into specops: enables the parts that SPECOPS_VLLM names.

vLLM calls `register` once in each of its processes, before it creates a model. It ignores a plug-in
that cannot be imported, so this module imports nothing that could be missing.
"""

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

from specops.integrations.vllm import hooks, model_check, packed_linear, threads
from specops.integrations.vllm.settings import EXACT, PARTS, VARIABLE, parts_of, strategy_of
from specops.integrations.vllm.support import NotExactError

_logger = logging.getLogger("vllm.specops")
_registered: frozenset[str] | None = None


def switched_on() -> frozenset[str]:
    """Return the parts that `register` enabled in this process; empty if it was not called."""
    return _registered or frozenset()


def register() -> None:
    """Enable the parts of SPECOPS_VLLM; without it, do nothing.

    If vLLM does not compute on a CPU, nothing is enabled and a warning is logged.

    Raises:
        ValueError: SPECOPS_VLLM or SPECOPS_VLLM_VERIFY has an unknown word.
        NotExactError: all parts are requested, but vLLM does not compute on a CPU.
        HookError: vLLM differs from the version the plug-in supports. Nothing has been changed.
    """
    global _registered
    parts = parts_of()
    if not parts or _registered is not None:
        return
    strategy = strategy_of()
    import vllm
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        sentence = (
            f"specops: {VARIABLE} requires vLLM on a CPU, got {type(current_platform).__name__}; "
            "unset it to use only the drafters"
        )
        if len(parts) == len(PARTS):
            raise NotExactError(sentence)
        _logger.warning("%s.", sentence)
        return
    threads.remember_mask()
    threads.rest_numba()
    os.environ.setdefault(model_check.SECOND_RUNNER, "0")
    hooks.check(hooks.of_parts(parts))
    if not vllm.__version__.startswith(hooks.TESTED):
        _logger.warning(
            "specops is tested with vLLM %s, got %s, whose hooks match.",
            hooks.TESTED,
            vllm.__version__,
        )
    for part, switch_on in _SWITCHES.items():
        if part in parts:
            switch_on()
    model_check.switch_on(parts)
    _registered = parts
    _logger.info(
        "specops replaces these parts of vLLM: %s%s%s.",
        ", ".join(part for part in PARTS if part in parts),
        f" (drafts are verified by {strategy})" if "sampling" in parts else "",
        "" if len(parts) == len(PARTS) else f" (only {VARIABLE}={EXACT} makes all of them exact)",
    )


def _switch_attention() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(
        AttentionBackendEnum.CPU_ATTN, "specops.integrations.vllm.attention.SpecopsAttentionBackend"
    )


def _switch_norm() -> None:
    from vllm.model_executor.custom_op import CustomOp

    from specops.integrations.vllm.layers import SpecopsRMSNorm

    CustomOp.register_oot(SpecopsRMSNorm, name="RMSNorm")


def _switch_activation() -> None:
    from vllm.model_executor.custom_op import CustomOp

    from specops.integrations.vllm.layers import SpecopsSiluAndMul

    CustomOp.register_oot(SpecopsSiluAndMul, name="SiluAndMul")


def _switch_linear() -> None:
    import vllm.model_executor.layers.utils as utils
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker

    utils.dispatch_cpu_unquantized_gemm = packed_linear.use_packed_linear
    reload_weights, finish_update = GPUModelRunner.reload_weights, Worker.finish_weight_update

    @functools.wraps(reload_weights)
    def reloaded(
        self: Any,
        weights_iterator: Any = None,
        weights_path: Any = None,
        is_checkpoint_format: bool = True,
    ) -> None:
        if not is_checkpoint_format:
            raise ValueError(
                "specops: is_checkpoint_format must be True, got False: linear packs the weights "
                "and can only reload them in the checkpoint's format"
            )
        reload_weights(self, weights_iterator, weights_path, is_checkpoint_format)
        packed_linear.pack_again(self.get_model().modules())

    @functools.wraps(finish_update)
    def finished(self: Any) -> None:
        finish_update(self)
        packed_linear.pack_again(self.model_runner.get_model().modules())

    GPUModelRunner.reload_weights = reloaded
    Worker.finish_weight_update = finished


def _switch_sampling() -> None:
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from specops.integrations.vllm.request_parameters import refused, seed_of
    from specops.integrations.vllm.sample_step import sample_step

    GPUModelRunner._sample = sample_step
    verify, process_inputs = SamplingParams.verify, InputProcessor.process_inputs

    @functools.wraps(verify)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        verify(self, *args, **kwargs)
        wrong = refused(self)
        if wrong is not None:
            raise VLLMValidationError(f"specops: sampling does not support {wrong}")

    @functools.wraps(process_inputs)
    def seeded(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = process_inputs(self, *args, **kwargs)
        params = request.sampling_params
        if params is not None:
            # Must run before vLLM adds random characters to the id.
            params.seed = seed_of(request.request_id, params, self.model_config.seed or 0)
        return request

    SamplingParams.verify = checked
    InputProcessor.process_inputs = seeded


_SWITCHES: dict[str, Callable[[], None]] = {
    "norm": _switch_norm,
    "activation": _switch_activation,
    "linear": _switch_linear,
    "attention": _switch_attention,
    "sampling": _switch_sampling,
}
