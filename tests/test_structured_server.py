# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  (where the server's packages are missing, nothing else is imported)
"""Constrained output over HTTP: the fields of OpenAI and vLLM, errors, and slow grammars."""

import concurrent.futures
import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest

for name in ("fastapi", "uvicorn", "pydantic", "jinja2", "httpx", "openai", "llguidance"):
    pytest.importorskip(name)
pytest.importorskip("jsonschema")

import httpx
import jsonschema
import openai
from schemas import BY_HAND, bounded, record
from serving import HANG_SECONDS, Served, hang_up_on, serving
from specops.engine import Engine, EngineConfig, SpeculativeConfig, StructuredOutput
from specops.engine.structured import compiler
from specops.server.dispatch import Dispatch
from specops.server.jobs import Job
from specops.service import loop

# The model continues the prompt with the trigger.
TAGS = {
    "type": "structural_tag",
    "structures": [{"begin": "{", "schema": {"const": [7]}, "end": "}"}],
    "triggers": ["{"],
}
FORMAT = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "tags": [{"begin": "{", "content": {"type": "regex", "pattern": "\\[7\\]"}, "end": "}"}],
        "triggers": ["{"],
    },
}
HTTP = httpx.Client(timeout=HANG_SECONDS)
PERSON, EXAMPLE = BY_HAND[25]
PROMPT = f"values = [\n{json.dumps(EXAMPLE)},\n{json.dumps(EXAMPLE)},\n"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    engine = Engine(
        EngineConfig(
            device="cpu",
            speculative_config=SpeculativeConfig(method="mtp", num_speculative_tokens=4),
        )
    )
    with serving(engine) as one, pytest.MonkeyPatch.context() as patch:
        patch.setattr("specops.engine.structured.compiler._COMPILE_SECONDS", HANG_SECONDS)
        yield one


def complete(served: Served, **body: Any) -> httpx.Response:
    requested = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, **body}
    return HTTP.post(f"{served.url}/v1/completions", json=requested)


def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=300)


def compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def wrapped(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}


def test_schema_in_openai_format_constrains_the_text(served: Served) -> None:
    texts = set()
    for method in ("naive", "ngram", "suffix", "mtp"):
        done = client(served).chat.completions.create(
            model="specops-bundled",
            messages=[{"role": "user", "content": PROMPT}],
            max_tokens=60,
            temperature=0.7,
            seed=1,
            response_format=wrapped(PERSON),  # type: ignore[arg-type]
            extra_body={"speculative_config": {"method": method}},
        )
        choice = done.choices[0]
        assert choice.finish_reason == "stop" and choice.message.content is not None
        jsonschema.validate(json.loads(choice.message.content), PERSON)
        texts.add(choice.message.content)
    assert len(texts) == 1


