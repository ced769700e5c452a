# SPDX-License-Identifier: Apache-2.0
"""Jobs: the engine's work for one HTTP request, and the outputs that come back."""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from specops.api.messages import Accepted, KvTransfer, Output
from specops.api.sampling_params import SamplingParams
from specops.server.api_error import ApiError, not_read, server_error
from specops.server.unread import Unread, size_of

_numbers = itertools.count()


def new_number() -> int:
    """Return an unused number for a job, or for another command that the engine answers."""
    return next(_numbers)


class StepSeconds(NamedTuple):
    """Seconds that the engine's steps took, by their parts."""

    verify: float  # running the model and choosing tokens
    draft: float


@dataclass(frozen=True, slots=True)
class Span:
    """Timeline of one choice, in seconds after its job's arrival.

    Attributes:
        begin: time when the choice got its slot.
        first: time of its first tokens.
        last: time of its last tokens.
        num_first: number of tokens in the first step that emitted any.
        steps_at_first: total duration of the engine's steps, since its start, when the first tokens
            arrived; None if the engine does not measure it.
        steps_at_last: the same total when the last tokens arrived.
    """

    begin: float
    first: float
    last: float
    num_first: int
    steps_at_first: StepSeconds | None
    steps_at_last: StepSeconds | None


@dataclass(frozen=True, slots=True)
class ChoiceOutput:
    """Output of one choice: of one step if the job streams, else of all steps."""

    output: Output
    seconds: float  # time from the job's arrival to the end of the step
    span: Span | None = None  # set when the choice is finished


class JobFailed(Exception):
    """Failure of a job that the engine could not finish; the server's log has the reason."""

    def as_api_error(self) -> ApiError:
        """Return the error that ends the job's stream."""
        return server_error(str(self))


class OutputNotRead(JobFailed):
    """End of a stream whose client left too much output unread."""

    def as_api_error(self) -> ApiError:
        """Return the error that ends the job's stream."""
        return not_read(str(self))


class EngineAway(JobFailed):
    """Failure of a job because the engine is temporarily absent."""


class QueueAway(JobFailed):
    """Failure of a job because its queue is temporarily unreachable."""


class BadSpeculation(ValueError):
    """Refusal of a job whose `speculative_config` the engine does not support."""


@dataclass(slots=True)
class Times:
    """Arrival times of a choice's tokens; 0 before they arrive."""

    first: float = 0.0
    num_first: int = 0  # tokens of the first step that had any
    last: float = 0.0
    steps_at_first: StepSeconds | None = None


class Job:
    """Job of one HTTP request: prompts with `n` choices each. Use it on the event loop only.

    Args:
        prompts: token ids of each prompt.
        params: sampling parameters of all prompts.
        speculative_config: JSON of the request's `speculative_config`, or None.
        client: name of the client, since slots are shared fairly among clients.
        streaming: report every step's output, rather than finished choices only.
        unread: counts the outputs of a streaming job until they are taken.
        kv_transfer: request to fetch the prompt's pages from another engine, or to lease them to
            one.
        session: name of the session that the job resumes and is saved to; None: none.
        hidden_drafters: drafters whose rejected drafts are not reported.
        adapter: name and digest of the LoRA adapter; None: the model alone.
        choice_index: index of each prompt's first choice.

    Attributes:
        number: unique number of the job.
        times: token times of each choice.
        num_running: number of choices whose last output has not arrived yet.
        num_unfinished: number of choices whose last output the caller has not received yet.
        accepted: the engine's acceptance of the job; None before it arrives.
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
        session: str | None = None,
        hidden_drafters: Collection[str] = (),
        adapter: tuple[str, str] | None = None,
        choice_index: int = 0,
    ) -> None:
        self.adapter = adapter
        self.choice_index = choice_index
        self.kv_transfer = kv_transfer
        self.session = session
        self.hidden_drafters = hidden_drafters
        self.number = new_number()
        self.client = client
        self.prompts = list(prompts)
        self.params = params
        self.speculative_config = speculative_config
        self.streaming = streaming
        self.arrival = time.perf_counter()
        self.num_running = self.num_unfinished = len(prompts) * params.n
        self.times = [Times() for _ in range(self.num_running)]
        self.accepted: Accepted | None = None
        self._loop = asyncio.get_running_loop()
        self._accepted: asyncio.Future[None] | None = self._loop.create_future()
        self._unread = unread
        self._is_closed = False  # ignores further events
        self._events: deque[ChoiceOutput | Exception] = deque()
        self._arrival: asyncio.Future[None] | None = None  # resolved when an event arrives

    @property
    def num_speculative_tokens(self) -> int:
        """Maximum number of drafts per step; 0 before the job is accepted."""
        return 0 if self.accepted is None else self.accepted.num_speculative_tokens

    @property
    def is_accepted(self) -> bool:
        """True once the engine has accepted or refused the job, or `until_accepted` has ended."""
        return self._accepted is None or self._accepted.done()

    async def until_accepted(self) -> None:
        """Wait until the engine accepts the job; call this at most once.

        Raises:
            Exception: the engine refused the job, or failed.
        """
        assert self._accepted is not None, "until_accepted is called once"
        try:
            await self._accepted
        finally:
            # The future's exception refers to this job through its traceback. Dropping the future
            # breaks the cycle, so that the job is freed with its request.
            self._accepted = None

    async def next_outputs(self) -> list[ChoiceOutput]:
        """Wait for outputs. Return one if the job streams, else all that have arrived.

        Raises:
            JobFailed: the job ended early because it failed.
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
        """End the job with an error, and drop outputs that the caller has not received."""
        self._events.clear()
        self._unread.drop(self)
        self.put(error)
        self._is_closed = True

    def close(self) -> None:
        """Drop all outputs that the caller has not received, and ignore later ones."""
        self._is_closed = True
        self._events.clear()
        self._unread.drop(self)

    def put(self, event: ChoiceOutput | Accepted | Exception) -> None:
        """Handle an event of the engine: acceptance, refusal, failure or output."""
        if self._is_closed:
            return
        if isinstance(event, Accepted):
            self.accepted = event
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
