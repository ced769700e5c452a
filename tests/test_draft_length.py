# SPDX-License-Identifier: Apache-2.0
"""How many drafts are verified: the choice against brute force, what is learnt, what may be lost.

Time is made up in all of these: a step takes what a formula says, whatever the machine.
"""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import make_checkpoint, write_tokenizer
from specops.engine import Engine, EngineConfig, SamplingParams, SpeculativeConfig
from specops.engine.draft_budget import Budget
from specops.engine.draft_length import DraftLengths, DraftState, choose, round_down
from specops.engine.drafters import DraftBatch, NgramDrafter
from specops.engine.request import Request
from specops.engine.server.metrics import Metrics
from specops.engine.step_costs import StepCosts

NGRAM: dict[str, Any] = {
    "method": "ngram",
    "num_speculative_tokens": 6,
    "min_ngram_size": 1,
    "adaptive_draft_length": True,
}
PROMPT = [5, 6, 7, 5, 6, 7, 5, 6]


# ---- the choice ----


def rate_of(counts: Sequence[int], chances: Sequence[tuple[float, float]], seconds: Any) -> float:
    gains = [f * a**j for n, (f, a) in zip(counts, chances, strict=True) for j in range(n)]
    return float((len(counts) + sum(gains)) / seconds[sum(counts)])


def test_the_choice_is_the_best_there_is() -> None:
    rng = random.Random(1)
    num_drafting = 0
    for _ in range(300):
        batch = rng.randint(1, 4)
        # Few values, so that there are ties.
        chances = [
            (rng.choice([0.0, 0.2, 0.5, 0.5, 0.9, 1.0]), rng.choice([0.3, 0.8, 1.0]))
            for _ in range(batch)
        ]
        most = [rng.randint(1, 4) for _ in range(batch)]
        room = rng.randint(1, sum(most))
        # Of any shape: stairs, straight lines, falling too.
        seconds = np.cumsum([1.0] + [rng.choice([0.0, 0.05, 0.2, 0.5]) for _ in range(room)])
        chosen, threshold = choose(chances, most, float(batch), seconds.__getitem__, room)
        assert all(0 <= n <= limit for n, limit in zip(chosen, most, strict=True))
        assert sum(chosen) <= room
        best = max(
            rate_of(counts, chances, seconds)
            for counts in itertools.product(*(range(limit + 1) for limit in most))
            if sum(counts) < len(seconds)
        )
        assert rate_of(chosen, chances, seconds) == pytest.approx(best)
        within = [f * a ** (n - 1) for n, (f, a) in zip(chosen, chances, strict=True) if n]
        assert threshold == (pytest.approx(min(within)) if within else 1.0)
        num_drafting += sum(chosen) > 0
    assert 100 < num_drafting < 300


def test_many_drafts_have_few_numbers() -> None:
    chosen, _ = choose([(0.99, 0.99)] * 40, [5] * 40, 40.0, lambda n: 1 + 0.004 * n, 191)
    assert sum(chosen) == 176
    numbers = sorted({round_down(n) for n in range(1025)})
    assert numbers[:17] == list(range(17))
    assert len(numbers) == 17 + 6 * 8
    for n in range(1, 1025):
        assert 8 / 9 * n < round_down(n) <= n


# ---- what steps cost ----


def step_seconds(batch: int, drafts: int) -> float:
    """A step that is bound by memory at first, and then by its rows."""
    return 1e-3 * (0.3 + 0.05 * batch + max(0.0, 0.04 * (batch + drafts) - 0.1))


