# SPDX-License-Identifier: Apache-2.0
"""The protocol between the engine and drafters, which propose draft tokens.

A method is one `Drafter`. The engine reads what it requires (auxiliary hidden states of the target,
memory for keys and values), tells it which requests run, and calls it in every step: after `commit`
on the device, and on the host once the results are read. A drafter keeps its own per-request state.

A request may have several drafters. They share one table of proposals with a row per slot, and each
continues what the drafters before it have drafted. So a hybrid is a sequence of drafters, and no
drafter knows of another. Proposals are only verified: no drafter can change an emitted token.

A drafter that raises cannot end a request either. If a hook for one request raises, that request
continues without drafts. If a hook for a step raises, all requests of the drafter continue without
drafts, or only those that a `RequestsFailed` names. The engine counts failures by method.
"""

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specops.api.config import EngineConfig
from specops.api.errors import ModelError
from specops.api.tokenizer import Tokenizer
from specops.engine.device import Device
from specops.engine.memory.kv_cache import DraftKv
from specops.engine.memory.step_memory import Layout
from specops.engine.memory.step_shape import StepShape
from specops.engine.models import CacheCapacity, KvBytes, KvCache, LayerBatch, Transformer
from specops.engine.plan import Part
from specops.engine.request import Request
from specops.sampling import LogitsProcessors, SamplingTensors


class RequestsFailed(Exception):
    """A failure in a drafter's part of a step that concerns some of its requests only.

    A hook raises it after its work for the other requests, which keep their drafts.

    Args:
        message: the failure.
        requests: requests that continue without drafts.
    """

    def __init__(self, message: str, requests: Sequence[Request]) -> None:
        super().__init__(message)
        self.requests = requests


class MethodUnavailable(ModelError):
    """The model does not support this method; the engine runs with the other methods.

    Attributes:
        reason: the message without paths, for clients.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class DrafterContext:
    """The parts of an engine that a drafter is made from.

    Attributes:
        config: the engine's configuration: `max_num_seqs` slots, `max_num_batched_tokens` rows per
            step.
        target: the model that verifies.
        tokenizer: tokenizer of the model.
        device: device that runs the steps.
    """

    config: EngineConfig
    target: Transformer
    tokenizer: Tokenizer
    device: Device


@dataclass(frozen=True)
class DrawnFrom:
    """The vocabulary of drafts that are drawn at random."""

    size: int
    token_map: Tensor | None  # int32 [size]: token id of each entry; None: entry i is token i


@dataclass(slots=True, kw_only=True)
class TargetStep(LayerBatch):
    """The target's rows as drafters on the device read them, and the table that they draft into.

    Tensors have the names that they have in `batching.prepare_batch`, `sampling.sample` and
    `sampling.commit`, in their state after `commit`. The attention and linear workspaces are as
    large as the step's drafters require.
    """

    shape: StepShape
    cache: KvCache  # the target's keys and values
    hidden: Tensor  # [rows, hidden_size], the states after the final norm
    aux_hidden_states: Mapping[int, Tensor]  # by layer, its output [rows, hidden_size]
    row_to_request: Tensor  # int32 [rows]
    slots: Tensor  # int32 [batch]; -1: no request
    token_ids: Tensor  # int32 [slots, max_model_len], prompt and output of each request
    lens: Tensor  # int32 [slots], number of tokens of each request
    sampling: SamplingTensors  # parameters of the target's tokens, [batch]
    # Changes to the logits of the next token, a row per request; None: none. Grammar masks are not
    # included: the host computes them only after it has read this step's tokens.
    processors: LogitsProcessors | None
    # By name of each drafter that draws with its own random numbers: receives the distributions of
    # its drafts, float32 [slots, drafts, vocabulary], by request of the step and draft.
    draft_probs: Mapping[str, Tensor]
    # The proposals, by slot; the number of drafts is 0 at the start of a step.
    draft_token_ids: Tensor  # int32 [slots, k]
    num_draft_tokens: Tensor  # int32 [slots]


@dataclass(slots=True)
class Proposals:
    """The drafts for the next step, by slot, on the host."""

    token_ids: NDArray[np.int32]  # [slots, k]
    counts: NDArray[np.int32]  # [slots]
    # [slots, k]: the drafter's confidence in each draft, in [0, 1]; 0: unknown. Only requests with
    # draft selection use it.
    confidences: NDArray[np.float32]
    # [slots, k]: source of each draft as an index into the request's drafters; -1: the companion.
    # A companion writes it itself. Valid only for requests that report their drafts.
    stages: NDArray[np.int8]

    @classmethod
    def empty(cls, slots: int, width: int) -> "Proposals":
        """Return a table without proposals.

        Args:
            slots: number of rows.
            width: number of columns, which is the maximum number of drafts of a request.
        """
        return cls(
            np.full((slots, width), -1, dtype=np.int32),
            np.zeros(slots, dtype=np.int32),
            np.zeros((slots, width), dtype=np.float32),
            np.zeros((slots, width), dtype=np.int8),
        )

    def widened(self, width: int) -> "Proposals":
        """Return a copy with `width` columns."""
        slots, have = self.token_ids.shape
        wider = Proposals.empty(slots, width)
        for one in fields(self):
            mine, its = getattr(self, one.name), getattr(wider, one.name)
            its[(slice(None), slice(have))[: mine.ndim]] = mine
        return wider

    def of_slots(self, slots: Sequence[int]) -> "Proposals":
        """Return a copy of the rows of some slots."""
        return Proposals(*(getattr(self, one.name)[slots] for one in fields(self)))

    def put(self, slots: Sequence[int], rows: "Proposals") -> None:
        """Write rows back to some slots; the inverse of `of_slots`."""
        for one in fields(self):
            getattr(self, one.name)[slots] = getattr(rows, one.name)


@dataclass(slots=True)
class StepResults:
    """The tokens that a step emitted, on the host, after all of its requests committed them."""

    parts: Sequence[Part]
    slots: NDArray[np.int32]  # [batch]
    token_ids: Tensor  # int32 [batch, w]; each row begins with the emitted tokens
    lens_before: NDArray[np.int32]  # [batch], number of tokens before the step
    lens: NDArray[np.int32]  # by slot, number of tokens after the step
    proposals: Proposals  # from the drafters on the device; host drafters continue them
    # Ends a request with an error, for a drafter that finds the request's grammar broken.
    fail: Callable[[Request, Exception], None]


class DrafterStep:
    """A drafter's part in all steps of one shape: its arrays, and its work in each of the steps.

    Attributes:
        workspace_size: floats of workspace that its attention uses.
        sums_size: floats of workspace that its linear layers use.
    """

    workspace_size = 0
    sums_size = 0

    def fill(self, parts: Sequence[Part]) -> None:
        """Write the host side of the drafter's arrays before the step runs."""

    def launch(self, target: TargetStep) -> None:
        """Draft on the device after `commit`. The launches are captured once and replayed."""

    def read(self, parts: Sequence[Part], proposals: Proposals) -> None:
        """Read the drafter's results other than the drafts, such as confidences."""


