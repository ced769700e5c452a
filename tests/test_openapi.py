# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  (where the server's packages are missing, nothing else is imported)
"""The server conforms to /openapi.json: schemathesis, and answers of every kind."""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

for name in ("fastapi", "uvicorn", "pydantic", "prometheus_client", "jinja2", "httpx"):
    pytest.importorskip(name)
schemathesis = pytest.importorskip("schemathesis")

import httpx
import jsonschema
from checkpoints import make_checkpoint, write_tokenizer
from fake_engine import FakeEngine
from prometheus_client.parser import text_string_to_metric_families
from serving import Served, serving
from specops.engine import Engine, EngineConfig, SpeculativeConfig
from specops.server.chat import ChatFormat
from test_tools import TEMPLATE, TOOLS

pytestmark = pytest.mark.ci

EVERY_PATH = {
    "/health",
    "/metrics",
    "/version",
    "/v1/models",
    "/v1/models/{name}",
    "/v1/audit",
    "/v1/score",
    "/v1/contract",
    "/v1/completions",
    "/v1/chat/completions",
    "/tokenize",
    "/detokenize",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/v1/responses/{response_id}",
    "/v1/responses/{response_id}/input_items",
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, "Qwen3", num_hidden_layers=1, vocab_size=257)
    write_tokenizer(path, 257)
    speculative = SpeculativeConfig(method="ngram", num_speculative_tokens=4)
    sizes = {"max_model_len": 192, "max_num_seqs": 8, "num_threads": 1}
    config = EngineConfig(model=str(path), device="cpu", speculative_config=speculative, **sizes)
    engine = Engine(config)
    with serving(engine, chat_format=ChatFormat(TEMPLATE)) as served:
        yield served


@pytest.mark.parametrize(
    ("phases", "examples", "least"),
    [("examples,fuzzing,stateful", 12, 40), ("examples,coverage,fuzzing,stateful", 40, 400)],
    ids=["some", "all"],
)
@pytest.mark.fast("some")
def test_server_conforms_to_its_description(
    tiny: Served, tmp_path: Path, phases: str, examples: int, least: int
) -> None:
    """The server never fails, and every answer has a described status and shape.

    A body of the right shape may still request what this model cannot do, and get 400.
    """
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{tiny.url}/openapi.json"]
    command += ["--exclude-checks", "positive_data_acceptance", "--no-color", "--no-shrink"]
    command += [
        "--phases",
        phases,
        "--max-examples",
        str(examples),
        "--seed",
        "1",
        "--generation-database",
        "none",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "Tested: 26" in done.stdout
    tiny.wait_until_idle()
    statuses = answers_by_status(tiny)
    assert statuses[200] > least and statuses[400] > least
    assert not [status for status in statuses if status >= 500], statuses
    print(f"{statuses.total()} requests answered: {dict(sorted(statuses.items()))}")


def answers_by_status(served: Served) -> Counter[int]:
    """Return the number of answers of each status, by the server's own count."""
    statuses: Counter[int] = Counter()
    for family in text_string_to_metric_families(httpx.get(f"{served.url}/metrics").text):
        for sample in family.samples:
            if sample.name.endswith("http_requests_total"):
                statuses[int(sample.labels["status"])] += int(sample.value)
    return statuses


@pytest.fixture(scope="module")
def description(tiny: Served) -> dict[str, Any]:
    answer = httpx.get(f"{tiny.url}/openapi.json")
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/json"
    assert httpx.head(f"{tiny.url}/openapi.json").content == b""
    described: dict[str, Any] = answer.json()
    return described


def check(description: dict[str, Any], schema: str, value: Any) -> None:
    whole = {"$ref": f"#/components/schemas/{schema}", "components": description["components"]}
    jsonschema.Draft202012Validator(whole).validate(value)


def test_every_route_is_described(description: dict[str, Any]) -> None:
    assert set(description["paths"]) == EVERY_PATH
    assert description["openapi"].startswith("3.1") and "security" not in str(description["paths"])
    ids = [one["operationId"] for item in description["paths"].values() for one in item.values()]
    assert len(set(ids)) == len(ids) and "completions" in ids and "models_head" in ids
    post = description["paths"]["/v1/completions"]["post"]["responses"]
    assert set(post) == {"200", "400", "404", "408", "413", "415", "429", "500", "503"}
    assert set(post["200"]["content"]) == {"application/json", "text/event-stream"}
    fields = description["components"]["schemas"]["CompletionRequest"]["properties"]
    assert {"type": "integer", "minimum": 1, "maximum": 128} in fields["n"]["anyOf"]
    assert fields["skip_special_tokens"]["enum"] == [True, None]
    assert fields["cache_prompt"] == {
        "anyOf": [{}, {"type": "null"}],
        "description": "no effect: every prompt is cached, and no token depends on it",
    }


@pytest.mark.parametrize(
    "path,schema,body",
    [
        ("completions", "TextCompletion", {"prompt": "a", "logprobs": 2, "echo": True, "n": 2}),
        ("completions", "TextCompletion", {"prompt": [[5, 6], [7]], "prompt_logprobs": 1}),
        ("completions", "TextCompletion", {"prompt": [5], "audit": True, "n": 2}),
        ("completions", "TextCompletion", {"prompt": [5], "stop_token_sequences": [[1, 2]]}),
        ("completions", "TextCompletion", {"prompt": "a", "return_token_ids": True, "store": True}),
        ("chat/completions", "ChatCompletion", {"return_token_ids": True, "enable_thinking": True}),
        ("chat/completions", "ChatCompletion", {"logprobs": True, "top_logprobs": 3}),
        ("chat/completions", "ChatCompletion", {"tools": TOOLS[1:2], "tool_choice": "required"}),
        ("completions", "ErrorReply", {}),
        ("completions", "ErrorReply", {"prompt": "a", "model": "other"}),
        ("chat/completions", "ErrorReply", {"temperature": -1}),
    ],
)
def test_answers_of_every_kind_match_their_schema(
    tiny: Served, description: dict[str, Any], path: str, schema: str, body: dict[str, Any]
) -> None:
    if path.startswith("chat"):
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 20} | body
        body_schema = "ChatCompletionRequest"
    else:
        body_schema = "CompletionRequest"
    answer = httpx.post(f"{tiny.url}/v1/{path}", json=body, timeout=300)
    assert (answer.status_code == 200) == (schema != "ErrorReply")
    check(description, schema, answer.json())
    if answer.status_code == 200:
        check(description, body_schema, body)


