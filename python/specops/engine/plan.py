# SPDX-License-Identifier: Apache-2.0
"""What a step is to compute: the scheduler's answer, which drafters and runner take."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from specops.engine.draft_trees import num_chains
from specops.engine.errors import EngineError
from specops.engine.request import Request

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Scheduled:
    """A request's part in one step: rows for token_ids[num_computed:] and then its drafts."""

    request: Request
    num_rows: int
    num_drafts: int  # of these rows, the last num_drafts hold draft tokens
    emits: bool  # False for a prefill chunk that does not end the known tokens
    draft_limit: int = 0  # most drafts to propose at the end of the step, for the one after it
    # Of drafts in preorder that are no chain, the one that each hangs on, and pages for the step
    # alone, which all chains but the first need; None: they are one chain.
    draft_parents: Sequence[int] | None = None
    spare_pages: Sequence[int] = ()
    draft_sources: Sequence[str] = ()  # who proposed each draft, where the request asks for that

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
    """One step, and who gained and lost a slot for it."""

    parts: list[Scheduled] = field(default_factory=list)
    prefixes: PrefixGroups | None = None  # None: nobody shares anything
    paused: list[Request] = field(default_factory=list)  # they decode, but it is not their turn
    # In the order of what happened: a request that lost its slot may get one again.
    stopped: list[tuple[Request, int]] = field(default_factory=list)  # with the slot it had
    started: list[Request] = field(default_factory=list)
    failed: list[Request] = field(default_factory=list)  # they end with an error, the others go on

    def fail(self, request: Request, error: Exception) -> None:
        """Ends a request of the step with an error of its own; the others go on.

        Whoever catches what one request has raised calls this. Before the step runs, the request is
        taken out of it; later, what the step has computed for it is dropped.
        """
        if request.error is None:
            logger.error("request %s ends with an error", request.request_id, exc_info=error)
            self._end(request, error)

    def fail_all(self, error: BaseException) -> None:
        """Ends all requests of the step with the error of the step, which is raised on."""
        for part in self.parts:
            if part.request.error is None:
                self._end(part.request, error)

    def _end(self, request: Request, error: BaseException) -> None:
        request.finish_reason, request.error = "error", described(error)
        self.failed.append(request)

    def drop_failed(self) -> None:
        """Takes the requests that have failed so far out of the step."""
        if self.failed:
            self.parts[:] = [part for part in self.parts if part.request.error is None]
            self.prefixes = None  # they are of all the parts; without them, nothing is shared


def described(error: BaseException) -> str:
    """An exception in words: the sentences of ops and of the engine say all, others lack a name."""
    if isinstance(error, (EngineError, ValueError)):
        return str(error)
    return f"{type(error).__name__}: {error}"
