# SPDX-License-Identifier: Apache-2.0
"""Effect of a misbehaving client on another one: `make -C tools attacks`, with the bundled model.

    python tests/server_attacks.py [--seconds 20] [--stream-seconds 60] [--rounds 3] [--only NAME]
        [--tokens 8] [--rate 20]

A server runs in a separate process. A normal client, another process, requests short completions at
a steady rate; the time of each counts from when it was due, so that a server that stalls cannot
hide it. Its 99th percentile is taken while nothing else happens, and during each attack. Attackers
use a separate address, and the lowest CPU priority, since they would run on another machine.

The exit status is 1 if anything broke: a 5xx answer, a refusal for the normal client, a traceback
in the log, a page not returned, a server that does not end cleanly. The slowdown of the normal
client, and the memory after each round, are printed for information.
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from attackers import ATTACKS, Sizes, Target, connected, request, status_of

ADDRESS = "127.0.0.1"  # of the normal client


@dataclass(frozen=True)
class Normal:
    """Requests of the normal client.

    Attributes:
        tokens: tokens of each answer.
        rate: requests per second.
    """

    tokens: int = 8
    rate: float = 20.0


async def normal_client(port: int, seconds: float, normal: Normal) -> dict[str, Any]:
    """Send requests at a steady rate; return the seconds of each answer, and the statuses."""
    took: list[float] = []
    statuses: Counter[str] = Counter()

    async def one(number: int, due: float) -> None:
        await asyncio.sleep(due - time.monotonic())
        body = {"prompt": f"# {number}\ndef f(", "max_tokens": normal.tokens, "temperature": 0}
        async with connected(port, ADDRESS) as (reader, writer):
            writer.write(request(json.dumps(body).encode()))
            statuses[await status_of(reader)] += 1
            with contextlib.suppress(OSError):
                await reader.read()
        took.append(time.monotonic() - due)

    begun, rate = time.monotonic(), normal.rate
    await asyncio.gather(*(one(i, begun + i / rate) for i in range(int(seconds * rate))))
    return {"seconds": took, "statuses": statuses}


class Server:
    """Process of the server."""

    def __init__(self, folder: Path, options: list[str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "log"
        command = [sys.executable, "-m", "specops.engine", "--port", str(self.port)]
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
        """Return the metrics by name and labels."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line[:1] != "#")
        return {re.sub(r'model_name="[^"]*",?', "", name): float(value) for name, value in pairs}

    def megabytes(self) -> float:
        """Return the resident memory of the server and its engine."""
        own = ("process_resident_memory_bytes", "engine_process_resident_memory_bytes")
        found = self.metrics()
        return sum(found.get(name, 0.0) for name in own) / 2**20

    def settle(self) -> None:
        """Wait until nothing runs and no page is held."""
        end = time.monotonic() + 60
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        while any(self.metrics()[f"specops:{name}{{}}"] for name in names):
            assert time.monotonic() < end, "requests or pages are left over"
            time.sleep(0.1)

    def stop(self) -> list[str]:
        """End the server; return what was wrong with it."""
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
def measuring(
    port: int, seconds: float, normal: Normal, found: list[float], wrong: list[str]
) -> Iterator[None]:
    """Run the normal client beside a block, for `seconds`."""
    command = [sys.executable, __file__, "--client", str(port), "--seconds", str(seconds)]
    command += ["--tokens", str(normal.tokens), "--rate", str(normal.rate)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as client:
        time.sleep(0.3)  # wait for it to start
        yield
        result = json.loads(client.communicate()[0])
    found += result["seconds"]
    if set(result["statuses"]) != {"200"}:
        wrong.append(f"the normal client got {result['statuses']}")


def measure_attack(
    server: Server, name: str, seconds: float, sizes: Sizes, normal: Normal, wrong: list[str]
) -> tuple[list[float], Counter[str]]:
    """Run one attack; return the normal client's times, and the outcomes of the attackers."""
    found: list[float] = []
    command = [sys.executable, __file__, "--client", str(server.port), "--seconds", str(seconds)]
    command += ["--attack", name, "--sizes", json.dumps(asdict(sizes))]
    with measuring(server.port, seconds, normal, found, wrong):
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        wrong.append(f"the attackers of {name} broke")
        return found, Counter()
    server.settle()
    return found, Counter(json.loads(done.stdout))


async def attack(name: str, port: int, seconds: float, sizes: Sizes) -> Counter[str]:
    """Run the attackers; return their outcomes and counts."""
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
    normal: Normal = Normal(),
) -> list[str]:
    """Print the tables; return what was wrong."""
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
                    with measuring(server.port, seconds, normal, quiet[name][-1], wrong):
                        pass
                    length = stream_seconds if name == "leaving_streams" else seconds
                    found, got = measure_attack(server, name, length, sizes, normal, wrong)
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
    """Print both tables, in the format of docs/figures.md."""
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
    parser.add_argument("--tokens", type=int, default=8, help="of the normal client's answers")
    parser.add_argument("--rate", type=float, default=20.0, help="its requests a second")
    parser.add_argument("--only", choices=list(ATTACKS), action="append")
    # For the processes that this one starts.
    parser.add_argument("--client", type=int, metavar="PORT", help=argparse.SUPPRESS)
    parser.add_argument("--attack", choices=list(ATTACKS), help=argparse.SUPPRESS)
    parser.add_argument("--sizes", help=argparse.SUPPRESS)
    arguments, options = parser.parse_known_args()
    port, seconds = arguments.client, arguments.seconds
    normal = Normal(arguments.tokens, arguments.rate)
    if arguments.attack is not None:
        sizes = Sizes(**json.loads(arguments.sizes))
        print(json.dumps(asyncio.run(attack(arguments.attack, port, seconds, sizes))))
        return 0
    if port is not None:
        print(json.dumps(asyncio.run(normal_client(port, seconds, normal))))
        return 0
    wrong = run(
        seconds=arguments.seconds,
        stream_seconds=arguments.stream_seconds,
        rounds=arguments.rounds,
        names=arguments.only or list(ATTACKS),
        sizes=Sizes(),
        options=options,
        normal=normal,
    )
    for one in wrong:
        print(f"wrong: {one}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