def test_verdicts_match_their_schema(tiny: Served, description: dict[str, Any]) -> None:
    body = {"prompt": [5], "audit": True, "temperature": 0, "logit_bias": {"7": -100}}
    answer = httpx.post(f"{tiny.url}/v1/completions", json=body, timeout=300)
    (record,) = (one["audit"] for one in answer.json()["choices"])
    records = [record, {**record, "token_ids": [7] * 16, "logprobs": []}]
    audited = httpx.post(f"{tiny.url}/v1/audit", json={"records": records}, timeout=300)
    check(description, "AuditRequest", {"records": records})
    check(description, "AuditReply", audited.json())
    assert [one["confirmed"] for one in audited.json()["verdicts"]] == [True, False]


def test_scores_match_their_schema(tiny: Served, description: dict[str, Any]) -> None:
    body = {"prompt": [5, 6], "continuations": [[7], [8, 9]], "logprobs": 2}
    answer = httpx.post(f"{tiny.url}/v1/score", json=body, timeout=300)
    check(description, "ScoreRequest", body)
    check(description, "ScoreReply", answer.json())


def test_docs_list_every_range_and_default(description: dict[str, Any]) -> None:
    """Compare the fields that hold a single number. Every field needs a description."""
    text = (Path(__file__).parent.parent / "docs/requests.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (above )?([-\d,]+),? to ([\d,]+).*? \| (\S+) \|", text, re.M)
    fields = description["components"]["schemas"]["CompletionRequest"]["properties"]
    documented = {}
    for name, above, low, high, default in rows:
        least = "exclusiveMinimum" if above else "minimum"
        numbers = [float(one.replace(",", "")) for one in (low, high)]
        documented[name] = least, *numbers, {"none": {}}.get(default, default)
    described = {}
    for name in documented:
        field = fields[name]
        one = field["anyOf"][0]
        assert field["description"]
        one = one.get("additionalProperties", one)
        least = "exclusiveMinimum" if "exclusiveMinimum" in one else "minimum"
        low = 0 if name == "top_k" else one[least]  # -1 is off, too
        default = field["default"]
        shown = f"{default:g}" if isinstance(default, (int, float)) else default
        described[name] = least, low, one["maximum"], shown
    assert documented == described and len(documented) == 10


@pytest.mark.parametrize("name,value", [("top_a", False), ("store", 0), ("parallel_tool_calls", 1)])
def test_false_is_not_zero(tiny: Served, name: str, value: Any) -> None:
    answer = httpx.post(f"{tiny.url}/v1/completions", json={"prompt": [5], name: value})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == name


def test_description_names_the_routes_that_require_a_key() -> None:
    with serving(FakeEngine(), api_keys=["k"]) as served:
        described = httpx.get(f"{served.url}/openapi.json").json()
        api = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
        assert len(list(api.get_all_operations())) == 26
        for path, item in described["paths"].items():
            for method, operation in item.items():
                needs_key = path.startswith("/v1") or path in ("/tokenize", "/detokenize")
                assert ("security" in operation) == ("401" in operation["responses"]) == needs_key
                url = served.url + path.replace("{name}", "fake")
                status = httpx.request(method, url).status_code
                assert (status == 401) == needs_key, (method, path)
        scheme = described["components"]["securitySchemes"]
        assert scheme == {"key": {"type": "http", "scheme": "bearer"}}
