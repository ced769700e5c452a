# SPDX-License-Identifier: Apache-2.0
"""Progress of a job that other nodes run, so that every token is passed on exactly once.

If the node that runs a job is lost, the job runs again, with the same bits. Events of all its runs
are counted, and only new ones are passed on.
"""

import time
from collections import defaultdict
from dataclasses import dataclass, field

from msgspec import Struct

from specops.api.messages import (
    Accepted,
    Event,
    Failed,
    Output,
    Progress,
    Refused,
    Submit,
)


class RunEvents(Struct, tag=True, array_like=True):
    """A message with events of a run of a job.

    Attributes:
        job: number of the job at the receiving node.
        node: node that runs it.
        run: id of the attempt.
        place: sequence number of the message within the run.
        events: events of the job.
    """

    job: int
    node: str
    run: str
    place: int
    events: list[Event]


@dataclass
class _Counts:
    """Counts of a choice: tokens, characters of text, and tokens that `Progress` reported."""

    tokens: int = 0
    text: int = 0
    progress: int = 0


@dataclass
class Waiting:
    """Job that arrived at this node's frontend, with the progress of its runs."""

    job: Submit
    since: float
    sent: dict[int, _Counts] = field(default_factory=lambda: defaultdict(_Counts))  # per choice
    # By run, the sequence number of the next message; by run and choice, the counts it has
    # reported.
    places: dict[str, int] = field(default_factory=dict)
    reported: dict[tuple[str, int], _Counts] = field(default_factory=lambda: defaultdict(_Counts))
    nodes: dict[str, str] = field(default_factory=dict)  # node of each run that is not abandoned
    abandoned: set[str] = field(default_factory=set)  # runs with a lost message
    num_gaps: int = 0  # number of lost messages noticed so far
    runner: tuple[str, str] | None = None  # node and run of the last message
    accepted_at: float = 0.0
    ended: set[int] = field(default_factory=set)

    def new_events(self, message: RunEvents) -> list[Event] | None:
        """Return the events of a message that have not been passed on yet.

        Returns:
            The events; None if an earlier message was lost, in which case the caller must abandon
            the run.

        Raises:
            ValueError: an event names a choice that the job does not have.
        """
        count = len(self.job.prompts) * self.job.params.n
        for event in message.events:
            if isinstance(event, (Progress, Output)) and not 0 <= event.index < count:
                raise ValueError(f"index of a choice must be in [0, {count}), got {event.index}")
        place = self.places.setdefault(message.run, 0)
        if message.run in self.abandoned or message.place < place:
            return []
        self.runner = message.node, message.run
        self.nodes[message.run] = message.node
        if message.place > place:
            self.num_gaps += 1
            return None
        self.places[message.run] += 1
        return [
            new for event in message.events if (new := self._new(message.run, event)) is not None
        ]

    def abandon_runs(self) -> list[tuple[str, str]]:
        """Ignore all runs known so far; return their nodes and ids."""
        runs = [(node, run) for run, node in self.nodes.items()]
        self.abandoned.update(self.nodes)
        self.nodes.clear()
        self.runner = None
        return runs

    def _new(self, run: str, event: Event) -> Event | None:
        event.job = self.job.job
        if isinstance(event, Accepted):
            if self.accepted_at:
                return None
            self.accepted_at = time.perf_counter()
            return event
        if isinstance(event, Refused) and self.accepted_at:  # a later run was refused
            return Failed(event.job, event.message)
        if not isinstance(event, (Progress, Output)):
            return event
        if event.index in self.ended:
            return None
        sent = self.sent[event.index]
        reported = self.reported[run, event.index]
        if isinstance(event, Progress):
            reported.progress += event.num_tokens
            event.num_tokens = reported.progress - sent.progress
            sent.progress = max(sent.progress, reported.progress)
            return event if event.num_tokens > 0 else None
        return self._new_output(event, sent, reported)

    def _new_output(self, event: Output, sent: _Counts, reported: _Counts) -> Output | None:
        known_tokens = max(sent.tokens - reported.tokens, 0)
        known_text = max(sent.text - reported.text, 0)
        reported.tokens += len(event.token_ids)
        reported.text += len(event.text)
        if event.end is not None:
            self.ended.add(event.index)
            event.end.begun = self.accepted_at  # clocks of machines differ
        elif reported.tokens <= sent.tokens and reported.text <= sent.text and known_tokens:
            return None
        if sent.tokens or sent.text:
            event.prompt_logprobs = None
        if known_tokens:
            event.token_ids = event.token_ids[known_tokens:]
            event.logprobs = event.logprobs[known_tokens:]
            event.drafts = None  # this run's steps differ from the earlier run's
        event.text = event.text[known_text:]
        sent.tokens = max(sent.tokens, reported.tokens)
        sent.text = max(sent.text, reported.text)
        return event
