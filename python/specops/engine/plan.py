# SPDX-License-Identifier: Apache-2.0
"""What a step is to compute, as ids and numbers: the scheduler's answer, which the runner takes."""

import logging
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from specops.engine.drafters.trees import num_chains
from specops.engine.errors import described
from specops.engine.prompt_logprobs import PromptRows

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Part:
    """A request's rows in one step: those of tokens that it has, and behind them its drafts."""

    request_id: str
    slot: int
    begin: int  # position of the first row; all tokens before it have been computed
    num_tokens: int  # that the request has
    num_rows: int
    num_drafts: int  # of these rows, the last num_drafts hold draft tokens
    emits: bool  # False for a prefill chunk that does not end the known tokens
    token_ids: Sequence[int]  # of the rows before the drafts
    pages: "array[int]"  # of the request, in order
    prompt_rows: PromptRows | None = None  # the rows that say what logprobs prompt tokens have
    draft_limit: int = 0  # most drafts to propose at the end of the step, for the one after it
    # Of drafts in preorder that are no chain, the one that each hangs on, and pages for the step
    # alone, which all chains but the first need; None: they are one chain.
    draft_parents: Sequence[int] | None = None
    spare_pages: Sequence[int] = ()

    @property
    def num_chains(self) -> int:
        """As how many chains its rows are computed."""
        return 1 if self.draft_parents is None else num_chains(self.draft_parents)


@dataclass(frozen=True, slots=True)
class PrefixGroups:
    """Groups of requests that begin with the same pages, as `append_attention` has them.

    Attributes:
        leaders: int32 [levels, chains], of each chain the place of the first of its group. Every
            part is one chain, but for those that verify trees.
        lens: int32 [levels, chains], how many tokens the group shares.
        num_saved_tokens: of keys and values that the step need not read for every request.
    """

    leaders: NDArray[np.int32]
    lens: NDArray[np.int32]
    num_saved_tokens: int


@dataclass(slots=True)
class Plan:
    """One step, and who gained and lost a slot for it: request ids, with their slots."""

    parts: list[Part] = field(default_factory=list)
    prefixes: PrefixGroups | None = None  # None: nobody shares anything
    paused: list[int] = field(default_factory=list)  # slots that decode, but not in this step
    # All that stopped did so before any started: a request that lost its slot may get one again.
    stopped: list[tuple[str, int]] = field(default_factory=list)
    started: list[tuple[str, int]] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # by request id, what has failed

    @property
    def num_rows(self) -> int:
        """Rows of all parts."""
        return sum(part.num_rows for part in self.parts)

    def fail(self, request_id: str, error: Exception) -> None:
        """Ends a request of the step with an error of its own; the others go on.

        Whoever catches what one request has raised calls this. Before the step runs, the request is
        taken out of it; later, what the step has computed for it is dropped.
        """
        if request_id not in self.failed:
            logger.error("request %s ends with an error", request_id, exc_info=error)
            self.failed[request_id] = described(error)

    def fail_all(self, error: BaseException) -> None:
        """Ends all requests of the step with the error of the step, which is raised on."""
        for part in self.parts:
            self.failed.setdefault(part.request_id, described(error))

    def drop_failed(self) -> None:
        """Takes the requests that have failed so far out of the step."""
        if self.failed:
            self.parts[:] = [part for part in self.parts if part.request_id not in self.failed]
            self.prefixes = None  # they are of all the parts; without them, nothing is shared
