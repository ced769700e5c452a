# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  (where the server's packages are missing, nothing else is imported)
"""The `specops serve` command: options, signals, connections and startup errors."""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

for name in ("fastapi", "uvicorn", "pydantic", "prometheus_client", "jinja2", "httpx"):
    pytest.importorskip(name)

import httpx
import uvicorn
from checkpoints import make_checkpoint
from fake_engine import FakeEngine
from serving import (
    HANG_SECONDS,
    STREAM,
    serving_app,
    wait_for,
)
from specops.api.config import BUNDLED_MODEL
from specops.cli.config_file import arguments_of
from specops.cli.serve import _parser, _read, main
from specops.server import make_app
from specops.server.connections import bounded_protocol
from specops.service.thread import ThreadClient
from uvicorn.server import ServerState

TESTS = Path(__file__).parent
HTTP = httpx.Client(timeout=HANG_SECONDS)


RUN = """
import json, signal, sys
from fake_engine import FakeEngine
from specops.server import listen, make_app, serve
from specops.server.hosts import Access
from specops.service.thread import ThreadClient
limits = json.loads(sys.argv[2])
listener = listen("127.0.0.1", 0)
apart = listen("127.0.0.1", 0) if int(sys.argv[1]) else None
access = Access(allowed_hosts=["127.0.0.1", "x", "client"])
engine = FakeEngine()
engine.holds_at = 5
signal.signal(signal.SIGUSR1, lambda *_: setattr(engine, "holds_at", None))
client = ThreadClient(engine)
app = make_app(client, engine.tokenizer, metrics_apart=apart is not None, access=access)
print(*(one.getsockname()[1] for one in (listener, apart) if one), flush=True)
serve(app, listener, log_level="warning", metrics_listener=apart, **limits)
"""


