# SPDX-License-Identifier: Apache-2.0
"""Kill, stop, cut off and corrupt servers, queues and page transfers, and count every answer.

    python tests/chaos.py [--requests 200] [--only NAME ...] [--json FILE]

Each attack sends requests, 64 at once, strikes when a quarter of them has been answered, and
compares every answer with that of one undisturbed process. An answer is *same* or *wrong*, an
*error* (5xx: the client may try again), *refused* (4xx), or *lost*: no answer within the timeout.
After each attack, 20 more requests must be the same, all pages must be free, and a server that ends
must end with the expected status. The exit status is 1 if an answer was wrong or lost, if a later
request was not the same, or if the attack left processes or pages behind.
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
from mtp_checkpoints import make_mtp_model
from server_pairs import (
    Redis,
    ServerProcess,
    bodies,
    choices_of,
    free_port,
    one_server,
    options,
    servers,
    wait_until_idle,
)

AT_ONCE = 64
LIMIT_SECONDS = 180.0  # timeout of an answer
PASSWORD = "secret"


@dataclass
class Row:
    """Result of one attack."""

    attack: str
    requests: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    afterwards: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    left: list[str] = field(default_factory=list)  # what the attack left behind

    @property
    def failed(self) -> bool:
        """True if the attack had an unacceptable result."""
        bad = self.outcomes["wrong"] + self.outcomes["lost"]
        return bool(bad or self.left or set(self.afterwards) - {"same"})


@dataclass(frozen=True)
class Workload:
    """Requests and the choices that one undisturbed process returns."""

    bodies: list[dict[str, Any]]
    choices: list[Any]


def outcome_of(url: str, body: dict[str, Any], expected: Any) -> str:
    try:
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=LIMIT_SECONDS)
    except httpx.TimeoutException:
        return "lost"
    except httpx.HTTPError:
        return "error: connection"
    if answer.status_code == 200:
        return "same" if answer.json()["choices"] == expected else "wrong"
    retries = ", Retry-After" if "retry-after" in answer.headers else ""
    kind = "error" if answer.status_code >= 500 else "refused"
    return f"{kind}: {answer.status_code}{retries}"


def run(
    row: Row,
    url: str,
    workload: Workload,
    strike: Callable[[], Any] | None = None,
    *,
    at_once: int = AT_ONCE,
) -> Row:
    """Send the requests, strike when a quarter is answered, and count the outcomes."""
    lock, answered, begun = threading.Lock(), 0, time.monotonic()

    def one(place: int) -> str:
        nonlocal answered
        found = outcome_of(url, workload.bodies[place], workload.choices[place])
        with lock:
            answered += 1
            is_due = strike is not None and answered == max(len(workload.bodies) // 4, 1)
        if is_due:
            assert strike is not None
            strike()
        return found

    with ThreadPoolExecutor(at_once) as pool:
        row.outcomes.update(pool.map(one, range(len(workload.bodies))))
    row.requests, row.seconds = len(workload.bodies), time.monotonic() - begun
    return row


def check_afterwards(
    row: Row, server: ServerProcess, workload: Workload, all_servers: Sequence[ServerProcess]
) -> None:
    """Send twenty more requests, and check that the servers free all pages."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{server.url}/health", timeout=10).status_code == 200:
                break
        time.sleep(0.2)
    few = Workload(workload.bodies[:20], workload.choices[:20])
    row.afterwards = run(Row(""), server.url, few, at_once=8).outcomes
    for one in all_servers:
        try:
            wait_until_idle(one)
        except (AssertionError, httpx.HTTPError) as error:
            row.left.append(f"{error or type(error).__name__}")