@pytest.mark.parametrize("seed", range(3))
def test_costs_are_learnt_through_noise_and_outliers(seed: int) -> None:
    rng = random.Random(seed)
    costs = StepCosts()
    for step in range(3000):
        batch = rng.choice([4, 16])
        drafts = rng.choice([0, 1, 2, batch, 2 * batch])
        slower = 1.0 if step < 1500 else 2.0  # the machine gets busy
        noise = rng.uniform(0.9, 1.1) * (rng.uniform(3, 30) if rng.random() < 0.05 else 1)
        if step % 10 < 3:
            costs.observe_plain(batch, slower * noise * step_seconds(batch, 0))
        elif costs.knows_plain(batch):
            seconds = slower * noise * step_seconds(batch, drafts)
            costs.observe(batch, [(drafts / batch, seconds / costs.plain_seconds(batch))])
    for batch in (4, 16):
        assert costs.plain_seconds(batch) == pytest.approx(2 * step_seconds(batch, 0), rel=0.15)
        values = [costs.multiple(batch, drafts / 8) for drafts in range(40)]
        assert values == sorted(values)
        for drafts in (1, 2, batch, 3 * batch // 2, 2 * batch, 3 * batch):
            expected = step_seconds(batch, drafts) / step_seconds(batch, 0)
            assert costs.multiple(batch, drafts / batch) == pytest.approx(expected, rel=0.15)


def test_costs_of_a_new_number_of_requests_come_from_the_nearest() -> None:
    """A draft takes as many seconds as there; steps are between those of the numbers around."""
    costs = StepCosts()
    for _ in range(50):
        costs.observe_plain(16, 1.0)
        costs.observe_plain(4, 0.4)
        costs.observe(16, [(drafts / 16, 1.0 + 0.01 * drafts) for drafts in (0, 8, 16)])
    assert costs.plain_seconds(10) == pytest.approx(0.7)
    assert costs.knows_plain(30) and costs.plain_seconds(24) == pytest.approx(1.25)
    assert not costs.knows_plain(10)
    assert costs.plain_seconds(2) == pytest.approx(0.3)
    for _ in range(3):
        costs.observe_plain(8, 0.6)
    slope = 0.6 * (costs.multiple(8, 1.0) - costs.multiple(8, 0.0)) / 8
    assert slope == pytest.approx(0.01, rel=0.1)


def test_without_times_there_is_nothing_to_say() -> None:
    costs = StepCosts()
    assert not costs.knows_plain(1)
    with pytest.raises(ValueError, match="no step without drafts was timed"):
        costs.plain_seconds(1)


def test_a_single_outlier_does_not_stay() -> None:
    costs = StepCosts()
    for _ in range(20):
        costs.observe_plain(1, 1.0)
        costs.observe(1, [(0, 1.0), (4, 1.2)])
    costs.observe_plain(1, 50.0)
    costs.observe(1, [(2, 50.0)])
    assert costs.plain_seconds(1) < 1.1
    assert costs.multiple(1, 2) < 1.3
    assert costs.multiple(1, 4) == pytest.approx(1.2, rel=0.07)


def test_more_drafts_are_never_cheaper() -> None:
    """Whatever was measured; and what was not measured yet is as cheap as the next fewer."""
    costs = StepCosts()
    costs.observe_plain(1, 1.0)
    for _ in range(10):
        costs.observe(1, [(0, 1.5), (1, 2.0), (2, 1.2), (6, 1.9)])
    values = [costs.multiple(1, drafts) for drafts in range(10)]
    assert values == sorted(values) and values[0] >= 1.0
    assert values[2:6] == [values[2]] * 4


def test_costs_are_explored_little_by_little() -> None:
    """Up to twice the drafts that there were, so that no step is much longer than any before."""
    costs = StepCosts()
    for _ in range(3):
        costs.observe_plain(32, 1.0)
    reach = []
    for _ in range(5):
        reach.append(costs.reach(32))
        costs.observe(32, [(reach[-1] / 32, 1.5)])
    assert reach == [8, 16, 32, 64, 128]
    assert StepCosts().reach(1) == 1


# ---- what may be lost ----


def lose(gain: Callable[[int, int], float], steps: int) -> tuple[float, int, int]:
    """What a budget loses with given gains of its steps that draft, how many there are, and rests.

    Args:
        gain: of a step, by its number since the last rest, and in all.
        steps: with and without drafts.
    """
    budget, lost, drafted, rests = Budget(), 0.0, 0, 0
    for step in range(steps):
        if budget.rest:
            budget.rest -= 1
            if not budget.rest:
                rests += not budget.is_reference
                budget.end_rest()
            continue
        one = gain(budget.num_steps, step)
        lost -= one
        drafted += 1
        budget.note(one, 0.0)
        if budget.count():
            budget.begin_stretch()
    return lost, drafted, rests


@pytest.mark.parametrize("seed", range(4))
def test_no_drafter_loses_more_than_a_share(seed: int) -> None:
    """Whatever it does: steps take up to four times as long, gains end where they have begun."""
    rng = random.Random(seed)
    patterns: list[Callable[[int, int], float]] = [
        lambda since, step: -1.0,
        lambda since, step: -0.04,
        lambda since, step: -3.0 if since == 0 else -0.3,
        lambda since, step: rng.uniform(-1.5, 0.5),
        lambda since, step: 1.0 if step % 1000 < 100 else -1.0,
        lambda since, step: rng.choice([3.0, -0.5, -0.5, -0.5, -0.5, -0.5, -0.5, -0.5]),
    ]
    for number, gain in enumerate(patterns):
        for steps in (128, 1000, 20000):
            lost, _, rests = lose(gain, steps)
            assert lost <= 0.021 * steps + 8, (number, steps, lost)
            assert rests > steps // 2000, (number, steps)


def test_what_costs_nearly_nothing_goes_on() -> None:
    """A drafter that finds nothing, and takes less than the share, is never sent away."""
    _, drafted, rests = lose(lambda since, step: -0.015, 3000)
    assert rests == 1 and drafted > 2800


def test_what_gains_goes_on_and_is_measured_now_and_then() -> None:
    lost, drafted, rests = lose(lambda since, step: 0.5, 3000)
    assert rests == 1 and 0.95 * 3000 < drafted < 3000
    assert lost == -0.5 * drafted


def test_gains_are_banked_up_to_a_limit() -> None:
    budget = Budget()
    budget.end_rest()
    for _ in range(20):
        budget.note(1.0, 0.0)
        budget.count()
    steps = 0
    while not budget.rest or budget.is_reference:
        if budget.is_reference:
            budget.end_rest()
        budget.note(-0.5, 0.0)
        budget.count()
        steps += 1
    assert 10 <= steps <= 12
    assert budget.rest == pytest.approx(2 / 0.02, rel=0.15)


def test_new_shapes_are_paid_in_parts() -> None:
    """One is not a reason to give up; one in every step is."""
    budgets = Budget(), Budget()
    for budget in budgets:
        budget.end_rest()
    for step in range(100):
        for budget, every in zip(budgets, (50, 1), strict=True):
            if not budget.rest or budget.is_reference:
                budget.note(0.0, 1.0 if step % every == 0 else 0.0)
                budget.count()
    assert budgets[0].left > 0
    assert budgets[1].rest > 0 and not budgets[1].is_reference


# ---- lengths over time ----


@dataclass
class Load:
    """Requests whose drafts are right with given chances, on a machine that takes given times.

    Attributes:
        chances: per request: that its first draft is right, and each next one.
        seconds: of a step, by its requests and drafts.
        drafter: seconds that the drafter takes when it runs.
        available: how often a drafter that runs finds something.
        build: seconds that a step takes beside that if there was none of its shape.
        control: seconds that every decision takes, for each request and for all, unless all rest.
        has_few_totals: as of DraftLengths.
    """

    chances: list[tuple[float, float]]
    seconds: Callable[[int, int], float] = step_seconds
    drafter: float = 0.0
    available: float = 1.0
    build: float = 0.0
    control: tuple[float, float] = (0.0, 0.0)
    has_few_totals: bool = False
    most: int = 6
    seed: int = 0
    lengths: DraftLengths = field(default_factory=DraftLengths)
    states: list[DraftState] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.states = [self.lengths.start("x", self.most) for _ in self.chances]
        self.proposed = [0] * len(self.states)
        self.shapes: set[int] = set()
        self.lengths.has_few_totals = self.has_few_totals
        self.tokens, self.time = 0, 0.0

    def run(self, steps: int) -> list[list[int]]:
        """Steps, and returns the lengths of each; `tokens` and `time` are those of this run."""
        self.tokens, self.time = 0, 0.0
        history = []
        for _ in range(steps):
            counts = self.lengths.allocate(self.states, self.proposed, 512)
            assert all(n <= limit for n, limit in zip(counts, self.proposed, strict=True))
            accepted = [self._accept(*pair) for pair in zip(counts, self.chances, strict=True)]
            limits = [self.lengths.limit(state) for state in self.states]
            is_found = [self.rng.random() < self.available for _ in limits]
            self.proposed = [n * found for n, found in zip(limits, is_found, strict=True)]
            seconds = self.seconds(len(counts), sum(counts))
            drafting = 0.0
            if any(limits) or any(counts):
                drafting = self.control[0] * len(counts) + self.control[1]
            drafting += self.drafter * any(limits)
            build = 0.0 if sum(counts) in self.shapes else self.build
            self.shapes.add(sum(counts))
            self.tokens += len(counts) + sum(accepted)
            self.time += seconds + drafting + build
            seconds = (seconds + drafting) * self.rng.uniform(0.95, 1.05)
            if self.lengths.is_resting and not any(counts):
                self.lengths.pass_by(self.states, seconds)
            else:
                self.lengths.observe(
                    self.states, counts, accepted, seconds=seconds, build_seconds=build
                )
            history.append(counts)
        return history

    def _accept(self, drafts: int, chances: tuple[float, float]) -> int:
        accepted = 0
        while accepted < drafts and self.rng.random() < chances[accepted > 0]:
            accepted += 1
        return accepted

    def gain(self, steps: int) -> float:
        """Tokens per second over those without drafts and drafter."""
        self.run(steps)
        plain = len(self.chances) / self.seconds(len(self.chances), 0)
        return self.tokens / self.time / plain

    def best_gain(self) -> float:
        """The same of the best length for all."""
        batch = len(self.chances)
        gains = []
        for n in range(self.most + 1):
            tokens = sum(1 + sum(f * a**j for j in range(n)) for f, a in self.chances)
            gains.append(tokens / (self.seconds(batch, n * batch) + self.drafter * (n > 0)))
        return max(gains) * self.seconds(batch, 0) / batch


@pytest.mark.parametrize("batch", [1, 4, 32])
@pytest.mark.parametrize("chances", [(0.95, 0.95), (0.8, 0.8), (0.6, 0.5), (0.3, 0.3)])
def test_the_best_length_is_found(batch: int, chances: tuple[float, float]) -> None:
    load = Load([chances] * batch, seed=batch)
    load.run(200)
    got, best = load.gain(1500), load.best_gain()
    assert got >= 0.95 * best, (got, best)


def test_a_step_of_any_shape_is_used_up() -> None:
    """Steps of up to 4 rows cost the same, the fifth doubles: 3 drafts, whatever their chance."""
    load = Load([(0.9, 0.9)], seconds=lambda batch, drafts: 1e-3 * (1 + (batch + drafts > 4)))
    load.run(300)
    lengths = [counts[0] for counts in load.run(500)]
    assert sum(length == 3 for length in lengths) > 450


@pytest.mark.parametrize("batch", [1, 8, 64])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.3])
def test_what_gains_nothing_is_turned_down(batch: int, share: float) -> None:
    """Drafts that are never right, with a drafter of any cost: at most 4 % are lost."""
    plain = step_seconds(batch, 0)
    load = Load([(0.0, 0.0)] * batch, drafter=share * plain, seed=batch)
    load.run(300)
    assert load.gain(3000) > 0.96


