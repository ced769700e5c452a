# SPDX-License-Identifier: Apache-2.0
"""Parameters and batches for the tests of the sampling family."""

from typing import Any

import torch
from torch import Tensor


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
