# SPDX-License-Identifier: Apache-2.0
"""What the server makes of every parameter of the official `openai` client, found out by calling.

A row is a parameter with a value, and a call that shows what comes of it: an effect that is looked
for, a refusal that names the parameter, or the same answer as without it. `docs/conformity.md` is
what `python tests/conformity.py > docs/conformity.md` prints.
"""

import contextlib
import inspect
import json
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import openai
from client_routes import routes_text
from fake_engine import FakeEngine
from serving import Served, serving
from specops.engine import Engine, EngineConfig, SpeculativeConfig
from specops.server.chat import ChatFormat

# Knows tools and `reasoning_effort`, which the bundled model's own template does not.
TEMPLATE = """
{%- if reasoning_effort %}effort: {{ reasoning_effort }}{{ "\\n" }}{% endif %}
{%- if tools %}Call as <tool_call>{name, arguments}</tool_call>:{{ "\\n" }}{% endif %}
{%- for tool in tools or [] %}{{ tool | tojson }}{{ "\\n" }}{% endfor %}
{%- for message in messages %}{{ message.role }}: {{ message.content }}{{ "\\n" }}{% endfor -%}
assistant:"""
MODEL = "specops-bundled"

HONOURED, WITHOUT, REFUSED = "honoured", "no effect", "refused"


class Clients:
    """The official client of a server with everything, and of one whose template is bare."""

    def __init__(self, served: Served, bare: Served) -> None:
        self.served = served
        self.whole = _connect(served)
        self.bare = _connect(bare)

    @cached_property
    def method_answers(self) -> dict[str, Any]:
        """What each method answers where nothing but its base is asked for."""
        return {name: method.call(self)() for name, method in METHODS.items()}


def _connect(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60)


@contextlib.contextmanager
def clients() -> Iterator[Clients]:
    """Both servers, until the block ends; then nothing may be left running in the first."""
    speculative = SpeculativeConfig(method="ngram", num_speculative_tokens=4, min_ngram_size=1)
    engine = Engine(EngineConfig(device="cpu", max_num_seqs=8, speculative_config=speculative))
    with (
        serving(engine, chat_format=ChatFormat(TEMPLATE)) as served,
        serving(FakeEngine()) as bare,
    ):
        yield Clients(served, bare)
        served.wait_until_idle()


@dataclass(frozen=True)
class Method:
    """A method of the client, and the arguments that its rows have in common."""

    name: str
    base: Mapping[str, Any]

    def of(self, client: openai.OpenAI, raw: bool = False) -> Callable[..., Any]:
        *path, last = self.name.split(".")
        owner: Any = client
        for part in path:
            owner = getattr(owner, part)
        method: Callable[..., Any] = getattr(owner.with_raw_response if raw else owner, last)
        return method

    def call(self, clients: Clients, *, raw: bool = False) -> Callable[..., Any]:
        """The method with the base's arguments, which others replace."""
        method = self.of(clients.whole, raw)
        return lambda **given: method(**{**self.base, **given})

    @property
    def parameters(self) -> list[str]:
        """The names in the client's own order."""
        with openai.OpenAI(api_key="none") as client:
            return list(inspect.signature(self.of(client)).parameters)


