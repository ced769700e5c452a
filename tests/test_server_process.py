# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  (where the server's packages are missing, nothing else is imported)
"""The engine in a process of its own: unchanged answers, and recovery when a process dies."""

import asyncio
import concurrent.futures
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

for name in ("fastapi", "uvicorn", "pydantic", "msgspec", "prometheus_client", "jinja2", "httpx"):
    pytest.importorskip(name)

import httpx
import msgspec
import numpy as np
from fake_engine import FakeEngine
from mtp_checkpoints import make_mtp_model
from server_pairs import children_of
from serving import Served, serving, serving_app, wait_for
from specops.api.errors import QueueFull
from specops.api.messages import (
    Abort,
    Batch,
    Begin,
    Failed,
    Hello,
    KvTransfer,
    Output,
    Status,
    Stop,
    Submit,
)
from specops.api.outputs import EngineStats, PromptLogprobs
from specops.api.tokenizer import Tokenizer
from specops.engine import Engine, EngineConfig, SamplingParams, StructuredOutput
from specops.server import make_app
from specops.server.dispatch import Dispatch
from specops.server.jobs import Job
from specops.server.metrics import Metrics
from specops.service import child, loop, process
from specops.service.loop import Compiled, EngineLoop
from specops.service.process import EngineProcess, ProcessClient
from specops.service.wire import Frames, Setup, encoded, from_process, to_process

HTTP = httpx.Client(timeout=120)
TEXT = "for i in range(3): for i in range"


class Apart:
    """Server whose engine runs in a process of its own."""

    def __init__(self, client: ProcessClient, url: str) -> None:
        self.client, self.url = client, url

    def post(self, body: Any, path: str = "completions") -> httpx.Response:
        return HTTP.post(f"{self.url}/v1/{path}", json=body)

    def health(self) -> tuple[int, str]:
        response = HTTP.get(f"{self.url}/health")
        return response.status_code, response.json()["status"]

    def gauge(self, name: str) -> float:
        text = HTTP.get(f"{self.url}/metrics").text
        (line,) = [one for one in text.splitlines() if one.startswith(f"specops:{name}{{")]
        return float(line.rsplit(" ", 1)[1])

    def wait_until_idle(self) -> None:
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            wait_for(lambda name=name: self.gauge(name) == 0)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {
        "model": str(make_mtp_model(tmp_path_factory.mktemp("model"))),
        "device": "cpu",
        "num_threads": 1,
        "served_model_name": "tiny",
        "speculative_config": json.dumps({"method": "ngram", "num_speculative_tokens": 4}),
        "seed": 5,
        "max_waiting": 400,
    }


@contextlib.contextmanager
def serving_apart(settings: dict[str, Any]) -> Iterator[Apart]:
    started = EngineProcess(Setup(settings, "warning"))
    tokenizer = Tokenizer.from_dir(settings["model"])
    client = ProcessClient(started)
    with serving_app(make_app(client, tokenizer)) as url:
        yield Apart(client, url)
    assert not is_running(client.pid), "the engine's process outlives the server"


@pytest.fixture(scope="module")
def apart(settings: dict[str, Any]) -> Iterator[Apart]:
    with serving_apart(settings) as one:
        yield one


@pytest.fixture(scope="module")
def together(settings: dict[str, Any]) -> Iterator[Served]:
    with serving(Engine(EngineConfig.from_plain(settings))) as one:
        yield one


def is_running(pid: int | None) -> bool:
    """Return whether a process exists. A zombie counts."""
    return pid is not None and Path(f"/proc/{pid}").exists()


