# SPDX-License-Identifier: Apache-2.0
"""Access checks: the Host header, origins of web pages, and proxies.

A web page of any origin may send requests to a host name of its own, and let that name resolve to
this machine (DNS rebinding): the browser then treats the answer as the page's own. The Host header
still contains that name.
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
from specops.server.requests import note


def default_hosts(host: str, *, has_keys: bool) -> list[str] | None:
    """Return the default of `Access.allowed_hosts`.

    Args:
        host: address that the server listens on.
        has_keys: whether the server requires an API key, which other origins' pages do not have.

    Returns:
        This machine's names, if the server listens on a loopback address and needs no key; else
        None, which allows any name.
    """
    if has_keys or not ipaddress.ip_address(host).is_loopback:
        return None
    return ["localhost", "*.localhost", "127.0.0.1", "::1", host]


@dataclass(frozen=True)
class Access:
    """Restrictions on requests besides API keys.

    Args:
        allowed_hosts: names and addresses that requests may have in their Host header, without a
            port; "*.example.com" allows all names below example.com, and "*" or None any name.
        allowed_origins: origins of pages that may send requests from a browser (CORS), or "*".
        forwarded_allow_ips: addresses and networks of proxies whose X-Forwarded-For header is
            trusted, or "*" to trust all; empty to trust none.

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
    """Check names of hosts.

    Raises:
        ValueError: one is invalid.
    """
    for host in hosts:
        if host != "*" and _name_of(host.removeprefix("*.")) != host.removeprefix("*.").lower():
            raise ValueError(
                "allowed_hosts must be names or addresses without a port, *.example.com for all "
                f"subdomains, or * for any host, got {host!r}"
            )


def _check_origins(origins: Sequence[str]) -> None:
    """Check origins of web pages.

    Raises:
        ValueError: one is invalid.
    """
    for origin in origins:
        scheme, _, host = origin.partition("://")
        if origin != "*" and not (scheme in ("http", "https") and host and "/" not in host):
            raise ValueError(
                f"allowed_origins must be origins such as https://example.com, or *, got {origin!r}"
            )


def _check_proxies(proxies: Sequence[str]) -> None:
    """Check addresses and networks of proxies.

    Raises:
        ValueError: one is neither an address nor a network.
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
    """ASGI middleware that refuses requests for hosts that are not allowed.

    Args:
        app: the application.
        hosts: allowed names and addresses; "*.example.com" allows all names below example.com, and
            "*" any name.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str]) -> None:
        self._app = app
        self._names = {host.lower() for host in hosts}
        self._endings = tuple(host[1:] for host in self._names if host.startswith("*."))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] == "http" and "*" not in self._names:
            host = HTTPConnection(scope).headers.get("host", "")
            name = _name_of(host)
            if name not in self._names and not name.endswith(self._endings):
                error = ApiError(
                    400,
                    f"the host {host!r} is not allowed; add it to the server's --allowed-hosts",
                    code="unknown_host",
                )
                note(scope, error)
                return await JSONResponse(error.body, error.status)(scope, receive, send)
        await self._app(scope, receive, send)


class Forwarded:
    """ASGI middleware that takes the client's address from the header of trusted proxies.

    Args:
        app: the application.
        proxies: addresses and networks of proxies whose X-Forwarded-For is trusted; "*" trusts all.
    """

    def __init__(self, app: ASGIApp, proxies: Sequence[str]) -> None:
        self._app = app
        self._proxied = ProxyHeadersMiddleware(self._serve, [*proxies])  # type: ignore[arg-type]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] == "http":
            scope.setdefault("state", {})["peer"] = scope["client"]
        await self._proxied(scope, receive, send)  # type: ignore[arg-type]

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            peer = scope["state"].pop("peer")
            try:
                ipaddress.ip_address(scope["client"][0])
            except (ValueError, TypeError):  # not an address, so unsafe to log
                scope["client"] = peer
        await self._app(scope, receive, send)


def _name_of(host: str) -> str:
    """Return the name or address in a Host header, in lower case, without a port; "" if invalid."""
    if host.count(":") > 1 and "[" not in host:  # an IPv6 address without brackets
        host = f"[{host}]"
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
