# SPDX-License-Identifier: Apache-2.0
"""The simulation of nodes: laws that it has to obey, and what it draws."""

import itertools
from dataclasses import replace
from statistics import mean

import pytest

pytest.importorskip("msgspec")

from specops.engine import Engine, EngineConfig

from bench import check_simulation
from tools.pictures import DOCS
from tools.simulate import (
    EXAMPLE,
    PICTURE,
    Machine,
    arrivals,
    best_drafts,
    drawn,
    simulate,
    table,
)

pytestmark = pytest.mark.ci

# A row takes 10 ms, and a step nothing else; pages are there at once.
PLAIN = Machine(
    step_seconds=((1, 0.01), (2, 0.02)),
    max_rows=64,
    max_beside=64,
    bytes_per_token=0,
    link_bytes_per_second=1.0,
    link_seconds=0.0,
    page_size=16,
    acceptance=0.5,
    prompt_tokens=32,
    output_tokens=1,
)


def test_one_request_takes_what_its_steps_take() -> None:
    """By hand: 70 rows of a prompt are two steps; then a token a step; apart, the pages' way."""
    for prefill, mixed, first in ((0, 1, 0.70), (1, 0, 0.70 + 2.5 + 0.06)):
        machine = replace(PLAIN, link_seconds=2.0, bytes_per_token=1, link_bytes_per_second=140.0)
        (request,) = arrivals(machine, 1.0, 1, seed=1)
        request.arrival, request.prompt, request.left = 0.0, 70, 4
        simulate(machine, [request], prefill=prefill, decode=prefill, mixed=mixed)
        assert request.first_token == pytest.approx(first)
        assert request.gaps == pytest.approx([0.01] * 3)
        assert request.per_token == pytest.approx(0.01)


def test_waiting_is_that_of_a_queue_with_one_server() -> None:
    """Steps of one prompt each, of equal length: Pollaczek and Khinchine's mean wait for M/D/1."""
    machine, rate, service = replace(PLAIN, max_rows=32), 2.0, 0.32
    requests = arrivals(machine, rate, 20_000, seed=2)
    for request in requests:
        request.prompt, request.left = 32, 1
    simulate(machine, requests, prefill=0, decode=0, mixed=1)
    load = rate * service
    expected = service + load * service / (2 * (1 - load))
    assert mean(one.first_token for one in requests) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("prefill,mixed", [(0, 2), (1, 0)])
def test_every_token_comes_once_and_in_order(drafts: int, prefill: int, mixed: int) -> None:
    machine = replace(PLAIN, output_tokens=20)
    requests = arrivals(machine, 1.0, 100, seed=3)
    asked = [one.left for one in requests]
    simulate(machine, requests, prefill=prefill, decode=prefill, mixed=mixed, drafts=drafts)
    for one, count in zip(requests, asked, strict=True):
        assert sum(tokens for _, tokens in one.times) == count and one.prompt == 0
        times = [one.arrival, *(time for time, _ in one.times)]
        assert all(before < after for before, after in itertools.pairwise(times))


def test_drafts_are_accepted_as_often_as_the_machine_says() -> None:
    """1 + 1/2 + 1/4 + 1/8 tokens a step."""
    machine = replace(PLAIN, output_tokens=2000)
    requests = arrivals(machine, 100.0, 8, seed=4)
    simulate(machine, requests, prefill=0, decode=0, mixed=1, drafts=3)
    counts = [tokens for one in requests for _, tokens in one.times[1:-1]]
    assert mean(counts) == pytest.approx(1.875, rel=0.03)


def test_fewer_drafts_pay_as_more_requests_decode() -> None:
    machine = Machine.load(EXAMPLE)
    best = [best_drafts(machine, count) for count in (1, 4, 16, 64)]
    assert best == sorted(best, reverse=True) and best[0] > best[-1]
    assert best_drafts(PLAIN, 1) == 0, "where rows cost all, a draft never pays"


@pytest.mark.slow
def test_the_page_has_the_table_that_is_simulated() -> None:
    page = (DOCS / "disaggregated.md").read_text()
    capacity, _, _ = table(Machine.load(EXAMPLE)).partition("\n\n")
    assert capacity in page


@pytest.mark.slow
def test_the_committed_picture_is_what_is_simulated() -> None:
    assert PICTURE.read_text() == drawn(Machine.load(EXAMPLE)), "python -m tools.simulate --draw"


def test_what_the_simulation_is_told_can_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the bundled model: bytes as its cache has them."""
    monkeypatch.setattr(check_simulation, "ROUNDS", 1)
    bytes_per_token, speed = check_simulation.hand_off()
    engine = Engine(EngineConfig.from_plain(check_simulation.SETTINGS))
    kept = sum(one[0, 0].numel() * one.element_size() for one in engine._runner.parts.cache.tensors)
    assert bytes_per_token == kept and speed > 0


@pytest.mark.slow
def test_it_is_compared_with_servers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("ROUNDS", "FIRST_TOKENS"):
        monkeypatch.setattr(check_simulation, name, 1)
    check_simulation.main(["--requests", "3", "--rates", "20"])
    rows = [line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines()[2:]]
    assert rows == [
        "tokens of a prompt",
        "---",
        "64",
        "256",
        "900",
        "requests a second",
        "---",
        "20",
    ]