BODIES: list[dict[str, Any]] = [
    {"logprobs": 3},
    {"logprobs": 0, "echo": True},
    {"prompt_logprobs": 2, "n": 2},
    {"prompt": [[5, 6, 7], [8, 9]], "n": 3, "stop": ["x", "ab"]},
    {"max_tokens": 0, "echo": True, "logprobs": 1},
    {"logit_bias": {"33": 100}, "stop_token_sequences": [[33, 33]]},
    {"bad_words": ["a"], "min_tokens": 3, "stop_token_ids": [4], "allowed_token_ids": [*range(99)]},
    {"speculative_config": {"method": "mtp", "num_speculative_tokens": 5}},
    {"stream": True, "stream_options": {"include_steps": True, "include_usage": True}},
    {"stream": True, "logprobs": 2, "echo": True, "n": 2},
    {"seed": 2**64 - 1},
    {"seed": -(2**63), "temperature": 1},
    # refused by the server or by the engine
    {"max_tokens": 10**6},
    {"max_tokens": 10**400},
    {"prompt": [10**30]},
    {"prompt": ""},
    {"n": 128, "prompt": ["a"] * 4},
    {"bad_words": ["x" * 65]},
    {"think_end_token_id": 10**6, "reasoning_max_tokens": 1},
    {"speculative_config": {"method": "magic"}},
    {"speculative_config": {"num_speculative_tokens": 10**30}},
    {"speculative_config": {"\ud800": 1}},
    {"speculative_config": {"\ud800lora": 1}},
]
STRUCTURED: list[dict[str, Any]] = [
    {"structured_outputs": {"regex": "[ab]{5}c"}},
    {"response_format": {"type": "json_object"}, "stream": True},
    {"structured_outputs": {"json": {"enum": [1, "\ud800"]}}},
    {"structured_outputs": {"regex": "("}},
    {"structured_outputs": {"regex": "(", "whitespace_pattern": "x"}, "stream": True},
]


def answer_of(url: str, body: dict[str, Any]) -> Any:
    """Return an answer without the fields that differ each time."""
    requested = {"prompt": TEXT, "max_tokens": 20, "temperature": 0.8, "seed": 3, **body}
    data = json.dumps(requested)
    headers = {"Content-Type": "application/json"}
    answer = HTTP.post(f"{url}/v1/completions", content=data, headers=headers)
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return answer.status_code, without_times(answer.json())
    events = [line[6:] for line in answer.text.splitlines() if line]
    assert events.pop() == "[DONE]"
    return [without_times(json.loads(one)) for one in events]


def without_times(answer: dict[str, Any]) -> dict[str, Any]:
    for choice in answer.get("choices", ()):
        if "step" in choice:
            assert choice["step"].pop("seconds") > 0
    return {k: v for k, v in answer.items() if k not in ("id", "created", "timings")}


@pytest.mark.parametrize("body", BODIES, ids=str)
def test_answers_equal_those_of_an_engine_in_a_thread(
    apart: Apart, together: Served, body: dict[str, Any]
) -> None:
    for _ in range(2):  # the second time with a warm prefix cache
        assert answer_of(apart.url, body) == answer_of(together.url, body)


@pytest.mark.parametrize("body", STRUCTURED, ids=str)
def test_constrained_answers_equal_those_of_an_engine_in_a_thread(
    apart: Apart, together: Served, body: dict[str, Any]
) -> None:
    pytest.importorskip("llguidance")
    assert answer_of(apart.url, body) == answer_of(together.url, body)


def test_engine_metadata_equals_that_of_an_engine_in_a_thread(
    apart: Apart, together: Served
) -> None:
    for path in ("v1/models", "v1/contract", "health"):
        ours, theirs = (HTTP.get(f"{url}/{path}").json() for url in (apart.url, together.url))
        for one in (ours, theirs):
            for model in one.get("data", ()):
                del model["created"]
        assert ours == theirs
    names = []
    for url in (apart.url, together.url):
        lines = HTTP.get(f"{url}/metrics").text.splitlines()
        names.append({line.split()[2] for line in lines if line.startswith("# TYPE")})
    assert names[0] - names[1] == {
        f"engine_process_{name}"
        for name in (
            "cpu_seconds_total",
            "max_fds",
            "open_fds",
            "resident_memory_bytes",
            "start_time_seconds",
            "virtual_memory_bytes",
        )
    }
    assert not names[1] - names[0]


def test_disconnected_streams_free_their_pages(apart: Apart) -> None:
    host, port = apart.url.removeprefix("http://").split(":")

    def stream(number: int) -> str:
        body = {"prompt": f"{number}: {TEXT}", "max_tokens": 8, "stream": True, "ignore_eos": True}
        if number % 3 == 0:
            body["max_tokens"] = 100
        data = json.dumps(body).encode()
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
                b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
                % (len(data), data)
            )
            if number % 3 == 0:
                time.sleep(random.random() * 0.05)
                return "left"
            with connection.makefile("rb") as answer:
                return answer.read().decode()

    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        found = list(pool.map(stream, range(256)))
    assert all("data: [DONE]" in one for one in found if one != "left")
    apart.wait_until_idle()
    assert apart.health() == (200, "ok")


