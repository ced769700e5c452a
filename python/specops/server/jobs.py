# SPDX-License-Identifier: Apache-2.0
"""A job: what one HTTP request wants of the engine, and the outputs that come back for it."""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from specops.engine.sampling_params import SamplingParams
from specops.server.api_error import ApiError, not_read, server_error
from specops.server.unread import Unread, size_of
from specops.service.messages import Accepted, KvTransfer, Output

_numbers = itertools.count()


class StepSeconds(NamedTuple):
    """What steps took, by their parts."""

    verify: float  # the model, and the choice of tokens
    draft: float


@dataclass(frozen=True, slots=True)
class Span:
    """When a choice was worked on, in seconds after its job's arrival.

    Attributes:
        begin: it got its slot.
        first: its first tokens were there.
        last: its last ones were.
        num_first: how many tokens came first; a step may emit several.
        steps_at_first: what all of the engine's steps had taken when its first tokens were there;
            None: the engine does not know.
        steps_at_last: when its last ones were.
    """

    begin: float
    first: float
    last: float
    num_first: int
    steps_at_first: StepSeconds | None
    steps_at_last: StepSeconds | None


@dataclass(frozen=True, slots=True)
class ChoiceOutput:
    """What one step added to one choice of a job that streams; else the whole choice."""

    output: Output
    seconds: float  # from its job's arrival to the end of the step
    span: Span | None = None  # once the choice is finished


class JobFailed(Exception):
    """Failure of a job that the engine could not finish; the log has the reason."""

    def as_api_error(self) -> ApiError:
        """Return the error that ends the job's stream."""
        return server_error(str(self))


class OutputNotRead(JobFailed):
    """End of a stream whose client left too much output unread."""

    def as_api_error(self) -> ApiError:
        """Return the error that ends the job's stream."""
        return not_read(str(self))


class EngineAway(JobFailed):
    """There is no engine at the moment, but there will be."""


class QueueAway(JobFailed):
    """The queue of jobs cannot be reached at the moment."""


class BadSpeculation(ValueError):
    """The engine does not run a job's `speculative_config`."""


@dataclass(slots=True)
class Times:
    """When tokens of a choice arrived; 0 before."""

    first: float = 0.0
    num_first: int = 0  # tokens of the first step that had any
    last: float = 0.0
    steps_at_first: StepSeconds | None = None


class Job:
    """One HTTP request: some prompts, `n` choices of each. Lives on the event loop.

    Args:
        prompts: token ids.
        params: for all of them.
        speculative_config: the request's own, as JSON, or None.
        client: who asks, as slots are shared among clients.
        streaming: hand out every step's output, rather than finished choices only.
        unread: counts the outputs of a streaming job until they are taken.
        kv_transfer: the prompt's pages come from another engine, or are for one.
        hidden_drafters: drafters whose rejected drafts are not reported.

    Attributes:
        number: of no other job.
        times: of each choice.
        num_running: choices of which the last output has not come yet.
        num_unfinished: choices of which nobody has taken the last output.
        num_speculative_tokens: drafts of its steps, once it is accepted.
    """

    def __init__(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        speculative_config: str | None,
        *,
        client: str,
        streaming: bool,
        unread: Unread,
        kv_transfer: KvTransfer | None = None,
        hidden_drafters: Collection[str] = (),
    ) -> None:
        self.kv_transfer = kv_transfer
        self.hidden_drafters = hidden_drafters
        self.number = next(_numbers)
        self.client = client
        self.prompts = list(prompts)
        self.params = params
        self.speculative_config = speculative_config
        self.streaming = streaming
        self.arrival = time.perf_counter()
        self.num_running = self.num_unfinished = len(prompts) * params.n
        self.times = [Times() for _ in range(self.num_running)]
        self.num_speculative_tokens = 0
        self._loop = asyncio.get_running_loop()
        self._accepted: asyncio.Future[None] | None = self._loop.create_future()
        self._unread = unread
        self._is_closed = False  # takes no further event
        self._events: deque[ChoiceOutput | Exception] = deque()
        self._arrival: asyncio.Future[None] | None = None  # of an event that somebody waits for

    @property
    def is_accepted(self) -> bool:
        """Whether the engine has taken the job, or the caller has stopped waiting for that."""
        return self._accepted is None or self._accepted.done()

    async def until_accepted(self) -> None:
        """Waits for the engine's word; called once.

        Raises:
            Exception: the refusal, or the failure.
        """
        assert self._accepted is not None, "nobody has waited before"
        try:
            await self._accepted
        finally:
            # An exception knows who raised it, and so this job, which shall go with its request.
            self._accepted = None

    async def next_outputs(self) -> list[ChoiceOutput]:
        """Wait for outputs. Return one if the job streams, else all that have come.

        Raises:
            JobFailed: the engine gave the job up.
        """
        if not self._events:
            self._arrival = self._loop.create_future()
            await self._arrival
        outputs: list[ChoiceOutput] = []
        while self._events and not (self.streaming and outputs):
            event = self._events.popleft()
            if isinstance(event, Exception):
                try:
                    raise event
                finally:
                    del event
            outputs.append(event)
            self.num_unfinished -= event.output.end is not None
            if self.streaming:
                self._unread.add(self, -size_of(event.output))
        return outputs

    def fail(self, error: JobFailed) -> None:
        """End the job with an error, and drop the outputs that were not taken."""
        self._events.clear()
        self._unread.drop(self)
        self.put(error)
        self._is_closed = True

    def close(self) -> None:
        """Drop the outputs that were not taken, and those that are still to come."""
        self._is_closed = True
        self._events.clear()
        self._unread.drop(self)

    def put(self, event: ChoiceOutput | Accepted | Exception) -> None:
        """Take an acceptance, a refusal, a failure or an output. Runs on the event loop."""
        if self._is_closed:
            return
        if isinstance(event, Accepted):
            self.num_speculative_tokens = event.num_speculative_tokens
            if self._accepted is not None and not self._accepted.done():
                self._accepted.set_result(None)
        elif self._accepted is not None and not self._accepted.done():
            assert isinstance(event, Exception)
            self._accepted.set_exception(event)
        else:
            self._events.append(event)
            if self._arrival is not None and not self._arrival.done():
                self._arrival.set_result(None)
            if self.streaming and isinstance(event, ChoiceOutput):
                self._unread.add(self, size_of(event.output))  # may end the job
