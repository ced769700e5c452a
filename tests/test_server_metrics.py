# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  (where the server's packages are missing, nothing else is imported)
"""Metrics of the HTTP server, and the dashboard that shows them."""

import json
import re
from pathlib import Path

import pytest

for name in ("fastapi", "uvicorn", "pydantic", "prometheus_client", "jinja2", "httpx"):
    pytest.importorskip(name)

import httpx
from fake_engine import FakeEngine
from prometheus_client.parser import text_string_to_metric_families
from serving import (
    HANG_SECONDS,
    counters,
    post,
    serving,
)
from specops.server.metrics import Metrics
from specops.service.thread import ThreadClient

HTTP = httpx.Client(timeout=HANG_SECONDS)


SHORT = {"max_tokens": 10, "speculative_config": {"num_speculative_tokens": 1}}


def test_metrics_count_requests_tokens_and_drafts() -> None:
    with serving(FakeEngine()) as served:
        before = counters(served)
        assert before["specops:generation_tokens_total"] == {"": 0}
        assert before["specops:request_success_total"] == {
            "stop": 0,
            "length": 0,
            "abort": 0,
            "error": 0,
        }
        body = {"prompt": "abcde", "max_tokens": 11}
        for _ in range(3):
            assert post(served, "completions", body).status_code == 200
        after = counters(served)
        expected = {
            "prompt_tokens_total": 15,
            "generation_tokens_total": 33,
            "spec_decode_num_drafts_total": 9,
            "spec_decode_num_draft_tokens_total": 27,
            "spec_decode_num_accepted_tokens_total": 21,
            "num_requests_running": 0,
            "num_requests_waiting": 0,
            "kv_cache_usage_perc": 0,
            "num_preemptions_total": 0,
            "time_to_first_token_seconds_count": 3,
            "inter_token_latency_seconds_count": 30,
            "e2e_request_latency_seconds_count": 3,
            "request_queue_time_seconds_count": 3,
            "request_prefill_time_seconds_count": 3,
            "request_decode_time_seconds_count": 3,
            "request_time_per_output_token_seconds_count": 3,
            "iteration_tokens_sum": served.engine.stats.num_rows,
            "request_prompt_tokens_sum": 15,
            "request_generation_tokens_sum": 33,
        }
        for name, value in expected.items():
            assert after[f"specops:{name}"] == {"": value}, name
        assert after["specops:request_success_total"]["length"] == 3
        assert served.engine.stats.num_rows > 0
        assert after["specops:cache_config_info"] == {"16,True,1000": 1}
        assert after["process_resident_memory_bytes"][""] > 1e6
        assert post(served, "completions", {"prompt": 3}).status_code == 400
        HTTP.put(f"{served.url}/v1/no-such-route")
        HTTP.get(f"{served.url}/v1/models/other")
        answers = counters(served)["specops:http_requests_total"]
        assert answers == {
            "GET,/metrics,200": 2,
            "POST,/v1/completions,200": 3,
            "POST,/v1/completions,400": 1,
            "any,none,404": 1,
            "GET,/v1/models/{name:path},404": 1,
        }
        per_pos = after["specops:spec_decode_num_accepted_tokens_per_pos_total"]
        assert per_pos == {"0": 9, "1": 6, "2": 6}
        assert post(served, "completions", body | SHORT).status_code == 200
        per_pos = counters(served)["specops:spec_decode_num_draft_tokens_per_pos_total"]
        assert per_pos == {"0": 14, "1": 9, "2": 9}, "expected five more steps of one draft each"


def test_prompt_token_metric_equals_usage() -> None:
    with serving(FakeEngine()) as served:
        body = {"prompt": ["abc", "defgh"], "n": 3, "max_tokens": 4}
        usage = post(served, "completions", body).json()["usage"]
        counted = counters(served)["specops:prompt_tokens_total"]
        assert counted == {"": usage["prompt_tokens"]} == {"": 8}


def test_metrics_are_rendered_at_most_ten_times_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    metrics = Metrics(ThreadClient(FakeEngine()))  # type: ignore[arg-type]
    texts = []
    for _ in range(12):
        metrics.answer("GET", "/", 200)
        texts.append(metrics.render())
    assert len(set(texts)) == 10 and texts[9] == texts[10] == texts[11]
    now += 1.0
    assert b'status="200"} 12.0' in metrics.render()


def test_dashboard_queries_existing_series_and_labels() -> None:
    """Check every query of docs/grafana.json."""
    dashboard = json.loads((Path(__file__).parent.parent / "docs" / "grafana.json").read_text())
    with serving(FakeEngine()) as served:
        post(served, "completions", {"prompt": "abcde", "max_tokens": 11})
        text = HTTP.get(f"{served.url}/metrics").text
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries.append(dashboard["templating"]["list"][1]["query"])
    assert len(queries) > 25
    requested: set[str] = set()
    for query in queries:
        names = re.findall(r"((?:specops:|process_)\w+)", query)
        assert names and set(names) <= labels.keys(), query
        requested.update(names)
        for by in re.findall(r"by \((\w+)\)", query):
            assert all(by in labels[name] for name in names), query
        matched = re.findall(r"{(\w+)=~", query)
        assert all(label in labels[name] for name in names for label in matched), query
    assert len(requested) > 20
