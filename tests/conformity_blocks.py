# SPDX-License-Identifier: Apache-2.0
"""Conformity rows of the APIs with block answers: OpenAI's responses, and Anthropic's messages."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import openai
from conformity_base import (
    ASK,
    HONOURED,
    METHODS,
    MODEL,
    PROMPT,
    WEATHER,
    WITHOUT,
    Check,
    Clients,
    Row,
    blocks,
    honored,
    refused,
    shown,
    stable,
    text,
    transport_rows,
    unread,
    without,
)

Call = Callable[..., Any]
Rows = Callable[[str, Any, str, Check], Row]


def block_rows() -> list[Row]:
    """Return the rows of all methods."""
    count = "messages.count_tokens"
    found = [*_responses_rows(), *_responses_neutral_rows(), *_stored_rows()]
    found += [*_messages_rows(), *_count_rows()]
    for method in ("responses.create", "messages.create", count):
        found += _transport_rows(method)
    return found


def _of(method: str) -> Rows:
    def row(parameter: str, value: Any, effect: str, check: Check) -> Row:
        return honored(method, parameter, shown(value), effect, check)

    return row


def _uses(reply: Any) -> list[str]:
    """Return the names of the tools that an answer calls, after checking their arguments."""
    found = []
    for one in blocks(reply):
        if one.type in ("function_call", "tool_use"):
            inputs = json.loads(one.arguments) if one.type == "function_call" else one.input
            assert one.name != "weather" or inputs["place"] in ("Bonn", "Rome")
            found.append(one.name)
    return found


def _is_place(reply: Any) -> bool:
    """Return whether the text is JSON that follows the schema."""
    return text(reply)[:1] == "{" and json.loads(text(reply))["place"] in ("Bonn", "Rome")


def _seen(holds: bool, effect: str) -> str:
    assert holds
    return effect


# ---- OpenAI's responses ----

FUNCTION = {"type": "function", "name": "weather", "parameters": WEATHER}
CLOCK = {"type": "function", "name": "clock"}
NAMED = {"type": "function", "name": "weather"}
ALLOWED = {"type": "allowed_tools", "mode": "required", "tools": [NAMED]}
CALLED = [
    {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
    {"type": "function_call", "call_id": "c", "name": "weather", "arguments": '{"place": "Bonn"}'},
    {"type": "function_call_output", "call_id": "c", "output": "dry"},
]


def _follows(call: Call) -> bool:
    """Check that continuing a response equals sending the whole conversation."""
    first = call()
    again = {"role": "user", "content": "more"}
    whole = [ASK, {"role": "assistant", "content": text(first)}, again]
    continued = call(input=[again], previous_response_id=first.id)
    separate = call(input=[again])
    return stable(continued) == stable(call(input=whole)) and continued.usage.input_tokens > (
        separate.usage.input_tokens
    )


def _events(call: Call) -> bool:
    """Check that the stream's pieces add up to the answer that is not streamed."""
    events = list(call(stream=True, **_TOOLS))
    assert [one.sequence_number for one in events] == list(range(len(events)))
    last = events[-1].response
    grown = "".join(one.delta for one in events if one.type == "response.output_text.delta")
    items = [one.item for one in events if one.type == "response.output_item.done"]
    whole = call(**_TOOLS)
    return grown == text(last) and items == last.output and stable(last) == stable(whole)


_TOOLS: dict[str, Any] = {"tools": [FUNCTION, CLOCK], "max_output_tokens": 200}