@contextlib.contextmanager
def running_server(*, metrics_apart: bool = False, **limits: Any) -> Iterator[Any]:
    """Run the program RUN; yield its process, its port and, if it is separate, its metrics port.

    The engine stops each request at five tokens until SIGUSR1.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    limits = {"header_timeout": 3600, "drain_timeout": 3600, "max_connections": 40} | limits
    command = [sys.executable, "-c", RUN, str(int(metrics_apart)), json.dumps(limits)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        ports = [int(port) for port in process.stdout.readline().split()]

        def is_up() -> bool:
            try:
                return HTTP.get(f"http://127.0.0.1:{ports[0]}/health").status_code == 200
            except httpx.TransportError:
                return False

        wait_for(is_up)
        yield process, *ports
    finally:
        process.kill()
        process.communicate()


def test_request_that_arrives_while_the_server_is_paused_is_answered() -> None:
    """The connection's timer is due when the server continues, and the request is still read."""
    timers: list[Any] = []
    written: list[bytes] = []

    class Clock:
        """Event loop whose timers are due when the test says so."""

        def call_later(self, seconds: float, call: Any, *args: Any) -> asyncio.Handle:
            timers.append(asyncio.Handle(call, args, asyncio.get_running_loop()))
            return timers[-1]

        def __getattr__(self, name: str) -> Any:
            return getattr(asyncio.get_running_loop(), name)

    class Transport(asyncio.Transport):
        is_closed = False

        def write(self, data: Any) -> None:
            written.append(bytes(data))

        def close(self) -> None:
            self.is_closed = True

        def is_closing(self) -> bool:
            return self.is_closed

        def get_write_buffer_size(self) -> int:
            return 0

    def run_due() -> None:
        due, timers[:] = timers[:], []
        for timer in due:
            if not timer.cancelled():
                timer._run()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        head = [(b"content-length", b"0")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body"})

    async def requests() -> None:
        kind = bounded_protocol(max_connections=10, header_timeout=20.0, write_timeout=20.0)
        config = uvicorn.Config(app, http=kind, lifespan="off", log_level="critical")
        config.load()
        protocol: Any = kind(config, ServerState(), {}, _loop=Clock())  # type: ignore[call-arg]
        transport = Transport()
        protocol.connection_made(transport)
        for count in (1, 2):  # the second misses the time between requests
            run_due()
            protocol.data_received(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            run_due()
            while protocol.tasks:
                await asyncio.wait(protocol.tasks)
            assert b"".join(written).count(b"HTTP/1.1 200") == count and not transport.is_closed
        run_due()
        run_due()
        assert transport.is_closed, "an idle connection must be closed"

    asyncio.run(requests())


@pytest.mark.ci
def test_idle_connections_make_way_for_others() -> None:
    with running_server() as (process, port), contextlib.ExitStack() as stack:

        def connection() -> socket.socket:
            address = "127.0.0.1", port
            return stack.enter_context(socket.create_connection(address, HANG_SECONDS))

        # More connections than allowed. The address that has the most loses its oldest idle ones at
        # once, another address can connect, and a request in progress is answered.
        busy = connection()
        body = json.dumps({"prompt": "abc", "max_tokens": 150}).encode()
        head = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        ask = f"POST /v1/completions HTTP/1.1\r\n{head}\r\n\r\n".encode() + body
        busy.sendall(ask)
        wait_for(lambda: running_requests(f"http://127.0.0.1:{port}") == 1)
        crowd = [connection() for _ in range(60)]
        # Forty may be open. Five of them are reserved for addresses that have none yet. One
        # connection of this address has a request in progress.
        for one in crowd[:26]:
            assert one.recv(1) == b""
        other = stack.enter_context(
            socket.create_connection(("127.0.0.1", port), HANG_SECONDS, ("127.0.0.2", 0))
        )
        other.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert other.recv(65536).startswith(b"HTTP/1.1 200")
        # The others still have time: only the limit on connections closed the first ones.
        for one in crowd[26:]:
            one.setblocking(False)
            with pytest.raises(BlockingIOError):
                one.recv(1)
            one.close()
        process.send_signal(signal.SIGUSR1)
        answer_to(busy)
        # An unfinished body does not keep another address out either.
        crowd = [connection() for _ in range(60)]
        for one in crowd:
            with contextlib.suppress(OSError):  # it may be closed already
                one.sendall(ask[:-1])
        other = stack.enter_context(
            socket.create_connection(("127.0.0.1", port), 10, source_address=("127.0.0.3", 0))
        )
        other.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert other.recv(65536).startswith(b"HTTP/1.1 200")
        for one in crowd:
            one.close()
        # Endless headers are refused however fast they come: one long header, many, a long line.
        for endless in (b"a", b"a\r\nX-Next: ", b""):
            fast = connection()
            with contextlib.suppress(OSError):  # it may be closed already
                head = b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " if endless else b"GET /"
                fast.sendall(head + (endless or b"a") * (1 << 17))
            # lost if the system resets the connection because of unread data
            answer = b"HTTP/1.1 400"
            with contextlib.suppress(ConnectionResetError):
                answer = fast.recv(65536)
            assert answer.startswith(b"HTTP/1.1 400")
        # Headers that end but are too long are refused, too, alone or after another request.
        long = b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 70_000 + b"\r\n\r\n"
        for before in (b"", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"):
            fast = connection()
            fast.sendall(before + long)
            answer = b""
            with contextlib.suppress(ConnectionResetError):
                while got := fast.recv(65536):
                    answer += got
            assert b"HTTP/1.1 400" in answer and b"The headers exceed 65536 bytes" in answer
        # A connection that sent a request may wait for its answer and send another one.
        busy = connection()
        for _ in range(2):
            busy.sendall(ask)
            answer_to(busy)


@pytest.mark.ci
def test_slow_trickle_of_headers_does_not_keep_a_connection_open() -> None:
    with running_server(header_timeout=1) as (_, port):
        slow = socket.create_connection(("127.0.0.1", port), HANG_SECONDS)
        head = b"GET /health HTTP/1.1\r\nHost: client\r\nX-Long: "
        with slow, pytest.raises(OSError):
            for letter in head + b"a" * 6000:  # takes five minutes
                slow.send(bytes([letter]))
                time.sleep(0.05)


def running_requests(url: str) -> float:
    """Return the number of requests that a server's engine is running."""
    lines = HTTP.get(f"{url}/metrics").text.splitlines()
    (line,) = [one for one in lines if one.startswith("specops:num_requests_running{")]
    return float(line.split()[-1])


def is_closed(url: str) -> bool:
    """Return whether a server accepts no new connection."""
    try:
        httpx.get(f"{url}/health")
    except httpx.TransportError:
        return True
    return False


def answer_to(connection: socket.socket) -> None:
    """Read the answer to a completions request."""
    answer = b""
    while b'"usage"' not in answer:
        got = connection.recv(65536)
        assert got, answer
        answer += got
    assert answer.startswith(b"HTTP/1.1 200")


@pytest.mark.ci
def test_metrics_may_have_a_port_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    with running_server(metrics_apart=True) as (process, port, metrics_port):
        url, own = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{metrics_port}"
        absent = HTTP.get(f"{url}/metrics")
        assert absent.status_code == 404 and "--metrics-port" in absent.json()["error"]["message"]
        assert "/metrics" not in HTTP.get(f"{url}/openapi.json").json()["paths"]
        page = HTTP.get(url).text
        assert 'href="docs"' in page and "Metrics" not in page, (
            "the page must not link to absent metrics"
        )
        body = {"prompt": "abc", "max_tokens": 250, "speculative_config": {"method": "naive"}}
        with HTTP.stream("POST", f"{url}/v1/completions", json=body | STREAM) as running:
            lines = running.iter_lines()  # the client disconnects at the end of the block
            next(lines)
            wait_for(lambda: running_requests(own) == 1)
            assert HTTP.head(f"{own}/metrics").status_code == 200
            rebound = HTTP.get(f"{own}/metrics", headers={"Host": "somewhere.example"})
            assert rebound.status_code == 400
            for path in ("", "health", "v1/models", "openapi.json", "docs"):
                assert HTTP.get(f"{own}/{path}").status_code == 404
            process.send_signal(signal.SIGTERM)
            wait_for(lambda: is_closed(url))
            with httpx.Client() as fresh:  # metrics stay available while requests drain
                assert fresh.get(f"{own}/metrics").status_code == 200
        assert process.wait(HANG_SECONDS) == 0, "the server did not stop cleanly"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["--port", "0", "--metrics-port", str(port)]) == 2
    message = f"metrics_port {port} is in use; choose another with --metrics-port"
    assert message in capsys.readouterr().err


def test_sigterm_drains_running_requests() -> None:
    with running_server() as (process, port):
        url = f"http://127.0.0.1:{port}"
        body = {"prompt": "abc", "max_tokens": 40, "speculative_config": {"method": "naive"}}
        with HTTP.stream("POST", f"{url}/v1/completions", json=body | STREAM) as running:
            lines = running.iter_lines()
            first = next(lines)
            process.send_signal(signal.SIGTERM)
            wait_for(lambda: is_closed(url))
            process.send_signal(signal.SIGUSR1)
            rest = [first, *lines]
        parts = [json.loads(line[6:]) for line in rest if line and line != "data: [DONE]"]
        assert rest[-2] == "data: [DONE]"
        text = "".join(part["choices"][0]["text"] for part in parts)
        assert text == ("abc" * 14)[:40], "the running request did not finish"
        assert process.wait(HANG_SECONDS) == 0


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--model", "/no/such/directory"], "/no/such/directory: no such directory"),
        (["--speculative-config", "{"], "speculative_config is not valid JSON"),
        (["--speculative-config", '{"method": "magic"}'], "method must be one of naive, ngram"),
        (
            ["--speculative-config", '{"method": "mtp", "num_model_steps": 2}'],
            "num_model_steps must be at most num_speculative_tokens = 1",
        ),
        (["--max-num-seqs", "0"], "max_num_seqs must be at least 1"),
        (["--max-body-bytes", "0"], "max_body_bytes must be at least 1"),
        (["--header-timeout", "0.5"], "header_timeout must be at least 1"),
        (["--engine-timeout", "0"], "engine_timeout must be at least 1, got 0"),
        (["--port", "99999"], "port must be in [0, 65535], got 99999"),
        (["--metrics-port", "99999"], "metrics_port must be in [0, 65535], got 99999"),
        (["--metrics-port", "8000"], "metrics_port must differ from port, got 8000 for both"),
        (
            ["--host", "no.such.host.invalid"],
            "cannot listen on host no.such.host.invalid and port 8000",
        ),
        (["--allowed-hosts", "a:8000"], "allowed_hosts must be names or addresses without a port"),
        (
            ["--allowed-origins", '["*"]'],
            "allowed_origins must be origins such as https://example.com",
        ),
        (["--forwarded-allow-ips", "proxy"], "forwarded_allow_ips must be addresses, networks"),
        (["--served-model-name", "a", ""], "--served-model-name must hold names, got an empty one"),
        (["--api-key", ""], "--api-key must hold a key of at least one character"),
        (["--api-key-file", "/dev/null"], "--api-key-file must hold a key of at least one"),
        (["--api-key-file", "/no/such/file"], "--api-key-file must be a readable text file"),
    ],
)
def test_invalid_arguments_are_reported(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert message in err and err.startswith("specops: ") and err.count("\n") == 1


def test_missing_model_files_are_reported(
    capsys: pytest.CaptureFixture[str], mtp_model: Path, tmp_path: Path
) -> None:
    for missing in ("model.safetensors", "tokenizer.json"):
        directory = tmp_path / missing
        directory.mkdir()
        for file in mtp_model.iterdir():
            if file.name != missing:
                (directory / file.name).write_bytes(file.read_bytes())
        assert main(["--model", str(directory)]) == 2
        assert str(directory) in capsys.readouterr().err


def test_model_with_unsupported_sizes_is_not_served(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, "Qwen3", head_dim=80)
    capsys.readouterr()
    assert main(["--model", str(tmp_path), "--device", "cpu"]) == 2
    assert capsys.readouterr().err == (
        f"specops: {tmp_path / 'config.json'}: head_dim must be 64, 96, 128, 256 or 512, got 80 "
        "(append_attention)\n"
    )


@pytest.mark.ci
def test_broken_chat_template_of_the_model_is_not_served(
    capsys: pytest.CaptureFixture[str], mtp_model: Path, tmp_path: Path
) -> None:
    for file in mtp_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    assert main(["--model", str(tmp_path), "--device", "cpu"]) == 2
    assert "the model's chat template is not valid Jinja" in capsys.readouterr().err


@pytest.mark.ci
@pytest.mark.parametrize(
    "text,said", [("{% if %}", "chat template is not valid Jinja"), (None, "No such file")]
)
def test_unreadable_chat_template_option_is_not_served(
    capsys: pytest.CaptureFixture[str], mtp_model: Path, tmp_path: Path, text: str | None, said: str
) -> None:
    file = tmp_path / "own.jinja"
    if text is not None:
        file.write_text(text)
    given = ["--model", str(mtp_model), "--device", "cpu", "--chat-template", str(file)]
    assert main(given) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"specops: chat_template {file} cannot be used: ") and said in error


