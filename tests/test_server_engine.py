# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  (where the server's packages are missing, nothing else is imported)
"""The HTTP server over a tiny real engine, and mixed load on both engines."""

import concurrent.futures
import dataclasses
import itertools
import json
import operator
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pages import check_pages

for name in ("fastapi", "uvicorn", "pydantic", "prometheus_client", "jinja2", "httpx"):
    pytest.importorskip(name)

import httpx
from serving import (
    CHAT,
    STREAM,
    TEXT,
    Served,
    assert_failed,
    counters,
    events,
    hang_up_on,
    health,
    post,
    serving,
    wait_for,
)
from specops.engine import (
    Engine,
    EngineConfig,
    SamplingParams,
    SpeculativeConfig,
)
from specops.engine.models import Transformer
from specops.server.protocol import CompletionRequest, parse


def mixed_body(draw: random.Random, prompt: Any, methods: list[Any]) -> dict[str, Any]:
    """Return a request body that may be valid or invalid."""
    body: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": draw.choice([1, 3, 20, 40]),
        "temperature": draw.choice([0, 0.8]),
        "n": draw.choice([1, 1, 2]),
        "stream": draw.random() < 0.5,
        "speculative_config": draw.choice(methods),
    }
    broken: list[dict[str, Any]] = [
        {"max_tokens": 10**6},
        {"prompt": [10**6]},
        {"temperature": -1},
        {"speculative_config": {"method": "falcon"}},
        {"unknown": 1},
        {"model": "other"},
        {"prompt": 5},
        {"stop": "e", "logprobs": 2},
        {"n": 64},
    ]
    return body | (draw.choice(broken) if draw.random() < 0.4 else {})


def send_mixed_load(served: Served, prompts: list[Any]) -> None:
    """Send 200 valid and invalid requests from many clients, some of which disconnect early."""
    draw = random.Random(1)
    methods = [{"method": method} for method in served.engine.runnable_methods]
    if "mtp" in served.engine.runnable_methods:
        methods += [{"method": "mtp+ngram"}, {"method": "mtp+suffix"}]

    def one(seed: int) -> int:
        mine = random.Random(seed)
        body = mixed_body(mine, mine.choice(prompts), methods)
        if mine.random() < 0.3:
            connection = hang_up_on(served, "completions", body)
            time.sleep(mine.random() * 0.03)  # at any stage of the request
            connection.close()
            return 0
        response = post(served, "completions", body)
        if response.status_code == 200 and body["stream"]:
            assert "error" not in events(response)[-1]
        return response.status_code

    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        seen = set(pool.map(one, [draw.getrandbits(32) for _ in range(200)]))
    assert {0, 200, 400, 404} <= seen <= {0, 200, 400, 404, 429}
    # A new connection. When it is answered, the server has accepted and read all earlier ones.
    answer = httpx.post(f"{served.url}/v1/completions", json={"prompt": prompts[0]})
    assert answer.status_code == 200
    served.wait_until_idle()


def test_mixed_load_leaks_no_page(fake: Served) -> None:
    send_mixed_load(
        fake, ["abc", "a much longer prompt than the others, for pages", [98, 99], ["x", "y"]]
    )
    assert fake.engine.num_uncollected == 0


def tiny_engine(mtp_model: Path, **options: Any) -> Engine:
    options.setdefault("speculative_config", NGRAM)
    options.setdefault("methods", ("all",))
    options = {"model": str(mtp_model), "served_model_name": "tiny", "device": "cpu", **options}
    return Engine(EngineConfig(**options))


NGRAM = SpeculativeConfig.from_dict(
    {"method": "ngram", "num_speculative_tokens": 4, "min_ngram_size": 1}
)


@pytest.fixture(scope="module")
def tiny(mtp_model: Path) -> Iterator[Served]:
    with serving(tiny_engine(mtp_model, max_num_seqs=4, max_waiting=64)) as served:
        yield served


def test_zero_token_requests_work_without_cached_responses(mtp_model: Path) -> None:
    """Zero-token requests end, and other requests end with unchanged texts."""
    suffix = SpeculativeConfig.from_dict(
        {"method": "suffix", "num_speculative_tokens": 4, "suffix_decoding_max_cached_requests": 0}
    )
    long = {"prompt": "abcabc", "max_tokens": 120, "temperature": 0, "ignore_eos": True}
    scored = {"prompt": "abcabc", "max_tokens": 0, "echo": True, "logprobs": 0}
    with serving(tiny_engine(mtp_model, speculative_config=suffix, max_num_seqs=6)) as served:
        alone = post(served, "completions", long).json()["choices"]
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            others = [pool.submit(post, served, "completions", long) for _ in range(4)]
            several = [pool.submit(post, served, "completions", scored) for _ in range(4)]
            for answer in several:
                assert answer.result().json()["choices"][0]["finish_reason"] == "length"
            for answer in others:
                (choice,) = answer.result().json()["choices"]
                assert choice["text"] == alone[0]["text"]
        served.wait_until_idle()
        assert served.engine._drafting.num_failures == 0


