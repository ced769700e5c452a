# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  (where the server's packages are missing, nothing else is imported)
"""Requests that the HTTP server refuses: invalid bodies, missing keys and full queues."""

import concurrent.futures
import json
import socket
from typing import Any

import pytest

for name in ("fastapi", "uvicorn", "pydantic", "prometheus_client", "jinja2", "httpx", "openai"):
    pytest.importorskip(name)

import httpx
import openai
from fake_engine import FakeEngine
from serving import (
    CHAT,
    HANG_SECONDS,
    JSON,
    STREAM,
    TEXT,
    USER,
    Served,
    connect,
    post,
    serving,
    wait_for,
)
from specops.engine import (
    EngineConfig,
)
from specops.server import Access
from specops.server.protocol import ChatCompletionRequest, CompletionRequest

HTTP = httpx.Client(timeout=HANG_SECONDS)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
REFUSALS: list[tuple[dict[str, Any], int, str | None, str]] = [
    # values
    (TEXT | {"temperature": -1}, 400, "temperature", "must be in"),
    (TEXT | {"top_p": 0}, 400, "top_p", "must be above 0"),
    (TEXT | {"top_k": -2}, 400, "top_k", "at least 0"),
    (TEXT | {"min_p": 2}, 400, "min_p", "must be in"),
    (TEXT | {"n": 0}, 400, "n", "at least 1"),
    (TEXT | {"n": 100}, 400, "n", "n times the number of prompts must be at most 64, got 100"),
    (TEXT | {"max_tokens": -2}, 400, "max_tokens", "at least 0"),
    (CHAT | {"max_completion_tokens": -2}, 400, None, "at least 0"),
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
        "must lead to at most 262144 log-probabilities of prompts",
    ),
    (
        TEXT | {"prompt": ["a" * 256] * 22, "logprobs": 49, "echo": True, "n": 1},
        400,
        "prompt_logprobs",
        "alternatives included, got 281600",
    ),
    (TEXT | {"stop": [""]}, 400, "stop", "non-empty"),
    (TEXT | {"stop": ["a"] * 17}, 400, "stop", "at most 16 elements"),
    (TEXT | {"stop_token_ids": [1] * 257}, 400, "stop_token_ids", "at most 256 elements"),
    (TEXT | {"bad_words": ["a"] * 300_000}, 400, "bad_words", "at most 256 elements"),
    (TEXT | {"bad_words_token_ids": [[1]] * 257}, 400, "bad_words_token_ids", "at most 256"),
    (TEXT | {"top_a": 0.5}, 400, "top_a", "not supported: the server lacks this sampler"),
    (TEXT | {"skip_special_tokens": False}, 400, "skip_special_tokens", "not supported"),
    (TEXT | {"stop": "a" * 1025}, 400, "stop", "1024 characters"),
    (TEXT | {"stream_options": {}}, 400, "stream_options", "requires stream"),
    (TEXT | {"prompt": [5000]}, 400, "prompt", "outside the vocabulary"),
    (TEXT | {"prompt": [-1]}, 400, "prompt", "outside the vocabulary"),
    (TEXT | {"prompt": ""}, 400, "prompt", "at least one token"),
    (TEXT | {"prompt": ["a"] * 257}, 400, "prompt", "at most 256 prompts"),
    (TEXT | {"prompt": "\ud800"}, 400, "prompt", "must be valid Unicode"),
    (TEXT | {"\ud800": 1}, 400, "\ud800", "unknown field"),
    (TEXT | {"model": "\ud800"}, 400, "model", "an unpaired surrogate"),
    (CHAT | {"metadata": {"\ud800": "a"}}, 400, "metadata", "an unpaired surrogate"),
    (CHAT | {"messages": [USER | {"\ud800": 1}]}, 400, "messages.0", "must be valid Unicode"),
    (CHAT | {"top_logprobs": 2}, 400, "top_logprobs", "requires logprobs"),
    (CHAT | {"max_tokens": 3, "max_completion_tokens": 4}, 400, "max_tokens", "must be absent"),
    (CHAT | {"messages": []}, 400, "messages", "at least one message, got none"),
    (CHAT | {"messages": [{"role": "robot", "content": ""}]}, 400, "messages.0.role", "'robot'"),
    (CHAT | {"messages": [{"content": ""}]}, 400, "messages.0.role", "is missing"),
    (CHAT | {"messages": [{"role": 3, "content": ""}]}, 400, "messages.0.role", "got '3'"),
    (
        CHAT | {"messages": [{"role": "tool", "content": "", "tool_call_id": "1"}]},
        400,
        "tools",
        "the model's chat template does not list them",
    ),
    # speculative_config
    (TEXT | {"speculative_config": {"method": "magic"}}, 400, "speculative_config", "naive, ngram"),
    (TEXT | {"speculative_config": {"method": "mtp"}}, 400, "speculative_config", "cannot run"),
    (
        TEXT | {"speculative_config": {"model": "/x"}},
        400,
        "speculative_config",
        "only be set by the server",
    ),
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
    (TEXT | {"allowed_token_ids": [-1]}, 400, "allowed_token_ids", "token ids from 0"),
    (TEXT | {"min_tokens": -1}, 400, "min_tokens", "at least 0"),
    (TEXT | {"min_tokens": 9, "max_tokens": 8}, 400, "min_tokens", "at most max_tokens=8, got 9"),
    (TEXT | {"stop_token_sequences": [[1] * 65]}, 400, "stop_token_sequences", "1 to 64 tokens"),
    (
        TEXT | {"think_end_token_id": 5},
        400,
        "think_end_token_id",
        "needs reasoning_max_tokens or response_max_tokens",
    ),
    (TEXT | {"reasoning_max_tokens": -1}, 400, "reasoning_max_tokens", "at least 0"),
    (TEXT | {"response_max_tokens": 0}, 400, "response_max_tokens", "at least 1"),
    (
        TEXT | {"think_inject_token_ids": [1]},
        400,
        "think_inject_token_ids",
        "needs reasoning_max_tokens or response_max_tokens",
    ),
    (TEXT | {"stop": 1}, 400, "stop", "stop must be a string or a list, got an integer"),
    (TEXT | {"user": 1}, 400, "user", "user must be a string, got an integer"),
    (TEXT | {"stream_options": []}, 400, "stream_options", "must be an object, got a list"),
    (TEXT | {"stop": ["a", "b\udc00"]}, 400, "stop", "an unpaired surrogate"),
    # unsupported fields
    (TEXT | {"best_of": 2}, 400, "best_of", "not supported"),
    (TEXT | {"suffix": "x"}, 400, "suffix", "not supported"),
    (CHAT | {"tools": [TOOL]}, 400, "tools", "the model's chat template does not list them"),
    (CHAT | {"tools": [{"type": "function"}]}, 400, "tools.0.function", "is missing"),
    (CHAT | {"tool_choice": "required"}, 400, "tool_choice", "requires tools"),
    (TEXT | {"tools": [TOOL]}, 400, "tools", "not supported"),
    (CHAT | {"response_format": {"type": "xml"}}, 400, "response_format.type", "json_schema"),
    (TEXT | {"guided_regex": "a"}, 400, "guided_regex", "supported: use structured_outputs.regex"),
    (TEXT | {"temprature": 1}, 400, "temprature", "field temprature; did you mean temperature?"),
    (CHAT | {"max_new_tokens": 1}, 400, "max_new_tokens", "did you mean max_tokens?"),
    (TEXT | {"a" * 65: 1}, 400, "a" * 65, "unknown field " + "a" * 65),
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
    (TEXT | {"prompt": {"a": 1}}, 400, "prompt", "must be a string"),
    (TEXT | {"prompt": []}, 400, "prompt", "no list may be empty"),
    (TEXT | {"prompt": [[1], []]}, 400, "prompt", "no list may be empty"),
    (TEXT | {"prompt": ["a", 1]}, 400, "prompt", "must be a string"),
    (TEXT | {"prompt": [True]}, 400, "prompt", "must be a string"),
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
    (
        CHAT | {"messages": [USER | {str(i): 1 for i in range(999)}]},
        400,
        None,
        "999 invalid fields",
    ),
    (CHAT | {"messages": ["hello"]}, 400, "messages.0", "got a string"),
    # other errors
    (TEXT | {"model": "other"}, 404, "model", "does not exist"),
    (TEXT | {"prompt": "a" * 256}, 400, "prompt", "exceeds the context"),
    (TEXT | {"prompt": "a" * 100_000}, 400, "prompt", "characters exceeds the context"),
    (TEXT | {"max_tokens": 256}, 400, "prompt", "exceeds the context"),
    (CHAT | {"messages": [USER | {"content": "a" * 256}]}, 400, "messages", "exceeds the context"),
]


