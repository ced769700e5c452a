# SPDX-License-Identifier: Apache-2.0
"""Engines behind NVIDIA Dynamo's frontend: tokens and logprob bits equal those of one engine.

`make -C tools test-dynamo` runs the tests in an environment of their own. Frontend and workers find
each other through a directory, without etcd or NATS. The frontend writes numbers with the digits
of a float32, so logprobs are compared as float32. The engine's ops take temperatures as float32,
too.
"""

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("dynamo", reason="ai-dynamo is not installed: make -C tools test-dynamo")

import httpx
import numpy as np
import specops.engine.engine
from dynamo._core import Context
from server_pairs import MTP, children_of, free_port
from specops.api.structured import StructuredOutput
from specops.api.tokenizer import Tokenizer
from specops.engine import Engine, EngineConfig, SamplingParams
from specops.integrations.dynamo import SpecopsBackend, main, params_of

ENVIRONMENT = {
    "DYN_TCP_RPC_HOST": "127.0.0.1",
    "DYN_TCP_RESPONSE_STREAM_HOST": "lo",
    "DYN_EVENT_PLANE_HOST": "127.0.0.1",
    "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0",
    "DYN_LOG": "error",
}


SETTINGS = {"device": "cpu", "num_threads": 1, "num_pages": 512, "seed": 5, "page_size": 16}
# Text that the bundled model knows. The frontend (ai-dynamo 1.4.2) breaks off an answer at bytes
# that are no characters, as a model with random weights emits them.
TEXT = Path(specops.engine.engine.__file__).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def engine() -> Engine:
    """Return an engine of one process without drafts."""
    return Engine(EngineConfig.from_plain(SETTINGS))


def options(*more: str) -> list[str]:
    arguments = {"speculative_config": MTP, "served_model_name": "tiny", **SETTINGS}
    pairs = [("--" + name.replace("_", "-"), str(value)) for name, value in arguments.items()]
    return [text for pair in pairs for text in pair] + list(more)


def low_port() -> int:
    """Return a free port below 2**15: Dynamo reads DYN_SYSTEM_PORT as a signed 16-bit number."""
    for port in range(21000, 1 << 15):
        with contextlib.suppress(OSError), socket.socket() as one:
            one.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


class Deployment:
    """Frontend and workers as processes, which end with the block.

    Args:
        folder: directory through which they find each other.
        workers: options of each worker.
        router: options of the frontend.
    """

    def __init__(self, folder: Path, workers: Sequence[list[str]], router: Sequence[str]) -> None:
        self._environment = {**os.environ, **ENVIRONMENT, "DYN_FILE_KV": str(folder)}
        first = low_port()
        self.ports = [first + number for number in range(len(workers))]
        self.workers = [
            self._start({"DYN_SYSTEM_PORT": str(port)}, "specops.integrations.dynamo", *one)
            for port, one in zip(self.ports, workers, strict=True)
        ]
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        where = ["--http-host", "127.0.0.1", "--http-port", str(port)]
        where += ["--discovery-backend", "file", "--event-plane", "zmq", *router]
        self._frontend = self._start({}, "dynamo.frontend", *where)

    def _start(
        self, more: dict[str, str], module: str, *arguments: str
    ) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", module, *arguments]
        return subprocess.Popen(
            command,
            env={**self._environment, **more},
            start_new_session=True,
            stdout=subprocess.DEVNULL,
        )

    def wait(self) -> None:
        """Wait until a request is answered and every worker is healthy."""
        for port in self.ports:
            until(lambda url=f"http://127.0.0.1:{port}/health": self._is_well(url))
        until(lambda: self.ask({"prompt": [3], "max_tokens": 1}).status_code == 200)

    def _is_well(self, url: str) -> bool:
        assert all(one.poll() is None for one in self.workers), "a worker has ended"
        return '"generate":"ready"' in get(url).text

    def ask(self, body: dict[str, Any], path: str = "completions") -> httpx.Response:
        with contextlib.suppress(httpx.TransportError):
            request = {"model": "tiny", **body}
            return httpx.post(f"{self.url}/v1/{path}", json=request, timeout=300)
        return httpx.Response(503)

    def gauge(self, worker: int, name: str) -> float:
        text = get(f"http://127.0.0.1:{self.ports[worker]}/metrics").text
        (line,) = [one for one in text.splitlines() if one.startswith(f"dynamo_component_{name}{{")]
        return float(line.rsplit(" ", 1)[1])

    def kill(self) -> None:
        for one in (*self.workers, self._frontend):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)
            one.wait()


