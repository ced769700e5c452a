# SPDX-License-Identifier: Apache-2.0
"""Requests with slow grammars are deferred until their next mask is ready. The clock is fake."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from specops.engine.plan import Part, Plan
from specops.engine.request import Request
from specops.engine.sharing import grammar_scheduling
from specops.engine.sharing.grammar_scheduling import GrammarScheduler
from test_scheduler import make_request


@dataclass
class Grammar:
    """Grammar state with a fixed mask time; its preparation ends when the test allows it."""

    takes: float
    may_end: threading.Event = field(default_factory=threading.Event)
    preparing: Future[None] | None = None
    step_seconds: float = 0.0
    row_seconds: float = 0.0
    num_prepared: int = 0

    def prepare(self) -> None:
        assert self.may_end.wait(300)
        self.num_prepared += 1

    def note_step(self, num_rows: int) -> None:
        self.step_seconds, self.row_seconds = self.takes, self.takes / num_rows
        self.preparing = None  # as when a step's masks are filled


class Steps:
    """Steps of some requests under a frozen clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *takes: float | None) -> None:
        self.now = 100.0
        monkeypatch.setattr(grammar_scheduling.time, "monotonic", lambda: self.now)
        self.scheduler = GrammarScheduler()
        self.requests: list[Request] = []
        for index, seconds in enumerate(takes):
            request = make_request(index, [1, 2], "naive", 50)
            if seconds is not None:
                request = replace(request, grammar=Grammar(seconds))  # type: ignore[arg-type]
            self.requests.append(request)
        self.note(range(len(takes)))
        self.now += 1000

    def grammar(self, index: int) -> Any:
        return self.requests[index].grammar

    def note(self, indices: Any, rest: float = 0.0) -> None:
        requests = [self.requests[index] for index in indices]
        for request in requests:
            request.placement.last_step += 1
        spent = sum(self.grammar(i).takes for i in indices if self.grammar(i) is not None)
        parts = [Part(request, 1, 1, 0, True) for request in requests]
        self.scheduler.note(Plan(parts), spent + rest)

    def deferred(self, *indices: int, has_prompts: bool = False) -> set[int]:
        requests = [self.requests[index] for index in indices]
        found = self.scheduler.requests_to_skip(requests, has_prompts)
        return {self.requests.index(request) for request in found}

    def finish(self, index: int) -> None:
        """Let a mask be computed, and wait for it."""
        self.grammar(index).may_end.set()
        self.grammar(index).preparing.result(300)


@pytest.fixture
def stepping(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made: list[Steps] = []

    def make(*takes: float | None) -> Steps:
        made.append(Steps(monkeypatch, *takes))
        return made[-1]

    yield make
    for steps in made:
        for request in steps.requests:
            if request.grammar is not None:
                request.grammar.may_end.set()  # type: ignore[attr-defined]


def test_fast_grammars_are_not_deferred(stepping: Any) -> None:
    steps = stepping(None, 1e-4, 1.9e-3)
    assert steps.deferred(0, 1, 2) == steps.deferred(2) == set()
    assert [steps.scheduler.most_drafts(request) for request in steps.requests] == [None] * 3
    assert all(steps.grammar(i).num_prepared == 0 for i in (1, 2))


def test_slow_grammars_run_one_at_a_time_in_a_tenth_of_the_time(stepping: Any) -> None:
    steps = stepping(None, 0.02, 0.03)
    assert steps.deferred(0, 1, 2) == {1, 2}
    assert steps.grammar(1).preparing and not steps.grammar(2).preparing
    assert steps.deferred(0, 1, 2) == {1, 2}, "its mask is not ready"
    steps.finish(1)
    assert steps.deferred(0, 1, 2) == {2}
    assert steps.scheduler.most_drafts(steps.requests[1]) == 0
    steps.note([0, 1])  # it took 20 ms of the step
    assert steps.deferred(0, 1, 2) == {1, 2}
    assert not steps.grammar(1).preparing and not steps.grammar(2).preparing
    steps.now += 0.17
    assert steps.deferred(0, 1, 2) == {1, 2} and not steps.grammar(2).preparing
    steps.now += 0.02
    steps.deferred(0, 1, 2)
    assert steps.grammar(2).preparing and not steps.grammar(1).preparing, "longest wait first"
    steps.finish(2)
    assert steps.deferred(0, 1, 2) == {1}
    # A prompt of another request counts as other work.
    assert steps.deferred(1, has_prompts=True) == {1}


def test_slow_grammars_alone_wait_only_for_their_masks(stepping: Any) -> None:
    steps = stepping(0.02, 0.03)
    assert steps.deferred(0, 1) == {0, 1}
    preparing = [steps.grammar(index).preparing for index in (0, 1)]
    assert not any(one.done() for one in preparing), "a step does not wait until a mask is complete"
    steps.finish(0)
    steps.finish(1)
    assert steps.deferred(0, 1) == {1}, "a step stays short: a request may arrive"
    assert steps.deferred(0, 1, has_prompts=True) == {1}
    # The time of a step without other requests is not charged.
    steps.note([0])
    steps.deferred(0)
    assert steps.grammar(0).preparing


def test_slowness_is_relative_to_the_rest_of_a_step(stepping: Any) -> None:
    """If steps of a large model take long, a mask of some milliseconds defers no request."""
    steps = stepping(None, 0.004)
    assert steps.deferred(0, 1) == {1}
    steps.note([0, 1], rest=0.05)
    assert steps.deferred(0, 1) == set()
    steps.note([0, 1], rest=0.03)
    assert steps.deferred(0, 1) == {1}
    assert steps.scheduler.most_drafts(steps.requests[1]) == 7, "as long as the rest of the step"
    small = stepping(0.003, 0.003, 0.003)
    small.deferred(0, 1, 2)
    for index in range(3):
        small.finish(index)
    assert small.deferred(0, 1, 2) == {2}
    assert small.deferred(0, 1, 2, has_prompts=True) == {1, 2}
