# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  (where the server's packages are missing, nothing else is imported)
"""vLLM's router drives a prefill and a decode server: its answers are one server's, bit for bit.

`pip install vllm-router` installs it. It is started as its own help says, and knows nothing of us.
It reads the numbers of an answer and writes them again, sometimes with another last digit. Logprobs
are float32, and as such they are compared, bit for bit.
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
from server_pairs import ServerProcess, bodies, free_port, options, servers, wait_until_idle
from serving import Served

ROUTER = shutil.which(
    "vllm-router", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
)
pytestmark = [
    pytest.mark.prove,
    pytest.mark.skipif(ROUTER is None, reason="vllm-router is not installed"),
]


@pytest.fixture(scope="module")
def pair(
    mtp_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[ServerProcess]]:
    template = tmp_path_factory.mktemp("chat") / "template.jinja"
    template.write_text(CHAT)
    roles = [
        options(mtp_model, "--role", role, "--chat-template", str(template))
        for role in ("prefill", "decode")
    ]
    with servers(*roles) as started:
        yield started


@pytest.fixture(scope="module")
def router(pair: list[ServerProcess]) -> Iterator[str]:
    prefill, decode = pair
    port = free_port()
    command = [str(ROUTER), "--vllm-pd-disaggregation", "--policy", "round_robin"]
    command += ["--prefill", prefill.url, "--decode", decode.url, "--port", str(port)]
    command += ["--prometheus-port", str(free_port()), "--worker-startup-check-interval", "1"]
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + 30
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


def choices_at(url: str, path: str, asked: list[dict[str, Any]]) -> list[Any]:
    """The choices of all answers, eight requests at a time, with numbers as float32."""

    def one(body: dict[str, Any]) -> Any:
        answer = httpx.post(f"{url}{path}", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return json.loads(answer.text, parse_float=np.float32)["choices"]

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(one, asked))


@pytest.mark.parametrize("count", [20, 200])
def test_the_router_gives_the_answers_of_one_server(
    router: str, pair: list[ServerProcess], together: Served, count: int
) -> None:
    asked = bodies(count, seed=count + 2)
    hits = pair[1].gauge("prefix_cache_hits_total")
    told = choices_at(router, "/v1/completions", asked)
    assert told == choices_at(together.url, "/v1/completions", asked)
    # Of each prompt all full pages came: nobody had sent it to the decode server before.
    pages = sum((len(body["prompt"]) - 1) // 16 for body in asked)
    assert pair[1].gauge("prefix_cache_hits_total") - hits >= 16 * pages > 0
    for one in pair:
        wait_until_idle(one)


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


def test_chats_and_streams_come_through(router: str, pair: list[ServerProcess]) -> None:
    path = "/v1/chat/completions"
    expected = choices_at(pair[1].url, path, CHATS)
    assert choices_at(router, path, CHATS) == expected
    for body, (choice,) in zip(CHATS, expected, strict=True):
        with httpx.stream("POST", router + path, json={**body, "stream": True}, timeout=60) as told:
            lines = [line[6:] for line in told.iter_lines() if line.startswith("data: {")]
        deltas = [one["choices"][0]["delta"] for one in map(json.loads, lines)]
        assert "".join(one.get("content") or "" for one in deltas) == choice["message"]["content"]