def get(url: str) -> httpx.Response:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url, timeout=10)
    return httpx.Response(503)


def until(condition: Any, seconds: float = 300.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.1)


@contextlib.contextmanager
def deployed(folder: Path, *workers: list[str], router: Sequence[str] = ()) -> Iterator[Deployment]:
    made = Deployment(folder, workers, router)
    try:
        made.wait()
        yield made
    finally:
        made.kill()


def bodies(count: int, seed: int) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    known = Tokenizer.from_dir(EngineConfig().model_dir).encode(TEXT)
    return [
        {
            "prompt": known[(begin := draw.randrange(3000)) : begin + draw.randint(1, 150)],
            "max_tokens": draw.randint(1, 24),
            "temperature": draw.choice([0.0, 0.7]),
            "seed": draw.randint(0, 1000),
            "ignore_eos": draw.random() < 0.5,
            "logprobs": draw.randint(1, 2),
            "return_tokens_as_token_ids": True,
        }
        for _ in range(count)
    ]


def alone(engine: Engine, request: dict[str, Any]) -> dict[str, Any]:
    """Return one engine's result for a request, in the format of the frontend."""
    names = ("max_tokens", "temperature", "seed", "ignore_eos", "logprobs")
    params = SamplingParams(**{name: request[name] for name in names})
    (result,) = engine.generate([request["prompt"]], params)
    return {
        "tokens": [f"token_id:{one}" for one in result.token_ids],
        "token_logprobs": [np.float32(one.logprob) for one in result.logprobs],
        "top_logprobs": [  # includes the token itself, whatever its rank
            {
                f"token_id:{token}": np.float32(logprob)
                for token, logprob in (*one.alternatives, (one.token_id, one.logprob))
            }
            for one in result.logprobs
        ],
        "finish_reason": result.finish_reason,
        "cached": 0,
    }


def through(made: Deployment, request: dict[str, Any]) -> dict[str, Any]:
    answer = made.ask(request)
    assert answer.status_code == 200, answer.text
    body = json.loads(answer.text, parse_float=np.float32)
    (choice,) = body["choices"]
    result = choice["logprobs"]
    return {
        "tokens": result["tokens"],
        "token_logprobs": result["token_logprobs"],
        "top_logprobs": [
            {one["token"]: one["logprob"] for one in top} for top in result["top_logprobs"]
        ],
        "finish_reason": choice["finish_reason"],
        "cached": body["usage"]["prompt_tokens_details"]["cached_tokens"],
    }


def test_one_worker_gives_the_bits_of_an_engine(engine: Engine, tmp_path: Path) -> None:
    with deployed(tmp_path, options()) as made:
        for request in bodies(20, seed=1):
            assert through(made, request) == alone(engine, request)
        wrong = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5000}
        answer = made.ask(wrong, "chat/completions")
        assert answer.status_code == 400 and "the context of 1024" in answer.text
        until(lambda: made.gauge(0, "gpu_cache_usage_percent") == 0)
        assert made.gauge(0, "total_blocks") == SETTINGS["num_pages"]


