# SPDX-License-Identifier: Apache-2.0
"""vLLM compiled by torch: specops' ops stay calls of themselves, and nothing else computes.

`specops.torch_ops` registers the ops, so that no compiler looks into them or puts them together
with others. What Inductor makes kernels of itself may then only move numbers, which `graph_check`
sees to.
"""

from collections.abc import Collection
from typing import Any

from specops.vllm.settings import PARTS

_DYNAMO_TRACE_ONCE = 2  # vLLM's only mode of compilation on a CPU
_INDUCTOR = "inductor"
_ALL, _NONE = "all", "none"
_PASS = "post_grad_custom_post_pass"


def is_on(config: Any) -> bool:
    """Whether vLLM's configuration has a compiler run at all."""
    return config.compilation_config.mode not in (None, 0)


def faults_of(config: Any) -> list[str]:
    """What of vLLM's configuration of its compiler cannot be exact, or has not been tried."""
    if not is_on(config):
        return []
    given = config.compilation_config
    found = []
    if given.mode != _DYNAMO_TRACE_ONCE or given.backend != _INDUCTOR:
        found.append(f"compilation by mode {int(given.mode)}, backend {given.backend}")
    found += [f"compilation with custom op {op}" for op in given.custom_ops if op[0] == "-"]
    if _PASS in given.inductor_compile_config:
        found.append(f"compilation with a {_PASS}")
    if not isinstance(config.additional_config, dict):
        found.append(f"compilation with an additional_config of {type(config.additional_config)}")
    return found


def prepare(config: Any, parts: Collection[str]) -> None:
    """Has a model that is loaded afterwards compiled around specops' ops, and its graph looked at.

    Args:
        config: vLLM's. If it compiles at all, its custom_ops and the passes of its compiler change,
            and its additional_config says so: what vLLM keeps of earlier runs on disk was compiled
            without them.
        parts: of SPECOPS_VLLM. With all of them, a graph that computes is refused.
    """
    if not is_on(config):
        return
    import specops.torch_ops  # noqa: F401  registers the ops

    given = config.compilation_config
    config.additional_config = {**config.additional_config, "specops": sorted(parts)}
    given.custom_ops[:] = [_ALL if op == _NONE else op for op in given.custom_ops]
    if len(parts) == len(PARTS):
        from specops.vllm.graph_check import GraphCheck

        given.inductor_compile_config[_PASS] = GraphCheck()
