# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  (where the server's packages are missing, nothing else is imported)
"""Tools of a chat: the grammar of calls, reading calls from any pieces of text, and HTTP."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

for name in ("fastapi", "uvicorn", "pydantic", "jinja2", "httpx", "openai", "llguidance"):
    pytest.importorskip(name)
pytest.importorskip("jsonschema")

import httpx
import jsonschema
import openai
from fake_engine import FakeEngine, byte_tokenizer
from schemas import BY_HAND, record
from serving import Served, serving
from specops.api.config import BUNDLED_MODEL
from specops.api.structured import StructuredOutput
from specops.api.tokenizer import Tokenizer
from specops.cli.serve import _parser
from specops.engine import Engine, EngineConfig, SpeculativeConfig
from specops.engine.structured import GrammarCompiler, GrammarState
from specops.server import make_app
from specops.server.call_forms import HERMES, LLAMA, MISTRAL, MISTRAL_ARGS, QWEN3_CODER, CallForm
from specops.server.call_reader import CallReader
from specops.server.chat import ChatFormat
from specops.server.formats import CALL_PARSERS, REASONING_PARSERS, call_form_of
from specops.server.harmony import HARMONY
from specops.server.tools import Tool, calls_format
from specops.service.thread import ThreadClient
from tokenizers import AddedToken

# Like Qwen's: tools in the system message, calls between tags, results as user messages.
TEMPLATE = """
{%- if tools %}{{ "Call a function as <tool_call>{name, arguments}</tool_call>:\\n" }}
{%- for tool in tools %}{{ tool | tojson }}{{ "\\n" }}{% endfor %}{% endif %}
{%- for message in messages %}
{{- message.role }}: {{ message.content }}
{%- for call in message.tool_calls or [] -%}
<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}{{ "\\n" }}
{%- endfor %}assistant:"""

WEATHER = record(
    place={"enum": ["Bonn", "Rome"]}, days={"type": "integer", "minimum": 1, "maximum": 9}
)
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER, "strict": True}},
    {"type": "function", "function": {"name": "now", "description": "the time"}},
    {"type": "function", "function": {"name": "tree", "parameters": BY_HAND[35][0]}},
]
BY_NAME = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in TOOLS}


def state_of(choice: Any, parallel: bool = True, form: CallForm = HERMES) -> GrammarState:
    tools = [Tool(**tool) for tool in TOOLS]
    constraint = calls_format(tools, choice, parallel, form)
    assert constraint is not None
    return GrammarState(GrammarCompiler(TOKENIZER, 4096).compile(constraint), [0])


TOKENIZER = Tokenizer.from_dir(BUNDLED_MODEL)
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
RAIN = '<tool_call>\n{"name": "weather", "arguments": {"place": "Bonn", "days": 3}}\n</tool_call>'
TREE = '<tool_call>\n{"name": "tree", "arguments": {"v": 1, "next": {"v": 2}}}\n</tool_call>'


L_NOW = '{"name": "now", "parameters": {}}'
L_RAIN = '{"name": "weather", "parameters": {"place": "Bonn", "days": 3}}'
M_NOW = '{"name": "now", "arguments": {}}'
M_RAIN = '{"name": "weather", "arguments": {"place": "Bonn", "days": 3}}'


@pytest.mark.parametrize(
    "form,choice,parallel,text,fits",
    [
        (HERMES, "auto", True, "hello", True),
        (HERMES, "auto", True, f"hello\n{NOW}\n{RAIN}", True),
        (HERMES, "auto", True, f"{TREE}{NOW} bye", True),
        (HERMES, "auto", True, "a < b, <tool", True),
        (HERMES, "auto", True, "<tool_call>x", False),
        (HERMES, "auto", True, '<tool_call>\n{"name": "other"', False),
        (
            HERMES,
            "auto",
            True,
            '<tool_call>\n{"name": "weather", "arguments": {"place": "Paris"',
            False,
        ),
        (HERMES, "auto", False, f"hello {NOW}", True),
        (HERMES, "auto", False, f"{NOW}\n{NOW}", False),
        (HERMES, "required", True, f"{NOW}\n{TREE}", True),
        (HERMES, "required", True, "hello", False),
        (HERMES, "required", False, NOW, True),
        (HERMES, "required", False, f"{NOW}\n", False),
        (LLAMA, "auto", True, "hello {x}", True),
        (LLAMA, "auto", True, L_RAIN, True),
        (LLAMA, "auto", True, f"{L_RAIN}; {L_NOW}", True),
        (LLAMA, "auto", True, '{"x": 1}', False),
        (LLAMA, "auto", True, f"{L_RAIN} bye", False),
        (LLAMA, "auto", False, f"{L_RAIN}; {L_NOW}", False),
        (LLAMA, "required", False, L_NOW, True),
        (LLAMA, "required", True, "hello", False),
        (LLAMA, "required", True, '{"name": "weather", "parameters": {"place": "Paris"', False),
        (MISTRAL, "auto", True, "hello [x]", True),
        (MISTRAL, "auto", True, f"hello [TOOL_CALLS][{M_RAIN}, {M_NOW}]", True),
        (MISTRAL, "auto", True, f"[TOOL_CALLS][{M_RAIN}", False),
        (MISTRAL, "auto", True, "[TOOL_CALLS]x", False),
        (MISTRAL, "auto", False, f"[TOOL_CALLS][{M_RAIN}, {M_NOW}]", False),
        (MISTRAL, "required", True, f"[TOOL_CALLS][{M_NOW}]", True),
        (MISTRAL, "required", True, f"[{M_NOW}]", False),
    ],
)
def test_grammar_admits_valid_calls_only(
    form: CallForm, choice: Any, parallel: bool, text: str, fits: bool
) -> None:
    state = state_of(choice, parallel, form)
    taken = [state.take(token) for token in TOKENIZER.encode_as_text(text)]
    assert (all(taken) and state.may_end) == fits


def test_special_token_may_begin_calls() -> None:
    tokenizer = byte_tokenizer()
    inner = tokenizer._tokenizer
    inner.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True)])
    tokenizer = Tokenizer(inner, eos_token_ids=[0])
    (token,) = tokenizer.encode("[TOOL_CALLS]")
    assert tokenizer.decode([token]) == "[TOOL_CALLS]" and not tokenizer.is_special(token)
    for choice in ("auto", "required"):
        constraint = calls_format([Tool(**TOOLS[1])], choice, True, MISTRAL)
        assert constraint is not None
        state = GrammarState(GrammarCompiler(tokenizer, 258).compile(constraint), [0])
        assert all(map(state.take, [token, *tokenizer.encode(f"[{M_NOW}]")])) and state.may_end


@pytest.mark.parametrize(
    "source,form",
    [
        (TEMPLATE, HERMES),
        ('{{ tools }}Respond in the format {"name": function name, "parameters": dictionary of '
         "argument name and its value}.<|eot_id|>", LLAMA),
        ("{{ tools }}[AVAILABLE_TOOLS][TOOL_CALLS][", MISTRAL),
        ("{{ tools }}[TOOL_CALLS]name[ARGS]", MISTRAL_ARGS),
        ("{{ tools }}<tool_call><function=x>name arguments", QWEN3_CODER),
        ("{{ tools }}<tool_call>", None),
        ("{{ tools }}name arguments", None),
    ],
)  # fmt: skip
def test_template_determines_the_format_of_calls(source: str, form: CallForm | None) -> None:
    assert call_form_of(source) is ChatFormat(source).call_form is form
    assert ChatFormat(source, tool_call_parser="llama3_json").call_form is LLAMA


def test_flag_for_the_format_overrides_the_template(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tool_call_parser must be one of deepseek_v3, "):
        engine = FakeEngine()
        make_app(ThreadClient(engine), engine.tokenizer, tool_call_parser="pythonic")  # type: ignore[arg-type]
    (tmp_path / "chat_template.jinja").write_text("{{ tools }}")
    chat = ChatFormat.from_dir(tmp_path, {}, tool_call_parser="mistral")
    assert chat.call_form is MISTRAL
    chat.require_tools()
    choices = {one.dest: one.choices for one in _parser()._actions}
    assert choices["tool_call_parser"] == CALL_PARSERS
    assert choices["reasoning_parser"] == REASONING_PARSERS


def test_no_grammar_is_made_without_callable_tools() -> None:
    assert calls_format([], None, True) is None
    assert calls_format([Tool(**TOOLS[0])], "none", True) is None


@pytest.mark.parametrize("seed", range(20))
def test_calls_are_read_from_any_pieces_of_text(seed: int) -> None:
    draw = random.Random(seed)
    cases: list[tuple[str, str, int]] = [
        (f"hello\n{NOW}\n{RAIN}", "hello", 2),
        (f"{TREE}", "", 1),
        (f"a <b {RAIN} and {NOW}\n", "a <b and", 2),
        ("no call, <tool_cal", "no call, <tool_cal", 0),
        ("spaces \n ", "spaces \n ", 0),
        (f"{NOW}\n<tool_call>\n{{\"name\"", "<tool_call>\n{\"name\"", 1),
    ]  # fmt: skip
    others: list[tuple[str, str, int]] = [
        (f"{L_NOW}; {L_RAIN}", "", 2),
        ("hello {", "hello {", 0),
        (" \n", " \n", 0),
        (f" {L_RAIN[:-1]}", f"{L_RAIN[:-1]}", 0),
    ]
    lists: list[tuple[str, str, int]] = [
        (f"hello [TOOL_CALLS][{M_NOW}, {M_RAIN}]", "hello", 2),
        (f"[TOOL_CALLS][{M_RAIN}", "", 1),
        ("a list [1] [TOOL", "a list [1] [TOOL", 0),
        ('[TOOL_CALLS][{"name"', '[TOOL_CALLS][{"name"', 0),
    ]
    every = [*((HERMES, *case) for case in cases), *((LLAMA, *case) for case in others)]
    for form, text, content, count in [*every, *((MISTRAL, *case) for case in lists)]:
        reader, got, calls, at = CallReader(form), "", [], 0
        while at < len(text):
            size = draw.randrange(1, 9)
            more, found = reader.feed(text[at : at + size])
            got, calls, at = got + more, calls + found, at + size
        got += reader.finish()
        assert got == content and [call["index"] for call in calls] == list(range(count))
        for call in calls:
            arguments = json.loads(call["function"]["arguments"])
            jsonschema.validate(arguments, BY_NAME[call["function"]["name"]])
        assert len({call["id"] for call in calls}) == count
        assert all(len(call["id"]) == (form.id_length or 29) for call in calls)


def test_bundled_template_writes_calls_that_are_read_back() -> None:
    call = {"name": "weather", "arguments": {"place": "Bonn", "days": 3}}
    with serving(FakeEngine(), chat_format=None, chat_template="tools") as served:
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
        answer = httpx.post(
            f"{served.url}/v1/chat/completions",
            json={**body, "tools": TOOLS[1:2], "tool_choice": "none"},
        )
        assert answer.status_code == 200, answer.text
        plain = httpx.post(f"{served.url}/tokenize", json={"messages": body["messages"]}).json()
    assert answer.json()["usage"]["prompt_tokens"] > plain["count"] == len("user: x\nassistant:")
    source = (Path(make_app.__code__.co_filename).parent / "tools.jinja").read_text()
    said = {"role": "assistant", "content": "see", "tool_calls": [{"function": call}] * 2}
    text = ChatFormat(source).render([said], add_generation_prompt=False)
    content, calls = CallReader().feed(text)
    assert content == "assistant: see" and [one["function"]["name"] for one in calls] == [
        "weather",
        "weather",
    ]
    assert json.loads(calls[1]["function"]["arguments"]) == call["arguments"]


def test_closing_tag_inside_an_argument_does_not_end_a_call() -> None:
    text = '<tool_call>\n{"name": "now", "arguments": {"a": "</tool_call>}"}}\n</tool_call>'
    for cut in range(len(text)):
        reader = CallReader()
        calls = reader.feed(text[:cut])[1] + reader.feed(text[cut:])[1]
        assert [call["function"]["arguments"] for call in calls] == ['{"a": "</tool_call>}"}']


# Arguments that a grammar admits but values of Python or JavaScript do not preserve.
EXACT = [
    '{"x": 1e999}',
    '{"x": -1e999, "y": [1E5, 1e5, 1.0, 1.50, -0, -0.0]}',
    '{"x": 0.1234567890123456789012345678901234567890}',
    '{"x": 1, "x": 2}',
    f'{{"x": {"9" * 4300}}}',
    f'{{"x": -{"9" * 5000}}}',
    '{"x": "\\ud800 \\u00e9 \\/ é 🌍 {\\"}"}',
    '{"x":\t{ },"y" :[ ]\n}',
    f'{{"x": {"[" * 99}{"]" * 99}}}',
    '{"x": {"NaN": "Infinity", "": null}}',
]
ROUND = {
    HERMES: '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>',
    LLAMA: '{"name": "f", "parameters": %s}',
    MISTRAL: '[TOOL_CALLS][{"name": "f", "arguments": %s}]',
}


def read(form: CallForm, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    reader, content, calls = CallReader(form), "", []
    for piece in pieces:
        more, found = reader.feed(piece)
        content += more
        calls += [(one["function"]["name"], one["function"]["arguments"]) for one in found]
    return content + reader.finish(), calls


@pytest.mark.parametrize("form", ROUND, ids=lambda form: form.name)
def test_arguments_are_the_exact_text_of_the_model(form: CallForm) -> None:
    for arguments in EXACT:
        text = ROUND[form] % arguments
        assert read(form, [text]) == read(form, list(text)) == ("", [("f", arguments)])


@pytest.mark.parametrize("form", ROUND, ids=lambda form: form.name)
def test_invalid_call_stays_text(form: CallForm) -> None:
    whole = ROUND[form]
    wrong = [
        *(whole % one for one in ('{"x": NaN}', '{"x": -Infinity}', "{'x': 1}", '{"x": 01}')),
        *(whole % one for one in ('{"x": "\t"}', "{1: 2}", '{"x" 1}', '{"x": 1,}', '{"x": 1]')),
        whole % f'{{"x": {"[" * 100}{"]" * 100}}}',
        whole % f'{{"x": {"[" * 20_000}{"]" * 20_000}}}',
        whole.replace('"name": "f", ', "") % "{}",
        whole.replace('"f"', "7") % "{}",
        whole.replace("arguments", "x").replace("parameters", "x") % "{}",
        whole[:-1] % '{"x": [' + '{"a":' * 5000,
    ]
    if form.opening:
        wrong += [f"a {form.opening}", f"{form.opening} 12 {form.opening[:3]}"]
    for text in wrong:
        assert read(form, [text]) == read(form, list(text)) == (text, [])
    # It does not hide the next call.
    if form is HERMES:
        good = whole % "{}"
        assert read(form, [f"{wrong[0]} {good}"]) == (wrong[0], [("f", "{}")])


def mutated(draw: random.Random, text: str) -> str:
    """Return a text with some characters replaced, inserted, removed or repeated elsewhere."""
    marks = ['"', "\\", "{", "}", "[", "]", ",", ":", ";", " ", "\n", "e", "1", "é", "<", ">"]
    marks += ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "NaN", "1e999", "\\u", "null"]
    for _ in range(draw.randrange(4)):
        at, end = sorted(draw.randrange(len(text) + 1) for _ in range(2))
        end = min(end, at + draw.choice([1, 1, 2, 5, 40]))
        other = draw.choice(
            ["", draw.choice(marks), text[at:end] * 2, draw.choice("[{") * draw.choice([9, 150])]
        )
        text = text[:at] + other + text[end:]
    return text


def mutations(count: int, seed: int) -> Iterator[tuple[CallForm, str]]:
    draw = random.Random(seed)
    texts = {
        HERMES: [f"hello\n{NOW}\n{RAIN}", f"{TREE} a < b"],
        LLAMA: [f"{L_NOW}; {L_RAIN}", f" {L_RAIN}"],
        MISTRAL: [f"hello [TOOL_CALLS][{M_NOW}, {M_RAIN}] [1]", f"[TOOL_CALLS][{M_RAIN}]"],
    }
    for form in ROUND:
        texts[form] += [ROUND[form] % one for one in EXACT if len(one) < 300]
    for _ in range(count):
        form = draw.choice(list(texts))
        yield form, mutated(draw, draw.choice(texts[form]))


def strictly(text: str) -> Any:
    """Return the value of a JSON text as a strict parser reads it."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse, parse_int=str)


