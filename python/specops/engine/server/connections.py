# SPDX-License-Identifier: Apache-2.0
"""What a connection may cost before it has asked for anything: a place, some memory, some time.

uvicorn bounds the pause between two requests, not what a client sends for one, nor how long that
takes.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_MAX_HEAD_BYTES = 1 << 16  # a request's line and headers


class _BoundedProtocol(HttpToolsProtocol):
    max_connections: int
    header_timeout: float

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._deadline: asyncio.TimerHandle | None = None
        self._head_bytes = 0  # at least so many have come of a head that is not complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            transport.close()
        else:
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._rest()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > _MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The headers exceed {_MAX_HEAD_BYTES} bytes.")
        if self._is_answering():
            self._rest()
        elif self._deadline is None:
            self._watch()

    def on_headers_complete(self) -> None:
        self._head_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _watch(self) -> None:
        self._deadline = self.loop.call_later(self.header_timeout, self._close)

    def _rest(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _close(self) -> None:
        self._deadline = None
        if not self._is_answering():
            self.transport.close()


def bounded_protocol(*, max_connections: int, header_timeout: float) -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol, for connections that are bounded.

    Args:
        max_connections: open at a time; further ones are closed at once.
        header_timeout: seconds from the first byte of a request, or from the beginning of the
            connection, to the end of its headers; then the connection is closed.
    """
    bounds = {"max_connections": max_connections, "header_timeout": header_timeout}
    return type("BoundedProtocol", (_BoundedProtocol,), bounds)
