# SPDX-License-Identifier: Apache-2.0
"""A job: what one HTTP request wants of the engine, and the outputs that come back for it."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from specops.engine.outputs import Completion, RequestOutput
from specops.engine.sampling_params import SamplingParams
from specops.engine.structured import Grammar


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


@dataclass(frozen=True)
class ChoiceOutput:
    """What one step added to one choice of a job."""

    index: int  # over all prompts: prompt index * n + choice index
    output: RequestOutput
    completion: Completion | None  # once the choice is finished
    seed: int  # as the client sent it or as it was drawn
    seconds: float  # from its job's arrival to the end of the step
    span: Span | None = None  # once the choice is finished


class JobFailed(Exception):
    """The engine could not finish a job; the reason is in the log."""


class Job:
    """One HTTP request: some prompts, `n` choices of each. Lives on the event loop.

    Args:
        prompts: token ids.
        params: for all of them.
        speculative_config: the request's own, or None.
        grammar: what constrains the output, compiled; held, so that the engine finds it.
        client: who asks, as slots are shared among clients.
        streaming: hand out every step's output, rather than finished choices only.
    """

    def __init__(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        speculative_config: Mapping[str, object] | None,
        *,
        grammar: Grammar | None = None,
        client: str,
        streaming: bool,
    ) -> None:
        self.client = client
        self.prompts = prompts
        self.params = params
        self.speculative_config = speculative_config
        self.grammar = grammar
        self.streaming = streaming
        self.arrival = time.perf_counter()
        self.num_unfinished = len(prompts) * params.n
        self._loop = asyncio.get_running_loop()
        self.accepted: asyncio.Future[None] = self._loop.create_future()
        self._events: list[ChoiceOutput | Exception] = []
        self._arrival: asyncio.Future[None] | None = None  # of an event that somebody waits for

    async def next_outputs(self) -> list[ChoiceOutput]:
        """Waits for outputs and returns all that are there.

        Raises:
            JobFailed: the engine gave the job up.
        """
        if not self._events:
            self._arrival = self._loop.create_future()
            await self._arrival
        events, self._events = self._events, []
        outputs = []
        for event in events:
            if isinstance(event, Exception):
                raise event
            outputs.append(event)
            self.num_unfinished -= event.completion is not None
        return outputs

    def put(self, event: ChoiceOutput | Exception | None) -> None:
        """Called on the event loop: an output, a failure, or None for "accepted"."""
        if self.accepted.done():
            if event is not None:
                self._events.append(event)
                if self._arrival is not None and not self._arrival.done():
                    self._arrival.set_result(None)
        elif isinstance(event, Exception):
            self.accepted.set_exception(event)
        else:
            self.accepted.set_result(None)
