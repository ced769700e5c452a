# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  (where the server's packages are missing, nothing else is imported)
"""Requests of applications and of other servers' clients: their fields, names and prompts."""

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

for name in ("fastapi", "uvicorn", "pydantic", "prometheus_client", "jinja2", "httpx"):
    pytest.importorskip(name)
pytest.importorskip("llguidance")

import httpx
from fake_engine import FakeEngine, byte_tokenizer
from serving import Served, events, http, post, serving
from specops.cli import main
from specops.engine import EngineConfig, SamplingParams
from specops.server.chat import ChatFormat
from test_tools import Unconstrained
from tokenizers import AddedToken

# The engine without a model repeats the prompt up to <|end|>, so an answer shows its prompt.
TEMPLATE = """
{%- if enable_thinking is defined %}think={{ enable_thinking }} {% endif %}
{%- if reasoning_effort is defined %}effort={{ reasoning_effort }} {% endif %}
{%- for message in messages %}{{ message.role }}:{{ message.content }}{{ "\\n" }}{% endfor %}
{%- if tools %}Call as <tool_call>{name, arguments}</tool_call>: {{ tools | tojson }}{% endif %}
{%- if add_generation_prompt %}assistant:{% endif %}<|end|>"""
CONTEXT = 1 << 17
HEADER = "x-ignored-fields"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    config = EngineConfig(served_model_name="fake", max_model_len=CONTEXT, seed=0)
    options = {"chat_format": ChatFormat(TEMPLATE), "model_aliases": ["gpt-4o", "fake", "claude"]}
    with serving(Unconstrained(config), **options) as one:
        yield one
        one.wait_until_idle()


USER = {"role": "user", "content": "hi"}
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
FUNCTION = {"name": "read", "description": "Read a file", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}
MARK = {"type": "ephemeral"}

