# SPDX-License-Identifier: Apache-2.0
"""Every sampling parameter has its effect in the engine, on a tiny random model.

test_lossless.py checks that speculation changes none of these effects.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint, write_tokenizer
from specops import reference, sampling
from specops.engine import Completion, Engine, EngineConfig, SamplingParams, SpeculativeConfig
from specops.sampling import LogitsProcessors
from torch import Tensor

VOCAB_SIZE = 160
PROMPT = [5, 6, 7, 5, 6, 7, 5, 6]
NAIVE = SpeculativeConfig(method="naive")
NGRAM = SpeculativeConfig.from_dict(
    {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "min_ngram_size": 1,
        "adaptive_verification": False,
    }
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_checkpoint(directory, "Qwen3", num_hidden_layers=2)
    write_tokenizer(directory)
    return directory


def make(model_dir: Path, speculative: SpeculativeConfig = NAIVE, **config: Any) -> Engine:
    return Engine(
        EngineConfig(
            model=str(model_dir),
            dtype="float32",
            device="cpu",
            speculative_config=speculative,
            **config,
        )
    )


def generate(model_dir: Path, **params: Any) -> Completion:
    """Return a greedy completion, after checking that drafts give the same."""
    params = {"max_tokens": 40, "temperature": 0, "ignore_eos": True, **params}
    done = [
        make(model_dir, speculative).generate([PROMPT], SamplingParams(**params))[0]
        for speculative in (NAIVE, NGRAM)
    ]
    for name in ("token_ids", "text", "finish_reason", "stop_reason"):
        assert getattr(done[0], name) == getattr(done[1], name)
    return done[0]


def test_parameters_rounded_to_float32_give_the_same_bits(model_dir: Path) -> None:
    """The ops round to float32, as do Dynamo's frontend and vLLM's router."""
    numbers = {"temperature": 0.7, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1}
    numbers |= {"presence_penalty": 0.3, "frequency_penalty": 0.3}
    rounded = {name: float(np.float32(one)) for name, one in numbers.items()}
    assert rounded != numbers
    done = [generate(model_dir, seed=3, logprobs=1, **one) for one in (numbers, rounded)]
    assert done[0].logprobs == done[1].logprobs and len(set(done[0].token_ids)) > 8


# ---- logits ----

NAMES = (
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "min_tokens",
    "everything",
)


@pytest.fixture(scope="module")
def changes(model_dir: Path) -> dict[str, dict[str, Any]]:
    """Return parameters by name, each of which changes the model's output."""
    plain = generate(model_dir).token_ids
    words = ((plain[2],), tuple(plain[8:10]), tuple(plain[14:17]))
    each: dict[str, dict[str, Any]] = {
        "repetition_penalty": {"repetition_penalty": 1.4},
        "presence_penalty": {"presence_penalty": 1.5},
        "frequency_penalty": {"frequency_penalty": -0.4},
        "logit_bias": {"logit_bias": {9: 3.0, 30: -2.5, 31: 1.5}},
        "bad_words": {"bad_words_token_ids": words},
        "allowed_token_ids": {"allowed_token_ids": tuple(range(3, 90))},
        "min_tokens": {"min_tokens": 12, "stop_token_ids": tuple(set(plain[4:9]))},
    }
    return {**each, "everything": {n: v for change in each.values() for n, v in change.items()}}


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """Record the logits of every step."""
    seen: list[Tensor] = []
    verify = sampling.verify

    def record(logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(logits.clone())
        return verify(logits, *args, **kwargs)

    monkeypatch.setattr(sampling, "verify", record)
    yield seen


@pytest.mark.parametrize("name", NAMES)
def test_tokens_match_reference_logits_processing(
    model_dir: Path, changes: dict[str, dict[str, Any]], name: str, rows: list[Tensor]
) -> None:
    """The token is the argmax of the logits that the reference computes from row and history."""
    params = SamplingParams(
        max_tokens=30, temperature=0, ignore_eos=True, logprobs=0, **changes[name]
    )
    rows.clear()
    engine = make(model_dir, logprobs_mode="processed_logprobs")
    (done,) = engine.generate([PROMPT], params)
    assert len(rows) == len(done.token_ids)
    changed = 0
    for index, row in enumerate(rows):
        history = PROMPT + done.token_ids[:index]
        want = reference.process_logits(
            row, processors(params, history), torch.tensor([len(history)], dtype=torch.int32)
        )
        assert done.token_ids[index] == int(want[0].argmax()), index
        logprob = torch.log_softmax(want[0].double(), 0)[done.token_ids[index]]
        assert done.logprobs[index].logprob == pytest.approx(float(logprob), abs=1e-4)
        changed += int(want[0].argmax()) != int(row[0].argmax())
    assert changed > 0, "the parameters must change a token"


def processors(params: SamplingParams, history: list[int]) -> LogitsProcessors:
    """Return the tables of one request, computed from its history."""

    def row(values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor([values], dtype=dtype)

    counts: dict[int, int] = {token_id: 1 for token_id in PROMPT}
    for token_id in history[len(PROMPT) :]:
        counts[token_id] = counts.get(token_id, 0) + 2
    longest = max(map(len, params.bad_words_token_ids), default=0)
    words = [[*word, *[-1] * (longest - len(word))] for word in params.bad_words_token_ids]
    mask = None
    if params.allowed_token_ids is not None:
        bits = [0] * (VOCAB_SIZE // 32)
        for token_id in params.allowed_token_ids:
            bits[token_id // 32] |= 1 << token_id % 32
        mask = row([one - 2**32 if one >= 2**31 else one for one in bits])
    return LogitsProcessors(
        slots=torch.zeros(1, dtype=torch.int32),
        token_ids=row(history),
        prompt_lens=torch.tensor([len(PROMPT)], dtype=torch.int32),
        counted_token_ids=row(sorted(counts)),
        token_counts=row([counts[token_id] for token_id in sorted(counts)]),
        repetition_penalty=torch.tensor([params.repetition_penalty]),
        presence_penalty=torch.tensor([params.presence_penalty]),
        frequency_penalty=torch.tensor([params.frequency_penalty]),
        logit_bias_token_ids=row([token_id for token_id, _ in params.bias()]),
        logit_bias=row([bias for _, bias in params.bias()], torch.float32),
        bad_words=row(words) if words else None,
        stop_token_ids=row(params.stop_token_ids) if params.min_tokens else None,
        min_tokens=torch.tensor([params.min_tokens], dtype=torch.int32),
        allowed_token_mask=mask,
        mask_indices=None if mask is None else torch.zeros(1, dtype=torch.int32),
    )


def test_logit_bias_can_force_and_forbid_tokens(model_dir: Path) -> None:
    plain = generate(model_dir)
    for nothing in ({33: 0}, {33: -0.0, 34: 1e-60}):
        assert generate(model_dir, logit_bias=nothing).token_ids == plain.token_ids
    assert set(generate(model_dir, logit_bias={33: 100.0}).token_ids) == {33}
    banned = generate(model_dir, logit_bias=dict.fromkeys(plain.token_ids, -100))
    assert not set(banned.token_ids) & set(plain.token_ids)


def test_only_allowed_tokens_are_generated(model_dir: Path) -> None:
    for temperature in (0, 2.0):
        done = generate(
            model_dir, allowed_token_ids=[3, 31, 32, 159], temperature=temperature, seed=1
        )
        assert set(done.token_ids) <= {3, 31, 32, 159}


def test_bad_words_may_be_several_tokens(model_dir: Path) -> None:
    """With a byte tokenizer, a word is a sequence, of which a prefix is allowed."""
    tokenizer = make(model_dir).tokenizer
    drawn = {"temperature": 1.5, "seed": 4, "max_tokens": 120}
    plain = generate(model_dir, **drawn).token_ids

    def word_at(index: int) -> str | None:
        """Return the text of two tokens, if encoding the text gives these tokens."""
        text = tokenizer.decode(plain[index : index + 2])
        spelt = tokenizer.encode(text, add_special_tokens=False)
        return text if spelt == plain[index : index + 2] and text == text.lstrip() else None

    index = next(i for i in range(1, 119) if word_at(i))
    word = word_at(index)
    done = generate(model_dir, **drawn, bad_words=[word]).token_ids
    assert done[: index + 1] == plain[: index + 1], "a prefix of a bad word is allowed"
    bigrams = list(itertools.pairwise(done))
    assert tuple(plain[index : index + 2]) not in bigrams


def test_bad_words_may_be_white_space(model_dir: Path) -> None:
    tokenizer = make(model_dir).tokenizer
    newline = tokenizer.encode("\n", add_special_tokens=False)
    likely = {"logit_bias": dict.fromkeys(newline, 100), "max_tokens": 4, "temperature": 0}
    assert set(generate(model_dir, **likely).token_ids) == set(newline)
    assert not set(generate(model_dir, **likely, bad_words=["\n"]).token_ids) & set(newline)
    after = generate(model_dir, **likely, bad_words=["\n\n" + "a"]).token_ids
    assert set(after) == set(newline), "only the whole bad word is forbidden"


def test_slots_keep_no_parameters_of_earlier_requests(
    model_dir: Path, changes: dict[str, dict[str, Any]]
) -> None:
    """Requests with and without parameters alternate in a slot, and share steps."""
    plain = SamplingParams(max_tokens=20, temperature=0.7, seed=3, ignore_eos=True, logprobs=1)
    all_at_once = SamplingParams(
        max_tokens=20, temperature=0.7, seed=4, logprobs=1, **changes["everything"]
    )
    (expected,) = make(model_dir).generate([PROMPT], plain)
    (processed,) = make(model_dir).generate([PROMPT], all_at_once)
    for slots in (1, 2):
        engine = make(model_dir, NGRAM, max_num_seqs=slots)
        done = engine.generate([PROMPT] * 5, [plain, all_at_once, plain, all_at_once, plain])
        for one in done[::2]:
            assert (one.token_ids, one.logprobs) == (expected.token_ids, expected.logprobs)
        for one in done[1::2]:
            assert (one.token_ids, one.logprobs) == (processed.token_ids, processed.logprobs)


def test_preemption_rebuilds_every_table(
    model_dir: Path, changes: dict[str, dict[str, Any]]
) -> None:
    each = [
        SamplingParams(
            max_tokens=70,
            temperature=0.8,
            seed=index,
            logprobs=0,
            reasoning_max_tokens=30,
            response_max_tokens=35,
            think_end_token_id=9,
            think_inject_token_ids=(8, 9),
            stop_token_sequences=((1, 2, 3),),
            **changes["everything"],
        )
        for index in range(5)
    ]
    expected = make(model_dir, max_num_seqs=1).generate([PROMPT] * 5, each)
    engine = make(model_dir, NGRAM, num_pages=8, max_model_len=128)
    got = engine.generate([PROMPT] * 5, each)
    assert engine.stats.num_preemptions > 0
    for one, other in zip(got, expected, strict=True):
        assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)


def test_choices_count_their_own_tokens(model_dir: Path) -> None:
    params = SamplingParams(
        max_tokens=20, seed=3, n=3, ignore_eos=True, frequency_penalty=1.5, repetition_penalty=1.2
    )
    done = make(model_dir, NGRAM).generate([PROMPT], params)
    alone = make(model_dir, max_num_seqs=1).generate([PROMPT], params)
    assert [one.token_ids for one in done] == [one.token_ids for one in alone]
    assert len({tuple(one.token_ids) for one in done}) == 3


# ---- ends ----


def test_stop_sequences_end_a_text(model_dir: Path) -> None:
    plain = generate(model_dir)
    output = plain.token_ids
    sequence = tuple(output[17:20])
    first = next(i for i in range(3, 41) if tuple(output[i - 3 : i]) == sequence)
    done = generate(model_dir, stop_token_sequences=[sequence])
    assert done.token_ids == output[:first] and done.finish_reason == "stop"
    assert done.stop_reason == sequence
    # If several sequences end at the same token, the first one in the list is reported.
    both = [tuple(output[first - 2 : first]), sequence]
    if output[: first - 1].count(output[first - 1]) == 0:
        assert generate(model_dir, stop_token_sequences=both).stop_reason == both[0]
    assert generate(model_dir, stop_token_sequences=[sequence], min_tokens=40).finish_reason in (
        "length",
        "stop",
    )
    never = generate(model_dir, stop_token_sequences=[tuple(PROMPT[-2:] + output[:1])])
    assert never.token_ids[: len(output)] == output[: len(never.token_ids)]
    assert len(never.token_ids) > 1, "a stop sequence must not begin in the prompt"


def test_min_tokens_delay_stops(model_dir: Path) -> None:
    plain = generate(model_dir)
    stop = plain.token_ids[3]
    done = generate(model_dir, stop_token_ids=[stop], min_tokens=25)
    assert len(done.token_ids) >= 25
    assert stop not in done.token_ids[:24]
    assert generate(model_dir, stop_token_ids=[stop]).stop_reason == stop
    text = plain.text[4:6]
    assert generate(model_dir, stop=[text]).stop_reason == text
    late = generate(model_dir, stop=[text], min_tokens=20)
    assert len(late.token_ids) >= 20 and late.text.startswith(plain.text[:6])


@pytest.mark.parametrize("budget", [0, 5])
def test_thinking_ends_at_its_budget(model_dir: Path, budget: int) -> None:
    plain = generate(model_dir)
    inject = (150, 151, 152)
    assert not set(inject) & set(plain.token_ids)
    done = generate(
        model_dir,
        think_end_token_id=152,
        reasoning_max_tokens=budget,
        think_inject_token_ids=inject,
        response_max_tokens=7,
        logprobs=0,
    )
    assert done.token_ids[:budget] == plain.token_ids[:budget]
    assert tuple(done.token_ids[budget : budget + 3]) == inject
    assert len(done.token_ids) == budget + 3 + 7 and done.finish_reason == "length"
    injected = done.logprobs[budget : budget + 3]
    assert [(one.token_id, one.logprob, one.rank) for one in injected] == [
        (token_id, 0.0, 1) for token_id in inject
    ]


def test_thinking_may_end_by_itself(model_dir: Path) -> None:
    plain = generate(model_dir)
    end = plain.token_ids[4]
    first = plain.token_ids.index(end)
    done = generate(
        model_dir, think_end_token_id=end, reasoning_max_tokens=30, response_max_tokens=6
    )
    assert done.token_ids == plain.token_ids[: first + 1 + 6]
    with pytest.raises(ValueError, match="think_end_token_id must be given: the tokenizer has no"):
        make(model_dir).add_request(PROMPT, SamplingParams(reasoning_max_tokens=3))


# ---- strategies and policies ----


@pytest.mark.parametrize("strategy", ["greedy", "target_match", "rejection", "block", "topp"])
def test_seeded_text_does_not_depend_on_the_batch(model_dir: Path, strategy: str) -> None:
    own = {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "min_ngram_size": 1,
        "adaptive_verification": False,
    }
    own["verify_strategy"] = strategy
    each = [
        SamplingParams(max_tokens=40, temperature=0.4, seed=i, ignore_eos=True, logprobs=1, top_k=9)
        for i in range(6)
    ]
    texts = [PROMPT, [1, 2, 3], PROMPT * 3, [9] * 5, PROMPT, [4, 3, 4, 3]]
    alone = [
        make(model_dir).generate([text], one, speculative_config=own)[0]
        for text, one in zip(texts, each, strict=True)
    ]
    engine = make(model_dir, max_num_seqs=4, max_num_batched_tokens=24)
    batched = engine.generate(texts, each, speculative_config=own)
    for one, other in zip(batched, alone, strict=True):
        assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)
    spec = engine.stats.speculative
    assert 0 < spec.num_accepted_tokens < spec.num_draft_tokens
    plain = make(model_dir).generate(texts, each)
    same = [a.token_ids == b.token_ids for a, b in zip(plain, alone, strict=True)]
    assert all(same) if strategy == "target_match" else not all(same)


def test_temperature_0_is_greedy_under_every_strategy(model_dir: Path) -> None:
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, presence_penalty=0.3)
    (expected,) = make(model_dir).generate([PROMPT], params)
    for strategy in ("greedy", "target_match", "rejection", "block", "topp"):
        own = {"method": "ngram", "num_speculative_tokens": 3, "verify_strategy": strategy}
        (done,) = make(model_dir).generate([PROMPT], params, speculative_config=own)
        assert done.token_ids == expected.token_ids, strategy


def test_synthetic_acceptance_has_the_configured_rates(model_dir: Path) -> None:
    rates = [0.9, 0.3, 0.0]
    speculative = SpeculativeConfig.from_dict(
        {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "min_ngram_size": 1,
            "accept_policy": "synthetic",
            "synthetic_acceptance_rates": tuple(rates),
        }
    )
    engine = make(model_dir, speculative, max_num_seqs=16)
    params = [
        SamplingParams(max_tokens=150, temperature=0.8, seed=i, ignore_eos=True) for i in range(24)
    ]
    engine.generate([PROMPT] * 24, params)
    spec = engine.stats.speculative
    assert spec.num_drafts > 400
    first, second, third = spec.num_accepted_tokens_per_pos
    assert first / spec.num_drafts == pytest.approx(0.9, abs=0.05)
    assert 0.2 < second / spec.num_drafts < 0.4  # some steps have only one draft
    assert third == 0


# ---- logprobs ----


def test_ranks_count_more_likely_tokens(model_dir: Path) -> None:
    params = SamplingParams(max_tokens=30, temperature=1.5, seed=1, ignore_eos=True, logprobs=100)
    (done,) = make(model_dir).generate([PROMPT], params)
    for one in done.logprobs:
        above = sum(logprob > one.logprob for _, logprob in one.alternatives)
        assert one.rank == 1 + above or (above == 100 and one.rank > 100)
    assert len({one.rank for one in done.logprobs}) > 5


def test_processed_logprobs_describe_the_sampled_distribution(model_dir: Path) -> None:
    params = SamplingParams(
        max_tokens=20,
        temperature=0.7,
        top_k=5,
        seed=1,
        ignore_eos=True,
        logprobs=8,
        frequency_penalty=0.5,
    )
    raw, processed = (
        make(model_dir, logprobs_mode=mode).generate([PROMPT], params)[0]
        for mode in ("raw_logprobs", "processed_logprobs")
    )
    assert raw.token_ids == processed.token_ids
    for one in processed.logprobs:
        finite = {i: p for i, p in one.alternatives if p > float("-inf")}
        assert len(finite) == 5 and finite[one.token_id] == one.logprob
        assert sum(torch.tensor(list(finite.values())).exp()) == pytest.approx(1, abs=1e-5)
    assert raw.logprobs[5].logprob != processed.logprobs[5].logprob


# ---- refusals ----


@pytest.mark.parametrize(
    "bad,message",
    [
        ({"logit_bias": {160: 1}}, "logit_bias must hold token ids of the vocabulary of 160"),
        ({"allowed_token_ids": [160]}, "allowed_token_ids must hold token ids of the"),
        ({"bad_words_token_ids": [[1, 160]]}, "bad_words_token_ids must hold token ids of the"),
        ({"stop_token_ids": [1000]}, "stop_token_ids must hold token ids of the vocabulary"),
        ({"stop_token_sequences": [[160]]}, "stop_token_sequences must hold token ids of the"),
        ({"bad_words": ["a" * 65]}, "bad_words must hold sequences of 1 to 64 tokens, got one of"),
    ],
)
def test_tokens_outside_the_vocabulary_are_refused(
    model_dir: Path, bad: dict[str, Any], message: str
) -> None:
    engine = make(model_dir)
    with pytest.raises(ValueError, match=message):
        engine.add_request(PROMPT, SamplingParams(**bad))
    assert not engine.has_unfinished()


@pytest.mark.parametrize(
    "bad",
    [
        {"max_tokens": -1},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"min_p": 2.0},
        {"n": 0},
        {"seed": 2**64},
        {"stop": ("",)},
        {"logprobs": -1},
        {"max_tokens": 1.5},
        {"stop_token_ids": ("a",)},
        {"stop": None},
        {"stop": 5},
        {"stop": b"a"},
        {"stop_token_ids": 5},
        {"stop_token_ids": None},
        {"ignore_eos": 1},
        {"typical_p": 0.0},
        {"typical_p": 1.1},
        {"typical_p": 1e-320},  # 0 as a float32
        {"repetition_penalty": 1e-320},
        {"repetition_penalty": 0},
        {"repetition_penalty": -1},
        {"repetition_penalty": float("nan")},
        {"repetition_penalty": "1"},
        {"presence_penalty": 2.1},
        {"frequency_penalty": -2.1},
        {"logit_bias": 5},
        {"logit_bias": (1,)},
        {"logit_bias": {"5": 1}},
        {"logit_bias": {5: "1"}},
        {"logit_bias": {5: float("nan")}},
        {"logit_bias": {5: 100.5}},
        {"logit_bias": {-1: 1}},
        {"logit_bias": dict.fromkeys(range(4097), 1)},
        {"bad_words": 5},
        {"bad_words": [""]},
        {"bad_words_token_ids": [5]},
        {"bad_words_token_ids": [[]]},
        {"bad_words_token_ids": [["a"]]},
        {"bad_words_token_ids": [[1]] * 257},
        {"allowed_token_ids": []},
        {"allowed_token_ids": [True]},
        {"allowed_token_ids": [-5]},
        {"min_tokens": -1},
        {"min_tokens": None},
        {"min_tokens": 17},
        {"stop_token_sequences": [[1] * 65]},
        {"stop_token_sequences": None},
        {"think_end_token_id": 5},
        {"think_inject_token_ids": [1]},
        {"think_inject_token_ids": [1] * 65, "reasoning_max_tokens": 1},
        {"reasoning_max_tokens": -1},
        {"response_max_tokens": 0},
    ],
    ids=str,
)
def test_sampling_params_errors_name_the_field(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"^{next(iter(bad))} (must|needs) "):
        SamplingParams(**bad)


def test_sampling_params_are_hashable_values() -> None:
    import dataclasses

    params = SamplingParams(logit_bias={7: 1, 3: -2.5}, bad_words="no", stop_token_sequences=[[1]])
    assert params.logit_bias == ((3, -2.5), (7, 1.0))
    assert params.bad_words == ("no",) and params.stop_token_sequences == ((1,),)
    again = dataclasses.replace(params, seed=5)
    assert again.logit_bias == params.logit_bias
    assert hash(again) == hash(dataclasses.replace(params, seed=5))