def test_prefill_and_decode_give_the_bits_of_an_engine(engine: Engine, tmp_path: Path) -> None:
    roles = [options("--role", role) for role in ("prefill", "decode")]
    with deployed(tmp_path, *roles) as made:
        for request in bodies(20, seed=2):
            expected = {**alone(engine, request), "cached": (len(request["prompt"]) - 1) // 16 * 16}
            assert through(made, request) == expected


def test_router_follows_kv_events(engine: Engine, tmp_path: Path) -> None:
    """Each prompt goes to the one of two workers that has computed it."""
    workers = [options("--kv-events-endpoint", f"tcp://127.0.0.1:{free_port()}") for _ in range(2)]
    router = ["--router-mode", "kv", "--kv-cache-block-size", "16"]
    with deployed(tmp_path, *workers, router=router) as made:
        first = bodies(20, seed=4)
        for request in first:
            assert through(made, request)["tokens"] == alone(engine, request)["tokens"]
        time.sleep(1)
        for request in first:
            result = through(made, request)
            assert result["cached"] == (len(request["prompt"]) - 1) // 16 * 16


def test_killed_engine_is_restarted(tmp_path: Path) -> None:
    with deployed(tmp_path, options()) as made:
        body = {"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0.0}
        before = made.ask(body).json()["choices"]
        (engine,) = children_of(made.workers[0].pid)
        os.kill(engine, signal.SIGKILL)
        until(lambda: made.ask(body).status_code == 200)
        assert made.ask(body).json()["choices"] == before
        assert made.workers[0].poll() is None


def test_disconnected_client_frees_its_pages() -> None:
    """Its request ends, whether it runs or waits, and holds no page."""
    context, waiting = Context("runs"), Context("waits")

    async def run() -> None:
        backend, _ = await SpecopsBackend.from_args(options("--max-num-seqs", "1"))
        await backend.start(1)
        client = backend._client
        assert client is not None
        try:
            long = {
                "token_ids": [5] * 20,
                "stop_conditions": {"max_tokens": 900, "ignore_eos": True},
            }
            one = backend.generate(long, context)
            first = asyncio.ensure_future(anext(one))
            two = asyncio.ensure_future(anext(backend.generate(long, waiting)))
            while client.status.num_waiting != 1:
                await asyncio.sleep(0.01)
            await backend.abort(waiting)
            with pytest.raises(StopAsyncIteration):
                await two
            await first
            await one.aclose()
            while client.status.num_running or client.status.num_waiting:
                await asyncio.sleep(0.01)
            assert client.status.num_free_pages == SETTINGS["num_pages"]
            assert client.status.stats.generation_tokens < 900
        finally:
            await backend.cleanup()

    asyncio.run(asyncio.wait_for(run(), 300))


NOTHING = dict.fromkeys(["n", "best_of", "temperature", "top_k", "seed", "guided_decoding"])


def test_fields_of_requests_become_sampling_params() -> None:
    request = {
        "sampling_options": {
            **NOTHING,
            **{"temperature": 0.5, "top_k": -1, "repetition_penalty": 2.0, "n": 1},
            "guided_decoding": {"json": {"type": "object"}, "regex": None},
        },
        "stop_conditions": {
            **{"max_tokens": 7, "stop": ["x"], "max_thinking_tokens": 3},
            **{"stop_token_ids": [9], "stop_token_ids_hidden": [0, 9], "min_tokens": None},
        },
        "output_options": {"logprobs": 2, "skip_special_tokens": True},
    }
    assert params_of(request) == SamplingParams(
        temperature=0.5,
        repetition_penalty=2.0,
        max_tokens=7,
        stop=("x",),
        stop_token_ids=(0, 9),
        reasoning_max_tokens=3,
        logprobs=2,
        structured_output=StructuredOutput(json_schema={"type": "object"}),
    )
    assert params_of({}) == SamplingParams(max_tokens=None)


@pytest.mark.parametrize(
    ("request", "message"),
    [
        ({"sampling_options": {"best_of": 2}}, "best_of must be absent, .* got 2"),
        ({"sampling_options": {"n": 2}}, "n must be 1 with Dynamo, got 2"),
        ({"output_options": {"prompt_logprobs": 0}}, "prompt_logprobs must be absent, .* got 0"),
        ({"sampling_options": {"temperature": -1.0}}, "temperature must be"),
        ({"sampling_options": {"guided_decoding": {"backend": "x"}}}, "guided_decoding: .*backend"),
    ],
)
def test_unsupported_fields_are_refused(request: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        params_of(request)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--role", "mixed"], "role must be prefill, decode or absent with Dynamo, got mixed"),
        (["--kv-events-topic", "x"], "kv_events_topic has no effect without kv_events_endpoint"),
        (["--model", "nowhere"], "model must be a directory with a tokenizer.json"),
    ],
)
def test_invalid_options_are_reported(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
