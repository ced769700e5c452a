# SPDX-License-Identifier: Apache-2.0
"""Behavior of the server for every parameter of the official clients, determined by calls.

A row is a parameter with a value, and a call that shows the result: an expected effect, a refusal
that names the parameter, or the same answer as without it. `docs/conformity.md` is the output of
`python tests/conformity.py > docs/conformity.md`.
"""

import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import anthropic
import openai
from client_routes import routes_text
from conformity_base import (
    ASK,
    METHODS,
    MODEL,
    PROMPT,
    WEATHER,
    Check,
    Clients,
    Row,
    clients,
    honored,
    refused,
    shown,
    stable,
    text,
    transport_rows,
    unread,
    without,
)
from conformity_blocks import block_rows

TOOL = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}


def texts(reply: Any) -> list[str]:
    return [one.text if hasattr(one, "text") else one.message.content for one in reply.choices]


def streamed(chunks: Any) -> str:
    pieces = []
    for chunk in chunks:
        for choice in chunk.choices:
            pieces.append(choice.text if hasattr(choice, "text") else choice.delta.content or "")
    return "".join(pieces)


# ---- shared by both generation methods ----


def _tokens(call: Callable[..., Any], method: str, **arguments: Any) -> list[str]:
    """Return the text of each token of an answer."""
    if method == "completions.create":
        return list(call(logprobs=0, **arguments).choices[0].logprobs.tokens)
    return [one.token for one in call(logprobs=True, **arguments).choices[0].logprobs.content]


def _seeds_matter(call: Callable[..., Any], **arguments: Any) -> bool:
    """Check that equal seeds give equal texts, and that some other seed differs."""
    of_seeds = [text(call(**arguments, seed=seed)) for seed in (1, 1, 2, 3, 4)]
    return of_seeds[0] == of_seeds[1] and len(set(of_seeds)) > 1


def _sampling_rows(method: str) -> list[Row]:
    def row(parameter: str, value: Any, effect: str, check: Check) -> Row:
        return honored(method, parameter, shown(value), effect, check)

    def repeats(call: Callable[..., Any], **arguments: Any) -> int:
        """Return the count of the most frequent token."""
        return max(Counter(_tokens(call, method, **arguments)).values())

    def kinds(call: Callable[..., Any], **arguments: Any) -> int:
        return len(set(_tokens(call, method, **arguments)))

    return [
        row("frequency_penalty", 2.0, "tokens repeat less often",
            lambda call: repeats(call, frequency_penalty=2.0) < repeats(call)),
        refused(method, "frequency_penalty", 3.0),
        row("logit_bias", {"7": 100}, "only that token is chosen",
            lambda call: kinds(call, logit_bias={"7": 100}) == 1),
        refused(method, "logit_bias", {"7": 101}),
        refused(method, "logit_bias", {"word": 1}),
        row("max_tokens", 3, "the answer has this many tokens",
            lambda call: call(max_tokens=3).usage.completion_tokens == 3),
        row("max_tokens", -1, "no limit but the context",
            lambda call: call(max_tokens=-1, stop=[","]).choices[0].finish_reason == "stop"),
        refused(method, "max_tokens", -2),
        row("n", 3, "the answer has this many choices",
            lambda call: len(set(texts(call(n=3, temperature=1.5)))) > 1
            and len(texts(call(n=3))) == 3),
        refused(method, "n", 0),
        row("presence_penalty", 2.0, "more tokens are new",
            lambda call: kinds(call, presence_penalty=2.0) > kinds(call)),
        refused(method, "presence_penalty", -3.0),
        row("seed", 1, "the same seed gives the same text, another seed another text; "
            "`choices[].seed` contains it", lambda call: _seeds_matter(call, temperature=1.0)
            and call().choices[0].model_extra["seed"] == 1),
        row("stop", [","], "the text ends before it",
            lambda call: text(call(stop=[","])) == text(call()).partition(",")[0] != text(call())),
        row("stop", ",", "a single text is a list of one",
            lambda call: stable(call(stop=",")) == stable(call(stop=[","]))),
        refused(method, "stop", ["a"] * 17, value_text="17 texts"),
        row("stream", True, "the answer arrives in chunks with the same text",
            lambda call: streamed(call(stream=True)) == text(call())),
        row("stream_options", {"include_usage": True}, "the last chunk has `usage`",
            lambda call: list(call(stream=True, stream_options={"include_usage": True}))[-1]
            .usage.completion_tokens == call().usage.completion_tokens),
        row("stream_options", {"include_obfuscation": False}, "chunks have no padding",
            lambda call: all(one.to_dict().get("obfuscation") is None for one in
                             call(stream=True, stream_options={"include_obfuscation": False}))),
        refused(method, "stream_options", {"include_obfuscation": True}, stream=True),
        refused(method, "stream_options", {"include_usage": True}),
        row("temperature", 0, "the likeliest token is chosen, whatever the seed",
            lambda call: not _seeds_matter(call, temperature=0)),
        row("temperature", 1.5, "tokens are sampled",
            lambda call: _seeds_matter(call, temperature=1.5)),
        refused(method, "temperature", -0.5),
        row("top_p", 1e-6, "only the likeliest token is left",
            lambda call: text(call(temperature=1.0, top_p=1e-6)) == text(call())),
        refused(method, "top_p", 0.0),
        without(method, "user", "me", "identifies the end user"),
    ]  # fmt: skip


