# SPDX-License-Identifier: Apache-2.0
"""With drafts of MTP modules, every token and every logprob bit is that of plain decoding.

Tiny models with one to three modules and the bundled model use every strategy. The drafts
themselves depend on the text alone.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_tokenizer
from draft_lengths import Lengths, NothingVerified, RandomRests
from mtp_checkpoints import Tiny, make_mtp_checkpoint, save_checkpoint
from pages import check_pages
from specops.api.outputs import RequestOutput
from specops.cli.exactness import PROMPTS as SHORT_PROMPTS
from specops.engine import Completion, Engine, EngineConfig, SamplingParams, SpeculativeConfig
from specops.engine.drafters.recurrent import RecurrentDrafter
from specops.engine.plan import Plan
from specops.engine.request import Request
from test_lossless import (
    PROMPTS,
    bits,
    check_equal,
    mixed_plain,
    run_mixed,
)

VOCAB = 160
slow_param = partial(pytest.param, marks=pytest.mark.slow)
HYBRIDS = ("mtp", "mtp+ngram", "mtp+suffix")


def make_tiny(directory: Path, modules: int, **changes: Any) -> Tiny:
    """Write a target and modules whose next token depends mostly on the last token.

    Layers and states have enough influence that some drafts are wrong.
    """
    changes = {"tie_word_embeddings": False, "num_hidden_layers": 2, **changes}
    tiny = make_mtp_checkpoint(directory, "deepseek_v3", modules, base=("Qwen3", changes))
    hidden, tensors = tiny.config["hidden_size"], tiny.tensors
    tensors["model.embed_tokens.weight"].mul_(5)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.mul_(0.05)
        if name.endswith("eh_proj.weight"):
            tensor.mul_(0.1)
            tensor[:, :hidden] += torch.eye(hidden)
        if name.endswith("shared_head.norm.weight"):
            tensor.copy_(tensors["model.norm.weight"])
    with torch.no_grad():
        for name, parameter in tiny.base.named_parameters():
            parameter.copy_(tensors[name])
    save_checkpoint(directory, tiny.config, tensors)
    write_tokenizer(directory, tiny.config["vocab_size"])
    return tiny


@pytest.fixture(scope="module")
def tinies(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Tiny]:
    """Return models with the same target by their number of modules."""
    return {n: make_tiny(tmp_path_factory.mktemp(f"modules{n}"), n) for n in (1, 2, 3)}


def make_engine(tiny: Tiny, speculative: SpeculativeConfig | None = None, **config: Any) -> Engine:
    return Engine(
        EngineConfig(
            model=str(tiny.directory),
            dtype="float32",
            device="cpu",
            speculative_config=speculative or SpeculativeConfig(method="naive"),
            num_threads=2,
            methods=("all",),
            **config,
        )
    )


# ---- requests ----


@lru_cache
def prompt(index: int) -> list[int]:
    """Return a prompt: every third is unique, the others begin like one of two texts."""
    rng = random.Random(index)
    own = [rng.randrange(1, VOCAB) for _ in range(rng.randrange(1, 40))]
    if index % 3 == 0:
        return own
    shared = random.Random(f"text {index % 2}")
    text = [shared.randrange(1, VOCAB) for _ in range(120)]
    return text[: rng.randrange(10, 120)] + own[: rng.randrange(0, 20)]


@lru_cache
def params(index: int, temperature: float | None = None) -> SamplingParams:
    rng = random.Random(1000 + index)
    if temperature is None:
        temperature = 0.0 if index % 2 else 0.4
    return SamplingParams(
        max_tokens=rng.randrange(20, 70),
        temperature=temperature,
        top_p=rng.choice([1.0, 0.95]),
        seed=index * 0x9E3779B97F4A7C15 % 2**64,
        ignore_eos=True,
        logprobs=1,
    )


_plain: dict[int, list[Any]] = {}


def plain(tiny: Tiny, index: int) -> list[Any]:
    """Decode alone, without drafts, in one chunk. The result is the same for any modules."""
    if not _plain:
        engine = make_engine(
            tiny, max_num_seqs=1, max_num_batched_tokens=512, enable_prefix_caching=False
        )
        indices = range(60)
        done = engine.generate([prompt(i) for i in indices], [params(i) for i in indices])
        _plain.update({i: bits(one) for i, one in zip(indices, done, strict=True)})
    return _plain[index]


# ---- what was drafted ----


@dataclass
class Record:
    """All drafts of modules, by what they may depend on: the text and the key of their draws."""

    drafts: dict[tuple[Any, ...], tuple[int, ...]] = field(default_factory=dict)
    # Bits of the logits from which the last draft was chosen, by number of drafts.
    logits: dict[tuple[Any, ...], bytes] = field(default_factory=dict)
    num_seen_again: int = 0
    num_logits_seen_again: int = 0

    def watch(self, engine: Engine) -> Engine:
        """Record the drafts of all further steps of an engine."""
        launch, step = engine._runner.launch, engine.step
        executed: list[tuple[int, Request]] = []

        def launching(plan: Plan, **options: Any) -> None:
            emitting = [(row, part.request) for row, part in enumerate(plan.parts) if part.emits]
            executed[:] = [(row, request) for row, request in emitting if request.drafts.kv]
            launch(plan, **options)

        def stepping() -> list[RequestOutput]:
            executed.clear()
            outputs = step()
            for row, request in executed:
                self._note(engine, row, request)
            return outputs

        engine._runner.launch = launching  # type: ignore[method-assign]
        engine.step = stepping  # type: ignore[method-assign]
        return engine

    def _note(self, engine: Engine, row: int, request: Request) -> None:
        drafter, config = engine.drafters["mtp"], request.speculative
        proposals = engine._drafting.proposals
        if request.slot < 0:
            return
        assert isinstance(drafter, RecurrentDrafter)
        count, text = int(proposals.counts[request.slot]), tuple(request.token_ids)
        if config.method == "mtp+suffix":  # suffix drafts depend on other texts
            count = min(count, config.num_model_steps)
        drafts = tuple(proposals.token_ids[request.slot, :count].tolist())
        # After a long pause, modules start anew and do not see the whole text.
        key: tuple[Any, ...] = (text, drafter._progress[request.slot].begin)
        params = request.params
        if (config.draws_drafts or config.drafts_with_target_numbers) and params.temperature > 0:
            key = (*key, request.seed, params.temperature, params.top_p)
        if config.method == "mtp+ngram":  # n-grams continue the modules' drafts
            key = (*key, config.num_model_steps)
            if config.num_model_steps > drafter.num_passes:
                return  # fewer passes than configured, for lack of a page
        known = self.drafts.get(key, ())
        # The end of the text or of the pages may have shortened one of the drafts.
        short = min(len(known), count)
        assert known[:short] == drafts[:short], f"{request.request_id}: {len(text)} tokens"
        self.num_seen_again += short > 0
        if count > len(known):
            self.drafts[key] = drafts
        if config.method != "mtp" or count < drafter.num_steps:
            return
        logits = drafter.arrays.choices.logits[row].numpy().tobytes()
        known_logits = self.logits.setdefault((*key, count), logits)
        assert known_logits == logits, f"{request.request_id}: {len(text)} tokens"
        self.num_logits_seen_again += known_logits is not logits


def run(engine: Engine, indices: Sequence[int], own: Any = None) -> dict[int, Completion]:
    """Run requests that arrive while others run."""
    rng = random.Random(len(indices))
    left, names = list(indices), {}
    while left or engine.has_unfinished():
        for _ in range(rng.randrange(4)):
            if left:
                index = left.pop(0)
                names[index] = engine.add_request(
                    prompt(index), params(index), speculative_config=own(index) if own else None
                )
        engine.step()
        check_pages(engine._pool)
    assert engine.num_free_pages == engine.num_pages
    return {index: engine.completion(name) for index, name in names.items()}


def text_of(completion: Completion) -> list[int]:
    return [*completion.prompt_token_ids, *completion.token_ids]


def shuffled(seed: int, count: int = 60) -> list[int]:
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order


LIMITS: list[dict[str, Any]] = [
    {"max_num_seqs": 1},
    {"max_num_seqs": 6, "max_num_batched_tokens": 7},
    {"max_num_seqs": 16, "num_pages": 30, "max_num_batched_tokens": 64},
    {"max_num_seqs": 9, "page_size": 64},
    {"max_num_seqs": 12, "page_size": 32, "max_num_batched_tokens": 33},
    {"max_num_seqs": 5, "enable_prefix_caching": False, "max_num_batched_tokens": 20},
]


@pytest.mark.parametrize("k", [1, slow_param(2), 3, slow_param(4), 5])
@pytest.mark.parametrize("method", HYBRIDS)
@pytest.mark.parametrize("modules", [1, 2, 3])
@pytest.mark.fast("1-*-5", "2-*-3", "3-*-1")
def test_mtp_drafts_change_nothing(
    tinies: dict[int, Tiny], modules: int, method: str, k: int
) -> None:
    tiny = tinies[modules]
    case = (modules + HYBRIDS.index(method) + k) % len(LIMITS)
    steps = k if method == "mtp" else 1 + (k + modules) % k
    speculative = SpeculativeConfig.from_dict(
        {
            "method": method,
            "num_speculative_tokens": k,
            "num_model_steps": steps,
            "min_ngram_size": 1,
        }
    )
    engine = Record().watch(make_engine(tiny, speculative, **LIMITS[case]))
    order = shuffled(k)[:40]
    got = run(engine, order)
    assert [i for i in order if bits(got[i]) != plain(tiny, i)] == []
    spec = engine.stats.speculative
    accepted = spec.num_accepted_tokens / spec.num_draft_tokens
    assert 0.08 <= accepted <= 0.9, f"acceptance {accepted:.2f}"
    assert (engine.stats.num_preemptions > 0) == ("num_pages" in LIMITS[case])
    assert (engine.stats.prefix_cache_hits > 0) == ("enable_prefix_caching" not in LIMITS[case])


@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("modules", [1, 2, 3])
@pytest.mark.fast("2-3")
def test_drafts_depend_on_the_text_alone(tinies: dict[int, Tiny], modules: int, k: int) -> None:
    """Chunks, pages, cached prefixes, preemptions, pauses and other requests change no draft.

    They change no bit of the logits from which drafts are chosen, either.
    """
    case = (modules + k) % len(LIMITS)
    check_drafts(tinies[modules], k, LIMITS[case : case + 1])


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("modules", [1, 2, 3])
def test_drafts_depend_on_the_text_alone_under_all_limits(
    tinies: dict[int, Tiny], modules: int, k: int
) -> None:
    check_drafts(tinies[modules], k, LIMITS)


class PausesOfSome(RandomRests):
    """Random pauses of every other request."""

    def limit(self, request: Request) -> int:
        return super().limit(request) if request.arrival % 2 else Lengths.limit(self, request)

    def verify(self, request: Request) -> int:
        return super().verify(request) if request.arrival % 2 else Lengths.verify(self, request)


class LongPauses(Lengths):
    """Pauses of so many tokens that modules start anew."""

    def limit(self, request: Request) -> int:
        rests = (len(request.token_ids) - request.prompt_len) // 24 % 2 == 0
        return 0 if rests else super().limit(request)


def check_drafts(tiny: Tiny, k: int, each: list[dict[str, Any]]) -> None:
    record, order = Record(), shuffled(k)[:24]

    def decode(lengths: Lengths, limits: dict[str, Any]) -> None:
        speculative = SpeculativeConfig(method="mtp", num_speculative_tokens=k)
        engine = lengths.decide_for(record.watch(make_engine(tiny, speculative, **limits)))
        got = run(engine, order)
        assert [i for i in order if bits(got[i]) != plain(tiny, i)] == []
        # Later requests continue these texts, with the pages that they left.
        more = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
        engine.generate([[*text_of(got[i]), 7] for i in order[:12]], more)

    decode(NothingVerified(), {"max_num_seqs": 1, "enable_prefix_caching": False})
    num_texts = len(record.drafts)
    assert num_texts > 500 and len(record.logits) > 0.8 * num_texts
    for limits in each:
        record.num_seen_again = record.num_logits_seen_again = 0
        decode(Lengths(), limits)
        assert record.num_seen_again > 200 and record.num_logits_seen_again > 150
        lengths = RandomRests()
        decode(lengths, limits)
        # A step has rows for this many drafts while all slots are used.
        spare = limits.get("max_num_batched_tokens", 512) - limits["max_num_seqs"]
        assert min(lengths.verified[count] for count in range(min(k, spare) + 1)) > 0
        assert lengths.num_suspended > 100
        assert record.num_seen_again > 500 and record.num_logits_seen_again > 200
    with pytest.MonkeyPatch.context() as patch:  # texts are too short for long pauses
        patch.setattr("specops.engine.drafters.recurrent.CATCH_UP", 16)
        patch.setattr("specops.engine.drafters.recurrent.BEGIN_ANEW", 8)
        decode(LongPauses(), {"max_num_seqs": 5})
    # All texts are those of plain decoding, with fewer drafts at their ends.
    num_begun_anew = sum(begin > 0 for _, begin, *_ in record.drafts)
    assert len(record.drafts) - num_begun_anew <= num_texts + 36
    assert num_begun_anew > 10


@pytest.mark.parametrize("verify", ["rejection", "block"])
@pytest.mark.parametrize("modules", [1, 2, 3])
@pytest.mark.fast("2-block", "1-rejection")
def test_drawn_drafts_depend_on_the_text_and_the_seed_alone(
    tinies: dict[int, Tiny], modules: int, verify: str
) -> None:
    record, order = Record(), shuffled(1)[:24]
    speculative = SpeculativeConfig(method="mtp", num_speculative_tokens=3, verify_strategy=verify)
    for limits in LIMITS[::2]:
        engine = record.watch(make_engine(tinies[modules], speculative, **limits))
        got = run(engine, order)
        greedy = [i for i in order if params(i).temperature == 0]
        assert [i for i in greedy if bits(got[i]) != plain(tinies[modules], i)] == []
    assert record.num_seen_again > len(record.drafts)
    assert record.num_logits_seen_again > len(record.drafts)


METHODS: list[dict[str, Any]] = [
    {"method": "naive"},
    {"method": "ngram", "num_speculative_tokens": 4},
    {"method": "suffix", "num_speculative_tokens": 5},
    {"method": "mtp", "num_speculative_tokens": 1},
    {"method": "mtp", "num_speculative_tokens": 3},
    {"method": "mtp", "num_speculative_tokens": 6, "num_model_steps": 2},
    {
        "method": "mtp+ngram",
        "num_speculative_tokens": 5,
        "num_model_steps": 3,
    },
    {"method": "mtp+suffix", "num_speculative_tokens": 6},
    {
        "method": "mtp+ngram",
        "num_speculative_tokens": 4,
    },
    {
        "method": "mtp+suffix",
        "num_speculative_tokens": 5,
        "num_model_steps": 2,
    },
]


def test_rows_that_modules_recompute_prevent_no_drafts(
    tinies: dict[int, Tiny],
) -> None:
    engine = make_engine(
        tinies[3],
        SpeculativeConfig(method="mtp", num_speculative_tokens=3),
        max_num_seqs=100,
        max_num_batched_tokens=130,
    )
    for index in range(100):
        engine.add_request([1 + index], SamplingParams(max_tokens=40, ignore_eos=True, seed=1))
    engine.step()  # no text is long enough for these rows yet
    for _ in range(6):
        engine.step()
        running = engine._scheduler.running
        behind = [len(one.token_ids) - one.drafts.num_final_kv for one in running]
        assert behind == [3] * 100


@pytest.mark.parametrize("max_model_len", [9, 50])
@pytest.mark.parametrize("modules", [1, 2, 3])
@pytest.mark.fast("1-9", "3-9")
def test_drafts_past_the_end_of_the_context_change_nothing(
    tinies: dict[int, Tiny], modules: int, max_model_len: int
) -> None:
    """The last page reaches past the end of the context; so do later drafts of the modules."""
    limits: dict[str, Any] = {"max_model_len": max_model_len, "max_num_seqs": 4}
    prompts = [prompt(i)[: (max_model_len - 1) * i // 12 + 1] for i in range(12)]
    to_the_end = SamplingParams(max_tokens=None, temperature=0, ignore_eos=True, logprobs=1)
    naive = make_engine(tinies[modules], **limits).generate(prompts, to_the_end)
    for config in METHODS[3:]:
        for k in (3, 16):
            own = {**config, "num_speculative_tokens": k, "num_model_steps": k}
            engine = make_engine(tinies[modules], SpeculativeConfig.from_dict(own), **limits)
            got = engine.generate(prompts, to_the_end)
            assert list(map(bits, got)) == list(map(bits, naive)), own
            assert engine.stats.speculative.num_accepted_tokens > 0


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("modules", [1, 2, 3])
@pytest.mark.fast("2-*")
def test_mixed_methods_change_nothing(
    tinies: dict[int, Tiny],
    modules: int,
    limits: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Methods run side by side and one after another in the same slots; requests are aborted."""
    rng = random.Random(modules)
    engine = Record().watch(
        make_engine(tinies[modules], SpeculativeConfig.from_dict({"min_ngram_size": 1}), **limits)
    )
    PausesOfSome().decide_for(engine)
    left = shuffled(modules)
    alive: list[tuple[str, int]] = []
    remaining: list[tuple[str, int]] = []
    while left or engine.has_unfinished():
        if left and rng.random() < 0.4:
            index, own = left.pop(), rng.choice(METHODS)
            name = engine.add_request(prompt(index), params(index), speculative_config=own)
            (remaining if rng.random() < 0.7 else alive).append((name, index))
        if alive and rng.random() < 0.1:
            engine.abort(alive.pop(rng.randrange(len(alive)))[0])
        engine.step()
        check_pages(engine._pool)
    assert engine.num_free_pages == engine.num_pages
    assert len(remaining) > 30
    different = [
        i for name, i in remaining if bits(engine.completion(name)) != plain(tinies[modules], i)
    ]
    assert different == []
    assert engine.stats.speculative.num_accepted_tokens > 150
    assert (engine.stats.num_preemptions > 0) == ("num_pages" in limits)