def test_killed_engine_is_restarted(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    long = {"prompt": TEXT, "max_tokens": 200, "ignore_eos": True, "temperature": 0}
    with serving_apart(settings | {"max_num_seqs": 2}) as apart:
        expected = apart.post(long | {"max_tokens": 9}).json()["choices"]
        started, first = apart.client._process, apart.client.pid
        assert first is not None
        os.kill(first, signal.SIGSTOP)  # so that no request ends before
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            requested = [pool.submit(apart.post, long | {"stream": True}) for _ in range(2)]
            requested += [pool.submit(apart.post, long | {"n": 2}) for _ in range(2)]
            wait_for(lambda: len(apart.client._receive.__self__._jobs) == 4)  # type: ignore[attr-defined]
            may_start = threading.Event()
            again = EngineProcess.again
            monkeypatch.setattr(
                EngineProcess, "again", lambda self: may_start.wait(120) and again(self)
            )
            os.kill(first, signal.SIGKILL)
            answers = [one.result() for one in requested]
        message = "the engine's process has ended; the server's log says more"
        for answer in answers:  # the engine had accepted none of them
            assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
            assert answer.json()["error"]["message"] == message
        assert apart.health() == (503, "restarting")
        away = apart.post(long)
        assert away.status_code == 503 and int(away.headers["retry-after"]) >= 1
        assert away.json()["error"]["code"] == "engine_restarting"
        may_start.set()
        wait_for(lambda: apart.health() == (200, "ok"), 120)
        second = apart.client.pid
        assert second != first and not is_running(first)
        assert apart.post(long | {"max_tokens": 9}).json()["choices"] == expected
        apart.wait_until_idle()
        assert started.connection.fileno() == -1, "the socket of the old process is open"
        # Kill the engine in the middle of a stream of more steps than it has time for. This time it
        # does not come back.
        many = long | {"stream": True, "n": 64}
        with HTTP.stream("POST", f"{apart.url}/v1/completions", json=many) as answer:
            lines = answer.iter_lines()
            assert "error" not in json.loads(next(lines)[6:])
            monkeypatch.setattr(process, "_PAUSES", (0.0, 0.01))
            monkeypatch.setattr(process, "_CODE", "{path!r}")
            os.kill(second, signal.SIGKILL)  # type: ignore[arg-type]
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2][6:])["error"]["message"] == message
        wait_for(lambda: apart.health() == (503, "failed"), 120)
        stopped = apart.post(long)
        assert stopped.status_code == 500
        assert stopped.json()["error"]["message"] == "the engine has stopped"
        assert not is_running(apart.client.pid)


