# SPDX-License-Identifier: Apache-2.0
"""Counting of answers by route and status, including refused requests."""

from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class RequestCounts:
    """ASGI middleware that counts answers.

    Args:
        app: the application.
        count: called with the method, the route (such as "/v1/models/{name:path}") and the status
            of an answer that begins; method "any" and route "none" if no route has the path.
    """

    def __init__(self, app: ASGIApp, count: Callable[[str, str, int], None]) -> None:
        self._app = app
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                # Unknown paths and methods share one label, so that clients cannot create time
                # series.
                route = getattr(scope.get("route"), "path", "none")
                method = scope["method"] if route != "none" else "any"
                self._count(method, route, message["status"])
            await send(message)

        await self._app(scope, receive, counted)
