# SPDX-License-Identifier: Apache-2.0
"""Whose request is prepared next: of every client one at a time.

The event loop does a piece of work for every task that can go on, one after the other. Of a hundred
requests that come at once each piece would be behind a hundred others, for everybody. So a client's
requests wait for each other, as they came, until the one before is on its way: another client's
request is behind one of them. Bodies are read meanwhile, and what the engine and other threads do
for long is waited for without a turn. The engine's thread takes requests in between two steps; so a
client has a few on their way to it at a time, and the next one keeps its turn until there is room.

A request whose client has left by its turn is dropped there. One that was begun and then abandoned
has cost something and is in nobody's way any more, so it would count for nothing: the client's next
turn is a pause later for it. A client that asks and leaves in a loop waits for its own pauses.
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

# What an abandoned request adds to the time before its client's next turn, and how much there may
# be: many may be abandoned at once, by a client that ends.
_PAUSE_SECONDS = 0.01
_MOST_PAUSE_SECONDS = 1.0

# Bytes of a body that are written at a time; the write buffer pauses when it has so many.
_PIECE_BYTES = 1 << 16


@dataclass(eq=False)
class _Line:
    """A client's requests that want a turn, or have it."""

    places: asyncio.Semaphore  # first come, first served
    num_users: int = 0  # requests, and pauses
    paused_until: float = 0.0  # by the event loop's clock


class Turns:
    """Every client's line, as long as somebody stands in it.

    Args:
        at_once: how many of a client's requests have their turn at a time.
    """

    def __init__(self, at_once: int = 1) -> None:
        self._at_once = at_once
        self._lines: dict[str, _Line] = {}

    async def begin(self, client: str) -> None:
        """Waits for a turn, and for the end of the client's pause."""
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
        """Ends a turn of the client's."""
        line = self._lines[client]
        line.places.release()
        self._leave(client, line)

    def pause(self, client: str) -> None:
        """Puts the client's next turn off, for a request of its that it has abandoned."""
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
        """How many clients there are."""
        return len(self._lines)


class Turn:
    """One request's turn; it may end and begin several times.

    Args:
        turns: of all.
        client: whose request it is.
    """

    def __init__(self, turns: Turns, client: str) -> None:
        self._turns, self._client = turns, client
        self._has_it = False

    async def begin(self) -> None:
        """Waits for the turn, behind those of the client's requests that wait already."""
        if not self._has_it:
            await self._turns.begin(self._client)
            self._has_it = True

    def end(self) -> None:
        """Lets the client's next request go on; nothing, where this one has no turn."""
        if self._has_it:
            self._has_it = False
            self._turns.end(self._client)


class Intake:
    """Middleware around an application: says who asks, and gives turns to requests with bodies.

    Long bodies of answers are written in pieces, each when the client has read those before it.

    `state` of a request gets `client`, a name; `cache_scope`, of that client; `may_ask`; `turn`, a
    `Turn`; and `send_body`, which goes around the other middleware: of an answer that has begun it
    wants to know nothing more. It has `is_gone` already, by which a connection says whether it has
    ended (connections.py).

    Args:
        app: the application.
        clients: who tells them apart.
        turns: of the clients.
        unread: counts what is left of long bodies.
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
        """Serves a request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        name, may_ask = self._clients.identify(HTTPConnection(scope))
        turn = Turn(self._turns, name)
        state = scope.setdefault("state", {})
        send = partial(self._send_in_pieces, send, name)
        cache_scope = self._clients.cache_scope(name)
        state.update(client=name, cache_scope=cache_scope, may_ask=may_ask)
        state.update(turn=turn, send_body=send)
        # Another HTTP server than ours does not say.
        is_gone: Callable[[], bool] = state.setdefault("is_gone", lambda: False)

        has_begun = False

        async def answering(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            turn.end()  # how long the client reads is nobody's affair
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
            # The connection knows the scope, and what is here knows the connection. Without that
            # circle a request's objects go when it ends, and garbage is looked for less often.
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
