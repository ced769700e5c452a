# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  (where the server's packages are missing, nothing else is imported)
"""Every parameter and route of the official clients behaves as `docs/conformity.md` says."""

import asyncio
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

for name in (
    "fastapi",
    "uvicorn",
    "pydantic",
    "prometheus_client",
    "jinja2",
    "openai",
    "anthropic",
):
    pytest.importorskip(name)
pytest.importorskip("llguidance")

import anthropic
import conformity
import conformity_base
import openai
from client_routes import SERVED, SURFACES, client_routes, refusal_of, surface_refusal
from conformity_base import METHODS, MODEL, PROMPT, Clients, Method, Row, text
from pydantic import BaseModel

ROOT = Path(__file__).resolve().parent.parent
ROWS = conformity.rows()
PINNED = re.findall(
    r"^(?:openai|anthropic)==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE
)


@pytest.fixture(scope="module")
def clients() -> Iterator[Clients]:
    with conformity_base.clients() as both:
        yield both


@pytest.mark.parametrize("name", METHODS)
def test_every_parameter_has_a_row(name: str) -> None:
    assert {row.parameter for row in ROWS if row.method == name} == set(METHODS[name].parameters)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_row_has_the_stated_result(clients: Clients, row: Row) -> None:
    assert clients.result_of(row)


DROPPABLE = sorted(
    {
        (row.method, row.parameter)
        for row in ROWS
        if row.outcome == conformity_base.HONOURED and row.parameter not in ("model", "timeout")
    }
)


@pytest.mark.parametrize("name,parameter", DROPPABLE)
def test_ignored_parameter_fails_its_row(
    clients: Clients, name: str, parameter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the parameter is not sent, a row about its effect must fail."""
    whole = Method.call

    def without(method: Method, both: Clients, *, raw: bool = False) -> Callable[..., Any]:
        call = whole(method, both, raw=raw)
        return lambda **options: call(**{k: v for k, v in options.items() if k != parameter})

    monkeypatch.setattr(Method, "call", without)
    rows_of_parameter = [row for row in ROWS if (row.method, row.parameter) == (name, parameter)]
    with pytest.raises((AssertionError, AttributeError)):
        for row in rows_of_parameter:
            if row.outcome == conformity_base.HONOURED:
                row.see(clients)


@pytest.mark.ci
def test_document_is_up_to_date(clients: Clients) -> None:
    versions = [anthropic.__version__, openai.__version__]
    if versions != PINNED:
        pytest.skip(f"the document describes clients {PINNED}; installed are {versions}")
    page = conformity.document(clients, ROWS)
    assert page == (ROOT / "docs" / "conformity.md").read_text(), (
        "run python tests/conformity.py > docs/conformity.md"
    )


@pytest.mark.parametrize("name", SURFACES)
def test_unsupported_calls_name_the_route(clients: Clients, name: str) -> None:
    assert surface_refusal(clients.whole, name).status_code in (404, 405)


def test_all_unsupported_routes_are_refused_by_name(clients: Clients) -> None:
    routes = client_routes()
    assert set(routes) > SERVED and len(routes) > 100
    for verb, template in routes:
        if (verb, template) not in SERVED:
            assert refusal_of(clients.whole, verb, template).status_code in (404, 405)


def test_websocket_request_names_the_route(clients: Clients) -> None:
    headers = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    headers["Sec-WebSocket-Key"] = "dGhlIHNhbXBsZSBub25jZQ=="
    with pytest.raises(openai.NotFoundError, match="Not Found: GET /v1/realtime"):
        clients.whole.get("/realtime", cast_to=object, options={"headers": headers})


class Weather(BaseModel, extra="forbid"):  # so that the small model ends its text
    """The weather of a place."""

    place: Literal["Bonn", "Rome"]


@pytest.mark.ci
@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_pydantic_ai_returns_the_same_answers(clients: Clients, api: str) -> None:
    """`make -C tools test-clients` tests larger libraries that use the official clients."""
    pytest.importorskip("pydantic_ai")
    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{clients.served.url}/v1", api_key="none")
    own = AnthropicProvider(base_url=clients.served.url, api_key="none")
    model: Any = {
        "chat": lambda: OpenAIChatModel(MODEL, provider=provider),
        "responses": lambda: OpenAIResponsesModel(MODEL, provider=provider),
        "messages": lambda: AnthropicModel(MODEL, provider=own),
    }[api]()
    settings = {"max_tokens": 24, "temperature": 0}
    answer = asyncio.run(Agent(model).run(PROMPT, model_settings=settings)).output
    assert answer == text(clients.method_answers["chat.completions.create"])
    typed = Agent(model, output_type=Weather)
    found = asyncio.run(typed.run("x", model_settings={**settings, "max_tokens": 200})).output
    assert found.place in ("Bonn", "Rome")