class Attacks:
    """All attacks by name; each returns a row."""

    def __init__(self, model: Path, count: int) -> None:
        self.model = model
        requests = bodies(count, seed=7)
        with one_server(model) as one:
            self.workload = Workload(requests, choices_of(one, requests))

    # ---- one server ----

    @contextlib.contextmanager
    def single(self, *more: str) -> Iterator[ServerProcess]:
        with servers(options(self.model, *more)) as (one,):
            yield one

    def calm(self) -> Row:
        with self.single() as server:
            row = run(Row("one server, no attack"), server.url, self.workload)
            check_afterwards(row, server, self.workload, [server])
        return row

    def engine_killed(self) -> Row:
        with self.single() as server:
            kill = lambda: os.kill(server.engines[0], signal.SIGKILL)  # noqa: E731
            row = run(Row("engine: kill -9"), server.url, self.workload, kill)
            check_afterwards(row, server, self.workload, [server])
        return row

    def engine_hangs(self) -> Row:
        """Stop the engine permanently; the server must replace it."""
        with self.single("--engine-timeout", "15") as server:
            stop = lambda: os.kill(server.engines[0], signal.SIGSTOP)  # noqa: E731
            row = run(
                Row("engine: hangs for good (--engine-timeout 15)"), server.url, self.workload, stop
            )
            check_afterwards(row, server, self.workload, [server])
        return row

    def engine_stopped(self) -> Row:
        """Pause the engine for less than its timeout; no answer may change."""
        with self.single() as server:

            def pause() -> None:
                victim = server.engines[0]
                os.kill(victim, signal.SIGSTOP)
                time.sleep(8)
                os.kill(victim, signal.SIGCONT)

            row = run(Row("engine: stopped for 8 s"), server.url, self.workload, pause)
            check_afterwards(row, server, self.workload, [server])
        return row

    def killed_too_often(self) -> Row:
        """Kill the engine more often than it is restarted; the process must end with an error."""
        with self.single() as server:
            row = Row("engine: killed four times")
            for _ in range(4):
                server.wait()
                for engine in server.engines:
                    os.kill(engine, signal.SIGKILL)
                deadline = time.monotonic() + 60
                while server._process.poll() is None and time.monotonic() < deadline:
                    with contextlib.suppress(httpx.HTTPError):
                        if httpx.get(f"{server.url}/health", timeout=5).status_code != 200:
                            break
                    time.sleep(0.02)
            with contextlib.suppress(Exception):
                server._process.wait(60)
            code = server._process.poll()
            row.outcomes[f"exit status {code}"] += 1
            if not code:
                row.left.append(f"the server's exit status is {code}")
        return row

    def hang_and_sigterm(self) -> Row:
        """Send SIGTERM while the engine hangs; the server must end within drain time plus 5 s."""
        with self.single("--drain-timeout", "3") as server:
            row = Row("engine hangs, SIGTERM (--drain-timeout 3)")
            os.kill(server.engines[0], signal.SIGSTOP)
            begun = time.monotonic()
            engines = server.engines
            server._process.terminate()
            with contextlib.suppress(Exception):
                server._process.wait(90)
            row.seconds = time.monotonic() - begun
            row.outcomes[f"exit status {server._process.poll()}"] += 1
            if row.seconds > 8 or server._process.poll() is None:
                row.left.append(f"it took {row.seconds:.1f} s")
            time.sleep(0.5)
            row.left += [
                f"engine {pid} is left" for pid in engines if Path(f"/proc/{pid}").exists()
            ]
        return row

    # ---- clients ----

    def unread_output(self) -> Row:
        """Open sixteen streams that no client reads."""
        with self.single() as server:
            row = Row("16 streams that are never read")
            body = {
                "prompt": [5] * 20,
                "max_tokens": 200,
                "n": 8,
                "logprobs": 20,
                "stream": True,
                "ignore_eos": True,
            }
            data = json.dumps(body).encode()
            head = head_of(server, len(data))
            before = rss_megabytes(server.pid)
            held = []
            for _ in range(16):
                one = socket.socket()
                one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                one.connect(("127.0.0.1", server.port))
                one.sendall(head.encode() + data)
                held.append(one)
            few = Workload(self.workload.bodies[:40], self.workload.choices[:40])
            row = run(row, server.url, few, at_once=4)
            time.sleep(5)
            row.outcomes[f"server grew by {rss_megabytes(server.pid) - before:.0f} MB"] += 1
            for one in held:
                one.close()
            check_afterwards(row, server, self.workload, [server])
        return row

    def bodies_that_never_come(self) -> Row:
        """Open 1,100 connections without bodies from one address; another sends requests."""
        with self.single() as server:
            row = Row("1,100 bodies that never come, from 127.0.0.2")
            head = head_of(server, 1000) + "{"
            held = []
            for _ in range(1100):
                one = socket.socket()
                one.bind(("127.0.0.2", 0))
                one.connect(("127.0.0.1", server.port))
                with contextlib.suppress(OSError):
                    one.sendall(head.encode())
                held.append(one)
            few = Workload(self.workload.bodies[:48], self.workload.choices[:48])
            row = run(row, server.url, few, at_once=4)
            for one in held:
                one.close()
            check_afterwards(row, server, self.workload, [server])
        return row

    # ---- the queue ----

    @contextlib.contextmanager
    def queue(self, *more: str) -> Iterator[tuple[Redis, list[ServerProcess]]]:
        """Start Redis, a prefill node, a decode node, and a mixed node that takes the requests."""
        redis = Redis(PASSWORD)
        shared = ["--scheduler-name", "splitwise", "--scheduler-port", str(redis.port)]
        shared += ["--scheduler-password", PASSWORD, "--scheduler-topic", "chaos", *more]
        try:
            roles = ("prefill", "decode", "mixed")
            with servers(
                *(options(self.model, "--splitwise-role", role, *shared) for role in roles)
            ) as nodes:
                yield redis, nodes
        finally:
            redis.kill()

    def _queue(self, name: str, strike: Callable[[Redis, list[ServerProcess]], Any]) -> Row:
        with self.queue() as (redis, nodes):
            row = run(Row(name), nodes[2].url, self.workload, lambda: strike(redis, nodes))
            for one in nodes:
                with contextlib.suppress(AssertionError):
                    one.wait(60)
            check_afterwards(row, nodes[2], self.workload, nodes)
        return row

    def queue_min_tokens(self) -> Row:
        """Send one request with min_tokens 2 among all others."""

        def poison(_: Redis, nodes: list[ServerProcess]) -> None:
            body = {"prompt": [5, 6, 7], "max_tokens": 8, "min_tokens": 2, "seed": 1}
            found = httpx.post(f"{nodes[2].url}/v1/completions", json=body, timeout=LIMIT_SECONDS)
            assert found.status_code == 200, found.text

        return self._queue("queue: a request with min_tokens 2", poison)

    def queue_prefill_killed(self) -> Row:
        return self._queue("queue: kill -9 prefill", lambda _, nodes: restart(nodes[0]))

    def queue_decode_killed(self) -> Row:
        return self._queue("queue: kill -9 decode", lambda _, nodes: restart(nodes[1]))

    def queue_decode_hangs(self) -> Row:
        """Stop the engine of the decode node permanently."""
        strike = lambda _, nodes: os.kill(nodes[1].engines[0], signal.SIGSTOP)  # noqa: E731
        with self.queue("--engine-timeout", "15") as (redis, nodes):
            row = Row("queue: engine of decode hangs (--engine-timeout 15)")
            row = run(row, nodes[2].url, self.workload, lambda: strike(redis, nodes))
            check_afterwards(row, nodes[2], self.workload, nodes)
        return row

    def queue_redis_restarts(self) -> Row:
        def restart_redis(redis: Redis, _: Any) -> None:
            redis.kill()
            redis.start()

        return self._queue("queue: Redis restarts empty", restart_redis)

    def queue_flushall(self) -> Row:
        return self._queue("queue: FLUSHALL", lambda redis, _: redis.client().flushall())

    def queue_streams_deleted(self) -> Row:
        def delete(redis: Redis, _: Any) -> None:
            client = redis.client()
            for name in client.keys("*"):
                if client.type(name) == b"stream":
                    client.delete(name)

        return self._queue("queue: all streams deleted", delete)

    def queue_eviction(self) -> Row:
        """Let Redis evict any key, with little memory for 4 s."""

        def evict(redis: Redis, _: Any) -> None:
            client = redis.client()
            client.config_set("maxmemory-policy", "allkeys-random")
            client.config_set("maxmemory", client.info()["used_memory"] - (1 << 16))
            time.sleep(4)
            client.config_set("maxmemory", 0)

        return self._queue("queue: keys evicted for 4 s", evict)

    def queue_wrong_password(self) -> Row:
        row = Row("queue: wrong password, wrong port at start")
        redis = Redis(PASSWORD)
        try:
            for port, password in ((redis.port, "wrong"), (free_port(), PASSWORD)):
                own = ["--scheduler-name", "splitwise", "--scheduler-port", str(port)]
                own += ["--scheduler-password", password, "--splitwise-role", "mixed"]
                server = ServerProcess(options(self.model, *own))
                try:
                    server._process.wait(60)
                except Exception:
                    row.left.append("the server starts")
                row.outcomes[f"exit status {server._process.poll()}"] += 1
                server.kill()
        finally:
            redis.kill()
        if set(row.outcomes) != {"exit status 2"}:
            row.left.append("the exit status is not 2")
        return row

    # ---- page transfers ----

    def pages_corrupted(self) -> Row:
        """Flip one bit, in a proxy, of the pages that the prefill server sends."""
        return self._pages("pages: one bit flips", flip=True)

    def pages_cut(self) -> Row:
        return self._pages("pages: connections are cut after 3,000 bytes", cut=3000)

    def _pages(self, name: str, **damage: Any) -> Row:
        port = free_port()
        prefill = options(self.model, "--role", "prefill", "--kv-port", str(port))
        with Proxy(port, **damage) as proxy:
            decode = options(
                self.model, "--role", "decode", "--kv-peers", f"127.0.0.1:{proxy.port}"
            )
            with servers(prefill, decode) as (first, second):
                row = Row(name)
                outcomes: Counter[str] = Counter()
                for body, expected in list(
                    zip(self.workload.bodies, self.workload.choices, strict=True)
                )[:60]:
                    leasing = {**body, "max_tokens": 1}
                    leasing["kv_transfer_params"] = {"do_remote_decode": True}
                    answer = httpx.post(
                        f"{first.url}/v1/completions", json=leasing, timeout=60
                    ).json()
                    params = answer["kv_transfer_params"] | {"remote_port": proxy.port}
                    outcomes[
                        outcome_of(second.url, {**body, "kv_transfer_params": params}, expected)
                    ] += 1
                row.outcomes, row.requests = outcomes, 60
                # The prefix cache must not keep damaged pages.
                few = Workload(self.workload.bodies[:60], self.workload.choices[:60])
                row.outcomes += run(Row(""), second.url, few, at_once=8).outcomes
                row.requests += 60
                metrics = httpx.get(f"{second.url}/metrics", timeout=30).text
                corrupt = [
                    line for line in metrics.splitlines() if "corrupt" in line and line[0] != "#"
                ]
                row.outcomes.update(
                    Counter(
                        {line.split("{")[0] + " " + line.rsplit(" ", 1)[1]: 1 for line in corrupt}
                    )
                )
                check_afterwards(row, second, self.workload, [first, second])
        return row


