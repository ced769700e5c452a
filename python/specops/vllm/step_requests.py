# SPDX-License-Identifier: Apache-2.0
"""The requests of the current step's rows, which vLLM does not give to proposers."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from specops.vllm.settings import VARIABLE


class Row(NamedTuple):
    """One row of the batch.

    Attributes:
        request_id: vLLM's.
        num_prompt_tokens: tokens that are no output.
        sampling_params: vLLM's SamplingParams.
    """

    request_id: str
    num_prompt_tokens: int
    sampling_params: Any


_rows: Sequence[Row] | None = None


def note(rows: Sequence[Row]) -> None:
    """Keeps the rows of the step that is being sampled."""
    global _rows
    _rows = rows


def rows() -> Sequence[Row]:
    """Returns the rows of the step that was sampled last.

    Raises:
        RuntimeError: no step was sampled by the plug-in.
    """
    if _rows is None:
        raise RuntimeError(
            f"specops.vllm: PredictedOutputs needs the part sampling in {VARIABLE}, which was not "
            "switched on"
        )
    return _rows
