# SPDX-License-Identifier: Apache-2.0
"""Looks at the graph that Inductor is about to compile: only specops and vLLM's kernels compute.

Imports torch's compiler: only a vLLM that compiles needs this module.
"""

import operator
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

from specops.vllm import op_check
from specops.vllm.support import NotExactError

_ARITHMETIC_OF_SIZES = frozenset({operator.getitem, torch.sym_sum})


class GraphCheck(CustomGraphPass):
    """A pass of Inductor's that changes nothing, and refuses a graph in which anything computes."""

    def __call__(self, graph: Graph) -> None:
        """Looks at every call.

        Raises:
            NotExactError: one of them computes, and is neither ours nor vLLM's own kernel.
        """
        found = dict.fromkeys(name for name in map(_computes, graph.nodes) if name is not None)
        if found:
            raise NotExactError(
                f"specops.vllm: cannot be exact with a model that computes {', '.join(found)} "
                "itself, compiled (start with --enforce-eager)"
            )

    def uuid(self) -> str:
        """A hash of the check, so that vLLM reuses no graph that another check has passed."""
        return get_hash_for_files((__file__, op_check.__file__)).hex()


def _computes(node: Node) -> str | None:
    """The op's name if the node computes numbers of a model."""
    if node.op != "call_function":
        return None
    target: Any = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        target = node.args[0]  # the op that it makes functional
    value = node.meta.get("val")
    if not isinstance(target, torch._ops.OpOverload):
        sizes = target in _ARITHMETIC_OF_SIZES or not isinstance(value, torch.Tensor)
        return None if sizes else str(getattr(target, "__name__", target))
    outputs = value if isinstance(value, tuple | list) else [value]
    return None if op_check.is_allowed(target, outputs, is_compiled=True) else target._schema.name
