# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  (where the server's packages are missing, nothing else is imported)
"""vLLM's router drives a prefill and a decode server with the bits of one server.

`pip install vllm-router` installs it, and the tests start it as its help says. It reads the numbers
of an answer and writes them again, sometimes with another last digit. So logprobs, which are
float32, are compared as float32.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

for name in ("fastapi", "uvicorn", "pydantic", "msgspec", "prometheus_client", "jinja2", "httpx"):
    pytest.importorskip(name)

import httpx
import numpy as np
from fake_engine import CHAT
from server_pairs import (
    ServerProcess,
    bodies,
    free_port,
    of_ranks,
    one_server,
    options,
    pair_options,
    servers,
    wait_until_idle,
)
from serving import Served

ROUTER = shutil.which(
    "vllm-router", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(ROUTER is None, reason="vllm-router is not installed"),
]


@pytest.fixture(scope="module")
def pair(
    mtp_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[ServerProcess]]:
    template = tmp_path_factory.mktemp("chat") / "template.jinja"
    template.write_text(CHAT)
    with servers(*pair_options(mtp_model, "--chat-template", str(template))) as started:
        yield started


@contextlib.contextmanager
def routing(*given: str) -> Iterator[str]:
    """Start the router with these options. Yield its URL once it answers."""
    port = free_port()
    command = [str(ROUTER), *given, "--port", str(port), "--prometheus-port", str(free_port())]
    command += ["--worker-startup-check-interval", "1"]
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + 300
        while time.monotonic() < end:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                    break
            assert process.poll() is None, "the router has ended"
            time.sleep(0.1)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def router(pair: list[ServerProcess]) -> Iterator[str]:
    prefill, decode = pair
    roles = ["--prefill", prefill.url, "--decode", decode.url]
    with routing("--vllm-pd-disaggregation", "--policy", "round_robin", *roles) as url:
        yield url


def choices_at(url: str, path: str, requests: list[dict[str, Any]]) -> list[Any]:
    """Return the choices of all answers, eight requests at a time, with numbers as float32."""

    def one(body: dict[str, Any]) -> Any:
        answer = httpx.post(f"{url}{path}", json=body, timeout=300)
        assert answer.status_code == 200, answer.text
        return json.loads(answer.text, parse_float=np.float32)["choices"]

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(one, requests))


@pytest.mark.parametrize("count", [20, 200])
def test_router_gives_the_answers_of_one_server(
    router: str, pair: list[ServerProcess], reference_server: Served, count: int
) -> None:
    requests = bodies(count, seed=count + 2)
    hits = pair[1].gauge("prefix_cache_hits_total")
    found = choices_at(router, "/v1/completions", requests)
    assert found == choices_at(reference_server.url, "/v1/completions", requests)
    # All full pages of the prompts were transferred, since the decode server had none of them.
    pages = sum((len(body["prompt"]) - 1) // 16 for body in requests)
    assert pair[1].gauge("prefix_cache_hits_total") - hits >= 16 * pages > 0
    for one in pair:
        wait_until_idle(one)


def test_router_supports_several_ranks(mtp_model: Path) -> None:
    """Two ranks compute prompts and one continues. The router forwards the addresses of all."""
    requests = bodies(20, seed=5)
    with (
        servers(*of_ranks(mtp_model, (2, 1))) as (prefill, decode),
        one_server(mtp_model, exact_across_tp=2) as one,
        routing(
            "--vllm-pd-disaggregation", "--prefill", prefill.url, "--decode", decode.url
        ) as url,
    ):
        found = choices_at(url, "/v1/completions", requests)
        assert found == choices_at(one.url, "/v1/completions", requests)
        pages = sum((len(body["prompt"]) - 1) // 16 for body in requests)
        assert decode.gauge("prefix_cache_hits_total") >= 16 * pages > 0


CHATS: list[dict[str, Any]] = [
    {
        "messages": [{"role": "user", "content": f"Say {number} words about number {number}."}],
        "max_tokens": 20,
        "temperature": temperature,
        "seed": number,
        "logprobs": True,
        "top_logprobs": 2,
    }
    for number, temperature in ((1, 0.0), (2, 0.7), (3, 1.0))
]


def test_router_supports_chats_and_streams(router: str, pair: list[ServerProcess]) -> None:
    path = "/v1/chat/completions"
    expected = choices_at(pair[1].url, path, CHATS)
    assert choices_at(router, path, CHATS) == expected
    for body, (choice,) in zip(CHATS, expected, strict=True):
        with httpx.stream(
            "POST", router + path, json={**body, "stream": True}, timeout=300
        ) as found:
            lines = [line[6:] for line in found.iter_lines() if line.startswith("data: {")]
        deltas = [one["choices"][0]["delta"] for one in map(json.loads, lines)]
        assert "".join(one.get("content") or "" for one in deltas) == choice["message"]["content"]


def test_router_sends_a_prompt_to_the_server_with_its_pages(mtp_model: Path) -> None:
    """The router knows the pages from events only: it has seen no request with these prompts."""
    pytest.importorskip("zmq")
    ports = [[free_port(), free_port()] for _ in range(2)]
    endpoints = [[f"tcp://127.0.0.1:{port}" for port in own] for own in ports]
    own = [
        ["--kv-events-endpoint", live, "--kv-events-replay", replay] for live, replay in endpoints
    ]
    with servers(*(options(mtp_model, *one) for one in own)) as both:
        urls = [one.url for one in both]
        prompts = [[5 + number] * 90 for number in range(6)]
        for number, prompt in enumerate(prompts):  # before the router knows of either server
            body = {"prompt": prompt, "max_tokens": 1}
            httpx.post(f"{urls[number % 2]}/v1/completions", json=body, timeout=300)
        sources = [
            option
            for url, (live, replay) in zip(urls, endpoints, strict=True)
            for option in (
                "--kv-event-source",
                f"{url}={live}",
                "--kv-event-replay-source",
                f"{url}={replay}",
            )
        ]
        model = ["--kv-event-model", mtp_model.name, "--kv-event-block-size", "16"]
        with routing("--policy", "kv_aware", "--worker-urls", *urls, *sources, *model) as url:
            # An event after its start makes the router request those before.
            for one in urls:
                httpx.post(f"{one}/v1/completions", json={"prompt": [3] * 40}, timeout=300)
            time.sleep(2)
            hits = [one.gauge("prefix_cache_hits_total") for one in both]
            for prompt in prompts:
                body = {"model": mtp_model.name, "prompt": prompt, "max_tokens": 1}
                answer = httpx.post(f"{url}/v1/completions", json=body, timeout=300)
                assert answer.status_code == 200, answer.text
        found = [one.gauge("prefix_cache_hits_total") for one in both]
        assert [new - old for new, old in zip(found, hits, strict=True)] == [240, 240]
