# SPDX-License-Identifier: Apache-2.0
"""Counts answers by route and status, so that what was refused shows, too."""

from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class RequestCounts:
    """Middleware around an application.

    Args:
        app: the application.
        count: takes the method, the route (such as "/v1/models/{name:path}") and the status of an
            answer that begins; "any" and "none" where no route has the path.
    """

    def __init__(self, app: ASGIApp, count: Callable[[str, str, int], None]) -> None:
        self._app, self._count = app, count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves a request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                # A path or a method that clients made up would be a series of its own.
                route = getattr(scope.get("route"), "path", "none")
                method = scope["method"] if route != "none" else "any"
                self._count(method, route, message["status"])
            await send(message)

        await self._app(scope, receive, counted)
