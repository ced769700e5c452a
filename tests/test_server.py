# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  (where the server's packages are missing, nothing else is imported)
"""Answers of the HTTP server over an engine without a model: shapes, streams and metadata."""

import asyncio
import concurrent.futures
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

for name in ("fastapi", "uvicorn", "pydantic", "prometheus_client", "jinja2", "httpx", "openai"):
    pytest.importorskip(name)

import httpx
import openai
import specops
from fake_engine import FakeEngine, byte_tokenizer
from serving import (
    HANG_SECONDS,
    STREAM,
    USER,
    Served,
    connect,
    events,
    post,
    serving,
)
from specops.api.errors import ModelError
from specops.server.answers import TextAnswer
from specops.server.chat import ChatFormat
from specops.server.infill import infill_prompt

HTTP = httpx.Client(timeout=HANG_SECONDS)


@pytest.fixture
def client(fake: Served) -> Iterator[openai.OpenAI]:
    with connect(fake) as client:
        yield client


def test_unsent_parameters_come_from_generation_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sent parameter wins even if it equals the API's default."""
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


def test_health_and_model_routes_describe_the_server(fake: Served, client: openai.OpenAI) -> None:
    response = HTTP.get(f"{fake.url}/health")
    assert response.status_code == 200 and response.json() == {"status": "ok"}
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("fake", "model", "specops")
    assert model.model_extra is not None
    assert model.model_extra["methods"] == ["naive", "ngram"]
    assert model.model_extra["speculative_config"]["num_speculative_tokens"] == 3
    paths = {"model", "draft_vocab"}
    assert not paths & set(model.model_extra["speculative_config"]), (
        "paths on the server are not public"
    )
    assert client.models.retrieve("fake").id == "fake"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("an/other")


def test_completion_has_the_openai_shape(client: openai.OpenAI) -> None:
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


def test_per_request_metrics_have_the_vllm_shape(fake: Served) -> None:
    # The request emits 1 token, then bursts of 4, 4 and 2. max_tokens ends the last burst.
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


def test_prompts_may_be_texts_token_ids_or_lists(client: openai.OpenAI) -> None:
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
def test_stop_string_ends_the_text(fake: Served, stream: bool) -> None:
    body = {"prompt": "hello STOP ", "max_tokens": 40, "stop": ["STOP", "zzz"], "stream": stream}
    response = post(fake, "completions", body)
    choices = (
        [event["choices"][0] for event in events(response)]
        if stream
        else response.json()["choices"]
    )
    assert "".join(choice["text"] for choice in choices) == "hello "
    assert choices[-1]["finish_reason"] == "stop"


