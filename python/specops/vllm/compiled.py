# SPDX-License-Identifier: Apache-2.0
"""vLLM compiled by torch: specops' ops stay calls of themselves, and nothing else computes.

`specops.torch_ops` registers the ops, so that no compiler looks into them or puts them together
with others. Kernels that Inductor makes itself may then only move numbers, which `graph_check`
enforces.
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
    """Settings of vLLM's compiler that cannot be exact, or were never tested."""
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
    """Makes later models compile around specops' ops, and their graphs pass the check.

    Args:
        config: vLLM's. If it compiles at all, its custom_ops and the passes of its compiler change,
            and its additional_config records it, because vLLM's compiled graphs on disk from
            earlier runs lack these passes.
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
