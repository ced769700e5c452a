# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  (where a library is missing, nothing else is imported)
"""Libraries over the official clients, against the server: texts, streams, tools and schemas.

`make -C tools test-clients` runs the tests in an environment of their own. Answers through a
library are compared with those of a plain request.
"""

from collections.abc import Iterator
from typing import Any, Literal

import pytest

for name in ("langchain_openai", "langchain_anthropic", "litellm", "instructor"):
    pytest.importorskip(name, reason=f"{name} is not installed: make -C tools test-clients")

import httpx
import instructor
import litellm
import openai
from conformity_base import ASK, MODEL, PROMPT, TEMPLATE
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel
from serving import Served, serving
from specops.engine import Engine, EngineConfig, SpeculativeConfig
from specops.server.chat import ChatFormat
from test_docs import require_equal_answers


class Weather(BaseModel, extra="forbid"):  # makes even a small model come to an end
    """The weather of a place."""

    place: Literal["Bonn", "Rome"]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    speculative = SpeculativeConfig.from_dict(
        {"method": "ngram", "num_speculative_tokens": 4, "min_ngram_size": 1}
    )
    config = EngineConfig(device="cpu", num_threads=1, speculative_config=speculative)
    with serving(Engine(config), chat_format=ChatFormat(TEMPLATE)) as one:
        yield one
        one.wait_until_idle()


@pytest.fixture(scope="module")
def plain(served: Served) -> str:
    """Return the text of a plain request."""
    body = {"messages": [ASK], "max_tokens": 24, "temperature": 0}
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=300)
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def of_openai(served: Served, **more: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model=MODEL, base_url=f"{served.url}/v1", api_key="none", temperature=0,
        **{"max_tokens": 24, **more},
    )  # fmt: skip


def of_anthropic(served: Served, **more: Any) -> ChatAnthropic:
    sizes = {"max_tokens": 24, **more}
    return ChatAnthropic(model=MODEL, base_url=served.url, api_key="none", temperature=0, **sizes)


def text_of(message: Any) -> str:
    content = message.content
    return content if isinstance(content, str) else "".join(one.get("text", "") for one in content)


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_langchain_gets_the_plain_text_and_valid_tool_calls(
    served: Served, plain: str, api: str
) -> None:
    def model(**more: Any) -> Any:
        if api == "messages":
            return of_anthropic(served, **more)
        return of_openai(served, use_responses_api=api == "responses", **more)

    assert text_of(model().invoke(PROMPT)) == plain
    assert "".join(text_of(one) for one in model().stream(PROMPT)) == plain
    called = model(max_tokens=200).bind_tools([Weather], tool_choice="Weather").invoke("x")
    assert called.tool_calls[0]["name"] == "Weather"
    assert called.tool_calls[0]["args"]["place"] in ("Bonn", "Rome")
    request = model(max_tokens=200).with_structured_output(Weather)
    assert request.invoke("x").place in ("Bonn", "Rome")


def test_langchain_completion_equals_a_plain_request(served: Served) -> None:
    model = OpenAI(
        model=MODEL, base_url=f"{served.url}/v1", api_key="none", temperature=0, max_tokens=12
    )
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=300).json()
    assert model.invoke(PROMPT) == answer["choices"][0]["text"]


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic"])
def test_litellm_gets_the_plain_text(served: Served, plain: str, provider: str) -> None:
    url = served.url if provider == "anthropic" else f"{served.url}/v1"
    request = {"model": f"{provider}/{MODEL}", "api_base": url, "api_key": "none"}
    request |= {"messages": [ASK], "max_tokens": 24, "temperature": 0}
    assert litellm.completion(**request).choices[0].message.content == plain
    chunks = litellm.completion(**request, stream=True)
    assert "".join(one.choices[0].delta.content or "" for one in chunks) == plain


def test_examples_of_the_page_on_applications_print_the_plain_text(served: Served) -> None:
    require_equal_answers(served.url, ("langchain_openai", "litellm"))


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA", "TOOLS_STRICT"])
def test_instructor_gets_an_object_of_the_schema(served: Served, mode: str) -> None:
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none")
    patched = instructor.from_openai(client, mode=instructor.Mode[mode])
    found = patched.chat.completions.create(
        model=MODEL, response_model=Weather, messages=[ASK], max_tokens=200, temperature=0
    )
    assert found.place in ("Bonn", "Rome")
