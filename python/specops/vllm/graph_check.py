# SPDX-License-Identifier: Apache-2.0
"""Looks at the graph that Inductor is about to compile: only specops and vLLM's kernels compute.

Imports torch's compiler: only a vLLM that compiles needs this module.
"""

import operator
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

from specops.vllm.support import NotExactError

# Ops that stay calls: ours, and what is the same in eager vLLM.
_OPAQUE = frozenset(
    {
        "_C::rotary_embedding",
        "vllm::all_reduce",
        "vllm::unified_attention_with_output",
        "vllm::unified_kv_cache_update",
    }
)
# Ops that move numbers, make constants, or change a type.
_MOVED = (
    "_reshape_alias _to_copy _unsafe_view alias arange as_strided cat clone constant_pad_nd "
    "contiguous convert_element_type copy copy_ detach embedding empty empty_like empty_strided "
    "expand full full_like gather index index_select iota lift_fresh_copy masked_fill new_empty "
    "new_empty_strided new_full new_ones new_zeros ones ones_like permute reshape scalar_tensor "
    "select slice slice_scatter split split_with_sizes squeeze stack sym_size t transpose unbind "
    "unsqueeze view where zeros zeros_like"
)
_MOVES = frozenset(_MOVED.split())
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
        """What a graph that was kept on disk must have been looked at by; in vLLM's hash, too."""
        return get_hash_for_files((__file__,)).hex()


def _computes(node: Node) -> str | None:
    """The op's name if the node computes numbers of a model."""
    if node.op != "call_function":
        return None
    target: Any = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        target = node.args[0]  # the op that it makes functional
    if not isinstance(target, torch._ops.OpOverload):
        sizes = target in _ARITHMETIC_OF_SIZES or not isinstance(node.meta.get("val"), torch.Tensor)
        return None if sizes else str(getattr(target, "__name__", target))
    name = target._schema.name
    namespace, _, op = name.partition("::")
    if namespace == "specops" or name in _OPAQUE or op in _MOVES:
        return None
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and not value.dtype.is_floating_point:
        return None  # tokens, positions and masks
    return None if isinstance(value, torch.SymInt | int) else name
