# SPDX-License-Identifier: Apache-2.0
"""With speculation on, every token and every logprob bit is that of plain decoding.

Fifty prompts run on the bundled bf16 model in several arrival orders, batch and chunk sizes, with
and without preemption. A hundred requests mix all sampling parameters at random. Each comparison
also asserts that drafts were accepted and rejected.
"""

import dataclasses
import json
import random
import struct
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from draft_lengths import RandomLengths
from specops.api.tokenizer import Tokenizer
from specops.engine import Completion, Engine, EngineConfig, SamplingParams, SpeculativeConfig
from specops.engine.drafters.base import Drafter, StepResults, stage_limit
from specops.ngram import NgramIndex

PROMPTS = Path(__file__).resolve().parent.parent / "bench" / "prompts"
NUM_PROMPTS, NUM_TOKENS = 30, 64


@lru_cache
def prompts() -> list[str]:
    edits = json.loads((PROMPTS / "edits.json").read_text())
    completions = json.loads((PROMPTS / "completions.json").read_text())
    texts = [entry["text"] for entry in [*edits, *completions]]
    return texts[:NUM_PROMPTS]


def params(index: int, temperature: float) -> SamplingParams:
    return SamplingParams(
        max_tokens=NUM_TOKENS,
        temperature=temperature,
        top_p=1.0 if index % 2 else 0.95,
        top_k=0 if index % 3 else 50,
        min_p=0.02 if index % 5 == 0 else 0.0,
        seed=index * 0x9E3779B97F4A7C15 % 2**64,
        ignore_eos=True,
        logprobs=2,
    )


def run(
    method: str, temperature: float, order: list[int], **config: Any
) -> tuple[dict[int, Completion], Engine]:
    # Greedy text repeats itself: more and bolder drafts make sure that many are wrong.
    drafting = (
        {"num_speculative_tokens": 4, "adaptive_verification": False} if method != "naive" else {}
    )
    if drafting and temperature == 0:
        drafting = {
            "num_speculative_tokens": 6,
            "min_ngram_size": 1,
            "adaptive_verification": False,
        }
    engine = Engine(
        EngineConfig(
            device="cpu",
            speculative_config=SpeculativeConfig.from_dict({"method": method, **drafting}),
            **config,
        )
    )
    texts = prompts()
    done = engine.generate([texts[i] for i in order], [params(i, temperature) for i in order])
    assert engine.num_running == engine.num_waiting == 0
    assert engine.num_free_pages == engine.num_pages
    return dict(zip(order, done, strict=True)), engine


def bits(completion: Completion) -> list[Any]:
    def pack(value: float) -> bytes:
        return struct.pack("<f", value)

    return [
        (one.token_id, pack(one.logprob), [(i, pack(p)) for i, p in one.alternatives])
        for one in completion.logprobs
    ]


@lru_cache
def plain(temperature: float) -> dict[int, Completion]:
    """Decode one prompt at a time without speculation, each prompt in one chunk."""
    done, _ = run(
        "naive",
        temperature,
        list(range(NUM_PROMPTS)),
        max_num_seqs=1,
        max_num_batched_tokens=1024,
        enable_prefix_caching=False,
    )
    return done


def test_speculation_changes_no_bit_on_any_instruction_set(isa: str) -> None:
    """`make -C tools test-arm` runs this test, too."""
    done = {}
    for method in ("naive", "ngram"):
        engine = Engine(
            EngineConfig(
                device="cpu",
                max_num_batched_tokens=64,
                speculative_config=SpeculativeConfig(method=method, adaptive_verification=False),
            )
        )
        texts = [text[:120] for text in prompts()[:3]]
        each = [dataclasses.replace(params(i, 0.8 * (i % 2)), max_tokens=24) for i in range(3)]
        done[method] = [(one.text, bits(one)) for one in engine.generate(texts, each)]
    assert done["ngram"] == done["naive"]
    spec = engine.stats.speculative
    assert 0 < spec.num_accepted_tokens < spec.num_draft_tokens


def shuffled(seed: int) -> list[int]:
    order = list(range(NUM_PROMPTS))
    random.Random(seed).shuffle(order)
    return order


CONFIGS: list[dict[str, Any]] = [
    {"max_num_seqs": 1, "max_num_batched_tokens": 512},
    {"max_num_seqs": 7, "max_num_batched_tokens": 16, "page_size": 32},
    {"max_num_seqs": 32, "max_num_batched_tokens": 512, "num_threads": 2},
    {"max_num_seqs": 16, "max_num_batched_tokens": 512, "num_pages": 96, "page_size": 16},
]


