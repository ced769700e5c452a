# SPDX-License-Identifier: Apache-2.0
"""Compare tools.simulate with a prefill and a decode server: `python -m bench.check_simulation`.

It measures the inputs of the simulation here: steps of the bundled model by their rows on one
thread, and the transfer of a prompt's pages. Then it requests first tokens from two servers of one
thread each, as a pair and from one of them alone. Finally it sends the same requests, at the same
times, to both servers and to the simulation, and prints the waiting times in both. The machine
should have two free cores.
"""

import argparse
import contextlib
import json
import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from statistics import mean, median
from typing import Any

from specops.disaggregated.handoff import PagesEngine
from specops.disaggregated.transport import Address, Leases, TcpTransport
from specops.engine import Engine, EngineConfig, SamplingParams
from specops.service.wire import Peer

from tools.simulate import Machine, Request, arrivals, simulate

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
ROUNDS = 5
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "num_threads": 1,
    "speculative_config": '{"method": "naive"}',
}
ONE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
WARM_UP = 4  # requests at the beginning
LONGEST = 600  # tokens of a prompt
PROMPTS = (64, 256, 900)  # prompt lengths whose first tokens are measured
FIRST_TOKENS = 15  # measurements per prompt length
SEED = 11


def step_seconds() -> tuple[tuple[int, float], ...]:
    """Return the median seconds of steps that compute `rows` rows of a prompt."""
    engine = Engine(EngineConfig.from_plain({**SETTINGS, "enable_prefix_caching": False}))
    found: dict[int, list[float]] = {rows: [] for rows in ROWS}
    for _ in range(ROUNDS + 1):  # the first one warms up
        for rows in ROWS:
            engine.add_request(_prompt(rows), ONE)
            begin = time.perf_counter()
            engine.step()
            found[rows].append(time.perf_counter() - begin)
            assert not engine.has_unfinished()
    return tuple((rows, median(taken[1:])) for rows, taken in found.items())


def hand_off() -> tuple[int, float]:
    """Return the bytes per token, and bytes per second of a transfer between two engines."""
    engines = [PagesEngine(EngineConfig.from_plain(SETTINGS)) for _ in range(2)]
    transport = TcpTransport("127.0.0.1", 0, Leases(60, 1 << 30), [Peer("127.0.0.1", 1, 65535)])
    taken, num_bytes, tokens = [], 0, 512
    for round_ in range(ROUNDS + 1):
        prompt = _prompt(tokens + 1)
        engines[0].generate([prompt], ONE)
        begin = time.perf_counter()
        transport.lease(str(round_), engines[0].take_pages(prompt, ONE))
        expected = engines[1].expected(prompt, ONE)
        pages = transport.fetch(Address(str(round_), transport.host, transport.port), expected)
        engines[1].give_pages(pages, expected)
        taken.append(time.perf_counter() - begin)
        num_bytes = len(pages.data)
    transport.close()
    return num_bytes // tokens, num_bytes / median(taken[1:])


def _prompt(count: int) -> list[int]:
    return random.choices(range(10, 4000), k=count)


# ---- servers ----


@contextlib.contextmanager
def pair() -> Iterator[list[str]]:
    """Yield the addresses of a prefill and a decode server of the bundled model."""
    processes, urls, kv_port = [], [], _free_port()
    own = (("prefill", "--kv-port", str(kv_port)), ("decode", "--kv-peers", f"127.0.0.1:{kv_port}"))
    for role in own:
        port = _free_port()
        command = [sys.executable, "-m", "specops", "serve", "--role", *role, "--port", str(port)]
        command += ["--num-threads", "1", "--device", "cpu"]
        command += ["--speculative-config", '{"method": "naive"}', "--log-level", "error"]
        processes.append(subprocess.Popen(command))
        urls.append(f"http://127.0.0.1:{port}")
    try:
        for url in urls:
            _wait(url)
        yield urls
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _wait(url: str) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return
        time.sleep(0.1)
    raise TimeoutError(f"{url} does not answer")


