# SPDX-License-Identifier: Apache-2.0
"""Support for vLLM with torch.compile: all arithmetic is in specops' ops, which stay opaque calls.

`specops.torch_ops` registers the ops, so that no compiler traces into them or fuses them with
others. Kernels that Inductor generates may then only move data, which `graph_check` enforces.
"""

from collections.abc import Collection
from typing import Any

from specops.integrations.vllm.settings import PARTS

_DYNAMO_TRACE_ONCE = 2  # vLLM's usual compilation mode on a CPU
_INDUCTOR = "inductor"
_ALL, _NONE = "all", "none"
_PASS = "post_grad_custom_post_pass"


def is_on(config: Any) -> bool:
    """Return whether vLLM's configuration enables compilation."""
    return config.compilation_config.mode not in (None, 0)


def faults_of(config: Any) -> list[str]:
    """Return vLLM's compiler settings that could change bits or are untested."""
    if not is_on(config):
        return []
    compilation = config.compilation_config
    faults = []
    if compilation.mode != _DYNAMO_TRACE_ONCE or compilation.backend != _INDUCTOR:
        faults.append(f"compilation by mode {int(compilation.mode)}, backend {compilation.backend}")
    faults += [f"compilation with custom op {op}" for op in compilation.custom_ops if op[0] == "-"]
    if _PASS in compilation.inductor_compile_config:
        faults.append(f"compilation with a {_PASS}")
    if not isinstance(config.additional_config, dict):
        faults.append(f"compilation with an additional_config of {type(config.additional_config)}")
    return faults


def prepare(config: Any, parts: Collection[str]) -> None:
    """Make vLLM compile models around specops' ops, and check the compiled graphs.

    Args:
        config: vLLM's configuration. If it compiles at all, its custom_ops and compiler passes are
            changed. additional_config records this, so that vLLM does not reuse compiled graphs
            on disk that were made without these passes.
        parts: parts of SPECOPS_VLLM. With all of them, a graph is refused if anything but kernels
            of specops and vLLM computes.
    """
    if not is_on(config):
        return
    import specops.torch_ops  # noqa: F401  registers the ops

    compilation = config.compilation_config
    config.additional_config = {**config.additional_config, "specops": sorted(parts)}
    compilation.custom_ops[:] = [_ALL if op == _NONE else op for op in compilation.custom_ops]
    if len(parts) == len(PARTS):
        from specops.integrations.vllm.graph_check import GraphCheck

        compilation.inductor_compile_config[_PASS] = GraphCheck()
