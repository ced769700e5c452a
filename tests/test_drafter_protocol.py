# SPDX-License-Identifier: Apache-2.0
"""The drafter protocol: what it takes to add a method, and that none of it can change a token."""

import random
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from draft_lengths import RandomLengths
from specops.engine import Completion, Engine, EngineConfig, SamplingParams, SpeculativeConfig
from specops.engine.drafters import (
    Drafter,
    DrafterContext,
    MethodUnavailable,
    StepResults,
    TargetStep,
    stage_limit,
)
from specops.engine.drafting import share_out
from specops.engine.errors import ModelError
from specops.engine.memory.kv_cache import DraftKv
from specops.engine.methods import METHODS, drafting_order, method_names
from test_lossless import bits, params, prompts
from toy_drafter import ToyDrafter, ToyStep

NAIVE = SpeculativeConfig(method="naive")


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry line."""
    monkeypatch.setitem(METHODS, "toy", "toy_drafter")


def make(speculative: SpeculativeConfig, **config: Any) -> Engine:
    return Engine(EngineConfig(device="cpu", speculative_config=speculative, **config))


@cache
def plain() -> tuple[list[str], list[SamplingParams], list[Completion]]:
    """Prompts, greedy and seeded in turn, and what plain decoding gives."""
    texts = prompts()
    each = [params(i, 0.0 if i % 2 else 0.8) for i in range(len(texts))]
    return texts, each, make(NAIVE, max_num_seqs=8).generate(texts, each)


LIMITS: list[dict[str, Any]] = [
    {"max_num_seqs": 16},
    {"max_num_seqs": 6, "max_num_batched_tokens": 48, "page_size": 32},
    {"max_num_seqs": 12, "num_pages": 90, "max_model_len": 1024},
    {"max_num_seqs": 12, "max_num_batched_tokens": 96, "num_pages": 90, "max_model_len": 1024},
]


@pytest.mark.parametrize("limits", LIMITS, ids=["wide", "chunks", "preemption", "both"])
@pytest.mark.corners("both")
def test_a_drafter_of_one_file_changes_nothing(toy: None, limits: dict[str, Any]) -> None:
    texts, each, expected = plain()
    engine = make(SpeculativeConfig(method="toy", num_speculative_tokens=3), **limits)
    done = engine.generate(texts, each)
    assert [i for i, one in enumerate(done) if bits(one) != bits(expected[i])] == []
    spec = engine.stats.speculative
    assert spec.num_draft_tokens > 1000 and spec.num_accepted_tokens > 0
    assert (engine.stats.num_preemptions > 0) == ("num_pages" in limits)
    assert engine.num_free_pages == engine.num_pages
    # Beside other methods, in the same steps and on the same pages.
    RandomLengths().decide_for(engine)
    kinds: list[Any] = [None, {"method": "ngram"}, {"method": "mtp"}, {"method": "naive"}]
    names = [
        engine.add_request(text, one, speculative_config=kinds[i % 4])
        for i, (text, one) in enumerate(zip(texts[:24], each[:24], strict=True))
    ]
    while engine.has_unfinished():
        engine.step()
    assert [bits(engine.completion(name)) for name in names] == list(map(bits, expected[:24]))


def test_its_states_are_those_of_its_own_tokens(toy: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taps are the states that leave the layers, and pages found by another request have them."""
    seen: dict[tuple[int, ...], torch.Tensor] = {}
    again = Counter[bool]()
    launch = ToyStep.launch

    def watched(self: ToyStep, target: TargetStep) -> None:
        launch(self, target)
        size = self.drafter.config.page_size
        for row, slot in enumerate(target.slots.tolist()):
            if slot not in watching:
                continue
            pages = target.kv_indices[int(target.kv_indptr[row]) :]
            for position in range(int(target.kv_lens[row])):
                if position >= int(target.lens[slot]) - 1:
                    break  # rejected drafts
                key = tuple(target.token_ids[slot, : position + 1].tolist())
                state = self.drafter.kept[int(pages[position // size]) * size + position % size]
                known = seen.setdefault(key, state.clone())
                again[known is not state and torch.equal(known, state)] += 1

    monkeypatch.setattr(ToyStep, "launch", watched)
    engine = make(SpeculativeConfig(method="toy", num_speculative_tokens=2), max_num_seqs=4)
    watching = set(range(4))
    text = engine.tokenizer.encode(prompts()[0])[:80]
    greedy = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    # A plain request first: its pages have no states, and are no hits.
    engine.generate([text], greedy, speculative_config={"method": "naive"})
    assert engine.stats.prefix_cache_hits == 0
    watching.clear()
    watching |= set(range(4))
    engine.generate([text, text[:50], [*text[:70], 7, 8]], greedy)
    engine.generate([[*text, 5]], greedy)
    assert engine.stats.prefix_cache_hits > 0
    assert set(again) == {True} and again[True] > 500


def test_what_the_registry_lists() -> None:
    assert method_names() == ("naive", *METHODS)
    assert sorted(drafting_order()) == sorted(METHODS)
    engine = make(NAIVE)
    assert engine.runnable_methods == method_names()
    assert tuple(engine.drafters) == drafting_order()
    for name, drafter in engine.drafters.items():
        assert drafter.name == name


def test_stages_are_drafted_in_the_order_of_the_registry() -> None:
    """A request's drafters continue each other only if they come in the order of the steps."""
    order = drafting_order()
    for own in (
        {"method": "ngram"},
        {"method": "suffix"},
        {"method": "mtp"},
        {"method": "mtp", "mtp_strategy": "with_ngram"},
        {"method": "mtp", "mtp_strategy": "with_suffix"},
    ):
        config = SpeculativeConfig(num_speculative_tokens=5, **own)  # type: ignore[arg-type]
        names = [name for name, _ in config.draft_stages]
        assert names == sorted(names, key=order.index)
        assert config.draft_stages[-1][1] == 5


class Numbers(Drafter):
    """Writes its own number behind what is there, as far as it may."""

    def __init__(self, name: str, token: int, most: int) -> None:
        self.name, self.token, self.most = name, token, most

    def finish(self, results: StepResults) -> None:
        proposals = results.proposals
        for part in results.parts:
            slot = part.request.slot
            limit = min(stage_limit(part, self.name), int(proposals.counts[slot]) + self.most)
            while proposals.counts[slot] < limit:
                proposals.token_ids[slot, proposals.counts[slot]] = self.token
                proposals.counts[slot] += 1


def test_drafters_continue_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each up to its own stage's number, in one table."""
    monkeypatch.setattr("specops.engine.drafters.mtp.load", lambda context: Numbers("mtp", 1, 2))
    monkeypatch.setattr(
        "specops.engine.drafters.suffix.load", lambda context: Numbers("suffix", 2, 9)
    )
    config = SpeculativeConfig(
        method="mtp", mtp_strategy="with_suffix", num_model_steps=3, num_speculative_tokens=6
    )
    engine = make(config, max_num_seqs=3)
    greedy = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    engine.add_request([5, 6, 7], greedy)
    engine.add_request([5, 6, 8], greedy, speculative_config={"method": "suffix"})
    engine.add_request([5, 6, 9], greedy, speculative_config={"mtp_strategy": "default"})
    engine.step()
    proposals = engine._drafting.proposals
    assert proposals.token_ids.tolist() == [
        [1, 1, 2, 2, 2, 2],
        [2, 2, 2, 2, 2, 2],
        [1, 1, -1, -1, -1, -1],
    ]
    assert proposals.counts.tolist() == [6, 6, 2]


def test_a_model_without_a_method_runs_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(context: DrafterContext) -> Drafter:
        raise MethodUnavailable("/models/some: it has no such head", "it has no such head")

    monkeypatch.setattr("specops.engine.drafters.mtp.load", load)
    engine = make(NAIVE)
    assert engine.runnable_methods == ("naive", "ngram", "suffix")
    assert engine.missing_methods == {"mtp": "it has no such head"}
    with pytest.raises(ModelError, match=r"^/models/some: it has no such head$"):
        make(SpeculativeConfig(method="mtp"))


def test_at_most_one_drafter_of_a_request_keeps_anything_on_its_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "specops.engine.drafters.ngram.NgramDrafter.draft_kv",
        lambda self, request: DraftKv("ngram", 0, 1),
    )
    engine = make(SpeculativeConfig(method="mtp", mtp_strategy="with_ngram"))
    with pytest.raises(AssertionError, match="two drafters of one request"):
        engine.add_request([1, 2], SamplingParams(max_tokens=2))


def test_share_out_is_fair() -> None:
    """The largest equal cap, and one more each for the first that it cuts, as far as that goes."""
    rng = random.Random(1)
    for _ in range(500):
        wanted = [rng.randrange(9) for _ in range(rng.randrange(1, 12))]
        total = rng.randrange(60)
        cap = max(c for c in range(10) if sum(min(w, c) for w in wanted) <= total)
        expected = [min(w, cap) for w in wanted]
        for index, number in enumerate(wanted):
            if number > cap and sum(expected) < total:
                expected[index] += 1
        assert share_out(wanted, total) == expected


def test_the_toy_needs_nothing_of_the_engine_but_its_line(toy: None) -> None:
    engine = make(SpeculativeConfig(method="TOY", num_speculative_tokens=1))
    assert isinstance(engine.drafters["toy"], ToyDrafter)
    assert engine.runnable_methods[-1] == "toy"
    with pytest.raises(ValueError, match="method must be one of naive, ngram, suffix, mtp, toy"):
        SpeculativeConfig(method="tox")
