# SPDX-License-Identifier: Apache-2.0
"""One client misbehaves; what does another one notice? `make attacks`, of the bundled model.

    python tests/server_attacks.py [--seconds 20] [--stream-seconds 60] [--rounds 3] [--only NAME]

A server runs as a process of its own. A normal client, another process, asks for short completions
at a steady rate; the time of each counts from when it was due, so that a server that stalls cannot
hide it. Its 99th percentile is taken while nothing else happens, and during each attack. Attackers
have a key of their own, and the lowest priority, since theirs would be another machine.

The exit status is 1 if anything broke: an answer of 5xx, a refusal for the normal client, a
traceback in the log, a page not given back, a server that does not end well. How much slower the
normal client became, and how memory went from round to round, is printed for reading.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

NORMAL, ATTACKER = "normal", "attacker"
RATE = 20.0  # requests of the normal client a second


@dataclass(frozen=True)
class Sizes:
    """How much of everything; a test has less."""

    words: int = 300_000
    ids: int = 600_000
    choices: int = 128
    sockets: int = 600
    streams: int = 256
    body: int = 64 << 20
    tokens: int = 200


@dataclass
class Target:
    """A server under attack, for as long as it is."""

    port: int
    until: float
    sizes: Sizes
    outcomes: Counter[str] = field(default_factory=Counter)

    @property
    def goes_on(self) -> bool:
        return time.monotonic() < self.until


def request(body: bytes, key: str, *, length: int | None = None) -> bytes:
    """A POST of completions; `length` tells of more body than there is."""
    size = len(body) if length is None else length
    lines = ["POST /v1/completions HTTP/1.1", "Host: server", "Connection: close"]
    lines += [f"Authorization: Bearer {key}", "Content-Type: application/json"]
    return "\r\n".join([*lines, f"Content-Length: {size}", "", ""]).encode() + body


@contextlib.asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def status_of(reader: asyncio.StreamReader) -> str:
    line = await reader.readline()
    return line.split()[1].decode() if line else "closed"


async def answered(target: Target, body: dict[str, Any]) -> None:
    """Asks, and reads the answer to its end."""
    async with connected(target.port) as (reader, writer):
        writer.write(request(json.dumps(body).encode(), ATTACKER))
        target.outcomes[await status_of(reader)] += 1
        await reader.read()


async def bad_words(target: Target) -> None:
    """Bodies full of forbidden words."""
    body = {"prompt": "a", "bad_words": [f"w{i}" for i in range(target.sizes.words)]}
    while target.goes_on:
        await answered(target, body)


async def long_ids(target: Target) -> None:
    """Prompts of far more token ids than fit."""
    body = {"prompt": [i % 1000 for i in range(target.sizes.ids)]}
    while target.goes_on:
        await answered(target, body)


async def many_choices(target: Target) -> None:
    """Calls of as many choices as there may be."""
    n, tokens = target.sizes.choices, target.sizes.tokens
    while target.goes_on:
        await answered(target, {"prompt": "def f(", "n": n, "max_tokens": tokens})


async def trickling(target: Target) -> None:
    """Connections that send a letter a second, and never end their headers."""

    async def one() -> None:
        while target.goes_on:
            with contextlib.suppress(OSError):
                async with connected(target.port) as (reader, writer):
                    writer.write(b"GET /health HTTP/1.1\r\nHost: server\r\nX-Long: ")
                    while target.goes_on and not reader.at_eof():
                        writer.write(b"a")
                        await writer.drain()
                        with contextlib.suppress(asyncio.TimeoutError):
                            await asyncio.wait_for(reader.read(1), min(1.0, target.until / 10))
                    target.outcomes["closed" if reader.at_eof() else "open"] += 1

    await asyncio.gather(*(one() for _ in range(target.sizes.sockets)))


async def broken_uploads(target: Target) -> None:
    """Clients that leave in the middle of their body."""
    half = b'{"prompt": "' + b"a" * (1 << 18)
    while target.goes_on:
        async with connected(target.port) as (_, writer):
            writer.write(request(half, ATTACKER, length=2 * len(half)))
            with contextlib.suppress(OSError):
                await writer.drain()
        target.outcomes["left"] += 1
        await asyncio.sleep(0.01)


async def huge_bodies(target: Target) -> None:
    """Bodies beyond every limit."""
    piece = b" " * (1 << 18)
    while target.goes_on:
        async with connected(target.port) as (reader, writer):
            writer.write(request(b"", ATTACKER, length=target.sizes.body))
            with contextlib.suppress(OSError):
                for _ in range(target.sizes.body // len(piece)):
                    writer.write(piece)
                    await writer.drain()
            with contextlib.suppress(OSError):
                target.outcomes[await status_of(reader)] += 1


async def leaving_streams(target: Target) -> None:
    """Many streams at once, most of which are hung up on somewhere."""
    draw = random.Random(0)

    async def one() -> None:
        while target.goes_on:
            body = {"prompt": f"def f{draw.random()}(", "stream": True, "ignore_eos": True}
            body["max_tokens"] = target.sizes.tokens
            async with connected(target.port) as (reader, writer):
                writer.write(request(json.dumps(body).encode(), ATTACKER))
                status = await status_of(reader)
                target.outcomes[status] += 1
                patience = draw.randrange(2 * target.sizes.tokens)
                while target.goes_on and patience and await reader.readline():
                    patience -= 1
                target.outcomes["left" if not patience else "read"] += status == "200"
            if status == "429":
                await asyncio.sleep(1.0)  # what Retry-After says

    await asyncio.gather(*(one() for _ in range(target.sizes.streams)))


async def ambiguous_grammars(target: Target) -> None:
    """One connection, whose texts can be read in ever more ways."""
    body = {"prompt": "x x", "max_tokens": target.sizes.tokens}
    while target.goes_on:
        for rule in ("a a | a a a", "a a", "a a a a"):
            form = {"grammar": f'start: a\na: "x" | {rule}'}
            await answered(target, body | {"structured_outputs": form})


ATTACKS: dict[str, Callable[[Target], Awaitable[None]]] = {
    one.__name__: one
    for one in (
        *(bad_words, long_ids, many_choices, trickling),
        *(broken_uploads, huge_bodies, leaving_streams, ambiguous_grammars),
    )
}


async def normal_client(port: int, seconds: float) -> dict[str, Any]:
    """Asks at a steady rate; returns the seconds of each answer, and the statuses."""
    took: list[float] = []
    statuses: Counter[str] = Counter()

    async def one(number: int, due: float) -> None:
        await asyncio.sleep(due - time.monotonic())
        body = {"prompt": f"# {number}\ndef f(", "max_tokens": 8, "temperature": 0}
        async with connected(port) as (reader, writer):
            writer.write(request(json.dumps(body).encode(), NORMAL))
            statuses[await status_of(reader)] += 1
            await reader.read()
        took.append(time.monotonic() - due)

    begun = time.monotonic()
    await asyncio.gather(*(one(i, begun + i / RATE) for i in range(int(seconds * RATE))))
    return {"seconds": took, "statuses": statuses}


class Server:
    """The server's process."""

    def __init__(self, folder: Path, options: list[str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.log = folder / "log"
        keys = ["--api-key", NORMAL, "--api-key", ATTACKER]
        command = [sys.executable, "-m", "specops.engine", "--port", str(self.port), *keys]
        with self.log.open("w") as log:
            self.process = subprocess.Popen([*command, *options], stdout=log, stderr=log)
        end = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError):
                self.metrics()
                break
            assert time.monotonic() < end and self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)

    def metrics(self) -> dict[str, float]:
        """By name and labels."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line[:1] != "#")
        return {re.sub(r'model_name="[^"]*",?', "", name): float(value) for name, value in pairs}

    def megabytes(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+)", status)
        assert found is not None
        return int(found[1]) / 1024

    def settle(self) -> None:
        """Waits until nothing runs and no page is held."""
        end = time.monotonic() + 60
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        while any(self.metrics()[f"specops:{name}{{}}"] for name in names):
            assert time.monotonic() < end, "requests or pages are left over"
            time.sleep(0.1)

    def stop(self) -> list[str]:
        """Ends it; returns what was wrong with it."""
        answers = {k: v for k, v in self.metrics().items() if k.startswith("specops:http_req")}
        wrong = [f"{k}: {v:g}" for k, v in answers.items() if re.search(r'status="5', k)]
        self.process.send_signal(signal.SIGTERM)
        if (code := self.process.wait(60)) != 0:
            wrong.append(f"the exit status was {code}")
        log = self.log.read_text()
        wrong += [f"the log has {word!r}" for word in ("Traceback", "ERROR") if word in log]
        return wrong


def percentile(seconds: list[float], share: float) -> float:
    return sorted(seconds)[min(int(share * len(seconds)), len(seconds) - 1)]


@contextlib.contextmanager
def measuring(port: int, seconds: float, found: list[float], wrong: list[str]) -> Iterator[None]:
    """Runs the normal client beside a block, for so long."""
    command = [sys.executable, __file__, "--client", str(port), "--seconds", str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as client:
        time.sleep(0.3)  # it starts
        yield
        told = json.loads(client.communicate()[0])
    found += told["seconds"]
    if set(told["statuses"]) != {"200"}:
        wrong.append(f"the normal client got {told['statuses']}")


def assault(
    server: Server, name: str, seconds: float, sizes: Sizes, wrong: list[str]
) -> tuple[list[float], Counter[str]]:
    """One attack; returns the normal client's times, and what the attackers got."""
    found: list[float] = []
    command = [sys.executable, __file__, "--client", str(server.port), "--seconds", str(seconds)]
    command += ["--attack", name, "--sizes", json.dumps(asdict(sizes))]
    with measuring(server.port, seconds, found, wrong):
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        wrong.append(f"the attackers of {name} broke")
        return found, Counter()
    server.settle()
    return found, Counter(json.loads(done.stdout))


