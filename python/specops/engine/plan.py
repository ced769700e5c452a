# SPDX-License-Identifier: Apache-2.0
"""The plan of one step, from the scheduler to the runner and the drafters."""

import logging
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from specops.api.errors import described
from specops.engine.prompt_logprobs import PromptRows
from specops.engine.request import Request

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Part:
    """A request's rows in one step: rows of tokens it has, followed by rows of its drafts."""

    request: Request
    begin: int  # position of the first row; all tokens before it are computed
    num_rows: int
    num_drafts: int  # the last num_drafts rows hold draft tokens
    emits: bool  # False for a prefill chunk that does not end the known tokens
    prompt_rows: PromptRows | None = None  # rows that give logprobs of prompt tokens
    draft_limit: int = 0  # maximum drafts to propose at the end of this step


@dataclass(frozen=True, slots=True)
class PrefixGroups:
    """Groups of requests that begin with the same pages, in the form of `PrefixTensors`.

    Attributes:
        leaders: int32 [levels, parts], the index of the first part of each part's group.
        lens: int32 [levels, parts], the number of tokens that the group shares.
        num_saved_tokens: tokens whose keys and values the step does not read again.
    """

    leaders: NDArray[np.int32]
    lens: NDArray[np.int32]
    num_saved_tokens: int


@dataclass(slots=True)
class Plan:
    """One step, and the requests that got or lost a slot for it."""

    parts: list[Part] = field(default_factory=list)
    prefixes: PrefixGroups | None = None  # None: no request shares a prefix
    paused: list[Request] = field(default_factory=list)  # decoding requests that skip this step
    # All stops precede all starts: a request that lost its slot may get one again in the same step.
    stopped: list[tuple[Request, int]] = field(default_factory=list)  # with its former slot
    started: list[Request] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # error message by request id

    @property
    def num_rows(self) -> int:
        """Number of rows of all parts."""
        return sum(part.num_rows for part in self.parts)

    def fail(self, request_id: str, error: Exception) -> None:
        """End one request of the step with an error; the other requests go on.

        Call this when handling a request raises. Before the step runs, the request is removed from
        it; later, its results of the step are dropped.
        """
        if request_id not in self.failed:
            logger.error("request %s ends with an error", request_id, exc_info=error)
            self.failed[request_id] = described(error)

    def fail_all(self, error: BaseException) -> None:
        """End all requests of the step with the step's error; the caller raises that error."""
        for part in self.parts:
            self.failed.setdefault(part.request.request_id, described(error))

    def drop_failed(self) -> None:
        """Remove the requests that have failed so far from the step."""
        if self.failed:
            self.parts[:] = [
                part for part in self.parts if part.request.request_id not in self.failed
            ]
            self.prefixes = None  # they were computed for all parts; drop them
