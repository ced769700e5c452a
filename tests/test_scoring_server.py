# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  (where the server's packages are missing, nothing else is imported)
"""POST /v1/score: the logprobs of decoding for given continuations."""

from collections.abc import Iterator
from typing import Any

import pytest

for name in ("fastapi", "uvicorn", "pydantic", "prometheus_client", "jinja2", "httpx"):
    pytest.importorskip(name)

import httpx
from serving import CHAT_TEMPLATE, Served, serving
from specops.engine import Engine, EngineConfig
from specops.server.chat import ChatFormat

HTTP = httpx.Client(timeout=300)
PROMPT = list(range(5, 75))


def serve(**settings: Any) -> Any:
    config = EngineConfig(device="cpu", max_num_seqs=4, num_threads=1, **settings)
    return serving(Engine(config), chat_format=ChatFormat(CHAT_TEMPLATE))


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve(max_waiting=64) as served:
        yield served


@pytest.fixture(scope="module")
def processed() -> Iterator[Served]:
    with serve(logprobs_mode="processed_logprobs") as served:
        yield served


def post(served: Served, path: str, body: dict[str, Any]) -> Any:
    response = HTTP.post(f"{served.url}/v1/{path}", json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize(("mode", "sampling"), [("raw", {}), ("processed", {"temperature": 0.7})])
def test_scores_are_the_logprobs_of_answers(
    served: Served, processed: Served, mode: str, sampling: dict[str, Any]
) -> None:
    one = served if mode == "raw" else processed
    fields = {"temperature": 0.7, "seed": 3, "n": 5, "max_tokens": 8, "logprobs": 2}
    body = {"prompt": PROMPT, "return_token_ids": True, **fields}
    choices = post(one, "completions", body)["choices"]
    rows = one.engine.stats.num_rows
    texts = [choice["token_ids"] for choice in choices]
    scored = {"prompt": PROMPT, "continuations": texts, "logprobs": 2, **sampling}
    answer = post(one, "score", {**scored, "cache_salt": "new"})
    assert [score["index"] for score in answer["scores"]] == list(range(5))
    for score, choice in zip(answer["scores"], choices, strict=True):
        assert score["token_ids"] == choice["token_ids"]
        assert score["logprobs"] == choice["logprobs"]["token_logprobs"]
        assert len(score["top_logprobs"]) == 8 and len(score["top_logprobs"][0]) == 2
        assert score["total_logprob"] == pytest.approx(sum(score["logprobs"]))
    assert answer["usage"] == {"prompt_tokens": 70, "completion_tokens": 40, "total_tokens": 110}
    assert one.engine.stats.num_rows - rows == 78 + 4 * (6 + 8), "the prompt has 4 full pages"
    one.wait_until_idle()


def test_texts_are_tokenized_on_their_own(served: Served) -> None:
    encode = served.engine.tokenizer.encode
    answer = post(served, "score", {"prompt": "def f(", "continuations": ["x):", "y"]})
    assert [one["token_ids"] for one in answer["scores"]] == [
        encode(text, add_special_tokens=False) for text in ("x):", "y")
    ]
    assert "top_logprobs" not in answer["scores"][0]


# Changes of a body, and the name and message of the error.
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "sampling": ({"temperature": 0.7}, "temperature", "--logprobs-mode processed_logprobs"),
    "no prompt": ({"prompt": []}, "prompt", "prompt must be a string or a list of token ids"),
    "prompt": ({"prompt": 5}, "prompt", "prompt must be a string or a list of token ids"),
    "none": ({"continuations": []}, "continuations", "continuations must "),
    "empty": ({"continuations": ["a", ""]}, "continuations", "[1] must have at least one token"),
    "vocabulary": ({"continuations": [[10**6]]}, "continuations", "token id 1000000 is outside"),
    "long ids": ({"prompt": [5] * 5000}, "prompt", "a text of 5000 tokens exceeds"),
    "long text": ({"continuations": ["a" * 10**6]}, "continuations", "1000000 characters exceeds"),
    "context": ({"continuations": [[5] * 1000]}, "prompt", "exceed the context of 1024 tokens"),
    "alternatives": ({"logprobs": 101}, "logprobs", "logprobs must be at most 100, got 101"),
    "salt": ({"cache_salt": ""}, "cache_salt", "must be a non-empty string"),
    "field": ({"query": "a"}, "query", "unknown field query"),
    "room": ({"continuations": [[5]] * 65}, "", "must be at most 64, got 65"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_requests_are_refused(served: Served, name: str) -> None:
    changes, param, message = REFUSED[name]
    body = {"prompt": PROMPT, "continuations": [[5]], **changes}
    response = HTTP.post(f"{served.url}/v1/score", json=body)
    error = response.json()["error"]
    assert response.status_code == 400 and message in error["message"]
    assert not param or error["param"] == param
    served.wait_until_idle()