async def attack(name: str, port: int, seconds: float, sizes: Sizes) -> Counter[str]:
    """The attackers; returns what they got, and how often."""
    os.nice(19)
    target = Target(port, time.monotonic() + seconds, sizes)
    await ATTACKS[name](target)
    return target.outcomes


def run(
    *,
    seconds: float,
    stream_seconds: float,
    rounds: int,
    names: list[str],
    sizes: Sizes,
    options: list[str],
) -> list[str]:
    """Prints the tables; returns what was wrong."""
    wrong: list[str] = []
    # By attack and round.
    quiet: dict[str, list[list[float]]] = {name: [] for name in names}
    during: dict[str, list[list[float]]] = {name: [] for name in names}
    outcomes: dict[str, Counter[str]] = {name: Counter() for name in names}
    memory: dict[str, list[float]] = {name: [] for name in ["start", *names]}
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), options)
        try:
            for _ in range(rounds):
                memory["start"].append(server.megabytes())
                for name in names:
                    quiet[name].append([])
                    with measuring(server.port, seconds, quiet[name][-1], wrong):
                        pass
                    length = stream_seconds if name == "leaving_streams" else seconds
                    found, got = assault(server, name, length, sizes, wrong)
                    during[name].append(found)
                    outcomes[name] += got
                    memory[name].append(server.megabytes())
            wrong += server.stop()
        finally:
            server.process.kill()
            server.process.wait()
    report(quiet, during, outcomes, memory)
    return wrong