def test_bytes_sent_to_a_hung_engine_are_bounded(
    apart: Apart, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Further jobs are refused until the engine reads again."""
    monkeypatch.setattr(process, "_MAX_UNREAD_BYTES", 100_000)
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    hello = Hello(apart.client.capabilities, apart.client.status)
    started: Any = SimpleNamespace(hello=lambda: hello, pid=os.getpid(), connection=ours)

    async def run() -> None:
        client = ProcessClient(started)
        dispatch = Dispatch(client, Metrics(client))
        await dispatch.start()

        def submit() -> "asyncio.Task[None]":
            own = {"client": "", "streaming": False, "unread": dispatch.unread}
            job = Job([[3] * 10_000], SamplingParams(), None, **own)  # type: ignore[arg-type]
            return asyncio.ensure_future(dispatch.submit(job))

        waiting = []
        while not client.is_behind and len(waiting) < 1_000:
            waiting.append(submit())
            await asyncio.sleep(0)
        with pytest.raises(QueueFull, match="has not read"):
            await submit()
        assert not any(one.done() for one in waiting)
        while client.is_behind:
            with contextlib.suppress(BlockingIOError):  # until the event loop has written more
                theirs.recv(1 << 20)
            await asyncio.sleep(0)
        waiting.append(submit())
        await asyncio.sleep(0)
        assert not any(one.done() for one in waiting)
        for one in waiting:
            one.cancel()

    with ours, theirs:
        asyncio.run(run())


def test_engine_with_another_model_does_not_take_over(apart: Apart) -> None:
    """Another model has other bits, so the operator must decide."""
    was = apart.client.capabilities
    hello = Hello(was, apart.client.status)
    other = msgspec.structs.replace(was, contract=was.contract | {"digest": "of another model"})
    started: Any = SimpleNamespace(hello=lambda: hello, pid=1, end=lambda: "exit status 0")
    closed = []

    async def run() -> None:
        client = ProcessClient(started)
        client._transport = SimpleNamespace(close=lambda: closed.append(1))  # type: ignore[assignment]
        client.received(Hello(other, hello.status))
        assert closed and client.capabilities == was
        client.disconnected()
        assert client.health == "restarting" and client._restarting is not None
        await client._restarting
        assert client.health == "failed"

    asyncio.run(run())


@pytest.mark.ci
def test_hung_engine_is_noticed_and_restarted(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"prompt": TEXT, "max_tokens": 9, "temperature": 0}
    with serving_apart(settings) as apart, concurrent.futures.ThreadPoolExecutor(2) as pool:
        first, expected = apart.client.pid, apart.post(body).json()["choices"]
        long = body | {"stream": True, "max_tokens": 200, "n": 32, "ignore_eos": True}
        with HTTP.stream("POST", f"{apart.url}/v1/completions", json=long) as answer:
            lines = answer.iter_lines()
            next(lines)
            assert first is not None
            os.kill(first, signal.SIGSTOP)
            form = {"structured_outputs": {"choice": ["a"]}}
            waiting = [pool.submit(apart.post, body), pool.submit(apart.post, body | form)]
            wait_for(lambda: len(apart.client._receive.__self__._jobs) == 3)  # type: ignore[attr-defined]
            monkeypatch.setattr(process, "_STALLED_SHARE", 1e-6)
            wait_for(lambda: apart.health() == (503, "stalled"))
            monkeypatch.undo()
            away = apart.post(body)
            apart.client._timeout = 0.1
            rest = [line for line in lines if line]
        apart.client._timeout = process.ENGINE_TIMEOUT
        for refused in [away, *(one.result() for one in waiting)]:
            assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["code"] == "engine_restarting"
        assert rest[-1] == "data: [DONE]" and "error" in json.loads(rest[-2][6:])
        wait_for(lambda: apart.health() == (200, "ok"), 120)
        assert apart.client.pid != first and not is_running(first)
        assert apart.post(body).json()["choices"] == expected


def test_hang_timeout_counts_ticks_of_the_watcher(
    apart: Apart, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sleep counts as one tick however long it took: the machine may have been suspended."""
    killed: list[float] = []
    ticks: list[tuple[float, str]] = []
    hello = Hello(apart.client.capabilities, apart.client.status)

    async def run() -> None:
        started: Any = SimpleNamespace(
            hello=lambda: hello, pid=1, send_kill=lambda: killed.append(len(ticks))
        )
        client = ProcessClient(started, 20.0)
        client._transport = SimpleNamespace(abort=lambda: None)  # type: ignore[assignment]
        link = process._Link(client)

        async def sleep(seconds: float) -> None:
            ticks.append((client.silent_seconds, client.health))
            if len(ticks) == 5:
                client._begun_at = 0.0  # the engine has loaded
            if len(ticks) == 10:
                batch = Batch(0.0, "ok", hello.status, None, {}, [])
                link.data_received(encoded(batch))
            if killed:
                raise asyncio.CancelledError

        with monkeypatch.context() as patch:
            patch.setattr(process.asyncio, "sleep", sleep)
            with contextlib.suppress(asyncio.CancelledError):
                await client._watch()

    asyncio.run(run())
    tick = 20.0 / process._TICKS
    assert ticks[:5] == [(0.0, "ok")] * 5, "loading counted as silence"
    assert [one for one, _ in ticks[5:10]] == pytest.approx([tick * i for i in range(1, 6)])
    healths = [health for _, health in ticks]
    assert healths[:20] == ["ok"] * 20 and healths[22:] == ["stalled"] * len(healths[22:])
    assert killed == [pytest.approx(process._TICKS + 10, abs=2)]


@contextlib.contextmanager
def command(
    settings: dict[str, Any], *more: str, before: str = "pass"
) -> Iterator[tuple[Any, str]]:
    """Run the command; yield its process and URL. The process runs the code `before` first."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ["--model", settings["model"], "--device", "cpu", "--port", str(port), *more]
    code = f"import sys; from specops.cli import serve; {before}; sys.exit(serve.main())"
    server = subprocess.Popen([sys.executable, "-c", code, *options])

    def is_up() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return HTTP.get(f"http://127.0.0.1:{port}/health").status_code == 200
        assert server.poll() is None
        return False

    try:
        wait_for(is_up, 120)
        yield server, f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def child_of(pid: int) -> int:
    (child,) = children_of(pid)
    return child


def test_sigterm_drains_requests_and_saves_the_suffix_cache(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """The signal goes to both processes, as a supervisor may send it."""
    cache = tmp_path / "cache.suffix"
    with command(settings, "--suffix-cache", str(cache)) as (server, url):
        engine = child_of(server.pid)
        body = {"prompt": TEXT, "max_tokens": 200, "stream": True, "ignore_eos": True}
        body |= {"speculative_config": {"method": "naive"}}
        with HTTP.stream("POST", f"{url}/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            for pid in (engine, server.pid):
                os.kill(pid, signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "length"
        assert server.wait(20) == 0
        assert not is_running(engine) and cache.exists()


@contextlib.contextmanager
def long_stream(url: str, path: str = "completions") -> Iterator[Iterator[str]]:
    """Yield the lines of a stream that has begun and has more steps than any test takes."""
    body = {"prompt": TEXT, "max_tokens": 200, "n": 64, "stream": True, "ignore_eos": True}
    with HTTP.stream("POST", f"{url}/v1/{path}", json=body) as answer:
        lines = (line for line in answer.iter_lines() if line)
        next(lines)
        yield lines


@contextlib.contextmanager
def begun_request(url: str, body: bytes, sent: int) -> Iterator[socket.socket]:
    """Begin a request, send `sent` bytes of its body, and yield the connection."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nExpect: 100-continue\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body)
        )
        assert b"100 Continue" in connection.recv(1 << 12)
        connection.sendall(body[:sent])
        yield connection


