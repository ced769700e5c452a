# SPDX-License-Identifier: Apache-2.0
"""Registration of the ops as `torch.ops.specops.*`, for `torch.compile`.

Import this module before compiling or exporting; nothing else is needed. Each op is registered with
a schema that marks the arguments it writes, kernels for cpu and cuda (the functions of the compiled
module), and a fake kernel. After the import, Dynamo treats a call of `specops.dense`,
`specops.attention` and so on as a call of the registered op: the documented functions work
unchanged inside `torch.compile(fullgraph=True)`. Eager calls do not use this module.
"""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from specops import _C
from specops.dense import PackedWeight

# Schema types for the annotations in _C.pyi. A parameter that may be one number for all rows
# becomes a tensor of that dtype in a graph.
_TYPES = {
    "Tensor": "Tensor",
    "Size": "SymInt",
    "int": "int",
    "bool": "bool",
    "float": "float",
    "str": "str",
}
_NUMBERS = {"Tensor | float | None": torch.float32, "Tensor | int | None": torch.int32}
_PROCESSORS = "tuple[Tensor | None, ...]"
# Fields of a PackedWeight that the ops use. Schemas have no such type: each field is a separate
# argument, `weight_kind` and so on, and the kernel puts the fields back into a PackedWeight.
_WEIGHT_FIELDS = {
    "kind": "str",
    "data": "Tensor",
    "scales": "Tensor | None",
    "num_outputs": "Size",
    "num_inputs": "Size",
    "activation": "str | None",
    "offsets": "Tensor | None",
    "group": "int",
    "activations": "str",
    "input_order": "Tensor | None",
    "code_values": "Tensor | None",
}