@pytest.mark.parametrize("batch", [1, 8, 32, 64])
@pytest.mark.parametrize("chances", [(0.0, 0.0), (0.3, 0.3), (0.5, 0.6)])
@pytest.mark.parametrize("available", [0.2, 1.0])
def test_hidden_costs_are_seen(batch: int, chances: tuple[float, float], available: float) -> None:
    """Drafter, decisions and new shapes take 10 % and more: texts of 128 tokens hardly suffer."""
    plain = step_seconds(batch, 0)
    load = Load(
        [chances] * batch,
        drafter=0.03 * plain,
        available=available,
        build=0.5 * step_seconds(1, 0),
        control=(0.02 * plain / batch, 0.05 * plain),
        seed=batch,
        has_few_totals=True,
    )
    load.run(128)
    assert load.gain(512) > 0.95
    assert len(load.shapes) < 40


def test_what_gains_nothing_is_turned_down_soon() -> None:
    """From the first step on, and with nothing known: a short text hardly suffers."""
    for batch in (1, 16, 64):
        load = Load([(0.1, 0.1)] * batch, drafter=0.05 * step_seconds(batch, 0))
        assert load.gain(128) > 0.93, batch


@pytest.mark.parametrize("batch", [1, 16])
def test_a_text_that_begins_to_draft_well_is_noticed(batch: int) -> None:
    load = Load([(0.0, 0.0)] * batch, drafter=0.1 * step_seconds(batch, 0))
    load.run(2000)
    load.chances = [(0.9, 0.9)] * batch
    history = load.run(400)
    assert sum(any(counts) for counts in history[-50:]) >= 40
    load.run(200)
    assert load.gain(500) > 0.95 * load.best_gain()
    # And back.
    load.chances = [(0.0, 0.0)] * batch
    load.run(300)
    assert load.gain(2000) > 0.96


