# SPDX-License-Identifier: Apache-2.0
"""Result of a step for one request, passed from the runner to the engine."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specops.api.outputs import StepDrafts, TokenLogprob
from specops.sampling import FinishReason


@dataclass(slots=True)
class Emitted:
    """Tokens that a step committed for one request, before the search for stop strings."""

    token_ids: Sequence[int] = ()
    num_accepted: int = 0  # drafts that verification accepted; some may not be committed
    num_from_drafts: int = 0  # leading tokens that equal these drafts
    logprobs: list[TokenLogprob] = field(default_factory=list)  # if the request asked for logprobs
    drafts: StepDrafts | None = None  # if the request asked to report drafts
    finish_reason: FinishReason = FinishReason.RUNNING
    stop_index: int = -1  # index of the stop token or sequence that ended the request
    thinking_state: int | None = None  # value after `sampling.commit`; None: unchanged
    prompt_scores: Sequence[Any] = ()  # scores of prompt tokens, for `PromptLogprobs.add`
