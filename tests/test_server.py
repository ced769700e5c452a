# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  (where the server's packages are missing, nothing else is imported)
"""The HTTP server: the protocol over an engine without a model, the rest over a tiny real one."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import gc
import itertools
import json
import operator
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pages import check_pages

for name in ("fastapi", "uvicorn", "pydantic", "prometheus_client", "jinja2", "httpx", "openai"):
    pytest.importorskip(name)

import httpx
import openai
import specops
import uvicorn
from checkpoints import make_checkpoint
from fake_engine import FakeEngine, byte_tokenizer
from mtp_checkpoints import make_mtp_model
from prometheus_client.parser import text_string_to_metric_families
from serving import HANG_SECONDS, Served, hang_up_on, serving, serving_app, wait_for
from specops.api.config import BUNDLED_MODEL
from specops.api.errors import ModelError
from specops.cli.config_file import arguments_of
from specops.cli.serve import _parser, main
from specops.engine import (
    Engine,
    EngineConfig,
    EngineError,
    RequestOutput,
    SamplingParams,
    SpeculativeConfig,
)
from specops.engine.models import Transformer
from specops.server import Access, make_app
from specops.server.answers import TextAnswer
from specops.server.chat import ChatFormat
from specops.server.connections import bounded_protocol
from specops.server.infill import infill_prompt
from specops.server.metrics import Metrics
from specops.server.protocol import ChatCompletionRequest, CompletionRequest, parse
from specops.service.thread import ThreadClient
from uvicorn.server import ServerState

TESTS = Path(__file__).parent
HTTP = httpx.Client(timeout=HANG_SECONDS)


@pytest.fixture(scope="module")
def fake() -> Iterator[Served]:
    with serving(FakeEngine(step_seconds=0.0005)) as served:
        yield served


@pytest.fixture
def client(fake: Served) -> Iterator[openai.OpenAI]:
    with connect(fake) as client:
        yield client


def test_parameters_that_are_not_sent_are_the_models_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of generation_config.json; what a request sends counts, though it is the API's default."""
    from specops.server import sampling_defaults

    file = tmp_path / "generation_config.json"
    said = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": None, "do_sample": True}
    file.write_text(json.dumps({**said, "eos_token_id": [0], "max_new_tokens": 9}))
    defaults = sampling_defaults("auto", tmp_path)
    assert defaults == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert sampling_defaults(str(tmp_path), tmp_path / "none") == defaults
    assert sampling_defaults("none", tmp_path) == sampling_defaults("auto", tmp_path / "none") == {}
    for value, sentence in (
        (-1, "temperature must be"),
        ("a", "temperature must be"),
        ([], "temp"),
    ):
        file.write_text(json.dumps({"temperature": value}))
        with pytest.raises(ModelError, match=rf"generation_config\.json: .*{sentence}"):
            sampling_defaults("auto", tmp_path)
    file.write_text("[]")
    with pytest.raises(ModelError, match=r"generation_config\.json must hold a JSON object"):
        sampling_defaults("auto", tmp_path)
    with pytest.raises(ModelError, match="generation_config must be auto, none or a directory"):
        sampling_defaults(str(tmp_path / "none"), tmp_path)

    engine, seen = FakeEngine(), []
    add = engine.add_request

    def adding(prompt: Any, params: Any, **more: Any) -> str:
        seen.append((params.temperature, params.top_k, params.top_p, params.min_p))
        return add(prompt, params, **more)

    monkeypatch.setattr(engine, "add_request", adding)
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    with serving(engine, sampling_defaults=defaults) as served:
        for path, body in (
            ("completions", {"prompt": "a", "max_tokens": 2}),
            ("chat/completions", chat),
            ("messages", chat),
            ("responses", {"input": "a", "max_output_tokens": 20}),
        ):
            answer = post(served, path, body)
            assert answer.status_code == 200, answer.text
            if path == "responses":
                assert answer.json()["temperature"] == 0.6
            own = post(served, path, {**body, "temperature": 1.0, "top_k": 0, "min_p": 0.5})
            assert own.status_code == 200, own.text
    assert seen == [(0.6, 20, 0.95, 0.0), (1.0, 0, 0.95, 0.5)] * 4


def connect(served: Served, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{served.url}/v1", api_key=key, max_retries=0, timeout=HANG_SECONDS
    )


def post(served: Served, path: str, body: Any, **options: Any) -> httpx.Response:
    return HTTP.post(f"{served.url}/v1/{path}", json=body, **options)


def events(response: httpx.Response) -> list[Any]:
    """The data of a stream's events, having checked their framing."""
    assert response.headers["content-type"].startswith("text/event-stream")
    frames = response.text.split("\n\n")
    assert frames[-1] == "" and frames[-2] == "data: [DONE]"
    assert all(frame.startswith("data: ") for frame in frames[:-1])
    return [json.loads(frame[6:]) for frame in frames[:-2]]


# ---- what is answered ----


def test_health_and_models(fake: Served, client: openai.OpenAI) -> None:
    response = HTTP.get(f"{fake.url}/health")
    assert response.status_code == 200 and response.json() == {"status": "ok"}
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("fake", "model", "specops")
    assert model.model_extra is not None
    assert model.model_extra["methods"] == ["naive", "ngram"]
    assert model.model_extra["speculative_config"]["num_speculative_tokens"] == 3
    paths = {"model", "draft_vocab"}
    assert not paths & set(model.model_extra["speculative_config"]), "paths of the server's"
    assert client.models.retrieve("fake").id == "fake"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("an/other")


def test_completion(client: openai.OpenAI) -> None:
    done = client.completions.create(model="fake", prompt="abcde", max_tokens=9, seed=5)
    assert done.object == "text_completion" and done.model == "fake" and done.id.startswith("cmpl-")
    (choice,) = done.choices
    assert (choice.text, choice.finish_reason, choice.index) == ("abcdeabcd", "length", 0)
    assert choice.logprobs is None
    assert choice.model_extra == {"seed": 5, "stop_reason": None}
    usage = done.usage
    assert usage is not None and usage.completion_tokens_details is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 9, 14)
    assert usage.completion_tokens_details.accepted_prediction_tokens == 6
    assert usage.completion_tokens_details.rejected_prediction_tokens == 0
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 0


def test_per_request_metrics_have_vllm_s_shape(fake: Served) -> None:
    # 1 token, then bursts of 4, 4 and 2: the last is cut by max_tokens.
    body = post(fake, "completions", {"prompt": "abcde", "max_tokens": 11}).json()
    assert body["metrics"] == {
        "speculative_decoding": {
            "mean_acceptance_length": 1 + 7 / 3,
            "draft_acceptance_rate": 7 / 9,
            "acceptance_histogram": [0, 1, 0, 2],
            "num_spec_steps": 3,
            "num_accepted_draft_tokens": 7,
            "num_draft_tokens": 9,
            "num_spec_tokens": 3,
        }
    }


def test_prompts_in_all_shapes(client: openai.OpenAI) -> None:
    create = client.completions.create
    ids = [98, 99]  # "ab"
    expected: list[tuple[Any, list[str]]] = [
        ("ab", ["aba"]),
        (["ab", "xyz"], ["aba", "xyz"]),
        (ids, ["aba"]),
        ([ids, [100]], ["aba", "ccc"]),
    ]
    for prompt, texts in expected:
        done = create(model="fake", prompt=prompt, max_tokens=3)
        assert [choice.text for choice in done.choices] == texts
        assert [choice.index for choice in done.choices] == list(range(len(texts)))
    done = create(model="fake", prompt=["abc", "xy"], max_tokens=3, n=2, echo=True)
    assert [c.text for c in done.choices] == ["abcabc", "abcbca", "xyxyx", "xyyxy"]
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (5, 12)
    assert create(model="fake", prompt=ids, max_tokens=1, echo=True).choices[0].text == "aba"


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_cut_the_text(fake: Served, stream: bool) -> None:
    body = {"prompt": "hello STOP ", "max_tokens": 40, "stop": ["STOP", "zzz"], "stream": stream}
    response = post(fake, "completions", body)
    choices = (
        [event["choices"][0] for event in events(response)]
        if stream
        else response.json()["choices"]
    )
    assert "".join(choice["text"] for choice in choices) == "hello "
    assert choices[-1]["finish_reason"] == "stop"


def test_a_suffix_needs_tokens_for_it(fake: Served) -> None:
    answer = post(fake, "completions", {"prompt": "a", "suffix": "b"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "suffix"
    assert "has no tokens for it" in answer.json()["error"]["message"]


def test_a_suffix_stands_behind_what_is_asked_for() -> None:
    own = byte_tokenizer()
    marks = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
    own._tokenizer.add_tokens(marks)
    prompt = infill_prompt(own, "a = ", "\n")
    assert prompt == "<|fim_prefix|>a = <|fim_suffix|>\n<|fim_middle|>"
    ids = own.encode(prompt, add_special_tokens=False)
    assert [own.encode(one, add_special_tokens=False)[0] for one in marks] == [
        ids[0], ids[5], ids[-1]
    ] and len(ids) == 8  # fmt: skip
    with pytest.raises(ValueError, match="needs a prompt that is one text"):
        infill_prompt(own, [1, 2], "b")


def test_long_answers_of_a_client_are_spelt_one_at_a_time(
    fake: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them would have the interpreter's lock for as long as all of them together."""
    at_once, most = 0, 0
    render = TextAnswer._render

    def watched(*args: Any) -> bytes:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        time.sleep(0.02)
        at_once -= 1
        return render(*args)

    monkeypatch.setattr(TextAnswer, "_render", watched)
    body = {"prompt": "a" * 200, "max_tokens": 1, "prompt_logprobs": 100}
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(post, fake, "completions", body) for _ in range(4)]
        for answer in answers:
            (choice,) = answer.result().json()["choices"]
            assert len(choice["prompt_logprobs"]) == 200
    assert most == 1


def test_seeds_are_told_and_exact_in_javascript(client: openai.OpenAI) -> None:
    def create(**options: Any) -> list[int]:
        done = client.completions.create(model="fake", prompt=["a", "b"], max_tokens=1, **options)
        return [(choice.model_extra or {})["seed"] for choice in done.choices]

    assert create(n=2, seed=-7) == [-7] * 4
    drawn = create(n=2)
    assert drawn[0] == drawn[1] != drawn[2] == drawn[3], "one seed per prompt"
    assert all(0 <= seed < 2**53 for seed in drawn)


def test_logprobs_of_completions(client: openai.OpenAI) -> None:
    done = client.completions.create(model="fake", prompt="aé", max_tokens=4, logprobs=2)
    logprobs = done.choices[0].logprobs
    assert logprobs is not None and logprobs.model_extra is not None
    assert logprobs.tokens == ["a", "bytes:\\xc3", "bytes:\\xa9", "a"]
    assert logprobs.model_extra["bytes"] == [[97], [0xC3], [0xA9], [97]]
    assert logprobs.text_offset == [0, 1, 1, 2]
    assert logprobs.token_logprobs == [-0.5] * 4
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[0] == {"a": -0.5, "b": -1.5}
    zero = client.completions.create(model="fake", prompt="a", max_tokens=1, logprobs=0)
    assert zero.choices[0].logprobs is not None
    assert zero.choices[0].logprobs.top_logprobs == [{"a": -0.5}], "the chosen token is there"


def test_streamed_logprobs_are_those_of_the_whole(fake: Served) -> None:
    body = {"prompt": "aéz", "max_tokens": 11, "logprobs": 1}
    whole = post(fake, "completions", body).json()["choices"][0]["logprobs"]
    parts = [e["choices"][0]["logprobs"] for e in events(post(fake, "completions", body | STREAM))]
    for name, values in whole.items():
        assert [value for part in parts if part for value in part[name]] == values

    chat = {"messages": [USER], "max_tokens": 11, "logprobs": True, "top_logprobs": 1}
    whole = post(fake, "chat/completions", chat).json()["choices"][0]["logprobs"]["content"]
    parts = events(post(fake, "chat/completions", chat | STREAM))
    logprobs = [part["choices"][0]["logprobs"] for part in parts]
    assert [value for part in logprobs if part for value in part["content"]] == whole


STREAM = {"stream": True}
USER = {"role": "user", "content": "héllo"}


def test_chat(client: openai.OpenAI) -> None:
    done = client.chat.completions.create(
        model="fake",
        messages=[
            {"role": "developer", "content": "Be"},
            {"role": "user", "content": [{"type": "text", "text": "é"}], "name": "me"},
        ],
        logprobs=True,
        top_logprobs=1,
    )
    assert done.object == "chat.completion" and done.id.startswith("chatcmpl-")
    (choice,) = done.choices
    # The prompt is Be<end>é<end>, and the engine repeats it up to the first end.
    assert (choice.message.role, choice.message.content) == ("assistant", "Be")
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None and choice.logprobs.content is not None
    tokens = choice.logprobs.content
    assert [token.token for token in tokens] == ["B", "e", "<|end|>"]
    assert tokens[0].bytes == [66] and tokens[0].logprob == -0.5
    assert [top.token for top in tokens[0].top_logprobs] == ["B"]
    assert done.usage is not None and done.usage.completion_tokens == 3
    none = client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "x"}])
    assert none.choices[0].logprobs is None


