# SPDX-License-Identifier: Apache-2.0
"""Selection of the drafts to verify: optimality, learned acceptance, and use in the engine.

Step times and drafters are scripted, so tests do not depend on the speed of the machine.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from operator import mul
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from checkpoints import write_tokenizer
from mtp_checkpoints import make_mtp_checkpoint
from row_costs import set_row_cost
from specops.api import config as engine_config
from specops.engine import Engine, EngineConfig, SamplingParams, SpeculativeConfig, step_costs
from specops.engine.drafters.acceptance import MethodAcceptance, RequestAcceptance
from specops.engine.drafters.pass_reports import PassReports
from specops.engine.drafters.recurrent import RecurrentStep
from specops.engine.drafters.selection import DraftSelector
from specops.engine.plan import Part, Plan
from test_lossless import bits

Drafts = list[tuple[float, bool]]  # confidence, and whether the target agrees
Script = Callable[[int, random.Random], Drafts]  # called with the number of tokens so far


# ---- optimality ----


def acceptance_prob(confidence: float) -> float:
    """Return the acceptance probability of a draft without counts: the middle of its bucket."""
    return float(RequestAcceptance(MethodAcceptance()).products([confidence])[0])


def test_selection_is_optimal() -> None:
    rng = random.Random(1)
    sizes: list[int] = []
    for _ in range(300):
        batch = rng.randint(1, 3)
        # Few distinct confidences, so that there are ties, and costs of any shape.
        confidences = [
            [rng.choice([0.3, 0.6, 0.8, 0.8, 1.0]) for _ in range(rng.randint(0, 4))]
            for _ in range(batch)
        ]
        total = sum(map(len, confidences))
        others, max_drafts = rng.randint(0, 2), rng.randint(0, total)
        seconds = [1.0]
        for _ in range(batch + others + total):
            seconds.append(seconds[-1] + rng.choice([0.0, 0.05, 0.2, 0.5]))
        selector = DraftSelector(seconds)
        products = [
            list(itertools.accumulate(map(acceptance_prob, own), mul)) for own in confidences
        ]

        def rate(counts: Sequence[int]) -> float:
            gain = sum(sum(own[:count]) for own, count in zip(products, counts, strict=True))  # noqa: B023
            rows = batch + others  # noqa: B023
            return float((rows + gain) / seconds[rows + sum(counts)])  # noqa: B023

        acceptance = [selector.start("m") for _ in range(batch)]
        chosen = selector.select(acceptance, confidences, max_drafts, others)
        assert sum(chosen) <= max_drafts
        best = max(
            rate(counts)
            for counts in itertools.product(*(range(len(own) + 1) for own in confidences))
            if sum(counts) <= max_drafts
        )
        assert rate(chosen) == pytest.approx(best)
        sizes.append(sum(chosen))
    assert sizes.count(0) > 10 and max(sizes) > 6


def test_free_rows_are_filled_with_the_likeliest_drafts() -> None:
    selector = DraftSelector([1.0] * 20)
    states = [selector.start("m"), selector.start("m")]
    confidences = [[0.9, 0.2, 0.9], [0.5, 0.5]]
    assert selector.select(states, confidences, 9, 0) == [3, 2]
    assert selector.select(states, confidences, 2, 0) == [1, 1]
    assert selector.select(states, confidences, 0, 3) == [0, 0]
    assert selector.select([], [], 5, 0) == []
    for _ in range(100):
        selector.observe(states[:1], [[0.9]], [0])
    # The method has low acceptance, and the first request even lower.
    assert selector.select(states, [[0.9], [0.9]], 1, 0) == [0, 1]


# ---- learned acceptance ----


def test_acceptance_probabilities_approach_the_observed_rates() -> None:
    rng = random.Random(2)
    truth = {0.3: 0.6, 0.75: 0.5, 0.95: 0.9, 1.0: 0.2}
    method = MethodAcceptance()
    for _ in range(2000):
        request = RequestAcceptance(method)  # without counts of its own
        confidence = rng.choice(list(truth))
        hit = rng.random() < truth[confidence]
        request.observe([confidence], int(hit))
        method.update()
    for confidence, rate in truth.items():
        found = RequestAcceptance(method).products([confidence] * 2)
        # About 45 drafts count per bucket, for a standard error of at most 0.075.
        assert found[0] == pytest.approx(rate, abs=0.19)
        assert found[1] == pytest.approx(found[0] ** 2)
    # A change is learned within the window of counted drafts.
    for _ in range(300):
        RequestAcceptance(method).observe([1.0], 1)
        method.update()
    assert RequestAcceptance(method).products([1.0])[0] > 0.9


def test_requests_start_from_their_methods_counts() -> None:
    rng = random.Random(3)
    method = MethodAcceptance()
    good, bad = RequestAcceptance(method), RequestAcceptance(method)
    for _ in range(200):
        good.observe([0.7] * 3, 3)
        bad.observe([0.7], 0)
        other = RequestAcceptance(method)
        other.observe([0.7], int(rng.random() < 0.5))
        method.update()
    fresh = RequestAcceptance(method).products([0.7])[0]
    assert 0.5 < fresh < 0.8  # 3.5 of 5
    assert good.products([0.7])[0] > 0.9
    assert bad.products([0.7])[0] < 0.3
    for acceptance in (good, bad):  # probabilities stay within (0, 1]
        for confidence in (0.2, 0.7, 1.0):
            assert 0 < acceptance.products([confidence])[0] <= 1


def test_drafts_after_the_first_rejected_one_do_not_count() -> None:
    selector = DraftSelector([1.0] * 9)
    state = selector.start("m")
    counts = selector._methods["m"]
    selector.observe([state], [[0.1, 0.75, 0.6, 0.95]], [2])
    assert counts.tries == [1, 0, 1, 0, 1, 0, 0, 0, 0]
    assert counts.hits == [1, 0, 0, 0, 1, 0, 0, 0, 0]


# ---- speed ----

SECONDS: dict[str, Callable[[int], float]] = {
    "memory": lambda rows: 1 + 0.05 * rows,
    "compute": lambda rows: 0.3 + 0.5 * rows,
    "bend": lambda rows: max(1 + 0.01 * rows, 0.11 * rows),
    "stairs": lambda rows: 1 + 0.3 * -(-rows // 8),
}


def constant(confidence: float, rate: float) -> Script:
    return lambda num_tokens, rng: [(confidence, rng.random() < rate) for _ in range(4)]


def calibrated(num_tokens: int, rng: random.Random) -> Drafts:
    """Return drafts that are right as often as their confidences say."""
    confidences = [rng.random() for _ in range(4)]
    return [(confidence, rng.random() < confidence) for confidence in confidences]


def rare(num_tokens: int, rng: random.Random) -> Drafts:
    return constant(0.7, 0.9)(0, rng) if rng.random() < 0.1 else []


NEVER, ALWAYS, HALF = constant(0.9, 0), constant(0.6, 1), constant(0.5, 0.5)
SCRIPTS = [NEVER, ALWAYS, HALF, constant(0.95, 0.5), constant(0.7, 0.8), calibrated, rare]


class Simulation:
    """A batch of requests that come and go, decoded with selected or with fixed drafts."""

    def __init__(
        self,
        seconds: Callable[[int], float],
        scripts: Sequence[Script],
        batch: int,
        fixed: int | None = None,
        length: int = 300,
    ) -> None:
        self.rng = random.Random(4)
        self.table = [seconds(rows) for rows in range(5 * batch + 1)]
        self.scripts, self.fixed, self.length = scripts, fixed, length
        self.selector = DraftSelector(self.table)
        self.batch, self.started = batch, 0
        self.requests = [self.start() for _ in range(batch)]
        self.proposed = [Drafts() for _ in self.requests]

    def start(self) -> tuple[RequestAcceptance, Script, list[int]]:
        script = self.scripts[self.started % len(self.scripts)]
        self.started += 1
        return self.selector.start("m"), script, [0]

    def speed(self, steps: int) -> float:
        """Run steps and return the speed relative to plain decoding."""
        taken, tokens = 0.0, 0
        for _ in range(steps):
            acceptance = [request[0] for request in self.requests]
            confidences = [[confidence for confidence, _ in drafts] for drafts in self.proposed]
            if self.fixed is None:
                chosen = self.selector.select(acceptance, confidences, 4 * self.batch, 0)
            else:
                chosen = [min(len(own), self.fixed) for own in confidences]
            taken += self.table[self.batch + sum(chosen)]
            accepted = [
                len(list(itertools.takewhile(lambda draft: draft[1], drafts[:count])))
                for count, drafts in zip(chosen, self.proposed, strict=True)
            ]
            verified = [own[:count] for own, count in zip(confidences, chosen, strict=True)]
            self.selector.observe(acceptance, verified, accepted)
            for i, (_, script, length) in enumerate(self.requests):
                length[0] += 1 + accepted[i]
                tokens += 1 + accepted[i]
                self.proposed[i] = script(length[0], self.rng)
                if length[0] >= self.length:
                    self.requests[i] = self.start()
        return tokens / self.batch * self.table[self.batch] / taken


@pytest.mark.slow
@pytest.mark.parametrize("seconds", SECONDS.values(), ids=SECONDS)
@pytest.mark.parametrize(("batch", "steps"), [(1, 1200), (8, 300), (32, 100)])
def test_selection_is_nearly_as_fast_as_the_best_fixed_length(
    seconds: Callable[[int], float], batch: int, steps: int
) -> None:
    for script in SCRIPTS:
        simulation = Simulation(seconds, [script], batch)
        simulation.speed(max(steps // 4, 40))  # warm-up
        fixed = [Simulation(seconds, [script], batch, n).speed(steps) for n in (0, 1, 2, 4)]
        assert simulation.speed(steps) > 0.97 * max(fixed)


def test_selection_beats_fixed_lengths_for_mixed_requests() -> None:
    for scripts in ([calibrated], SCRIPTS):
        fixed = [Simulation(SECONDS["memory"], scripts, 8, n).speed(400) for n in range(5)]
        assert Simulation(SECONDS["memory"], scripts, 8).speed(400) > 1.02 * max(fixed)


@pytest.mark.parametrize("batch", [1, 8])
def test_changed_acceptance_is_detected(batch: int) -> None:
    good = [False]
    script: Script = lambda num_tokens, rng: [(0.9, good[0])] * 4  # noqa: E731
    simulation = Simulation(SECONDS["compute"], [script], batch, length=10**9)
    simulation.speed(1000)
    assert 0.97 < simulation.speed(1000) < 0.995  # occasional trial drafts cost time
    good[0] = True
    simulation.speed(250)
    best = Simulation(SECONDS["compute"], [ALWAYS], batch, 4).speed(100)
    assert simulation.speed(100) > 0.97 * best


def test_trial_drafts_fit_the_limit() -> None:
    selector = DraftSelector([SECONDS["compute"](rows) for rows in range(9)])
    states = [selector.start("m") for _ in range(3)]
    counts = set()
    for max_drafts in (1, 3) * 300:
        chosen = selector.select(states, [[0.4, 0.4]] * 3, max_drafts, 0)
        counts.add((max_drafts, sum(chosen)))
        selector.observe(states, [[0.4] * count for count in chosen], [0] * 3)
    assert {(3, 0), (3, 3)} <= counts and max(
        count for max_drafts, count in counts if max_drafts == 1
    ) <= 1


def test_selection_is_deterministic() -> None:
    first, second = (Simulation(SECONDS["memory"], SCRIPTS, 8).speed(200) for _ in range(2))
    assert first == second


# ---- in the engine ----

METHODS: list[dict[str, Any]] = [
    {"method": "ngram", "min_ngram_size": 1},
    {"method": "suffix"},
    {"method": "mtp"},
    {"method": "mtp+ngram"},
    {"method": "mtp+suffix", "num_model_steps": 2},
]
PROMPTS = [[5, 6, 7, 5, 6, 7, 5], [9] * 12, list(range(1, 40)), [3, 4]]
PARAMS = [
    SamplingParams(max_tokens=40, temperature=t, seed=5, ignore_eos=True, logprobs=2)
    for t in (0.0, 0.0, 0.9, 0.3)
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_mtp_checkpoint(directory, "deepseek_v3", 1)
    write_tokenizer(directory)
    return directory


def make(model_dir: Path, own: dict[str, Any], **config: Any) -> Engine:
    own = {"num_speculative_tokens": 4, **own} if own["method"] != "naive" else own
    config = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "device": "cpu", **config}
    return Engine(
        EngineConfig(
            model=str(model_dir),
            dtype="float32",
            speculative_config=SpeculativeConfig.from_dict(own),
            **config,
        )
    )


@pytest.mark.parametrize("own", METHODS, ids=lambda own: "-".join(map(str, own.values())))
def test_measuring_and_selecting_change_no_token(model_dir: Path, own: dict[str, Any]) -> None:
    expected = make(model_dir, {"method": "naive"}).generate(PROMPTS, PARAMS)
    engine = make(model_dir, {**own, "adaptive_verification": True})
    assert engine.num_free_pages == engine.num_pages
    assert engine.num_running == engine.num_waiting == 0
    assert engine.stats.num_steps == 0 and engine._drafting.width == 0
    suffixes = engine.drafters["suffix"].cache  # type: ignore[attr-defined]
    assert suffixes.num_cached_requests == 0 and suffixes.running_requests == []
    measured = engine._drafting._selector.seconds  # type: ignore[union-attr]
    assert len(measured) == 65 and all(0 < a <= b for a, b in itertools.pairwise(measured))
    # Free rows, expensive rows, and the measured times.
    cost_tables = ([1.0] * 65, [1.0 + rows for rows in range(65)], measured)
    for name, seconds in zip(("free", "dear", "measured"), cost_tables, strict=True):
        engine._drafting.select_by(seconds)
        before = engine.stats.speculative.num_draft_tokens
        done = engine.generate(PROMPTS, PARAMS)
        assert list(map(bits, done)) == list(map(bits, expected))
        drafts = engine.stats.speculative.num_draft_tokens - before
        if name == "free":
            free = drafts
            assert drafts > 20
        elif name == "dear":
            assert drafts < free / 2
    assert engine.num_free_pages == engine.num_pages and engine._drafting._acceptance == {}


@pytest.mark.parametrize("second", ["ngram", "suffix"])
def test_confidences_come_from_the_drafting_stage(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, second: str
) -> None:
    """Other requests in the batch run more passes of the head."""
    fill = RecurrentStep.fill

    def poisoned(self: RecurrentStep, parts: Sequence[Part]) -> None:
        for array in self.reports.logprobs:
            array.host[:] = np.nan
        fill(self, parts)

    monkeypatch.setattr(RecurrentStep, "fill", poisoned)
    engine = make(model_dir, {"method": "mtp", "adaptive_verification": True})
    set_row_cost(engine)
    hybrid: dict[str, Any] = {"method": f"mtp+{second}", "num_model_steps": 1}
    hybrid |= {"num_speculative_tokens": 4, "min_ngram_size": 1}
    prompts = [list(range(1, 150)), [3, 4]] * 2  # the prompts make ngram and suffix draft
    names = [
        engine.add_request(prompt, params, speculative_config=own)
        for prompt, params, own in zip(prompts, PARAMS, (hybrid, None) * 2, strict=True)
    ]
    seen = 0
    while engine.has_unfinished():
        engine.step()
        proposals = engine._drafting.proposals
        for name in names[::2]:
            request = engine._requests[name]
            behind = proposals.confidences[request.slot, 1 : proposals.counts[request.slot]]
            seen += len(behind)
            if second == "ngram":
                lengths = behind / (
                    1 - behind
                )  # a match of L tokens has the confidence L / (L + 1)
                assert lengths == pytest.approx(lengths.round(), abs=1e-3)
            assert ((behind > 0) & (behind <= 1)).all()
    assert seen > 20 and not engine._drafting.num_failures
    done = [engine.completion(name) for name in names]
    plain = make(model_dir, {"method": "naive"}).generate(prompts, PARAMS)
    assert list(map(bits, done)) == list(map(bits, plain))


def test_nan_probabilities_affect_only_their_request(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, victim = PassReports.read, PROMPTS[1]

    def poisoned(self: PassReports, parts: Sequence[Part], *others: Any) -> None:
        for index, part in enumerate(parts):
            if part.request.token_ids[: len(victim)] == victim:
                for array in self.logprobs:
                    array.host[index] = np.nan
        read(self, parts, *others)

    monkeypatch.setattr(PassReports, "read", poisoned)
    engine = make(model_dir, {"method": "mtp", "adaptive_verification": True})
    set_row_cost(engine)
    done = engine.generate(PROMPTS, PARAMS)
    drafts = [one.stats.num_draft_tokens for one in done]
    assert [count > 0 for count in drafts] == [True, False, True, True]
    assert engine.stats.drafter_failures["mtp"] == engine._drafting.num_failures == 1
    plain = make(model_dir, {"method": "naive"}).generate(PROMPTS, PARAMS)
    assert list(map(bits, done)) == list(map(bits, plain))


def test_invalid_confidence_affects_only_its_request(model_dir: Path) -> None:
    """A drafter may write such numbers on the host."""
    engine = make(
        model_dir, {"method": "ngram", "min_ngram_size": 1, "adaptive_verification": True}
    )
    set_row_cost(engine)
    names = [engine.add_request(*one) for one in zip(PROMPTS, PARAMS, strict=True)]
    wrong = iter([np.nan, 1.5, -0.5])
    planted = 0
    while engine.has_unfinished():
        for name in names[:3]:
            slot = engine._requests[name].slot
            if slot >= 0 and engine._drafting.proposals.counts[slot] and planted < 2:
                engine._drafting.proposals.confidences[slot, 0] = next(wrong)
                planted += 1
        engine.step()
    assert engine.stats.drafter_failures["adaptive_verification"] == planted == 2
    done = [engine.completion(name) for name in names]
    assert max(one.stats.num_draft_tokens for one in done) > 20
    plain = make(model_dir, {"method": "naive"}).generate(PROMPTS, PARAMS)
    assert list(map(bits, done)) == list(map(bits, plain))


def test_request_can_disable_but_not_enable_selection(model_dir: Path) -> None:
    engine = make(model_dir, {"method": "ngram"})
    with pytest.raises(ValueError, match="adaptive_verification needs an engine that knows"):
        engine.add_request([1, 2], PARAMS[0], speculative_config={"adaptive_verification": True})
    engine = make(model_dir, {"method": "ngram", "adaptive_verification": True})
    seen: set[int] = set()
    start = DraftSelector.start

    def starting(self: DraftSelector, method: str) -> RequestAcceptance:
        seen.add(len(seen))
        return start(self, method)

    with mock.patch.object(DraftSelector, "start", starting):
        engine.generate(PROMPTS, PARAMS, speculative_config={"adaptive_verification": False})
        engine.generate(PROMPTS, PARAMS, speculative_config={"verify_strategy": "rejection"})
        assert not seen
        # Requests with fixed, selected and no drafts share steps.
        expected = make(model_dir, {"method": "naive"}).generate(PROMPTS, PARAMS)
        kinds: list[Any] = [None, {"method": "naive"}, {"adaptive_verification": False}, None]
        names = [
            engine.add_request(prompt, params, speculative_config=kind)
            for prompt, params, kind in zip(PROMPTS, PARAMS, kinds, strict=True)
        ]
        while engine.has_unfinished():
            engine.step()
    assert len(seen) == 2
    assert [bits(engine.completion(name)) for name in names] == list(map(bits, expected))


def test_selection_is_enabled_for_long_steps(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_on(**own: Any) -> bool:
        return make(model_dir, {"method": "ngram", **own})._drafting._selector is not None

    size = (model_dir / "model.safetensors").stat().st_size
    assert not is_on() and is_on(adaptive_verification=True)
    monkeypatch.setattr(engine_config, "_LEAST_SELECTED_BYTES", size)
    assert is_on() and not is_on(adaptive_verification=False)
    assert make(model_dir, {"method": "naive"})._drafting._selector is None

    def decided(method: str, device: str) -> bool | None:
        own = SpeculativeConfig(method=method)
        config = EngineConfig(model=str(model_dir), speculative_config=own)
        return config.decided_for(device).speculative_config.adaptive_verification

    assert decided("suffix", "cpu") is True and decided("suffix", "cuda") is False
    assert decided("mtp+ngram", "cpu") is False, "the cost of model passes is unknown"


def test_request_can_use_selection_with_another_default_strategy(model_dir: Path) -> None:
    own = {"method": "ngram", "verify_strategy": "rejection", "adaptive_verification": True}
    engine = make(model_dir, own)
    overrides = {"verify_strategy": "target_match"}
    done = engine.generate(PROMPTS, PARAMS, speculative_config=overrides)
    plain = make(model_dir, {"method": "naive"}).generate(PROMPTS, PARAMS)
    assert list(map(bits, done)) == list(map(bits, plain))


@pytest.mark.parametrize("bytes_read", [lambda rows: 5.0, lambda rows: min(rows, 8.0)])
def test_steps_are_measured_until_they_are_long(
    model_dir: Path, bytes_read: Callable[[int], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    counts: list[int] = []
    engine = make(model_dir, {"method": "ngram"})
    launch = engine._runner.launch

    def launching(plan: Plan) -> Any:
        counts.append(plan.parts[0].num_rows)
        seen = counts.count(counts[-1])
        clock[0] += (
            {1: 1.0, 2: 0.9, 4: 1.4, 8: 3.5, 16: 30}[counts[-1]] * (1 if seen == 2 else 1.2) / 40
        )
        return launch(plan)

    monkeypatch.setattr(engine._runner, "launch", launching)
    monkeypatch.setattr(step_costs.time, "perf_counter", lambda: clock[0])
    seconds = step_costs.measure_steps(
        engine.tokenizer,
        engine._runner,
        engine._drafting,
        engine._pool,
        engine._device,
        bytes_read,
        vocab_size=engine.vocab_size,
        max_rows=16,
        max_model_len=64,
    )
    # 16 rows would take too long, unless more rows read more weights.
    is_mixture = bytes_read(8) > bytes_read(1)
    assert counts[:6] == ([1, 2, 4, 8, 16, 1] if is_mixture else [1, 2, 4, 8, 1, 2])
    # Two rows took less time than one row, so both get the same time. Eight rows run only once.
    last = seconds[8]
    assert seconds[1:5] == pytest.approx([0.025, 0.025, 0.03, 0.035])
    assert seconds[12] - last == pytest.approx(
        (seconds[16] - last) / 2 if is_mixture else last - seconds[4]
    )
    assert len(seconds) == 17 and engine.num_free_pages == engine.num_pages