def _transport_rows(method: str) -> list[Row]:
    rows = transport_rows(method, None if method.startswith("models") else "max_tokens")
    if method.startswith("models"):
        return [*rows, without(method, "extra_body", {"a": "b"}, "the route reads no body")]
    return [
        *rows,
        honored(
            method, "extra_body", shown({"top_k": 1}),
            "[fields](requests.md#fields) that OpenAI lacks",
            lambda call: text(call(temperature=1.5, extra_body={"top_k": 1})) == text(call()),
        ),
        refused(method, "extra_body", {"nonsense": 1}, named="nonsense"),
    ]  # fmt: skip


def _model_rows(method: str) -> list[Row]:
    if method == "models.list":
        return []
    return [
        honored(
            method, "model", shown(MODEL), "the model that is served",
            lambda call: MODEL in (getattr(call(), "model", ""), getattr(call(), "id", "")),
        ),
        refused(method, "model", "other", status=404),
    ]  # fmt: skip


# ---- completions ----


def _completions_rows() -> list[Row]:
    method = "completions.create"

    def row(parameter: str, value: Any, effect: str, check: Check) -> Row:
        return honored(method, parameter, shown(value), effect, check)

    return [
        row("prompt", "a", "a text", lambda call: bool(text(call(prompt="a")))),
        row("prompt", ["a", "b"], "several texts: one choice for each",
            lambda call: texts(call(prompt=["a", "b"]))
            == [text(call(prompt="a")), text(call(prompt="b"))]),
        row("prompt", [5, 6, 7], "token ids",
            lambda call: call(prompt=[5, 6, 7]).usage.prompt_tokens == 3),
        row("prompt", [[5], [6, 7]], "several lists of token ids",
            lambda call: call(prompt=[[5], [6, 7]]).usage.prompt_tokens == 3),
        refused(method, "prompt", None),
        refused(method, "prompt", []),
        without(method, "best_of", 1, "equal to `n`: all are returned"),
        refused(method, "best_of", 2),
        row("echo", True, "the prompt comes before the text; with `logprobs`, its logprobs as well",
            lambda call: text(call(echo=True)) == PROMPT + text(call())
            and call(echo=True, logprobs=1).choices[0].logprobs.token_logprobs[0] is None),
        row("logprobs", 2, "logprobs of each token and of this many alternatives",
            lambda call: all(len(one) >= 2 for one in
                             call(logprobs=2).choices[0].logprobs.top_logprobs)),
        refused(method, "logprobs", -1),
        refused(method, "suffix", "end"),
    ]  # fmt: skip


# ---- chats ----


def _message_rows() -> list[Row]:
    method = "chat.completions.create"
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    picture = [{"role": "user", "content": [image]}]
    parts = [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]
    roles = [{"role": one, "content": "x"} for one in ("developer", "system", "assistant", "user")]

    def row(parameter: str, value: Any, effect: str, check: Check) -> Row:
        return honored(method, parameter, shown(value), effect, check)

    return [
        row("messages", [ASK], "the chat template turns them into a prompt",
            lambda call: call().usage.prompt_tokens
            > call(messages=[{**ASK, "content": "x"}]).usage.prompt_tokens),
        row("messages", parts, "text parts count as text",
            lambda call: stable(call(messages=parts)) == stable(call())),
        row("messages", roles, "templates see `developer` as `system`",
            lambda call: stable(call(messages=roles))
            == stable(call(messages=[{"role": "system", "content": "x"}, *roles[1:]]))),
        refused(method, "messages", picture),
        refused(method, "messages", []),
    ]  # fmt: skip


