# SPDX-License-Identifier: Apache-2.0
"""Limits of connections: their number, open files, and unread output."""
# ruff: noqa: E402  (where the server's packages are missing, nothing else is imported)

import asyncio
import json
import queue
import re
import resource
import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

for name in ("fastapi", "uvicorn", "pydantic", "prometheus_client", "jinja2", "httpx"):
    pytest.importorskip(name)

import httpx
import uvicorn
from fake_engine import FakeEngine
from serving import hang_up_on, serving, wait_for
from specops.api.messages import Output
from specops.engine import EngineConfig
from specops.server import connections
from specops.server.clients import Clients
from specops.server.connections import bounded_protocol, connections_within_files
from specops.server.intake import _PIECE_BYTES, Intake, Turns
from specops.server.unread import Unread, size_of
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

HTTP = httpx.Client(timeout=120)


class Transport:
    """Transport of a connection that is closed when its write buffer is empty."""

    def __init__(self, host: str) -> None:
        self.host, self.unread, self.ended = host, 0, ""

    def get_extra_info(self, name: str) -> Any:
        return {"peername": (self.host, 1), "sockname": ("127.0.0.1", 2)}.get(name)

    def close(self) -> None:
        self.ended = self.ended or "close"

    def abort(self) -> None:
        self.ended = "abort"

    def is_closing(self) -> bool:
        return bool(self.ended)

    def get_write_buffer_size(self) -> int:
        return self.unread


class Loop:
    """Event loop whose timers fire when a test says so."""

    def __init__(self) -> None:
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def call_later(self, seconds: float, call: Callable[[], None]) -> Any:
        timer = (seconds, call)
        self.timers.append(timer)
        return SimpleNamespace(cancel=lambda: timer in self.timers and self.timers.remove(timer))

    def fire(self, seconds: float) -> None:
        """Fire the timers with this delay."""
        due = [timer for timer in self.timers if timer[0] == seconds]
        assert due
        for timer in due:
            self.timers.remove(timer)
            timer[1]()


class Server:
    """Connections of one server, without sockets."""

    def __init__(self, **limits: Any) -> None:
        limits = {"max_connections": 16, "header_timeout": 20.0, "write_timeout": 60.0, **limits}
        self.protocol: Any = bounded_protocol(**limits)
        self.config = uvicorn.Config(lambda: None, log_level="critical", lifespan="off")
        self.config.load()
        self.state, self.loop = ServerState(), Loop()

    def connect(self, host: str, state: str = "silent") -> Any:
        """Open a connection in a state: silent, answering, body or unread."""
        one = self.protocol(self.config, self.state, {}, _loop=self.loop)
        one.connection_made(Transport(host))
        if state != "silent":
            one.cycle = SimpleNamespace(response_complete=False, more_body=state == "body")
        if state == "unread":
            one.pause_writing()
        return one


@pytest.mark.parametrize("state", ["silent", "body", "unread"])
def test_new_connections_displace_waiting_ones(state: str) -> None:
    server = Server()
    connections_of_one = [server.connect("10.0.0.1", state) for _ in range(40)]
    # Two of 16 connections are reserved for addresses without one.
    ended = [one.transport.ended for one in connections_of_one]
    assert ended == ["close"] * 26 + [""] * 14
    others = [server.connect(f"10.0.0.{i}") for i in range(2, 7)]
    assert not any(one.transport.ended for one in others)
    assert [one.transport.ended for one in connections_of_one[26:]] == ["close"] * 3 + [""] * 11
    second = server.connect("10.0.0.2")
    assert not second.transport.ended and connections_of_one[29].transport.ended


def test_busy_address_leaves_connections_for_others() -> None:
    server = Server()
    busy = [server.connect("10.0.0.1", "answering") for _ in range(20)]
    assert [one.transport.ended for one in busy] == [""] * 14 + ["close"] * 6
    first, second = server.connect("10.0.0.2"), server.connect("10.0.0.3")
    assert server.connect("10.0.0.2").transport.ended, (
        "the reserved connections are for addresses without one"
    )
    assert not first.transport.ended and not second.transport.ended
    assert server.connect("10.0.0.4").transport.ended, "all connections are in use"