def test_requests_are_judged_each_by_itself() -> None:
    load = Load([(0.95, 0.95)] * 4 + [(0.02, 0.02)] * 12)
    load.run(400)
    history = np.array(load.run(500))
    assert history[:, :4].mean() > 2
    assert history[:, 4:].mean() < 0.1
    # None is given up for good: poor ones are tried now and then.
    assert (history[:, 4:].sum(axis=0) > 0).sum() >= 6


def test_a_request_that_begins_to_draft_well_is_noticed_among_others() -> None:
    load = Load([(0.9, 0.9)] * 8 + [(0.0, 0.0)] * 8, seed=3)
    load.run(500)
    load.chances = [(0.9, 0.9)] * 16
    load.run(250)
    history = np.array(load.run(100))
    assert (history[:, 8:].mean(axis=0) > 1).sum() >= 7


def test_old_estimates_are_doubted_after_a_rest() -> None:
    """Not only a draft, but as many as may pay: what they were worth before is long ago."""
    load = Load([(0.02, 0.5)] * 8, drafter=0.05 * step_seconds(8, 0))
    load.run(1500)
    while not load.lengths.is_resting:
        load.run(1)
    before = [state.own.first for state in load.states]
    while load.lengths.is_resting:
        load.run(1)
    assert max(before) < 0.2
    assert min(state.own.first for state in load.states) > 0.3