def _tool_rows() -> list[Row]:
    method = "chat.completions.create"
    named = {"type": "function", "function": {"name": "weather"}}
    custom = {"type": "custom", "custom": {"name": "shell"}}
    other = {"type": "function", "function": {"name": "clock"}}
    only = {"mode": "required", "tools": [named]}
    allowed = {"type": "allowed_tools", "allowed_tools": only}
    tools: dict[str, Any] = {"tools": [TOOL], "max_tokens": 200}

    def calls(reply: Any) -> list[Any]:
        found = reply.choices[0].message.tool_calls or []
        for one in found:
            assert json.loads(one.function.arguments)["place"] in ("Bonn", "Rome")
        return list(found)

    def row(parameter: str, value: Any, effect: str, check: Check) -> Row:
        return honored(method, parameter, shown(value), effect, check)

    return [
        row("tools", [TOOL], "the template lists them; arguments of calls follow the schema",
            lambda call: call(tools=[TOOL]).usage.prompt_tokens > call().usage.prompt_tokens
            and len(calls(call(**tools, tool_choice="required"))) > 0),
        refused(method, "tools", [custom]),
        refused(method, "tools", [TOOL], bare=True),
        row("tool_choice", "required", "a function is called",
            lambda call: len(calls(call(**tools, tool_choice="required"))) > 0),
        row("tool_choice", named, "that function is called",
            lambda call: len(calls(call(**tools, tool_choice=named))) > 0),
        row("tool_choice", "none", "no function is called",
            lambda call: not calls(call(**tools, tool_choice="none"))),
        row("tool_choice", "auto", "the model chooses; the default",
            lambda call: stable(call(**tools, tool_choice="auto")) == stable(call(**tools))),
        row("tool_choice", allowed, "only these tools are called",
            lambda call: {one.function.name for one in calls(
                call(**{**tools, "tools": [TOOL, other]}, tool_choice=allowed))} == {"weather"}),
        refused(method, "tool_choice", "required"),
        row("parallel_tool_calls", False, "at most one call is made",
            lambda call: len(calls(call(**tools, tool_choice="required",
                                        parallel_tool_calls=False))) == 1
            and any(len(calls(call(**tools, tool_choice="required", seed=seed,
                                   temperature=1.2))) > 1 for seed in range(12))),
        without(method, "function_call", "auto", "the default of a chat without functions"),
        refused(method, "function_call", {"name": "weather"}),
        without(method, "functions", [], "no functions are offered"),
        refused(method, "functions", [{"name": "weather"}]),
    ]  # fmt: skip