@pytest.mark.parametrize(
    "config", CONFIGS, ids=["alone", "chunks of 16", "32 at once", "preempted"]
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("method", ["ngram", "suffix"])
@pytest.mark.fast("ngram-0.8-preempted", "suffix-0.0-preempted")
def test_drafting_changes_no_bit(method: str, temperature: float, config: dict[str, Any]) -> None:
    expected = plain(temperature)
    got, engine = run(method, temperature, shuffled(len(CONFIGS)), **config)
    different = [i for i in expected if got[i].token_ids != expected[i].token_ids]
    assert different == []
    different = [i for i in expected if bits(got[i]) != bits(expected[i])]
    assert different == []
    assert all(got[i].text == expected[i].text for i in expected)
    # The comparison needs both accepted and rejected drafts.
    spec = engine.stats.speculative
    accepted = spec.num_accepted_tokens / spec.num_draft_tokens
    assert 0.2 <= accepted <= 0.8, f"acceptance {accepted:.2f}"
    if "num_pages" in config:
        assert engine.stats.num_preemptions >= 1


@pytest.mark.parametrize(
    "own,config",
    [
        ({"ngram_match": "leftmost"}, {"max_num_seqs": 16, "num_pages": 96}),
        ({"ngram_match": "leftmost", "max_total_draft_tokens": 7}, {"max_num_seqs": 9}),
        ({"max_total_draft_tokens": 0}, {"max_num_seqs": 3}),
    ],
    ids=["leftmost, preempted", "seven drafts a step", "none"],
)
@pytest.mark.fast("leftmost, preempted")
def test_ngram_options_change_nothing(own: dict[str, Any], config: dict[str, Any]) -> None:
    """Rows are indexed from their first token on, and again after a preemption."""
    order = shuffled(5)[:24]
    speculative = SpeculativeConfig.from_dict(
        {
            "method": "ngram",
            "num_speculative_tokens": 6,
            "min_ngram_size": 1,
            "adaptive_verification": False,
            **own,
        }
    )
    engine = Engine(EngineConfig(device="cpu", speculative_config=speculative, **config))
    steps: list[int] = []
    launch = engine._runner.launch

    def counting(plan: Any, **options: Any) -> None:
        steps.append(sum(part.num_drafts for part in plan.parts))
        launch(plan, **options)

    indexed = partial(NgramIndex.empty, scan_tokens=0, index_tokens=50)
    with (
        mock.patch.object(engine._runner, "launch", counting),
        mock.patch.object(NgramIndex, "empty", indexed),
    ):
        done = engine.generate([prompts()[i] for i in order], [params(i, 0.0) for i in order])
    assert [bits(c) for c in done] == [bits(plain(0.0)[i]) for i in order]
    total = own.get("max_total_draft_tokens")
    assert max(steps) == total if total is not None else max(steps) > 12
    assert (engine.stats.num_preemptions > 0) == ("num_pages" in config)


def test_rejecting_everything_changes_nothing() -> None:
    speculative = SpeculativeConfig.from_dict(
        {
            "method": "ngram",
            "num_speculative_tokens": 7,
            "accept_policy": "reject_all",
            "min_ngram_size": 1,
        }
    )
    engine = Engine(EngineConfig(device="cpu", speculative_config=speculative))
    order = shuffled(3)[:10]
    done = engine.generate([prompts()[i] for i in order], [params(i, 0.8) for i in order])
    assert engine.stats.speculative.num_draft_tokens > 100
    assert engine.stats.speculative.num_accepted_tokens == 0
    assert [bits(c) for c in done] == [bits(plain(0.8)[i]) for i in order]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.fast("0.8")
def test_earlier_texts_change_nothing(temperature: float, tmp_path: Path) -> None:
    """Cover a cold cache, a warm one, one from a file, and a corpus that contains the answers."""
    order = list(range(0, NUM_PROMPTS, 5))
    texts, each = [prompts()[i] for i in order], [params(i, temperature) for i in order]
    expected = [bits(plain(temperature)[i]) for i in order]
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(plain(temperature)[i].text for i in order[:4]))
    config = EngineConfig(
        device="cpu",
        speculative_config=SpeculativeConfig(
            method="suffix", num_speculative_tokens=12, adaptive_verification=False
        ),
        suffix_cache=str(tmp_path / "cache"),
        max_num_seqs=4,
        enable_prefix_caching=False,
    )
    engine = Engine(config)
    steps, known = [], []  # steps of all requests, and of those with answers in the corpus

    def decode() -> None:
        before = engine.stats.num_steps
        done = engine.generate(texts, each)
        assert [bits(one) for one in done] == expected
        steps.append(engine.stats.num_steps - before)
        known.append(sum(one.stats.num_steps for one in done[:4]))

    decode()
    engine.save_drafters()
    decode()
    engine = Engine(config)
    decode()
    engine = Engine(dataclasses.replace(config, suffix_cache=None, suffix_corpus=str(corpus)))
    decode()
    # The second and third runs know every answer, and the corpus knows some.
    assert steps[2] == steps[1] < 0.6 * steps[0]
    assert known[3] < 0.6 * known[0]