def test_drafts_that_are_seldom_found_are_no_cheaper() -> None:
    """A draft that is found costs what it costs, however many steps pass without any."""
    load = Load(
        [(0.55, 0.6)],
        available=0.2,
        seconds=lambda batch, drafts: 1e-3 * (1 + 0.3 * drafts),
    )
    load.run(500)
    lengths = Counter(counts[0] for counts in load.run(1500) if counts[0])
    assert lengths[1] + lengths[2] > 0.9 * lengths.total()


def test_a_busy_machine_does_not_end_what_pays() -> None:
    rng = random.Random(7)
    load = Load(
        [(0.8, 0.8)],
        seconds=lambda batch, drafts: (
            step_seconds(batch, drafts) * (30 if rng.random() < 0.02 else 1)
        ),
    )
    load.run(300)
    history = load.run(1000)
    assert sum(counts[0] > 0 for counts in history) > 850


def test_a_batch_that_changes_is_measured_first() -> None:
    """Before it is known what plain steps of about so many requests take, none drafts."""
    lengths = DraftLengths()
    states = [lengths.start("x", 4) for _ in range(24)]
    resting = []
    for step in range(40):
        lengths.pass_by(states[: 16 + step % 8], 1.0)
        resting.append(lengths.is_resting)
        if not lengths.is_resting:
            break
    assert 15 < len(resting) < 25
    assert any(lengths.limit(state) for state in states)