@pytest.mark.parametrize(
    "field,value,allows",
    [
        ("response_format", {"type": "json_object"}, lambda text: type(json.loads(text)) is dict),
        ("structured_outputs", {"json_object": True}, lambda text: type(json.loads(text)) is dict),
        ("structured_outputs", {"json": {"enum": ["a", "b"]}}, lambda text: text[1] in "ab"),
        ("structured_outputs", {"json": '{"const": 5}'}, lambda text: text == "5"),
        ("structured_outputs", {"regex": "x{3}y?"}, lambda text: text in ("xxx", "xxxy")),
        ("structured_outputs", {"choice": ["one", "two"]}, lambda text: text in ("one", "two")),
        ("structured_outputs", {"grammar": 'start: "a" "b"+ "c"'}, lambda text: text[-1] == "c"),
        ("structured_outputs", {"json": PERSON, "disable_any_whitespace": True},
         lambda text: text == compact(json.loads(text))),
        ("structured_outputs", {"json": PERSON, "whitespace_pattern": "\\n",
                                "disable_any_whitespace": False},
         lambda text: " " not in re.sub('"[^"]*"', "", text)),
    ],
)  # fmt: skip
def test_every_kind_of_constraint_is_supported(
    served: Served, field: str, value: Any, allows: Any
) -> None:
    body: dict[str, Any] = {"max_tokens": 200, "logit_bias": {}, field: value}
    if "json_object" in str(value):
        body |= {"temperature": 0.9, "seed": 3, "prompt": 'd = {"a": 1}\ne = '}
    answer = complete(served, **body).json()
    choice = answer["choices"][0]
    assert choice["finish_reason"] in ("stop", "length"), answer
    assert choice["finish_reason"] == "length" or allows(choice["text"]), choice
    assert choice["finish_reason"] == "stop" or field == "response_format" or "json_object" in value


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": TAGS},
        {"response_format": FORMAT},
        {"structured_outputs": {"structural_tag": TAGS}},
        {"structured_outputs": {"structural_tag": json.dumps(TAGS)}},
    ],
    ids=["OpenAI's field", "a format", "vLLM's", "vLLM's, as a text"],
)
def test_structural_tags_constrain_the_text(served: Served, body: dict[str, Any]) -> None:
    text = complete(served, **body).json()["choices"][0]["text"]
    tags = re.findall(r"\{\[\s*7\s*\]\}", text)
    assert tags and text.count("{") - len(tags) in (0, 1), text  # the last one may be cut
    naive = complete(served, speculative_config={"method": "naive"}, **body).json()
    assert naive["choices"][0]["text"] == text


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_of_bounded_schemas_end(served: Served, temperature: float) -> None:
    """Check completions and chats. The model would rather write other text between values."""
    schemas = [one for one in (bounded(schema) for schema, _ in BY_HAND) if one is not None]
    requested = {"max_tokens": 700, "temperature": temperature, "seed": 2}
    for schema in schemas:
        form = {**requested, "response_format": wrapped(schema)}
        messages = {"messages": [{"role": "user", "content": "value = "}]}
        for path, prompt in (("", {"prompt": "value = "}), ("chat/", messages)):
            answer = HTTP.post(f"{served.url}/v1/{path}completions", json={**form, **prompt})
            (choice,) = answer.json()["choices"]
            assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None), schema
            text = choice["message"]["content"] if path else choice["text"]
            jsonschema.Draft202012Validator(schema).validate(json.loads(text))


def test_stop_token_that_cuts_a_text_is_the_stop_reason(served: Served) -> None:
    """Check both routes, streamed and whole. A whole text has no stop reason."""
    (token,) = served.engine.tokenizer.encode("x")
    for regex, reason in (("[ab][xy]{3}", token), ("[ab]([xy]{3})?", None)):
        body = {"structured_outputs": {"regex": regex}, "stop_token_ids": [token]}
        body |= {"logit_bias": {str(token): 100.0}, "max_tokens": 9, "temperature": 0}
        for path, prompt in (
            ("", {"prompt": "value = "}),
            ("chat/", {"messages": [{"role": "user", "content": "value = "}]}),
        ):
            url = f"{served.url}/v1/{path}completions"
            (choice,) = HTTP.post(url, json={**body, **prompt}).json()["choices"]
            assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", reason)
            streamed = HTTP.post(url, json={**body, **prompt, "stream": True}).text
            last = json.loads(streamed.split("data: ")[-2])["choices"][0]
            assert (last["finish_reason"], last["stop_reason"]) == ("stop", reason)


def test_null_and_text_formats_constrain_nothing(served: Served) -> None:
    bare = complete(served, max_tokens=8).json()["choices"][0]["text"]
    for field in ({"response_format": {"type": "text"}}, {"response_format": None},
                  {"structured_outputs": None}):  # fmt: skip
        assert complete(served, max_tokens=8, **field).json()["choices"][0]["text"] == bare


def test_streamed_text_equals_the_whole_text(served: Served) -> None:
    whole = complete(served, response_format=wrapped(PERSON), n=3, temperature=1.0, seed=5).json()
    parts = ["", "", ""]
    reasons = {}
    stream = client(served).completions.create(
        model="specops-bundled", prompt=PROMPT, max_tokens=60, temperature=1.0, seed=5, n=3,
        stream=True, extra_body={"response_format": wrapped(PERSON)},
    )  # fmt: skip
    for chunk in stream:
        for choice in chunk.choices:
            parts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
    assert parts == [choice["text"] for choice in whole["choices"]]
    assert list(reasons.values()) == [choice["finish_reason"] for choice in whole["choices"]]