def test_closed_connection_with_unread_output_counts() -> None:
    server = Server()
    for _ in range(14):
        one = server.connect("10.0.0.1")
        one.transport.unread = 100
        one.transport.close()
    server.connect("10.0.0.1")
    ended = [one.transport.ended for one in server.state.connections]
    assert sorted(ended) == ["", "abort", *["close"] * 13]


def test_writing_has_a_timeout() -> None:
    server = Server()
    one = server.connect("10.0.0.1", "answering")
    one.pause_writing()
    one.resume_writing()
    assert 60.0 not in [seconds for seconds, _ in server.loop.timers], (
        "the client has read the output"
    )
    one.pause_writing()
    one.transport.unread = 1000
    server.loop.fire(60.0)
    assert one.transport.ended == "abort"


def test_end_of_an_answer_has_a_timeout() -> None:
    """The answer fits the write buffer, and the connection stays open or closes."""
    server = Server()
    one = server.connect("10.0.0.1", "answering")
    one.transport.unread = 1000
    one.on_response_complete()
    server.loop.fire(60.0)
    one.transport.unread = 900  # the client reads, and the next answer has begun
    server.loop.fire(60.0)
    assert not one.transport.ended
    server.loop.fire(60.0)
    assert one.transport.ended == "abort"
    closing = server.connect("10.0.0.1", "answering")
    closing.transport.unread = 1000
    closing.on_response_complete()
    closing.transport.close()
    server.loop.fire(60.0)
    assert closing.transport.ended == "abort"


def test_shutdown_shortens_the_write_timeout() -> None:
    server = Server()
    one = server.connect("10.0.0.1", "answering")
    one.pause_writing()
    one.transport.unread = 1000
    one.shutdown()
    server.loop.fire(connections._SHUTDOWN_WRITE_SECONDS)
    assert one.transport.ended == "abort"


@pytest.mark.parametrize(
    "soft,hard,requested,expected",
    [
        (1024, 4096, 1024, (1152, 1024)),  # the new limit, and the number of connections
        (1024, 1024, 1024, (1024, 896)),
        (2048, 4096, 1024, (None, 1024)),
        (64, 200, 1024, (200, 100)),
        (1024, resource.RLIM_INFINITY, 5000, (5128, 5000)),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 5000, (None, 5000)),
    ],
)
def test_file_limit_is_raised_for_the_connections(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    soft: int,
    hard: int,
    requested: int,
    expected: tuple[int | None, int],
) -> None:
    set_to: list[int] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, both: set_to.append(both[0]))
    files, allowed = expected
    assert connections_within_files(requested) == allowed
    assert set_to == ([] if files is None else [files])
    warnings = [record.getMessage() for record in caplog.records]
    if allowed < requested:
        (warning,) = warnings
        assert f"{files} open files" in warning and f"max_connections={requested}" in warning
    else:
        assert warnings == []


# ---- unread output ----


@pytest.fixture
def lost_connections(monkeypatch: pytest.MonkeyPatch) -> Iterator["queue.Queue[None]"]:
    """Give the server small send buffers; return a queue with an entry for each lost connection."""
    found: queue.Queue[None] = queue.Queue()
    made, gone = HttpToolsProtocol.connection_made, HttpToolsProtocol.connection_lost

    def connection_made(self: Any, transport: Any) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        made(self, transport)

    def connection_lost(self: Any, error: Exception | None) -> None:
        gone(self, error)
        found.put(None)

    monkeypatch.setattr(HttpToolsProtocol, "connection_made", connection_made)
    monkeypatch.setattr(HttpToolsProtocol, "connection_lost", connection_lost)
    yield found


def test_stream_with_the_most_unread_output_ends() -> None:
    ended: list[Any] = []

    class Stream:
        def __init__(self, client: str) -> None:
            self.client = client

    def end(stream: Any) -> None:
        ended.append(stream)
        unread.drop(stream)

    unread = Unread(100, end)
    small, large, other = Stream("a"), Stream("a"), Stream("b")
    unread.add(large, 60)
    unread.add(small, 30)
    unread.add(other, 90)
    assert not ended and (unread.of("a"), unread.of("b"), unread.total) == (90, 90, 180)
    unread.add(small, 11)
    assert ended == [large] and unread.of("a") == 41
    unread.add(small, -41)
    unread.add(other, -90)
    unread.drop(other)
    assert unread.total == unread.of("a") == 0 and not unread._streams and not unread._totals


