# SPDX-License-Identifier: Apache-2.0
"""The server's cost: CPU time per streamed token beyond the engine's, and time to first token.

The server is a separate process, and its CPU time comes from its metrics. Streams are decoded
plainly, so that each token has its own step and chunk: the worst case.
"""

import asyncio
import json
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

from bench.common import Bench, Figure

STREAMS = 64
TOKENS = 128
ROUNDS = 3
FIRST_TOKENS = 20
PROMPT = "# {}\ndef f("
NAIVE = {"method": "naive"}


def run_serving(bench: Bench) -> None:
    """Measure CPU time per token at 64 streams, and the time to first token of a single stream."""
    with _serving() as port:
        _load(port)  # warm up the server and the engine
        alone = _offline_seconds()
        served, without = [], []
        for _ in range(bench.pick(ROUNDS, 1)):
            before = _cpu_seconds(port)
            _load(port)
            served.append(_cpu_seconds(port) - before)
            without.append(alone())
        tokens = STREAMS * TOKENS
        first = [asyncio.run(_stream(port, 0, 4)) for _ in range(bench.pick(FIRST_TOKENS, 2))]
    bench.add(
        Figure(
            "serving.cpu_per_token",
            f"bundled model, {STREAMS} streams: CPU time a token over the engine alone",
            1e6 * (min(served) - min(without)) / tokens,
            "us",
            "engine",
            1e6 * min(without) / tokens,
            bar="value <= 60",
        )
    )
    bench.add(
        Figure(
            "serving.first_token",
            "bundled model, one stream: from sending a request to its first token, median",
            1e3 * median(first),
            "ms",
            bar="value <= 15",
        )
    )


@contextmanager
def _serving() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "specops.engine", "--port", str(port), "--num-threads", "1"]
    command += ["--max-num-seqs", str(STREAMS), "--log-level", "warning"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while True:
            try:
                _cpu_seconds(port)
                break
            except OSError:
                if server.poll() is not None:
                    raise RuntimeError("the server did not start") from None
                time.sleep(0.05)
        yield port
    finally:
        server.terminate()
        server.wait()


def _cpu_seconds(port: int) -> float:
    """Return the CPU seconds of the server's processes so far."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        metrics = answer.read().decode()
    found = re.findall(r"^(?:engine_)?process_cpu_seconds_total (\S+)", metrics, re.MULTILINE)
    assert found
    return sum(map(float, found))


def _load(port: int) -> None:
    """Run all streams concurrently to their ends."""

    async def streams() -> None:
        await asyncio.gather(*(_stream(port, number, TOKENS) for number in range(STREAMS)))

    asyncio.run(streams())


async def _stream(port: int, number: int, tokens: int) -> float:
    """Run one stream; return the seconds to its first token."""
    body = {"prompt": PROMPT.format(number), "max_tokens": tokens, "stream": True}
    body |= {"temperature": 0, "ignore_eos": True, "speculative_config": NAIVE}
    content = json.dumps(body).encode()
    lines = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Connection: close"]
    lines += ["Content-Type: application/json", f"Content-Length: {len(content)}", "", ""]
    begun, first, chunks = time.perf_counter(), 0.0, 0
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write("\r\n".join(lines).encode() + content)
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            first = first or time.perf_counter() - begun
            chunks += 1
    writer.close()
    assert chunks > 1, "the server refused a stream"
    return first


def _offline_seconds() -> Callable[[], float]:
    """Return a function that generates the same tokens without a server and returns CPU seconds."""
    from specops.engine import Engine, EngineConfig, SamplingParams, SpeculativeConfig

    naive = SpeculativeConfig.from_dict(NAIVE)
    engine = Engine(
        EngineConfig(device="cpu", num_threads=1, max_num_seqs=STREAMS, speculative_config=naive)
    )
    prompts = [PROMPT.format(number) for number in range(STREAMS)]
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)

    def seconds() -> float:
        begun = time.process_time()
        engine.generate(prompts, params)
        return time.process_time() - begun

    seconds()
    return seconds