def report(
    quiet: dict[str, list[list[float]]],
    during: dict[str, list[list[float]]],
    outcomes: dict[str, Counter[str]],
    memory: dict[str, list[float]],
) -> None:
    """Both tables, as docs/figures.md has them."""
    print("Milliseconds, the median over rounds, quiet / attacked; the bar is 2x at p99.\n")
    print("| attack | p50 | | p99 | | what attackers got |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in during:
        cells = []
        for share in (0.5, 0.99):
            before = [1e3 * percentile(times, share) for times in quiet[name]]
            after = [1e3 * percentile(times, share) for times in during[name]]
            ratio = median(a / b for a, b in zip(after, before, strict=True))
            cells += [f"{median(before):.1f} / {median(after):.1f}", f"{ratio:.2f}x"]
        got = ", ".join(f"{count} {what}" for what, count in outcomes[name].most_common())
        print(f"| {name} | {' | '.join(cells)} | {got} |", flush=True)
    rounds = range(1, 1 + len(memory["start"]))
    print("\n| resident MB after, by round | " + " | ".join(map(str, rounds)) + " |")
    print("| --- |" + " --- |" * len(rounds))
    for name, sizes in memory.items():
        print(f"| {name} | " + " | ".join(f"{size:.0f}" for size in sizes) + " |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each attack")
    parser.add_argument("--stream-seconds", type=float, default=60.0, help="of leaving_streams")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=list(ATTACKS), action="append")
    # Of the processes that this one starts.
    parser.add_argument("--client", type=int, metavar="PORT", help=argparse.SUPPRESS)
    parser.add_argument("--attack", choices=list(ATTACKS), help=argparse.SUPPRESS)
    parser.add_argument("--sizes", help=argparse.SUPPRESS)
    arguments, options = parser.parse_known_args()
    port, seconds = arguments.client, arguments.seconds
    if arguments.attack is not None:
        sizes = Sizes(**json.loads(arguments.sizes))
        print(json.dumps(asyncio.run(attack(arguments.attack, port, seconds, sizes))))
        return 0
    if port is not None:
        print(json.dumps(asyncio.run(normal_client(port, seconds))))
        return 0
    wrong = run(
        seconds=arguments.seconds,
        stream_seconds=arguments.stream_seconds,
        rounds=arguments.rounds,
        names=arguments.only or list(ATTACKS),
        sizes=Sizes(),
        options=options,
    )
    for one in wrong:
        print(f"wrong: {one}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
