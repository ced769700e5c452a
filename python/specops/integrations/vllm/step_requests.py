# SPDX-License-Identifier: Apache-2.0
"""Record of the requests in the current step's rows, which vLLM does not pass to proposers."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from specops.integrations.vllm.settings import VARIABLE


class Row(NamedTuple):
    """Request in one row of the batch.

    Attributes:
        request_id: vLLM's request id.
        num_prompt_tokens: number of tokens of the prompt.
        sampling_params: vLLM's SamplingParams.
    """

    request_id: str
    num_prompt_tokens: int
    sampling_params: Any


_rows: Sequence[Row] | None = None


def note(rows: Sequence[Row]) -> None:
    """Record the rows of the step that is being sampled."""
    global _rows
    _rows = rows


def rows() -> Sequence[Row]:
    """Return the rows of the step that was sampled last.

    Raises:
        RuntimeError: the plug-in has not sampled a step.
    """
    if _rows is None:
        raise RuntimeError(
            f"specops: PredictedOutputs requires the part sampling, which is disabled; add it to "
            f"{VARIABLE}"
        )
    return _rows