# ---- the bundled model ----

WITH_MODULES: dict[str, dict[str, Any]] = {
    "mtp": {"num_speculative_tokens": 3},
    "mtp+ngram": {
        "num_speculative_tokens": 6,
        "num_model_steps": 2,
        "min_ngram_size": 1,
    },
    "mtp+suffix": {
        "num_speculative_tokens": 6,
        "num_model_steps": 2,
    },
}


@pytest.mark.parametrize("method,k", [("mtp", 7), ("mtp+ngram", 3), ("mtp+suffix", 7)])
@pytest.mark.fast("mtp-7")
def test_all_parameters_mixed_change_nothing(method: str, k: int) -> None:
    """The requests are those of test_lossless.py."""
    mode = "processed_logprobs" if k == 3 else "raw_logprobs"
    limits: dict[str, Any] = {
        1: {"max_num_seqs": 32},
        3: {"max_num_seqs": 8, "max_num_batched_tokens": 40, "page_size": 32},
        7: {"max_num_seqs": 12, "num_pages": 72, "max_model_len": 1024},
    }[k]
    speculative = SpeculativeConfig(method=method, num_speculative_tokens=k)
    engine = Engine(
        EngineConfig(device="cpu", speculative_config=speculative, logprobs_mode=mode, **limits)
    )
    check_equal(run_mixed(engine), mixed_plain(mode))
    spec = engine.stats.speculative
    assert 0.15 <= spec.num_accepted_tokens / spec.num_draft_tokens <= 0.8
    assert (engine.stats.num_preemptions > 0) == ("num_pages" in limits)


