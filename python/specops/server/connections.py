# SPDX-License-Identifier: Apache-2.0
"""What a connection may cost before it has asked for anything: a place, some memory, some time.

uvicorn bounds the pause between two requests, not what a client sends for one, nor how long that
takes.
"""

import asyncio
import itertools
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from specops.server.clients import network_of

_MAX_HEAD_BYTES = 1 << 16  # a request's line and headers
_LONG_HEAD = f"The headers exceed {_MAX_HEAD_BYTES} bytes."
# Between the end of a connection's time and its end. A process that was stopped finds timers due
# and requests unread; timers come first, and by then these are read.
_MOMENT = 0.05

_MOMENTS = itertools.count()  # the event loop's clock stands still within a round


class _BoundedProtocol(HttpToolsProtocol):
    max_connections: int
    header_timeout: float

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._deadline: asyncio.TimerHandle | None = None
        self._head_bytes = 0  # at least so many have come of a head that is not complete
        self._fault = ""  # of a head that was refused
        self._network = ""
        self._idle_since = next(_MOMENTS)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._network = network_of(self.client[0] if self.client else "")
        self._watch()
        if len(self.connections) > self.max_connections:
            self._make_room()

    def _make_room(self) -> None:
        """Closes a connection of the network that has most: the one that is idle for longest.

        It is this one where the server is answering all others of that network.
        """
        networks: dict[str, list[_BoundedProtocol]] = {}
        count = 0
        for one in self.connections:
            if isinstance(one, _BoundedProtocol) and not one.transport.is_closing():
                networks.setdefault(one._network, []).append(one)
                count += 1
        if count > self.max_connections:
            most = max(networks.values(), key=len)
            idle = [one for one in most if one is not self and not one._is_answering()]
            min(idle, key=lambda one: one._idle_since, default=self).transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._rest()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > _MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(_LONG_HEAD)
        if self._is_answering():
            self._rest()
        elif self._deadline is None:
            self._watch()

    def send_400_response(self, msg: str) -> None:
        super().send_400_response(self._fault or msg)

    def on_headers_complete(self) -> None:
        # Of one piece with all of them nothing was counted before.
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > _MAX_HEAD_BYTES:
            self._fault = _LONG_HEAD
            raise ValueError(self._fault)  # the parser stops, and the connection gets a 400
        self._head_bytes = 0
        super().on_headers_complete()
        cycle = self.cycle
        self.scope["state"]["is_gone"] = lambda: cycle.disconnected

    def on_response_complete(self) -> None:
        self._idle_since = next(_MOMENTS)
        super().on_response_complete()

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def timeout_keep_alive_handler(self) -> None:
        close = super().timeout_keep_alive_handler
        self.timeout_keep_alive_task = self.loop.call_later(_MOMENT, close)

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _watch(self) -> None:
        self._deadline = self.loop.call_later(self.header_timeout, self._close_soon)

    def _rest(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _close_soon(self) -> None:
        self._deadline = self.loop.call_later(_MOMENT, self._close)

    def _close(self) -> None:
        self._deadline = None
        if not self._is_answering():
            self.transport.close()


def bounded_protocol(*, max_connections: int, header_timeout: float) -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol, for connections that are bounded.

    Args:
        max_connections: open at a time. For one more, the address that has most of them loses the
            one that has asked for nothing for longest.
        header_timeout: seconds from the first byte of a request, or from the beginning of the
            connection, to the end of its headers; then the connection is closed.
    """
    bounds = {"max_connections": max_connections, "header_timeout": header_timeout}
    return type("BoundedProtocol", (_BoundedProtocol,), bounds)
