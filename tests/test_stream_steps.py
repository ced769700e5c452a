# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  (where a package is missing, nothing else is imported)
"""Streams that report what each step did."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

for name in ("fastapi", "uvicorn", "pydantic", "prometheus_client", "jinja2", "httpx"):
    pytest.importorskip(name)

import httpx
from fake_engine import FakeEngine
from serving import CHAT_TEMPLATE, Served, serving
from specops.server.chat import ChatFormat


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(FakeEngine(most_accepted=2)) as served:
        yield served


def chunks(served: Served, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    body = {"max_tokens": 12, "ignore_eos": True, "stream": True, **body}
    response = httpx.post(f"{served.url}/v1/{path}", json=body)
    assert response.status_code == 200, response.text
    frames = response.text.split("\n\n")[:-2]
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


def steps(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one["step"] for part in parts for one in part["choices"] if "step" in one]


CHAT = {"messages": [{"role": "user", "content": "abcde"}]}
STEPS = {"stream_options": {"include_steps": True}}


@pytest.mark.parametrize(
    ("path", "body"), [("completions", {"prompt": "abcde<|end|>"}), ("chat/completions", CHAT)]
)
def test_every_step_is_reported(served: Served, path: str, body: dict[str, Any]) -> None:
    first, *others = steps(chunks(served, path, body | STEPS))
    # The fake engine's token of a byte is the byte plus one.
    assert first["token_ids"] == [98] and first["bytes"] == [[97]]
    assert first["sources"] == ["target"] and first["drafts"] is None
    assert len(others) == 4, "expected three tokens a step, the last limited by the length"
    assert [one["sources"] for one in others[:3]] == [["ngram", "ngram", "target"]] * 3
    drafts = others[0]["drafts"]
    assert drafts["num_accepted"] == 2
    assert drafts["sources"] == ["ngram"] * 3
    assert drafts["token_ids"] == [99, 100, 102] and drafts["bytes"] == [[98], [99], [101]]
    assert others[0]["token_ids"] == [99, 100, 101], "the third draft must be rejected"
    ends = [data for one in others for data in one["bytes"] if not data]
    assert len(ends) == 2, "special tokens have no text"
    times = [first["seconds"], *(one["seconds"] for one in others)]
    assert times == sorted(times) and times[0] > 0


def test_plain_decoding_has_no_drafts(served: Served) -> None:
    body = {"prompt": "abc", "speculative_config": {"method": "naive"}, **STEPS}
    found = steps(chunks(served, "completions", body))
    assert len(found) == 12
    assert all(one["drafts"] is None and one["sources"] == ["target"] for one in found)


def test_step_without_text_is_reported(served: Served) -> None:
    body = {"prompt": "é", "speculative_config": {"method": "naive"}, "max_tokens": 4}
    parts = chunks(served, "completions", body | STEPS)
    assert [one["bytes"] for one in steps(parts)] == [[[195]], [[169]], [[195]], [[169]]]
    texts = [one["text"] for part in parts for one in part["choices"]]
    assert texts == ["", "é", "", "é", ""]
    assert len(chunks(served, "completions", body)) == 3, "without steps, only chunks with text"


def test_steps_are_reported_only_on_request(served: Served) -> None:
    for options in ({}, {"stream_options": {"include_steps": False}}):
        assert steps(chunks(served, "completions", {"prompt": "abc", **options})) == []


def test_model_card_reports_the_chat_template() -> None:
    bare = "{% for m in messages %}{{ m.content }}{% endfor %}"
    for template, has_template, can_chat in (
        (CHAT_TEMPLATE, True, True),
        (bare, True, False),  # marks no turns
        ("{{ raise_exception('no system message') }}", True, True),
        (None, False, False),
    ):
        with serving(FakeEngine(), chat_format=ChatFormat(template)) as served:
            (card,) = httpx.get(f"{served.url}/v1/models").json()["data"]
        assert [card["has_chat_template"], card["can_chat"]] == [has_template, can_chat]
