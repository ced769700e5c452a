# SPDX-License-Identifier: Apache-2.0
"""The ops as torch sees them: `torch.ops.specops.*`, and their way through `torch.compile`.

Importing this module is all there is to it, and only those who compile or export need to. Each op
is registered with a schema that says what it writes, kernels for cpu and cuda that are the compiled
module's own functions, and a fake kernel. After the import, Dynamo takes a call of `specops.dense`,
`specops.attention` and so on as a call of the registered op: the documented functions work inside
`torch.compile(fullgraph=True)` as they stand. Eager calls never come through here.
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

# Kinds of _C.pyi in the words of schemas. A parameter that may be one number for all rows is a
# tensor in a graph, of that dtype.
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
# What of a PackedWeight crosses into the ops. Schemas have no such type: there each field is an
# argument of its own, `weight_kind` and so on, and is put back into a PackedWeight on the way.
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
    """Every op but `take_error`, and the kinds of its arguments.

    No argument ties `take_error` to the ops before it, so a graph could move it.
    """
    for node in ast.parse(Path(__file__).with_name("_C.pyi").read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name != "take_error":
            kinds = {a.arg: ast.unparse(a.annotation) for a in node.args.args if a.annotation}
            if any("Tensor" in kind for kind in kinds.values()):
                yield node.name, kinds


def _schema(name: str, kinds: dict[str, str], *, per_request: bool = False) -> str:
    """Every output and workspace is the caller's, so nothing is returned."""
    arguments = []
    for argument, kind in _apart(kinds).items():
        if kind in _NUMBERS:
            kind = "Tensor | None"
        if kind == _PROCESSORS:
            arguments.append(f"Tensor?[] {argument}")
            continue
        kind, _, optional = kind.partition(" | ")
        if optional == "Tensor":  # a size of all requests, or one each
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
    """What tracers run: it refuses what the op would refuse if torch had not hidden it by then.

    Outputs come from the caller, and nothing of theirs changes but their contents.
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
    """The kinds of an op's arguments with the fields of a PackedWeight in its place."""
    apart = {}
    for argument, kind in kinds.items():
        is_weight = kind == PackedWeight.__name__
        fields = {f"{argument}_{name}": of for name, of in _WEIGHT_FIELDS.items()}
        apart.update(fields if is_weight else {argument: kind})
    return apart


def _kernel(name: str, kinds: dict[str, str]) -> Callable[..., None]:
    """The compiled module's function, as the schema has its arguments."""
    function = getattr(_C, name)
    if PackedWeight.__name__ not in kinds.values():
        return function  # type: ignore[no-any-return]
    place, fields = list(kinds.values()).index(PackedWeight.__name__), len(_WEIGHT_FIELDS)

    def kernel(*args: Any) -> None:
        weight = PackedWeight(*args[place : place + fields])
        function(*args[:place], weight, *args[place + fields :])

    return kernel


def _register(schema: str, kinds: dict[str, str]) -> OpOverload:
    """Defines one op and hands it the compiled module's function on both devices."""
    overload = schema.partition("(")[0]
    name, _, kind = overload.partition(".")
    # Strides as the caller made them: the ops refuse others rather than copy.
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(overload, _kernel(name, kinds), key)
    torch.library.register_fake(f"specops::{overload}", _fake_of(name, _apart(kinds)), lib=_LIBRARY)
    return getattr(getattr(torch.ops.specops, name), kind or "default")  # type: ignore[no-any-return]


def _trace_as(function: Callable[..., None]) -> Callable[[Callable[..., None]], object]:
    """Makes Dynamo inline the decorated function wherever it meets a call of `function`."""
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
            given = list(args)
            for place, dtype in numbers.items():
                if isinstance(given[place], int | float):
                    given[place] = torch.full((count,), given[place], dtype=dtype, device=device)
            args = tuple(given)
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
    """An upper bound for any device, of shapes that the compiler may leave open."""
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
    """Bounds for any device, of shapes that the compiler may leave open."""
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
