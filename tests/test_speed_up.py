# SPDX-License-Identifier: Apache-2.0
"""Measured speed-up: runs alternate, and no result exceeds the tokens per step."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from specops.cli import comparison
from specops.cli.comparison import Decoder, Run, Step, compare
from specops.cli.speed_up import speed_up
from specops.engine import Completion, RequestOutput, SpeculativeStats, TokenLogprob


def test_speed_up_is_the_median_with_the_middle_half_of_the_pairs() -> None:
    pairs = [(100.0, 100.0 * factor) for factor in (1.7, 1.2, 1.8, 2.0, 1.9, 1.6, 8.19)]
    found = speed_up(pairs, tokens_per_step=2.51)
    assert str(found) == "1.80 times as fast as plain (1.65 to 1.95 in half of 7 pairs)"
    assert (found.plain_tokens_per_s, found.tokens_per_s) == (100.0, 180.0)


def test_reported_speeds_come_from_the_same_pair() -> None:
    """The machine became slower in between."""
    pairs = [(1000.0, 2000.0), (900.0, 1900.0), (200.0, 700.0), (100.0, 150.0), (150.0, 320.0)]
    found = speed_up(pairs, tokens_per_step=4.0)
    assert found.factor == found.tokens_per_s / found.plain_tokens_per_s
    assert (found.plain_tokens_per_s, found.tokens_per_s) == (900.0, 1900.0)


def test_speed_up_is_capped_at_the_tokens_per_step() -> None:
    """A disturbed run once showed 8.19 times at 2.51 tokens per step."""
    found = speed_up([(100.0, 819.0)], tokens_per_step=2.51)
    assert str(found) == (
        "at most 2.51 times as fast as plain (one pair of runs; the timing was disturbed)"
    )
    found = speed_up([(100.0, 240.0), (100.0, 250.0), (100.0, 300.0)], tokens_per_step=2.51)
    assert str(found) == "2.50 times as fast as plain (2.40 to 2.51 in 3 pairs)"
    found = speed_up([(100.0, 90.0), (100.0, 80.0)], tokens_per_step=1.0)
    assert str(found) == "0.80 times as fast as plain (0.80 to 0.90 in 2 pairs)"


class Machine:
    """Decoder whose steps take predefined times."""

    def __init__(self, seconds: dict[bool, list[float]], flaw: int | None = None) -> None:
        self.seconds, self.flaw = seconds, flaw
        self.order: list[bool] = []  # one entry per run, True for plain decoding

    def run(self, *, plainly: bool = False) -> Run:
        per_step = self.seconds[plainly][self.order.count(plainly)]
        self.order.append(plainly)
        size = 1 if plainly else 3
        token_ids = list(range(12))
        if self.flaw is not None and len(self.order) == self.flaw:
            token_ids[7] += 1
        steps = [
            Step(per_step * step, RequestOutput("a", token_ids[at : at + size], "", [], None))
            for step, at in enumerate(range(0, 12, size))
        ]
        logprobs = [TokenLogprob(token_id, -0.5) for token_id in token_ids]
        stats = SpeculativeStats(num_steps=len(steps))
        return Run(Completion("a", 0, [1], token_ids, "", logprobs, "length", 0, 0, stats), steps)


def compared(machine: Machine) -> comparison.Comparison:
    return compare(cast(Decoder, machine), machine.run())


def test_runs_alternate_after_a_warm_up() -> None:
    machine = Machine({True: [9.0] + [0.1] * 7, False: [0.01] + [0.15] * 6 + [0.9]})
    found = compared(machine)
    rounds = [(False, True), (True, False)] * 3 + [(False, True)]
    assert machine.order == [False, True, *(one for one_round in rounds for one in one_round)]
    assert len(found.pairs) == 7 and found.first_difference is None
    assert found.speed_up is not None
    assert found.speed_up.factor == pytest.approx(2.0) and not found.speed_up.is_capped


def test_slow_model_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "_TIMING_SECONDS", 0.0)
    machine = Machine({True: [0.1], False: [0.2]})
    found = compared(machine)
    assert machine.order == [False, True]
    assert found.pairs == [(pytest.approx(10.0), pytest.approx(15.0))]


@pytest.mark.parametrize("flaw", [2, 3, 6])
def test_difference_in_any_run_is_reported(flaw: int) -> None:
    machine = Machine({True: [0.1] * 8, False: [0.1] * 8}, flaw=flaw)
    found = compared(machine)
    assert found.first_difference == 7 and found.speed_up is None
    assert len(machine.order) == flaw, "runs continued after the difference"


def test_text_of_one_step_is_not_timed() -> None:
    steps = [Step(0.1, RequestOutput("a", [1], "", [], "length"))]
    one: Any = Completion(
        "a", 0, [1], [1], "", [TokenLogprob(1, -0.5)], "length", 0, 0, SpeculativeStats(num_steps=1)
    )
    run = Run(one, steps)
    found = compare(cast(Decoder, SimpleNamespace(run=lambda plainly: run)), run)
    assert found.pairs == [] and found.speed_up is None and found.first_difference is None