def test_a_conversation_can_be_echoed_as_the_client_library_holds_it(client: openai.OpenAI) -> None:
    create = client.chat.completions.create
    first: Any = {"role": "user", "content": "x"}
    reply = create(model="fake", messages=[first]).choices[0].message
    again: Any = [first, reply, first]  # with all its empty fields
    assert create(model="fake", messages=again).choices[0].message.content == "x"


def test_chat_stream(fake: Served) -> None:
    body = {"messages": [USER], "max_completion_tokens": 28, "ignore_eos": True, "n": 2}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    parts = events(post(fake, "chat/completions", body))
    assert len({part["id"] for part in parts}) == 1 and parts[0]["id"].startswith("chatcmpl-")
    assert len({part["created"] for part in parts}) == 1
    assert {part["object"] for part in parts} == {"chat.completion.chunk"}
    assert {part["model"] for part in parts} == {"fake"}
    for index in range(2):
        mine = [c for part in parts for c in part["choices"] if c["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + ["length"]
        assert mine[-1]["delta"] == {} and isinstance(mine[-1]["seed"], int)
        text = "".join(c["delta"].get("content", "") for c in mine)
        assert text == ("héllo" * 4 if index == 0 else "éllo" + "héllo" * 3 + "h")
    assert all(part["usage"] is None for part in parts[:-1])
    assert parts[-1]["choices"] == []
    assert parts[-1]["usage"]["completion_tokens"] == 56
    assert parts[-1]["usage"]["prompt_tokens"] == 7
    assert parts[-1]["metrics"]["speculative_decoding"]["num_spec_tokens"] == 3


def test_chat_stream_with_the_official_client(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": "some words "}],
        stream=True,
        stream_options={"include_usage": True},
    )
    text, usage = "", None
    for chunk in stream:
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
        usage = chunk.usage
    assert text == "some words " and usage is not None and usage.completion_tokens == 12


def test_async_client(fake: Served) -> None:
    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{fake.url}/v1", api_key="none") as client:

            async def one(i: int) -> str:
                stream = await client.completions.create(
                    model="fake", prompt=f"<{i}>", max_tokens=20, stream=True
                )
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*(one(i) for i in range(20)))

    texts = asyncio.run(all_of_them())
    assert texts == [(f"<{i}>" * 20)[:20] for i in range(20)]


def test_completion_stream(fake: Served) -> None:
    body = {"prompt": "ab", "max_tokens": 6, "echo": True, "stream": True}
    parts = events(post(fake, "completions", body))
    assert [part["choices"][0]["text"] for part in parts] == ["ab", "a", "baba", "b", ""]
    assert all("usage" not in part for part in parts)
    assert parts[-1]["choices"][0]["finish_reason"] == "length"
    assert "metrics" in parts[-1]
    body["stream_options"] = {"continuous_usage_stats": True}
    parts = events(post(fake, "completions", body))
    assert [part["usage"]["completion_tokens"] for part in parts] == [0, 1, 5, 6, 6]


def test_a_request_s_own_method(fake: Served) -> None:
    def spec_tokens(config: dict[str, Any] | None) -> Any:
        body = {"prompt": "abcd", "max_tokens": 20, "speculative_config": config}
        answer = post(fake, "completions", body).json()
        assert answer["choices"][0]["text"] == "abcd" * 5
        counts = answer["metrics"]["speculative_decoding"]
        return counts["num_spec_tokens"], counts["num_accepted_draft_tokens"] > 0

    assert spec_tokens(None) == spec_tokens({}) == (3, True)
    assert spec_tokens({"method": "naive"}) == (0, False)
    assert spec_tokens({"method": "ngram", "num_speculative_tokens": 7}) == (7, True)


def test_choices_share_the_prompt_s_pages(fake: Served) -> None:
    before = time.time_ns()
    prompt = f"{before} a long prompt of its own, of many pages"
    body = {"prompt": prompt, "n": 3, "max_tokens": 4}
    answer = post(fake, "completions", body).json()
    assert [c["text"] for c in answer["choices"]] == [prompt[i : i + 4] for i in range(3)]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    again = post(fake, "completions", body).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == (len(prompt) - 1) // 16 * 16


def test_neutral_values_of_unsupported_fields_pass(fake: Served) -> None:
    body = {"prompt": "a", "presence_penalty": 0, "logit_bias": {}, "best_of": 1, "suffix": None}
    assert post(fake, "completions", body | {"user": "u", "top_k": -1}).status_code == 200
    chat = {"messages": [USER], "tools": [], "response_format": {"type": "text"}, "seed": None}
    assert post(fake, "chat/completions", chat | {"frequency_penalty": 0.0}).status_code == 200


@pytest.mark.parametrize(("n", "times_drafting"), [(1, True), (3, True), (3, False)])
def test_timings_are_those_of_the_server(n: int, times_drafting: bool) -> None:
    """Ten tokens one by one, each of which takes a step of 20 ms, told to be 14 and 4 of parts."""
    body = {"prompt": "abc", "max_tokens": 10, "n": n, "ignore_eos": True}
    body |= {"speculative_config": {"method": "naive"}}
    with serving(FakeEngine(step_seconds=0.02, times_drafting=times_drafting)) as served:
        begun = time.perf_counter()
        whole = post(served, "completions", body).json()["timings"]
        took = time.perf_counter() - begun
        streamed = events(post(served, "completions", body | STREAM))[-1]["timings"]
        options = {"stream_options": {"include_usage": True}}
        counted = events(post(served, "completions", body | STREAM | options))[-1]["timings"]
    spans = ("queue_seconds", "prefill_seconds", "decode_seconds")
    assert sum(whole[name] for name in spans) <= took
    for one in (whole, streamed, counted):
        parts = {"verify_seconds", "draft_seconds"}
        assert set(one) == {*spans, *parts, "tokens_per_second"} and one["queue_seconds"] >= 0
        assert one["prefill_seconds"] >= 0.02 and one["decode_seconds"] >= 9 * 0.02
        if times_drafting:  # of the steps behind the one with the first token
            assert one["verify_seconds"] == pytest.approx(9 * 0.014)
            assert one["draft_seconds"] == pytest.approx(9 * 0.004)
        else:
            assert one["verify_seconds"] is None and one["draft_seconds"] is None
        tokens = 10 * n - 1
        assert one["tokens_per_second"] == pytest.approx(tokens / one["decode_seconds"])


def test_fields_that_change_nothing_are_taken(fake: Served) -> None:
    fields = {"metadata": {"run": "7"}, "user": "u", "store": False, "skip_special_tokens": True}
    plain = post(fake, "completions", {"prompt": "abc", "seed": 1}).json()
    with_fields = post(fake, "completions", {"prompt": "abc", "seed": 1} | fields).json()
    assert with_fields["choices"] == plain["choices"]


def test_a_template_gets_its_variables() -> None:
    template = ChatFormat("{{ messages[0].content }}{% if enable_thinking %}!{% endif %}")
    with serving(FakeEngine(), chat_format=template) as served:
        body = {"messages": [USER | {"content": "abc"}], "max_tokens": 4, "temperature": 0}
        said = []
        for variables in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
            answer = post(served, "chat/completions", body | {"chat_template_kwargs": variables})
            said.append(answer.json()["choices"][0]["message"]["content"])
        assert said == ["abca", "abc!", "abca"]
        for wrong in (
            {"chat_template_kwargs": {"thinking": True}},
            {"chat_template_kwargs": {"messages": []}},
            {"reasoning_effort": "high"},
        ):
            answer = post(served, "chat/completions", body | wrong)
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert error["param"] == next(iter(wrong)) and "template reads" in error["message"]


def test_tokens_there_and_back(fake: Served) -> None:
    def ask(path: str, body: Any) -> httpx.Response:
        return HTTP.post(f"{fake.url}/{path}", json=body)

    text = "a£ <|end|>"
    answer = ask("tokenize", {"prompt": text, "return_token_strs": True}).json()
    tokens = fake.engine.tokenizer.encode(text)
    assert answer["tokens"] == tokens and answer["count"] == len(tokens)
    assert answer["max_model_len"] == 256 and answer["token_strs"][-1] == "<|end|>"
    assert ask("detokenize", {"tokens": tokens}).json() == {"prompt": text}
    chat = ask("tokenize", {"messages": [USER]}).json()["tokens"]
    assert chat == fake.engine.tokenizer.encode(f"{USER['content']}<|end|>")
    for path, body, param in (
        ("tokenize", {}, "prompt"),
        ("tokenize", {"prompt": "a", "messages": [USER]}, "prompt"),
        ("tokenize", {"messages": [USER | {"role": "developer", "content": []}]}, None),
        ("detokenize", {"tokens": [5000]}, "tokens"),
        ("detokenize", {"tokens": ["a"]}, "tokens.0"),
        ("detokenize", {}, "tokens"),
    ):
        response = ask(path, body)
        assert response.status_code == (200 if param is None else 400), (path, body)
        if param is not None:
            assert response.json()["error"]["param"] == param
    assert ask("tokenize", {"prompt": "a", "model": "other"}).status_code == 404


def test_every_answer_has_a_request_id_and_head_works(fake: Served) -> None:
    for path in ("", "health", "metrics", "version", "v1/models"):
        head = HTTP.head(f"{fake.url}/{path}")
        assert head.status_code == 200 and head.content == b""
    assert HTTP.get(f"{fake.url}/version").json() == {"version": specops.__version__}
    own = {"x-request-id": "mine-1"}
    for body in ({"prompt": "a"}, {"prompt": "a", "stream": True}, {"prompt": 5}):
        assert post(fake, "completions", body, headers=own).headers["x-request-id"] == "mine-1"
        made = post(fake, "completions", body).headers["x-request-id"]
        assert made.startswith("req-") and len(made) == 36
    unsafe = post(fake, "completions", {"prompt": "a"}, headers={"x-request-id": "a b"})
    assert unsafe.headers["x-request-id"].startswith("req-")


# ---- what is refused ----

TEXT: dict[str, Any] = {"prompt": "a"}
CHAT: dict[str, Any] = {"messages": [USER]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
REFUSALS: list[tuple[dict[str, Any], int, str | None, str]] = [
    # values
    (TEXT | {"temperature": -1}, 400, "temperature", "must be in"),
    (TEXT | {"top_p": 0}, 400, "top_p", "must be above 0"),
    (TEXT | {"top_k": -2}, 400, "top_k", "at least 0"),
    (TEXT | {"min_p": 2}, 400, "min_p", "must be in"),
    (TEXT | {"n": 0}, 400, "n", "at least 1"),
    (TEXT | {"n": 100}, 400, "n", "100 choices, more than the 64 that may wait"),
    (TEXT | {"max_tokens": -1}, 400, "max_tokens", "at least 0"),
    (CHAT | {"max_tokens": 0}, 400, "max_tokens", "at least 1, got 0"),
    (CHAT | {"max_completion_tokens": 0}, 400, "max_completion_tokens", "at least 1, got 0"),
    (TEXT | {"seed": 2**64}, 400, "seed", "at most"),
    (TEXT | {"logprobs": 101}, 400, "logprobs", "at most 100"),
    (TEXT | {"logprobs": 101, "echo": True}, 400, "logprobs", "at most 100"),
    (TEXT | {"prompt_logprobs": 101}, 400, "prompt_logprobs", "at most 100"),
    (TEXT | {"prompt_logprobs": -1}, 400, "prompt_logprobs", "at least 0"),
    (CHAT | {"prompt_logprobs": 101}, 400, "prompt_logprobs", "at most 100"),
    (
        TEXT | {"prompt": ["a" * 256] * 11, "prompt_logprobs": 100},
        400,
        "prompt_logprobs",
        "make 284416 numbers with n and the prompts' tokens",
    ),
    (
        TEXT | {"prompt": ["a" * 256] * 22, "logprobs": 49, "echo": True, "n": 1},
        400,
        "prompt_logprobs",
        "(or logprobs with echo) make 281600 numbers",
    ),
    (TEXT | {"stop": [""]}, 400, "stop", "non-empty"),
    (TEXT | {"stop": ["a"] * 17}, 400, "stop", "at most 16 elements"),
    (TEXT | {"stop_token_ids": [1] * 257}, 400, "stop_token_ids", "at most 256 elements"),
    (TEXT | {"bad_words": ["a"] * 300_000}, 400, "bad_words", "at most 256 elements"),
    (TEXT | {"bad_words_token_ids": [[1]] * 257}, 400, "bad_words_token_ids", "at most 256"),
    (TEXT | {"store": True}, 400, "store", "not supported"),
    (TEXT | {"skip_special_tokens": False}, 400, "skip_special_tokens", "not supported"),
    (TEXT | {"stop": "a" * 1025}, 400, "stop", "1024 characters"),
    (TEXT | {"stream_options": {}}, 400, "stream_options", "needs stream"),
    (TEXT | {"prompt": [5000]}, 400, "prompt", "outside the vocabulary"),
    (TEXT | {"prompt": [-1]}, 400, "prompt", "outside the vocabulary"),
    (TEXT | {"prompt": ""}, 400, "prompt", "at least one token"),
    (TEXT | {"prompt": ["a"] * 257}, 400, "prompt", "at most 256 prompts"),
    (TEXT | {"prompt": "\ud800"}, 400, "prompt", "not valid Unicode"),
    (TEXT | {"\ud800": 1}, 400, "\ud800", "unknown field"),
    (TEXT | {"model": "\ud800"}, 400, "model", "half of a surrogate pair"),
    (CHAT | {"metadata": {"\ud800": "a"}}, 400, "metadata", "half of a surrogate pair"),
    (CHAT | {"messages": [USER | {"\ud800": 1}]}, 400, "messages.0", "not valid Unicode"),
    (CHAT | {"top_logprobs": 2}, 400, "top_logprobs", "needs logprobs"),
    (CHAT | {"max_tokens": 3, "max_completion_tokens": 4}, 400, "max_tokens", "must be absent"),
    (CHAT | {"messages": []}, 400, "messages", "at least one message, got none"),
    (CHAT | {"messages": [{"role": "robot", "content": ""}]}, 400, "messages.0.role", "'robot'"),
    (CHAT | {"messages": [{"content": ""}]}, 400, "messages.0.role", "is missing"),
    (CHAT | {"messages": [{"role": 3, "content": ""}]}, 400, "messages.0.role", "got '3'"),
    (
        CHAT | {"messages": [{"role": "tool", "content": "", "tool_call_id": "1"}]},
        400,
        "tools",
        "the model's chat template has none",
    ),
    # the request's own method
    (TEXT | {"speculative_config": {"method": "magic"}}, 400, "speculative_config", "naive, ngram"),
    (TEXT | {"speculative_config": {"method": "mtp"}}, 400, "speculative_config", "cannot run"),
    (TEXT | {"speculative_config": {"model": "/x"}}, 400, "speculative_config", "server's alone"),
    (TEXT | {"speculative_config": {"k": 3}}, 400, "speculative_config", "no field 'k'"),
    (
        TEXT | {"speculative_config": {"num_speculative_tokens": 2**31 - 1}},
        400,
        "speculative_config",
        "at most 511",
    ),
    (
        TEXT | {"speculative_config": {"verify_strategy": "top_p"}},
        400,
        "speculative_config",
        "must be one of target_match, greedy, rejection, block, topp",
    ),
    (TEXT | {"presence_penalty": 2.5}, 400, "presence_penalty", "must be in [-2, 2], got 2.5"),
    (TEXT | {"frequency_penalty": -3}, 400, "frequency_penalty", "must be in [-2, 2], got -3"),
    (TEXT | {"repetition_penalty": 0}, 400, "repetition_penalty", "must be above 0"),
    (TEXT | {"typical_p": 0}, 400, "typical_p", "must be above 0"),
    (TEXT | {"typical_p": 1.5}, 400, "typical_p", "must be in [0, 1]"),
    (TEXT | {"logit_bias": {"5": 101}}, 400, "logit_bias", "must be in [-100, 100], got 101"),
    (TEXT | {"logit_bias": {"a": 1}}, 400, "logit_bias", "token ids as keys, got 'a'"),
    (TEXT | {"logit_bias": {"-1": 1}}, 400, "logit_bias", "token ids as keys, got '-1'"),
    (TEXT | {"logit_bias": {"5": "1"}}, 400, "logit_bias.5", "must be a number, got a string"),
    (TEXT | {"logit_bias": [5]}, 400, "logit_bias", "got a list"),
    (TEXT | {"bad_words": [""]}, 400, "bad_words", "non-empty strings"),
    (TEXT | {"bad_words": "a"}, 400, "bad_words", "must be a list, got a string"),
    (TEXT | {"bad_words_token_ids": [[]]}, 400, "bad_words_token_ids", "1 to 64 tokens"),
    (TEXT | {"bad_words_token_ids": [5]}, 400, "bad_words_token_ids.0", "must be a list"),
    (TEXT | {"allowed_token_ids": []}, 400, "allowed_token_ids", "at least one"),
    (TEXT | {"allowed_token_ids": [-1]}, 400, "allowed_token_ids", "token ids, got -1"),
    (TEXT | {"min_tokens": -1}, 400, "min_tokens", "at least 0"),
    (TEXT | {"min_tokens": 9, "max_tokens": 8}, 400, "min_tokens", "at most max_tokens=8, got 9"),
    (TEXT | {"stop_token_sequences": [[1] * 65]}, 400, "stop_token_sequences", "1 to 64 tokens"),
    (TEXT | {"think_end_token_id": 5}, 400, "think_end_token_id", "must come with"),
    (TEXT | {"reasoning_max_tokens": -1}, 400, "reasoning_max_tokens", "at least 0"),
    (TEXT | {"response_max_tokens": 0}, 400, "response_max_tokens", "at least 1"),
    (TEXT | {"think_inject_token_ids": [1]}, 400, "think_inject_token_ids", "must come with"),
    (TEXT | {"stop": 1}, 400, "stop", "stop must be a string or a list, got an integer"),
    (TEXT | {"user": 1}, 400, "user", "user must be a string, got an integer"),
    (TEXT | {"stream_options": []}, 400, "stream_options", "must be an object, got a list"),
    (TEXT | {"stop": ["a", "b\udc00"]}, 400, "stop", "half of a surrogate pair"),
    # what is not there
    (TEXT | {"best_of": 2}, 400, "best_of", "not supported"),
    (TEXT | {"suffix": "x"}, 400, "suffix", "not supported"),
    (CHAT | {"tools": [TOOL]}, 400, "tools", "the model's chat template has none"),
    (CHAT | {"tools": [{"type": "function"}]}, 400, "tools.0.function", "is missing"),
    (CHAT | {"tool_choice": "required"}, 400, "tool_choice", "needs tools"),
    (TEXT | {"tools": [TOOL]}, 400, "tools", "not supported"),
    (CHAT | {"response_format": {"type": "xml"}}, 400, "response_format.type", "json_schema"),
    (CHAT | {"reasoning_effort": "low"}, 400, "reasoning_effort", "template reads"),
    (TEXT | {"temprature": 1}, 400, "temprature", "unknown field temprature"),
    (CHAT | {"prompt": "a"}, 400, "prompt", "unknown field prompt"),
    (
        CHAT | {"messages": [USER | {"tool_calls": [{}]}]},
        400,
        "messages.0.tool_calls",
        "unknown field",
    ),
    (
        CHAT
        | {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        400,
        "messages.0.content.0.type",
        "'text', got 'image_url'",
    ),
    (TEXT | {"not a name": 1}, 400, "not a name", "unknown field not a name"),
    # shapes
    ({}, 400, "prompt", "prompt is missing"),
    (TEXT | {"prompt": None}, 400, "prompt", "prompt is missing"),
    (TEXT | {"prompt": {"a": 1}}, 400, "prompt", "must be a text"),
    (TEXT | {"prompt": []}, 400, "prompt", "none of them empty"),
    (TEXT | {"prompt": [[1], []]}, 400, "prompt", "none of them empty"),
    (TEXT | {"prompt": ["a", 1]}, 400, "prompt", "must be a text"),
    (TEXT | {"prompt": [True]}, 400, "prompt", "must be a text"),
    (TEXT | {"max_tokens": "3"}, 400, "max_tokens", "must be an integer, got a string"),
    (TEXT | {"max_tokens": 3.5}, 400, "max_tokens", "must be an integer, got a number"),
    (TEXT | {"temperature": True}, 400, "temperature", "must be a number, got a boolean"),
    (TEXT | {"stop": [1]}, 400, "stop.0", "must be a string, got an integer"),
    (TEXT | {"stream": "yes"}, 400, "stream", "got a string"),
    (TEXT | {"speculative_config": "ngram"}, 400, "speculative_config", "got a string"),
    (CHAT | {"messages": "hello"}, 400, "messages", "must be a list, got a string"),
    (CHAT | {"messages": [{"role": "user"}]}, 400, "messages.0.content", "is missing"),
    (CHAT | {"messages": [USER | {"content": [1] * 1001}]}, 400, "messages", "1000 parts"),
    (CHAT | {"messages": [1] * 100_000}, 400, "messages.0", "got an integer"),
    (CHAT | {"messages": [USER | {str(i): 1 for i in range(999)}]}, 400, None, "999 mistakes"),
    (CHAT | {"messages": ["hello"]}, 400, "messages.0", "got a string"),
    # elsewhere
    (TEXT | {"model": "other"}, 404, "model", "does not exist"),
    (TEXT | {"prompt": "a" * 256}, 400, "prompt", "exceeds the context"),
    (TEXT | {"prompt": "a" * 100_000}, 400, "prompt", "characters exceeds the context"),
    (TEXT | {"max_tokens": 256}, 400, "prompt", "exceeds the context"),
    (CHAT | {"messages": [USER | {"content": "a" * 256}]}, 400, "messages", "exceeds the context"),
]


@pytest.mark.parametrize("body,status,param,message", REFUSALS)
def test_refusals(
    fake: Served, body: dict[str, Any], status: int, param: str | None, message: str
) -> None:
    path = "chat/completions" if "messages" in body else "completions"
    for stream in ({}, STREAM):
        if stream and body.keys() & {"stream_options", "prompt_logprobs"}:
            continue
        data = json.dumps(stream | body)
        response = HTTP.post(f"{fake.url}/v1/{path}", content=data, headers=JSON)
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert message in error["message"]
        if param is not None:
            assert error["param"] == param
        if message == "not supported":
            assert error["code"] == "unsupported_parameter"
    fake.wait_until_idle()


JSON = {"Content-Type": "application/json"}


ODD: list[Any] = [True, 0, -1, 1.5, 1e308, 10**400, "", "x", [], [[]], [0.5], [None], {}, {"a": 1}]
ODD += ["\ud800", "0", [10**30], {"type": "text"}, [{"role": "user"}], "x" * 5000]


@pytest.mark.parametrize("model", [CompletionRequest, ChatCompletionRequest])
def test_odd_values_are_refused_or_honoured(fake: Served, model: Any) -> None:
    path, good = ("completions", TEXT) if model is CompletionRequest else ("chat/completions", CHAT)
    for name in model.model_fields:
        for value in ODD:
            data = json.dumps({"max_tokens": 2} | good | {name: value})
            response = HTTP.post(f"{fake.url}/v1/{path}", content=data, headers=JSON)
            assert response.status_code in (200, 400, 404, 413), (data[:200], response.text)
            if response.status_code != 200:
                assert 0 < len(response.json()["error"]["message"]) < 1100
    fake.wait_until_idle()


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'"prompt"', b"\xff", b'{"prompt": "a", "top_p": NaN}', b"[" * 100_000],
)
def test_bodies_that_are_no_json_object(fake: Served, content: bytes) -> None:
    response = HTTP.post(f"{fake.url}/v1/completions", content=content, headers=JSON)
    assert response.status_code == 400


@pytest.mark.parametrize(
    "content,message",
    [
        (b'{"prompt": "a", "prompt": "b"}', "prompt is given more than once"),
        (b'{"prompt": "a", "speculative_config": {"k": 1, "k": 1}}', "k is given more than once"),
        (b'{"prompt": "\xff"}', "the body must be UTF-8, got byte 0xff at 12"),
        ('{"prompt": "a"}'.encode("utf-16"), "the body must be UTF-8, got byte 0xff at 0"),
        (b'{"prompt": ' + b"[" * 100_000, "the body is nested more than 128 levels deep"),
    ],
)
def test_bodies_that_say_what_is_wrong(fake: Served, content: bytes, message: str) -> None:
    response = HTTP.post(f"{fake.url}/v1/completions", content=content, headers=JSON)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == message
    assert response.json()["error"]["code"] == "invalid_json"
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_no_such_route_method_or_type(fake: Served) -> None:
    for response, status in (
        (HTTP.get(f"{fake.url}/v1/nothing"), 404),
        (HTTP.get(f"{fake.url}/v1/completions"), 405),
        (HTTP.post(f"{fake.url}/v1/completions", content="prompt=a"), 415),
        (HTTP.post(f"{fake.url}/v1/completions", data={"prompt": "a"}), 415),
    ):
        assert response.status_code == status
        assert response.json()["error"]["type"] == "invalid_request_error"


def test_bodies_over_the_limit() -> None:
    with serving(FakeEngine(), max_body_bytes=1000) as served:
        fits = json.dumps(TEXT).encode()
        fits += b" " * (1000 - len(fits))
        assert send(served, fits).status_code == 200
        for size in (1001, 8000, 15_000):
            content = b" " * size
            for body in (content, iter([content])):  # with and without Content-Length
                response = send(served, body)
                assert response.status_code == 413
                error = response.json()["error"]
                assert (
                    error["code"] == "body_too_large" and "at most 1000 bytes" in error["message"]
                )
        # Far beyond the limit the server hangs up: the answer may be lost, the server is not.
        with pytest.raises(httpx.TransportError):
            raise_for_status = send(served, iter([b" " * 100_000] * 100))
            raise httpx.TransportError(raise_for_status.text)
        assert send(served, fits).status_code == 200


def test_bodies_that_say_that_they_are_too_long() -> None:
    """They are refused before they come."""
    with serving(FakeEngine(), max_body_bytes=1000) as served:
        for length, more in ((1001, []), (20_000, []), (1001, ["Expect: 100-continue"])):
            answer = told(
                served, [f"Content-Length: {length}", *more], b"", until=b"body_too_large"
            )
            assert answer.startswith(b"HTTP/1.1 413")
            # It may be sent all the same, if it is not much longer, and nobody has to be asked.
            assert (b"connection: close" in answer.lower()) == (length > 16_000 or bool(more))


def test_a_body_in_a_coding_that_nobody_decodes(fake: Served) -> None:
    body = json.dumps(TEXT).encode()
    chunked = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    for coding, status in (("chunked", 200), ("Chunked", 200), ("gzip, chunked", 400)):
        answer = told(fake, [f"Transfer-Encoding: {coding}"], chunked, until=b"}")
        assert answer.startswith(b"HTTP/1.1 %d" % status)
        assert (b"Transfer-Encoding must be chunked, got gzip, chunked" in answer) == (
            status == 400
        )


def told(served: Served, headers: list[str], body: bytes, *, until: bytes) -> bytes:
    """What is answered to a request for completions in one piece, up to a mark."""
    head = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json", *headers]
    address = ("127.0.0.1", int(served.url.rpartition(":")[2]))
    with socket.create_connection(address, timeout=HANG_SECONDS) as asked:
        asked.sendall("\r\n".join([*head, "", ""]).encode() + body)
        answer = b""
        while until not in answer:
            got = asked.recv(65536)
            assert got, answer
            answer += got
    return answer


def send(served: Served, content: Any) -> httpx.Response:
    return HTTP.post(f"{served.url}/v1/completions", content=content, headers=JSON)


def test_api_key() -> None:
    with serving(FakeEngine(), api_keys=["geheim ß"]) as served:
        for headers in ({}, {"Authorization": "Bearer x"}, {"Authorization": "geheim"}):
            for method, path in (("POST", "completions"), ("GET", "models")):
                response = HTTP.request(method, f"{served.url}/v1/{path}", headers=headers)
                assert response.status_code == 401
                error = response.json()["error"]
                assert error["type"] == "authentication_error"
                assert error["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
        for path in ("health", "metrics", ""):
            assert HTTP.get(f"{served.url}/{path}").status_code == 200
    with (
        serving(FakeEngine(), api_keys=["other", "geheim"]) as served,
        connect(served, "geheim") as client,
    ):
        assert client.completions.create(model="fake", prompt="a").choices[0].text == "a" * 16


def test_a_full_queue() -> None:
    config = EngineConfig(
        served_model_name="fake", max_num_seqs=1, max_waiting=2, max_model_len=256
    )
    engine = FakeEngine(config)
    engine.holds_at = 5  # until all have been refused
    with serving(engine) as served:
        long = {"prompt": "abc", "max_tokens": 250, "speculative_config": {"method": "naive"}}
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            running = pool.submit(post, served, "completions", long)
            wait_for(lambda: engine.num_running == 1)
            waiting = [pool.submit(post, served, "completions", long) for _ in range(2)]
            wait_for(lambda: engine.num_waiting == 2)
            for stream in ({}, STREAM):
                refused = post(served, "completions", TEXT | stream)
                assert refused.status_code == 429
                assert int(refused.headers["retry-after"]) >= 1
                error = refused.json()["error"]
                assert error["type"] == "rate_limit_error" and error["code"] == "queue_full"
            with pytest.raises(openai.RateLimitError), connect(served) as client:
                client.completions.create(model="fake", prompt="a")
            engine.holds_at = None
            for future in (running, *waiting):
                assert future.result().status_code == 200
        assert post(served, "completions", TEXT).status_code == 200
        # n choices are taken or refused as a whole.
        assert post(served, "completions", TEXT | {"n": 3}).status_code == 400
        assert post(served, "completions", TEXT | {"n": 2}).status_code == 200
        served.wait_until_idle()


def test_a_greedy_key_leaves_room_for_others() -> None:
    config = EngineConfig(
        served_model_name="fake", max_num_seqs=1, max_waiting=8, max_model_len=256
    )
    engine = FakeEngine(config)
    engine.holds_at = 5
    keys = [{"Authorization": f"Bearer {key}"} for key in "abc"]
    with serving(engine, api_keys="abc") as served:
        body = {"prompt": "abc", "max_tokens": 250, "speculative_config": {"method": "naive"}}
        with concurrent.futures.ThreadPoolExecutor(32) as pool:
            running = pool.submit(post, served, "completions", body, headers=keys[0])
            wait_for(lambda: engine.num_running == 1)
            # Of eight places the first key gets four, the second half of the four that are left.
            asked: dict[int, list[Any]] = {}
            for number, places in ((0, 4), (1, 2), (2, 1)):
                asked[number] = [
                    pool.submit(post, served, "completions", body, headers=keys[number])
                    for _ in range(places)
                ]
                so_far = sum(map(len, asked.values()))
                wait_for(lambda so_far=so_far: engine.num_waiting == so_far)
                refused = post(served, "completions", body, headers=keys[number])
                assert refused.status_code == 429
                assert f"{places} requests of this API key" in refused.json()["error"]["message"]
            engine.holds_at = None
            for future in (running, *asked[0], *asked[1], *asked[2]):
                assert future.result().status_code == 200
        too_many = post(served, "completions", TEXT | {"n": 5}, headers=keys[0])
        assert too_many.status_code == 400 and "the 4 that may wait" in too_many.text
        assert post(served, "completions", TEXT | {"n": 4}, headers=keys[0]).status_code == 200
        served.wait_until_idle()


def test_without_keys_addresses_are_clients() -> None:
    """A trusted proxy says where a request comes from; until two have come one has all."""
    config = EngineConfig(
        served_model_name="fake", max_num_seqs=1, max_waiting=8, max_model_len=256
    )
    engine = FakeEngine(config)
    greedy, normal, same = (
        {"X-Forwarded-For": address}
        for address in (
            "2001:db8::1",
            "203.0.113.7",
            "2001:db8::ffff:1",
        )  # one network, and another
    )
    body = {"prompt": "abc", "max_tokens": 250, "speculative_config": {"method": "naive"}}
    with (
        serving(engine, access=Access(forwarded_allow_ips=["127.0.0.0/8"])) as served,
        concurrent.futures.ThreadPoolExecutor(32) as pool,
    ):
        assert post(served, "completions", TEXT | {"n": 8}, headers=greedy).status_code == 200
        assert post(served, "completions", TEXT, headers=normal).status_code == 200
        engine.holds_at = 5
        running = [pool.submit(post, served, "completions", body, headers=greedy)]
        wait_for(lambda: engine.num_running == 1)
        running += [pool.submit(post, served, "completions", body, headers=same) for _ in range(4)]
        wait_for(lambda: engine.num_waiting == 4)
        refused = post(served, "completions", body, headers=greedy)
        assert refused.status_code == 429
        assert "4 requests of this address" in refused.json()["error"]["message"]
        running.append(pool.submit(post, served, "completions", body, headers=normal))
        wait_for(lambda: engine.num_waiting == 5)
        assert {owners[0] for owners in engine.owners} == {
            "from 2001:db8::/64",
            "from 203.0.113.7",
        }
        engine.holds_at = None
        assert {future.result().status_code for future in running} == {200}
        served.wait_until_idle()


def test_lists_are_counted_before_they_are_looked_at(fake: Served) -> None:
    ids = [1] * 256
    for prompt in ([*ids, "no id"], [[1], [*ids, "no id"]]):
        error = post(fake, "completions", {"prompt": prompt}).json()["error"]
        assert error["code"] == "context_length_exceeded" and "of 257 tokens" in error["message"]
    many = {str(i): 0.5 for i in range(4097)}
    error = post(fake, "completions", TEXT | {"logit_bias": many}).json()["error"]
    assert error["param"] == "logit_bias" and "at most 4096 elements" in error["message"]
    # A body that is checked beside the event loop is checked as any other.
    long = {"prompt": "a", "allowed_token_ids": [5] * 20000, "temperature": -1}
    assert post(fake, "completions", long).json()["error"]["param"] == "temperature"


# ---- clients that leave, engines that fail ----


@pytest.fixture
def slow() -> Iterator[Served]:
    """An engine that is at work on a LONG request until something ends it."""
    config = EngineConfig(served_model_name="fake", max_num_seqs=1, max_model_len=100_000)
    engine = FakeEngine(config, step_seconds=0.005)
    engine.holds_at = 1000
    with serving(engine) as served:
        yield served


LONG = {"prompt": "abc", "max_tokens": 90_000, "speculative_config": {"method": "naive"}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_client_that_leaves_frees_its_pages(slow: Served, path: str, stream: bool) -> None:
    body = dict(LONG) | {"stream": stream, "ignore_eos": True, "n": 2}
    if path != "completions":
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    running = hang_up_on(slow, path, body)
    wait_for(lambda: slow.engine.num_running == 1)
    queued = hang_up_on(slow, path, body)
    wait_for(lambda: slow.engine.num_waiting == 3)
    assert slow.engine.num_free_pages < slow.engine.num_pages
    if stream:
        assert b"200 OK" in running.recv(100)
    queued.close()
    wait_for(lambda: slow.engine.num_waiting == 1)
    running.close()
    slow.wait_until_idle()
    assert slow.engine.num_uncollected == 0
    wait_for(lambda: counters(slow)["specops:request_success_total"]["abort"] == 4)


def test_a_client_that_leaves_in_the_middle_of_its_body(slow: Served) -> None:
    host, port = slow.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b'Content-Length: 100\r\n\r\n{"prompt"'
        )
    assert post(slow, "completions", TEXT).status_code == 200
    slow.wait_until_idle()


def health(served: Served) -> tuple[int, str]:
    response = HTTP.get(f"{served.url}/health")
    return response.status_code, response.json()["status"]


STEP_FAILED = "a step of the engine failed; the server's log says why"


def assert_failed(response: httpx.Response, message: str = STEP_FAILED) -> None:
    """An error in the place of an answer, or at the end of a stream."""
    if response.headers["content-type"].startswith("text/event-stream"):
        assert response.status_code == 200
        body = events(response)[-1]
    else:
        assert response.status_code == 500
        body = response.json()
    error = {"message": message, "type": "server_error", "param": None, "code": "internal_error"}
    assert body == {"error": error}


def test_a_failed_step_ends_its_requests_but_not_the_server(slow: Served) -> None:
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        running = pool.submit(post, slow, "completions", LONG | STREAM)
        wait_for(lambda: slow.engine.num_running == 1)
        others = [
            pool.submit(post, slow, "completions", TEXT),
            pool.submit(post, slow, "completions", TEXT | STREAM),
            pool.submit(post, slow, "chat/completions", CHAT | {"n": 2, "max_tokens": 9}),
        ]
        wait_for(lambda: slow.engine.num_running + slow.engine.num_waiting == 5)
        slow.engine.num_failures = 1
        assert_failed(running.result())
        for answer in others:
            assert answer.result().status_code == 200
            assert '"error"' not in answer.result().text
    slow.wait_until_idle()
    assert slow.engine.num_uncollected == 0
    assert health(slow) == (200, "ok")
    assert counters(slow)["specops:request_success_total"]["error"] == 1
    assert counters(slow)["specops:request_success_total"]["abort"] == 0
    slow.engine.num_failures = 1
    with connect(slow) as client, pytest.raises(openai.InternalServerError, match=STEP_FAILED):
        client.completions.create(model="fake", prompt="a")


@pytest.mark.parametrize("error", [RuntimeError("a bug"), EngineError("of nobody")])
def test_a_step_that_fails_without_a_word_ends_everything(slow: Served, error: Exception) -> None:
    step, failures = slow.engine.step, [error]

    def failing() -> Any:
        if failures:
            raise failures.pop()
        return step()

    slow.engine.step = failing
    assert_failed(post(slow, "completions", TEXT))
    slow.wait_until_idle()
    assert post(slow, "completions", TEXT).status_code == 200
    assert slow.engine.num_uncollected == 0


def test_a_request_that_fails_ends_alone() -> None:
    """With all its choices, since an answer has all of them or none."""

    class Failing(FakeEngine):
        def _advance(self, request: Any) -> RequestOutput:
            if request.index == 1 and len(request.token_ids) >= 8:
                request.reason = "error"
                return RequestOutput(request.id, [], "", [], "error", error="as the test wished")
            return super()._advance(request)

    with serving(Failing(step_seconds=0.01)) as served:
        body = {"prompt": "abc", "max_tokens": 100}
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            good = [pool.submit(post, served, "completions", body | more) for more in ({}, STREAM)]
            bad = [
                pool.submit(post, served, "completions", body | {"n": 2} | more)
                for more in ({}, STREAM)
            ]
            for answer in bad:
                assert_failed(
                    answer.result(),
                    "the request failed within the engine; the server's log says why",
                )
            assert good[0].result().json()["choices"][0]["text"] == ("abc" * 40)[:100]
            pieces = [one["choices"] for one in events(good[1].result())]
            assert "".join(one["text"] for each in pieces for one in each) == ("abc" * 40)[:100]
        served.wait_until_idle()
        assert served.engine.num_uncollected == 0
        assert health(served) == (200, "ok")
        assert counters(served)["specops:request_success_total"]["error"] == 4


def test_steps_that_keep_failing_show_in_health(slow: Served) -> None:
    slow.engine.num_failures = 3
    for expected in ((200, "ok"), (200, "ok"), (503, "failing")):
        assert_failed(post(slow, "completions", TEXT))
        assert health(slow) == expected
    assert post(slow, "completions", TEXT).status_code == 200, "it is tried again nevertheless"
    assert health(slow) == (200, "ok")


def test_failures_of_drafters_show_and_leave_the_server_well() -> None:
    with serving(FakeEngine()) as served:
        assert HTTP.get(f"{served.url}/health").json() == {"status": "ok"}
        served.engine.stats.drafter_failures = {"mtp": 0, "hydra": 2}
        assert post(served, "completions", TEXT).status_code == 200  # the engine tells it
        answer = HTTP.get(f"{served.url}/health")
        assert answer.status_code == 200
        assert answer.json() == {"status": "ok", "drafter_failures": {"hydra": 2}}
        told = counters(served)["specops:drafter_failures_total"]
        assert told == {"mtp": 0, "hydra": 2}


@pytest.mark.parametrize("drops", [False, True])
def test_an_engine_that_drops_the_requests_of_a_failed_step_itself(drops: bool) -> None:
    """Nor does it matter whether it does: the thread drops what is left, and the others go on."""
    with serving(FakeEngine()) as served:
        served.engine.keeps_failed = not drops
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            long = {"prompt": "abc", "max_tokens": 250}
            with served.holding(5):
                answers = [pool.submit(post, served, "completions", long) for _ in range(6)]
                wait_for(lambda: served.engine.num_running == 4 and served.engine.num_waiting == 2)
                served.engine.num_failures = 1
                wait_for(lambda: served.engine.num_failures == 0)
            found = [answer.result() for answer in answers]
            failed = [one for one in found if one.status_code != 200]
            assert len(failed) == 4
            for one in failed:
                assert_failed(one)
        served.wait_until_idle()
        assert health(served) == (200, "ok")
        assert post(served, "completions", TEXT).status_code == 200


def test_what_does_not_finish_in_time_is_told_so() -> None:
    engine = FakeEngine()
    long = {"prompt": "abc", "max_tokens": 250, "speculative_config": {"method": "naive"}}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        with serving(engine, drain_timeout=1) as served:
            engine.holds_at = 5
            whole = pool.submit(post, served, "completions", long)
            stream = pool.submit(post, served, "completions", long | STREAM)
            wait_for(lambda: engine.num_running == 2)
        assert whole.result().status_code == 503
        assert whole.result().headers["retry-after"] == "1"
        *_, last, done = [line for line in stream.result().text.splitlines() if line]
        assert done == "data: [DONE]"
        for error in (whole.result().json()["error"], json.loads(last[6:])["error"]):
            assert error["message"] == "the server is shutting down"
    assert engine.num_free_pages == engine.num_pages


@pytest.mark.parametrize("stream", [{}, STREAM])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_request_that_cannot_be_added(stream: dict[str, Any], failing: int) -> None:
    """Neither the first choice, nor one that waited for the first one's pages."""

    class Refusing(FakeEngine):
        def add_request(self, *args: Any, choice_index: int = 0, **options: Any) -> str:
            if choice_index == failing:
                raise RuntimeError("as the test wished")
            return super().add_request(*args, choice_index=choice_index, **options)

    with serving(Refusing(step_seconds=0.002)) as served:
        body = {"prompt": "a prompt of more than one page", "n": 2, "max_tokens": 200} | stream
        message = "the engine could not take the request; the server's log says why"
        assert_failed(post(served, "completions", body), message)
        served.wait_until_idle()
        assert served.engine.num_uncollected == 0
        assert health(served) == (200, "ok")
        assert counters(served)["specops:request_success_total"]["error"] == failing


class CannotAbort(FakeEngine):
    def abort(self, request_id: str) -> bool:
        raise RuntimeError("as the test wished")


class LosesPages(FakeEngine):
    def abort(self, request_id: str) -> bool:
        self.num_pages += 1  # of which one stays taken
        self.lost = True
        return super().abort(request_id)

    @property
    def num_free_pages(self) -> int:
        return super().num_free_pages - getattr(self, "lost", False)


@pytest.mark.parametrize("broken", [CannotAbort, LosesPages])
def test_an_engine_that_does_not_recover_is_reported(broken: type[FakeEngine]) -> None:
    with serving(broken()) as served:
        served.engine.num_failures = 1
        served.engine.keeps_failed = True
        assert_failed(post(served, "completions", TEXT))
        wait_for(lambda: health(served) == (503, "failed"))
        assert_failed(post(served, "completions", TEXT), "the engine has stopped")


def counters(served: Served) -> dict[str, dict[str, float]]:
    """Samples by name, then by the label that tells them apart."""
    text = HTTP.get(f"{served.url}/metrics").text
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k != "model_name"}
            assert ("model_name" in sample.labels) == sample.name.startswith("specops:")
            found.setdefault(sample.name, {})[",".join(labels.values())] = sample.value
    return found


def test_metrics() -> None:
    with serving(FakeEngine()) as served:
        before = counters(served)
        assert before["specops:generation_tokens_total"] == {"": 0}
        assert before["specops:request_success_total"] == {
            "stop": 0,
            "length": 0,
            "abort": 0,
            "error": 0,
        }
        body = {"prompt": "abcde", "max_tokens": 11}
        for _ in range(3):
            assert post(served, "completions", body).status_code == 200
        after = counters(served)
        expected = {
            "prompt_tokens_total": 15,
            "generation_tokens_total": 33,
            "spec_decode_num_drafts_total": 9,
            "spec_decode_num_draft_tokens_total": 27,
            "spec_decode_num_accepted_tokens_total": 21,
            "num_requests_running": 0,
            "num_requests_waiting": 0,
            "kv_cache_usage_perc": 0,
            "num_preemptions_total": 0,
            "time_to_first_token_seconds_count": 3,
            "inter_token_latency_seconds_count": 30,
            "e2e_request_latency_seconds_count": 3,
            "request_queue_time_seconds_count": 3,
            "request_prefill_time_seconds_count": 3,
            "request_decode_time_seconds_count": 3,
            "request_time_per_output_token_seconds_count": 3,
            "iteration_tokens_sum": served.engine.stats.num_rows,
            "request_prompt_tokens_sum": 15,
            "request_generation_tokens_sum": 33,
        }
        for name, value in expected.items():
            assert after[f"specops:{name}"] == {"": value}, name
        assert after["specops:request_success_total"]["length"] == 3
        assert served.engine.stats.num_rows > 0
        assert after["specops:cache_config_info"] == {"16,True,1000": 1}
        assert after["process_resident_memory_bytes"][""] > 1e6
        assert post(served, "completions", {"prompt": 3}).status_code == 400
        HTTP.put(f"{served.url}/v1/nobody")
        HTTP.get(f"{served.url}/v1/models/other")
        answers = counters(served)["specops:http_requests_total"]
        assert answers == {
            "GET,/metrics,200": 2,
            "POST,/v1/completions,200": 3,
            "POST,/v1/completions,400": 1,
            "any,none,404": 1,
            "GET,/v1/models/{name:path},404": 1,
        }
        per_pos = after["specops:spec_decode_num_accepted_tokens_per_pos_total"]
        assert per_pos == {"0": 9, "1": 6, "2": 6}
        assert post(served, "completions", body | SHORT).status_code == 200
        per_pos = counters(served)["specops:spec_decode_num_draft_tokens_per_pos_total"]
        assert per_pos == {"0": 14, "1": 9, "2": 9}, "five steps more, of one draft each"


def test_prompt_tokens_are_counted_as_usage_counts_them() -> None:
    with serving(FakeEngine()) as served:
        body = {"prompt": ["abc", "defgh"], "n": 3, "max_tokens": 4}
        usage = post(served, "completions", body).json()["usage"]
        counted = counters(served)["specops:prompt_tokens_total"]
        assert counted == {"": usage["prompt_tokens"]} == {"": 8}


def test_metrics_are_not_spelt_more_often_than_ten_times_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    metrics = Metrics(ThreadClient(FakeEngine()))  # type: ignore[arg-type]
    texts = []
    for _ in range(12):
        metrics.answer("GET", "/", 200)
        texts.append(metrics.render())
    assert len(set(texts)) == 10 and texts[9] == texts[10] == texts[11]
    now += 1.0
    assert b'status="200"} 12.0' in metrics.render()


def test_the_dashboard_asks_for_what_there_is() -> None:
    """Every query of docs/grafana.json: its series and their labels."""
    dashboard = json.loads((Path(__file__).parent.parent / "docs" / "grafana.json").read_text())
    with serving(FakeEngine()) as served:
        post(served, "completions", {"prompt": "abcde", "max_tokens": 11})
        text = HTTP.get(f"{served.url}/metrics").text
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries.append(dashboard["templating"]["list"][1]["query"])
    assert len(queries) > 25
    asked: set[str] = set()
    for query in queries:
        names = re.findall(r"((?:specops:|process_)\w+)", query)
        assert names and set(names) <= labels.keys(), query
        asked.update(names)
        for by in re.findall(r"by \((\w+)\)", query):
            assert all(by in labels[name] for name in names), query
        matched = re.findall(r"{(\w+)=~", query)
        assert all(label in labels[name] for name in names for label in matched), query
    assert len(asked) > 20


SHORT = {"max_tokens": 10, "speculative_config": {"num_speculative_tokens": 1}}


def mixed_body(draw: random.Random, prompt: Any, methods: list[Any]) -> dict[str, Any]:
    """A request that may be good, bad, or abandoned."""
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


def assault(served: Served, prompts: list[Any]) -> None:
    """200 mixed and failing requests, from many clients, some of which leave early."""
    draw = random.Random(1)
    methods = [{"method": method} for method in served.engine.runnable_methods]
    if "mtp" in served.engine.runnable_methods:
        methods += [{"method": "mtp+ngram"}, {"method": "mtp+suffix"}]

    def one(seed: int) -> int:
        mine = random.Random(seed)
        body = mixed_body(mine, mine.choice(prompts), methods)
        if mine.random() < 0.3:
            connection = hang_up_on(served, "completions", body)
            time.sleep(mine.random() * 0.03)  # wherever it is by then
            connection.close()
            return 0
        response = post(served, "completions", body)
        if response.status_code == 200 and body["stream"]:
            assert "error" not in events(response)[-1]
        return response.status_code

    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        seen = set(pool.map(one, [draw.getrandbits(32) for _ in range(200)]))
    assert {0, 200, 400, 404} <= seen <= {0, 200, 400, 404, 429}
    # A connection of its own: those before it have been accepted, and read, when it is answered.
    answer = httpx.post(f"{served.url}/v1/completions", json={"prompt": prompts[0]})
    assert answer.status_code == 200
    served.wait_until_idle()


def test_no_page_leaks(fake: Served) -> None:
    assault(fake, ["abc", "a much longer prompt than the others, for pages", [98, 99], ["x", "y"]])
    assert fake.engine.num_uncollected == 0


# ---- a real engine ----


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mtp_model(tmp_path_factory.mktemp("model"))


def tiny_engine(model_dir: Path, **options: Any) -> Engine:
    options.setdefault("speculative_config", NGRAM)
    options.setdefault("methods", ("all",))
    options = {"model": str(model_dir), "served_model_name": "tiny", "device": "cpu", **options}
    return Engine(EngineConfig(**options))


NGRAM = SpeculativeConfig.from_dict(
    {"method": "ngram", "num_speculative_tokens": 4, "min_ngram_size": 1}
)


@pytest.fixture(scope="module")
def tiny(model_dir: Path) -> Iterator[Served]:
    with serving(tiny_engine(model_dir, max_num_seqs=4, max_waiting=64)) as served:
        yield served


def test_a_request_of_no_tokens_where_no_response_is_kept(model_dir: Path) -> None:
    """It ends, and so do those beside it, with what they say alone."""
    suffix = SpeculativeConfig.from_dict(
        {"method": "suffix", "num_speculative_tokens": 4, "suffix_decoding_max_cached_requests": 0}
    )
    long = {"prompt": "abcabc", "max_tokens": 120, "temperature": 0, "ignore_eos": True}
    scored = {"prompt": "abcabc", "max_tokens": 0, "echo": True, "logprobs": 0}
    with serving(tiny_engine(model_dir, speculative_config=suffix, max_num_seqs=6)) as served:
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
def test_the_text_is_the_engine_s_with_any_method(
    tiny: Served, model_dir: Path, temperature: float
) -> None:
    prompt = "for i in range(3): for i in range"
    params = SamplingParams(
        max_tokens=60, temperature=temperature, seed=11, logprobs=2, ignore_eos=True
    )
    naive = SpeculativeConfig(method="naive")
    (expected,) = tiny_engine(model_dir, speculative_config=naive).generate([prompt], params)
    body = {"prompt": prompt, "max_tokens": 60, "temperature": temperature, "seed": 11}
    body |= {"logprobs": 2, "ignore_eos": True}
    mtp = {"method": "mtp", "num_speculative_tokens": 5}
    for own in (
        None,
        {"method": "naive"},
        {"method": "ngram", "num_speculative_tokens": 9},
        mtp,
        mtp | {"num_model_steps": 2, "mtp_strategy": "with_ngram"},
        mtp | {"mtp_strategy": "with_suffix"},
    ):
        body["speculative_config"] = own
        whole = post(tiny, "completions", body).json()
        (choice,) = whole["choices"]
        assert choice["text"] == expected.text
        num_drafts = whole["metrics"]["speculative_decoding"]["num_draft_tokens"]
        assert num_drafts > 0 or own is None or own["method"] != "mtp"
        assert choice["logprobs"]["token_logprobs"] == [one.logprob for one in expected.logprobs]
        assert whole["usage"]["completion_tokens"] == len(expected.token_ids)
        parts = events(post(tiny, "completions", body | STREAM))
        assert "".join(part["choices"][0]["text"] for part in parts) == expected.text
    drafted = counters(tiny)["specops:spec_decode_num_draft_tokens_total"][""]
    assert drafted > 0, "n-gram drafting had something to draft"


def test_choices_share_pages_and_keep_their_tokens(tiny: Served, model_dir: Path) -> None:
    prompt = "a prompt that fills more than one page of sixteen tokens, so that choices can share"
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=3, n=3, ignore_eos=True)
    expected = tiny_engine(model_dir).generate([prompt], params)
    hits = counters(tiny)["specops:prefix_cache_hits_total"][""]
    body = {"prompt": prompt, "max_tokens": 12, "seed": 3, "n": 3, "ignore_eos": True}
    answer = post(tiny, "completions", body).json()
    assert [choice["text"] for choice in answer["choices"]] == [one.text for one in expected]
    shared = (len(expected[0].prompt_token_ids) - 1) // 16 * 16
    assert counters(tiny)["specops:prefix_cache_hits_total"][""] == hits + 2 * shared
    tiny.wait_until_idle()


