# SPDX-License-Identifier: Apache-2.0
"""By which names the server is asked, by whose pages, and on whose behalf.

A page of any origin may ask a name of its own, and let that name lead to this machine (DNS
rebinding): to the browser the answer is then the page's. The name still stands in the Host header.
"""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from fastapi.responses import JSONResponse
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from specops.server.api_error import ApiError


def default_hosts(host: str, *, has_keys: bool) -> list[str] | None:
    """The names of a server that says none itself.

    Args:
        host: the address that it listens on.
        has_keys: it answers only those who have a key, which pages of others have not.

    Returns:
        Those of this machine, where it is asked from this machine alone and without a key; None:
        any.
    """
    if has_keys or not ipaddress.ip_address(host).is_loopback:
        return None
    return ["localhost", "*.localhost", "127.0.0.1", "::1", host]


@dataclass(frozen=True)
class Access:
    """Who may ask a server, beside those who have its keys.

    Args:
        allowed_hosts: names and addresses that requests may have in their Host header, without a
            port; "*.example.com" is all names below one, "*" any. None: any.
        allowed_origins: origins of pages that may ask from a browser (CORS), or "*".
        forwarded_allow_ips: addresses and networks of proxies whose X-Forwarded-For says where a
            request comes from, or "*"; none: nobody's does.

    Raises:
        ValueError: a host, an origin or a proxy is not valid.
    """

    allowed_hosts: Sequence[str] | None = None
    allowed_origins: Sequence[str] = ()
    forwarded_allow_ips: Sequence[str] = ()

    def __post_init__(self) -> None:
        _check_hosts(self.allowed_hosts or ())
        _check_origins(self.allowed_origins)
        _check_proxies(self.forwarded_allow_ips)


def _check_hosts(hosts: Sequence[str]) -> None:
    """Refuses what is no name of a host.

    Raises:
        ValueError: one is not valid.
    """
    for host in hosts:
        if host != "*" and _name_of(host.removeprefix("*.")) != host.removeprefix("*.").lower():
            raise ValueError(
                "allowed_hosts must be names or addresses without a port, *.example.com for all "
                f"names below one, or * for any, got {host!r}"
            )


def _check_origins(origins: Sequence[str]) -> None:
    """Refuses what is no origin of a page.

    Raises:
        ValueError: one is not valid.
    """
    for origin in origins:
        scheme, _, host = origin.partition("://")
        if origin != "*" and not (scheme in ("http", "https") and host and "/" not in host):
            raise ValueError(
                f"allowed_origins must be such as https://example.com, or *, got {origin!r}"
            )


def _check_proxies(proxies: Sequence[str]) -> None:
    """Refuses what is neither an address nor a network.

    Raises:
        ValueError: one is neither.
    """
    for proxy in proxies:
        try:
            if proxy != "*":
                ipaddress.ip_network(proxy)
        except ValueError:
            raise ValueError(
                f"forwarded_allow_ips must be addresses, networks, or *, got {proxy!r}"
            ) from None


class AllowedHosts:
    """Middleware around an application: answers only requests that name one of some hosts.

    Args:
        app: the application.
        hosts: names and addresses; "*.example.com" is all names below one; "*" is any.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str]) -> None:
        self._app = app
        self._names = {host.lower() for host in hosts}
        self._endings = tuple(host[1:] for host in self._names if host.startswith("*."))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves a request."""
        if scope["type"] == "http" and "*" not in self._names:
            host = HTTPConnection(scope).headers.get("host", "")
            name = _name_of(host)
            if name not in self._names and not name.endswith(self._endings):
                error = ApiError(
                    400,
                    f"the host {host!r} is not allowed; the server's --allowed-hosts names those "
                    "that are",
                    code="unknown_host",
                )
                return await JSONResponse(error.body, error.status)(scope, receive, send)
        await self._app(scope, receive, send)


class Forwarded:
    """Middleware around an application: believes proxies that say for whom they ask.

    Args:
        app: the application.
        proxies: addresses and networks of those whose X-Forwarded-For counts; "*" is everybody.
    """

    def __init__(self, app: ASGIApp, proxies: Sequence[str]) -> None:
        self._app = app
        self._proxied = ProxyHeadersMiddleware(self._serve, [*proxies])  # type: ignore[arg-type]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves a request."""
        if scope["type"] == "http":
            scope.setdefault("state", {})["peer"] = scope["client"]
        await self._proxied(scope, receive, send)  # type: ignore[arg-type]

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            peer = scope["state"].pop("peer")
            try:
                ipaddress.ip_address(scope["client"][0])
            except (ValueError, TypeError):  # no address, and nobody's to write into the log
                scope["client"] = peer
        await self._app(scope, receive, send)


def _name_of(host: str) -> str:
    """The name or address in a Host header, in small letters, without a port; "" if none."""
    if host.count(":") > 1 and "[" not in host:  # an address of IPv6 on its own
        host = f"[{host}]"
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