def test_aborts_and_arrivals_change_nothing() -> None:
    """Drafts come from aborted requests, too."""
    rng = random.Random(5)
    speculative = SpeculativeConfig(
        method="suffix", num_speculative_tokens=7, adaptive_verification=False
    )
    engine = Engine(
        EngineConfig(device="cpu", speculative_config=speculative, max_num_seqs=5, num_pages=96)
    )
    left, alive, remaining = shuffled(6)[:24], [], []
    while left or engine.has_unfinished():
        if left and rng.random() < 0.3:
            index = left.pop()
            alive.append((engine.add_request(prompts()[index], params(index, 0.8)), index))
            if rng.random() < 0.5:
                remaining.append(alive.pop())
        if alive and rng.random() < 0.1:
            engine.abort(alive.pop(rng.randrange(len(alive)))[0])
        engine.step()
    assert len(remaining) > 5
    for name, index in remaining:
        assert bits(engine.completion(name)) == bits(plain(0.8)[index])
    assert engine.stats.speculative.num_accepted_tokens > 100
    assert engine.drafters["suffix"].cache.running_requests == []


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_request_chooses_its_own_method_and_greedy_strategy(method: str) -> None:
    speculative = SpeculativeConfig(method="naive")
    engine = Engine(EngineConfig(device="cpu", speculative_config=speculative))
    order = list(range(8))
    own = {
        "method": method,
        "num_speculative_tokens": 9,
        "verify_strategy": "greedy",
        "adaptive_verification": False,
    }
    done = engine.generate(
        [prompts()[i] for i in order], [params(i, 0.8) for i in order], speculative_config=own
    )
    # `greedy` treats the request as temperature 0.
    assert [bits(c) for c in done] == [bits(plain(0.0)[i]) for i in order]
    assert engine.stats.speculative.num_accepted_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_instruction_set_and_thread_count_gives_the_same_bits(
    isa: str, temperature: float, dtype: str
) -> None:
    order = list(range(0, NUM_PROMPTS, 10))
    texts, each = [prompts()[i] for i in order], [params(i, temperature) for i in order]
    outputs = []
    for method, config in (
        ("naive", {"max_num_seqs": 1, "num_threads": 1, "max_num_batched_tokens": 1024}),
        ("ngram", {"max_num_seqs": 10, "num_threads": 2, "max_num_batched_tokens": 48}),
        ("suffix", {"max_num_seqs": 4, "num_threads": 3, "page_size": 64}),
    ):
        drafting = (
            {"num_speculative_tokens": 5, "adaptive_verification": False}
            if method != "naive"
            else {}
        )
        speculative = SpeculativeConfig.from_dict({"method": method, **drafting})
        engine = Engine(
            EngineConfig(device="cpu", speculative_config=speculative, dtype=dtype, **config)
        )
        outputs.append([bits(done) for done in engine.generate(texts, each)])
    assert outputs[1] == outputs[0]
    assert outputs[2] == outputs[0]


# ---- all parameters at once, and drafts of every kind ----

NUM_MIXED, NUM_MIXED_TOKENS = 60, 40


@lru_cache
def vocabulary() -> Tokenizer:
    return Tokenizer.from_dir(EngineConfig().model_dir)


def ids(text: str) -> tuple[int, ...]:
    return tuple(vocabulary().encode(text, add_special_tokens=False))


