# SPDX-License-Identifier: Apache-2.0
"""Request ids: every answer has x-request-id, either the client's own or a new one."""

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HEADER = "x-request-id"
# Ids that are safe in a header and in a log line; another id is replaced, not refused.
_SAFE = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


class RequestIds:
    """ASGI middleware that adds x-request-id to every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, and add the header when the answer begins."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        sent = Headers(scope=scope).get(_HEADER, "")
        name = sent if _SAFE.fullmatch(sent) else f"req-{uuid.uuid4().hex}"

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[_HEADER] = name
            await send(message)

        await self._app(scope, receive, named)