def test_nobody_starves() -> None:
    """A request that drafts well gets drafts again, however many others do, in little room."""
    lengths = DraftLengths()
    states = [lengths.start("x", 4) for _ in range(8)]
    total = np.zeros(8)
    for _ in range(600):
        limits = [lengths.limit(state) for state in states]
        counts = lengths.allocate(states, limits, 8)
        assert sum(counts) <= 8
        total += counts
        if any(counts):
            lengths.observe(states, counts, [int(n > 0) for n in counts], seconds=1.0)
        else:
            lengths.pass_by(states, 1.0)
    assert total.min() > 0


def test_requests_without_a_state_keep_their_drafts() -> None:
    lengths = DraftLengths()
    assert lengths.allocate([None] * 4, [3, 0, 2, 3], 100) == [3, 0, 2, 3]
    # Where rows lack they share evenly; what is left over goes to the first.
    assert lengths.allocate([None] * 4, [3, 0, 2, 3], 5) == [2, 0, 2, 1]
    assert lengths.allocate([None] * 4, [3, 0, 2, 3], 3) == [1, 0, 1, 1]
    state = lengths.start("x", 4)
    counts = lengths.allocate([None, state, None], [3, 4, 3], 9)
    assert counts[0] == counts[2] == 3
    assert counts[1] <= 3


def test_a_rest_of_all_asks_for_nothing() -> None:
    """Neither limits nor choices: a step of a rest is one of plain decoding."""
    load = Load([(0.0, 0.0)] * 8, drafter=0.2 * step_seconds(8, 0))
    load.run(300)
    lengths = load.lengths
    num_resting = 0
    for _ in range(200):
        limits = [lengths.limit(state) for state in load.states]
        num_resting += not any(limits)
        assert not (lengths.is_resting and any(limits))
        load.run(1)
    assert num_resting > 150


def test_a_wrong_first_time_does_not_stay() -> None:
    """Plain steps that were slow at first make drafts look free, until others come."""
    load = Load([(0.3, 0.3)] * 16)
    for _ in range(3):
        load.lengths.pass_by(load.states, 3 * step_seconds(16, 0))
    load.run(300)
    assert load.gain(500) > 0.96


@pytest.mark.parametrize("batch", [1, 16, 64])
def test_steps_have_few_numbers_of_drafts(batch: int) -> None:
    load = Load([(0.8, 0.8)] * batch, available=0.7, has_few_totals=True)
    load.run(200)
    history = load.run(1000)
    totals = Counter(sum(counts) for counts in history)
    assert all(total == round_down(total) for total in totals)


# ---- in the engine ----


