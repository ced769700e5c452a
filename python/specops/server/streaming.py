# SPDX-License-Identifier: Apache-2.0
"""Server-sent events, and work that is cancelled when its client disconnects."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from fastapi import Response
from starlette.types import Receive, Scope, Send

from specops.server.api_error import ApiError, shutting_down

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Created once: json.dumps would create an encoder for every chunk.
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


class ClientGone(Exception):
    """Error: the client closed the connection before the answer was complete."""


async def until_gone(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """Return the result of the work unless the client disconnects first.

    Raises:
        ClientGone: the client disconnected; the work has been cancelled.
    """

    async def wait_for_end() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task = asyncio.ensure_future(work)
    end = asyncio.ensure_future(wait_for_end())
    try:
        await asyncio.wait({task, end}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        end.cancel()
        await asyncio.gather(task, end, return_exceptions=True)
        del task, end  # an exception's traceback refers to this frame; avoid a cycle


def dumped(body: Any) -> bytes:
    """Return an answer, or a part of one, in JSON."""
    return _ENCODER.encode(body).encode()


def with_members(body: bytes, members: Mapping[str, bytes]) -> bytes:
    """Return a JSON object that is not empty, with further members; their values are JSON text."""
    return (
        b",".join([body[:-1], *(b'"%b":%b' % (k.encode(), v) for k, v in members.items())]) + b"}"
    )


def event(body: dict[str, Any], name: str = "") -> bytes:
    """Return one server-sent event in wire format, with its name if it has one."""
    named = b"event: %b\n" % name.encode() if name else b""
    return named + b"data: " + dumped(body) + b"\n\n"


class EventStream(Response):
    """Response that is a stream of server-sent events.

    Args:
        chunks: the events in wire format.
        close: function that is called when the stream ends for any reason.
        failed: returns the last events of a stream that ends with an error.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncIterator[bytes],
        close: Callable[[], None],
        *,
        failed: Callable[[ApiError], bytes],
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks
        self._close = close
        self._failed = failed
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the chunks as they become available."""
        try:
            await until_gone(self._send(send, scope["state"]["send_body"]), receive)
        except ClientGone:
            logger.debug("a client disconnected before the end of its stream")
        except asyncio.CancelledError:  # the time for draining is over
            if not self._has_begun:
                raise
            body = self._failed(shutting_down())
            await send({"type": "http.response.body", "body": body, "more_body": False})
        finally:
            self._close()

    async def _send(self, send: Send, send_body: Send) -> None:
        self._has_begun = True
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for chunk in self._chunks:
            await send_body({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
