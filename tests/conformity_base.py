# SPDX-License-Identifier: Apache-2.0
"""Building blocks of the conformity rows: clients, methods, and checks of calls."""

import contextlib
import inspect
import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from unittest import mock

import anthropic
import openai
from fake_engine import FakeEngine
from serving import Served, serving
from specops.engine import Engine, EngineConfig, RequestOutput, SpeculativeConfig
from specops.server.chat import ChatFormat

# Supports tools, `reasoning_effort` and `enable_thinking`, which the bundled model's own template
# does not.
TEMPLATE = """
{%- if enable_thinking %}think{{ "\\n" }}{% endif %}
{%- if reasoning_effort %}effort: {{ reasoning_effort }}{{ "\\n" }}{% endif %}
{%- if tools %}Call as <tool_call>{name, arguments}</tool_call>:{{ "\\n" }}{% endif %}
{%- for tool in tools or [] %}{{ tool | tojson }}{{ "\\n" }}{% endfor %}
{%- for message in messages %}{{ message.role }}: {{ message.content }}{{ "\\n" }}{% endfor -%}
assistant:"""
MODEL = "specops-bundled"

HONOURED, WITHOUT, REFUSED = "honored", "no effect", "refused"

PROMPT = "x = [0, 0, 0, 0, 0, 0, 0,"
ASK = {"role": "user", "content": PROMPT}
WEATHER = {
    "type": "object",
    "properties": {"place": {"enum": ["Bonn", "Rome"]}},
    "required": ["place"],
    "additionalProperties": False,
}


class Clients:
    """Official clients of a server with all features, and of one with a minimal template."""

    def __init__(self, served: Served, bare: Served) -> None:
        self.served = served
        self.whole = _openai(served)
        self.bare = _openai(bare)
        self.anthropic = _anthropic(served)
        self.anthropic_bare = _anthropic(bare)
        self._results: dict[Row, str] = {}

    def result_of(self, row: "Row") -> str:
        """Return the result of a row; each row runs once."""
        if row not in self._results:
            self._results[row] = row.see(self)
        return self._results[row]

    @cached_property
    def stored_response(self) -> str:
        """Id of a stored response, with two input items."""
        return self.store_response()

    def store_response(self) -> str:
        """Store a new response and return its id."""
        create = self.whole.responses.create
        return create(model=MODEL, input=[ASK, ASK], max_output_tokens=4).id

    @cached_property
    def method_answers(self) -> dict[str, Any]:
        """Answer of each method when called with its base arguments only."""
        return {name: method.call(self)() for name, method in METHODS.items()}


def _openai(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=300)


def _anthropic(served: Served) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0, timeout=300)


@contextlib.contextmanager
def clients() -> Iterator[Clients]:
    """Run both servers until the block ends, and check that the first one is then idle."""
    speculative = SpeculativeConfig.from_dict(
        {"method": "ngram", "num_speculative_tokens": 4, "min_ngram_size": 1}
    )
    sizes = {"max_num_seqs": 8, "num_threads": 1}
    engine = Engine(EngineConfig(device="cpu", speculative_config=speculative, **sizes))
    with (
        serving(engine, chat_format=ChatFormat(TEMPLATE)) as served,
        serving(FakeEngine()) as bare,
    ):
        yield Clients(served, bare)
        served.wait_until_idle()