def _responses_rows() -> list[Row]:
    method = "responses.create"
    row = _of(method)
    form = {"type": "json_schema", "name": "place", "schema": WEATHER}
    image = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]
    included = ["message.output_text.logprobs"]

    def tops(reply: Any) -> list[int]:
        return [len(one.top_logprobs) for one in reply.output[0].content[0].logprobs]

    return [
        row("include", included, "log-probabilities of each token",
            lambda call: len(tops(call(include=included))) == call().usage.output_tokens),
        without(method, "include", ["reasoning.encrypted_content"], "nothing is encrypted"),
        refused(method, "include", ["file_search_call.results"]),
        refused(method, "include", included, tools=[FUNCTION]),
        row("input", PROMPT, "a user message",
            lambda call: stable(call(input=PROMPT)) == stable(call(input=[ASK]))
            != stable(call(input="x"))),
        row("input", CALLED, "messages, calls and their outputs, as in a chat",
            lambda call: call(input=CALLED).usage.input_tokens
            > call(input=CALLED[:1]).usage.input_tokens + 3),
        refused(method, "input", image),
        refused(method, "input", [{"type": "item_reference", "id": "x"}]),
        refused(method, "input", []),
        row("instructions", "Be brief.", "a system message before the input",
            lambda call: stable(call(instructions="Be brief."))
            == stable(call(input=[{"role": "system", "content": "Be brief."}, ASK]))
            and call(instructions="Be brief.").usage.input_tokens > call().usage.input_tokens),
        row("max_output_tokens", 3, "the answer has this many tokens",
            lambda call: call(max_output_tokens=3).usage.output_tokens == 3
            and call(max_output_tokens=3).incomplete_details.reason == "max_output_tokens"),
        refused(method, "max_output_tokens", 0),
        row("model", MODEL, "the model that is served", lambda call: call().model == MODEL),
        refused(method, "model", "other", status=404),
        row("parallel_tool_calls", False, "at most one call is made",
            lambda call: len(_uses(call(**_TOOLS, tool_choice="required",
                                        parallel_tool_calls=False))) == 1
            and any(len(_uses(call(**_TOOLS, tool_choice="required", temperature=1.2,
                                   extra_body={"seed": seed}))) > 1 for seed in range(12))),
        row("previous_response_id", "resp_...", "the input follows that conversation, kept in "
            "memory", _follows),
        refused(method, "previous_response_id", "resp_0"),
        row("reasoning", {"effort": "low"}, "a variable of the chat template",
            lambda call: call(reasoning={"effort": "low"}).usage.input_tokens
            > call().usage.input_tokens),
        unread(method, "reasoning", {"effort": "low"}, "reasoning.effort"),
        without(method, "reasoning", {"summary": "auto"}, "no reasoning is summarized"),
        row("store", False, "no later request can follow it", _is_not_stored),
        row("stream", True, "the answer arrives as events", _events),
        Row(method, "stream_options", shown({"include_obfuscation": False}), WITHOUT, _unpadded),
        refused(method, "stream_options", {"include_obfuscation": True}, stream=True),
        refused(method, "stream_options", {"include_obfuscation": False}),
        row("temperature", 1.5, "tokens are sampled", _seeds_matter),
        refused(method, "temperature", -0.5),
        without(method, "text", {"format": {"type": "text"}}, "any text"),
        row("text", {"format": form}, "the text is JSON that follows the schema",
            lambda call: _is_place(call(text={"format": form}, max_output_tokens=200))),
        row("text", {"format": {"type": "json_object"}}, "the text is an object in JSON",
            lambda call: text(call(text={"format": {"type": "json_object"}}))[:1] == "{"),
        refused(method, "text", {"format": {"type": "json_schema", "name": "x"}}),
        without(method, "text", {"verbosity": "low"}, "no chat template reads it"),
        row("tool_choice", "required", "a function is called",
            lambda call: bool(_uses(call(**_TOOLS, tool_choice="required")))),
        row("tool_choice", NAMED, "that function is called",
            lambda call: _uses(call(**_TOOLS, tool_choice=NAMED)) == ["weather"]),
        row("tool_choice", ALLOWED, "only these functions are called",
            lambda call: set(_uses(call(**_TOOLS, tool_choice=ALLOWED))) == {"weather"}),
        row("tool_choice", "none", "no function is called",
            lambda call: not _uses(call(**_TOOLS, tool_choice="none"))),
        refused(method, "tool_choice", "required"),
        row("tools", [FUNCTION], "the template lists them; arguments of calls follow the schema",
            lambda call: call(tools=[FUNCTION]).usage.input_tokens > call().usage.input_tokens
            and bool(_uses(call(**_TOOLS, tool_choice="required")))),
        refused(method, "tools", [{"type": "web_search"}]),
        refused(method, "tools", [FUNCTION], bare=True),
        row("top_logprobs", 2, "the number of alternatives",
            lambda call: set(tops(call(top_logprobs=2))) == {2}),
        row("top_p", 1e-6, "only the likeliest token is left",
            lambda call: text(call(temperature=1.0, top_p=1e-6)) == text(call())),
        refused(method, "top_p", 0.0),
    ]  # fmt: skip


