# SPDX-License-Identifier: Apache-2.0
"""The protocol between the engine and whatever proposes draft tokens.

A method is one `Drafter`. The engine asks it what it needs (states of the target's layers, room for
keys and values), tells it who runs, and gives it a place in every step: behind `commit` on the
device, and on the host once the results are read. What it knows of a request is its own.

A request may have several drafters. They share one table of proposals, a row per slot: each
continues what those before it have drafted. So a hybrid is a sequence of drafters, and no drafter
knows of another. Proposals are only ever proposals: no drafter can change a token that is emitted.

Nor can a drafter that raises end a request. Where it was asked about one request, that one goes on
without drafts; where it was asked about a step, all do that it drafts for, or those that a
`RequestsFailed` names. The engine counts failures by method.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specops.engine.config import EngineConfig
from specops.engine.device import Device
from specops.engine.drafters.trees import DraftTree
from specops.engine.errors import ModelError
from specops.engine.memory.kv_cache import DraftKv
from specops.engine.memory.step_memory import Layout
from specops.engine.memory.step_shape import StepShape
from specops.engine.models import CacheRoom, KvBytes, KvCache, LayerBatch, Transformer
from specops.engine.request import Request
from specops.sampling import LogitsProcessors
from specops.tokenizer import Tokenizer


class RequestsFailed(Exception):
    """A failure in a drafter's part of a step that concerns some of its requests only.

    A hook raises it once it has done its work for the other requests, which keep their drafts.

    Args:
        message: the failure.
        requests: that continue without drafts.
    """

    def __init__(self, message: str, requests: Sequence[Request]) -> None:
        super().__init__(message)
        self.requests = requests


class MethodUnavailable(ModelError):
    """This model cannot draft so; an engine runs with the other methods.

    Attributes:
        reason: the same in words that name no path, for whoever sends requests.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class DrafterContext:
    """What a drafter is made from.

    Attributes:
        config: of the engine; `max_num_seqs` slots, `max_num_batched_tokens` rows a step.
        target: the model that verifies.
        tokenizer: of the model.
        device: where steps run.
    """

    config: EngineConfig
    target: Transformer
    tokenizer: Tokenizer
    device: Device


@dataclass(frozen=True)
class DrawnFrom:
    """The vocabulary that drawn drafts are from."""

    size: int
    token_map: Tensor | None  # int32 [size]: the token of each entry; None: every token in turn


@dataclass(slots=True, kw_only=True)
class TargetStep(LayerBatch):
    """The target's rows as drafters on the device read them, and the table that they draft into.

    Tensors are those of `batching.prepare_batch`, `sampling.sample` and `sampling.commit` under the
    same names, after `commit`. Workspace and sums are as large as the step's drafters have asked
    for.
    """

    shape: StepShape
    hidden: Tensor  # [rows, hidden_size], the states after the final norm
    taps: Mapping[int, Tensor]  # by layer, [rows, hidden_size]: the states that leave it
    row_to_request: Tensor  # int32 [rows]
    slots: Tensor  # int32 [batch]; -1: no request
    token_ids: Tensor  # int32 [slots, max_model_len], prompt and output of each request
    lens: Tensor  # int32 [slots], how many of them are there
    # What the target's tokens are drawn with, [batch].
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    typical_p: Tensor | None
    seeds: Tensor
    choice_index: Tensor
    # Changes of the logits of the token behind the known ones, a row per request; None: none. A
    # grammar's masks are not there: the host knows them once it has read this step's tokens.
    processors: LogitsProcessors | None
    # By the names of drafters that draw drafts with numbers of their own: receives what they were
    # drawn from, float32 [slots, drafts, vocabulary], by request of the step and draft.
    draft_probs: Mapping[str, Tensor]
    # The proposals, by slot: zero drafts in the beginning of a step.
    draft_token_ids: Tensor  # int32 [slots, k]
    num_draft_tokens: Tensor  # int32 [slots]


@dataclass(slots=True)
class Proposals:
    """The drafts for the next step, by slot, on the host."""

    token_ids: NDArray[np.int32]  # [slots, k]
    counts: NDArray[np.int32]  # [slots]
    # [slots, k]: how sure the drafter is of each, in [0, 1]; 0: it does not say. Only requests
    # whose drafts are selected need them.
    confidences: NDArray[np.float32]
    # [slots, k]: the draft before it that each hangs on, or -1: the last token; of rows that
    # are trees, bool [slots]. Others are chains. The likeliest drafts come first.
    parents: NDArray[np.int32]
    are_trees: NDArray[np.bool_]
    # [slots, k]: who made each, by its place among the request's drafters; -1: the companion, which
    # writes that itself, as who adds branches to a tree does. Of requests that report their drafts
    # alone.
    stages: NDArray[np.int8]

    @classmethod
    def empty(cls, slots: int, width: int) -> "Proposals":
        """A table of no proposals.

        Args:
            slots: its rows.
            width: most drafts of each.
        """
        return cls(
            np.full((slots, width), -1, dtype=np.int32),
            np.zeros(slots, dtype=np.int32),
            np.zeros((slots, width), dtype=np.float32),
            np.full((slots, width), -1, dtype=np.int32),
            np.zeros(slots, dtype=np.bool_),
            np.zeros((slots, width), dtype=np.int8),
        )

    def widened(self, width: int) -> "Proposals":
        """The same with room for more drafts."""
        slots, have = self.token_ids.shape
        wider = Proposals.empty(slots, width)
        for one in fields(self):
            mine, its = getattr(self, one.name), getattr(wider, one.name)
            its[(slice(None), slice(have))[: mine.ndim]] = mine
        return wider

    def put_tree(self, slot: int, tree: DraftTree) -> None:
        """Writes a tree in the place of a row."""
        count = self.counts[slot] = len(tree.token_ids)
        self.token_ids[slot, :count] = tree.token_ids
        self.parents[slot, :count] = tree.parents
        self.confidences[slot, :count] = tree.chances
        self.are_trees[slot] = True

    def of_slots(self, slots: Sequence[int]) -> "Proposals":
        """A copy of the rows of some slots."""
        return Proposals(*(getattr(self, one.name)[slots] for one in fields(self)))

    def put(self, slots: Sequence[int], rows: "Proposals") -> None:
        """Writes the rows of some slots back."""
        for one in fields(self):
            getattr(self, one.name)[slots] = getattr(rows, one.name)