# Application -> path, body, and the beginning of the answer.
SHAPES: dict[str, tuple[str, dict[str, Any], str]] = {
    "aider": (
        "chat/completions",
        {
            "messages": [
                {"role": "system", "content": [
                    {"type": "text", "text": "Edit.", "cache_control": MARK}]},
                USER,
            ],
            "temperature": 0,
            "stream": True,
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        },
        "think=True system:Edit.\nuser:hi\n",
    ),
    "Open WebUI": (
        "chat/completions",
        {
            "model": "gpt-4o",
            "messages": [USER],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 128,
            "temperature": 0.7,
            "top_p": 0.9,
            "seed": 1,
            "stop": ["<|im_end|>"],
            "frequency_penalty": 0,
            "logit_bias": {},
        },
        "user:hi\n",
    ),
    "Claude Code": (
        "messages?beta=true",
        {
            "model": "claude",
            "max_tokens": 32000,
            "system": [{"type": "text", "text": "Be brief.",
                        "cache_control": {**MARK, "ttl": "1h", "scope": "global"}}],
            "messages": [{"role": "user", "content": [
                {"type": "text", "text": "hi", "cache_control": MARK}]}],
            "tools": [{"name": "read", "description": "Read a file", "input_schema": PARAMETERS,
                       "eager_input_streaming": True}],
            "metadata": {"user_id": "me"},
            "thinking": {"type": "enabled", "budget_tokens": 31999},
            "context_management": {"edits": [
                {"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "medium"},
            "temperature": 1,
            "stream": True,
        },
        "think=True effort=medium system:Be brief.\nuser:hi\n",
    ),
    "Claude Code's title of a conversation": (
        "messages",
        {
            "max_tokens": 32,
            "thinking": {"type": "disabled"},
            "messages": [USER, {"role": "assistant", "content": "{"}],
        },
        "think=False user:hi\nassistant:{",
    ),
    "Codex": (
        "responses",
        {
            "instructions": "You code.",
            "input": [{"type": "message", "role": "user",
                       "content": [{"type": "input_text", "text": "hi"}]}],
            "tools": [{"type": "function", "strict": False, **FUNCTION}],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "reasoning": {"effort": "medium", "summary": "auto"},
            "store": False,
            "stream": True,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "0199",
            "text": {"verbosity": "medium"},
            "truncation": "auto",
        },
        "effort=medium system:You code.\nuser:hi\n",
    ),
    "LangChain": (
        "chat/completions",
        {
            "messages": [USER],
            "tools": [{"type": "function", "function": {**FUNCTION, "strict": True}}],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "n": 1,
            "max_completion_tokens": 64,
            "reasoning_effort": "low",
            "service_tier": "default",
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        "effort=low user:hi\n",
    ),
    "OpenAI Agents SDK": (
        "chat/completions",
        {
            "messages": [USER],
            "tools": [TOOL],
            "store": True,
            "metadata": {"run": "7"},
            "verbosity": "low",
            "prompt_cache_retention": "in_memory",
            "user": "me",
        },
        "user:hi\n",
    ),
    "LiteLLM": (
        "chat/completions",
        {
            "model": "claude",
            "messages": [{"role": "system", "content": "Edit.", "cache_control": MARK}, USER],
            "tools": [{**TOOL, "cache_control": MARK}],
            "thinking": {"type": "disabled"},
            "reasoning_effort": "minimal",
        },
        "think=False effort=minimal system:Edit.\nuser:hi\n",
    ),
    "llama.cpp's web page": (
        "chat/completions",
        {
            "messages": [USER],
            "stream": True,
            "max_tokens": -1,
            "cache_prompt": True,
            "id_slot": 0,
            "timings_per_token": True,
            "return_progress": False,
            "temperature": 0.8,
            "dynatemp_range": 0,
            "dynatemp_exponent": 1,
            "top_k": 40,
            "min_p": 0.05,
            "xtc_probability": 0,
            "xtc_threshold": 0.1,
            "typ_p": 1,
            "repeat_last_n": 64,
            "repeat_penalty": 1,
            "dry_multiplier": 0,
            "dry_base": 1.75,
            "dry_allowed_length": 2,
            "dry_penalty_last_n": -1,
            "mirostat": 0,
            "chat_template_kwargs": {"enable_thinking": False},
        },
        "think=False user:hi\n",
    ),
    "llama.cpp's completion": (
        "completions",
        {"prompt": "ab<|end|>", "max_tokens": -1, "cache_prompt": False, "n_keep": 4},
        "ab",
    ),
    "vLLM's client": (
        "chat/completions",
        {
            "messages": [USER, {"role": "assistant", "content": "Sure, "}],
            "continue_final_message": True,
            "add_generation_prompt": False,
            "max_tokens": 26,
            "return_token_ids": True,
            "cache_salt": "salt",
            "priority": 0,
            "use_beam_search": False,
            "best_of": 1,
            "detokenize": True,
        },
        "user:hi\nassistant:Sure, us",
    ),
}  # fmt: skip


def said(path: str, answer: httpx.Response) -> str:
    """Return the text of an answer of any API, streamed or not."""
    assert answer.status_code == 200, answer.text
    if answer.headers["content-type"].startswith("text/event-stream"):
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
        found = [json.loads(line) for line in lines if line.startswith("{")]
        if path.startswith("chat"):
            return "".join(
                choice["delta"].get("content") or "" for one in found for choice in one["choices"]
            )
        deltas = [one["delta"] for one in found if one["type"].endswith("delta")]
        return "".join(
            delta if isinstance(delta, str) else delta.get("text", "") for delta in deltas
        )
    body = answer.json()
    if "choices" not in body:
        return str(body["content"][0]["text"])
    (choice,) = body["choices"]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


@pytest.mark.parametrize("application", SHAPES)
def test_applications_get_an_answer(served: Served, application: str) -> None:
    path, body, beginning = SHAPES[application]
    answer = post(served, path, {"model": "fake", **body})
    assert said(path, answer).startswith(beginning)
    # The engine's tokenizer has no token </think>, so a budget has no effect.
    has_budget = "budget_tokens" in body.get("thinking", {})
    assert answer.headers.get(HEADER) == ("thinking.budget_tokens" if has_budget else None)


def test_model_answers_to_each_name_and_reports_the_first(served: Served) -> None:
    names = ["fake", "gpt-4o", "claude"]
    listed = http().get(f"{served.url}/v1/models").json()["data"]
    assert [card["id"] for card in listed] == names
    for name in names:
        answer = post(served, "completions", {"model": name, "prompt": "a", "max_tokens": 1})
        assert answer.json()["model"] == "fake"
        assert http().get(f"{served.url}/v1/models/{name}").json()["id"] == name
    error = post(served, "completions", {"model": "gpt-5", "prompt": "a"}).json()["error"]
    assert error["code"] == "model_not_found" and error["message"] == (
        "the model 'gpt-5' does not exist; this server serves 'fake', 'gpt-4o', 'claude'"
    )


@pytest.mark.parametrize(
    "path,nearby",
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/v1/chat", None),
        ("/nothing", None),
    ],
)
def test_path_without_version_is_suggested_with_it(
    served: Served, path: str, nearby: str | None
) -> None:
    answer = http().post(f"{served.url}{path}", json={})
    hint = f"; did you mean {nearby}?" if nearby else ""
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == f"Not Found: POST {path}{hint}"


class Thinking(FakeEngine):
    """Engine whose tokenizer has the token </think>; it notes the limits of the thinking."""

    def __init__(self) -> None:
        super().__init__()
        thought = AddedToken("</think>", special=True)
        self.tokenizer._tokenizer.add_special_tokens([thought])
        self.limits: list[int | None] = []

    def add_request(self, prompt: Any, params: SamplingParams, **options: Any) -> str:
        self.limits.append(params.reasoning_max_tokens)
        return super().add_request(prompt, params, **options)


def test_budget_limits_the_thinking_unless_the_request_does() -> None:
    engine = Thinking()
    body = {"messages": [USER], "max_tokens": 1}
    with serving(engine, chat_format=ChatFormat(TEMPLATE)) as one:
        for thinking, more in (
            ({"type": "enabled", "budget_tokens": 9}, {}),
            ({"type": "enabled", "budget_tokens": 9}, {"reasoning_max_tokens": 5}),
            ({"type": "enabled"}, {}),
            ({"type": "disabled", "budget_tokens": 9}, {}),
        ):
            answer = post(one, "messages", {**body, "thinking": thinking, **more})
            assert answer.status_code == 200 and HEADER not in answer.headers
        thinking = {"type": "enabled", "budget_tokens": 2**31}
        answer = post(one, "messages", {**body, "thinking": thinking})
        assert answer.json()["error"]["message"] == (
            "thinking.budget_tokens must be at most 2147483647, got 2147483648"
        )
        fields = {"think_inject_token_ids": [], "response_format": {"type": "json_object"}}
        thinking = {"type": "enabled", "budget_tokens": 9}
        fields |= {"response_max_tokens": 1, "thinking": thinking}
        error = post(one, "chat/completions", {**body, **fields}).json()["error"]
        assert (
            error["param"] == "think_inject_token_ids" and "must hold a token" in error["message"]
        )
    assert engine.limits == [9, 5, None, None]


# ---- unsupported fields ----

UNSUPPORTED = {
    "completions": {"prompt": "a", "mirostat": 2, "nonsense": [1]},
    "chat/completions": {
        "messages": [
            {**USER, "id": "x"},
            {"role": "user", "content": [{"type": "text", "text": "a", "mood": 1}]},
        ],
        "tool_choice": {"type": "function", "function": {"name": "read"}, "extra": 1},
        "tools": [TOOL],
        "web_search_options": {},
        "max_tokens": 1,
    },
    "messages": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a", "mood": 1}]}],
        "max_tokens": 1,
        "container": "x",
    },
    "responses": {
        "input": [{**USER, "mood": 1}],
        "conversation": "x",
        "max_output_tokens": 1,
        "text": {"mood": 1},
    },
    "messages/count_tokens": {"messages": [USER], "speed": "fast"},
}
IGNORED = {
    "completions": {"mirostat", "nonsense"},
    "chat/completions": {
        "messages.0.id", "messages.1.content.0.mood", "tool_choice.extra", "web_search_options"},
    "messages": {"messages.0.content.0.mood", "container"},
    "responses": {"input.0.mood", "conversation", "text.mood"},
    "messages/count_tokens": {"speed"},
}  # fmt: skip


@pytest.mark.parametrize("policy", ["error", "warn", "ignore"])
def test_unsupported_fields_are_refused_or_ignored(
    policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"chat_format": ChatFormat(TEMPLATE), "unsupported_fields": policy}
    engine = Unconstrained(EngineConfig(max_model_len=1024, seed=0))
    with serving(engine, **options) as one, caplog.at_level(logging.WARNING):
        for path, body in UNSUPPORTED.items():
            caplog.clear()
            answer = post(one, path, body)
            assert answer.status_code == (400 if policy == "error" else 200), answer.text
            named = set(answer.headers.get(HEADER, "").split(", ")) - {""}
            assert named == (IGNORED[path] if policy == "warn" else set())
            lines = [line for line in caplog.messages if "ignored" in line]
            assert len(lines) == (policy == "warn")
            assert all(name in line for line in lines for name in IGNORED[path])
        # Errors of other kinds stay errors, and a wrong type is not an unknown field.
        for wrong in ({"mood": 1}, {"prompt": "a", "n": "1"}, {"prompt": "a", "stop": {"a": 1}}):
            assert post(one, "completions", wrong).status_code == 400


def test_header_is_short_and_printable() -> None:
    with serving(FakeEngine(), unsupported_fields="warn") as one:
        names = ["a\r\nb: c", "é\ud800", "x" * 1000, *map(str, range(100))]
        body = json.dumps({"prompt": "a", "max_tokens": 1, **dict.fromkeys(names, 1)})
        answer = http().post(
            f"{one.url}/v1/completions", content=body, headers={"Content-Type": "application/json"}
        )
        assert answer.status_code == 200 and "b" not in answer.headers
        named = answer.headers[HEADER].split(", ")
        assert named[:3] == ["a%0D%0Ab%3A%20c", "%C3%A9%3F", "x" * 64]
        assert len(named) == 21 and named[-1] == "..."


# ---- token ids ----


def test_answers_have_token_ids_on_request(served: Served) -> None:
    encode = byte_tokenizer().encode
    body = {"prompt": ["ab", "xyz"], "n": 2, "max_tokens": 4, "return_token_ids": True}
    choices = post(served, "completions", body).json()["choices"]
    assert [choice["prompt_token_ids"] for choice in choices] == [
        encode(prompt) for prompt in ("ab", "ab", "xyz", "xyz")
    ]
    for choice in choices:
        assert choice["token_ids"] == encode(choice["text"])
    for options in ({}, {"stream_options": {"include_steps": True}}):
        found: dict[int, dict[str, list[int]]] = {index: {} for index in range(4)}
        for chunk in events(post(served, "completions", body | {"stream": True} | options)):
            for choice in chunk["choices"]:
                of_choice = found[choice["index"]]
                of_choice.setdefault("token_ids", []).extend(choice.get("token_ids", []))
                if "prompt_token_ids" in choice:  # once
                    assert "prompt_token_ids" not in of_choice
                    of_choice["prompt_token_ids"] = choice["prompt_token_ids"]
        for choice in choices:
            assert found[choice["index"]] == {name: choice[name] for name in found[0]}
    chat = {"messages": [USER], "return_token_ids": True}
    whole = post(served, "chat/completions", chat).json()
    prompt = encode("user:hi\nassistant:<|end|>")
    assert whole["prompt_token_ids"] == prompt
    assert whole["choices"][0]["token_ids"] == prompt  # the stop token is one, but is no text
    chunks = events(post(served, "chat/completions", chat | {"stream": True}))
    assert [chunk.get("prompt_token_ids") for chunk in chunks if chunk["choices"]] == [
        prompt, *[None] * (len(chunks) - 1)]  # fmt: skip
    streamed = [one for chunk in chunks for one in chunk["choices"][0].get("token_ids", [])]
    assert streamed == prompt
    none = post(served, "completions", {"prompt": "a", "max_tokens": 0, "return_token_ids": True})
    assert none.json()["choices"][0]["token_ids"] == []
    assert "token_ids" not in post(served, "completions", {"prompt": "a"}).text


def test_exactness_of_an_own_server_is_checked_by_token_ids(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--url", served.url, "--prompts", "3", "--max-tokens", "4", "--json", "-"]
    assert main(["verify-exactness", *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["notes"] == [] and len(found["comparisons"]) > 4
    assert all(one["missing"] == {} for one in found["comparisons"])


# ---- prefilled answers ----


def test_last_message_is_continued(served: Served) -> None:
    begun = [USER, {"role": "assistant", "content": "Sure "}]
    encode = byte_tokenizer().encode

    def prompt(**fields: Any) -> str:
        answer = http().post(f"{served.url}/tokenize", json={"messages": begun, **fields})
        assert answer.status_code == 200, answer.text
        return byte_tokenizer().decode(answer.json()["tokens"], skip_special_tokens=False)

    turns = "user:hi\nassistant:Sure "
    assert prompt() == f"{turns}\nassistant:<|end|>"
    assert prompt(add_generation_prompt=False) == f"{turns}\n<|end|>"
    assert prompt(continue_final_message=True) == turns
    assert prompt(chat_template_kwargs={"enable_thinking": 1}).startswith("think=1 user")
    chat = {"messages": begun, "continue_final_message": True, "max_tokens": 1}
    usage = post(served, "chat/completions", chat).json()["usage"]
    count = post(served, "messages/count_tokens", {"messages": begun}).json()["input_tokens"]
    assert usage["prompt_tokens"] == count == len(encode(turns))


CALL = {"id": "1", "type": "function", "function": {"name": "read", "arguments": "{}"}}


@pytest.mark.parametrize(
    "fields,message",
    [
        ({"add_generation_prompt": True}, "add_generation_prompt must be false if"),
        (
            {"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}]},
            "messages must end with a text to be continued, got tool calls",
        ),
        ({"messages": [USER, USER]}, "the chat template changes the last message"),
    ],
)
def test_message_that_cannot_be_continued_is_refused(fields: dict[str, Any], message: str) -> None:
    template = TEMPLATE + "{{ messages[0].tool_calls }}"
    template = template.replace("message in messages", "message in messages[:1]")
    with serving(FakeEngine(), chat_format=ChatFormat(template)) as one:
        body = {"messages": [USER], "continue_final_message": True, **fields}
        answer = post(one, "chat/completions", body)
        assert answer.status_code == 400 and message in answer.json()["error"]["message"]
