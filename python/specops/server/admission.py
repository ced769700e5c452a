# SPDX-License-Identifier: Apache-2.0
"""Admission of requests to the server: one request of each client is prepared at a time.

The event loop runs all ready tasks in turn. If one client sent a hundred requests at once, every
task of the other clients would wait behind a hundred tasks of that client. So a request needs a
permit, of which each client has one. A client's requests get the permit in order of arrival, and
each keeps it until it is on its way to the engine. Another client's request thus waits for at most
one of them. A request holds no permit while its body is read or while it waits for long work of the
engine or of other threads. The engine accepts requests only between two steps. Only a few requests
of a client may wait for that at a time; the next one keeps its permit until the engine has accepted
one of them.

A request whose client has left before it gets its permit is dropped. A request that was begun and
then abandoned has cost work but no longer holds a permit, so the client's next permit is delayed by
a pause instead. A client that sends requests and leaves in a loop thus waits for its own pauses.
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

# Pause of a client per abandoned request, and the maximum total pause: a client that exits may
# abandon many requests at once.
_PAUSE_SECONDS = 0.01
_MAX_PAUSE_SECONDS = 1.0

# Size of the pieces in which a long body is written; uvicorn's write buffer also pauses at this
# size.
_PIECE_BYTES = 1 << 16


@dataclass(eq=False)
class _ClientPermits:
    """Requests of one client that wait for a permit or hold one."""

    semaphore: asyncio.Semaphore  # first come, first served
    num_references: int = 0  # requests and pauses that refer to this object
    paused_until: float = 0.0  # by the event loop's clock


class ClientPermits:
    """Permits of all clients that have a request or a pause.

    Args:
        per_client: number of requests of one client that may hold a permit at a time.
    """

    def __init__(self, per_client: int = 1) -> None:
        self._per_client = per_client
        self._by_client: dict[str, _ClientPermits] = {}

    async def acquire(self, client: str) -> None:
        """Wait for a permit and for the end of the client's pause."""
        entry = self._join(client)
        try:
            await entry.semaphore.acquire()
        except asyncio.CancelledError:
            self._leave(client, entry)
            raise
        try:
            while (seconds := entry.paused_until - asyncio.get_running_loop().time()) > 0:
                await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.release(client)
            raise

    def release(self, client: str) -> None:
        """Release one permit of the client."""
        entry = self._by_client[client]
        entry.semaphore.release()
        self._leave(client, entry)

    def pause(self, client: str) -> None:
        """Delay the client's next permit because it abandoned a request."""
        entry = self._join(client)
        loop = asyncio.get_running_loop()
        now = loop.time()
        begin = max(entry.paused_until, now)
        entry.paused_until = min(begin + _PAUSE_SECONDS, now + _MAX_PAUSE_SECONDS)
        loop.call_at(entry.paused_until, self._leave, client, entry)

    def _join(self, client: str) -> _ClientPermits:
        entry = self._by_client.get(client)
        if entry is None:
            entry = self._by_client[client] = _ClientPermits(asyncio.Semaphore(self._per_client))
        entry.num_references += 1
        return entry

    def _leave(self, client: str, entry: _ClientPermits) -> None:
        entry.num_references -= 1
        if not entry.num_references:
            del self._by_client[client]

    def __len__(self) -> int:
        """Return the number of clients with a request or a pause."""
        return len(self._by_client)


class Permit:
    """Permit of one request; the request may acquire and release it several times.

    Args:
        permits: the permits of all clients.
        client: name of the client that sent the request.
    """

    def __init__(self, permits: ClientPermits, client: str) -> None:
        self._permits = permits
        self._client = client
        self._is_held = False

    async def acquire(self) -> None:
        """Wait for the permit, behind earlier requests of the same client."""
        if not self._is_held:
            await self._permits.acquire(self._client)
            self._is_held = True

    def release(self) -> None:
        """Release the permit, so that the client's next request can begin; no-op if not held."""
        if self._is_held:
            self._is_held = False
            self._permits.release(self._client)


class Admission:
    """ASGI middleware that identifies clients and admits requests with bodies.

    It writes a long response body in pieces, each after the client has read the previous ones.

    It sets these attributes of a request's `state`: `client`, the client's name; `cache_scope`, the
    client's cache scope; `is_authorized`, whether its API key is valid; `permit`, a `Permit`; and
    `send_body`, which sends the rest of a body without the other middleware, since they only need
    the beginning of a response. `is_gone` is set already: it returns whether the connection has
    ended (connections.py).

    Args:
        app: the application.
        clients: identifies clients.
        permits: the permits of all clients.
        unread: counts the unsent bytes of long bodies.
        cancelled: makes the response to a request that is cancelled at the end of `drain_timeout`
            before its response has begun.
    """

    def __init__(
        self,
        app: ASGIApp,
        clients: Clients,
        permits: ClientPermits,
        unread: Unread | None = None,
        cancelled: Callable[[Scope], Response] = lambda scope: Response(status_code=503),
    ) -> None:
        self._app = app
        self._clients = clients
        self._permits = permits
        self._unread = unread
        self._cancelled = cancelled

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        name, is_authorized = self._clients.identify(HTTPConnection(scope))
        permit = Permit(self._permits, name)
        state = scope.setdefault("state", {})
        send = partial(self._send_in_pieces, send, name)
        cache_scope = self._clients.cache_scope(name)
        state.update(client=name, cache_scope=cache_scope, is_authorized=is_authorized)
        state.update(permit=permit, send_body=send)
        # Our HTTP protocol (connections.py) sets `is_gone`; other ASGI servers do not.
        is_gone: Callable[[], bool] = state.setdefault("is_gone", lambda: False)

        has_begun = False

        async def answering(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            permit.release()  # a slow reader must not hold the permit
            await send(message)

        try:
            if scope["method"] == "POST":
                await permit.acquire()
                if is_gone():
                    return
            try:
                await self._app(scope, receive, answering)
            finally:
                if scope["method"] == "POST" and is_gone():
                    self._permits.pause(name)
        except asyncio.CancelledError:
            if has_begun:
                raise
            await self._cancelled(scope)(scope, receive, send)
        finally:
            permit.release()
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
