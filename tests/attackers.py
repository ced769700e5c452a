# SPDX-License-Identifier: Apache-2.0
"""The attacks of `make -C tools attacks`: what a misbehaving client sends to the server.

Attackers use a separate address, so the server can tell them from its other clients.
"""

import asyncio
import contextlib
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

ADDRESS = "127.0.0.2"  # address of the attackers; the normal client uses 127.0.0.1


@dataclass(frozen=True)
class Sizes:
    """Sizes of the attacks; tests use smaller ones."""

    words: int = 300_000
    ids: int = 600_000
    choices: int = 128
    sockets: int = 600
    half_open: int = 1100  # more connections than the server allows at a time
    streams: int = 256
    clients: int = 16  # for attacks with few concurrent requests
    body: int = 64 << 20
    tokens: int = 200
    prompt: int = 1000  # tokens of a prompt
    one_prompt: int = 900  # tokens of a prompt sent alone


@dataclass
class Target:
    """A server under attack, with the end time of the attack."""

    port: int
    until: float
    sizes: Sizes
    outcomes: Counter[str] = field(default_factory=Counter)

    @property
    def goes_on(self) -> bool:
        return time.monotonic() < self.until

    async def at_once(self, attacker: Callable[[], Awaitable[None]], count: int) -> None:
        """Run `count` attackers concurrently, each repeatedly."""

        async def one() -> None:
            while self.goes_on:
                await attacker()

        await asyncio.gather(*(one() for _ in range(count)))


def request(body: bytes, *, length: int | None = None, headers: str = "") -> bytes:
    """Return a POST request for a completion.

    Args:
        body: part of the body that is sent.
        length: value of Content-Length; None: the length of `body`.
        headers: additional header lines, each with its line ending.
    """
    size = len(body) if length is None else length
    lines = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Connection: close"]
    lines += ["Content-Type: application/json", f"Content-Length: {size}"]
    return ("\r\n".join(lines) + "\r\n" + headers + "\r\n").encode() + body


