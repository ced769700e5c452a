# SPDX-License-Identifier: Apache-2.0
"""What a door has passed on of a job that other nodes run: no token comes twice, and none is lost.

A job whose node is lost runs again, with the same bits. What its runs tell is counted, and only
what is new goes on.
"""

import time
from collections import defaultdict
from dataclasses import dataclass, field

from msgspec import Struct

from specops.service.messages import (
    Accepted,
    Event,
    Failed,
    Output,
    Progress,
    Refused,
    Submit,
)


class Told(Struct, tag=True, array_like=True):
    """What a run of a job has brought.

    Attributes:
        job: its number at the node that is told.
        node: that runs it.
        run: of one attempt.
        place: of the message among those of the run.
        events: of the job.
    """

    job: int
    node: str
    run: str
    place: int
    events: list[Event]


@dataclass
class _Counts:
    """Of a choice: what of it has come."""

    tokens: int = 0
    text: int = 0
    progress: int = 0


@dataclass
class Waiting:
    """A job that came in here."""

    job: Submit
    since: float
    sent: dict[int, _Counts] = field(default_factory=lambda: defaultdict(_Counts))  # by choice
    # Of each run: the place that comes next, and what it has told.
    places: dict[str, int] = field(default_factory=dict)
    told: dict[tuple[str, int], _Counts] = field(default_factory=lambda: defaultdict(_Counts))
    nodes: dict[str, str] = field(default_factory=dict)  # of runs that are not abandoned
    abandoned: set[str] = field(default_factory=set)  # runs of which a message is lost
    num_gaps: int = 0  # lost messages that were noticed
    runner: tuple[str, str] | None = None  # the last node and run that told something
    accepted_at: float = 0.0
    ended: set[int] = field(default_factory=set)

    def news(self, told: Told) -> list[Event] | None:
        """Return the events of a message that have not been passed on yet.

        Returns:
            The events; None with the first message behind a lost one, whose run is abandoned.

        Raises:
            ValueError: an event names a choice that the job does not have.
        """
        count = len(self.job.prompts) * self.job.params.n
        for event in told.events:
            if isinstance(event, (Progress, Output)) and not 0 <= event.index < count:
                raise ValueError(f"index must be below {count}, got {event.index}")
        place = self.places.setdefault(told.run, 0)
        if told.run in self.abandoned or told.place < place:
            return []
        self.runner = told.node, told.run
        self.nodes[told.run] = told.node
        if told.place > place:
            self.num_gaps += 1
            return None
        self.places[told.run] += 1
        return [new for event in told.events if (new := self._new(told.run, event)) is not None]

    def abandon_runs(self) -> list[tuple[str, str]]:
        """Ignore all runs known so far; return their nodes and names."""
        left = [(node, run) for run, node in self.nodes.items()]
        self.abandoned.update(self.nodes)
        self.nodes.clear()
        self.runner = None
        return left

    def _new(self, run: str, event: Event) -> Event | None:
        event.job = self.job.job
        if isinstance(event, Accepted):
            if self.accepted_at:
                return None
            self.accepted_at = time.perf_counter()
            return event
        if isinstance(event, Refused) and self.accepted_at:  # by another node than the one before
            return Failed(event.job, event.message)
        if not isinstance(event, (Progress, Output)):
            return event
        if event.index in self.ended:
            return None
        sent, told = self.sent[event.index], self.told[run, event.index]
        if isinstance(event, Progress):
            told.progress += event.num_tokens
            event.num_tokens = told.progress - sent.progress
            sent.progress = max(sent.progress, told.progress)
            return event if event.num_tokens > 0 else None
        return self._new_output(event, sent, told)

    def _new_output(self, event: Output, sent: _Counts, told: _Counts) -> Output | None:
        known_tokens = max(sent.tokens - told.tokens, 0)
        known_text = max(sent.text - told.text, 0)
        told.tokens += len(event.token_ids)
        told.text += len(event.text)
        if event.end is not None:
            self.ended.add(event.index)
            event.end.begun = self.accepted_at  # another machine has another clock
        elif told.tokens <= sent.tokens and told.text <= sent.text and known_tokens:
            return None
        if sent.tokens or sent.text:
            event.prompt_logprobs = None
        if known_tokens:
            event.token_ids = event.token_ids[known_tokens:]
            event.logprobs = event.logprobs[known_tokens:]
            event.drafts = None  # of a step that another run did otherwise
        event.text = event.text[known_text:]
        sent.tokens, sent.text = max(sent.tokens, told.tokens), max(sent.text, told.text)
        return event