def test_chat_template_option_replaces_the_models_template(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m.content }}!{% endfor %}")
    engine = FakeEngine()
    app = make_app(
        ThreadClient(engine),  # type: ignore[arg-type]
        engine.tokenizer,
        chat_template=tmp_path / "own.jinja",
    )
    with serving_app(app) as url:
        requested = {"messages": [{"role": "user", "content": "abc"}]}
        tokens = HTTP.post(f"{url}/tokenize", json=requested).json()["tokens"]
    assert engine.tokenizer.decode(tokens) == "abc!"


def test_unknown_arguments_exit_with_2() -> None:
    with pytest.raises(SystemExit) as exit:
        main(["--no-such-thing"])
    assert exit.value.code == 2


@pytest.mark.parametrize(
    "missing", ["fastapi", "jinja2", "uvicorn", "httptools", "msgspec", "prometheus_client"]
)
def test_missing_server_packages_are_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    for loaded in list(sys.modules):
        if loaded.startswith(("specops.server", "uvicorn.protocols")) or loaded == missing:
            monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.delattr("specops.server", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    assert main([]) == 2
    assert capsys.readouterr().err == (
        f"specops: the server needs {missing}, which is not installed: "
        "pip install 'specops[server]'\n"
    )


@pytest.mark.skipif(
    not (BUNDLED_MODEL / "model.safetensors").is_file(), reason="the bundled model is not there"
)
def test_options_may_come_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "options.yaml"
    parser = _parser()

    def options(text: str, *given: str) -> Any:
        file.write_text(text)
        return parser.parse_args([*arguments_of(str(file), parser), *given])

    text = """
max-num-seqs: 8
num_threads: 1
speculative-config: {method: ngram, num_speculative_tokens: 3}
api-key: [one, "--two"]
enable-prefix-caching: false
enforce-eager: true
"""
    seen = options(text, "--max-num-seqs", "4", "--api-key", "three")
    assert (seen.max_num_seqs, seen.num_threads) == (4, 1)
    assert json.loads(seen.speculative_config) == {"method": "ngram", "num_speculative_tokens": 3}
    assert seen.api_key == ["one", "--two", "three"]
    assert (seen.enable_prefix_caching, seen.enforce_eager) == (False, True)
    assert options("") == parser.parse_args([])
    file.write_text("served-model-name: [a, b]")
    for given, names in (([], ["a", "b"]), (["--served-model-name", "c", "d"], ["c", "d"])):
        assert _read(parser, ["--config", str(file), *given]).served_model_name == names
    for text, message in (
        ("max-num-seq: 8", "must hold names of flags, got 'max-num-seq'; the nearest is max-num-s"),
        ("config: x", "must hold names of flags, got 'config'"),
        ("port: 1\nport: 2", "must hold every name once, got 'port' twice"),
        ("enforce-eager: 1", "--enforce-eager must be true or false in --config, got 1"),
        ("port:", "--port must have a value in --config, got None"),
        ("[1, 2]", "must hold a mapping of flags to values"),
        ("a: [", "--config must be a YAML file"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            options(text)
    assert main(["--config", str(tmp_path / "none.yaml")]) == 2


@pytest.mark.ci
def test_defaults_serve_the_bundled_model(monkeypatch: pytest.MonkeyPatch) -> None:
    from specops import server

    seen: dict[str, Any] = {}

    def remember(app: Any, listener: socket.socket, **options: Any) -> int:
        host, port = listener.getsockname()
        listener.close()
        seen.update(options, host=host, port=port)
        return 0

    monkeypatch.setattr(server, "serve", remember)
    assert main([]) == 0
    assert (seen["host"], seen["port"]) == ("127.0.0.1", 8000)
