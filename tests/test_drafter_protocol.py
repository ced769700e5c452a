# SPDX-License-Identifier: Apache-2.0
"""The drafter protocol: a new method needs one file and one line, and cannot change a token."""

import random
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import eagle_oracle
import pytest
import small_heads
import test_dflash
import test_residual_heads
import torch
from checkpoints import write_tokenizer
from draft_lengths import RandomLengths
from fake_gpu import FakeGpu
from mtp_checkpoints import make_mtp_checkpoint
from specops import sampling
from specops.api.config import BUNDLED_MODEL
from specops.api.errors import ModelError
from specops.api.methods import METHODS, drafting_order, method_names
from specops.api.tokenizer import Tokenizer
from specops.engine import Completion, Engine, EngineConfig, SamplingParams, SpeculativeConfig
from specops.engine.drafters.base import (
    Drafter,
    DrafterContext,
    MethodUnavailable,
    StepResults,
    TargetStep,
    stage_limit,
)
from specops.engine.drafters.drafting import share_out
from specops.engine.drafters.recurrent import RecurrentDrafter, RecurrentStep
from specops.engine.memory.kv_cache import DraftKv
from specops.engine.models import Transformer
from test_lossless import bits, params, prompts
from toy_drafter import ToyHead, write_weights

NAIVE = SpeculativeConfig(method="naive")
RESIDUAL = ("medusa", "hydra", "hydra++")


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Register the toy drafter, write its weights, and return its configuration."""
    texts, _, done = plain()
    monkeypatch.setitem(METHODS, "toy", "toy_drafter")
    encode = Tokenizer.from_dir(BUNDLED_MODEL).encode
    outputs = [encode(text) + one.token_ids for text, one in zip(texts, done, strict=True)]
    write_weights(tmp_path, outputs, 4096, 192)
    return {"method": "toy", "model": str(tmp_path)}


def make(speculative: SpeculativeConfig, **config: Any) -> Engine:
    return Engine(EngineConfig(device="cpu", speculative_config=speculative, **config))


def runnable() -> tuple[str, ...]:
    """Return the methods that need no model directory, including a registered toy."""
    return tuple(
        name
        for name in method_names()
        if name not in ("draft_model", "eagle", "eagle3", "medusa", "hydra", "dflash")
    )


@cache
def plain() -> tuple[list[str], list[SamplingParams], list[Completion]]:
    """Return prompts, alternately greedy and seeded, and the outputs of plain decoding."""
    texts = prompts()
    each = [params(i, 0.0 if i % 2 else 0.8) for i in range(len(texts))]
    return texts, each, make(NAIVE, max_num_seqs=8).generate(texts, each)


LIMITS: list[dict[str, Any]] = [
    {"max_num_seqs": 16},
    {"max_num_seqs": 6, "max_num_batched_tokens": 48, "page_size": 32},
    {"max_num_seqs": 12, "num_pages": 70, "max_model_len": 1024},
    {"max_num_seqs": 12, "max_num_batched_tokens": 96, "num_pages": 70, "max_model_len": 1024},
]


@pytest.mark.parametrize("limits", LIMITS, ids=["wide", "chunks", "preemption", "both"])
@pytest.mark.fast("both")
def test_toy_drafter_changes_no_bit(toy: dict[str, Any], limits: dict[str, Any]) -> None:
    texts, each, expected = (of_all[::2] for of_all in plain())
    engine = make(SpeculativeConfig.from_dict({"num_speculative_tokens": 3, **toy}), **limits)
    done = engine.generate(texts, each)
    assert [i for i, one in enumerate(done) if bits(one) != bits(expected[i])] == []
    spec = engine.stats.speculative
    assert spec.num_draft_tokens > 1000 and spec.num_accepted_tokens > spec.num_draft_tokens // 10
    assert (engine.stats.num_preemptions > 0) == ("num_pages" in limits)
    assert engine.num_free_pages == engine.num_pages
    # Other methods run in the same steps and on the same pages.
    RandomLengths().decide_for(engine)
    kinds: list[Any] = [None, {"method": "ngram"}, {"method": "mtp"}, {"method": "toy+ngram"}]
    names = [
        engine.add_request(text, one, speculative_config=kinds[i % 4])
        for i, (text, one) in enumerate(zip(texts[:24], each[:24], strict=True))
    ]
    while engine.has_unfinished():
        engine.step()
    assert [bits(engine.completion(name)) for name in names] == list(map(bits, expected[:24]))


def test_kept_states_belong_to_their_tokens(
    toy: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cached pages have the same auxiliary hidden states as the tokens of another request."""
    seen: dict[tuple[int, ...], torch.Tensor] = {}
    again = Counter[bool]()
    launch = RecurrentStep.launch

    def watched(self: RecurrentStep, target: TargetStep) -> None:
        launch(self, target)
        head, size = self._drafter.head, self._drafter.page_size
        if not isinstance(head, ToyHead):
            return
        for row, slot in enumerate(target.slots.tolist()):
            pages = target.kv_indices[int(target.kv_indptr[row]) :]
            known = int(target.lens[slot]) - 1  # the newest token has no states
            for position in range(min(int(target.kv_lens[row]), known)):
                key = tuple(target.token_ids[slot, : position + 1].tolist())
                state = head.kept[int(pages[position // size]) * size + position % size]
                found = seen.setdefault(key, state.clone())
                again[found is not state and torch.equal(found, state)] += 1

    monkeypatch.setattr(RecurrentStep, "launch", watched)
    engine = make(SpeculativeConfig.from_dict({"num_speculative_tokens": 2, **toy}), max_num_seqs=4)
    text = engine.tokenizer.encode(prompts()[0])[:80]
    greedy = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    # Pages of a request without drafts lack the drafter's states, so they give no hits.
    engine.generate([text], greedy, speculative_config={"method": "naive"})
    assert engine.stats.prefix_cache_hits == 0
    engine.generate([text, text[:50], [*text[:70], 7, 8]], greedy)
    engine.generate([[*text, 5]], greedy)
    assert engine.stats.prefix_cache_hits > 0
    assert set(again) == {True} and again[True] > 500


def test_auxiliary_hidden_states_are_computed_only_for_their_drafters(
    toy: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    layers_read: list[tuple[int, ...]] = []
    forward = Transformer.forward

    def watched(
        self: Transformer, batch: Any, cache: Any, aux_hidden_states: Any = None
    ) -> torch.Tensor:
        layers_read.append(tuple(aux_hidden_states or ()))
        return forward(self, batch, cache, aux_hidden_states)

    monkeypatch.setattr(Transformer, "forward", watched)
    engine = make(SpeculativeConfig.from_dict({"num_speculative_tokens": 2, **toy}))
    greedy = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    for method, expected in (("mtp", ()), ("ngram", ()), ("naive", ()), ("toy", (0, 2))):
        layers_read.clear()
        engine.generate([[5, 6, 7]], greedy, speculative_config={"method": method})
        assert set(layers_read) == {expected}, method


@pytest.mark.parametrize("captures", [True, False], ids=["graphs", "eager"])
def test_toy_drafter_runs_in_graphs(
    toy: dict[str, Any], monkeypatch: pytest.MonkeyPatch, captures: bool
) -> None:
    """Outputs equal plain decoding, and drafts equal those of eager steps."""
    texts, each, expected = plain()
    reporting = [replace(one, report_drafts=True, max_tokens=40) for one in each[:4]]
    toy = {**toy, "method": "toy+ngram", "num_speculative_tokens": 4, "num_model_steps": 2}

    def run() -> tuple[Engine, list[Completion], list[Any]]:
        engine = make(SpeculativeConfig.from_dict(toy), max_num_seqs=4)
        names = [engine.add_request(text, one) for text, one in zip(texts, reporting, strict=False)]
        drafts = []
        while engine.has_unfinished():
            drafts += [(one.request_id, one.drafts) for one in engine.step()]
        return engine, [engine.completion(name) for name in names], drafts

    _, _, eager = run()
    device = FakeGpu(captures=captures)
    monkeypatch.setattr("specops.engine.engine.open_device", lambda *_, **__: device)
    engine, done, drafts = run()
    assert list(map(bits, done)) == [bits(one)[:40] for one in expected[:4]]
    assert drafts == eager
    assert {source for _, one in drafts if one for source in one.sources} == {"toy", "ngram"}
    steps = engine._runner.memory._steps.values()
    captured = [one for one in steps if one.replay and one.shape.drafters]
    assert bool(captured) == captures


def test_two_drafters_sample_in_the_same_steps(
    toy: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each drafter has its own rows of draft_probs; a reduced vocabulary has token ids."""
    texts, _, _ = plain()
    each = [replace(params(i, 0.8), max_tokens=60) for i in range(8)]
    engine = make(
        SpeculativeConfig.from_dict(
            {"num_speculative_tokens": 3, "verify_strategy": "rejection", **toy}
        )
    )
    kinds: list[dict[str, Any]] = [{"method": "toy"}, {"method": "mtp"}]
    alone = [
        engine.generate([texts[i]], each[i], speculative_config=kinds[i % 2])[0] for i in range(8)
    ]
    verify, batches = sampling.verify, Counter[tuple[str, ...]]()
    method_of_row = {place: name for name, place in engine._drafting.draft_probs._first_row.items()}

    def watched(logits: Any, **named: Any) -> Any:
        indptr, drafts, _ = named["drafts"]
        draft_probs = named.get("draft_probs")
        methods_in_step = set()
        for request, row in enumerate([] if draft_probs is None else draft_probs.rows.tolist()):
            if row < 0:
                continue
            methods_in_step.add(method_of_row[row // 32 * 32])
            for place in range(int(indptr[request + 1] - indptr[request]) - 1):
                probs = draft_probs.probs[row, place]
                ids = draft_probs.token_ids[row, place]
                assert probs[ids == drafts[request, place]].item() > 0
                assert probs[ids >= 0].sum().item() == pytest.approx(1, abs=1e-4)
                assert probs[ids < 0].sum().item() == 0
        batches[tuple(sorted(methods_in_step))] += 1
        return verify(logits, **named)

    monkeypatch.setattr(sampling, "verify", watched)
    names = [
        engine.add_request(texts[i], each[i], speculative_config=kinds[i % 2]) for i in range(8)
    ]
    while engine.has_unfinished():
        engine.step()
    in_one_batch = [engine.completion(name) for name in names]
    assert list(map(bits, in_one_batch)) == list(map(bits, alone))
    assert batches["mtp", "toy"] > 20
    assert all(
        0 < one.stats.num_accepted_tokens < one.stats.num_draft_tokens for one in in_one_batch
    )


def test_model_option_applies_to_its_method(toy: dict[str, Any], tmp_path: Path) -> None:
    """`model` belongs to the configured method; `options` names the models of other methods."""
    engine = make(SpeculativeConfig.from_dict(toy))
    assert engine.runnable_methods == runnable()
    assert SpeculativeConfig.from_dict(toy).named_methods == ("toy",)
    assert SpeculativeConfig.from_dict({"method": "ngram", "model": "/m"}).named_methods == (
        "ngram",
        "mtp",
    )
    both = SpeculativeConfig.from_dict(
        {"method": "toy+ngram", "options": {"toy": {"model": "/t"}}, "draft_vocab": "/d"}
    )
    assert both.named_methods == ("ngram", "mtp", "toy")
    assert both.options["toy"].model == "/t" and both.options["mtp"].model is None
    with pytest.raises(ModelError, match=r"toy\.safetensors: no such file"):
        make(SpeculativeConfig.from_dict({"method": "toy", "model": str(tmp_path / "none")}))
    without = make(SpeculativeConfig())
    assert without.runnable_methods == ("naive", "ngram", "suffix", "mtp", "prediction")
    with pytest.raises(ValueError, match=r'"toy" cannot run .*: no weights of a toy'):
        without.add_request([1], SamplingParams(), speculative_config={"method": "toy+suffix"})


def test_invalid_method_chains_are_refused(toy: dict[str, Any]) -> None:
    for method, words in (
        ("toy+mtp", "'mtp' cannot continue 'toy'"),
        ("ngram+toy", "'toy' cannot continue 'ngram'"),
        ("suffix+ngram", "'ngram' cannot continue 'suffix'"),
        ("ngram+ngram", "'ngram' cannot continue 'ngram'"),
        ("mtp+falcon", "got 'falcon' in 'mtp\\+falcon'"),
        ("naive+ngram", "'ngram' cannot continue 'naive'|got 'naive'"),
    ):
        with pytest.raises(ValueError, match=words):
            SpeculativeConfig(method=method)
    three = SpeculativeConfig(method="toy+ngram+suffix", num_speculative_tokens=6)
    assert three.draft_stages == (("toy", 1), ("ngram", 6), ("suffix", 6))
    same = {"method": "mtp+ngram", "num_speculative_tokens": 6}
    assert SpeculativeConfig.from_dict(same) == SpeculativeConfig(
        method="mtp+ngram", num_speculative_tokens=6
    )
    with pytest.raises(ValueError, match="mtp_strategy 'with_suffix' contradicts method"):
        SpeculativeConfig.from_dict({"method": "mtp+ngram", "mtp_strategy": "with_suffix"})


def test_registry_lists_all_methods() -> None:
    assert method_names() == ("naive", *METHODS)
    assert sorted(drafting_order()) == sorted(METHODS)
    engine = make(NAIVE)
    assert engine.runnable_methods == runnable()
    assert tuple(engine.drafters) == tuple(
        name for name in drafting_order() if name in engine.runnable_methods
    )
    for name, drafter in engine.drafters.items():
        assert drafter.name == name


def test_stages_follow_the_order_of_the_registry() -> None:
    """A drafter can only continue drafters that run earlier in a step."""
    order = drafting_order()
    for own in (
        {"method": "ngram"},
        {"method": "suffix"},
        {"method": "mtp"},
        {"method": "mtp+ngram"},
        {"method": "mtp+suffix"},
    ):
        config = SpeculativeConfig.from_dict({"num_speculative_tokens": 5, **own})  # type: ignore[arg-type]
        names = [name for name, _ in config.draft_stages]
        assert names == sorted(names, key=order.index)
        assert config.draft_stages[-1][1] == 5


class FixedTokenDrafter(Drafter):
    """Drafter that appends a fixed token up to its limit."""

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
    """Each drafter fills the shared table up to the limit of its stage."""
    monkeypatch.setattr(
        "specops.engine.drafters.mtp.load", lambda context: FixedTokenDrafter("mtp", 1, 2)
    )
    monkeypatch.setattr(
        "specops.engine.drafters.suffix.load", lambda context: FixedTokenDrafter("suffix", 2, 9)
    )
    config = SpeculativeConfig(method="mtp+suffix", num_model_steps=3, num_speculative_tokens=6)
    engine = make(config, max_num_seqs=3)
    greedy = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    engine.add_request([5, 6, 7], greedy)
    engine.add_request([5, 6, 8], greedy, speculative_config={"method": "suffix"})
    engine.add_request([5, 6, 9], greedy, speculative_config={"method": "mtp"})
    engine.step()
    proposals = engine._drafting.proposals
    assert proposals.token_ids.tolist() == [
        [1, 1, 2, 2, 2, 2],
        [2, 2, 2, 2, 2, 2],
        [1, 1, -1, -1, -1, -1],
    ]
    assert proposals.counts.tolist() == [6, 6, 2]


def test_drafts_are_attributed_to_their_stages(toy: dict[str, Any]) -> None:
    """Sources come in the order of the stages, for drafters on the device and the host."""
    engine = make(
        SpeculativeConfig.from_dict(
            {"num_speculative_tokens": 6, **{**toy, "method": "toy+ngram+suffix"}}
        )
    )
    greedy = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True, report_drafts=True)
    text = engine.tokenizer.encode(prompts()[0])[:100]
    found = Counter[str]()
    cases: list[tuple[Any, int]] = [(None, 1), ({"num_model_steps": 3}, 3)]
    for own, most in (*cases, ({"method": "ngram+suffix"}, 0)):
        engine.add_request(text, greedy, speculative_config=own)
        while engine.has_unfinished():
            for output in engine.step():
                sources = [] if output.drafts is None else output.drafts.sources
                order = [("toy", "ngram", "suffix").index(source) for source in sources]
                assert order == sorted(order) and sources.count("toy") <= most
                found.update(sources)
    assert min(found[source] for source in ("toy", "ngram", "suffix")) > 5


def test_unavailable_method_does_not_affect_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(context: DrafterContext) -> Drafter:
        raise MethodUnavailable("/models/some: it has no such head", "it has no such head")

    monkeypatch.setattr("specops.engine.drafters.mtp.load", load)
    engine = make(NAIVE)
    assert engine.runnable_methods == ("naive", "ngram", "suffix", "prediction")
    assert engine.missing_methods["mtp"] == "it has no such head"
    with pytest.raises(ModelError, match=r"^/models/some: it has no such head$"):
        make(SpeculativeConfig(method="mtp"))


def test_only_one_drafter_of_a_request_may_use_its_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "specops.engine.drafters.ngram.NgramDrafter.draft_kv",
        lambda self, request: DraftKv("ngram", 0, 1),
    )
    engine = make(SpeculativeConfig(method="mtp+ngram"))
    with pytest.raises(AssertionError, match="two drafters of one request"):
        engine.add_request([1, 2], SamplingParams(max_tokens=2))


@pytest.fixture(scope="module")
def small_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("target")
    small_heads.write_target(directory)
    return directory


@pytest.mark.parametrize("kind", [*small_heads.KINDS, "draft model", "mtp", "3 modules"])
def test_every_head_supports_every_number_of_drafts(
    small_target: Path, tmp_path: Path, kind: str
) -> None:
    """The number is set by the engine, or by a request of an engine with the maximum."""
    target, own, most = small_target, {"method": "mtp"}, small_heads.UNLIMITED
    if kind in small_heads.KINDS:
        head = small_heads.KINDS[kind]
        head.write(tmp_path)
        own, most = {"method": head.method, "model": str(tmp_path)}, head.most
    elif kind == "draft model":
        own = {"method": "draft_model", "model": str(target)}
    elif kind == "3 modules":
        target = make_mtp_checkpoint(tmp_path, "qwen3_next", 3).directory
        write_tokenizer(target)
    each = small_heads.params(2, 8)
    for count in range(1, most + 1):
        engine = small_heads.new_engine(target, {**own, "num_speculative_tokens": count})
        engine.generate(small_heads.TEXTS[:2], each)
        spec = engine.stats.speculative
        assert (engine._drafting.num_failures, spec.num_draft_tokens > 0) == (0, True), count
    engine = small_heads.new_engine(target, {**own, "num_speculative_tokens": most})
    for count in range(1, most + 1):
        overrides = {"num_speculative_tokens": count}
        done = engine.generate(small_heads.TEXTS[:2], each, speculative_config=overrides)
        assert all(one.stats.num_draft_tokens > 0 for one in done), count
    assert not engine._drafting.num_failures


@pytest.mark.parametrize("vocab,draft_vocab", [(6, 6), (6, 1), (1, 1)])
def test_drafts_of_every_head_support_a_small_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vocab: int, draft_vocab: int
) -> None:
    """The target or the head has fewer tokens than a pass reports."""
    for module in (eagle_oracle, test_dflash, test_residual_heads):
        monkeypatch.setattr(module, "VOCAB", vocab)
    monkeypatch.setattr(test_dflash, "MASK", 0)
    target = tmp_path / "target"
    target.mkdir()
    small_heads.write_target(target, vocab)
    reduced = {"draft_vocab": draft_vocab} if draft_vocab < vocab else {}
    heads: dict[str, Any] = {
        "eagle3": eagle_oracle.Head((1, 2, 3), draft_vocab=draft_vocab),
        "p-eagle": eagle_oracle.Head((1, 2, 3), draft_vocab=draft_vocab, mask=0),
        "dflash": test_dflash.Block(**reduced),
        "dspark": test_dflash.Block(rank=4, **reduced),
    }
    if not reduced:
        heads |= {name: replace(test_residual_heads.KINDS[name]) for name in RESIDUAL}
        second = {**test_dflash.SECOND, "selector_top_k": vocab}
        heads["dflash2"] = test_dflash.Block(second=second)
    for name, head in heads.items():
        folder = tmp_path / name
        folder.mkdir()
        if isinstance(head, eagle_oracle.Head):
            eagle_oracle.write(folder, head, "official")
        elif isinstance(head, test_dflash.Block):
            head.write(folder, num_target_layers=small_heads.LAYERS)
        else:
            head.write(folder)
        method = "dflash" if name.startswith("d") else "eagle3" if "eagle" in name else head.method
        for stages in (method, f"{method}+suffix"):
            own = {"method": stages, "model": str(folder), "num_model_steps": 3}
            own |= {"num_speculative_tokens": 3 if stages == method else 9}
            engine = small_heads.new_engine(target, own)
            texts = [[token % vocab for token in text] for text in small_heads.TEXTS[:2]]
            done = engine.generate(texts, small_heads.params(2, 12))
            assert all(one.stats.num_draft_tokens > 0 for one in done), (name, stages)
            assert not engine._drafting.num_failures, (name, stages)


def test_share_out_is_fair() -> None:
    """All requests get the largest equal cap, and the first ones one more while rows remain."""
    rng = random.Random(1)
    for _ in range(500):
        requested = [rng.randrange(9) for _ in range(rng.randrange(1, 12))]
        total = rng.randrange(60)
        cap = max(c for c in range(10) if sum(min(w, c) for w in requested) <= total)
        expected = [min(w, cap) for w in requested]
        for index, number in enumerate(requested):
            if number > cap and sum(expected) < total:
                expected[index] += 1
        assert share_out(requested, total) == expected


def test_toy_drafter_needs_only_its_registry_line(toy: dict[str, Any]) -> None:
    engine = make(
        SpeculativeConfig.from_dict({"num_speculative_tokens": 1, **{**toy, "method": "TOY"}})
    )
    drafter = engine.drafters["toy"]
    assert isinstance(drafter, RecurrentDrafter) and isinstance(drafter.head, ToyHead)
    assert engine.runnable_methods[-1] == "toy"
    with pytest.raises(ValueError, match=r"method must be one of naive, .*, toy"):
        SpeculativeConfig(method="tox")