def test_long_body_is_sent_in_counted_pieces() -> None:
    body = bytes(range(256)) * 1000
    sent: list[Any] = []
    counts: list[int] = []
    unread = Unread(1 << 30, lambda stream: None)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await scope["state"]["send_body"]({"type": "http.response.body", "body": body})

    async def send(message: Any) -> None:
        counts.append(unread.of("from 10.0.0.1"))
        sent.append(message)
        if len(sent) == 8:
            raise ConnectionError

    scope = {"type": "http", "method": "GET", "headers": [], "client": ("10.0.0.1", 1)}
    intake = Intake(app, Clients([]), Turns(), unread)
    with pytest.raises(ConnectionError):
        asyncio.run(intake(scope, None, send))  # type: ignore[arg-type]
    pieces = [message["body"] for message in sent[1:5]]
    assert b"".join(pieces) == body and max(map(len, pieces)) == _PIECE_BYTES
    assert all(message["more_body"] for message in sent[1:8])
    assert counts[1:5] == [len(body) - i * _PIECE_BYTES for i in range(4)]
    assert unread.total == 0, "the rest of a failed answer no longer counts"


def test_unread_stream_ends_and_others_continue(
    monkeypatch: pytest.MonkeyPatch, lost_connections: "queue.Queue[None]"
) -> None:
    """A client with small buffers never reads, and the output kept for it is bounded."""
    totals: list[int] = []
    add = Unread.add

    def watched(self: Unread, stream: Any, size: int) -> None:
        add(self, stream, size)
        totals.append(self.total)

    monkeypatch.setattr(Unread, "add", watched)
    most = 1 << 20
    engine = FakeEngine(EngineConfig(served_model_name="fake", max_model_len=1 << 20, seed=0))
    body = {"prompt": "abc", "max_tokens": 1 << 19, "logprobs": 20, "stream": True}
    with serving(engine, max_unread_bytes=most) as served:
        streams = [hang_up_on(served, "completions", body, receive_bytes=4096) for _ in range(3)]
        wait_for(lambda: engine.num_running + engine.num_waiting == 3)
        answer = HTTP.post(f"{served.url}/v1/completions", json={"prompt": "a", "max_tokens": 3})
        assert answer.status_code == 200
        served.wait_until_idle()  # all streams end long before their last token
        largest = size_of(Output(0, 0, [1] * 4, "abca", [*([_logprob()] * 4)]))
        assert most // 2 < max(totals) <= most + largest
        assert "specops:unread_output_bytes" in HTTP.get(f"{served.url}/metrics").text
        received = b""
        while b"[DONE]" not in received[-100:]:
            received += streams[0].recv(1 << 20)
        last = received.split(b"data: ")[-2].split(b"\r\n")[0]
        error = json.loads(last)["error"]
        assert error["code"] == "output_not_read" and str(most) in error["message"]
        for one in streams:
            one.close()
        assert totals[-1] == 0, "the output of ended streams no longer counts"


def _logprob() -> Any:
    return SimpleNamespace(alternatives=[None] * 20)


@pytest.mark.parametrize("stream", [False, True])
def test_unread_answer_is_aborted(stream: bool, lost_connections: "queue.Queue[None]") -> None:
    """The connection ends after the write timeout, and ends the request of a stream."""
    engine = FakeEngine(EngineConfig(served_model_name="fake", max_model_len=1 << 20, seed=0))
    body = {"prompt": "abc", "max_tokens": 2_000, "logprobs": 20, "stream": stream}
    if stream:
        body["max_tokens"] = 1 << 19
    with serving(engine, write_timeout=0.2) as served:
        with hang_up_on(served, "completions", body, receive_bytes=4096) as connection:
            lost_connections.get(timeout=60)
            served.wait_until_idle()
            received = b""
            while got := connection.recv(1 << 20):
                received += got
        assert received.startswith(b"HTTP/1.1 200")
        length = re.search(rb"content-length: (\d+)", received)
        assert stream == (length is None) and b"[DONE]" not in received
        assert length is None or len(received) < int(length[1])
        totals = HTTP.get(f"{served.url}/metrics").text
        assert re.search(r"^specops:unread_output_bytes\{.*\} 0\.0$", totals, re.MULTILINE)
