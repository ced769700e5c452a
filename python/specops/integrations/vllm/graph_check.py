# SPDX-License-Identifier: Apache-2.0
"""Check of graphs before Inductor compiles them: only kernels of specops and vLLM may compute.

This module imports torch's compiler, so it is imported only if vLLM compiles.
"""

import operator
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

from specops.integrations.vllm import op_check
from specops.integrations.vllm.support import NotExactError

_ARITHMETIC_OF_SIZES = frozenset({operator.getitem, torch.sym_sum})


class GraphCheck(CustomGraphPass):
    """Inductor pass that refuses a graph if anything but kernels of specops and vLLM computes.

    It changes no graph.
    """

    def __call__(self, graph: Graph) -> None:
        """Check every call of a graph.

        Raises:
            NotExactError: a node computes and is neither specops' nor vLLM's own kernel.
        """
        computed = dict.fromkeys(name for name in map(_computes, graph.nodes) if name is not None)
        if computed:
            raise NotExactError(
                f"specops: cannot be exact with a model that computes {', '.join(computed)} "
                "itself, compiled (start with --enforce-eager)"
            )

    def uuid(self) -> str:
        """Return a hash of the check, so that vLLM reuses no graph checked by another version."""
        return get_hash_for_files((__file__, op_check.__file__)).hex()


def _computes(node: Node) -> str | None:
    """Return the op's name if the node computes floating-point numbers of the model, else None."""
    if node.op != "call_function":
        return None
    target: Any = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        if not isinstance(node.args[0], torch._ops.OpOverload):
            return str(target)  # a graph of its own, such as a branch of cond
        target = node.args[0]  # the op wrapped by auto-functionalization
    value = node.meta.get("val")
    if not isinstance(target, torch._ops.OpOverload):
        sizes = target in _ARITHMETIC_OF_SIZES or not isinstance(value, torch.Tensor)
        return None if sizes else str(getattr(target, "__name__", target))
    outputs = value if isinstance(value, tuple | list) else [value]
    return None if op_check.is_allowed(target, outputs, is_compiled=True) else target._schema.name