def _is_not_stored(call: Call) -> bool:
    stored, unstored = call(store=True), call(store=False)
    call(previous_response_id=stored.id)
    try:
        call(previous_response_id=unstored.id)
    except openai.BadRequestError as error:
        return error.code == "previous_response_not_found"
    return False


def _unpadded(clients: Clients) -> str:
    call = METHODS["responses.create"].call(clients)
    events = call(stream=True, stream_options={"include_obfuscation": False})
    padding = [one.to_dict().get("obfuscation") for one in events]
    return _seen(not any(padding), "events have no padding")


def _seeds_matter(call: Call) -> bool:
    hot = partial(call, temperature=1.5)
    return len({text(hot(extra_body={"seed": seed})) for seed in range(4)}) > 1


def _responses_neutral_rows() -> list[Row]:
    method = "responses.create"
    context = [{"type": "compaction", "compact_threshold": 1000}]
    return [
        refused(method, "access_programs", {"cyber": "standard"}),
        without(method, "background", False, "the call returns the complete answer"),
        refused(method, "background", True),
        refused(method, "background_options", {"a": "b"}),
        refused(method, "context_management", context),
        refused(method, "conversation", "conv_1"),
        refused(method, "image", {"context_compression": "enabled"}),
        without(method, "max_tool_calls", 3, "limits server-side tools, of which there are none"),
        without(method, "metadata", {"a": "b"}, "the response repeats it"),
        refused(method, "moderation", {"model": "omni-moderation-latest"}),
        refused(method, "prompt", {"id": "x"}),
        without(method, "prompt_cache_key", "key", "the cache finds prompts by their tokens"),
        without(method, "prompt_cache_options", {"mode": "implicit"}, "caching is always implicit"),
        refused(method, "prompt_cache_options", {"mode": "explicit"}),
        without(method, "prompt_cache_retention", "in_memory", "the cache is in memory"),
        refused(method, "prompt_cache_retention", "24h"),
        without(method, "safety_identifier", "me", "identifies the end user"),
        without(method, "service_tier", "auto", "there is one tier"),
        refused(method, "service_tier", "priority"),
        without(method, "truncation", "disabled", "input that does not fit is refused"),
        without(method, "truncation", "auto", "input that does not fit is refused"),
        without(method, "user", "me", "identifies the end user"),
    ]


def _stored_rows() -> list[Row]:
    """Return the rows about stored responses."""
    get, delete, items = "responses.retrieve", "responses.delete", "responses.input_items.list"
    logprobs = ["message.output_text.logprobs"]

    def of_response(method: str, effect: str, check: Callable[[Call, Clients], bool]) -> Row:
        def see(clients: Clients) -> str:
            return _seen(check(METHODS[method].call(clients), clients), effect)

        return Row(method, "response_id", '`"resp_..."`', HONOURED, see)

    def is_the_answer(call: Call, clients: Clients) -> bool:
        made = clients.whole.responses.create(**METHODS["responses.create"].base)
        return bool(call(response_id=made.id) == made)

    def is_gone(call: Call, clients: Clients) -> bool:
        stored = clients.store_response()
        call(response_id=stored)
        try:
            clients.whole.responses.retrieve(stored)
        except openai.NotFoundError as error:
            return error.code == "response_not_found"
        return False

    def are_the_inputs(call: Call, clients: Clients) -> bool:
        made = clients.whole.responses.create(
            **{**METHODS["responses.create"].base, "input": CALLED}
        )
        found = [one.to_dict() for one in call(response_id=made.id, order="asc")]
        both = zip(found, CALLED, strict=False)
        return len(found) == len(CALLED) and all(sent.items() <= one.items() for one, sent in both)

    def ids(page: Any) -> list[str]:
        return [one.id for one in page.data]

    row = _of(items)
    rows = [
        of_response(get, "the stored response", is_the_answer),
        refused(get, "response_id", "resp_0", status=404),
        refused(get, "include", logprobs),
        without(get, "include_obfuscation", False, "there is no padding"),
        refused(get, "include_obfuscation", True),
        refused(get, "starting_after", 1),
        without(get, "stream", False, "the response is returned as a whole"),
        refused(get, "stream", True),
        of_response(delete, "the response is deleted", is_gone),
        refused(delete, "response_id", "resp_0", status=404),
        of_response(items, "the input items of its request", are_the_inputs),
        refused(items, "response_id", "resp_0", status=404),
        row(
            "after",
            "msg_...",
            "the items after this one",
            lambda call: ids(call(after=ids(call())[0])) == ids(call())[1:],
        ),
        refused(items, "after", "msg_0"),
        refused(items, "include", logprobs),
        row(
            "limit",
            1,
            "a page has at most this many items",
            lambda call: ids(call(limit=1)) == ids(call())[:1],
        ),
        refused(items, "limit", 101),
        row(
            "order",
            "asc",
            "the first item first",
            lambda call: ids(call(order="asc")) == ids(call())[::-1],
        ),
        refused(items, "order", "random"),
    ]
    for method in (get, delete, items):
        rows += transport_rows(method, None)
        rows.append(without(method, "extra_body", {"a": "b"}, "the route reads no body"))
    return rows