class Drafter:
    """A drafting method.

    Attributes:
        name: name of the method, as in the registry.
        aux_layers: layers of the target whose output it reads, besides the output of the final
            norm. Steps provide them if the drafter has planned work for the step.
        kv_bytes: memory of its caches: on pages, and in slots if its layers keep states.
        states: the cache that holds these states, after `allocate`; None: there are no states.
        drawn_from: vocabulary of the drafts that it draws with its own random numbers; None: it
            draws none. It writes their distributions into `TargetStep.draft_probs`.
        max_drafts: the longest chain that it drafts for a request in a step; None: no limit.
            Requests for longer chains are rejected.
    """

    name: str
    aux_layers: tuple[int, ...] = ()
    kv_bytes = KvBytes()
    states: KvCache | None = None
    drawn_from: DrawnFrom | None = None
    max_drafts: int | None = None

    def allocate(self, capacity: CacheCapacity) -> None:
        """Allocate the drafter's caches; the sizes in `capacity` take `kv_bytes` into account."""

    def draft_kv(self, request: Request) -> DraftKv | None:
        """Return a request's draft KV on pages, or None; called once per request."""
        return None

    def kv_tensors(self) -> Sequence[Tensor]:
        """Return the drafter's tensors whose first dimension is the page number."""
        return ()

    def start(self, request: Request) -> bool:
        """Start drafting for a request of this method that got its slot, also after a preemption.

        Returns:
            Whether memory has moved, so that existing steps must be made again.
        """
        return False

    def stop(self, request: Request, slot: int) -> None:
        """Handle a request that gave its slot back: it finished, was aborted or was preempted."""

    def leave(self, request: Request) -> None:
        """Handle a request that ended or stopped speculating. It may never have started here."""

    def plan(self, parts: Sequence[Part], shape: StepShape) -> Hashable | None:
        """Return a key of the work after a step: everything that the arrays and launches depend on.

        The engine calls `plan`, `new_step` and `fill` again if it repeats the step without a
        drafter that failed.

        Args:
            parts: parts of the step.
            shape: shape of the step, already rounded up to its bucket, without drafters.

        Returns:
            The key, which `new_step` receives and replays share; None: no work.
        """
        return None

    def new_step(
        self, key: Hashable, shape: StepShape, inputs: Layout, results: Layout
    ) -> DrafterStep:
        """Make the drafter's part of the steps of one shape.

        Args:
            key: returned by `plan`.
            shape: shape of the step.
            inputs: allocates the arrays that the host fills for the device.
            results: allocates the arrays that the device returns.
        """
        raise TypeError(f"drafter {self.name} plans work on the device, but has no steps")

    def finish(self, results: StepResults) -> None:
        """Process a step on the host, for all of its requests; may add drafts to the proposals."""

    def gauges(self) -> Mapping[str, int]:
        """Return the values of `Method.gauges`, by name."""
        return {}

    def learn(self, prompt: bytes, answer: NDArray[np.int32], salt: str | None) -> None:
        """Learn from an answer of another engine as from one of its own.

        Args:
            prompt: `prompt_digest` of the prompt.
            answer: token ids of the answer.
            salt: cache salt of the request.
        """

    def problem(self) -> str | None:
        """Return a sentence about what is wrong with its latest drafts; None: nothing is known."""
        return None

    def forget(self) -> None:
        """Drop what the drafter has learned from other requests. No request is running."""

    @property
    def drafts_common_text(self) -> bool:
        """True if drafts may come from a text that neither the request nor its client has."""
        return False

    @property
    def is_unsaved(self) -> bool:
        """True if `save` would write data that is in no file yet."""
        return False

    def save(self) -> None:
        """Save data that outlives the engine, if there is any."""


def prompt_digest(token_ids: Sequence[int]) -> bytes:
    """Return the digest by which drafters recognize a prompt."""
    return hashlib.sha256(np.array(token_ids, dtype=np.int32).tobytes()).digest()


def stage_limit(part: Part, name: str) -> int:
    """Return how many drafts a request may have after drafter `name`; 0 if it does not use it."""
    return min(part.draft_limit, part.request.drafts.stages.get(name, 0))