@dataclass(slots=True)
class Scheduled:
    """A request's part in one step: rows for token_ids[num_computed:] and then its drafts."""

    request: Request
    num_rows: int
    num_drafts: int  # of these rows, the last num_drafts hold draft tokens
    emits: bool  # False for a prefill chunk that does not end the known tokens
    draft_limit: int = 0  # most drafts to propose at the end of the step, for the one after it


@dataclass(slots=True)
class StepResults:
    """What a step emitted, on the host, when all of its requests have taken it over."""

    parts: Sequence[Scheduled]
    slots: NDArray[np.int32]  # [batch]
    token_ids: Tensor  # int32 [batch, w]; a row begins with what was emitted
    lens_before: NDArray[np.int32]  # [batch], tokens of each request before the step
    lens: NDArray[np.int32]  # by slot, tokens of each request by now
    proposals: Proposals  # what the drafters on the device have drafted; to be continued
    # Ends a request with an error, for a drafter that has found what it is constrained by broken.
    fail: Callable[[Request, Exception], None]


class DrafterStep:
    """A drafter's part in all steps of one shape: its arrays, and what it does in each of them.

    Attributes:
        workspace_size: floats of workspace that its attention takes.
        sums_size: floats that its projections split their sums with.
    """

    workspace_size = 0
    sums_size = 0

    def fill(self, parts: Sequence[Scheduled]) -> None:
        """Writes the host's side of its arrays, before the step runs."""

    def launch(self, target: TargetStep) -> None:
        """Drafts on the device, behind `commit`. Captured once and replayed on other numbers."""

    def read(self, parts: Sequence[Scheduled], proposals: Proposals) -> None:
        """Takes over what its results say beside the drafts, such as confidences."""


class Drafter:
    """A drafting method.

    Attributes:
        name: of the method, as the registry has it.
        taps: layers of the target whose states it reads, beside those after the final norm. They
            are there in the steps that it has planned something for.
        kv_bytes: what all that it keeps takes: on pages, and in slots if its layers have states.
        states: what has these, once it is allocated; None: there are none.
        drawn_from: the vocabulary of drafts that it draws with numbers of their own; None: it draws
            none. It writes what they were drawn from into `TargetStep.draft_probs`.
        max_drafts: the longest chain that it drafts for a request in a step; None: as long as is
            wanted. Requests that want more are refused.
    """

    name: str
    taps: tuple[int, ...] = ()
    kv_bytes = KvBytes()
    states: KvCache | None = None
    drawn_from: DrawnFrom | None = None
    max_drafts: int | None = None

    def allocate(self, room: CacheRoom) -> None:
        """Allocates what it keeps: for so much there is room, which was chosen with it."""

    def draft_kv(self, request: Request) -> DraftKv | None:
        """What it keeps on a request's pages; None: nothing. Asked once, when a request comes."""
        return None

    def kv_tensors(self) -> Sequence[Tensor]:
        """What it keeps on pages: tensors that a page's number indexes first."""
        return ()

    def start(self, request: Request) -> bool:
        """A request of this method got its slot (again, after a preemption).

        Returns:
            Whether memory has moved, so that steps made so far must be made anew.
        """
        return False

    def stop(self, request: Request, slot: int) -> None:
        """It gave its slot back: finished, aborted or preempted."""

    def leave(self, request: Request) -> None:
        """It is gone, or goes on without drafts; it need not have been here."""

    def plan(self, parts: Sequence[Scheduled], shape: StepShape) -> Hashable | None:
        """Says what it does behind a step: all of it that its arrays and launches depend on.

        Asked again, with `new_step` and `fill`, where the step is made without what has failed.

        Args:
            parts: of the step.
            shape: of the step, rounded already, without drafters.

        Returns:
            What `new_step` takes, and replays share; None: nothing.
        """
        return None

    def new_step(
        self, key: Hashable, shape: StepShape, inputs: Layout, results: Layout
    ) -> DrafterStep:
        """Makes its part of the steps of one shape.

        Args:
            key: what `plan` said.
            shape: of the step.
            inputs: takes the arrays that the host fills for the device.
            results: takes those that come back.
        """
        raise TypeError(f"drafter {self.name} plans work on the device, but has no steps")

    def finish(self, results: StepResults) -> None:
        """Takes in a step on the host, whatever its requests; may draft into the proposals."""

    def gauges(self) -> Mapping[str, int]:
        """The values of `Method.gauges`, by name."""
        return {}

    def forget(self) -> None:
        """Drops what it has learnt from other requests; none is running."""

    @property
    def drafts_common_text(self) -> bool:
        """Whether drafts may come from a text that neither the request nor its client has."""
        return False

    @property
    def is_unsaved(self) -> bool:
        """Whether `save` would write something that is in no file."""
        return False

    def save(self) -> None:
        """Writes what outlives the engine, where there is any."""


def stage_limit(part: Scheduled, name: str) -> int:
    """Most drafts that a request is to have once drafter `name` has drafted for it; 0: not its."""
    return min(part.draft_limit, part.request.draft_stages.get(name, 0))
