# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  (where the server's packages are missing, nothing else is imported)
"""Updates of a running server's weights: the bits of a fresh start, and no request in between."""

import argparse
import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

for name in ("fastapi", "uvicorn", "pydantic", "msgspec", "prometheus_client", "jinja2", "httpx"):
    pytest.importorskip(name)

import httpx
from fake_engine import FakeEngine
from mtp_checkpoints import make_mtp_model
from safetensors.torch import load_file, save_file
from serving import serving, serving_app
from specops.api.tokenizer import Tokenizer
from specops.cli.serve import _check_weight_updates
from specops.engine import Engine, EngineConfig, SamplingParams
from specops.server import make_app
from specops.service.contract import contract_of
from specops.service.process import EngineProcess, ProcessClient
from specops.service.wire import Setup

HTTP = httpx.Client(timeout=120)
PROMPT = "for i in range(3): for i in range(4): pass"
BODY = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0.8, "seed": 5, "logprobs": 1}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory of models: two that fit each other, and two that cannot be loaded."""
    root = tmp_path_factory.mktemp("models")
    (root / "old").mkdir()
    make_mtp_model(root / "old")
    for name in ("new", "other tokenizer", "no weights"):
        shutil.copytree(root / "old", root / name)
    (file,) = (root / "new").glob("*.safetensors")
    tensors = {name: tensor * 1.25 for name, tensor in load_file(file).items()}
    save_file(tensors, file)
    tokenizer = root / "other tokenizer" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + " ")
    for file in (root / "no weights").glob("*.safetensors"):
        file.unlink()
    shutil.copytree(root / "old", root.parent / "outside")
    return root


def settings_of(model: Path) -> dict[str, Any]:
    return {
        "model": str(model),
        "device": "cpu",
        "num_threads": 1,
        "served_model_name": "tiny",
        "speculative_config": json.dumps({"method": "ngram", "num_speculative_tokens": 4}),
    }


@pytest.fixture(scope="module")
def url(models: Path) -> Iterator[str]:
    client = ProcessClient(EngineProcess(Setup(settings_of(models / "old"), "warning")))
    tokenizer = Tokenizer.from_dir(models / "old")
    with serving_app(make_app(client, tokenizer, weight_update_dir=models)) as url:
        yield url


def post(url: str, path: str, body: dict[str, Any] | None = None) -> Any:
    response = HTTP.post(f"{url}/{path}", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def choice(url: str, **fields: Any) -> dict[str, Any]:
    (found,) = post(url, "v1/completions", {**BODY, "audit": True, **fields})["choices"]
    assert isinstance(found, dict)
    return found


def fresh(model: Path) -> tuple[list[int], list[float], str]:
    """Return tokens, logprobs and contract of a new engine."""
    engine = Engine(EngineConfig.from_plain(settings_of(model)))
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=5, logprobs=1)
    (done,) = engine.generate([PROMPT], params)
    return done.token_ids, [one.logprob for one in done.logprobs], contract_of(engine)["digest"]


def reported(answer: dict[str, Any]) -> tuple[list[int], list[float], str]:
    record = answer["audit"]
    return record["token_ids"], answer["logprobs"]["token_logprobs"], record["contract"]


def test_new_weights_give_the_bits_of_a_fresh_start(url: str, models: Path) -> None:
    before = choice(url)
    assert reported(before) == fresh(models / "old")
    assert post(url, "pause?mode=wait") == {"status": "paused"}
    with ThreadPoolExecutor(12) as pool:  # more than the engine takes of one client at once
        audited = {**BODY, "audit": True}
        waiting = [pool.submit(post, url, "v1/completions", audited) for _ in range(12)]
        updated = post(url, "update_weights", {"update_info": {"path": "new"}})
        assert HTTP.get(f"{url}/is_paused").json() == {"is_paused": True}
        assert not any(one.done() for one in waiting)
        assert post(url, "resume") == {"status": "resumed"}
        answers = [one.result()["choices"][0] for one in waiting]
        usages = [one.result()["usage"]["prompt_tokens_details"] for one in waiting]
    assert min(one["cached_tokens"] for one in usages) == 0, "the cache is new, too"
    expected = fresh(models / "new")
    assert {json.dumps(reported(one)) for one in answers} == {json.dumps(expected)}
    assert expected[2] == updated["contract"] != before["audit"]["contract"]
    assert HTTP.get(f"{url}/v1/contract").json()["digest"] == updated["contract"]
    records = {"records": [answers[0]["audit"]]}
    assert post(url, "v1/audit", records)["verdicts"][0]["confirmed"]
    stale = HTTP.post(f"{url}/v1/audit", json={"records": [before["audit"]]})
    assert "is not this server's" in stale.json()["error"]["message"]
    assert HTTP.get(f"{url}/health").json()["status"] == "ok"


REFUSED = {
    "new\0": "path must name a directory",
    "../outside": "path must be below the directory of --weight-update-dir",
    "/": "path must be below the directory of --weight-update-dir",
    "none": "path must name a directory with a model, got none",
    "other tokenizer": "path must have the tokenizer.json of the served model",
    "no weights": "no weights",
}


@pytest.mark.ci
def test_weights_that_do_not_fit_are_refused(url: str) -> None:
    before = choice(url)
    early = HTTP.post(f"{url}/update_weights", json={"update_info": {"path": "new"}})
    assert early.status_code == 400 and "call /pause first" in early.json()["error"]["message"]
    post(url, "pause")
    for path, message in REFUSED.items():
        response = HTTP.post(f"{url}/update_weights", json={"update_info": {"path": path}})
        error = response.json()["error"]
        assert response.status_code == 400 and message in error["message"], (path, error)
    post(url, "resume")
    assert choice(url)["audit"] == before["audit"]


@pytest.mark.ci
def test_pausing_may_abort_requests(url: str) -> None:
    body = {**BODY, "n": 32, "max_tokens": 200, "ignore_eos": True, "stream": True}
    with HTTP.stream("POST", f"{url}/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        post(url, "pause?clear_cache=true")
        events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["message"] == "the request was aborted by /pause"
    post(url, "resume")
    assert choice(url)["finish_reason"] in ("stop", "length")


@pytest.mark.parametrize(
    ("path", "options", "status", "message"),
    [
        ("pause?mode=keep", {}, 400, "mode must be abort or wait, got 'keep'"),
        ("pause?wait=true", {}, 400, "unknown query parameter wait"),
        ("pause", {"json": {"mode": "wait"}}, 400, "mode is a query parameter"),
        ("pause", {"headers": {"Origin": "https://example.com"}}, 403, "web pages may not"),
        ("resume", {"headers": {"Origin": "https://example.com"}}, 403, "web pages may not"),
        ("update_weights", {"json": {"path": "a"}}, 400, "unknown field path"),
        ("update_weights", {"json": {"update_info": {}}}, 400, "update_info.path is missing"),
        ("update_weights", {}, 415, "Content-Type must be application/json"),
    ],
)
def test_other_requests_are_refused(
    models: Path, path: str, options: dict[str, Any], status: int, message: str
) -> None:
    with serving(FakeEngine(), weight_update_dir=models) as served:
        response = HTTP.post(f"{served.url}/{path}", **options)
        assert (response.status_code, message in response.text) == (status, True), response.text
        assert HTTP.get(f"{served.url}/is_paused").json() == {"is_paused": False}


def test_routes_need_the_option() -> None:
    with serving(FakeEngine()) as served:
        for path in ("pause", "resume", "update_weights"):
            response = HTTP.post(f"{served.url}/{path}", json={})
            assert response.status_code == 404
            assert "only be updated with --weight-update-dir" in response.text


def test_other_engines_refuse_updates(models: Path) -> None:
    with serving(FakeEngine(), weight_update_dir=models) as served:
        post(served.url, "pause")
        response = HTTP.post(f"{served.url}/update_weights", json={"update_info": {"path": "new"}})
        assert response.status_code == 400


@pytest.mark.parametrize(
    ("changes", "num_processes", "message"),
    [
        ({"weight_update_dir": "/none"}, 1, "weight_update_dir must be a directory, got /none"),
        ({}, 0, "needs a single engine in its own process"),
        ({}, 2, "needs a single engine in its own process"),
        ({"role": "prefill"}, 1, "cannot be combined with role"),
        ({"scheduler_name": "splitwise"}, 1, "cannot be combined with scheduler_name"),
    ],
)
def test_options_that_need_the_same_engine_are_refused(
    changes: dict[str, Any], num_processes: int, message: str
) -> None:
    options = {"weight_update_dir": "/", "role": None, "scheduler_name": "local"}
    args = argparse.Namespace(**{**options, "kv_events_endpoint": None, **changes})
    with pytest.raises(ValueError, match=message):
        _check_weight_updates(args, num_processes)