@lru_cache
def hundred_prompts() -> list[str]:
    texts = []
    for name in ("edits", "completions"):
        texts += [entry["text"] for entry in json.loads((PROMPTS / f"{name}.json").read_text())]
    texts += SHORT_PROMPTS
    return [*texts, *(text[: len(text) // 2] for text in texts)][:100]


def hundred_params(index: int, temperature: float) -> SamplingParams:
    return SamplingParams(
        max_tokens=96,
        temperature=temperature,
        top_p=1.0 if index % 2 else 0.95,
        seed=index * 0x9E3779B97F4A7C15 % 2**64,
        ignore_eos=True,
        logprobs=2,
    )


def decode_hundred(temperature: float, **config: Any) -> tuple[list[Any], Engine]:
    engine = Engine(EngineConfig(device="cpu", num_threads=2, **config))
    each = [hundred_params(index, temperature) for index in range(100)]
    return [bits(done) for done in engine.generate(hundred_prompts(), each)], engine


@pytest.mark.slow
@pytest.mark.parametrize("temperature,dtype", [(0.0, "float32"), (0.8, "bfloat16")])
def test_a_hundred_prompts_keep_their_bits(temperature: float, dtype: str) -> None:
    expected, _ = decode_hundred(
        temperature,
        dtype=dtype,
        max_num_seqs=1,
        max_num_batched_tokens=1024,
        enable_prefix_caching=False,
    )
    assert len(set(hundred_prompts())) == 100
    each_limits: list[dict[str, Any]] = [
        {"max_num_seqs": 1},
        {"max_num_seqs": 32, "page_size": 64},
        {"max_num_seqs": 16, "max_num_batched_tokens": 48, "num_pages": 100},
    ]
    for method, own in WITH_MODULES.items():
        for limits in each_limits:
            speculative = SpeculativeConfig.from_dict({"method": "mtp", **own})
            got, engine = decode_hundred(
                temperature, dtype=dtype, speculative_config=speculative, **limits
            )
            different = [i for i in range(100) if got[i] != expected[i]]
            assert different == [], (method, limits)
            spec = engine.stats.speculative
            assert 0.2 <= spec.num_accepted_tokens / spec.num_draft_tokens <= 0.9
            assert (engine.stats.num_preemptions > 0) == ("num_pages" in limits)