# ---- Anthropic's messages ----

TOOL = {"name": "weather", "input_schema": WEATHER}
OTHER = {"name": "clock", "input_schema": {"type": "object", "additionalProperties": False}}
USED = [
    {"role": "user", "content": "weather?"},
    {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "c", "name": "weather", "input": {"place": "Bonn"}}],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "c", "content": "dry"},
            {"type": "text", "text": "thanks"},
        ],
    },
]
_USES: dict[str, Any] = {"tools": [TOOL, OTHER], "max_tokens": 200}


def _message_stream(call: Call) -> bool:
    """Check that the stream's pieces add up to the message that is not streamed."""
    events = list(call(stream=True))
    pieces = [one.delta.text for one in events if one.type == "content_block_delta"]
    whole, last = call(), events[-2]
    assert [one.type for one in events[:2]] == ["message_start", "content_block_start"]
    assert [one.type for one in events[-3:]] == [
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    same_end = last.delta.stop_reason == whole.stop_reason
    return (
        "".join(pieces) == text(whole)
        and same_end
        and len(pieces) > 1
        and (last.usage.output_tokens == whole.usage.output_tokens)
    )


def _prompt_rows(method: str) -> list[Row]:
    """Return the rows about the prompt, for counting or generating."""
    row = _of(method)
    image = {"type": "image", "source": {"type": "url", "url": "http://x"}}
    pictures = [{"role": "user", "content": [image]}]
    parts = [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]
    begun = [ASK, {"role": "assistant", "content": "x"}]
    enabled = {"type": "enabled", "budget_tokens": 1024}

    def num(reply: Any) -> int:
        if not hasattr(reply, "usage"):
            return int(reply.input_tokens)
        return int(reply.usage.input_tokens + reply.usage.cache_read_input_tokens)

    return [
        row("messages", parts, "text blocks count as text",
            lambda call: stable(call(messages=parts)) == stable(call())
            != stable(call(messages=[{**ASK, "content": "x"}]))),
        row("messages", USED, "uses of tools and their results, as in a chat",
            lambda call: num(call(messages=USED)) > num(call(messages=USED[:1])) + 3),
        refused(method, "messages", pictures),
        row("messages", begun, "the answer continues the last message",
            lambda call: num(call(messages=begun)) == num(call()) + 1),
        refused(method, "messages", []),
        row("model", MODEL, "the model that is served", lambda call: bool(call(model=MODEL))),
        refused(method, "model", "other", status=404),
        without(method, "cache_control", {"type": "ephemeral"}, "the cache keeps all prefixes"),
        row("output_config", {"effort": "low"}, "a variable of the chat template",
            lambda call: num(call(output_config={"effort": "low"})) > num(call())),
        without(method, "speed", "standard", "there is one speed"),
        refused(method, "speed", "fast"),
        row("system", "Be brief.", "a system message before the others",
            lambda call: num(call(system="Be brief.")) > num(call())
            and num(call(system=[{"type": "text", "text": "Be brief."}]))
            == num(call(system="Be brief."))),
        without(method, "thinking", {"type": "adaptive"}, "the chat template decides"),
        row("thinking", enabled, "the variable `enable_thinking` of the chat template",
            lambda call: num(call(thinking=enabled)) > num(call())),
        without(method, "thinking", {"type": "disabled"}, "the template of this page says so, too"),
        unread(method, "thinking", enabled, "thinking, thinking.budget_tokens"),
        refused(method, "tool_choice", {"type": "tool", "name": "clock"}, tools=[TOOL]),
        row("tools", [TOOL], "the template lists them",
            lambda call: num(call(tools=[TOOL])) > num(call())),
        refused(method, "tools", [{"type": "web_search_20250305", "name": "web_search"}]),
        refused(method, "tools", [TOOL], bare=True),
        without(method, "user_profile_id", "x", "a header that the server ignores"),
        without(method, "workspace_id", "x", "a header that the server ignores"),
    ]  # fmt: skip


def _messages_rows() -> list[Row]:
    method = "messages.create"
    row = _of(method)
    form = {"format": {"type": "json_schema", "schema": WEATHER}}
    this = {"type": "tool", "name": "weather"}
    one = {"type": "any", "disable_parallel_tool_use": True}

    def ends(reply: Any) -> tuple[Any, Any]:
        return reply.stop_reason, reply.stop_sequence

    return [
        *_prompt_rows(method),
        row("max_tokens", 3, "the answer has this many tokens",
            lambda call: call(max_tokens=3).usage.output_tokens == 3
            and ends(call(max_tokens=3)) == ("max_tokens", None)),
        refused(method, "max_tokens", 0),
        refused(method, "max_tokens", 19999),
        refused(method, "container", "x"),
        refused(method, "diagnostics", {"a": "b"}),
        refused(method, "inference_geo", "eu"),
        without(method, "metadata", {"user_id": "me"}, "identifies the end user"),
        row("output_config", form, "the text is JSON that follows the schema",
            lambda call: _is_place(call(output_config=form, max_tokens=200))),
        without(method, "service_tier", "auto", "there is one tier"),
        refused(method, "service_tier", "priority"),
        row("stop_sequences", [","], "the text ends before it",
            lambda call: text(call(stop_sequences=[","]))
            == text(call()).partition(",")[0] != text(call())
            and ends(call(stop_sequences=[","])) == ("stop_sequence", ",")),
        refused(method, "stop_sequences", ["a"] * 17, value_text="17 texts"),
        row("stream", True, "the answer arrives as events", _message_stream),
        row("tool_choice", {"type": "any"}, "a tool is used",
            lambda call: bool(_uses(call(**_USES, tool_choice={"type": "any"})))),
        row("tool_choice", this, "that tool is used",
            lambda call: _uses(call(**_USES, tool_choice=this)) == ["weather"]
            and ends(call(**_USES, tool_choice=this)) == ("tool_use", None)),
        row("tool_choice", one, "at most one use is made",
            lambda call: len(_uses(call(**_USES, tool_choice=one))) == 1
            and any(len(_uses(call(**_USES, tool_choice={"type": "any"}, extra_body={
                "temperature": 1.2, "seed": seed}))) > 1 for seed in range(12))),
        row("tool_choice", {"type": "none"}, "no tool is used",
            lambda call: not _uses(call(**_USES, tool_choice={"type": "none"}))),
        row("tools", [TOOL], "inputs follow the schema",
            lambda call: bool(_uses(call(**_USES, tool_choice={"type": "any"})))),
    ]  # fmt: skip


def _count_rows() -> list[Row]:
    method = "messages.count_tokens"

    def same_count(call: Call) -> bool:
        """Check that a type, which the client converts to a schema, adds no token to the prompt."""
        return bool(call(output_format=int).input_tokens == call().input_tokens)

    return [
        *_prompt_rows(method),
        Row(method, "output_format", "a type", WITHOUT, lambda clients: _seen(
            same_count(METHODS[method].call(clients)), "the prompt does not depend on it")),
    ]  # fmt: skip


# ---- shared by all methods ----


def _transport_rows(method: str) -> list[Row]:
    most = "max_output_tokens" if method.startswith("responses") else "max_tokens"
    rows = [
        *transport_rows(method, None if method.endswith("count_tokens") else most),
        refused(method, "extra_body", {"nonsense": 1}, named="nonsense"),
    ]
    if method.endswith("count_tokens"):
        return rows
    hot = {"temperature": 1.5, "top_k": 1}
    return [
        *rows,
        honored(
            method, "extra_body", shown(hot), "[fields](requests.md#fields) that the API lacks",
            lambda call: text(call(extra_body=hot)) == text(call())
            != text(call(extra_body={"temperature": 1.5, "seed": 3})),
        ),
    ]  # fmt: skip