@pytest.mark.parametrize("body,status,param,message", REFUSALS)
def test_invalid_requests_are_refused(
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


ODD: list[Any] = [True, 0, -1, 1.5, 1e308, 10**400, "", "x", [], [[]], [0.5], [None], {}, {"a": 1}]
ODD += ["\ud800", "0", [10**30], {"type": "text"}, [{"role": "user"}], "x" * 5000]


@pytest.mark.parametrize("model", [CompletionRequest, ChatCompletionRequest])
def test_odd_values_are_accepted_or_refused_with_a_message(fake: Served, model: Any) -> None:
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
def test_bodies_that_are_not_json_objects_are_refused(fake: Served, content: bytes) -> None:
    response = HTTP.post(f"{fake.url}/v1/completions", content=content, headers=JSON)
    assert response.status_code == 400


@pytest.mark.parametrize(
    "content,message",
    [
        (b'{"prompt": "a", "prompt": "b"}', "prompt occurs more than once"),
        (b'{"prompt": "a", "speculative_config": {"k": 1, "k": 1}}', "k occurs more than once"),
        (b'{"prompt": "\xff"}', "the body must be UTF-8, got byte 0xff at 12"),
        ('{"prompt": "a"}'.encode("utf-16"), "the body must be UTF-8, got byte 0xff at 0"),
        (b'{"prompt": ' + b"[" * 100_000, "the body is nested more than 128 levels deep"),
    ],
)
def test_errors_of_malformed_bodies_name_the_problem(
    fake: Served, content: bytes, message: str
) -> None:
    response = HTTP.post(f"{fake.url}/v1/completions", content=content, headers=JSON)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == message
    assert response.json()["error"]["code"] == "invalid_json"
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_unknown_routes_methods_and_types_are_refused(fake: Served) -> None:
    for response, status in (
        (HTTP.get(f"{fake.url}/v1/nothing"), 404),
        (HTTP.get(f"{fake.url}/v1/completions"), 405),
        (HTTP.post(f"{fake.url}/v1/completions", content="prompt=a"), 415),
        (HTTP.post(f"{fake.url}/v1/completions", data={"prompt": "a"}), 415),
    ):
        assert response.status_code == status
        assert response.json()["error"]["type"] == "invalid_request_error"


def test_bodies_over_the_limit_are_refused() -> None:
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
        # Far beyond the limit the server hangs up. The client may miss the answer; the server
        # survives.
        with pytest.raises(httpx.TransportError):
            raise_for_status = send(served, iter([b" " * 100_000] * 100))
            raise httpx.TransportError(raise_for_status.text)
        assert send(served, fits).status_code == 200


def test_oversized_bodies_are_refused_from_their_headers() -> None:
    with serving(FakeEngine(), max_body_bytes=1000) as served:
        for length, more in ((1001, []), (20_000, []), (1001, ["Expect: 100-continue"])):
            answer = raw_answer(
                served, [f"Content-Length: {length}", *more], b"", until=b"body_too_large"
            )
            assert answer.startswith(b"HTTP/1.1 413")
            # The connection stays open only if the client may still send a slightly oversized body.
            assert (b"connection: close" in answer.lower()) == (length > 16_000 or bool(more))


def test_unsupported_transfer_encodings_are_refused(fake: Served) -> None:
    body = json.dumps(TEXT).encode()
    chunked = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    for coding, status in (("chunked", 200), ("Chunked", 200), ("gzip, chunked", 400)):
        answer = raw_answer(fake, [f"Transfer-Encoding: {coding}"], chunked, until=b"}")
        assert answer.startswith(b"HTTP/1.1 %d" % status)
        assert (b"Transfer-Encoding must be chunked, got gzip, chunked" in answer) == (
            status == 400
        )


def raw_answer(served: Served, headers: list[str], body: bytes, *, until: bytes) -> bytes:
    """Send a completions request over a raw socket and return the answer up to a mark."""
    head = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json", *headers]
    address = ("127.0.0.1", int(served.url.rpartition(":")[2]))
    with socket.create_connection(address, timeout=HANG_SECONDS) as connection:
        connection.sendall("\r\n".join([*head, "", ""]).encode() + body)
        answer = b""
        while until not in answer:
            got = connection.recv(65536)
            assert got, answer
            answer += got
    return answer


def send(served: Served, content: Any) -> httpx.Response:
    return HTTP.post(f"{served.url}/v1/completions", content=content, headers=JSON)


def test_requests_need_an_api_key() -> None:
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


def test_full_queue_refuses_requests() -> None:
    config = EngineConfig(
        served_model_name="fake", max_num_seqs=1, max_waiting=2, max_model_len=256
    )
    engine = FakeEngine(config)
    engine.holds_at = 5  # until all refusals are checked
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
        # All n choices are accepted or refused together.
        assert post(served, "completions", TEXT | {"n": 3}).status_code == 400
        assert post(served, "completions", TEXT | {"n": 2}).status_code == 200
        served.wait_until_idle()


def test_greedy_api_key_leaves_queue_places_for_others() -> None:
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
            # Of eight places the first key gets four, and the second gets half of the other four.
            requested: dict[int, list[Any]] = {}
            for number, places in ((0, 4), (1, 2), (2, 1)):
                requested[number] = [
                    pool.submit(post, served, "completions", body, headers=keys[number])
                    for _ in range(places)
                ]
                so_far = sum(map(len, requested.values()))
                wait_for(lambda so_far=so_far: engine.num_waiting == so_far)
                refused = post(served, "completions", body, headers=keys[number])
                assert refused.status_code == 429
                assert f"{places} requests of this API key" in refused.json()["error"]["message"]
            engine.holds_at = None
            for future in (running, *requested[0], *requested[1], *requested[2]):
                assert future.result().status_code == 200
        too_many = post(served, "completions", TEXT | {"n": 5}, headers=keys[0])
        assert too_many.status_code == 400 and "must be at most 4" in too_many.text
        assert post(served, "completions", TEXT | {"n": 4}, headers=keys[0]).status_code == 200
        served.wait_until_idle()


def test_without_keys_addresses_are_clients() -> None:
    """A trusted proxy reports addresses.

    Until a second client comes, the first may use every place.
    """
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
        )  # the first and the last are one network
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


def test_lists_are_counted_before_their_elements_are_checked(fake: Served) -> None:
    ids = [1] * 256
    for prompt in ([*ids, "no id"], [[1], [*ids, "no id"]]):
        error = post(fake, "completions", {"prompt": prompt}).json()["error"]
        assert error["code"] == "context_length_exceeded" and "of 257 tokens" in error["message"]
    many = {str(i): 0.5 for i in range(4097)}
    error = post(fake, "completions", TEXT | {"logit_bias": many}).json()["error"]
    assert error["param"] == "logit_bias" and "at most 4096 elements" in error["message"]
    # A body that is checked outside the event loop gets the same checks.
    long = {"prompt": "a", "allowed_token_ids": [5] * 20000, "temperature": -1}
    assert post(fake, "completions", long).json()["error"]["param"] == "temperature"


def test_embeddings_are_refused(fake: Served) -> None:
    answer = HTTP.post(f"{fake.url}/v1/embeddings", json={"input": "x"})
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["code"] == "unknown_url" and len(error["message"].split(": ")) == 3