PROMPT = "x = [0, 0, 0, 0, 0, 0, 0,"
ASK = {"role": "user", "content": PROMPT}
WEATHER = {
    "type": "object",
    "properties": {"place": {"enum": ["Bonn", "Rome"]}},
    "required": ["place"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}

METHODS = {
    one.name: one
    for one in (
        Method(
            "completions.create",
            {"model": MODEL, "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "seed": 1},
        ),
        Method(
            "chat.completions.create",
            {"model": MODEL, "messages": [ASK], "max_tokens": 24, "temperature": 0, "seed": 1},
        ),
        Method("models.list", {}),
        Method("models.retrieve", {"model": MODEL}),
    )
}


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        method: a name of METHODS.
        parameter: of it.
        given: the value, as the table shows it.
        outcome: HONOURED, WITHOUT or REFUSED.
        see: calls, fails unless the outcome is that, and says what the table does.
    """

    method: str
    parameter: str
    given: str
    outcome: str
    see: Callable[[Clients], str]

    @property
    def id(self) -> str:
        return f"{self.method}({self.parameter}={self.given})"


Check = Callable[[Callable[..., Any]], bool]


def honoured(method: str, parameter: str, given: str, effect: str, check: Check) -> Row:
    """A row of a parameter that does something: `check` gets the method, and looks for it."""

    def see(clients: Clients) -> str:
        assert check(METHODS[method].call(clients)), effect
        return effect

    return Row(method, parameter, given, HONOURED, see)


def without(method: str, parameter: str, value: Any, why: str) -> Row:
    """A row of a value that asks for nothing more: the answer is that without it."""

    def see(clients: Clients) -> str:
        with_it = METHODS[method].call(clients)(**{parameter: value})
        assert said(with_it) == said(clients.method_answers[method])
        return why

    return Row(method, parameter, shown(value), WITHOUT, see)


def refused(
    method: str,
    parameter: str,
    value: Any,
    *,
    named: str | None = None,
    bare: bool = False,
    status: int = 400,
    given: str | None = None,
    **more: Any,
) -> Row:
    """A row of a value that is refused.

    Args:
        method, parameter, value: of the row.
        named: what the refusal names, if not the parameter itself.
        bare: by a server whose model's chat template has neither tools nor variables.
        status: of the refusal.
        given: the value as the table shows it, if not as Python does.
        more: other arguments of the call.
    """

    def see(clients: Clients) -> str:
        call = METHODS[method].of(clients.bare if bare else clients.whole)
        base = {**METHODS[method].base, **({"model": "fake"} if bare else {}), **more}
        try:
            call(**{**base, parameter: value})
        except openai.APIStatusError as error:
            body: Any = error.body
            assert set(body) == {"message", "type", "param", "code"} and error.code == body["code"]
            assert error.status_code == status
            wanted = named or parameter
            assert wanted in body["message"], body
            assert wanted == "model" or (error.param or "").startswith(wanted), body
            return f"{status}: {body['message']}"
        raise AssertionError(f"{parameter} was not refused")

    told = (given or shown(value)) + "".join(f", {name}={shown(one)}" for name, one in more.items())
    return Row(method, parameter, told + (", template without it" if bare else ""), REFUSED, see)


def shown(value: Any) -> str:
    """A value as Python and the table spell it."""
    return f"`{json.dumps(value) if isinstance(value, (dict, list, str)) else repr(value)}`"


def said(reply: Any) -> Any:
    """An answer without what differs from call to call."""
    if not hasattr(reply, "choices"):
        return [one.id for one in getattr(reply, "data", [reply])]
    return [choice.model_dump() for choice in reply.choices], reply.usage.completion_tokens


def text(reply: Any) -> str:
    choice = reply.choices[0]
    told: str = choice.text if hasattr(choice, "text") else choice.message.content
    return told


def texts(reply: Any) -> list[str]:
    return [one.text if hasattr(one, "text") else one.message.content for one in reply.choices]


def streamed(chunks: Any) -> str:
    pieces = []
    for chunk in chunks:
        for choice in chunk.choices:
            pieces.append(choice.text if hasattr(choice, "text") else choice.delta.content or "")
    return "".join(pieces)


# ---- what both ways to generate have ----


def _tokens(call: Callable[..., Any], method: str, **given: Any) -> list[str]:
    """The tokens of an answer, each as text."""
    if method == "completions.create":
        return list(call(logprobs=0, **given).choices[0].logprobs.tokens)
    return [one.token for one in call(logprobs=True, **given).choices[0].logprobs.content]


def _seeds_matter(call: Callable[..., Any], **given: Any) -> bool:
    """The same seed gives the same, and of some others one gives something else."""
    of_seeds = [text(call(**given, seed=seed)) for seed in (1, 1, 2, 3, 4)]
    return of_seeds[0] == of_seeds[1] and len(set(of_seeds)) > 1


def _sampling_rows(method: str) -> list[Row]:
    def row(parameter: str, given: Any, effect: str, check: Check) -> Row:
        return honoured(method, parameter, shown(given), effect, check)

    def repeats(call: Callable[..., Any], **given: Any) -> int:
        """How often the most frequent token comes."""
        return max(Counter(_tokens(call, method, **given)).values())

    def kinds(call: Callable[..., Any], **given: Any) -> int:
        return len(set(_tokens(call, method, **given)))

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
        refused(method, "max_tokens", -1),
        row("n", 3, "the answer has this many choices",
            lambda call: len(set(texts(call(n=3, temperature=1.5)))) > 1
            and len(texts(call(n=3))) == 3),
        refused(method, "n", 0),
        row("presence_penalty", 2.0, "more tokens are new",
            lambda call: kinds(call, presence_penalty=2.0) > kinds(call)),
        refused(method, "presence_penalty", -3.0),
        row("seed", 1, "the same seed gives the same text, another another; `choices[].seed` has "
            "it", lambda call: _seeds_matter(call, temperature=1.0)
            and call().choices[0].model_extra["seed"] == 1),
        row("stop", [","], "the text ends before it",
            lambda call: text(call(stop=[","])) == text(call()).partition(",")[0] != text(call())),
        row("stop", ",", "a single text is a list of one",
            lambda call: said(call(stop=",")) == said(call(stop=[","]))),
        refused(method, "stop", ["a"] * 17, given="17 texts"),
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
        without(method, "user", "me", "says who asks"),
    ]  # fmt: skip


def _silent_timeout(clients: Clients, method: str) -> str:
    """Of what takes no time to answer: the client's own affair, with a server that says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            try:
                METHODS[method].of(client)(**METHODS[method].base, timeout=0.1)
            except openai.APITimeoutError:
                return "the client gives up"
    raise AssertionError("the client waited")


def _transport_rows(method: str) -> list[Row]:
    def header(clients: Clients) -> str:
        call = METHODS[method].call(clients, raw=True)
        answer = call(extra_headers={"X-Request-Id": "my-own"})
        assert answer.headers["x-request-id"] == "my-own"
        return "the answer repeats it"

    def timeout(clients: Clients) -> str:
        if method.startswith("models"):
            return _silent_timeout(clients, method)
        try:
            METHODS[method].call(clients)(
                max_tokens=900, timeout=0.05, extra_body={"ignore_eos": True}
            )
        except openai.APITimeoutError:
            return "the client gives up, and the server ends the request"
        raise AssertionError("the client waited")

    rows = [
        Row(method, "extra_headers", shown({"X-Request-Id": "my-own"}), HONOURED, header),
        without(method, "extra_query", {"a": "b"}, "no route reads a query"),
        Row(method, "timeout", "seconds", HONOURED, timeout),
    ]
    if method.startswith("models"):
        return [*rows, without(method, "extra_body", {"a": "b"}, "the route reads no body")]
    return [
        *rows,
        honoured(
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
        honoured(
            method, "model", shown(MODEL), "the model that is served",
            lambda call: MODEL in (getattr(call(), "model", ""), getattr(call(), "id", "")),
        ),
        refused(method, "model", "other", status=404),
    ]  # fmt: skip


# ---- completions ----


def _completions_rows() -> list[Row]:
    method = "completions.create"

    def row(parameter: str, given: Any, effect: str, check: Check) -> Row:
        return honoured(method, parameter, shown(given), effect, check)

    return [
        row("prompt", "a", "a text", lambda call: bool(text(call(prompt="a")))),
        row("prompt", ["a", "b"], "several: a choice for each",
            lambda call: texts(call(prompt=["a", "b"]))
            == [text(call(prompt="a")), text(call(prompt="b"))]),
        row("prompt", [5, 6, 7], "token ids",
            lambda call: call(prompt=[5, 6, 7]).usage.prompt_tokens == 3),
        row("prompt", [[5], [6, 7]], "several lists of them",
            lambda call: call(prompt=[[5], [6, 7]]).usage.prompt_tokens == 3),
        refused(method, "prompt", None),
        refused(method, "prompt", []),
        without(method, "best_of", 1, "equal to `n`: all are returned"),
        refused(method, "best_of", 2),
        row("echo", True, "the prompt comes before the text; with `logprobs`, its logprobs as well",
            lambda call: text(call(echo=True)) == PROMPT + text(call())
            and call(echo=True, logprobs=1).choices[0].logprobs.token_logprobs[0] is None),
        row("logprobs", 2, "of each token and this many alternatives",
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

    def row(parameter: str, given: Any, effect: str, check: Check) -> Row:
        return honoured(method, parameter, shown(given), effect, check)

    return [
        row("messages", [ASK], "the chat template makes a prompt of them",
            lambda call: call().usage.prompt_tokens
            > call(messages=[{**ASK, "content": "x"}]).usage.prompt_tokens),
        row("messages", parts, "parts of text are texts",
            lambda call: said(call(messages=parts)) == said(call())),
        row("messages", roles, "`developer` is what templates call `system`",
            lambda call: said(call(messages=roles))
            == said(call(messages=[{"role": "system", "content": "x"}, *roles[1:]]))),
        refused(method, "messages", picture),
        refused(method, "messages", []),
    ]  # fmt: skip


def _tool_rows() -> list[Row]:
    method = "chat.completions.create"
    named = {"type": "function", "function": {"name": "weather"}}
    custom = {"type": "custom", "custom": {"name": "shell"}}
    allowed = {"mode": "auto", "tools": [named]}
    tools: dict[str, Any] = {"tools": [TOOL], "max_tokens": 200}

    def calls(reply: Any) -> list[Any]:
        found = reply.choices[0].message.tool_calls or []
        for one in found:
            assert json.loads(one.function.arguments)["place"] in ("Bonn", "Rome")
        return list(found)

    def row(parameter: str, given: Any, effect: str, check: Check) -> Row:
        return honoured(method, parameter, shown(given), effect, check)

    return [
        row("tools", [TOOL], "the template shows them; calls have arguments of the schema",
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
            lambda call: said(call(**tools, tool_choice="auto")) == said(call(**tools))),
        refused(method, "tool_choice", {"type": "allowed_tools", "allowed_tools": allowed},
                tools=[TOOL]),
        refused(method, "tool_choice", "required"),
        row("parallel_tool_calls", False, "at most one call is made",
            lambda call: len(calls(call(**tools, tool_choice="required",
                                        parallel_tool_calls=False))) == 1
            < max(len(calls(call(**tools, tool_choice="required", seed=seed, temperature=1.2)))
                  for seed in range(12))),
        without(method, "function_call", "auto", "the default of a chat without functions"),
        refused(method, "function_call", {"name": "weather"}),
        without(method, "functions", [], "none are offered"),
        refused(method, "functions", [{"name": "weather"}]),
    ]  # fmt: skip


def _chat_rows() -> list[Row]:
    method = "chat.completions.create"
    json_schema = {"type": "json_schema", "json_schema": {"name": "place", "schema": WEATHER}}

    def row(parameter: str, given: Any, effect: str, check: Check) -> Row:
        return honoured(method, parameter, shown(given), effect, check)

    def places(reply: Any) -> int:
        """How many texts ended; some have white space as long as they may."""
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
        told = [call(prediction={"type": "content", "content": one}) for one in (expected, parts)]
        is_same = [text(one) for one in told] == [expected] * 2
        return is_same and accepted(call()) == 0 < min(map(accepted, told))

    return [
        refused(method, "audio", {"voice": "alloy", "format": "wav"}),
        row("logprobs", True, "of each token",
            lambda call: all(one.logprob <= 0 for one in
                             call(logprobs=True).choices[0].logprobs.content)),
        row("max_completion_tokens", 3, "the answer has this many tokens",
            lambda call: call(max_completion_tokens=3, max_tokens=None)
            .usage.completion_tokens == 3),
        refused(method, "max_completion_tokens", 3, named="max_tokens"),
        without(method, "metadata", {"a": "b"}, "nothing is stored that it could find"),
        without(method, "modalities", ["text"], "there is nothing but text"),
        refused(method, "modalities", ["text", "audio"]),
        refused(method, "moderation", {"model": "omni-moderation-latest"}),
        row("prediction", {"type": "content", "content": "the text that is expected"},
            "the same answer, drafted from it", follows_prediction),
        refused(method, "prediction", {"type": "text", "content": "x"}, named="prediction.type"),
        without(method, "prompt_cache_key", "key", "prompts are found by their tokens"),
        without(method, "prompt_cache_options", {"mode": "implicit"}, "what the cache does"),
        refused(method, "prompt_cache_options", {"mode": "explicit"}),
        without(method, "prompt_cache_retention", "in_memory", "where the cache is"),
        refused(method, "prompt_cache_retention", "24h"),
        row("reasoning_effort", "low", "a variable of the chat template",
            lambda call: call(reasoning_effort="low").usage.prompt_tokens
            > call().usage.prompt_tokens),
        refused(method, "reasoning_effort", "low", bare=True),
        without(method, "response_format", {"type": "text"}, "any text"),
        row("response_format", {"type": "json_object"}, "the text is an object in JSON",
            lambda call: text(call(response_format={"type": "json_object"}))[:1] == "{"),
        row("response_format", json_schema, "the text is JSON of the schema",
            lambda call: places(call(response_format=json_schema, max_tokens=100, n=16,
                                     temperature=1.5)) > 0),
        refused(method, "response_format", {"type": "json_schema"}),
        without(method, "safety_identifier", "me", "says who asks"),
        without(method, "service_tier", "auto", "there is one tier"),
        refused(method, "service_tier", "priority"),
        without(method, "store", False, "nothing is stored"),
        refused(method, "store", True),
        row("top_logprobs", 2, "the number of alternatives, with `logprobs`",
            lambda call: min(tops(call(logprobs=True, top_logprobs=2))) == 2),
        refused(method, "top_logprobs", 2),
        refused(method, "verbosity", "low"),
        refused(method, "web_search_options", {}),
    ]  # fmt: skip


def rows() -> list[Row]:
    """All rows, by method, in the order of the client's parameters."""
    found = [*_completions_rows(), *_message_rows(), *_tool_rows(), *_chat_rows()]
    for method in METHODS:
        found += _model_rows(method) + _transport_rows(method)
        if method.endswith("create"):
            of_both = _sampling_rows(method)
            found += of_both
    places = {name: method.parameters for name, method in METHODS.items()}
    return sorted(
        found, key=lambda row: (list(METHODS).index(row.method),
                                places[row.method].index(row.parameter))
    )  # fmt: skip


# ---- the document ----

INTRODUCTION = """\
# The official client, parameter by parameter

<!-- Printed by tests/conformity.py; run that instead of editing this file. -->

How the server treats every parameter of the `openai` client, version {version}. Each row is a call:
`tests/test_conformity.py` makes it, checks the stated result, and compares this page with the
output of `python tests/conformity.py`. Parameters come from the client's signatures, so none is
missing.

- **honoured**: it has the stated effect, which the test checks.
- **no effect**: the answer is the same as without it; the test compares the two.
- **refused**: with this status and message, whose `param` names the field.

The model's chat template supports tools and `reasoning_effort`, except where a row says so.
"""


def table(method: str, told: list[tuple[Row, str]]) -> str:
    """The table of a method."""
    lines = [f"## `client.{method}`", "", "| parameter | value | result | |", "| - | - | - | - |"]
    for row, effect in told:
        cells = (f"`{row.parameter}`", row.given, row.outcome, effect)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def document(clients: Clients) -> str:
    """The whole page, by calling."""
    told = [(row, row.see(clients)) for row in rows()]
    parts = [INTRODUCTION.format(version=openai.__version__)]
    for method in METHODS:
        parts.append(table(method, [one for one in told if one[0].method == method]))
    parts.append(routes_text(clients.whole))
    return "\n".join(parts)


if __name__ == "__main__":
    with clients() as both:
        print(document(both), end="")