def _post(url: str, body: dict[str, Any]) -> Any:
    data = json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    asked = urllib.request.Request(f"{url}/v1/completions", data, headers)
    return urllib.request.urlopen(asked, timeout=120)


def serve(urls: Sequence[str], request: Request, begin: float) -> Request:
    """Send a request at its time, as a router does; return it with the times of its tokens.

    Args:
        urls: the server for its prompt, and the one that decodes; a single one does both.
        request: the request.
        begin: start time, by `time.monotonic`.
    """
    time.sleep(max(begin + request.arrival - time.monotonic(), 0))
    body = {"prompt": _prompt(request.prompt), "temperature": 0, "ignore_eos": True}
    rest: dict[str, Any] = {**body, "max_tokens": request.left, "stream": True}
    if len(urls) > 1:
        first = {**body, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        with _post(urls[0], first) as answer:
            rest["kv_transfer_params"] = json.load(answer)["kv_transfer_params"]
    times: list[tuple[float, int]] = []
    with _post(urls[-1], rest) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                times.append((time.monotonic() - begin, 1))
    return replace(request, times=times)


def measured(urls: Sequence[str], requests: Sequence[Request]) -> list[Request]:
    """Send the requests to the servers and return them with their times."""
    begin = time.monotonic() + 0.1
    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(lambda one: serve(urls, one, begin), requests))


def first_tokens(urls: Sequence[str], prompt: int, rounds: int) -> tuple[float, float]:
    """Return the median seconds to a prompt's first token: from the pair, and from one server.

    They alternate, and nothing else runs.
    """
    found: tuple[list[float], list[float]] = [], []
    for _ in range(rounds):
        for ways, seconds in zip((urls, urls[1:]), found, strict=True):
            told = serve(ways, Request(0.0, prompt, 2), time.monotonic())
            seconds.append(told.first_token)
    return median(found[0]), median(found[1])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--rates", type=float, nargs="+", default=[2.0, 6.0, 12.0])
    given = parser.parse_args(arguments)
    points = step_seconds()
    bytes_per_token, speed = hand_off()
    machine = Machine(
        step_seconds=points,
        max_rows=128,  # the engine's limit on a CPU
        max_beside=16,
        bytes_per_token=bytes_per_token,
        link_bytes_per_second=speed,
        link_seconds=0.0,
        page_size=EngineConfig().page_size,
        acceptance=0.0,
        prompt_tokens=LONGEST * 2 // 3,
        output_tokens=64,
    )
    steps = ", ".join(f"{rows}: {1e3 * seconds:.2f}" for rows, seconds in points)
    print(f"ms of steps by rows: {steps}")
    print(
        f"pages of 1,000 tokens: {bytes_per_token / 1e3:.2f} MB, "
        f"{1e6 * bytes_per_token / speed:.1f} ms ({speed / 1e6:.0f} MB/s)"
    )
    with pair() as urls:
        measured(urls, arrivals(machine, 4.0, WARM_UP, SEED))
        print("| tokens of a prompt | first token of the pair, ms | of one server |")
        print("| --- | --- | --- |")
        for prompt in PROMPTS:
            cells = [f"{1e3 * one:.1f}" for one in first_tokens(urls, prompt, FIRST_TOKENS)]
            print(f"| {prompt} | " + " | ".join(cells) + " |", flush=True)
        print("| requests a second | first token, ms | simulated | a later token, ms | simulated |")
        print("| --- | --- | --- | --- | --- |")
        for rate in given.rates:
            told = measured(urls, arrivals(machine, rate, given.requests, SEED))
            expected = arrivals(machine, rate, given.requests, SEED)
            simulate(machine, expected, prefill=1, decode=1)
            cells = [
                f"{1e3 * mean(value):.1f}"
                for name in ("first_token", "per_token")
                for value in ([getattr(one, name) for one in of] for of in (told, expected))
            ]
            print(f"| {rate:g} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