@pytest.mark.parametrize("temperature", [0, 0.9])
def test_served_text_equals_the_engine_with_any_method(
    tiny: Served, mtp_model: Path, temperature: float
) -> None:
    prompt = "for i in range(3): for i in range"
    params = SamplingParams(
        max_tokens=60, temperature=temperature, seed=11, logprobs=2, ignore_eos=True
    )
    naive = SpeculativeConfig(method="naive")
    (expected,) = tiny_engine(mtp_model, speculative_config=naive).generate([prompt], params)
    body = {"prompt": prompt, "max_tokens": 60, "temperature": temperature, "seed": 11}
    body |= {"logprobs": 2, "ignore_eos": True}
    mtp = {"method": "mtp", "num_speculative_tokens": 5}
    for own in (
        None,
        {"method": "naive"},
        {"method": "ngram", "num_speculative_tokens": 9},
        mtp,
        mtp | {"method": "mtp+ngram", "num_model_steps": 2},
        mtp | {"method": "mtp+suffix"},
    ):
        body["speculative_config"] = own
        whole = post(tiny, "completions", body).json()
        (choice,) = whole["choices"]
        assert choice["text"] == expected.text
        num_drafts = whole["metrics"]["speculative_decoding"]["num_draft_tokens"]
        assert num_drafts > 0 or own is None or "mtp" not in own["method"]
        assert choice["logprobs"]["token_logprobs"] == [one.logprob for one in expected.logprobs]
        assert whole["usage"]["completion_tokens"] == len(expected.token_ids)
        parts = events(post(tiny, "completions", body | STREAM))
        assert "".join(part["choices"][0]["text"] for part in parts) == expected.text
    drafted = counters(tiny)["specops:spec_decode_num_draft_tokens_total"][""]
    assert drafted > 0, "no method drafted anything"


def test_choices_share_pages_and_keep_their_tokens(tiny: Served, mtp_model: Path) -> None:
    prompt = "a prompt that fills more than one page of sixteen tokens, so that choices can share"
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=3, n=3, ignore_eos=True)
    expected = tiny_engine(mtp_model).generate([prompt], params)
    hits = counters(tiny)["specops:prefix_cache_hits_total"][""]
    body = {"prompt": prompt, "max_tokens": 12, "seed": 3, "n": 3, "ignore_eos": True}
    answer = post(tiny, "completions", body).json()
    assert [choice["text"] for choice in answer["choices"]] == [one.text for one in expected]
    shared = (len(expected[0].prompt_token_ids) - 1) // 16 * 16
    assert counters(tiny)["specops:prefix_cache_hits_total"][""] == hits + 2 * shared
    tiny.wait_until_idle()


