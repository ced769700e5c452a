# SPDX-License-Identifier: Apache-2.0
"""The engine on a tiny random model: limits, stops, seeds, choices, aborts, prefix cache."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint, write_tokenizer
from pages import check_pages
from specops import sampling
from specops.engine import (
    ContextOverflow,
    Engine,
    EngineConfig,
    ModelError,
    QueueFull,
    SamplingParams,
    SpeculativeConfig,
)
from specops.engine.drafters.ngram import NgramDrafter
from specops.engine.drafters.suffix import SuffixDrafter


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_checkpoint(directory, "Qwen3", num_hidden_layers=2)
    write_tokenizer(directory)
    return directory


def make(model_dir: Path, **config: Any) -> Engine:
    config.setdefault("speculative_config", SpeculativeConfig(method="naive"))
    return Engine(EngineConfig(model=str(model_dir), dtype="float32", device="cpu", **config))


NGRAM = SpeculativeConfig.from_dict(
    {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "min_ngram_size": 1,
        "adaptive_verification": False,
    }
)
PROMPT = [5, 6, 7, 5, 6, 7, 5, 6]


def test_max_tokens_limits_the_output_and_usage_counts_it(model_dir: Path) -> None:
    for speculative in (SpeculativeConfig(method="naive"), NGRAM):
        engine = make(model_dir, speculative_config=speculative)
        done = engine.generate(
            [PROMPT] * 3,
            [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (1, 2, 50)],
        )
        assert [len(c.token_ids) for c in done] == [1, 2, 50]
        assert [c.finish_reason for c in done] == ["length"] * 3
        assert done[2].token_ids[:2] == done[1].token_ids
        assert engine.stats.generation_tokens == 53
        assert engine.stats.prompt_tokens == 24


def test_request_ends_at_the_maximum_length(model_dir: Path) -> None:
    for speculative in (SpeculativeConfig(method="naive"), NGRAM):
        engine = make(model_dir, speculative_config=speculative, max_model_len=40)
        (done,) = engine.generate([PROMPT], SamplingParams(max_tokens=None, ignore_eos=True))
        assert len(done.token_ids) == 32 and done.finish_reason == "length"


def test_stop_tokens_end_a_step_of_several_tokens(model_dir: Path) -> None:
    base = make(model_dir)
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    (plain,) = base.generate([PROMPT], params)
    stop = plain.token_ids[20]
    first = plain.token_ids.index(stop)
    for policy in ("normal", "accept_all"):
        speculative = SpeculativeConfig.from_dict(
            {
                "method": "ngram",
                "num_speculative_tokens": 5,
                "accept_policy": policy,
                "min_ngram_size": 1,
            }
        )
        engine = make(model_dir, speculative_config=speculative)
        stopping = SamplingParams(
            max_tokens=40, temperature=0, ignore_eos=True, stop_token_ids=(stop,)
        )
        (done,) = engine.generate([PROMPT], stopping)
        if policy == "normal":
            assert done.token_ids == plain.token_ids[: first + 1]
        assert done.finish_reason == "stop" or len(done.token_ids) == 40
        assert engine.num_free_pages == engine.num_pages


def test_stop_strings_end_text_tokens_and_logprobs(model_dir: Path) -> None:
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True, logprobs=0)
    (plain,) = make(model_dir).generate([PROMPT], params)
    stop = plain.text[10:13]
    for speculative in (SpeculativeConfig(method="naive"), NGRAM):
        engine = make(model_dir, speculative_config=speculative)
        (done,) = engine.generate(
            [PROMPT],
            SamplingParams(max_tokens=60, temperature=0, ignore_eos=True, logprobs=0, stop=(stop,)),
        )
        assert done.text == plain.text[: plain.text.index(stop)]
        assert done.finish_reason == "stop"
        assert done.token_ids == plain.token_ids[: len(done.token_ids)]
        assert done.logprobs == plain.logprobs[: len(done.token_ids)]


def test_seeds_make_outputs_reproducible(model_dir: Path) -> None:
    engine = make(model_dir)
    params = SamplingParams(max_tokens=30, seed=7, ignore_eos=True)
    first, second = engine.generate([PROMPT, PROMPT], params)
    assert first.token_ids == second.token_ids and first.seed == 7
    (other,) = engine.generate([PROMPT], SamplingParams(max_tokens=30, seed=8, ignore_eos=True))
    assert other.token_ids != first.token_ids
    (drawn,) = engine.generate([PROMPT], SamplingParams(max_tokens=30, ignore_eos=True))
    (again,) = engine.generate(
        [PROMPT], SamplingParams(max_tokens=30, seed=drawn.seed, ignore_eos=True)
    )
    assert again.token_ids == drawn.token_ids


def test_choices_differ_and_are_reproducible(model_dir: Path) -> None:
    engine = make(model_dir)
    params = SamplingParams(max_tokens=20, seed=3, n=3, ignore_eos=True)
    done = engine.generate([PROMPT, [9, 9]], params)
    assert [c.index for c in done] == [0, 1, 2, 0, 1, 2]
    assert len({tuple(c.token_ids) for c in done[:3]}) == 3
    again = make(model_dir, max_num_seqs=2).generate([PROMPT], params)
    assert [c.token_ids for c in again] == [c.token_ids for c in done[:3]]


def test_prefix_cache_hits_change_no_bit(model_dir: Path) -> None:
    prompt = [(3 * i) % 150 + 1 for i in range(100)]
    params = SamplingParams(max_tokens=20, temperature=0.7, seed=1, logprobs=1, ignore_eos=True)
    engine = make(model_dir, speculative_config=NGRAM)
    (cold,) = engine.generate([prompt], params)
    (warm,) = engine.generate([prompt], params)
    assert cold.num_cached_tokens == 0 and warm.num_cached_tokens == 96
    assert warm.token_ids == cold.token_ids and warm.logprobs == cold.logprobs
    (longer,) = engine.generate([prompt + cold.token_ids], params)
    assert longer.num_cached_tokens >= 112
    assert engine.stats.prefix_cache_hits == 96 + longer.num_cached_tokens
    off = make(model_dir, enable_prefix_caching=False)
    off.generate([prompt], params)
    (again,) = off.generate([prompt], params)
    assert again.num_cached_tokens == 0 and again.logprobs == cold.logprobs


def test_abort_frees_pages_in_every_state(model_dir: Path) -> None:
    engine = make(model_dir, max_num_seqs=1, max_num_batched_tokens=16)
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    running = engine.add_request(list(range(1, 60)), params)
    waiting = engine.add_request(PROMPT, params)
    engine.step()
    assert engine.num_running == 1 and engine.num_waiting == 1
    assert engine.abort(running) and engine.abort(waiting)
    assert not engine.abort(running)
    assert not engine.has_unfinished()
    assert engine.num_free_pages == engine.num_pages
    assert engine.step() == []


def test_deltas_add_up_to_the_completion(model_dir: Path) -> None:
    engine = make(model_dir, speculative_config=NGRAM)
    name = engine.add_request(PROMPT, SamplingParams(max_tokens=40, temperature=0, logprobs=1))
    token_ids, text, logprobs = [], "", []
    while engine.has_unfinished():
        for output in engine.step():
            token_ids += output.token_ids
            text += output.text
            logprobs += output.logprobs
    done = engine.completion(name)
    assert (done.token_ids, done.text, done.logprobs) == (token_ids, text, logprobs)
    with pytest.raises(KeyError):
        engine.completion(name)


def test_invalid_choices_and_prompts_are_refused(model_dir: Path) -> None:
    engine = make(model_dir)
    params = SamplingParams(max_tokens=1)
    engine.add_request(PROMPT, params, request_id="request-1")
    assert engine.add_request(PROMPT, params) != "request-1"
    for choice in (-1, 2**31):
        with pytest.raises(ValueError, match="choice_index"):
            engine.add_request(PROMPT, params, choice_index=choice)
    with pytest.raises(ValueError, match="got one text"):
        engine.generate("abc", params)
    with pytest.raises(ValueError, match="got bytes"):
        engine.generate([b"ab"], params)


def test_logprobs_are_limited_by_the_vocabulary(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "Qwen3", num_hidden_layers=1, vocab_size=64)
    write_tokenizer(tmp_path, 64)
    engine = make(tmp_path)
    (done,) = engine.generate([PROMPT], SamplingParams(max_tokens=1, logprobs=64))
    assert len(done.logprobs[0].alternatives) == 64
    with pytest.raises(ValueError, match="logprobs must be at most the vocabulary's 64, got 65"):
        engine.add_request(PROMPT, SamplingParams(logprobs=65))


def test_invalid_requests_and_configurations_are_refused(model_dir: Path) -> None:
    engine = make(model_dir, max_waiting=1, max_model_len=64)
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    with pytest.raises(ContextOverflow, match="prompt of 60 tokens and max_tokens 10"):
        engine.add_request([1] * 60, params)
    with pytest.raises(ValueError, match="at least one token"):
        engine.add_request([], params)
    with pytest.raises(ValueError, match="token id 160 is outside"):
        engine.add_request([160], params)
    with pytest.raises(ValueError, match="text or token ids"):
        engine.add_request([1, "a"], params)  # type: ignore[list-item]
    engine.add_request(PROMPT, params, request_id="one")
    with pytest.raises(QueueFull):
        engine.add_request(PROMPT, params)
    engine.step()
    with pytest.raises(ValueError, match="in use"):
        engine.add_request(PROMPT, params, request_id="one")
    with pytest.raises(ValueError, match="mtp"):
        engine.add_request(PROMPT, params, speculative_config={"method": "mtp"})
    with pytest.raises(ValueError, match="at most 511 on this server, got 2147483647"):
        many = {"method": "ngram", "num_speculative_tokens": 2**31 - 1}
        engine.add_request(PROMPT, params, speculative_config=many)
    with pytest.raises(ValueError, match="num_pages must be at least 4"):
        make(model_dir, max_model_len=64, num_pages=3)
    with pytest.raises(ValueError, match="every running request needs a row"):
        EngineConfig(max_num_seqs=8, max_num_batched_tokens=4)
    with pytest.raises(ModelError, match="no such directory"):
        Engine(EngineConfig(model="/nowhere/at/all"))
    with pytest.raises(ValueError, match=r"mtp"):
        make(model_dir, speculative_config=SpeculativeConfig(method="mtp"))


@pytest.mark.parametrize(
    "bad",
    [
        {"model": 5},
        {"model": ""},
        {"model": Path("x")},
        {"served_model_name": 1},
        {"speculative_config": None},
        {"speculative_config": {"method": "naive"}},
        {"dtype": None},
        {"dtype": ["bfloat16"]},
        {"device": None},
        {"device": 0},
        {"enforce_eager": 1},
        {"load_format": "pt"},
        {"logprobs_mode": "raw_logits"},
        {"logprobs_mode": None},
        {"page_size": 24},
        {"page_size": True},
        {"page_size": 16.0},
        {"num_pages": 1.5},
        {"num_pages": 0},
        {"kv_cache_bytes": "4G"},
        {"max_num_seqs": None},
        {"max_num_seqs": True},
        {"max_num_batched_tokens": "512"},
        {"max_model_len": -1},
        {"enable_prefix_caching": None},
        {"enable_cascade_attention": 1},
        {"num_threads": 0},
        {"seed": "x"},
        {"seed": 1.0},
        {"max_waiting": 0.5},
    ],
    ids=str,
)
def test_engine_config_errors_name_the_field(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"^{next(iter(bad))} must be .*, got "):
        EngineConfig(**bad)


def test_queue_time_is_measured(model_dir: Path) -> None:
    engine = make(model_dir, max_num_seqs=1)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    first, second = (engine.add_request(PROMPT, params) for _ in range(2))
    while engine.has_unfinished():
        engine.step()
    done = [engine.completion(name).queue_seconds for name in (first, second)]
    assert 0 <= done[0] < done[1]


@pytest.mark.parametrize("method", ["naive", "ngram", "suffix"])
def test_drafting_and_verification_are_timed_separately(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Verification sleeps 5 ms; drafting sleeps 9 ms, in the step or, for suffix, after it."""
    calls = {"verify": 0, "draft": 0}

    def slow(work: Callable[..., Any], part: str, seconds: float) -> Callable[..., Any]:
        def slowly(*args: Any, **options: Any) -> Any:
            calls[part] += 1
            time.sleep(seconds)
            return work(*args, **options)

        return slowly

    monkeypatch.setattr(sampling, "verify", slow(sampling.verify, "verify", 0.005))
    monkeypatch.setattr(NgramDrafter, "propose", slow(NgramDrafter.propose, "draft", 0.009))
    if method == "suffix":
        monkeypatch.setattr(SuffixDrafter, "finish", slow(SuffixDrafter.finish, "draft", 0.009))
    engine = make(model_dir, speculative_config=SpeculativeConfig(method=method))
    assert engine.times_drafting
    begun = time.perf_counter()
    engine.generate([PROMPT], SamplingParams(max_tokens=12, ignore_eos=True))
    took = time.perf_counter() - begun
    stats = engine.stats
    assert calls["verify"] == stats.num_steps and bool(calls["draft"]) == (method != "naive")
    assert stats.verify_seconds >= 0.005 * calls["verify"]
    assert stats.draft_seconds >= 0.009 * calls["draft"]
    assert stats.verify_seconds + stats.draft_seconds <= took


