# SPDX-License-Identifier: Apache-2.0
"""Admission of requests to the server: one request of each client is prepared at a time.

The event loop runs a piece of work for every ready task in sequence. If one client sent a hundred
requests at once, every piece of any client's work would wait behind a hundred others. So the
requests of a client take turns, in order of arrival: a request keeps its turn until it is on its
way to the engine, and another client's request waits for at most one of them. A request holds no
turn while its body is read or while it waits for long work of the engine or of other threads. The
engine's thread takes requests between two steps, so a client may have only a few requests on their
way to it; the next one keeps its turn until one of those has been taken.

A request whose client has left by its turn is dropped. A request that was begun and then abandoned
has cost work but no longer takes a turn, so the client's next turn is delayed by a pause instead.
A client that sends requests and leaves in a loop thus waits for its own pauses.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specops.server.clients import Clients
from specops.server.unread import Unread

# Delay of the client's next turn per abandoned request, and the maximum of the sum: a client that
# ends may abandon many requests at once.
_PAUSE_SECONDS = 0.01
_MOST_PAUSE_SECONDS = 1.0

# Bytes of a body that are written at a time; the write buffer pauses at this many.
_PIECE_BYTES = 1 << 16


@dataclass(eq=False)
class _Line:
    """Requests of one client that wait for a turn or have one."""

    places: asyncio.Semaphore  # first come, first served
    num_users: int = 0  # requests and pauses that refer to this object
    paused_until: float = 0.0  # by the event loop's clock


class Turns:
    """Waiting lines of all clients that have a request or a pause.

    Args:
        at_once: number of requests of one client that may have a turn at a time.
    """

    def __init__(self, at_once: int = 1) -> None:
        self._at_once = at_once
        self._lines: dict[str, _Line] = {}

    async def begin(self, client: str) -> None:
        """Wait for a turn and for the end of the client's pause."""
        line = self._join(client)
        try:
            await line.places.acquire()
        except asyncio.CancelledError:
            self._leave(client, line)
            raise
        try:
            while (seconds := line.paused_until - asyncio.get_running_loop().time()) > 0:
                await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.end(client)
            raise

    def end(self, client: str) -> None:
        """End one turn of the client."""
        line = self._lines[client]
        line.places.release()
        self._leave(client, line)

    def pause(self, client: str) -> None:
        """Delay the client's next turn because it abandoned a request."""
        line, loop = self._join(client), asyncio.get_running_loop()
        now = loop.time()
        begin = max(line.paused_until, now)
        line.paused_until = min(begin + _PAUSE_SECONDS, now + _MOST_PAUSE_SECONDS)
        loop.call_at(line.paused_until, self._leave, client, line)

    def _join(self, client: str) -> _Line:
        line = self._lines.get(client)
        if line is None:
            line = self._lines[client] = _Line(asyncio.Semaphore(self._at_once))
        line.num_users += 1
        return line

    def _leave(self, client: str, line: _Line) -> None:
        line.num_users -= 1
        if not line.num_users:
            del self._lines[client]

    def __len__(self) -> int:
        """Return the number of clients with a request or a pause."""
        return len(self._lines)


class Turn:
    """Turn of one request; it may begin and end several times.

    Args:
        turns: the turns of all clients.
        client: name of the client that sent the request.
    """

    def __init__(self, turns: Turns, client: str) -> None:
        self._turns, self._client = turns, client
        self._has_it = False

    async def begin(self) -> None:
        """Wait for the turn, behind earlier requests of the same client."""
        if not self._has_it:
            await self._turns.begin(self._client)
            self._has_it = True

    def end(self) -> None:
        """End the turn, so that the client's next request may run; no-op without a turn."""
        if self._has_it:
            self._has_it = False
            self._turns.end(self._client)


class Intake:
    """ASGI middleware that identifies clients and gives turns to requests with bodies.

    It writes a long response body in pieces, each after the client has read the previous ones.

    It sets these attributes of a request's `state`: `client`, the client's name; `cache_scope`, the
    client's cache scope; `may_ask`, whether it is authorized; `turn`, a `Turn`; and `send_body`,
    which bypasses the other middleware, because that only needs to see how an answer begins.
    `is_gone` is set already: it returns whether the connection has ended (connections.py).

    Args:
        app: the application.
        clients: identifies clients.
        turns: the turns of all clients.
        unread: counts the unsent bytes of long bodies.
        cancelled: makes the answer to a request that is cancelled before its answer has begun,
            which happens when the time for draining is over.
    """

    def __init__(
        self,
        app: ASGIApp,
        clients: Clients,
        turns: Turns,
        unread: Unread | None = None,
        cancelled: Callable[[Scope], Response] = lambda scope: Response(status_code=503),
    ) -> None:
        self._app, self._clients, self._turns, self._unread = app, clients, turns, unread
        self._cancelled = cancelled

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        name, may_ask = self._clients.identify(HTTPConnection(scope))
        turn = Turn(self._turns, name)
        state = scope.setdefault("state", {})
        send = partial(self._send_in_pieces, send, name)
        cache_scope = self._clients.cache_scope(name)
        state.update(client=name, cache_scope=cache_scope, may_ask=may_ask)
        state.update(turn=turn, send_body=send)
        # Other HTTP servers than ours do not set it.
        is_gone: Callable[[], bool] = state.setdefault("is_gone", lambda: False)

        has_begun = False

        async def answering(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            turn.end()  # a slow reader must not hold the turn
            await send(message)

        try:
            if scope["method"] == "POST":
                await turn.begin()
                if is_gone():
                    return
            try:
                await self._app(scope, receive, answering)
            finally:
                if scope["method"] == "POST" and is_gone():
                    self._turns.pause(name)
        except asyncio.CancelledError:
            if has_begun:
                raise
            await self._cancelled(scope)(scope, receive, send)
        finally:
            turn.end()
            # The connection refers to the scope, and `state` to the connection. Breaking the cycle
            # frees a request's objects as soon as it ends, without garbage collection.
            state.clear()

    async def _send_in_pieces(self, send: Send, client: str, message: Message) -> None:
        """Send a message; a long body waits piece by piece for the client to read it."""
        body = message.get("body", b"")
        if len(body) <= _PIECE_BYTES:
            return await send(message)
        rest = len(body)
        try:
            self._count(client, rest)
            for begin in range(0, len(body), _PIECE_BYTES):
                piece = body[begin : begin + _PIECE_BYTES]
                is_last = begin + len(piece) == len(body)
                more_body = not is_last or message.get("more_body", False)
                await send({**message, "body": piece, "more_body": more_body})
                rest -= len(piece)
                self._count(client, -len(piece))
        finally:
            self._count(client, -rest)

    def _count(self, client: str, size: int) -> None:
        if self._unread is not None:
            self._unread.add_body(client, size)