def _ops() -> Iterator[tuple[str, dict[str, str]]]:
    """Yield every op but `take_error`, with the annotations of its arguments.

    No argument makes `take_error` depend on the ops before it, so a graph could reorder it.
    """
    for node in ast.parse(Path(__file__).with_name("_C.pyi").read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name != "take_error":
            kinds = {a.arg: ast.unparse(a.annotation) for a in node.args.args if a.annotation}
            if any("Tensor" in kind for kind in kinds.values()):
                yield node.name, kinds


def _schema(name: str, kinds: dict[str, str], *, per_request: bool = False) -> str:
    """Return the schema of an op. The caller passes outputs and workspaces; nothing is returned."""
    arguments = []
    for argument, kind in _apart(kinds).items():
        if kind in _NUMBERS:
            kind = "Tensor | None"
        if kind == _PROCESSORS:
            arguments.append(f"Tensor?[] {argument}")
            continue
        kind, _, optional = kind.partition(" | ")
        if optional == "Tensor":  # one value for all requests, or one per request
            kind, optional = ("Tensor" if per_request else kind), ""
        mark = "?" if optional == "None" else ""
        if kind == "Written":
            of_schema = f"Tensor(a{len(arguments)}!){mark}"
        else:
            of_schema = _TYPES[kind] + mark
        arguments.append(f"{of_schema} {argument}")
    return f"{name}({', '.join(arguments)}) -> ()"


_LIBRARY: Any = torch.library.Library("specops", "DEF")  # type: ignore[no-untyped-call]


def _fake_of(op: str, kinds: dict[str, str]) -> Callable[..., None]:
    """Return the fake kernel: it only rejects inputs that require gradients.

    The real op would reject them too, but torch hides the flag by then. The caller passes the
    outputs, so a fake kernel has no shapes to compute.
    """

    def fake(*args: Any) -> None:
        if not torch.is_grad_enabled():
            return
        for argument, value in zip(kinds, args, strict=True):
            if isinstance(value, Tensor) and value.requires_grad:
                raise ValueError(
                    f"{op}: {argument} must be {_C.no_gradient}, got requires_grad=True"
                )

    return fake


def _apart(kinds: dict[str, str]) -> dict[str, str]:
    """Return the arguments of an op with each PackedWeight replaced by its fields."""
    apart = {}
    for argument, kind in kinds.items():
        is_weight = kind == PackedWeight.__name__
        fields = {f"{argument}_{name}": of for name, of in _WEIGHT_FIELDS.items()}
        apart.update(fields if is_weight else {argument: kind})
    return apart


def _kernel(name: str, kinds: dict[str, str]) -> Callable[..., None]:
    """Return the compiled module's function with the arguments of the schema."""
    function = getattr(_C, name)
    if PackedWeight.__name__ not in kinds.values():
        return function  # type: ignore[no-any-return]
    place = list(kinds.values()).index(PackedWeight.__name__)
    fields = len(_WEIGHT_FIELDS)

    def kernel(*args: Any) -> None:
        weight = PackedWeight(*args[place : place + fields])
        function(*args[:place], weight, *args[place + fields :])

    return kernel


def _register(schema: str, kinds: dict[str, str]) -> OpOverload:
    """Define one op, and register the compiled module's function for both devices."""
    overload = schema.partition("(")[0]
    name, _, kind = overload.partition(".")
    # Inductor must keep the caller's strides: the ops reject other layouts rather than copy.
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(overload, _kernel(name, kinds), key)
    torch.library.register_fake(f"specops::{overload}", _fake_of(name, _apart(kinds)), lib=_LIBRARY)
    return getattr(getattr(torch.ops.specops, name), kind or "default")  # type: ignore[no-any-return]


def _trace_as(function: Callable[..., None]) -> Callable[[Callable[..., None]], object]:
    """Make Dynamo inline the decorated function wherever it meets a call of `function`."""
    return torch.compiler.substitute_in_graph(function, skip_signature_check=True)


def _trace_as_op(function: Callable[..., None], op: OpOverload, kinds: dict[str, str]) -> None:
    names = list(kinds)
    numbers = {
        names.index(name): _NUMBERS[kinds[name]] for name in names if kinds[name] in _NUMBERS
    }
    requests = [names.index(name) for name in ("positions", "output_indptr") if name in names]
    weight = next((i for i, kind in enumerate(kinds.values()) if kind == "PackedWeight"), None)

    @_trace_as(function)
    def call(*args: Any) -> None:
        if any(isinstance(args[place], int | float) for place in numbers):
            count, device = args[0].shape[0], args[0].device
            for place in requests:
                if args[place] is not None:
                    count = args[place].shape[0] - (names[place] == "output_indptr")
            values = list(args)
            for place, dtype in numbers.items():
                if isinstance(values[place], int | float):
                    values[place] = torch.full((count,), values[place], dtype=dtype, device=device)
            args = tuple(values)
        if weight is not None:
            args = (*args[:weight], *args[weight][: len(_WEIGHT_FIELDS)], *args[weight + 1 :])
        op(*args)


# Every overload of torch.ops.specops, by name.
OPS: dict[str, OpOverload] = {}
for _name, _kinds in _ops():
    OPS[_name] = _register(_schema(_name, _kinds), _kinds)
    if any(_kind.endswith("| Tensor") for _kind in _kinds.values()):
        _overload = f"{_name}.per_request"
        OPS[_overload] = _register(_schema(_overload, _kinds, per_request=True), _kinds)
    else:
        _trace_as_op(getattr(_C, _name), OPS[_name], _kinds)


@_trace_as(_C.ngram_propose)
def _ngram_propose(
    token_ids: Tensor,
    lens: Tensor,
    max_draft_tokens: Tensor,
    min_ngram_size: int | Tensor,
    max_ngram_size: int | Tensor,
    leftmost: bool | Tensor,
    *rest: Any,
) -> None:
    choices = (min_ngram_size, max_ngram_size, leftmost)
    if not any(isinstance(choice, Tensor) for choice in choices):
        OPS["ngram_propose"](token_ids, lens, max_draft_tokens, *choices, *rest)
        return
    each = [
        choice if isinstance(choice, Tensor) else torch.full_like(lens, choice)
        for choice in choices
    ]
    OPS["ngram_propose.per_request"](token_ids, lens, max_draft_tokens, *each, *rest)


@_trace_as(_C.sampling_workspace_bytes)  # type: ignore[arg-type]
def _sampling_workspace_bytes(
    rows: int, vocab_size: int, element_bytes: int, batch: int, device_index: int
) -> int:
    """Return an upper bound of the size for any device; shapes may be symbolic."""
    if device_index < 0:
        return 0
    leaves = (vocab_size * element_bytes + 2047) // 2048
    return 16 + 4 * (batch + rows) + rows * (24 * leaves + 8)


@_trace_as(_C.attention_workspace_size)  # type: ignore[arg-type]
def _attention_workspace_size(
    rows: int,
    num_qo_heads: int,
    head_dim: int,
    num_kv_heads: int,
    num_pages: int,
    page_size: int,
    batch: int,
    device_index: int,
) -> tuple[int, int]:
    """Return upper bounds of the sizes for any device; shapes may be symbolic."""
    tokens = num_pages * page_size
    if device_index < 0:
        return (tokens // 512 + 32) * min(rows * num_qo_heads, 64 * num_kv_heads) * (
            head_dim + 2
        ), 0
    sms, counters = 160, 8192
    totals = sms * 128 * head_dim * 2
    states = (8 * sms * 64 * 5 // 4 + (tokens // 2048 + 1 + batch) * num_qo_heads * 8) * (
        head_dim + 2
    )
    return counters + totals + states, counters