def test_pages_are_consistent_under_mixed_traffic(model_dir: Path) -> None:
    import random

    rng = random.Random(0)
    engine = make(
        model_dir, speculative_config=NGRAM, num_pages=20, max_model_len=128, max_num_seqs=6
    )
    names: list[str] = []
    for step in range(400):
        if len(names) < 120 and rng.random() < 0.5:
            prompt = [rng.randrange(1, 5) for _ in range(rng.randrange(1, 60))]
            params = SamplingParams(max_tokens=rng.randrange(1, 60), temperature=rng.choice([0, 1]))
            names.append(engine.add_request(prompt, params, request_id=f"r{step}"))
        if names and rng.random() < 0.1:
            engine.abort(rng.choice(names))
        engine.step()
        check_pages(engine._pool)
    while engine.has_unfinished():
        engine.step()
    assert engine.stats.num_preemptions > 0
    assert engine.num_free_pages == engine.num_pages
    check_pages(engine._pool)


def test_cached_step_shapes_are_bounded(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of many sizes use bounded memory, and evicted shapes give the same outputs."""
    import random

    def run(engine: Engine) -> list[list[int]]:
        rng = random.Random(0)
        names = []
        for _ in range(120):
            prompt = [rng.randrange(1, 5) for _ in range(rng.randrange(1, 60))]
            params = SamplingParams(max_tokens=rng.randrange(1, 30), temperature=0)
            names.append(engine.add_request(prompt, params))
            engine.step()
            num_cached_steps.append(len(engine._runner.memory._steps))
        while engine.has_unfinished():
            engine.step()
        return [engine.completion(name).token_ids for name in names]

    num_cached_steps: list[int] = []
    limits: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 6}
    expected = run(make(model_dir, speculative_config=NGRAM, **limits))
    assert max(num_cached_steps) > 20
    num_cached_steps.clear()
    monkeypatch.setattr("specops.engine.memory.step_memory._MAX_KEPT_STEPS", 8)
    assert run(make(model_dir, speculative_config=NGRAM, **limits)) == expected
    assert max(num_cached_steps) == 8