def test_eight_choices_hold_the_pages_of_one_prompt(
    mtp_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny_engine(mtp_model, max_num_seqs=8)
    step, seen = engine.step, []

    def watched() -> Any:
        outputs = step()
        seen.append((engine.num_running, engine.num_pages - engine.num_free_pages))
        return outputs

    monkeypatch.setattr(engine, "step", watched)
    body = {"prompt": "p" * 16 * 12 + "q", "n": 8, "max_tokens": 15, "ignore_eos": True, "seed": 1}
    with serving(engine) as served:
        answer = post(served, "completions", body).json()
        served.wait_until_idle()
    assert len({choice["text"] for choice in answer["choices"]}) > 1
    together = max(pages for running, pages in seen if running == 8)
    # Each choice has at most two pages of its own, for the prompt's last token, output and drafts.
    assert 12 + 8 <= together <= 12 + 8 * 2
    assert max(pages for _, pages in seen) == together


def test_every_sampling_parameter_reaches_the_engine(tiny: Served, mtp_model: Path) -> None:
    own: dict[str, Any] = {
        "top_k": 40,
        "typical_p": 0.9,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "bad_words": ["a", "in "],
        "bad_words_token_ids": [[5, 6], [7]],
        "allowed_token_ids": list(range(1, 150)),
        "min_tokens": 20,
        "stop_token_ids": list(range(30, 60)),
        "stop_token_sequences": [[1, 2]],
        "think_end_token_id": 9,
        "reasoning_max_tokens": 8,
        "response_max_tokens": 25,
        "think_inject_token_ids": [8, 9],
    }
    prompt = "for i in range(3): for i in range"
    common = {"max_tokens": 60, "temperature": 0.9, "seed": 11}
    params = SamplingParams(**common, logit_bias={70: 2.5}, **own)
    (expected,) = tiny_engine(mtp_model).generate([prompt], params)
    body = {"prompt": prompt, **common, "logit_bias": {"70": 2.5}, **own}
    (choice,) = post(tiny, "completions", body).json()["choices"]
    for name in ("text", "finish_reason", "stop_reason"):
        assert choice[name] == getattr(expected, name)
    read = parse(CompletionRequest, json.dumps(body).encode(), 512).sampling_params()
    assert read == params
    others = {"top_p", "min_p", "n", "stop", "ignore_eos", "logprobs", "structured_output"}
    others |= {"report_drafts"}  # reported by streams, not a sampling parameter
    others |= {"prompt_logprobs"}  # tests/test_prompt_logprobs.py
    others |= {"prompt_logprobs_start"}  # /v1/score only; tests/test_scoring_server.py
    others |= {"prediction"}  # chats only; tests/conformity.py
    others |= {"cache_salt"}  # sent as a digest; tests/test_isolation.py
    given = {*common, *own, "logit_bias"}
    assert given | others == {field.name for field in dataclasses.fields(SamplingParams)}
    last = events(post(tiny, "completions", body | STREAM))[-1]
    assert last["choices"][0]["stop_reason"] == expected.stop_reason


@pytest.mark.parametrize(
    "field",
    [
        {"logit_bias": {"1000000": 1}},
        {"allowed_token_ids": [10**6]},
        {"bad_words": ["x" * 65]},
        {"think_end_token_id": 10**6, "reasoning_max_tokens": 1},
    ],
    ids=lambda field: next(iter(field)),
)
def test_tokens_outside_the_vocabulary_are_refused(tiny: Served, field: dict[str, Any]) -> None:
    response = post(tiny, "completions", TEXT | field)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == next(iter(field))


def test_stop_reason_names_the_stop(tiny: Served) -> None:
    body = {"prompt": "abc", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    (plain,) = post(tiny, "completions", body).json()["choices"]
    assert plain["stop_reason"] is None and plain["finish_reason"] == "length"
    forced = body | {"logit_bias": {"33": 100}}
    (by_id,) = post(tiny, "completions", forced | {"stop_token_ids": [33]}).json()["choices"]
    assert (by_id["finish_reason"], by_id["stop_reason"], by_id["text"]) == ("stop", 33, "")
    (by_list,) = post(tiny, "completions", forced | {"stop_token_sequences": [[33, 33]]}).json()[
        "choices"
    ]
    assert (by_list["finish_reason"], by_list["stop_reason"]) == ("stop", [33, 33])
    text = by_list["text"][:1]
    (by_text,) = post(tiny, "completions", forced | {"stop": text}).json()["choices"]
    assert (by_text["finish_reason"], by_text["stop_reason"], by_text["text"]) == ("stop", text, "")


def test_chat_uses_the_template_of_the_model_directory(mtp_model: Path) -> None:
    """The template names a special token of the tokenizer."""
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    config = {"chat_template": template, "eos_token": "<|endoftext|>"}
    (mtp_model / "tokenizer_config.json").write_text(json.dumps(config))
    try:
        with serving(tiny_engine(mtp_model)) as served:
            prompt = "system: hey<|endoftext|>user: you<|endoftext|>"
            messages = [{"role": "system", "content": "hey"}, {"role": "user", "content": "you"}]
            sampling = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
            text = post(served, "completions", sampling | {"prompt": prompt}).json()
            chat = post(served, "chat/completions", sampling | {"messages": messages}).json()
            assert chat["choices"][0]["message"]["content"] == text["choices"][0]["text"]
            assert chat["usage"]["prompt_tokens"] == text["usage"]["prompt_tokens"]
    finally:
        (mtp_model / "tokenizer_config.json").unlink()


def test_chat_is_refused_without_a_chat_template(tiny: Served) -> None:
    response = post(tiny, "chat/completions", CHAT)
    assert response.status_code == 400
    assert "no chat template" in response.json()["error"]["message"]


def is_whole(response: httpx.Response, body: dict[str, Any]) -> bool:
    """Return whether an answer of one choice, streamed or not, ended at its length."""
    if response.headers["content-type"].startswith("text/event-stream"):
        said = events(response)
        return said[-1].get("choices", [{}])[0].get("finish_reason") == "length"
    return response.status_code == 200 and (
        response.json()["usage"]["completion_tokens"] == body["max_tokens"]
    )


def hold_while_running(
    engine: Engine, count: int, may_go_on: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Make an engine skip its steps while `count` or more requests run, until it may continue."""
    step = engine.step

    def stepping() -> Any:
        if engine.num_running < count or may_go_on.is_set():
            return step()
        time.sleep(0.001)
        return []

    monkeypatch.setattr(engine, "step", stepping)


@pytest.mark.parametrize("mistake", [ValueError, RuntimeError])
def test_failed_step_of_the_real_engine_ends_its_requests(
    mtp_model: Path, monkeypatch: pytest.MonkeyPatch, mistake: type[Exception]
) -> None:
    """An op refuses its arguments, or anything else fails in a step."""
    real, may_go_on, num_calls = Transformer.forward, threading.Event(), itertools.count()

    def forward(self: Transformer, *args: Any, **options: Any) -> Any:
        states = real(self, *args, **options)
        if may_go_on.is_set() and next(num_calls) == 3:
            raise mistake("planted failure")
        return states

    monkeypatch.setattr(Transformer, "forward", forward)
    with serving(tiny_engine(mtp_model, max_num_seqs=2, max_waiting=64)) as served:
        engine = served.engine
        body = {"prompt": "abc abc", "temperature": 0, "ignore_eos": True, "max_tokens": 30}
        expected = post(served, "completions", body).json()["choices"][0]
        hold_while_running(engine, 0, may_go_on, monkeypatch)
        bodies = [
            body | {"max_tokens": 240, "speculative_config": {"method": method}} | stream
            for method in ("naive", *engine.runnable_methods)
            for stream in ({}, STREAM)
        ]
        with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
            answers = [pool.submit(post, served, "completions", one) for one in bodies]
            wait_for(lambda: engine.num_waiting == len(bodies))
            may_go_on.set()
            done = [answer.result() for answer in answers]
        # Requests that waited for a slot took no part in the step.
        ended = [is_whole(one, body | {"max_tokens": 240}) for one in done]
        assert 1 <= ended.count(False) <= 2
        for answer in itertools.compress(done, map(operator.not_, ended)):
            assert_failed(answer)
        served.wait_until_idle()
        check_pages(engine._pool)
        assert health(served) == (200, "ok")
        again = post(served, "completions", body).json()["choices"][0]
        assert (again["text"], again["finish_reason"]) == (expected["text"], "length")


def test_call_with_many_choices_yields_a_slot_to_others(
    mtp_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newcomer does not wait for a choice to end, and every choice keeps its text."""
    many = {"prompt": "abc abc", "n": 8, "max_tokens": 200, "seed": 5, "ignore_eos": True}
    with serving(tiny_engine(mtp_model, max_num_seqs=2, max_waiting=64)) as served:
        engine = served.engine
        alone = post(served, "completions", many).json()["choices"]
        before = engine.stats.num_preemptions
        may_go_on, ended, completion = threading.Event(), [], engine.completion

        def completing(request_id: str) -> Any:
            ended.append(completion(request_id))
            return ended[-1]

        hold_while_running(engine, 2, may_go_on, monkeypatch)
        monkeypatch.setattr(engine, "completion", completing)
        newcomer = {"prompt": "x", "max_tokens": 5, "seed": 1}
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            running = pool.submit(post, served, "completions", many)
            wait_for(lambda: engine.num_running == 2 and engine.num_waiting == 6)
            answer = pool.submit(post, served, "completions", newcomer)
            wait_for(lambda: engine.num_waiting == 7)
            may_go_on.set()
            assert answer.result().status_code == 200
            assert running.result().json()["choices"] == alone
        assert len(ended[0].token_ids) == 5, "a choice ended before the newcomer"
        assert len(ended) == 9 and engine.stats.num_preemptions == before + 1
        served.wait_until_idle()


def test_mixed_load_leaks_no_page_of_the_real_engine(tiny: Served) -> None:
    send_mixed_load(
        tiny, ["abc", "a much longer prompt than the others, for pages", [98, 99], ["x", "y"]]
    )
    check_pages(tiny.engine._pool)
