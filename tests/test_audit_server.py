# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  (where the server's packages are missing, nothing else is imported)
"""Audits over HTTP: answers carry records, and /v1/audit confirms them or names a difference."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

for name in ("fastapi", "uvicorn", "pydantic", "prometheus_client", "jinja2", "httpx"):
    pytest.importorskip(name)

import httpx
from serving import CHAT, Served, serving
from specops.api.audit import AuditRecord
from specops.engine import Engine, EngineConfig, SpeculativeConfig
from specops.server.chat import ChatFormat
from test_tools import TEMPLATE, TOOLS

HTTP = httpx.Client(timeout=300)
SEEDED = {"temperature": 0.9, "seed": 11}
SIZES: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 80, "max_model_len": 512}

# Requests of which each has another kind of answer: the route, and its fields.
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("completions", {"temperature": 0}),
    "drawn seed": ("completions", {"speculative_config": {"method": "mtp"}}),
    "choices": ("completions", {**SEEDED, "n": 2, "prompt": ["a = 1\n", "class A:\n"]}),
    "logprobs": ("completions", {**SEEDED, "logprobs": 3, "echo": True, "top_k": 9}),
    "no output": ("completions", {"max_tokens": 0}),
    "stops": ("completions", {**SEEDED, "stop": ["(", ":"], "include_stop_str_in_output": True}),
    "grammar": ("completions", {"structured_outputs": {"regex": "(ab|[0-9 ]){5,30}"}}),
    "biases": ("completions", {**SEEDED, "logit_bias": {"40": 3}, "bad_words": ["self"]}),
    "no speculation": ("completions", {"speculative_config": {"method": "naive"}}),
    "greedy drafts": ("completions", {"speculative_config": {"verify_strategy": "greedy"}}),
    "chat": ("chat/completions", {**SEEDED, "logprobs": True, "n": 2}),
    "tools": ("chat/completions", {"tools": TOOLS[1:2], "tool_choice": "required", "seed": 5}),
    "thinking": ("chat/completions", {"reasoning_max_tokens": 4, "think_end_token_id": 9}),
}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    speculative = SpeculativeConfig(method="ngram", num_speculative_tokens=4)
    config = EngineConfig(device="cpu", num_threads=1, speculative_config=speculative, **SIZES)
    with serving(Engine(config), chat_format=ChatFormat(TEMPLATE)) as served:
        yield served


def post(served: Served, path: str, body: dict[str, Any]) -> httpx.Response:
    return HTTP.post(f"{served.url}/v1/{path}", json=body)


def body_of(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    prompt = CHAT if path == "chat/completions" else {"prompt": "def add(a, b):\n"}
    return {**prompt, "max_tokens": 24, "audit": True, **fields}


def records_of(served: Served, path: str, fields: dict[str, Any]) -> list[dict[str, Any]]:
    response = post(served, path, body_of(path, fields))
    assert response.status_code == 200, response.text
    return [choice["audit"] for choice in response.json()["choices"]]


def verdicts_on(served: Served, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    response = post(served, "audit", {"records": records})
    assert response.status_code == 200, response.text
    verdicts: list[dict[str, Any]] = response.json()["verdicts"]
    return verdicts


@pytest.fixture(scope="module")
def record(served: Served) -> dict[str, Any]:
    (found,) = records_of(served, *REQUESTS["greedy"])
    return found


@pytest.mark.parametrize("name", REQUESTS)
def test_answers_have_records_that_are_confirmed(served: Served, name: str) -> None:
    path, fields = REQUESTS[name]
    records = records_of(served, path, fields)
    digest = HTTP.get(f"{served.url}/v1/contract").json()["digest"]
    again = [AuditRecord.from_dict(one).as_dict() for one in records]
    assert json.loads(json.dumps(again)) == records
    assert {one["contract"] for one in records} == {digest}
    assert all(len(one.get("logprobs", ())) == len(one["token_ids"]) for one in records)
    verdicts = verdicts_on(served, records)
    assert [one["message"] for one in verdicts] == [
        f"confirmed: {len(one['token_ids'])} tokens" for one in records
    ]
    served.wait_until_idle()


@pytest.mark.parametrize("name", ["choices", "chat"])
def test_streams_have_the_records_in_the_last_chunks(served: Served, name: str) -> None:
    path, fields = REQUESTS[name]
    records = records_of(served, path, fields)
    with HTTP.stream(
        "POST", f"{served.url}/v1/{path}", json=body_of(path, {**fields, "stream": True})
    ) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    choices = [one for line in lines for one in json.loads(line)["choices"]]
    ended = [one for one in choices if one["finish_reason"] is not None]
    assert sum("audit" in one for one in choices) == len(ended) == len(records)
    by_index = {one["index"]: one["audit"] for one in ended}
    assert [by_index[index] for index in range(len(records))] == records
    plain = post(served, path, {**body_of(path, fields), "audit": False}).json()
    assert all("audit" not in one for one in plain["choices"])


def test_records_equal_those_of_the_engine(served: Served, record: dict[str, Any]) -> None:
    assert record["params"] == {"max_tokens": 24, "temperature": 0, "logprobs": 0}
    assert record["finish_reason"] == "length" and "choice_index" not in record


def test_a_difference_is_named(served: Served, record: dict[str, Any]) -> None:
    token_ids = list(record["token_ids"])
    token_ids[7] ^= 1
    logprobs = [dict(one) for one in record["logprobs"]]
    logprobs[3]["logprob"] *= 1.0001
    verdicts = verdicts_on(
        served,
        [{**record, "token_ids": token_ids}, record, {**record, "logprobs": logprobs}],
    )
    assert [one["confirmed"] for one in verdicts] == [False, True, False]
    assert [one["num_confirmed"] for one in verdicts] == [7, 24, 3]
    token, _, logprob = verdicts
    assert (token["given"], token["derived"]) == (token_ids[7], record["token_ids"][7])
    assert token["message"].startswith("token differs at output token 7: the record has ")
    assert logprob["what"] == "logprob" and logprob["given"] != logprob["derived"]
    metrics = HTTP.get(f"{served.url}/metrics").text
    assert (
        'specops:audited_answers_total{model_name="specops-bundled",verdict="differs"}' in metrics
    )
    served.wait_until_idle()


def test_an_empty_beginning_is_confirmed(served: Served, record: dict[str, Any]) -> None:
    given = {name: record[name] for name in ("prompt_token_ids", "params", "seed")}
    assert verdicts_on(served, [{**given, "token_ids": []}])[0]["confirmed"]


# Changes of a body of /v1/audit, or of its record, and a part of the error.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "contract": ({"contract": "0123"}, "records[0]: contract 0123 is not this server's"),
    "strategy": ({"verify_strategy": "rejection"}, "cannot be audited"),
    "no prompt": ({"prompt_token_ids": []}, "must hold at least one token"),
    "vocabulary": ({"token_ids": [10**6]}, "token_ids must be in [0, "),
    "context": ({"prompt_token_ids": [5] * 600}, "exceeds the context of 512 tokens"),
    "room": ({"params": {"max_tokens": 600}, "finish_reason": "stop"}, "records[0]: "),
    "grammar": ({"params": {"structured_output": {"regex": "("}}}, "records[0]: structured_out"),
    "logprob": ({"logprobs": [{"logprob": 1e300}] * 24}, "must hold numbers of float32"),
    "alternatives": ({"logprobs": [{"logprob": 0, "alternatives": 5}]}, "alternatives as [token"),
    "choice": ({"choice_index": -1}, "choice_index must be in [0, 2^31), got -1"),
    "end": ({"finish_reason": 5}, "finish_reason must be a text, got 5"),
    "parameter": ({"params": {"top_p": 7}}, "records[0]: top_p must be in"),
    "stops": ({"params": {"stop": ["a"] * 17}}, "stop must hold at most 16 elements, got 17"),
    "stop": ({"params": {"stop": ["a" * 1025]}}, "at most 1024 characters, got one of 1025"),
    "field": ({"tokens": 5}, "records[0]: record.tokens is not known"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_records_that_cannot_be_audited_are_refused(
    served: Served, record: dict[str, Any], name: str
) -> None:
    changes, message = REFUSED[name]
    given = {one: value for one, value in record.items() if one != "logprobs"}
    response = post(served, "audit", {"records": [{**given, **changes}]})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert message in error["message"] and error["param"] == "records[0]"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "records is missing"),
        ({"records": []}, "records must "),
        ({"records": [5]}, "records.0 must be an object"),
        ({"records": [{}]}, "records[0]: record.prompt_token_ids is missing"),
        ({"records": [{}], "model": "other"}, "the model 'other' does not exist"),
    ],
)
def test_malformed_audits_are_refused(served: Served, body: dict[str, Any], message: str) -> None:
    response = post(served, "audit", body)
    assert response.status_code in (400, 404) and message in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("speculative", "message"),
    [
        ({"verify_strategy": "rejection"}, "audit needs verify_strategy target_match or greedy"),
        ({"accept_policy": "accept_all"}, "audit needs accept_policy normal, got accept_all"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_answers_that_depend_on_drafts_have_no_record(
    served: Served, speculative: dict[str, Any], message: str, stream: bool
) -> None:
    fields = {"speculative_config": speculative, "stream": stream}
    response = post(served, "completions", body_of("completions", fields))
    assert response.status_code == 400 and message in response.json()["error"]["message"]
    served.wait_until_idle()
