# SPDX-License-Identifier: Apache-2.0
"""What a step is to compute: the scheduler's answer, which drafters and runner take."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from specops.engine.draft_trees import num_chains
from specops.engine.request import Request


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