@pytest.mark.parametrize(
    "body,param,message",
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "and only then"),
        ({"response_format": {"type": "text", "json_schema": {"schema": {}}}},
         "response_format", "and only then"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
         "response_format.json_schema.schema", "is missing"),
        ({"response_format": {"type": "text", "more": 1}}, "response_format.more", "unknown field"),
        ({"response_format": wrapped({"type": "text"})}, "response_format", "cannot be used"),
        ({"response_format": wrapped({"not": {}})}, "response_format", '"not"'),
        ({"structured_outputs": {}}, "structured_outputs",
         "exactly one of json, json_object, regex, choice, grammar, structural_tag, got none"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs",
         "choice, grammar, structural_tag, got json and regex"),
        ({"structured_outputs": {"json_object": True, "json": {}}}, "structured_outputs",
         "got json and json_object"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs",
         "structured_outputs: json is not valid JSON"),
        ({"structured_outputs": {"json": {"minimum": 10**20}}}, "structured_outputs",
         "structured_outputs: json cannot be used: minimum must be at most 2^53"),
        ({"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
         "structured_outputs", "disable_any_whitespace needs json, structural_tag or grammar"),
        ({"structured_outputs": {"grammar": 'a ::= "a"'}}, "structured_outputs", "'root' rule"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "not valid JSON"),
        ({"structured_outputs": {"structural_tag": {"format": {"type": "token"}}}},
         "structured_outputs", "structured_outputs: structural_tag: format.type must be one of"),
        ({"response_format": {"type": "structural_tag", "triggers": ["<"]}},
         "response_format", "and only then"),
        ({"response_format": {"type": "text", "triggers": ["<"]}},
         "response_format", "and only then"),
        ({"response_format": {"type": "structural_tag", "format": {}}},
         "response_format", "response_format: structural_tag: format.type must be one of"),
        ({"response_format": {**TAGS, "format": {"type": "any_text"}}},
         "response_format", "and only then"),
        ({"response_format": {**TAGS, "triggers": ["["]}},
         "response_format", "each be a prefix of a tag's begin, got '['"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": "x*"}},
         "structured_outputs", "whitespace_pattern must be a regular expression of spaces"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed group"),
        ({"structured_outputs": {"regex": "(" * 99 + ")" * 99}}, "structured_outputs", "nested"),
        ({"structured_outputs": {"grammar": "begin: x"}}, "structured_outputs", "cannot be used"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "1 to 1024 strings"),
        ({"structured_outputs": {"json": {"enum": ["x" * 300_000]}}},
         "structured_outputs", "at most"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
         "structured_outputs", "must be absent"),
        ({"structured_outputs": {"regex": "a"},
          "speculative_config": {"accept_policy": "accept_all"}}, None, "accept_policy"),
        ({"guided_json": {}}, "guided_json", "not supported: use structured_outputs.json"),
        ({"guided_choice": ["a"]}, "guided_choice", "use structured_outputs.choice"),
        ({"guided_grammar": "a"}, "guided_grammar", "use structured_outputs.grammar"),
    ],
)  # fmt: skip
def test_invalid_constraints_are_refused(
    served: Served, body: dict[str, Any], param: str | None, message: str
) -> None:
    answer = complete(served, **body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and message in error["message"], error
    # The server continues.
    assert HTTP.get(f"{served.url}/health").status_code == 200
    served.wait_until_idle()


def test_long_chains_of_rules_do_not_crash_the_server(served: Served) -> None:
    """A recursion of llguidance is thousands of rules deep."""
    count = 5000
    rules = [f'r{i}: "a" r{i + 1} | "b"' for i in range(count)]
    grammar = "\n".join(["start: r0", *rules, f'r{count}: "z"'])
    defs = {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(count)} | {str(count): {"const": 1}}
    forms: list[dict[str, Any]] = [
        {"grammar": grammar}, {"json": {"$ref": "#/$defs/0", "$defs": defs}},
    ]  # fmt: skip
    for form in forms:
        answer = complete(served, structured_outputs=form, max_tokens=4)
        assert answer.status_code == 200, answer.text
    assert HTTP.get(f"{served.url}/health").status_code == 200


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Hold the compilation of the regex `slow`. Yield an event for its begin and one to end it."""
    begun, may_end = threading.Event(), threading.Event()
    compile_it = compiler._grammar

    def slowly(vocabulary: Any, constraint: StructuredOutput, whitespace: str) -> Any:
        if constraint.regex == "slow":
            begun.set()
            assert may_end.wait(HANG_SECONDS)
        return compile_it(vocabulary, constraint, whitespace)

    monkeypatch.setattr(compiler, "_grammar", slowly)
    yield begun, may_end
    may_end.set()


def test_slow_grammar_is_refused_and_delays_no_other_request(
    served: Served,
    held: tuple[threading.Event, threading.Event],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, may_end = held
    slow = {"regex": "slow"}
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "_COMPILE_SECONDS", 0.0)
        answer = complete(served, structured_outputs=slow)  # its compilation continues
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "structured_outputs"
    assert error["message"] == "structured_outputs: regex takes longer than 10 seconds to compile"
    assert complete(served, max_tokens=4).status_code == 200
    quick = complete(served, structured_outputs={"choice": ["quick"]}).json()
    assert quick["choices"][0]["text"] == "quick"
    may_end.set()
    assert complete(served, structured_outputs=slow).status_code == 200


def test_compilation_time_excludes_waiting_for_a_processor(
    served: Served,
    held: tuple[threading.Event, threading.Event],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread without a processor, such as on a busy machine, is not late."""
    _, may_end = held
    looks: list[float] = []
    seconds_of = compiler._seconds_of

    def looking(clocks: list[int]) -> float:
        looks.append(seconds_of(clocks))
        if len(looks) == 3:
            may_end.set()
        return looks[-1]

    monkeypatch.setattr(compiler, "_COMPILE_SECONDS", 0.2)
    monkeypatch.setattr(compiler, "_seconds_of", looking)
    form = StructuredOutput(regex="slow")
    overdue: list[int] = []
    compiler.GrammarCompiler(served.engine.tokenizer, served.engine.vocab_size).compile(
        form, lambda: overdue.append(1)
    )
    assert len(looks) >= 3 and not overdue


def test_too_many_waiting_grammars_are_refused(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_it, may_end = served.engine.compile_structured_output, threading.Event()

    def slowly(constraint: StructuredOutput, overdue: Any) -> Any:
        assert may_end.wait(HANG_SECONDS)
        return compile_it(constraint)

    def ask(number: int) -> int:
        form = {"regex": f"a{{{number + 1}}}"}
        return complete(served, structured_outputs=form, max_tokens=8).status_code

    monkeypatch.setattr(served.engine, "compile_structured_output", slowly)
    monkeypatch.setattr(loop, "_MAX_COMPILING", 3)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        requested = [pool.submit(ask, number) for number in range(4)]
        done, waiting = concurrent.futures.wait(
            requested, HANG_SECONDS, return_when=concurrent.futures.FIRST_COMPLETED
        )
        assert [one.result() for one in done] == [429] and len(waiting) == 3
        assert complete(served, max_tokens=4).status_code == 200, "other requests must be served"
        may_end.set()
        assert [one.result() for one in waiting] == [200] * 3
    assert ask(9) == 200


def test_many_schemas_may_be_compiled_at_once(served: Served) -> None:
    """Clients send the same schema and others at the same time."""
    schemas = [BY_HAND[i % 20 + 20][0] for i in range(30)]
    answers: list[Any] = [None] * len(schemas)

    def ask(index: int) -> None:
        answers[index] = complete(
            served, response_format=wrapped(schemas[index]), temperature=0.8, seed=index,
            speculative_config={"method": ("ngram", "suffix", "mtp")[index % 3]},
        ).json()  # fmt: skip

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(schemas))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ended = 0
    for schema, answer in zip(schemas, answers, strict=True):
        choice = answer["choices"][0]
        if choice["finish_reason"] == "stop":
            jsonschema.Draft202012Validator(schema).validate(json.loads(choice["text"]))
            ended += 1
    assert ended > 10
    served.wait_until_idle()


def test_client_may_disconnect_while_its_grammar_is_compiled(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, has_left, may_end = threading.Event(), threading.Event(), threading.Event()
    abort = Dispatch.abort

    def slowly(constraint: StructuredOutput, overdue: Any) -> Any:
        begun.set()
        assert may_end.wait(HANG_SECONDS)

    def aborting(self: Dispatch, job: Job) -> None:
        abort(self, job)
        has_left.set()

    monkeypatch.setattr(served.engine, "compile_structured_output", slowly)
    monkeypatch.setattr(Dispatch, "abort", aborting)
    requests = served.engine._admission._arrivals
    body = {"prompt": "x", "structured_outputs": {"json": record(left={"const": 1})}}
    with hang_up_on(served, "completions", body):
        assert begun.wait(HANG_SECONDS)
    assert has_left.wait(HANG_SECONDS)
    may_end.set()
    served.wait_until_idle()
    assert served.engine._admission._arrivals == requests, "the request must not reach the engine"