class Clock:
    """Every step takes what it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def rule(self, engine: Engine, seconds: Callable[[int, int], float]) -> None:
        """From now on steps take `seconds(requests, drafts)`."""
        execute = engine._runner.execute

        def timed(plan: Any) -> Any:
            emitted = execute(plan)
            self.now += seconds(len(plan), sum(part.num_drafts for part in plan))
            return emitted

        engine._runner.execute = timed  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_checkpoint(directory, "Qwen3", num_hidden_layers=2)
    write_tokenizer(directory)
    return directory


def make(model_dir: Path, clock: Clock | None = None, **config: Any) -> Engine:
    config.setdefault("speculative_config", SpeculativeConfig(**NGRAM))
    engine_config = EngineConfig(model=str(model_dir), dtype="float32", device="cpu", **config)
    return Engine(engine_config, clock=clock or Clock())


def greedy(tokens: int = 60) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)


def test_where_rows_cost_much_the_drafter_rests(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [0]
    propose = NgramDrafter.propose

    def counted(self: NgramDrafter, batch: DraftBatch) -> None:
        calls[0] += 1
        propose(self, batch)

    monkeypatch.setattr(NgramDrafter, "propose", counted)
    clock = Clock()
    engine = make(model_dir, clock)
    clock.rule(engine, lambda batch, drafts: batch + 5.0 * drafts)
    engine.generate([PROMPT] * 4, greedy(100))
    engine.generate([PROMPT] * 4, greedy(100))
    speculative = engine.stats.speculative
    assert speculative.num_draft_tokens < 0.1 * engine.stats.generation_tokens
    assert engine.stats.num_suspended_steps > 0
    assert calls[0] < engine.stats.num_steps


def test_suffixes_are_learnt_after_a_rest(model_dir: Path) -> None:
    """While all rest no drafter is told anything; in the end the trees hold what was emitted."""
    clock = Clock()
    config = NGRAM | {"method": "suffix"}
    del config["min_ngram_size"]
    engine = make(model_dir, clock, max_num_seqs=4, num_pages=20, max_model_len=256)
    clock.rule(engine, lambda batch, drafts: batch + 5.0 * drafts)
    prompts = [[10 + i, *PROMPT, *PROMPT] for i in range(6)]
    done = engine.generate(prompts, greedy(150), speculative_config=config)
    assert engine.stats.num_suspended_steps > 100
    assert engine.stats.num_preemptions > 0
    cache = engine.suffix_cache
    assert cache.num_cached_requests == 6
    assert cache.num_cached_tokens == 6 * 150
    for one in done:
        assert cache.count(one.token_ids[-40:]) > 0
    assert cache.check_integrity() == ""


def test_where_rows_cost_nothing_all_are_verified(model_dir: Path) -> None:
    clock = Clock()
    engine = make(model_dir, clock)
    clock.rule(engine, lambda batch, drafts: 1.0)
    engine.generate([PROMPT] * 4, greedy(200))
    fixed = make(model_dir)
    fixed.generate([PROMPT] * 4, greedy(200), speculative_config={"adaptive_draft_length": False})
    wanted, got = fixed.stats.speculative, engine.stats.speculative
    assert wanted.num_accepted_tokens > 100, "the model repeats itself"
    assert got.num_accepted_tokens > 0.8 * wanted.num_accepted_tokens
    assert sum(fixed.stats.num_steps_per_length) == 0
    assert sum(engine.stats.num_steps_per_length) == got.num_steps


def test_lengths_follow_from_the_clock_alone(model_dir: Path) -> None:
    counts = []
    for _ in range(2):
        clock = Clock()
        engine = make(model_dir, clock)
        clock.rule(engine, lambda batch, drafts: 1 + 0.1 * (batch + drafts))
        engine.generate([PROMPT, PROMPT[3:], PROMPT * 2], greedy(120))
        counts.append(engine.stats.speculative)
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    "own",
    [
        {"verify_strategy": "rejection"},
        {"verify_strategy": "block"},
        {"verify_strategy": "topp"},
        {"accept_policy": "reject_all"},
        {"accept_policy": "accept_all"},
        {"accept_policy": "synthetic", "synthetic_acceptance_rates": [0.5]},
        {"adaptive_draft_length": False},
    ],
    ids=lambda own: "-".join(map(str, own.values()))[:20],
)
def test_some_requests_keep_their_lengths(model_dir: Path, own: dict[str, Any]) -> None:
    """Whatever the clock says, beside others that adapt, their seeded text is the same."""
    texts = []
    for seconds in (lambda b, n: 1.0, lambda b, n: 1 + 50.0 * n):
        clock = Clock()
        engine = make(model_dir, clock)
        clock.rule(engine, seconds)
        params = SamplingParams(max_tokens=80, temperature=0.7, seed=3, ignore_eos=True)
        names = [
            engine.add_request(PROMPT, params, speculative_config=config)
            for config in (own, {}, own | {"num_speculative_tokens": 3})
        ]
        while engine.has_unfinished():
            engine.step()
        done = [engine.completion(name) for name in names]
        assert sum(engine.stats.num_steps_per_length) == done[1].stats.num_steps
        texts.append([(done[i].token_ids, done[i].stats) for i in (0, 2)])
        assert done[0].stats.num_draft_tokens > 0
    assert texts[0] == texts[1]


def test_what_was_learnt_survives_a_preemption(model_dir: Path) -> None:
    clock = Clock()
    engine = make(model_dir, clock, max_num_seqs=4, num_pages=20, max_model_len=256)
    clock.rule(engine, lambda batch, drafts: 1 + 0.02 * (batch + drafts))
    prompts = [[10 + i, *PROMPT, *PROMPT] for i in range(4)]  # which share no page
    names = [engine.add_request(prompt, greedy(150)) for prompt in prompts]
    requests = [engine._requests[name] for name in names]
    states: dict[str, DraftState] = {}
    while engine.has_unfinished():
        engine.step()
        for request in requests:
            if request.drafting is not None:
                assert states.setdefault(request.request_id, request.drafting) is request.drafting
    assert engine.stats.num_preemptions > 0
    assert any(request.was_preempted and request.stats.num_drafts for request in requests)
    plain = make(model_dir).generate(prompts, greedy(150), speculative_config={"method": "naive"})
    for name, expected in zip(names, plain, strict=True):
        assert engine.completion(name).token_ids == expected.token_ids


def test_metrics_tell_the_lengths(model_dir: Path) -> None:
    clock = Clock()
    engine = make(model_dir, clock)
    clock.rule(engine, lambda batch, drafts: batch + 0.3 * drafts)
    engine.generate([PROMPT] * 3, greedy(100))
    lines = Metrics(engine).render().decode().splitlines()
    found = dict(line.rsplit(" ", 1) for line in lines if line.startswith("specops:spec_decode"))
    speculative = engine.stats.speculative
    label = f'model_name="{engine.model_name}"'
    name = "specops:spec_decode_draft_length"
    assert float(found[f"{name}_count{{{label}}}"]) == speculative.num_steps
    assert float(found[f"{name}_sum{{{label}}}"]) == speculative.num_draft_tokens
    at_most_0 = found[f'{name}_bucket{{le="0.0",{label}}}']
    assert float(at_most_0) == engine.stats.num_steps_per_length[0]
    suspended = found[f"specops:spec_decode_num_suspended_steps_total{{{label}}}"]
    assert float(suspended) == engine.stats.num_suspended_steps


class Silent:
    """A drafter that was found wanting; it must not be asked."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def start(self, request: Request) -> None:
        """Keeps nothing."""

    def stop(self, request: Request) -> None:
        """Keeps nothing."""

    def propose(self, batch: DraftBatch) -> None:
        self.asked.append(int((batch.max_draft_tokens > 0).sum()))
        batch.num_draft_tokens.fill_(0)


def test_plain_requests_do_not_make_drafters_run(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = Silent()
    monkeypatch.setattr("specops.engine.runner.make_drafter", lambda *_: drafter)
    engine = make(model_dir)
    engine.generate([PROMPT], greedy(10))
    assert drafter.asked
    assert all(drafter.asked)
    drafter.asked.clear()
    engine.generate([PROMPT], greedy(10), speculative_config={"method": "naive"})
    assert drafter.asked == []
