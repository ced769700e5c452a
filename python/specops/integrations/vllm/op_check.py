# SPDX-License-Identifier: Apache-2.0
"""Check of the torch ops that a model calls: each output row must be the same in any batch.

A model's file may compute anything between vLLM's layers. `OpCheck` checks one forward pass, op by
op; `graph_check` checks the graph that a compiler is about to compile, with the same lists.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# vLLM's ops that are row-identical by test or contain specops' ops, and collectives, whose order of
# summation `support.faults_of_ranks` checks.
_OPAQUE = _names(
    "_C::rotary_embedding vllm::unified_attention_with_output vllm::unified_kv_cache_update "
    "vllm::all_reduce vllm::all_gather _C::shm_allreduce _C::shm_gather _C::shm_all_gather "
    "c10d::allreduce_ c10d::gather_ c10d::allgather_ c10d::_allgather_base_"
)
# Ops that move data, create constants, or change a type, also in place.
_MOVES = _names(
    "_reshape_alias _to_copy _unsafe_view alias arange as_strided cat clone constant_pad_nd "
    "contiguous convert_element_type copy detach embedding empty empty_like empty_strided "
    "expand fill full full_like gather index index_select iota lift_fresh lift_fresh_copy "
    "masked_fill new_empty new_empty_strided new_full new_ones new_zeros ones ones_like permute "
    "reshape scalar_tensor select slice slice_scatter split split_with_sizes squeeze stack "
    "sym_size t transpose unbind unsqueeze view where zero zeros zeros_like"
)
# Elementwise ops that round once and correctly, so that all instruction sets give the same bits. A
# compiler may fuse two of them into one rounding, so they are allowed in eager mode only.
_ROUNDED = _names("abs add clamp clamp_max clamp_min div maximum minimum mul neg relu rsub sub")
_TORCH = frozenset({"aten", "prims"})
_TOKENS = 4  # number of tokens in the checked pass


def is_allowed(
    op: torch._ops.OpOverload, outputs: Sequence[Any], alpha: Any = 1, *, is_compiled: bool
) -> bool:
    """Return whether an op may be called by a model that must be exact.

    Args:
        op: the called op.
        outputs: outputs of the call; ops with integer or boolean outputs only (tokens, positions,
            masks, sizes) are allowed.
        alpha: factor of the second operand of `add` and `sub`.
        is_compiled: whether a compiler generates the kernel.
    """
    name = op._schema.name
    namespace, _, short = name.partition("::")
    if namespace == "specops" or name in _OPAQUE:
        return True
    if namespace in _TORCH:
        short = short.removesuffix("_")
        if short in _MOVES:
            return True
        is_complex = any(
            isinstance(output, torch.Tensor) and output.is_complex() for output in outputs
        )
        if short in _ROUNDED and not is_compiled and not is_complex and alpha in (1, -1):
            return True
    return bool(outputs) and not any(map(_is_of_model, outputs))


def _is_of_model(value: Any) -> bool:
    """Return whether an output may hold floating-point numbers, not only integers or booleans."""
    if isinstance(value, torch.Tensor):
        return value.is_floating_point() or value.is_complex()
    return not isinstance(value, torch.SymInt | torch.SymBool | int)


class OpCheck(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that records which forbidden ops are called, and by which module.

    Attributes:
        found: class of the calling module (None: outside any module) -> names of forbidden ops.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[type | None, list[str]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call an op, and check it or the ops that it decomposes into."""
        kwargs = kwargs or {}
        with self:
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        result = func(*args, **kwargs)
        outputs = result if isinstance(result, tuple | list) else [result]
        if not is_allowed(func, outputs, _alpha_of(func, args, kwargs), is_compiled=False):
            names = self.found.setdefault(_caller(), [])
            if func._schema.name not in names:
                names.append(func._schema.name)
        return result


def _alpha_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the factor of the second operand, which some overloads take by position."""
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    return given.get("alpha", 1)


def look_at(runner: Any, check: OpCheck) -> None:
    """Run a loaded model eagerly on a few tokens, including the logits, under a check.

    Args:
        runner: vLLM's V1 or V2 model runner; its model has no KV cache yet.
        check: the check that is active while the model computes.
    """
    model = runner.get_model()
    with _looked_at(model, check):
        # Only the V2 model runner, which has `req_states`, must be told to skip attention.
        more = {"skip_attn": True} if hasattr(runner, "req_states") else {}
        _, hidden = runner._dummy_run(min(_TOKENS, runner.max_num_tokens), is_profile=True, **more)
    with torch.inference_mode(), check:
        model.compute_logits(hidden)


@contextmanager
def _looked_at(model: nn.Module, check: OpCheck) -> Iterator[None]:
    """Make a model's `forward` run eagerly under the check, but not its drafter's."""
    forward = model.forward
    compiled: list[Any] = [
        module for module in model.modules() if getattr(module, "do_not_compile", None) is False
    ]

    def checked(*args: Any, **kwargs: Any) -> Any:
        with check:
            return forward(*args, **kwargs)

    model.forward = checked
    for module in compiled:
        module.do_not_compile = True
    try:
        yield
    finally:
        del model.forward
        for module in compiled:
            module.do_not_compile = False


def _caller() -> type | None:
    """Return the class of the innermost module with a method on the call stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            return type(owner)
        frame = frame.f_back
    return None