def test_eight_choices_hold_the_pages_of_one_prompt(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny_engine(model_dir, max_num_seqs=8)
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
    # The last token of the prompt, the output and the drafts of a step: two pages of their own.
    assert 12 + 8 <= together <= 12 + 8 * 2
    assert max(pages for _, pages in seen) == together


def test_every_sampling_parameter_reaches_the_engine(tiny: Served, model_dir: Path) -> None:
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
    (expected,) = tiny_engine(model_dir).generate([prompt], params)
    body = {"prompt": prompt, **common, "logit_bias": {"70": 2.5}, **own}
    (choice,) = post(tiny, "completions", body).json()["choices"]
    for name in ("text", "finish_reason", "stop_reason"):
        assert choice[name] == getattr(expected, name)
    read = parse(CompletionRequest, json.dumps(body).encode(), 512).sampling_params()
    assert read == params
    others = {"top_p", "min_p", "n", "stop", "ignore_eos", "logprobs", "structured_output"}
    others |= {"report_drafts"}  # no parameter of sampling: of what a stream tells
    others |= {"prompt_logprobs"}  # tests/test_prompt_logprobs.py
    others |= {"prediction"}  # of chats; tests/conformity.py
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
def test_what_the_model_lacks_is_refused(tiny: Served, field: dict[str, Any]) -> None:
    response = post(tiny, "completions", TEXT | field)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == next(iter(field))


def test_a_stop_is_named(tiny: Served) -> None:
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


def test_a_chat_of_the_real_engine(model_dir: Path) -> None:
    """With the template of its directory, which names a special token of the tokenizer."""
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    config = {"chat_template": template, "eos_token": "<|endoftext|>"}
    (model_dir / "tokenizer_config.json").write_text(json.dumps(config))
    try:
        with serving(tiny_engine(model_dir)) as served:
            prompt = "system: hey<|endoftext|>user: you<|endoftext|>"
            messages = [{"role": "system", "content": "hey"}, {"role": "user", "content": "you"}]
            sampling = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
            text = post(served, "completions", sampling | {"prompt": prompt}).json()
            chat = post(served, "chat/completions", sampling | {"messages": messages}).json()
            assert chat["choices"][0]["message"]["content"] == text["choices"][0]["text"]
            assert chat["usage"]["prompt_tokens"] == text["usage"]["prompt_tokens"]
    finally:
        (model_dir / "tokenizer_config.json").unlink()


def test_a_model_without_a_chat_template(tiny: Served) -> None:
    response = post(tiny, "chat/completions", CHAT)
    assert response.status_code == 400
    assert "no chat template" in response.json()["error"]["message"]


def is_whole(response: httpx.Response, body: dict[str, Any]) -> bool:
    """Whether an answer of one choice, streamed or not, ends by its length."""
    if response.headers["content-type"].startswith("text/event-stream"):
        said = events(response)
        return said[-1].get("choices", [{}])[0].get("finish_reason") == "length"
    return response.status_code == 200 and (
        response.json()["usage"]["completion_tokens"] == body["max_tokens"]
    )


def hold_while_running(
    engine: Engine, count: int, may_go_on: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Have an engine make no step while `count` or more requests run, until it may go on."""
    step = engine.step

    def stepping() -> Any:
        if engine.num_running < count or may_go_on.is_set():
            return step()
        time.sleep(0.001)
        return []

    monkeypatch.setattr(engine, "step", stepping)


@pytest.mark.parametrize("mistake", [ValueError, RuntimeError])
def test_a_failed_step_of_the_real_engine_ends_its_requests(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, mistake: type[Exception]
) -> None:
    """An op that refuses its arguments, and anything else that may happen in a step."""
    real, may_go_on, num_calls = Transformer.forward, threading.Event(), itertools.count()

    def forward(self: Transformer, *args: Any, **options: Any) -> Any:
        states = real(self, *args, **options)
        if may_go_on.is_set() and next(num_calls) == 3:
            raise mistake("as the test wished")
        return states

    monkeypatch.setattr(Transformer, "forward", forward)
    with serving(tiny_engine(model_dir, max_num_seqs=2, max_waiting=64)) as served:
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
        # Who waited for a slot had no part in the step.
        ended = [is_whole(one, body | {"max_tokens": 240}) for one in done]
        assert 1 <= ended.count(False) <= 2
        for answer in itertools.compress(done, map(operator.not_, ended)):
            assert_failed(answer)
        served.wait_until_idle()
        check_pages(engine._pool)
        assert health(served) == (200, "ok")
        again = post(served, "completions", body).json()["choices"][0]
        assert (again["text"], again["finish_reason"]) == (expected["text"], "length")


def test_a_call_with_many_choices_lets_others_in(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newcomer need not wait for one of them to end, and they say what they say alone."""
    many = {"prompt": "abc abc", "n": 8, "max_tokens": 200, "seed": 5, "ignore_eos": True}
    with serving(tiny_engine(model_dir, max_num_seqs=2, max_waiting=64)) as served:
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
        assert len(ended[0].token_ids) == 5, "none of them has ended before"
        assert len(ended) == 9 and engine.stats.num_preemptions == before + 1
        served.wait_until_idle()


def test_no_page_leaks_in_the_real_engine(tiny: Served) -> None:
    assault(tiny, ["abc", "a much longer prompt than the others, for pages", [98, 99], ["x", "y"]])
    check_pages(tiny.engine._pool)


# ---- the command ----

RUN = """
import json, signal, sys
from fake_engine import FakeEngine
from specops.server import listen, make_app, serve
from specops.server.hosts import Access
from specops.service.thread import ThreadClient
limits = json.loads(sys.argv[2])
listener = listen("127.0.0.1", 0)
apart = listen("127.0.0.1", 0) if int(sys.argv[1]) else None
access = Access(allowed_hosts=["127.0.0.1", "x", "somebody"])
engine = FakeEngine()
engine.holds_at = 5
signal.signal(signal.SIGUSR1, lambda *_: setattr(engine, "holds_at", None))
client = ThreadClient(engine)
app = make_app(client, engine.tokenizer, metrics_apart=apart is not None, access=access)
print(*(one.getsockname()[1] for one in (listener, apart) if one), flush=True)
serve(app, listener, log_level="warning", metrics_listener=apart, **limits)
"""


@contextlib.contextmanager
def running_server(*, metrics_apart: bool = False, **limits: Any) -> Iterator[Any]:
    """Run the program RUN; yield its process, its port, and the port of its metrics if apart.

    Its engine gives a request five tokens, and the others after SIGUSR1.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    limits = {"header_timeout": 3600, "drain_timeout": 3600, "max_connections": 40} | limits
    command = [sys.executable, "-c", RUN, str(int(metrics_apart)), json.dumps(limits)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        ports = [int(port) for port in process.stdout.readline().split()]

        def is_up() -> bool:
            try:
                return HTTP.get(f"http://127.0.0.1:{ports[0]}/health").status_code == 200
            except httpx.TransportError:
                return False

        wait_for(is_up)
        yield process, *ports
    finally:
        process.kill()
        process.communicate()


def test_a_request_that_came_while_the_server_was_stopped_is_answered() -> None:
    """The time of its connection is over when the server goes on: it is read all the same."""
    timers: list[Any] = []
    written: list[bytes] = []

    class Clock:
        """The event loop, whose timers are due when the test says so."""

        def call_later(self, seconds: float, call: Any, *args: Any) -> asyncio.Handle:
            timers.append(asyncio.Handle(call, args, asyncio.get_running_loop()))
            return timers[-1]

        def __getattr__(self, name: str) -> Any:
            return getattr(asyncio.get_running_loop(), name)

    class Transport(asyncio.Transport):
        is_closed = False

        def write(self, data: Any) -> None:
            written.append(bytes(data))

        def close(self) -> None:
            self.is_closed = True

        def is_closing(self) -> bool:
            return self.is_closed

        def get_write_buffer_size(self) -> int:
            return 0

    def run_due() -> None:
        due, timers[:] = timers[:], []
        for timer in due:
            if not timer.cancelled():
                timer._run()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        head = [(b"content-length", b"0")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body"})

    async def requests() -> None:
        kind = bounded_protocol(max_connections=10, header_timeout=20.0, write_timeout=20.0)
        config = uvicorn.Config(app, http=kind, lifespan="off", log_level="critical")
        config.load()
        protocol: Any = kind(config, ServerState(), {}, _loop=Clock())  # type: ignore[call-arg]
        transport = Transport()
        protocol.connection_made(transport)
        for count in (1, 2):  # the second is late for the time between requests
            run_due()
            protocol.data_received(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            run_due()
            while protocol.tasks:
                await asyncio.wait(protocol.tasks)
            assert b"".join(written).count(b"HTTP/1.1 200") == count and not transport.is_closed
        run_due()
        run_due()
        assert transport.is_closed, "nothing has come in time"

    asyncio.run(requests())


@pytest.mark.ci
def test_connections_that_ask_nothing_are_closed() -> None:
    with running_server() as (process, port), contextlib.ExitStack() as stack:

        def connection() -> socket.socket:
            address = "127.0.0.1", port
            return stack.enter_context(socket.create_connection(address, HANG_SECONDS))

        # More than may be open at a time: of the address with most the oldest ones end at once,
        # another address gets in, and what has been asked is answered.
        asked = connection()
        body = json.dumps({"prompt": "abc", "max_tokens": 150}).encode()
        head = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        ask = f"POST /v1/completions HTTP/1.1\r\n{head}\r\n\r\n".encode() + body
        asked.sendall(ask)
        wait_for(lambda: running_requests(f"http://127.0.0.1:{port}") == 1)
        crowd = [connection() for _ in range(60)]
        # Forty may be open, five of them by addresses that have no other. One of this address's
        # is the one that has asked.
        for one in crowd[:26]:
            assert one.recv(1) == b""
        other = stack.enter_context(
            socket.create_connection(("127.0.0.1", port), HANG_SECONDS, ("127.0.0.2", 0))
        )
        other.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert other.recv(65536).startswith(b"HTTP/1.1 200")
        # The others, which came with them, have time: it is for want of room that those had to go.
        for one in crowd[26:]:
            one.setblocking(False)
            with pytest.raises(BlockingIOError):
                one.recv(1)
            one.close()
        process.send_signal(signal.SIGUSR1)
        answer_to(asked)
        # A body that does not come keeps no place from another address either.
        crowd = [connection() for _ in range(60)]
        for one in crowd:
            with contextlib.suppress(OSError):  # it may have had to go
                one.sendall(ask[:-1])
        other = stack.enter_context(
            socket.create_connection(("127.0.0.1", port), 10, source_address=("127.0.0.3", 0))
        )
        other.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert other.recv(65536).startswith(b"HTTP/1.1 200")
        for one in crowd:
            one.close()
        # It does not matter how fast what never ends comes: one header, many, a line.
        for endless in (b"a", b"a\r\nX-Next: ", b""):
            fast = connection()
            with contextlib.suppress(OSError):  # it may have ended meanwhile
                head = b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " if endless else b"GET /"
                fast.sendall(head + (endless or b"a") * (1 << 17))
            answer = b"HTTP/1.1 400"  # it is lost where the system ends it for what is not read
            with contextlib.suppress(ConnectionResetError):
                answer = fast.recv(65536)
            assert answer.startswith(b"HTTP/1.1 400")
        # Nor whether they end, in one piece with the body or behind another request.
        long = b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 70_000 + b"\r\n\r\n"
        for before in (b"", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"):
            fast = connection()
            fast.sendall(before + long)
            answer = b""
            with contextlib.suppress(ConnectionResetError):
                while got := fast.recv(65536):
                    answer += got
            assert b"HTTP/1.1 400" in answer and b"The headers exceed 65536 bytes" in answer
        # One that has asked may wait for its answer, and ask again.
        asked = connection()
        for _ in range(2):
            asked.sendall(ask)
            answer_to(asked)


@pytest.mark.ci
def test_a_byte_now_and_then_keeps_no_connection_open() -> None:
    with running_server(header_timeout=1) as (_, port):
        slow = socket.create_connection(("127.0.0.1", port), HANG_SECONDS)
        head = b"GET /health HTTP/1.1\r\nHost: somebody\r\nX-Long: "
        with slow, pytest.raises(OSError):
            for letter in head + b"a" * 6000:  # five minutes of them
                slow.send(bytes([letter]))
                time.sleep(0.05)


def running_requests(url: str) -> float:
    """How many the engine of a server is at work on."""
    lines = HTTP.get(f"{url}/metrics").text.splitlines()
    (line,) = [one for one in lines if one.startswith("specops:num_requests_running{")]
    return float(line.split()[-1])


def is_closed(url: str) -> bool:
    """Whether a server takes no new connection."""
    try:
        httpx.get(f"{url}/health")
    except httpx.TransportError:
        return True
    return False


def answer_to(asked: socket.socket) -> None:
    """Reads the answer to a request of completions."""
    answer = b""
    while b'"usage"' not in answer:
        got = asked.recv(65536)
        assert got, answer
        answer += got
    assert answer.startswith(b"HTTP/1.1 200")


@pytest.mark.ci
def test_metrics_on_a_port_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    with running_server(metrics_apart=True) as (process, port, metrics_port):
        url, own = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{metrics_port}"
        absent = HTTP.get(f"{url}/metrics")
        assert absent.status_code == 404 and "--metrics-port" in absent.json()["error"]["message"]
        assert "/metrics" not in HTTP.get(f"{url}/openapi.json").json()["paths"]
        page = HTTP.get(url).text
        assert 'href="docs"' in page and "Metrics" not in page, "no link that leads nowhere"
        body = {"prompt": "abc", "max_tokens": 250, "speculative_config": {"method": "naive"}}
        with HTTP.stream("POST", f"{url}/v1/completions", json=body | STREAM) as running:
            lines = running.iter_lines()  # the client leaves when they are no longer wanted
            next(lines)
            wait_for(lambda: running_requests(own) == 1)
            assert HTTP.head(f"{own}/metrics").status_code == 200
            rebound = HTTP.get(f"{own}/metrics", headers={"Host": "somewhere.example"})
            assert rebound.status_code == 400
            for path in ("", "health", "v1/models", "openapi.json", "docs"):
                assert HTTP.get(f"{own}/{path}").status_code == 404
            process.send_signal(signal.SIGTERM)
            wait_for(lambda: is_closed(url))
            with httpx.Client() as fresh:  # while the rest drains, one may still look
                assert fresh.get(f"{own}/metrics").status_code == 200
        assert process.wait(HANG_SECONDS) == 0, "the last client has left"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["--port", "0", "--metrics-port", str(port)]) == 2
    message = f"host and metrics_port must be an address to listen on, got 127.0.0.1:{port}"
    assert message in capsys.readouterr().err


def test_sigterm_drains() -> None:
    with running_server() as (process, port):
        url = f"http://127.0.0.1:{port}"
        body = {"prompt": "abc", "max_tokens": 40, "speculative_config": {"method": "naive"}}
        with HTTP.stream("POST", f"{url}/v1/completions", json=body | STREAM) as running:
            lines = running.iter_lines()
            first = next(lines)
            process.send_signal(signal.SIGTERM)
            wait_for(lambda: is_closed(url))
            process.send_signal(signal.SIGUSR1)
            rest = [first, *lines]
        parts = [json.loads(line[6:]) for line in rest if line and line != "data: [DONE]"]
        assert rest[-2] == "data: [DONE]"
        text = "".join(part["choices"][0]["text"] for part in parts)
        assert text == ("abc" * 14)[:40], "what ran has finished"
        assert process.wait(HANG_SECONDS) == 0


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--model", "/no/such/directory"], "/no/such/directory: no such directory"),
        (["--speculative-config", "{"], "speculative_config is not valid JSON"),
        (["--speculative-config", '{"method": "magic"}'], "method must be one of naive, ngram"),
        (
            ["--speculative-config", '{"method": "mtp", "num_model_steps": 2}'],
            "num_model_steps must be at most num_speculative_tokens = 1",
        ),
        (["--max-num-seqs", "0"], "max_num_seqs must be at least 1"),
        (["--max-body-bytes", "0"], "max_body_bytes must be at least 1"),
        (["--header-timeout", "0.5"], "header_timeout must be at least 1"),
        (["--engine-timeout", "0"], "engine_timeout must be at least 1, got 0"),
        (["--port", "99999"], "port must be in [0, 65535], got 99999"),
        (["--metrics-port", "99999"], "metrics_port must be in [0, 65535], got 99999"),
        (["--metrics-port", "8000"], "metrics_port must be another than port, got 8000 twice"),
        (["--host", "no.such.host.invalid"], "host and port must be an address to listen on"),
        (["--allowed-hosts", "a:8000"], "allowed_hosts must be names or addresses without a port"),
        (["--allowed-origins", '["*"]'], "allowed_origins must be such as https://example.com"),
        (["--forwarded-allow-ips", "proxy"], "forwarded_allow_ips must be addresses, networks"),
        (["--api-key", ""], "--api-key must hold a key of at least one character"),
        (["--api-key-file", "/dev/null"], "--api-key-file must hold a key of at least one"),
        (["--api-key-file", "/no/such/file"], "--api-key-file must be a text file"),
    ],
)
def test_mistakes_in_the_arguments(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert message in err and err.startswith("specops: ") and err.count("\n") == 1


def test_missing_weights(
    capsys: pytest.CaptureFixture[str], model_dir: Path, tmp_path: Path
) -> None:
    for missing in ("model.safetensors", "tokenizer.json"):
        directory = tmp_path / missing
        directory.mkdir()
        for file in model_dir.iterdir():
            if file.name != missing:
                (directory / file.name).write_bytes(file.read_bytes())
        assert main(["--model", str(directory)]) == 2
        assert str(directory) in capsys.readouterr().err


def test_a_model_that_the_ops_do_not_run_is_not_served(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, "Qwen3", head_dim=80)
    capsys.readouterr()
    assert main(["--model", str(tmp_path), "--device", "cpu"]) == 2
    assert capsys.readouterr().err == (
        f"specops: {tmp_path / 'config.json'}: head_dim must be 64, 96, 128 or 256, got 80 "
        "(append_attention)\n"
    )


def test_a_broken_chat_template_is_not_served(
    capsys: pytest.CaptureFixture[str], model_dir: Path, tmp_path: Path
) -> None:
    for file in model_dir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    assert main(["--model", str(tmp_path), "--device", "cpu"]) == 2
    assert "the model's chat template is broken" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text,said", [("{% if %}", "chat template is broken"), (None, "No such file")]
)
def test_a_chat_template_that_cannot_be_read_is_not_served(
    capsys: pytest.CaptureFixture[str], model_dir: Path, tmp_path: Path, text: str | None, said: str
) -> None:
    file = tmp_path / "own.jinja"
    if text is not None:
        file.write_text(text)
    given = ["--model", str(model_dir), "--device", "cpu", "--chat-template", str(file)]
    assert main(given) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"specops: chat_template {file}: ") and said in error


def test_a_chat_template_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m.content }}!{% endfor %}")
    engine = FakeEngine()
    app = make_app(
        ThreadClient(engine),  # type: ignore[arg-type]
        engine.tokenizer,
        chat_template=tmp_path / "own.jinja",
    )
    with serving_app(app) as url:
        asked = {"messages": [{"role": "user", "content": "abc"}]}
        tokens = HTTP.post(f"{url}/tokenize", json=asked).json()["tokens"]
    assert engine.tokenizer.decode(tokens) == "abc!"


def test_embeddings_are_refused_by_name(fake: Served) -> None:
    answer = HTTP.post(f"{fake.url}/v1/embeddings", json={"input": "x"})
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["code"] == "unknown_url" and len(error["message"].split(": ")) == 3


def test_unknown_arguments_exit_with_2() -> None:
    with pytest.raises(SystemExit) as exit:
        main(["--no-such-thing"])
    assert exit.value.code == 2


@pytest.mark.parametrize(
    "missing", ["fastapi", "jinja2", "uvicorn", "httptools", "msgspec", "prometheus_client"]
)
def test_without_the_server_s_packages(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    for loaded in list(sys.modules):
        if loaded.startswith(("specops.server", "uvicorn.protocols")) or loaded == missing:
            monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.delattr("specops.server", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    assert main([]) == 2
    assert capsys.readouterr().err == (
        f"specops: the server needs {missing}, which is not installed: "
        "pip install 'specops[server]'\n"
    )


@pytest.mark.skipif(
    not (BUNDLED_MODEL / "model.safetensors").is_file(), reason="the bundled model is not there"
)
def test_options_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "options.yaml"
    parser = _parser()

    def options(text: str, *given: str) -> Any:
        file.write_text(text)
        return parser.parse_args([*arguments_of(str(file), parser), *given])

    text = """
max-num-seqs: 8
num_threads: 1
speculative-config: {method: ngram, num_speculative_tokens: 3}
api-key: [one, "--two"]
enable-prefix-caching: false
enforce-eager: true
"""
    seen = options(text, "--max-num-seqs", "4", "--api-key", "three")
    assert (seen.max_num_seqs, seen.num_threads) == (4, 1)
    assert json.loads(seen.speculative_config) == {"method": "ngram", "num_speculative_tokens": 3}
    assert seen.api_key == ["one", "--two", "three"]
    assert (seen.enable_prefix_caching, seen.enforce_eager) == (False, True)
    assert options("") == parser.parse_args([])
    for text, message in (
        ("max-num-seq: 8", "must hold names of flags, got 'max-num-seq'; the nearest is max-num-s"),
        ("config: x", "must hold names of flags, got 'config'"),
        ("port: 1\nport: 2", "must hold a name once, got 'port' twice"),
        ("enforce-eager: 1", "--enforce-eager must be true or false in a file, got 1"),
        ("port:", "--port must have a value in a file, got None"),
        ("[1, 2]", "must hold names and values"),
        ("a: [", "--config must be a YAML file"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            options(text)
    assert main(["--config", str(tmp_path / "none.yaml")]) == 2


@pytest.mark.ci
def test_every_default_serves_the_bundled_model(monkeypatch: pytest.MonkeyPatch) -> None:
    from specops import server

    seen: dict[str, Any] = {}

    def remember(app: Any, listener: socket.socket, **options: Any) -> int:
        host, port = listener.getsockname()
        listener.close()
        seen.update(options, host=host, port=port)
        return 0

    monkeypatch.setattr(server, "serve", remember)
    assert main([]) == 0
    assert (seen["host"], seen["port"]) == ("127.0.0.1", 8000)


def test_a_request_leaves_no_circles_of_references(fake: Served) -> None:
    """Else Python's search for them would stop everybody (service/garbage.py)."""
    whole = {"prompt": "a", "max_tokens": 4}
    stream = whole | {"stream": True, "max_tokens": 200}
    full = whole | {"n": 40, "max_tokens": 200}  # two of these are more than may wait
    wrong = whole | {"speculative_config": {"method": "suffix"}}

    def ask() -> None:
        statuses = [post(fake, "completions", body).status_code for body in (whole, wrong)]
        assert statuses == [200, 400] and post(fake, "no-such-route", {}).status_code == 404
        assert len(events(post(fake, "completions", stream))) > 1
        with HTTP.stream("POST", f"{fake.url}/v1/completions", json=stream) as response:
            next(response.iter_lines())
        fake.wait_until_idle()
        fake.engine.num_failures = 1
        assert post(fake, "completions", whole).status_code == 500
        with concurrent.futures.ThreadPoolExecutor(4) as threads, fake.holding(1):
            told = [threads.submit(post, fake, "completions", full) for _ in range(4)]
            wait_for(lambda: any(one.done() for one in told))
        assert {one.result().status_code for one in told} == {200, 429}
        fake.wait_until_idle()

    ask()  # what is made once
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        ask()
        time.sleep(0.05)  # the server's thread ends its last task
        gc.collect()
        kinds = Counter(f"{type(one).__module__}.{type(one).__name__}" for one in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert not [kind for kind in kinds if kind.startswith(("specops", "uvicorn", "starlette"))], (
        kinds
    )
