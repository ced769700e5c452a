# SPDX-License-Identifier: Apache-2.0
"""vLLM's entry points into specops, which enable the parts that SPECOPS_VLLM names.

In each of its processes, vLLM calls `platform` to choose its platform, and `register` before it
creates a model. It ignores a plug-in that cannot be imported, so this module imports nothing that
could be missing.
"""

import logging
from collections.abc import Callable
from typing import Any

from specops.integrations.vllm import hooks, packed_linear, threads
from specops.integrations.vllm.settings import (
    CUSTOM_CLASS,
    EXACT,
    PARTS,
    VARIABLE,
    parts_of,
    strategy_of,
)
from specops.integrations.vllm.support import NotExactError

_logger = logging.getLogger("vllm.specops")
_PLATFORM = "specops.integrations.vllm.platform.SpecopsCpuPlatform"
_registered: frozenset[str] | None = None


def switched_on() -> frozenset[str]:
    """Return the parts that `register` enabled in this process; empty if it was not called."""
    return _registered or frozenset()


def platform() -> str | None:
    """Return the class path of specops' platform for vLLM; None to leave the choice to vLLM.

    vLLM ignores errors raised here, so `register` reports an unknown part.
    """
    try:
        if not parts_of():
            return None
    except ValueError:
        return None
    from vllm.platforms import builtin_platform_plugins

    return None if builtin_platform_plugins["cpu"]() is None else _PLATFORM


def register() -> None:
    """Enable the parts of SPECOPS_VLLM; without it, do nothing.

    If vLLM does not compute on a CPU and not all parts are requested, nothing is enabled and a
    warning is logged.

    Raises:
        ValueError: SPECOPS_VLLM or SPECOPS_VLLM_VERIFY has an unknown word.
        NotExactError: all parts are requested, but vLLM does not compute on a CPU; or vLLM did not
            load the platform plug-in.
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
    if type(current_platform).__name__ != _PLATFORM.rpartition(".")[2]:
        raise NotExactError(
            "specops: vLLM did not load the platform plug-in specops; unset VLLM_PLUGINS or name "
            "specops in it, and install specops again if its metadata is older than its code"
        )
    threads.remember_mask()
    threads.rest_numba()
    hooks.check_version(vllm.__version__)
    hooks.check(hooks.of_parts(parts))
    _allow_second_runner()
    for part, switch_on in _SWITCHES.items():
        if part in parts:
            switch_on()
    _registered = parts
    _logger.info(
        "specops replaces these parts of vLLM: %s%s%s.",
        ", ".join(part for part in PARTS if part in parts),
        f" (drafts are verified by {strategy})" if "sampling" in parts else "",
        "" if len(parts) == len(PARTS) else f" (only {VARIABLE}={EXACT} makes all of them exact)",
    )


def _allow_second_runner() -> None:
    """Accept vLLM's V2 model runner without Triton and with drafts of a custom class."""
    from vllm.config import VllmConfig

    added = [f"speculative method '{method}'" for method in (CUSTOM_CLASS, "suffix")]

    def validate(self: Any) -> None:
        features = self._get_v2_model_runner_unsupported_features()
        unsupported = [feature for feature in features if feature not in added]
        if unsupported:
            raise ValueError(
                f"Model Runner V2 does not yet support: {', '.join(unsupported)} "
                "(set VLLM_USE_V2_MODEL_RUNNER=0)"
            )

    VllmConfig._validate_v2_model_runner = validate


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
    from vllm.model_executor.custom_op import CustomOp

    from specops.integrations.vllm import experts, quantized_linear

    utils.dispatch_cpu_unquantized_gemm = packed_linear.use_packed_linear
    quantized_linear.register()
    CustomOp.register_oot(experts.SpecopsExperts, name="UnquantizedFusedMoEMethod")


# The worker and the platform enable the part sampling.
_SWITCHES: dict[str, Callable[[], None]] = {
    "norm": _switch_norm,
    "activation": _switch_activation,
    "linear": _switch_linear,
    "attention": _switch_attention,
}
