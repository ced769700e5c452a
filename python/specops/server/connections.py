# SPDX-License-Identifier: Apache-2.0
"""Limits on connections: their number, and the memory and time that a client may take.

uvicorn limits the pause between two requests. It limits neither the size of a request's headers,
nor the time that a client takes to send a request or to read an answer.
"""

import asyncio
import itertools
import logging
import resource
from collections import Counter
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from specops.server.clients import network_of

logger = logging.getLogger(__name__)

_MAX_HEAD_BYTES = 1 << 16  # a request's line and headers
_LONG_HEAD = f"The headers exceed {_MAX_HEAD_BYTES} bytes."
# Delay between a connection's timeout and its closing. When a suspended process resumes, timers run
# before unread requests are read; the delay lets it read them before it closes connections.
_MOMENT = 0.05

# Connections reserved for addresses that have none: one in _RESERVED_SHARE, at most _MAX_RESERVED.
_RESERVED_SHARE = 8
_MAX_RESERVED = 16
# Files that the server opens besides its clients' connections: listeners, the engine's sockets, a
# connection to Redis, connections to the metrics port, logs.
_OWN_FILES = 128
# While the server shuts down, clients get less time to read their output.
_SHUTDOWN_WRITE_SECONDS = 5.0

_MOMENTS = itertools.count()  # logical clock; the event loop's is constant within a round


class _BoundedProtocol(HttpToolsProtocol):
    max_connections: int
    header_timeout: float
    write_timeout: float

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._deadline: asyncio.TimerHandle | None = None
        self._write_deadline: asyncio.TimerHandle | None = None
        self._unread_bytes = -1  # size of the write buffer at the last write deadline, or -1
        self._head_bytes = 0  # received of an incomplete head; a lower bound
        self._fault = ""  # error message for a refused head
        self._network = ""
        self._idle_since = next(_MOMENTS)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._network = network_of(self.client[0] if self.client else "")
        self._watch()
        if len(self.connections) > self.max_connections - self._num_reserved:
            self._close_excess()

    @property
    def _num_reserved(self) -> int:
        """Number of connections reserved for addresses that have no other connection."""
        return min(self.max_connections // _RESERVED_SHARE, _MAX_RESERVED)

    def _close_excess(self) -> None:
        """Close a connection if there are too many.

        Of the address with the most connections, close the one that has waited longest for its
        client. If none of them waits for its client, close this new connection.
        """
        connections = [
            connection
            for connection in self.connections
            if isinstance(connection, _BoundedProtocol)
        ]
        connections = [connection for connection in connections if not connection._is_closed()]
        counts = Counter(connection._network for connection in connections)
        is_first = counts[self._network] == 1
        if len(connections) <= self.max_connections - (0 if is_first else self._num_reserved):
            return
        network = counts.most_common(1)[0][0]
        idle = [
            connection
            for connection in connections
            if connection._network == network
            and connection is not self
            and connection._waits_for_client()
        ]
        min(idle, key=lambda connection: connection._idle_since, default=self)._close_at_once()

    def _close_at_once(self) -> None:
        """Close the connection at once, even if its client has not read everything."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    def _is_closed(self) -> bool:
        """Return whether the connection is closing and has nothing left to write."""
        return self.transport.is_closing() and not self.transport.get_write_buffer_size()

    def connection_lost(self, exc: Exception | None) -> None:
        self._rest()
        self._stop_write_deadline()
        super().connection_lost(exc)

    # ---- output that the client has not read ----

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_write_deadline(self.write_timeout)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_write_deadline()

    def shutdown(self) -> None:
        if self._write_deadline is not None:
            self._start_write_deadline(min(self.write_timeout, _SHUTDOWN_WRITE_SECONDS))
        self.write_timeout = min(self.write_timeout, _SHUTDOWN_WRITE_SECONDS)
        super().shutdown()

    def _start_write_deadline(self, seconds: float) -> None:
        self._stop_write_deadline()
        self._write_deadline = self.loop.call_later(seconds, self._end_writing)

    def _stop_write_deadline(self) -> None:
        self._unread_bytes = -1
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None

    def _end_writing(self) -> None:
        """End the connection of a client that does not read its output.

        If the rest of an answer fits into the write buffer, writing is not paused. The client then
        counts as reading as long as the buffer's size changes between two deadlines.
        """
        self._write_deadline = None
        size = self.transport.get_write_buffer_size()
        must_end = self.flow.write_paused or self.transport.is_closing()
        if size and (must_end or size == self._unread_bytes):
            self.transport.abort()
        elif size:
            self._start_write_deadline(self.write_timeout)
            self._unread_bytes = size

    # ---- input from the client ----

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
        # Headers that arrive in one piece of data have not been counted before.
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > _MAX_HEAD_BYTES:
            self._fault = _LONG_HEAD
            raise ValueError(self._fault)  # the parser stops, and the connection gets a 400
        self._head_bytes = 0
        super().on_headers_complete()
        cycle = self.cycle
        self._idle_since = next(_MOMENTS)  # idle until the body has arrived
        self.scope["state"]["is_gone"] = lambda: cycle.disconnected

    def on_response_complete(self) -> None:
        self._idle_since = next(_MOMENTS)
        if self._write_deadline is None and self.transport.get_write_buffer_size():
            self._start_write_deadline(self.write_timeout)
        super().on_response_complete()

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def timeout_keep_alive_handler(self) -> None:
        close = super().timeout_keep_alive_handler
        self.timeout_keep_alive_task = self.loop.call_later(_MOMENT, close)

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _waits_for_client(self) -> bool:
        """Return whether the client must act next: send a request or its body, or read."""
        if not self._is_answering() or self.flow.write_paused:
            return True
        return bool(self.cycle.more_body) and not self.pipeline

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


def bounded_protocol(
    *, max_connections: int, header_timeout: float, write_timeout: float
) -> type[asyncio.Protocol]:
    """Return uvicorn's HTTP protocol with limits.

    Args:
        max_connections: maximum number of open connections. When it is exceeded, the address with
            the most connections loses the one that has waited longest for its client. The last
            ones are reserved for addresses that have no other connection.
        header_timeout: seconds from the first byte of a request, or from the beginning of the
            connection, to the end of its headers; then the connection is closed.
        write_timeout: seconds that a client may take to read the contents of the write buffer; then
            the connection is closed.
    """
    bounds = {
        "max_connections": max_connections,
        "header_timeout": header_timeout,
        "write_timeout": write_timeout,
    }
    return type("BoundedProtocol", (_BoundedProtocol,), bounds)


def connections_within_files(max_connections: int) -> int:
    """Raise the process's limit of open files as far as connections need it.

    Args:
        max_connections: desired maximum number of open connections.

    Returns:
        The number of connections that the limit allows: `max_connections`, or fewer with a warning.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = max_connections + _OWN_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return max_connections
    files = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    except (OSError, ValueError):  # the system has another, lower limit
        files = soft
    allowed = max(files - _OWN_FILES, files // 2, 1)
    if allowed < max_connections:
        logger.warning(
            "the limit of %d open files allows only %d of max_connections=%d connections; raise "
            "the limit with ulimit -n",
            files,
            allowed,
            max_connections,
        )
        return allowed
    return max_connections
