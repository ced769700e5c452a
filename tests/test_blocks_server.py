# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  (where the server's packages are missing, nothing else is imported)
"""/v1/responses and /v1/messages: texts and logprobs of a chat, streams, errors, conversations."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

for name in ("fastapi", "uvicorn", "pydantic", "prometheus_client", "jinja2", "httpx"):
    pytest.importorskip(name)
pytest.importorskip("llguidance")

from conformity_base import ASK, MODEL, TEMPLATE, WEATHER
from fake_engine import FakeEngine
from serving import Served, http, serving
from serving import post as send
from specops.engine import Engine, EngineConfig, SpeculativeConfig
from specops.server.call_reader import CallReader
from specops.server.chat import ChatFormat
from specops.server.openai_responses.conversations import Conversations
from specops.server.protocol import Message

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "min_ngram_size": 1}
HOT = {"temperature": 1.1, "seed": 7, "presence_penalty": 0.3}
TOOL = {"type": "function", "name": "weather", "parameters": WEATHER}
CHAT_TOOL = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    config = EngineConfig(
        device="cpu", num_threads=1, speculative_config=SpeculativeConfig.from_dict(NGRAM)
    )
    with serving(Engine(config), chat_format=ChatFormat(TEMPLATE)) as one:
        yield one
        one.wait_until_idle()


def post(served: Served, path: str, **body: Any) -> Any:
    answer = send(served, path, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(served: Served, path: str, **body: Any) -> list[dict[str, Any]]:
    """Return the events of a stream, after checking that name and type are equal."""
    found = []
    request = {**body, "stream": True}
    with http().stream("POST", f"{served.url}/v1/{path}", json=request) as answer:
        for one in answer.read().decode().split("\n\n")[:-1]:
            name, data = one.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
    return found


@pytest.mark.parametrize("sampling", [{"temperature": 0}, HOT], ids=["greedy", "seeded"])
@pytest.mark.parametrize("method", ["ngram", "naive"])
def test_all_apis_return_the_same_text_and_logprobs(
    served: Served, method: str, sampling: dict[str, Any]
) -> None:
    """Text and logprobs equal those of plain decoding."""
    plain = {"speculative_config": {"method": "naive"}}
    mine = {"speculative_config": NGRAM if method == "ngram" else {"method": "naive"}}
    top = {"top_logprobs": 2}
    chat = post(
        served, "chat/completions", messages=[ASK], max_tokens=40, logprobs=True, **top, **sampling,
        **plain,
    )["choices"][0]  # fmt: skip
    response = post(
        served, "responses", input=[ASK], max_output_tokens=40, **top, **sampling, **mine
    )
    message = post(served, "messages", messages=[ASK], max_tokens=40, **sampling, **mine)
    (part,) = response["output"][0]["content"]
    assert part["text"] == message["content"][0]["text"] == chat["message"]["content"]
    assert part["logprobs"] == chat["logprobs"]["content"]
    assert response["seed"] == chat["seed"] or "seed" not in sampling
    drafted = response["metrics"]["speculative_decoding"]["num_draft_tokens"]
    assert (drafted > 0) == (method == "ngram")


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_can_be_included_in_the_output(served: Served, stream: bool) -> None:
    request = {"messages": [ASK], "max_tokens": 24, "temperature": 0, "stop": [",", "zz"]}
    cut = post(served, "chat/completions", **request)["choices"][0]["message"]["content"]
    body = {**request, "include_stop_str_in_output": True, "stream": stream}
    answer = send(served, "chat/completions", body)
    if stream:
        lines = [one[6:] for one in answer.text.split("\n\n") if one[6:7] == "{"]
        deltas = [json.loads(one)["choices"][0]["delta"] for one in lines]
        content = "".join(one.get("content", "") for one in deltas)
    else:
        content = answer.json()["choices"][0]["message"]["content"]
    assert content == cut + ","


def test_streamed_response_equals_its_final_response(served: Served) -> None:
    request = {"input": "x", "tools": [TOOL], "max_output_tokens": 200, "temperature": 0}
    found = events(served, "responses", **request, tool_choice="required")
    whole = found[-1]["response"]
    done = [one["item"] for one in found if one["type"] == "response.output_item.done"]
    begun = [one for one in found if one["type"] == "response.output_item.added"]
    assert [one["output_index"] for one in begun] == list(range(len(done)))
    assert whole["output"] == done and done[0]["type"] == "function_call"
    assert [one["sequence_number"] for one in found] == list(range(len(found)))
    again = post(served, "responses", **request, tool_choice="required")
    assert [one.get("arguments") for one in again["output"]] == [
        one.get("arguments") for one in done
    ]


def test_tool_calls_keep_their_place_between_texts() -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    text = f"first {call} then {call}{call} last"
    for size in (1, 5, len(text)):
        reader, found = CallReader(), []
        for at in range(0, len(text), size):
            found += list(reader.pieces(text[at : at + size]))
        found.append(reader.finish())
        kinds = [one if isinstance(one, str) else "call" for one in found]
        joined = "|".join(kinds).replace("|", "") if size == 1 else "".join(kinds)
        assert joined == "firstcall thencallcall last", kinds


def test_tool_calls_and_results_have_the_same_prompt_in_all_apis(served: Served) -> None:
    used = {"type": "tool_use", "id": "c", "name": "weather", "input": {"place": "Rome"}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "dry"}
    tools = [{"name": "weather", "input_schema": WEATHER}]
    arguments = json.dumps(used["input"])
    called = {"id": "c", "type": "function", "function": {"name": "weather"}}
    called["function"]["arguments"] = arguments
    chat = post(
        served, "chat/completions", max_tokens=1, tools=[CHAT_TOOL],
        messages=[
            ASK, {"role": "assistant", "content": "hm", "tool_calls": [called]},
            {"role": "tool", "tool_call_id": "c", "content": "dry"}, ASK,
        ],
    )["usage"]["prompt_tokens"]  # fmt: skip
    content = [{"type": "text", "text": "hm"}, used]
    messages = [ASK, {"role": "assistant", "content": content}]
    messages.append({"role": "user", "content": [result, {"type": "text", **_text(ASK)}]})
    counted = post(served, "messages/count_tokens", messages=messages, tools=tools)
    items = [
        ASK,
        {"role": "assistant", "content": [{"type": "output_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": arguments},
        {"type": "function_call_output", "call_id": "c", "output": "dry"},
        ASK,
    ]
    response = post(served, "responses", input=items, tools=[TOOL], max_output_tokens=1)
    assert counted["input_tokens"] == response["usage"]["input_tokens"] == chat


def _text(message: dict[str, str]) -> dict[str, str]:
    return {"text": message["content"]}


@pytest.mark.parametrize(
    "path,body,message",
    [
        ("responses", {"input": "x", "max_output_tokens": 9999}, "and max_output_tokens 9999"),
        ("responses", {"input": "x", "max_tokens": 5}, "unknown field max_tokens"),
        ("responses", {"input": [{"role": "tool", "content": "x"}]}, "input.0.role must be"),
        ("responses", {"input": [{"type": "image"}]}, "input.0.type must be one of 'message'"),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
         "input.0.content.0.text is missing"),
        ("responses", {"input": "x", "tools": [TOOL], "tool_choice": {"type": "x"}},
         "tool_choice.type must be 'function', got 'x'"),
        ("responses", {"input": "x", "tools": [TOOL, {**TOOL, "name": "w-1", "parameters":
         {"type": "object", "properties": {"a": {"enum": 1}}}}, {**TOOL, "name": "last"}]},
         "tools: parameters of 'w-1' cannot be used: enum must be an array"),
        ("responses", {"input": "x", "top_logprobs": 999}, "top_logprobs must be"),
        ("responses", {"input": "x", "text": {"format": {"type": "json_schema", "schema":
         {"not": {}}}}}, "text.format"),
        ("messages", {"messages": [ASK]}, "max_tokens is missing"),
        ("messages", {"messages": [ASK], "max_tokens": 5, "stop_sequences": [""]},
         "stop_sequences must"),
        ("messages", {"messages": [ASK], "max_tokens": 5, "n": 2}, "unknown field n"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "text"}]}],
                      "max_tokens": 5}, "messages.0.content.0.text is missing"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}],
                      "max_tokens": 5}, "messages.0.content.0.type must be one of 'text'"),
        ("messages", {"messages": [{"role": "user", "content": [
            {"type": "tool_use", "id": "c", "name": "x", "input": {}}]}], "max_tokens": 5},
         "got tool_use in a message of the user"),
        ("messages", {"messages": [ASK], "max_tokens": 5, "tool_choice": {"type": "tool"}},
         "tool_choice.name is missing"),
    ],
)  # fmt: skip
def test_errors_name_the_field_of_the_api(
    served: Served, path: str, body: dict[str, Any], message: str
) -> None:
    answer = send(served, path, body)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"]
    assert ("param" in answer.json()["error"]) == (path == "responses")


class Failing(FakeEngine):
    """Engine that fails at its third step."""

    def step(self) -> Any:
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == 3:
            raise RuntimeError("planted")
        return super().step()


@pytest.mark.parametrize("path", ["responses", "messages"])
def test_engine_failure_has_the_error_format_of_the_api(path: str) -> None:
    body = {"messages": [ASK], "max_tokens": 50}
    if path == "responses":
        body = {"input": [ASK], "max_output_tokens": 50}
    with serving(Failing()) as served:
        last = events(served, path, **body)[-1]
    if path == "responses":
        assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
        assert last["response"]["error"]["code"] == "server_error"
    else:
        assert last["type"] == "error" and last["error"]["type"] == "api_error"
    with serving(Failing()) as served:
        answer = send(served, path, body)
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == {"responses": "server_error"}.get(path, "api_error")


def test_api_key_is_accepted_in_either_header() -> None:
    body = {"messages": [ASK], "max_tokens": 2}
    with serving(FakeEngine(), api_keys=["k"]) as served:
        url = f"{served.url}/v1/messages"
        for headers in ({"x-api-key": "k"}, {"Authorization": "Bearer k"}):
            assert http().post(url, json=body, headers=headers).status_code == 200
        for headers in ({}, {"x-api-key": "q"}, {"x-api-key": "k", "Authorization": "Bearer q"}):
            answer = http().post(url, json=body, headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["type"] == "authentication_error"


def test_stored_responses_are_bounded_per_client() -> None:
    conversations = Conversations(max_bytes=1 << 20)

    def keep(client: str, response_id: str, length: int) -> None:
        stored_messages = [Message(role="user", content="x" * length)]
        conversations.store(client, {"id": response_id}, [{"id": "i"}], stored_messages)

    keep("small", "s", 1000)
    for number in range(100):
        keep("large", f"l{number}", 100_000)
        assert conversations.find("large", "l0")  # so that "l0" is not the least recently used
    small = conversations.find("small", "s")
    assert small and small.messages[0].content == "x" * 1000
    assert json.loads(small.response) == {"id": "s"} and json.loads(small.items) == [{"id": "i"}]
    assert conversations.find("large", "l0") and conversations.find("large", "l99")
    for client, response in (("large", "l50"), ("small", "l99"), ("other", "s")):
        assert conversations.find(client, response) is None and not conversations.delete(
            client, response
        )
    keep("large", "whole", 2 << 20)
    assert conversations.find("large", "whole") is None
    assert conversations.delete("small", "s") and conversations.find("small", "s") is None
    for number in range(100):  # dropped responses do not count towards the bound
        keep("last", f"n{number}", 1)
    assert all(conversations.find("last", f"n{number}") for number in range(100))


def test_client_sees_only_its_own_responses() -> None:
    body = {"input": "a", "max_output_tokens": 2}
    with serving(FakeEngine(), api_keys=["k", "l"]) as served:
        mine, other = ({"Authorization": f"Bearer {key}"} for key in "kl")
        url = f"{served.url}/v1/responses"
        made = http().post(url, json=body, headers=mine).json()
        one = f"{url}/{made['id']}"
        for path in (one, f"{one}/input_items"):
            assert http().get(path, headers=mine).status_code == 200
            assert http().get(path, headers=other).json()["error"]["code"] == "response_not_found"
        assert http().delete(one, headers=other).status_code == 404
        assert http().get(one, headers=mine).json() == made
        twice = http().get(f"{one}/input_items?limit=1&limit=2", headers=mine)
        assert twice.status_code == 400 and "limit must occur once" in twice.text
        gone = {"id": made["id"], "object": "response", "deleted": True}
        assert http().delete(one, headers=mine).json() == gone
        assert http().get(one, headers=mine).status_code == 404
        follow = http().post(url, json={**body, "previous_response_id": made["id"]}, headers=mine)
        assert follow.json()["error"]["code"] == "previous_response_not_found"


def test_conversation_continues_from_a_stored_response(served: Served) -> None:
    first = post(
        served, "responses", input="a", max_output_tokens=8, temperature=0, instructions="i"
    )
    options = {"max_output_tokens": 8, "temperature": 0}
    next_one = {"role": "user", "content": "b"}
    second = post(served, "responses", input="b", previous_response_id=first["id"], **options)
    spoken = {"role": "assistant", "content": first["output"][0]["content"][0]["text"]}
    whole = [{"role": "user", "content": "a"}, spoken, next_one]
    other = post(served, "responses", input=whole, **options)
    assert second["usage"]["input_tokens"] == other["usage"]["input_tokens"]
    assert second["output"][0]["content"] == other["output"][0]["content"]
    assert second["previous_response_id"] == first["id"] and second["model"] == MODEL