@lru_cache
def mixed(index: int) -> SamplingParams:
    """Return the parameters of a request, each of which is set at random."""
    rng = random.Random(index)

    def maybe(value: Any, probability: float = 0.25) -> dict[str, Any]:
        (name, setting), *_ = value.items()
        return {name: setting} if rng.random() < probability else {}

    size = vocabulary().vocab_size
    thinking = {
        "think_end_token_id": ids("\n")[0],
        "reasoning_max_tokens": rng.choice([0, 3, 12]),
        "response_max_tokens": rng.choice([8, 30]),
        "think_inject_token_ids": rng.choice([ids("\n"), ids(" # so\n")]),
    }
    return SamplingParams(
        max_tokens=NUM_MIXED_TOKENS,
        temperature=rng.choice([0.0, 0.3, 0.5, 0.8]),
        seed=index * 0x9E3779B97F4A7C15 % 2**64,
        logprobs=rng.choice([0, 3]),
        ignore_eos=rng.random() < 0.5,
        **maybe({"top_k": rng.choice([5, 40])}),
        **maybe({"top_p": rng.choice([0.6, 0.95])}),
        **maybe({"min_p": 0.05}),
        **maybe({"typical_p": rng.choice([0.5, 0.95])}),
        **maybe({"repetition_penalty": rng.choice([0.9, 1.05, 1.2])}),
        **maybe({"presence_penalty": rng.choice([-0.3, 0.4])}),
        **maybe({"frequency_penalty": rng.choice([-0.1, 0.2])}),
        **maybe({"logit_bias": {rng.randrange(size): rng.uniform(-9, 9) for _ in range(30)}}),
        **maybe({"bad_words": rng.sample(["self", "return", "import", "=", "("], 2)}),
        **maybe({"allowed_token_ids": rng.sample(range(size), size * 3 // 4)}, 0.2),
        **maybe({"min_tokens": rng.choice([5, 30])}),
        **maybe({"stop": ("\n\n\n", "def ", "if ", "self")}),
        **maybe({"stop_token_ids": ids(".") + ids(" the")}),
        **maybe({"stop_token_sequences": (ids("\n\n"), ids(" = "), ids("\n#"))}),
        **(thinking if rng.random() < 0.2 else {}),
        report_drafts=index % 3 == 0,
        prompt_logprobs=1 if index % 5 == 2 else None,
        prompt_logprobs_start=1 if index % 15 in (2, 7) else 0,
        cache_salt=f"salt {index % 3}" if index % 4 == 1 else None,
    )


class ScriptedDrafter(Drafter):
    """A drafter that knows the outputs; half of its proposals are right only up to some token.

    Args:
        truth: Completion of each request, by its seed.
    """

    name = "ngram"  # the method that it replaces

    def __init__(self, truth: dict[int, Completion]) -> None:
        self._truth = truth

    def finish(self, results: StepResults) -> None:
        for part in results.parts:
            request, width = part.request, stage_limit(part, self.name)
            known = len(request.token_ids)
            truth = self._truth[request.seed % 2**64].token_ids[known - request.prompt_len :]
            rng = random.Random(request.seed + known)
            right = width if rng.random() < 0.5 else rng.randrange(max(width, 1))
            drafts = [
                truth[i] if i < min(right, len(truth)) else rng.randrange(vocabulary().vocab_size)
                for i in range(width)
            ]
            results.proposals.token_ids[request.slot, :width] = drafts
            results.proposals.counts[request.slot] = width


def scripted_for(expected: Sequence[Completion], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make later engines draft from the expected completions instead of n-grams."""
    truth = {one.seed % 2**64: one for one in expected}
    monkeypatch.setattr(
        "specops.engine.drafters.ngram.load", lambda context: ScriptedDrafter(truth)
    )


def run_mixed(engine: Engine, count: int = NUM_MIXED) -> list[Completion]:
    texts = [prompts()[i % NUM_PROMPTS] for i in range(count)]
    done = engine.generate(texts, [mixed(i) for i in range(count)])
    assert engine.num_free_pages == engine.num_pages
    return done


@lru_cache
def mixed_plain(logprobs_mode: str = "raw_logprobs") -> list[Completion]:
    """Run the mixed requests one at a time, without speculation."""
    return run_mixed(
        Engine(
            EngineConfig(
                device="cpu",
                speculative_config=SpeculativeConfig(method="naive"),
                logprobs_mode=logprobs_mode,
                max_num_seqs=1,
                max_num_batched_tokens=1024,
                enable_prefix_caching=False,
            )
        )
    )


def check_equal(got: list[Completion], expected: list[Completion]) -> None:
    for index, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert one.token_ids == other.token_ids, (index, mixed(index))
        assert bits(one) == bits(other), (index, mixed(index))
        assert [p.rank for p in one.logprobs] == [p.rank for p in other.logprobs], index
        of_prompts = [list(c.prompt_logprobs or ()) for c in (one, other)]
        assert of_prompts[0] == of_prompts[1], index
        ends = [(c.text, c.finish_reason, c.stop_reason) for c in (one, other)]
        assert ends[0] == ends[1], index


@pytest.mark.slow
def test_mixed_parameters_cover_every_field() -> None:
    """The tests below need requests on which every parameter has an effect."""
    each = [mixed(i) for i in range(NUM_MIXED)]
    default = SamplingParams()
    for field in dataclasses.fields(SamplingParams):
        if field.name not in ("n", "bad_words_token_ids", "structured_output", "prediction"):
            used = sum(getattr(one, field.name) != getattr(default, field.name) for one in each)
            assert used >= 8, field.name
    done = mixed_plain()
    reasons = [one.stop_reason for one in done if one.finish_reason == "stop"]
    for kind in (str, int, tuple):
        assert sum(isinstance(reason, kind) for reason in reasons) >= 2, kind
    lengths = [len(one.token_ids) for one in done if one.finish_reason == "length"]
    assert lengths.count(NUM_MIXED_TOKENS) >= 20
    assert len(lengths) > lengths.count(NUM_MIXED_TOKENS), "no response was ended by its limit"


@pytest.mark.parametrize("k", [1, 3, 7])
@pytest.mark.parametrize("drafter", ["ngram", "suffix", "scripted"])
@pytest.mark.fast("suffix-7")
def test_all_parameters_mixed_change_nothing(
    drafter: str, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mode = "processed_logprobs" if k == 3 else "raw_logprobs"
    expected = mixed_plain(mode)
    if drafter == "scripted":
        scripted_for(expected, monkeypatch)
    method = "suffix" if drafter == "suffix" else "ngram"
    speculative = SpeculativeConfig(
        method=method, num_speculative_tokens=k, adaptive_verification=False
    )
    limits: dict[str, Any] = {
        1: {"max_num_seqs": 32},
        3: {"max_num_seqs": 8, "max_num_batched_tokens": 40, "page_size": 32},
        7: {"max_num_seqs": 12, "num_pages": 72, "max_model_len": 1024},
    }[k]
    engine = Engine(
        EngineConfig(device="cpu", speculative_config=speculative, logprobs_mode=mode, **limits)
    )
    check_equal(run_mixed(engine), expected)
    spec = engine.stats.speculative
    accepted = spec.num_accepted_tokens / spec.num_draft_tokens
    print(f"{drafter}, k = {k}: {accepted:.3f} of {spec.num_draft_tokens} drafts accepted")
    assert 0.2 <= accepted <= 0.8, f"acceptance {accepted:.2f}"
    assert (engine.stats.num_preemptions > 0) == ("num_pages" in limits)


@pytest.mark.parametrize("drafter", ["ngram", "scripted"])
@pytest.mark.fast(ci=("ngram",))
def test_random_draft_lengths_change_nothing(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = mixed_plain()
    if drafter == "scripted":
        scripted_for(expected, monkeypatch)
    speculative = SpeculativeConfig.from_dict(
        {"method": "ngram", "num_speculative_tokens": 6, "min_ngram_size": 1}
    )
    limits = {"max_num_seqs": 12, "num_pages": 72, "max_model_len": 1024}
    lengths = RandomLengths()
    engine = lengths.decide_for(
        Engine(EngineConfig(device="cpu", speculative_config=speculative, **limits))
    )
    check_equal(run_mixed(engine), expected)
    spec = engine.stats.speculative
    assert 0.1 <= spec.num_accepted_tokens / spec.num_draft_tokens <= 0.9
    assert min(lengths.verified[count] for count in range(7)) > 0
    assert lengths.num_suspended > 0
    assert engine.stats.num_preemptions > 0


@pytest.mark.slow
def test_all_parameters_on_every_instruction_set(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def engine(speculative: SpeculativeConfig, **config: Any) -> Engine:
        return Engine(EngineConfig(device="cpu", speculative_config=speculative, **config))

    expected = run_mixed(engine(SpeculativeConfig(method="naive"), max_num_seqs=1), 40)
    speculative = SpeculativeConfig(
        method="ngram", num_speculative_tokens=5, adaptive_verification=False
    )
    check_equal(run_mixed(engine(speculative, max_num_seqs=10, num_threads=3), 40), expected)
    by_suffix = SpeculativeConfig(method="suffix", num_speculative_tokens=6)
    check_equal(run_mixed(engine(by_suffix, max_num_seqs=12, num_threads=2), 40), expected)
    scripted_for(expected, monkeypatch)
    scripted = engine(speculative, max_num_seqs=16, num_threads=2, max_num_batched_tokens=64)
    check_equal(run_mixed(scripted, 40), expected)
    spec = scripted.stats.speculative
    assert 0.2 <= spec.num_accepted_tokens / spec.num_draft_tokens <= 0.8