@dataclass(frozen=True)
class Method:
    """A method of a client, and the arguments that its rows have in common."""

    name: str
    base: Mapping[str, Any]
    package: str = "openai"
    of_response: bool = False  # whether the method takes the id of a stored response

    def arguments(self, clients: Clients) -> dict[str, Any]:
        """Return the arguments that the method's rows have in common."""
        if not self.of_response:
            return {**self.base}
        is_last = self.name == "responses.delete"
        return {
            **self.base,
            "response_id": clients.store_response() if is_last else clients.stored_response,
        }

    def of(self, clients: Clients, *, bare: bool = False, raw: bool = False) -> Callable[..., Any]:
        """Return the method, bound to a client of the `bare` server or of the complete one."""
        if self.package == "openai":
            return self._method(clients.bare if bare else clients.whole, raw)
        return self._method(clients.anthropic_bare if bare else clients.anthropic, raw)

    def _method(self, client: Any, raw: bool = False) -> Callable[..., Any]:
        *path, last = self.name.split(".")
        owner: Any = client
        for part in path:
            owner = getattr(owner, part)
        method: Callable[..., Any] = getattr(owner.with_raw_response if raw else owner, last)
        return method

    def call(self, clients: Clients, *, raw: bool = False) -> Callable[..., Any]:
        """Return the method with its base arguments, which a caller can replace."""
        method, base = self.of(clients, raw=raw), self.arguments(clients)
        return lambda **changes: method(**{**base, **changes})

    def connect(self, url: str) -> Any:
        """Return a client of another server."""
        if self.package == "openai":
            return self._method(openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0))
        return self._method(anthropic.Anthropic(base_url=url, api_key="none", max_retries=0))

    @property
    def parameters(self) -> list[str]:
        """Names of the method's parameters, in the client's order."""
        return list(inspect.signature(self.connect("http://127.0.0.1:9")).parameters)


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
        Method(
            "responses.create",
            {"model": MODEL, "input": PROMPT, "max_output_tokens": 24, "temperature": 0},
        ),
        Method("responses.retrieve", {"response_id": "resp_0"}, of_response=True),
        Method("responses.delete", {"response_id": "resp_0"}, of_response=True),
        Method("responses.input_items.list", {"response_id": "resp_0"}, of_response=True),
        Method("models.list", {}),
        Method("models.retrieve", {"model": MODEL}),
        Method(
            "messages.create",
            {
                "model": MODEL,
                "messages": [ASK],
                "max_tokens": 24,
                "extra_body": {"temperature": 0},
            },
            "anthropic",
        ),
        Method("messages.count_tokens", {"model": MODEL, "messages": [ASK]}, "anthropic"),
    )
}


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        method: a name of METHODS.
        parameter: parameter of the method.
        value_text: the value, as the table shows it.
        outcome: HONOURED, WITHOUT or REFUSED.
        see: function that makes the call, checks the outcome, and returns the table's text.
    """

    method: str
    parameter: str
    value_text: str
    outcome: str
    see: Callable[[Clients], str]

    @property
    def id(self) -> str:
        return f"{self.method}({self.parameter}={self.value_text})"


Check = Callable[[Callable[..., Any]], bool]


def honored(method: str, parameter: str, value_text: str, effect: str, check: Check) -> Row:
    """Return a row of an effective parameter; `check` calls the method and checks the effect."""

    def see(clients: Clients) -> str:
        assert check(METHODS[method].call(clients)), effect
        return effect

    return Row(method, parameter, value_text, HONOURED, see)


def without(method: str, parameter: str, value: Any, why: str) -> Row:
    """Return a row of a value without effect: the answer is the same as without it."""

    def see(clients: Clients) -> str:
        with_it = METHODS[method].call(clients)(**{parameter: value})
        assert stable(with_it) == stable(clients.method_answers[method])
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
    value_text: str | None = None,
    **more: Any,
) -> Row:
    """Return a row of a value that is refused.

    Args:
        method, parameter, value: fields of the row.
        named: name in the refusal, if not the parameter itself.
        bare: use a server whose model's chat template has neither tools nor variables.
        status: status of the refusal.
        value_text: the value as the table shows it, if not in the notation of `shown`.
        more: other arguments of the call.
    """

    def see(clients: Clients) -> str:
        call = METHODS[method].of(clients, bare=bare)
        base = {**METHODS[method].arguments(clients), **({"model": "fake"} if bare else {}), **more}
        try:
            call(**{**base, parameter: value})
        except (openai.APIStatusError, anthropic.APIStatusError) as error:
            assert error.status_code == status
            return f"{status}: {_message(error, named or parameter)}"
        raise AssertionError(f"{parameter} was not refused")

    label = (value_text or shown(value)) + "".join(
        f", {name}={shown(argument)}" for name, argument in more.items()
    )
    return Row(method, parameter, label + (", template without it" if bare else ""), REFUSED, see)


def unread(method: str, parameter: str, value: Any, named: str) -> Row:
    """Return a row of a variable that the template does not read; `named` is in the header."""

    def see(clients: Clients) -> str:
        call = METHODS[method].of(clients, bare=True, raw=True)
        answer = call(**{**METHODS[method].arguments(clients), "model": "fake", parameter: value})
        assert answer.headers["x-ignored-fields"] == named
        return f"the answer's header `x-ignored-fields` is `{named}`"

    label = shown(value) + ", template without it"
    return Row(method, parameter, label, WITHOUT, see)


def _message(error: openai.APIStatusError | anthropic.APIStatusError, name: str) -> str:
    """Return a refusal's message, after checking its shape and that it names `name`."""
    body: Any = error.body
    if isinstance(error, openai.APIStatusError):
        assert set(body) == {"message", "type", "param", "code"} and error.code == body["code"]
        assert name == "model" or (error.param or "").startswith(name), body
    else:
        assert set(body) == {"type", "error"} and set(body["error"]) == {"type", "message"}
        body = body["error"]
    assert name in body["message"], body
    return str(body["message"])


