# SPDX-License-Identifier: Apache-2.0
"""Progress of a job that other nodes run: no token is passed on twice, and none is lost.

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


class Told(Struct, tag=True, array_like=True):
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
    """Counts for a choice: tokens, characters of text, and tokens reported by `Progress`."""

    tokens: int = 0
    text: int = 0
    progress: int = 0


@dataclass
class Waiting:
    """A job that arrived at this node."""

    job: Submit
    since: float
    sent: dict[int, _Counts] = field(default_factory=lambda: defaultdict(_Counts))  # per choice
    # Per run, the sequence number of the next message; per run and choice, what it has reported.
    places: dict[str, int] = field(default_factory=dict)
    told: dict[tuple[str, int], _Counts] = field(default_factory=lambda: defaultdict(_Counts))
    nodes: dict[str, str] = field(default_factory=dict)  # of runs that are not abandoned
    abandoned: set[str] = field(default_factory=set)  # runs with a lost message
    num_gaps: int = 0  # lost messages that were noticed
    runner: tuple[str, str] | None = None  # node and run of the last message
    accepted_at: float = 0.0
    ended: set[int] = field(default_factory=set)

    def news(self, told: Told) -> list[Event] | None:
        """Return the events of a message that have not been passed on yet.

        Returns:
            The events; None for a message after a lost one: the caller must abandon the run.

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
        """Ignore all runs known so far; return their nodes and ids."""
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
        if isinstance(event, Refused) and self.accepted_at:  # refused by a later node
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
            event.drafts = None  # they belong to a step that another run executed differently
        event.text = event.text[known_text:]
        sent.tokens, sent.text = max(sent.tokens, told.tokens), max(sent.text, told.text)
        return event