class Proxy:
    """A port that forwards bytes to another port and damages the bytes of the answers."""

    def __init__(self, to: int, *, flip: bool = False, cut: int | None = None) -> None:
        self._to, self._flip, self._cut = to, flip, cut
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> "Proxy":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._to))
            except OSError:
                client.close()
                continue
            threading.Thread(target=self._pump, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, True), daemon=True).start()

    def _pump(self, source: socket.socket, to: socket.socket, damages: bool) -> None:
        total = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if damages and self._flip and total <= 2500 < total + len(data):
                    place = 2500 - total
                    data = data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]
                if damages and self._cut is not None and total + len(data) > self._cut:
                    to.sendall(data[: self._cut - total])
                    break
                to.sendall(data)
                total += len(data)
        for one in (source, to):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


def restart(server: ServerProcess) -> None:
    server.kill()
    server.start()


def head_of(server: ServerProcess, length: int) -> str:
    """Return the head of a completion request with a body of `length` bytes."""
    return (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    )


def rss_megabytes(pid: int) -> float:
    text = Path(f"/proc/{pid}/status").read_text()
    return (
        float(next(line for line in text.splitlines() if line.startswith("VmRSS")).split()[1])
        / 1024
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--only", nargs="*", metavar="NAME")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    names = [name for name in vars(Attacks) if name[0] != "_" and name not in ("single", "queue")]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        attacks = Attacks(make_mtp_model(Path(folder)), arguments.requests)
        for name in arguments.only or names:
            row = getattr(attacks, name)()
            rows.append(row)
            outcomes = ", ".join(f"{count} x {what}" for what, count in row.outcomes.most_common())
            later = ", ".join(f"{count} {what}" for what, count in row.afterwards.items())
            verdict = "FAILED" if row.failed else "ok"
            left = "; ".join(row.left) or "nothing left"
            print(
                " | ".join([verdict, row.attack, outcomes, later, f"{row.seconds:.0f} s", left]),
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return int(any(row.failed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