@pytest.mark.ci
def test_sigterm_ends_a_server_with_a_hung_engine(settings: dict[str, Any]) -> None:
    """Streams, waiting requests and incomplete bodies all get an error."""
    body = json.dumps({"prompt": TEXT}).encode()
    with command(settings, "--drain-timeout", "1") as (server, url), long_stream(url) as lines:
        engine = child_of(server.pid)
        os.kill(engine, signal.SIGSTOP)
        with (
            begun_request(url, body, len(body)) as waiting,
            begun_request(url, body, 3) as incomplete,
        ):
            server.terminate()
            for connection in (waiting, incomplete):
                with connection.makefile("rb") as answer:
                    text = answer.read()
                assert b" 503 " in text and b"shutting_down" in text, text
                assert b"\r\nretry-after: 1\r\n" in text.lower()
        *_, event, done = lines
        assert done == "data: [DONE]"
        assert json.loads(event[6:])["error"]["code"] == "shutting_down"
        assert server.wait(30) == 0
        assert not is_running(engine)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.ci
def test_server_exits_when_all_its_engines_have_failed(
    settings: dict[str, Any], count: int
) -> None:
    never = "from specops.service import process; process._PAUSES = ()"
    with command(settings, "--data-parallel-size", str(count), before=never) as (server, url):
        *others, last = children_of(server.pid)
        for engine in others:
            os.kill(engine, signal.SIGKILL)
            wait_for(lambda engine=engine: not is_running(engine))
            answer = HTTP.post(f"{url}/v1/completions", json={"prompt": TEXT, "max_tokens": 2})
            assert answer.status_code == 200 and HTTP.get(f"{url}/health").status_code == 200
        with long_stream(url) as lines:
            os.kill(last, signal.SIGKILL)
            *_, event, done = lines
        assert done == "data: [DONE]" and "has ended" in json.loads(event[6:])["error"]["message"]
        assert server.wait(60) == 1


@pytest.mark.ci
def test_engine_does_not_outlive_its_server(settings: dict[str, Any]) -> None:
    with command(settings) as (server, _):
        engine = child_of(server.pid)
        server.kill()
        server.wait()
        wait_for(lambda: not is_running(engine))


# ---- the loop ----


class FailingInbox:
    """Inbox that returns some commands and then always fails."""

    def __init__(self, *commands: Any) -> None:
        self._commands, self.num_failures = list(commands), 0

    def take(self, seconds: float | None) -> list[Any]:
        if self._commands:
            return [self._commands.pop(0)]
        self.num_failures += 1
        raise MemoryError

    def put(self, command: Any) -> None:
        raise AssertionError("no grammar is compiled here")


