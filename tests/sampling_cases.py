# SPDX-License-Identifier: Apache-2.0
"""Parameters and batches for the tests of the sampling family."""

from collections.abc import Callable
from typing import Any

import torch
from specops.sampling import (
    DraftProbs,
    Drafts,
    EmittedTokens,
    EndingRules,
    RequestStatus,
    SampleOutputs,
    SamplingTensors,
    TokenCounts,
    TopLogprobsOutputs,
    VerifyOutputs,
)
from torch import Tensor

# Named tuples of the ops, and the names under which tests pass their fields.
SAMPLING = {name: name for name in SamplingTensors._fields}
DRAFTS = {"output_indptr": "output_indptr", "draft_token_ids": "token_ids", "parents": "parents"}
DRAFT_PROBS = {"draft_probs": "probs", "draft_prob_token_ids": "token_ids"}
DRAFT_PROBS |= {"draft_prob_rows": "rows"}
GROUPS: dict[str, Any] = {
    "sampling": (SamplingTensors, SAMPLING),
    "drafts": (Drafts, DRAFTS),
    "draft_probs": (DraftProbs, DRAFT_PROBS),
}
COMMIT: dict[str, Any] = {
    "emitted": (
        EmittedTokens,
        {"output_token_ids": "token_ids", "logprobs": "logprobs", "ranks": "ranks"},
    ),
    "rules": (EndingRules, {name: name for name in EndingRules._fields}),
    "counts": (TokenCounts, {name: name for name in TokenCounts._fields}),
    "status": (RequestStatus, {name: name for name in RequestStatus._fields}),
}
OUTPUTS: dict[str, Any] = {
    "sample": (SampleOutputs, {name: name for name in SampleOutputs._fields}),
    "verify": (
        VerifyOutputs,
        {name: name for name in VerifyOutputs._fields[1:]} | {"output_token_ids": "token_ids"},
    ),
    "top_logprobs": (TopLogprobsOutputs, {name: name for name in TopLogprobsOutputs._fields}),
}


def by_field(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the op with the fields of its named tuples as arguments."""

    def call(*args: Any, **given: Any) -> Any:
        if function.__name__ == "verify" and len(args) == 3:
            args, given = args[:1], {**given, **dict(zip(DRAFTS, args[1:], strict=False))}
        groups = dict(COMMIT if function.__name__ == "commit" else GROUPS)
        if function.__name__ in OUTPUTS:
            groups["outputs"] = OUTPUTS[function.__name__]
        made = {}
        for argument, (group, fields) in groups.items():
            own = {field: given.pop(name) for name, field in fields.items() if name in given}
            needed = {name: None for name in group._fields if name not in group._field_defaults}
            if any(value is not None for value in own.values()):
                made[argument] = group(**{**needed, **own})
        return function(*args, **given, **made)

    return call


def row_params(rows: int, **overrides: Any) -> dict[str, Tensor]:
    """Return per-row parameters: no filters, temperature 1, unless overridden by number or list."""
    columns: dict[str, Any] = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seeds": list(range(rows)),
        **overrides,
    }
    dtypes = {"top_k": torch.int32, "seeds": torch.int64, "choice_index": torch.int32}
    return {
        name: torch.tensor(
            value if isinstance(value, list) else [value] * rows,
            dtype=dtypes.get(name, torch.float32),
        )
        for name, value in columns.items()
    }


def mixed_params(rows: int) -> dict[str, Tensor]:
    """Return random parameters that cover every combination of filters in a few dozen rows."""

    def pick(values: list[Any]) -> list[Any]:
        return [values[int(i)] for i in torch.randint(len(values), (rows,))]

    return row_params(
        rows,
        temperature=pick([0.0, 0.3, 0.8, 1.0, 2.5]),
        top_k=pick([-1, 0, 1, 3, 40, 100_000]),
        top_p=pick([0.0, 0.2, 0.9, 1.0, 1.0]),
        min_p=pick([0.0, 0.0, 0.02, 0.5, 1.0]),
        seeds=torch.randint(-(2**63), 2**63 - 1, (rows,)).tolist(),
        choice_index=pick([0, 1, 7]),
    )


def positions_from(start: int, rows: int) -> Tensor:
    return torch.arange(start, start + rows, dtype=torch.int32)


def on_device(arguments: dict[str, Any], device: str | torch.device) -> dict[str, Any]:
    """Return the arguments with tensors moved to the device; numbers stay as they are."""
    return {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in arguments.items()
    }