def shown(value: Any) -> str:
    """Return a value in the notation of Python and the table."""
    return f"`{json.dumps(value) if isinstance(value, (dict, list, str)) else repr(value)}`"


def blocks(reply: Any) -> list[Any]:
    """Return the items of a response, or the content of a message."""
    found: list[Any] = reply.output if hasattr(reply, "output") else reply.content
    return found


def stable(reply: Any) -> Any:
    """Return the parts of an answer that are the same in every call."""
    if reply is None:
        return None
    if hasattr(reply, "choices"):
        return [choice.model_dump() for choice in reply.choices], reply.usage.completion_tokens
    if hasattr(reply, "output") or hasattr(reply, "content"):
        found = [one.model_dump(exclude={"id", "call_id"}) for one in blocks(reply)]
        return found, reply.usage.output_tokens
    if hasattr(reply, "input_tokens"):
        return reply.input_tokens
    return [one.id for one in getattr(reply, "data", [reply])]


def text(reply: Any) -> str:
    """Return the text of an answer."""
    if hasattr(reply, "output_text"):
        return str(reply.output_text)
    if hasattr(reply, "content"):
        return "".join(one.text for one in reply.content if one.type == "text")
    choice = reply.choices[0]
    result: str = choice.text if hasattr(choice, "text") else choice.message.content
    return result


def silent_timeout(method: str) -> str:
    """Check the client's own timeout on a silent server, for calls without generation."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        try:
            METHODS[method].connect(url)(**METHODS[method].base, timeout=0.1)
        except (openai.APITimeoutError, anthropic.APITimeoutError):
            return "the client gives up"
    raise AssertionError("the client waited")


@contextlib.contextmanager
def no_steps(engine: Engine) -> Iterator[None]:
    """Make an engine's steps return nothing until the block ends."""

    def held() -> list[RequestOutput]:
        time.sleep(0.001)
        return []

    with mock.patch.object(engine, "step", held):
        yield


def transport_rows(method: str, most: str | None) -> list[Row]:
    """Return the rows about the call itself: its headers, its query, and its timeout.

    Args:
        method: method of a client.
        most: parameter that limits the tokens of an answer; None if the method generates none.
    """

    def header(clients: Clients) -> str:
        call = METHODS[method].call(clients, raw=True)
        answer = call(extra_headers={"X-Request-Id": "my-own"})
        assert answer.headers["x-request-id"] == "my-own"
        return "the answer repeats it"

    def timeout(clients: Clients) -> str:
        if most is None:
            return silent_timeout(method)
        try:
            with no_steps(clients.served.engine):
                METHODS[method].call(clients)(
                    **{most: 900}, timeout=0.05, extra_body={"ignore_eos": True}
                )
        except (openai.APITimeoutError, anthropic.APITimeoutError):
            return "the client gives up, and the server ends the request"
        raise AssertionError("the client waited")

    return [
        Row(method, "extra_headers", shown({"X-Request-Id": "my-own"}), HONOURED, header),
        without(method, "extra_query", {"a": "b"}, "no route reads it"),
        Row(method, "timeout", "seconds", HONOURED, timeout),
    ]