def test_loop_that_cannot_read_commands_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every job gets an error and the log is bounded. The server then starts another process."""
    monkeypatch.setattr(loop, "_FAILURE_SECONDS", 0.0)
    job = Submit(7, "", [[3, 4]], SamplingParams(max_tokens=100), None, True)
    inbox, batches = FailingInbox(Begin(1), job), list[Batch]()
    engine: Any = FakeEngine()
    EngineLoop(engine, inbox, batches.append).run()
    failed = [event for batch in batches for event in batch.events if isinstance(event, Failed)]
    assert [one.job for one in failed] == [7]
    assert [one.health for one in batches].count("failed") == 1 and batches[-1].health == "failed"
    assert inbox.num_failures == 10 and len(caplog.records) == 11
    assert not engine.has_unfinished()


# ---- messages ----


def test_job_is_unchanged_by_encoding() -> None:
    params = SamplingParams(
        max_tokens=None,
        temperature=0.25,
        logit_bias={7: -1.5, 3: 2},
        bad_words=("é",),
        bad_words_token_ids=((1, 2), (3,)),
        allowed_token_ids=(1, 2),
        seed=2**64 - 1,
        stop=("a", "b"),
        stop_token_sequences=((4, 5),),
        reasoning_max_tokens=3,
        think_inject_token_ids=(9,),
        structured_output=StructuredOutput(choice=("x", "y"), prefix='start: "z"'),
    )
    for given in (params, SamplingParams()):
        more = {"kv_transfer": KvTransfer(remote_port=1), "session": "a-1", "choice_index": 5}
        text = '{"method": "naive"}'
        job = Submit(3, "key-0", [[1, 2**31 - 1], [0]], given, text, True, **more)
        (found,) = map(to_process, Frames().feed(encoded(job)))
        assert type(found) is Submit
        for name in Submit.__struct_fields__:
            assert getattr(found, name) == getattr(job, name)
        assert hash(found.params.structured_output) == hash(given.structured_output)


@pytest.mark.parametrize("is_scored", [True, False])
def test_prompt_logprobs_are_unchanged_by_encoding(is_scored: bool) -> None:
    found = PromptLogprobs([4, 5, 6], 2)
    if is_scored:
        ids = np.array([[1, 2, 3], [4, 5, 6]], np.int32)
        logprobs = np.array([-0.1, -7.3], np.float32)
        found.add((logprobs, ids[:, 0], ids, -ids.astype(np.float32) / 3))
    output = Output(1, 0, [2], "b", [], prompt_logprobs=found)
    batch = Batch(1.5, "ok", Status(0, 0, 0, EngineStats(), {}), None, {}, [output])
    data, frames = encoded(batch), Frames()
    read = [one for byte in data for one in map(from_process, frames.feed(bytes([byte])))]
    (message,) = read
    assert isinstance(message, Batch) and isinstance(message.events[0], Output)
    there = message.events[0].prompt_logprobs
    assert there is not None and list(there) == list(found) and there[0] is None


def test_loading_engine_does_not_outlive_its_server() -> None:
    code = """
import sys, time
sys.path[:] = {path!r}
import socket
from specops.service import child
child.run(socket.socket(fileno=int(sys.argv[-1])), lambda setup, on_prefix: time.sleep(60))
"""
    started = EngineProcess(Setup({}, "warning"), code.format(path=sys.path))
    assert is_running(started.pid)
    begun = time.monotonic()
    assert started.end() == "exit status 1" and time.monotonic() - begun < 30


def test_failed_read_loses_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call reads the same messages although no others have arrived."""
    sent = [Abort(number) for number in range(5)]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        inbox = child.SocketInbox(theirs, Frames(), [Begin(1)])
        ours.sendall(b"".join(map(encoded, sent)))
        for number in range(5):
            with monkeypatch.context() as patch:
                patch.setattr(child, "to_process", failing_at(number))
                with pytest.raises(MemoryError):
                    inbox.take(None)
        assert inbox.take(None) == [Begin(1), *sent]
        ours.sendall(b"\1\0\0\0\xc1")
        for _ in range(3):  # an unreadable message fails at once, not with the next one
            with pytest.raises(msgspec.DecodeError):
                inbox.take(None)


def failing_at(number: int) -> Callable[[memoryview], Any]:
    """Return a decoder that fails with MemoryError at one message."""

    def read(body: memoryview) -> Any:
        message = to_process(body)
        if message == Abort(number):
            raise MemoryError
        return message

    return read


def test_inbox_accepts_any_number_of_compiled_grammars() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        inbox = child.SocketInbox(theirs, Frames(), [Stop()])
        for _ in range(5_000):
            inbox.put(Compiled(1, concurrent.futures.Future()))
        first = inbox.take(None)
        assert isinstance(first[0], Stop) and len(first) == 5_001
        assert inbox.take(0.0) == []