def _chat_rows() -> list[Row]:
    method = "chat.completions.create"
    json_schema = {"type": "json_schema", "json_schema": {"name": "place", "schema": WEATHER}}

    def row(parameter: str, value: Any, effect: str, check: Check) -> Row:
        return honored(method, parameter, shown(value), effect, check)

    def places(reply: Any) -> int:
        """Return how many texts ended; some use up their limit on white space."""
        ended = [one for one in reply.choices if one.finish_reason == "stop"]
        assert all(json.loads(one.message.content)["place"] in ("Bonn", "Rome") for one in ended)
        return len(ended)

    def tops(reply: Any) -> list[int]:
        return [len(one.top_logprobs) for one in reply.choices[0].logprobs.content]

    def accepted(reply: Any) -> int:
        return reply.usage.completion_tokens_details.accepted_prediction_tokens

    def follows_prediction(call: Callable[..., Any]) -> bool:
        call = partial(call, extra_body={"speculative_config": {"method": "prediction"}})
        expected = text(call())
        parts = [{"type": "text", "text": expected[:9]}, {"type": "text", "text": expected[9:]}]
        answers = [
            call(prediction={"type": "content", "content": one}) for one in (expected, parts)
        ]
        is_same = [text(one) for one in answers] == [expected] * 2
        return is_same and accepted(call()) == 0 < min(map(accepted, answers))

    return [
        refused(method, "audio", {"voice": "alloy", "format": "wav"}),
        row("logprobs", True, "logprobs of each token",
            lambda call: all(one.logprob <= 0 for one in
                             call(logprobs=True).choices[0].logprobs.content)),
        row("max_completion_tokens", 3, "the answer has this many tokens",
            lambda call: call(max_completion_tokens=3, max_tokens=None)
            .usage.completion_tokens == 3),
        refused(method, "max_completion_tokens", 3, named="max_tokens"),
        without(method, "metadata", {"a": "b"}, "no answer is stored for a later search"),
        without(method, "modalities", ["text"], "text is the only modality"),
        refused(method, "modalities", ["text", "audio"]),
        refused(method, "moderation", {"model": "omni-moderation-latest"}),
        row("prediction", {"type": "content", "content": "the text that is expected"},
            "the same answer, drafted from it", follows_prediction),
        refused(method, "prediction", {"type": "text", "content": "x"}, named="prediction.type"),
        without(method, "prompt_cache_key", "key", "the cache finds prompts by their tokens"),
        without(method, "prompt_cache_options", {"mode": "implicit"}, "caching is always implicit"),
        refused(method, "prompt_cache_options", {"mode": "explicit"}),
        without(method, "prompt_cache_retention", "in_memory", "the cache is in memory"),
        refused(method, "prompt_cache_retention", "24h"),
        row("reasoning_effort", "low", "a variable of the chat template",
            lambda call: call(reasoning_effort="low").usage.prompt_tokens
            > call().usage.prompt_tokens),
        unread(method, "reasoning_effort", "low", "reasoning_effort"),
        without(method, "response_format", {"type": "text"}, "any text"),
        row("response_format", {"type": "json_object"}, "the text is an object in JSON",
            lambda call: text(call(response_format={"type": "json_object"}))[:1] == "{"),
        row("response_format", json_schema, "the text is JSON that follows the schema",
            lambda call: places(call(response_format=json_schema, max_tokens=100, n=16,
                                     temperature=1.5)) > 0),
        refused(method, "response_format", {"type": "json_schema"}),
        without(method, "safety_identifier", "me", "identifies the end user"),
        without(method, "service_tier", "auto", "there is one tier"),
        refused(method, "service_tier", "priority"),
        without(method, "store", True, "no answer is stored for a later search"),
        row("top_logprobs", 2, "the number of alternatives, with `logprobs`",
            lambda call: min(tops(call(logprobs=True, top_logprobs=2))) == 2),
        refused(method, "top_logprobs", 2),
        without(method, "verbosity", "low", "no chat template reads it"),
        refused(method, "web_search_options", {}),
    ]  # fmt: skip


def rows() -> list[Row]:
    """Return all rows, by method, in the order of the client's parameters."""
    found = [*_completions_rows(), *_message_rows(), *_tool_rows(), *_chat_rows(), *block_rows()]
    for method in ("completions.create", "chat.completions.create", "models.list"):
        found += _model_rows(method) + _transport_rows(method)
        if method.endswith("create"):
            found += _sampling_rows(method)
    found += _model_rows("models.retrieve") + _transport_rows("models.retrieve")
    places = {name: method.parameters for name, method in METHODS.items()}
    return sorted(
        found, key=lambda row: (list(METHODS).index(row.method),
                                places[row.method].index(row.parameter))
    )  # fmt: skip


# ---- the document ----

INTRODUCTION = """\
# The official clients, parameter by parameter

<!-- Printed by tests/conformity.py; run that instead of editing this file. -->

This page shows how the server treats every parameter of the clients `openai`, version {openai}, and
`anthropic`, version {anthropic}. Each row is a call. `tests/test_conformity.py` makes the call,
checks the stated result, and compares this page with the output of `python tests/conformity.py`.
The parameters come from the clients' signatures, so none is missing.

- **honored**: the parameter has the stated effect, which the test checks.
- **no effect**: the answer is the same as without the parameter; the test compares the two.
- **refused**: the server answers with this status and message. In OpenAI's APIs, `param` also names
  the field.

The model's chat template supports tools, `reasoning_effort` and `enable_thinking`, except where a
row says so.
"""


def table(method: str, results: list[tuple[Row, str]]) -> str:
    """Return the table of a method."""
    title = f"## `{METHODS[method].package}`: `client.{method}`"
    lines = [title, "", "| parameter | value | result | |", "| - | - | - | - |"]
    for row, effect in results:
        cells = (f"`{row.parameter}`", row.value_text, row.outcome, effect)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def document(clients: Clients, all_rows: list[Row]) -> str:
    """Return the page, after running every row."""
    results = [(row, clients.result_of(row)) for row in all_rows]
    parts = [INTRODUCTION.format(openai=openai.__version__, anthropic=anthropic.__version__)]
    for method in METHODS:
        parts.append(table(method, [one for one in results if one[0].method == method]))
    parts.append(routes_text(clients.whole))
    return "\n".join(parts)


if __name__ == "__main__":
    with clients() as both:
        print(document(both, rows()), end="")
