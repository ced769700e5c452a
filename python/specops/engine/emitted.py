# SPDX-License-Identifier: Apache-2.0
"""What a step brings one request, as the runner hands it to the engine."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specops.engine.outputs import StepDrafts, TokenLogprob
from specops.sampling import FinishReason


@dataclass(slots=True)
class Emitted:
    """What a step committed for one request; stop strings are yet to be looked for."""

    token_ids: Sequence[int] = ()
    accepted: Sequence[int] = ()  # drafts that verification accepted; some may not be committed
    num_from_drafts: int = 0  # leading tokens that are these drafts
    logprobs: list[TokenLogprob] = field(default_factory=list)  # if the request asks for them
    drafts: StepDrafts | None = None  # likewise
    finish_reason: FinishReason = FinishReason.RUNNING
    stop_index: int = -1  # of the stop token or sequence that ended it
    thinking_state: int | None = None  # as `sampling.commit` left it; None: as it was
    prompt_scores: Sequence[Any] = ()  # of tokens of its prompt, as `PromptLogprobs.add` has them
