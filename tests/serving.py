# SPDX-License-Identifier: Apache-2.0
"""A server inside a test, on a real socket."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
from fake_engine import CHAT as CHAT_TEMPLATE
from fake_engine import FakeEngine

# Packages of the server and its clients; a test is skipped if one is missing.
STACK = ("fastapi", "uvicorn", "pydantic", "msgspec", "prometheus_client", "httpx")


USER = {"role": "user", "content": "héllo"}
# Parts of request bodies.
TEXT: dict[str, Any] = {"prompt": "a"}
CHAT: dict[str, Any] = {"messages": [USER]}
STREAM = {"stream": True}
# Headers of a body that a test encodes itself.
JSON = {"Content-Type": "application/json"}

STEP_FAILED = "a step of the engine failed; the server's log says why"


class Served:
    """A running server and the engine behind it."""

    def __init__(self, engine: Any, url: str) -> None:
        self.engine = engine
        self.url = url

    def wait_until_idle(self) -> None:
        """Return once the engine has no request and no KV page is held.

        Requests go from waiting to running to done, so they are looked for in that order.
        """
        engine = self.engine
        wait_for(
            lambda: (
                not engine.num_waiting
                and not engine.num_running
                and not getattr(engine, "num_uncollected", 0)
                and engine.num_free_pages == engine.num_pages
            )
        )

    @contextlib.contextmanager
    def holding(self, tokens: int) -> Iterator[None]:
        """Stop a FakeEngine's requests at `tokens` tokens until the block ends.

        So everything in the block happens before they end, however slow the machine is.
        """
        self.engine.holds_at = tokens
        try:
            yield
        finally:
            self.engine.holds_at = None


# Seconds after which something counts as hung. Only a failing test waits this long.
HANG_SECONDS = 300.0


def wait_for(condition: Callable[[], bool], seconds: float = HANG_SECONDS) -> None:
    """Wait until a condition holds. It must then stay true, because it may be checked late."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.002)


def hang_up_on(
    served: Served, path: str, body: dict[str, Any], *, receive_bytes: int | None = None
) -> socket.socket:
    """Send a request and return the open socket, with a receive buffer of a given size."""
    host, port = served.url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    head = f"POST /v1/{path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connection = socket.socket()
    if receive_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.settimeout(60)
    connection.connect((host, int(port)))
    connection.sendall(head.encode() + f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return connection


@contextlib.contextmanager
def serving(
    engine: Any, *, drain_timeout: int = 5, write_timeout: float = 60.0, **options: Any
) -> Iterator[Served]:
    """Serve `engine` in a thread until the block ends, then drain it for `drain_timeout` s."""
    for name in STACK:
        pytest.importorskip(name)
    from specops.server import make_app
    from specops.server.chat import ChatFormat
    from specops.service.thread import ThreadClient

    if isinstance(engine, FakeEngine):
        options.setdefault("chat_format", ChatFormat(CHAT_TEMPLATE))
    app = make_app(ThreadClient(engine), engine.tokenizer, **options)
    with serving_app(app, drain_timeout=drain_timeout, write_timeout=write_timeout) as url:
        yield Served(engine, url)


@contextlib.contextmanager
def serving_app(
    app: Any, *, drain_timeout: int = 5, write_timeout: float = 60.0, **tls: Any
) -> Iterator[str]:
    """Serve an application in a thread until the block ends; yield its URL, with http://."""
    import uvicorn
    from specops.server.connections import bounded_protocol

    config = uvicorn.Config(
        app,
        port=0,
        http=bounded_protocol(
            max_connections=1024, header_timeout=HANG_SECONDS, write_timeout=write_timeout
        ),
        log_level="warning",
        lifespan="on",
        ws="none",
        proxy_headers=False,
        access_log=False,
        **tls,
    )
    config.timeout_graceful_shutdown = drain_timeout
    config.timeout_keep_alive = int(HANG_SECONDS)  # a shorter one could close a connection in use
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        wait_for(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(HANG_SECONDS)
        assert not thread.is_alive(), "the server did not stop"


@cache
def http() -> Any:
    """Return an HTTP client whose timeout is the time after which a request counts as hung."""
    import httpx

    return httpx.Client(timeout=HANG_SECONDS)


def connect(served: Served, key: str = "none") -> Any:
    """Return the official client, connected to a server."""
    import openai

    return openai.OpenAI(
        base_url=f"{served.url}/v1", api_key=key, max_retries=0, timeout=HANG_SECONDS
    )


def post(served: Served, path: str, body: Any, **options: Any) -> Any:
    """Send a JSON body to a route under /v1 and return the response."""
    return http().post(f"{served.url}/v1/{path}", json=body, **options)


def events(response: Any) -> list[Any]:
    """Check the framing of a stream and return the data of its events."""
    assert response.headers["content-type"].startswith("text/event-stream")
    frames = response.text.split("\n\n")
    assert frames[-1] == "" and frames[-2] == "data: [DONE]"
    assert all(frame.startswith("data: ") for frame in frames[:-1])
    return [json.loads(frame[6:]) for frame in frames[:-2]]


def health(served: Served) -> tuple[int, str]:
    """Return the status code and the status that /health reports."""
    response = http().get(f"{served.url}/health")
    return response.status_code, response.json()["status"]


def counters(served: Served) -> dict[str, dict[str, float]]:
    """Return metric samples by name, then by label values."""
    from prometheus_client.parser import text_string_to_metric_families

    text = http().get(f"{served.url}/metrics").text
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k != "model_name"}
            assert ("model_name" in sample.labels) == sample.name.startswith("specops:")
            found.setdefault(sample.name, {})[",".join(labels.values())] = sample.value
    return found


def assert_failed(response: Any, message: str = STEP_FAILED) -> None:
    """Check for an error answer, or an error at the end of a stream."""
    if response.headers["content-type"].startswith("text/event-stream"):
        assert response.status_code == 200
        body = events(response)[-1]
    else:
        assert response.status_code == 500
        body = response.json()
    error = {"message": message, "type": "server_error", "param": None, "code": "internal_error"}
    assert body == {"error": error}