def test_suffix_is_refused_without_infill_tokens(fake: Served) -> None:
    answer = post(fake, "completions", {"prompt": "a", "suffix": "b"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "suffix"
    assert "the model lacks tokens such as" in answer.json()["error"]["message"]


def test_infill_prompt_places_the_suffix_before_the_middle() -> None:
    own = byte_tokenizer()
    marks = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
    own._tokenizer.add_tokens(marks)
    prompt = infill_prompt(own, "a = ", "\n")
    assert prompt == "<|fim_prefix|>a = <|fim_suffix|>\n<|fim_middle|>"
    ids = own.encode(prompt, add_special_tokens=False)
    assert [own.encode(one, add_special_tokens=False)[0] for one in marks] == [
        ids[0], ids[5], ids[-1]
    ] and len(ids) == 8  # fmt: skip
    with pytest.raises(ValueError, match="suffix requires prompt to be one string"):
        infill_prompt(own, [1, 2], "b")


def test_long_answers_of_a_client_are_rendered_one_at_a_time(
    fake: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rendering several at once would hold the interpreter's lock for the sum of their times."""
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


def test_seeds_are_reported_and_exact_in_javascript(client: openai.OpenAI) -> None:
    def create(**options: Any) -> list[int]:
        done = client.completions.create(model="fake", prompt=["a", "b"], max_tokens=1, **options)
        return [(choice.model_extra or {})["seed"] for choice in done.choices]

    assert create(n=2, seed=-7) == [-7] * 4
    drawn = create(n=2)
    assert drawn[0] == drawn[1] != drawn[2] == drawn[3], "one seed per prompt"
    assert all(0 <= seed < 2**53 for seed in drawn)


def test_completion_logprobs_have_the_openai_shape(client: openai.OpenAI) -> None:
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
    assert zero.choices[0].logprobs.top_logprobs == [{"a": -0.5}], (
        "the sampled token must be listed"
    )


def test_streamed_logprobs_equal_those_of_the_whole_answer(fake: Served) -> None:
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


def test_chat_completion_has_the_openai_shape(client: openai.OpenAI) -> None:
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


def test_reply_object_of_the_client_library_is_accepted_as_message(client: openai.OpenAI) -> None:
    create = client.chat.completions.create
    first: Any = {"role": "user", "content": "x"}
    reply = create(model="fake", messages=[first]).choices[0].message
    again: Any = [first, reply, first]  # includes all empty fields
    assert create(model="fake", messages=again).choices[0].message.content == "x"


def test_chat_stream_has_the_openai_shape(fake: Served) -> None:
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


def test_official_client_reads_a_chat_stream(client: openai.OpenAI) -> None:
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


def test_async_client_streams_twenty_requests(fake: Served) -> None:
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


def test_completion_stream_has_the_openai_shape(fake: Served) -> None:
    body = {"prompt": "ab", "max_tokens": 6, "echo": True, "stream": True}
    parts = events(post(fake, "completions", body))
    assert [part["choices"][0]["text"] for part in parts] == ["ab", "a", "baba", "b", ""]
    assert all("usage" not in part for part in parts)
    assert parts[-1]["choices"][0]["finish_reason"] == "length"
    assert "metrics" in parts[-1]
    body["stream_options"] = {"continuous_usage_stats": True}
    parts = events(post(fake, "completions", body))
    assert [part["usage"]["completion_tokens"] for part in parts] == [0, 1, 5, 6, 6]


def test_request_may_choose_its_method(fake: Served) -> None:
    def spec_tokens(config: dict[str, Any] | None) -> Any:
        body = {"prompt": "abcd", "max_tokens": 20, "speculative_config": config}
        answer = post(fake, "completions", body).json()
        assert answer["choices"][0]["text"] == "abcd" * 5
        counts = answer["metrics"]["speculative_decoding"]
        return counts["num_spec_tokens"], counts["num_accepted_draft_tokens"] > 0

    assert spec_tokens(None) == spec_tokens({}) == (3, True)
    assert spec_tokens({"method": "naive"}) == (0, False)
    assert spec_tokens({"method": "ngram", "num_speculative_tokens": 7}) == (7, True)


def test_choices_share_the_pages_of_their_prompt(fake: Served) -> None:
    before = time.time_ns()
    prompt = f"{before} a long prompt of its own, of many pages"
    body = {"prompt": prompt, "n": 3, "max_tokens": 4}
    answer = post(fake, "completions", body).json()
    assert [c["text"] for c in answer["choices"]] == [prompt[i : i + 4] for i in range(3)]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    again = post(fake, "completions", body).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == (len(prompt) - 1) // 16 * 16


def test_neutral_values_of_unsupported_fields_are_accepted(fake: Served) -> None:
    body = {"prompt": "a", "presence_penalty": 0, "logit_bias": {}, "best_of": 1, "suffix": None}
    assert post(fake, "completions", body | {"user": "u", "top_k": -1}).status_code == 200
    chat = {"messages": [USER], "tools": [], "response_format": {"type": "text"}, "seed": None}
    assert post(fake, "chat/completions", chat | {"frequency_penalty": 0.0}).status_code == 200


@pytest.mark.parametrize(("n", "times_drafting"), [(1, True), (3, True), (3, False)])
def test_timings_report_the_phases_of_a_request(n: int, times_drafting: bool) -> None:
    """Each of ten tokens takes a 20 ms step, reported as 14 ms verification and 4 ms drafting."""
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
        if times_drafting:  # counts the steps after the first token
            assert one["verify_seconds"] == pytest.approx(9 * 0.014)
            assert one["draft_seconds"] == pytest.approx(9 * 0.004)
        else:
            assert one["verify_seconds"] is None and one["draft_seconds"] is None
        tokens = 10 * n - 1
        assert one["tokens_per_second"] == pytest.approx(tokens / one["decode_seconds"])


def test_fields_without_effect_are_accepted(fake: Served) -> None:
    fields = {"metadata": {"run": "7"}, "user": "u", "store": False, "skip_special_tokens": True}
    plain = post(fake, "completions", {"prompt": "abc", "seed": 1}).json()
    with_fields = post(fake, "completions", {"prompt": "abc", "seed": 1} | fields).json()
    assert with_fields["choices"] == plain["choices"]


def test_chat_template_receives_its_variables() -> None:
    template = ChatFormat("{{ messages[0].content }}{% if enable_thinking %}!{% endif %}")
    with serving(FakeEngine(), chat_format=template) as served:
        body = {"messages": [USER | {"content": "abc"}], "max_tokens": 4, "temperature": 0}
        for fields, said, unread in (
            ({}, "abca", None),
            ({"chat_template_kwargs": {"enable_thinking": True}}, "abc!", None),
            ({"chat_template_kwargs": {"enable_thinking": False}}, "abca", None),
            ({"enable_thinking": True}, "abc!", None),
            ({"thinking": {"type": "enabled"}}, "abc!", None),
            ({"thinking": {"type": "disabled"}}, "abca", None),
            ({"chat_template_kwargs": {"x": 1}}, "abca", "chat_template_kwargs.x"),
            ({"reasoning_effort": "high"}, "abca", "reasoning_effort"),
            # The tokenizer has no token that ends the thinking.
            (
                {"thinking": {"type": "enabled", "budget_tokens": 2}},
                "abc!",
                "thinking.budget_tokens",
            ),
        ):
            answer = post(served, "chat/completions", body | fields)
            assert answer.json()["choices"][0]["message"]["content"] == said, fields
            assert answer.headers.get("x-ignored-fields") == unread
        for wrong, param, message in (
            ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "may set"),
            (
                {"thinking": {"type": "enabled"}, "enable_thinking": False},
                "enable_thinking",
                "must agree with thinking, got False and enabled",
            ),
        ):
            error = post(served, "chat/completions", body | wrong).json()["error"]
            assert error["param"] == param and message in error["message"]


def test_tokenize_and_detokenize_are_inverse(fake: Served) -> None:
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


def test_every_answer_has_a_request_id_and_head_is_supported(fake: Served) -> None:
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