def test_mutated_calls_are_read_the_same_from_any_pieces() -> None:
    draw, num_calls, num_texts = random.Random(1), 0, 0
    for form, text in mutations(1000, 0):
        content, calls = read(form, [text])
        for _, arguments in calls:
            strictly(arguments)
            assert arguments in text
        cuts = sorted(draw.randrange(len(text) + 1) for _ in range(draw.randrange(1, 9)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert read(form, pieces) == read(form, list(text)) == (content, calls), text
        num_calls += len(calls)
        num_texts += not calls
    assert num_calls > 300 and num_texts > 100


def data_of(answer: httpx.Response) -> list[Any]:
    """Return the events of a stream."""
    lines = [one[6:] for one in answer.text.split("\n") if one.startswith("data: {")]
    return [strictly(line) for line in lines]


def calls_everywhere(client: httpx.Client, text: str) -> list[tuple[str, list[str]]]:
    """Return the text and arguments of a model's answer by each API, whole and streamed."""

    def post(path: str, **body: Any) -> httpx.Response:
        answer = client.post(f"/v1/{path}", json=body)
        assert answer.status_code == 200, answer.text
        return answer

    found = []
    size = len(text.encode())
    function = {"name": "f", "parameters": {"type": "object"}}
    request = {"messages": [{"role": "user", "content": text}], "max_tokens": size}
    ask = {**request, "tools": [{"type": "function", "function": function}]}
    message = strictly(post("chat/completions", **ask).text)["choices"][0]["message"]
    calls = [one["function"]["arguments"] for one in message.get("tool_calls") or []]
    found.append((message["content"] or "", calls))
    deltas = [
        choice["delta"]
        for event in data_of(post("chat/completions", **ask, stream=True))
        for choice in event["choices"]
    ]
    said = "".join(one.get("content") or "" for one in deltas)
    called = [call for one in deltas for call in one.get("tool_calls") or []]
    found.append((said, [one["function"]["arguments"] for one in called]))

    tools = [{"type": "function", **function}]
    ask = {"input": text, "max_output_tokens": size, "tools": tools}
    streamed = data_of(post("responses", **ask, stream=True))[-1]["response"]
    for response in (strictly(post("responses", **ask).text), streamed):
        output = response["output"]
        texts = [one["content"][0]["text"] for one in output if one["type"] == "message"]
        calls = [one["arguments"] for one in output if one["type"] == "function_call"]
        found.append(("".join(texts), calls))

    ask = {**request, "tools": [{"name": "f", "input_schema": {"type": "object"}}]}
    whole = post("messages", **ask).text
    json.loads(whole)  # as an ordinary client reads it
    texts = [one["text"] for one in strictly(whole)["content"] if one["type"] == "text"]
    inputs = [one["input"] for one in strictly(whole)["content"] if one["type"] == "tool_use"]
    deltas = [
        one["delta"] for one in data_of(post("messages", **ask, stream=True)) if "delta" in one
    ]
    said = "".join(one.get("text", "") for one in deltas)
    calls = [one["partial_json"] for one in deltas if "partial_json" in one]
    found.append((said, calls))
    assert "".join(texts) == said and len(inputs) == len(calls)
    for value, arguments in zip(inputs, calls, strict=True):
        if "9" * 4301 not in arguments:  # becomes a decimal number with the same digits
            assert value == strictly(arguments)
        elif isinstance(value, dict):
            assert value["x"] == float(strictly(arguments)["x"])
        assert arguments in whole or "9" * 4301 in arguments
    return found


class Unconstrained(FakeEngine):
    """Engine that repeats its prompt despite the grammar, so that any text is an answer."""

    def compile_structured_output(self, constraint: StructuredOutput, overdue: object) -> None:
        pass


def test_every_api_returns_the_same_calls() -> None:
    engine = Unconstrained(
        EngineConfig(
            speculative_config=SpeculativeConfig(method="ngram", num_speculative_tokens=6),
            max_model_len=40_000,
        ),
        most_accepted=4,
    )
    chat = ChatFormat(
        "{% if tools %}{% endif %}{{ messages[0].content }}", tool_call_parser="hermes"
    )
    exact = [one for one in EXACT if len(one) < 300] + [f'{{"x": {"9" * 4301}}}']
    texts = [ROUND[HERMES] % arguments for arguments in exact]
    texts += [text for form, text in mutations(40, 7) if form is HERMES]
    texts.append(ROUND[HERMES] % f'{{"x": {"[" * 101}{"]" * 101}}}')
    with serving(engine, chat_format=chat) as one, httpx.Client(base_url=one.url) as http:
        for index, text in enumerate(texts):
            found = calls_everywhere(http, text)
            assert found == found[:1] * 5, text
            assert index >= len(exact) or found[0][1] == [exact[index]]
        one.wait_until_idle()


@pytest.fixture(scope="module")
def repeating() -> Iterator[httpx.Client]:
    """Serve a template that shows tools, calls and variables; yield a client."""
    engine = Unconstrained(EngineConfig(served_model_name="fake", max_model_len=40_000))
    chat = ChatFormat(TEMPLATE + "{{ shown | default(0) | tojson }}")
    with serving(engine, chat_format=chat) as one, httpx.Client(base_url=one.url) as http:
        yield http
        one.wait_until_idle()


def with_arguments(arguments: str) -> dict[str, dict[str, Any]]:
    """Return request bodies of a conversation with a call, by path."""
    function = {"name": "now", "arguments": arguments}
    call = {"role": "assistant", "tool_calls": [{"id": "1", "function": function}]}
    ask = {"role": "user", "content": "x"}
    item = {"type": "function_call", "call_id": "1", **function}
    return {
        "/v1/chat/completions": {"messages": [call, ask], "max_tokens": 1},
        "/v1/responses": {"input": [item, ask], "max_output_tokens": 1},
        "/tokenize": {"messages": [call, ask], "return_token_strs": True},
    }


def test_prompt_has_the_exact_arguments_of_a_call(repeating: httpx.Client) -> None:
    for arguments in EXACT:
        if "\t" in arguments or "ud800" in arguments or '"x": 2' in arguments:
            continue  # templates write white space and strings in their own way
        body = with_arguments(arguments)["/tokenize"]
        shown = "".join(repeating.post("/tokenize", json=body).json()["token_strs"])
        assert f'"arguments": {arguments}}}' in shown
    for path, body in with_arguments(EXACT[0]).items():
        assert repeating.post(path, json=body).status_code == 200


@pytest.mark.parametrize(
    "arguments,why",
    [
        ('{"x": NaN}', "NaN is not a JSON number"),
        ('{"x": [-Infinity]}', "-Infinity is not a JSON number"),
        (f'{{"x": {"[" * 100}{"]" * 100}}}', "nested more than 100 levels deep"),
        (f'{{"x": {"[" * 1000}{"]" * 1000}}}', "nested more than 100 levels deep"),
        ("[" * 100_000, "nested more than 100 levels deep"),
    ],
)
def test_invalid_arguments_are_refused(repeating: httpx.Client, arguments: str, why: str) -> None:
    for path, body in with_arguments(arguments).items():
        answer = repeating.post(path, json=body)
        assert answer.status_code == 400 and why in answer.json()["error"]["message"], path


def test_deep_bodies_are_answered_or_refused(repeating: httpx.Client) -> None:
    ask = {"role": "user", "content": "x"}
    for depth in (60, 99, 100, 101, 123, 129, 200, 700):
        value: Any = {}
        for _ in range(depth - 1):
            value = {"not": value}
        text = '{"not":' * (depth - 1) + "{}" + "}" * (depth - 1)
        chat = {"messages": [ask], "max_tokens": 1}
        use = {"type": "tool_use", "id": "1", "name": "now", "input": value}
        used = {"messages": [ask, {"role": "assistant", "content": [use]}, ask]}
        part = {"type": "output_text", "text": "x", "annotations": [value]}
        said = [{"role": "assistant", "content": [part]}, ask]
        function = {"name": "f", "parameters": value}
        tool, most = {"type": "function", **function}, {"max_output_tokens": 1}
        calls = [
            *with_arguments(text).items(),
            ("/v1/messages", {**used, "max_tokens": 1}),
            ("/v1/messages/count_tokens", used),
        ]
        others: list[tuple[str, dict[str, Any]]] = [
            *(
                ("/v1/chat/completions", {**chat, **more})
                for more in (
                    {"tools": [{"type": "function", "function": function}]},
                    {"tool_choice": value},
                    {"chat_template_kwargs": {"shown": value}},
                    {"speculative_config": value},
                    {"metadata": value},
                    {"response_format": {"type": "json_schema", "json_schema": {"schema": value}}},
                    {"structured_outputs": {"json": text}},
                    {"structured_outputs": {"structural_tag": text}},
                    {"structured_outputs": {"grammar": f"start: %json {text}"}},
                )
            ),
            ("/v1/completions", {"prompt": value, "max_tokens": 1}),
            ("/v1/responses", {"input": said, **most}),
            ("/v1/responses", {"input": "x", "tools": [tool], **most}),
        ]
        for path, body in calls:
            status = repeating.post(path, json=body).status_code
            assert status == (200 if depth <= 100 else 400), (path, depth)
        for path, body in others:
            answer = repeating.post(path, json=body)
            assert answer.status_code in (200, 400), (path, depth, [*body], answer.text)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    speculative = SpeculativeConfig(method="mtp", num_speculative_tokens=4)
    engine = Engine(EngineConfig(device="cpu", speculative_config=speculative))
    with serving(engine, chat_format=ChatFormat(TEMPLATE)) as one:
        yield one


def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=300)


ASK: dict[str, Any] = {
    "model": "specops-bundled",
    "messages": [{"role": "user", "content": "How is the weather in Bonn?"}],
    "max_tokens": 120,
    "tools": TOOLS,
}


def check_calls(message: Any) -> int:
    for call in message.tool_calls or []:
        jsonschema.validate(json.loads(call.function.arguments), BY_NAME[call.function.name])
    return len(message.tool_calls or [])


def test_required_and_named_calls_are_made(served: Served) -> None:
    seen = set()
    for seed in range(6):
        texts = set()
        for method in ("naive", "ngram", "suffix", "mtp"):
            done = client(served).chat.completions.create(
                **ASK, temperature=1.0, seed=seed, tool_choice="required",
                parallel_tool_calls=False,
                extra_body={"speculative_config": {"method": method}},
            )  # fmt: skip
            choice = done.choices[0]
            if choice.finish_reason != "length":
                assert choice.finish_reason == "tool_calls" and choice.message.content is None
                assert check_calls(choice.message) == 1
                seen.add(choice.message.tool_calls[0].function.name)
            calls = [call.function.model_dump_json() for call in choice.message.tool_calls or []]
            texts.add((choice.message.content, *calls))
        assert len(texts) == 1
    assert len(seen) > 1
    named = {"type": "function", "function": {"name": "weather"}}
    done = client(served).chat.completions.create(**ASK, temperature=0, tool_choice=named)
    assert done.choices[0].finish_reason == "stop" and check_calls(done.choices[0].message) == 1
    assert done.choices[0].message.tool_calls[0].function.name == "weather"


def test_streamed_calls_equal_those_of_the_whole_answer(served: Served) -> None:
    for choice in ("auto", "required"):
        body = {**ASK, "temperature": 0.7, "seed": 5, "tool_choice": choice, "tools": TOOLS[:2]}
        body["parallel_tool_calls"] = choice == "auto"
        whole = client(served).chat.completions.create(**body).choices[0]
        content, calls, reason = "", [], None
        for chunk in client(served).chat.completions.create(**body, stream=True):
            for part in chunk.choices:
                content += part.delta.content or ""
                calls += part.delta.tool_calls or []
                reason = part.finish_reason or reason
        assert content == (whole.message.content or "") and reason == whole.finish_reason
        expected = [call.function for call in whole.message.tool_calls or []]
        assert [(one.function.name, one.function.arguments) for one in calls] == [
            (one.name, one.arguments) for one in expected
        ]
        assert (choice == "required") <= bool(calls)


@pytest.mark.parametrize("form", [LLAMA, MISTRAL, QWEN3_CODER, HARMONY], ids=lambda form: form.name)
def test_other_formats_of_calls_work_over_http(form: CallForm) -> None:
    speculative = SpeculativeConfig(method="ngram", num_speculative_tokens=4)
    engine = Engine(EngineConfig(device="cpu", speculative_config=speculative))
    with serving(engine, chat_format=ChatFormat(TEMPLATE, tool_call_parser=form.name)) as one:
        for choice in ("required", "auto"):
            body = {**ASK, "tools": TOOLS[:2], "tool_choice": choice, "temperature": 0.7, "seed": 2}
            body["parallel_tool_calls"] = False
            seen = set()
            for method in ("naive", "ngram"):
                own = {"speculative_config": {"method": method}}
                whole = client(one).chat.completions.create(**body, extra_body=own).choices[0]
                number = check_calls(whole.message)
                # Every answer of gpt-oss begins with a header, so this model may well begin a call.
                assert number == (choice == "required") or (form is HARMONY and choice == "auto")
                calls = whole.message.tool_calls or []
                seen.add((whole.message.content, *(str(call.function) for call in calls)))
                assert all(len(call.id) == (form.id_length or 29) for call in calls)
            assert len(seen) == 1
            content, parts = "", []
            for chunk in client(one).chat.completions.create(**body, stream=True):
                for part in chunk.choices:
                    content += part.delta.content or ""
                    parts += part.delta.tool_calls or []
            assert content == (whole.message.content or "")
            assert [(part.function.name, part.function.arguments) for part in parts] == [
                (call.function.name, call.function.arguments) for call in calls
            ]


def test_conversation_may_contain_calls(served: Served) -> None:
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"days": 1}'},
    }
    messages = [
        *ASK["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]
    done = client(served).chat.completions.create(
        **{**ASK, "messages": messages, "tool_choice": "none"}
    )
    assert done.choices[0].message.tool_calls is None
    read = {"function": {"name": "weather", "arguments": {"days": 1}}}
    shown = ChatFormat(TEMPLATE).render(
        [{"role": "assistant", "content": "", "tool_calls": [read]}]
    )
    assert '{"name": "weather", "arguments": {"days": 1}}' in shown


@pytest.mark.parametrize(
    "change,param,message",
    [
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "different names"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "got 'a b'"),
        ({"tools": [{"type": "code"}]}, "tools.0.type", "got 'code'"),
        ({"tools": [TOOLS[1]] * 129}, "tools", "at most 128"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "requires tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}},
         "tool_choice", "got 'x'"),
        ({"tool_choice": "sometimes"}, "tool_choice", "sometimes"),
        ({"response_format": {"type": "json_object"}}, "response_format", "must be absent"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "x"}}}]},
         "tools", "cannot be used"),
        ({"messages": [{"role": "assistant"}]}, "messages", "got none"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id", "is missing"),
        ({"messages": [{"role": "assistant", "tool_calls": [
            {"id": "1", "function": {"name": "a", "arguments": "["}}]}]}, "messages", "valid JSON"),
    ],
)  # fmt: skip
def test_invalid_tools_are_refused(
    served: Served, change: dict[str, Any], param: str, message: str
) -> None:
    body = {**ASK, **change}
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=300)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param, error
    assert message in error["message"], error


@pytest.mark.parametrize(
    "template,message",
    [
        ("{{ messages[0].content }}", "the model's chat template does not list them"),
        ("{{ tools }}<tool_call>", "to one of deepseek_v3, deepseek_v31, deepseek_v32, glm45"),
        ("{{ tools }}name arguments", "set --tool-call-parser to"),
    ],
)
def test_templates_without_a_known_format_of_calls_are_refused(template: str, message: str) -> None:
    chat = ChatFormat(template)
    with pytest.raises(ValueError, match=message):
        chat.require_tools()
    ChatFormat(TEMPLATE).require_tools()