@contextlib.asynccontextmanager
async def connected(
    port: int, address: str = ADDRESS
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Open a connection to the server from an address."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
    try:
        yield reader, writer
    finally:
        writer.close()


async def status_of(reader: asyncio.StreamReader) -> str:
    """Return the status of the next answer, or "closed" if the connection ends."""
    with contextlib.suppress(ConnectionResetError):
        if line := await reader.readline():
            return line.split()[1].decode()
    return "closed"


async def send_and_read(target: Target, body: dict[str, Any], headers: str = "") -> None:
    """Send a request and read the answer to its end."""
    async with connected(target.port) as (reader, writer):
        writer.write(request(json.dumps(body).encode(), headers=headers))
        target.outcomes[await status_of(reader)] += 1
        with contextlib.suppress(OSError):
            await reader.read()


async def send_incomplete(target: Target, head: bytes) -> None:
    """Send an incomplete request, and record the server's reaction."""
    async with connected(target.port) as (reader, writer):
        with contextlib.suppress(OSError):
            writer.write(head)
            await writer.drain()
            patience = max(target.until - time.monotonic(), 0.1)
            try:
                target.outcomes[await asyncio.wait_for(status_of(reader), patience)] += 1
            except asyncio.TimeoutError:
                target.outcomes["open"] += 1


async def bad_words(target: Target) -> None:
    """Send bodies full of forbidden words."""
    body = {"prompt": "a", "bad_words": [f"w{i}" for i in range(target.sizes.words)]}
    while target.goes_on:
        await send_and_read(target, body)


async def long_ids(target: Target) -> None:
    """Send prompts of far more token ids than fit."""
    body = {"prompt": [i % 1000 for i in range(target.sizes.ids)]}
    while target.goes_on:
        await send_and_read(target, body)


async def many_choices(target: Target) -> None:
    """Send calls with the maximum number of choices."""
    n, tokens = target.sizes.choices, target.sizes.tokens
    while target.goes_on:
        await send_and_read(target, {"prompt": "def f(", "n": n, "max_tokens": tokens})


async def trickling(target: Target) -> None:
    """Open connections that send a letter a second, and never end their headers."""

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
    """Disconnect in the middle of the body."""
    half = b'{"prompt": "' + b"a" * (1 << 18)
    while target.goes_on:
        async with connected(target.port) as (_, writer):
            writer.write(request(half, length=2 * len(half)))
            with contextlib.suppress(OSError):
                await writer.drain()
        target.outcomes["left"] += 1
        await asyncio.sleep(0.01)


async def huge_bodies(target: Target) -> None:
    """Send bodies beyond every limit without announcing their size."""
    piece = b" " * (1 << 18)
    chunk = f"{len(piece):x}\r\n".encode() + piece + b"\r\n"
    head = request(b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    while target.goes_on:
        async with connected(target.port) as (reader, writer):
            writer.write(head)
            with contextlib.suppress(OSError):
                for _ in range(target.sizes.body // len(piece)):
                    writer.write(chunk)
                    await writer.drain()
                writer.write(b"0\r\n\r\n")
            with contextlib.suppress(OSError):
                target.outcomes[await status_of(reader)] += 1


async def announced_bodies(target: Target) -> None:
    """Send headers that announce a body beyond every limit, and no body."""
    expecting = ("", "Expect: 100-continue\r\n")
    for number in itertools.count():
        if not target.goes_on:
            return
        await send_incomplete(
            target, request(b"", length=target.sizes.body, headers=expecting[number % 2])
        )


async def big_heads(target: Target) -> None:
    """Send headers beyond the limit, in one piece."""
    while target.goes_on:
        await send_incomplete(target, request(b"", headers=f"X-Long: {'a' * 70_000}\r\n"))


async def half_open(target: Target) -> None:
    """Open silent connections, and reopen them when they are closed."""

    async def one() -> None:
        with contextlib.suppress(OSError):
            async with connected(target.port) as (reader, _):
                while target.goes_on and not reader.at_eof():
                    with contextlib.suppress(asyncio.TimeoutError):
                        await asyncio.wait_for(reader.read(1), 0.2)
                target.outcomes["closed" if reader.at_eof() else "open"] += 1
                await asyncio.sleep(0.2)

    await target.at_once(one, target.sizes.half_open)


async def connect_send_close(target: Target) -> None:
    """Send a request and disconnect at once, repeatedly."""
    while target.goes_on:
        body = {"prompt": f"def f{target.outcomes['left']}(", "max_tokens": target.sizes.tokens}
        with contextlib.suppress(OSError):
            async with connected(target.port) as (_, writer):
                writer.write(request(json.dumps(body).encode()))
            target.outcomes["left"] += 1


async def fresh_prompts(target: Target) -> None:
    """Send long prompts, each of them new."""
    draw = random.Random(0)

    async def one() -> None:
        prompt = [draw.randrange(1, 1000) for _ in range(target.sizes.prompt)]
        await send_and_read(target, {"prompt": prompt, "max_tokens": 1})

    await target.at_once(one, target.sizes.clients)


async def prompt_logprobs(target: Target) -> None:
    """Send long prompts with the maximum number of alternatives for each token."""
    draw = random.Random(0)

    async def one() -> None:
        prompt = [draw.randrange(1, 1000) for _ in range(target.sizes.prompt)]
        await send_and_read(target, {"prompt": prompt, "max_tokens": 1, "prompt_logprobs": 100})

    await target.at_once(one, target.sizes.clients)


async def one_prompt_after_another(target: Target) -> None:
    """Use one connection at a time, with a new prompt of 900 tokens."""
    await _one_after_another(target, {})


async def one_scored_prompt_after_another(target: Target) -> None:
    """Use one connection at a time, with a new prompt and 100 alternatives for each token."""
    await _one_after_another(target, {"prompt_logprobs": 100})


async def _one_after_another(target: Target, fields: dict[str, Any]) -> None:
    draw = random.Random(0)
    while target.goes_on:
        prompt = [draw.randrange(1, 1000) for _ in range(target.sizes.one_prompt)]
        await send_and_read(target, {"prompt": prompt, "max_tokens": 1, **fields})


async def forwarded_for(target: Target) -> None:
    """Claim a different forwarded address in each request."""
    draw = random.Random(0)

    async def one() -> None:
        address = ".".join(str(draw.randrange(256)) for _ in range(4))
        body = {"prompt": f"def f{address}(", "max_tokens": target.sizes.tokens}
        await send_and_read(target, body, f"X-Forwarded-For: {address}\r\n")

    await target.at_once(one, target.sizes.clients)


async def leaving_streams(target: Target) -> None:
    """Open many concurrent streams, most of which are dropped in the middle."""
    draw = random.Random(0)

    async def one() -> None:
        while target.goes_on:
            body = {"prompt": f"def f{draw.random()}(", "stream": True, "ignore_eos": True}
            body["max_tokens"] = target.sizes.tokens
            async with connected(target.port) as (reader, writer):
                writer.write(request(json.dumps(body).encode()))
                status = await status_of(reader)
                target.outcomes[status] += 1
                patience = draw.randrange(2 * target.sizes.tokens)
                while target.goes_on and patience and await reader.readline():
                    patience -= 1
                target.outcomes["left" if not patience else "read"] += status == "200"
            if status == "429":
                await asyncio.sleep(1.0)  # the value of Retry-After

    await asyncio.gather(*(one() for _ in range(target.sizes.streams)))


async def ambiguous_grammars(target: Target) -> None:
    """Use one connection at a time, with grammars whose number of parses grows with the text."""
    body = {"prompt": "x x", "max_tokens": target.sizes.tokens}
    while target.goes_on:
        for rule in ("a a | a a a", "a a", "a a a a"):
            form = {"grammar": f'start: a\na: "x" | {rule}'}
            await send_and_read(target, body | {"structured_outputs": form})


ATTACKS: dict[str, Callable[[Target], Awaitable[None]]] = {
    one.__name__: one
    for one in (
        bad_words,
        long_ids,
        many_choices,
        trickling,
        half_open,
        big_heads,
        broken_uploads,
        huge_bodies,
        announced_bodies,
        connect_send_close,
        fresh_prompts,
        prompt_logprobs,
        forwarded_for,
        leaving_streams,
        one_prompt_after_another,
        one_scored_prompt_after_another,
        ambiguous_grammars,
    )
}
