# SPDX-License-Identifier: Apache-2.0
"""Clients: one per API key, or, on a server without keys, one per network address.

Clients with keys share neither pages of the prefix cache nor earlier responses. Clients that are
known only by their addresses do share them, because an address is no identity.
"""

import hashlib
import hmac
import ipaddress
import json
from collections.abc import Sequence
from typing import Literal

from starlette.requests import HTTPConnection


class Clients:
    """Identification of clients by API key or by address.

    Args:
        api_keys: keys that a client may send as bearer token, or as Anthropic's x-api-key; if
            empty, no key is needed.
        cache_scope: "key": clients of different keys share no cache; "server": all share one.

    Attributes:
        shares_caches: whether clients of different keys share caches.
    """

    def __init__(
        self, api_keys: Sequence[str], cache_scope: Literal["key", "server"] = "key"
    ) -> None:
        self._expected = [f"Bearer {key}".encode() for key in api_keys]
        self.shares_caches = cache_scope == "server" and len(set(api_keys)) > 1
        # A scope is saved with responses and sent to other servers, so it must not reveal the key
        # and must not depend on the order of the keys.
        self._scopes = {}
        if cache_scope == "key":
            for index, key in enumerate(api_keys):
                digest = hashlib.sha256(b"specops cache scope\0" + key.encode()).hexdigest()
                self._scopes[f"key-{index}"] = digest

    def identify(self, connection: HTTPConnection) -> tuple[str, bool]:
        """Return the client's name, and whether its requests are authorized."""
        headers = connection.headers
        sent = headers.get("authorization") or f"Bearer {headers.get('x-api-key', '')}"
        # Compare with every key, so that the time reveals nothing about the keys.
        same = [hmac.compare_digest(sent.encode(), expected) for expected in self._expected]
        if any(same):
            return f"key-{same.index(True)}", True
        host = connection.client.host if connection.client else ""
        return f"from {network_of(host)}", not same

    def cache_scope(self, name: str) -> str:
        """Return a client's cache scope; clients with the same scope, or with "", share caches."""
        return self._scopes.get(name, "")


def scoped_salt(scope: str, salt: str | None) -> str | None:
    """Return the salt by which the engine separates caches; None for the common cache.

    Args:
        scope: the client's, as returned by `Clients.cache_scope`.
        salt: the request's own `cache_salt`.
    """
    if not scope and salt is None:
        return None
    return hashlib.sha256(json.dumps([scope, salt]).encode()).hexdigest()[:32]


def network_of(host: str) -> str:
    """Return an IPv4 address, or the /64 network of an IPv6 address: a client may own all of it."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # not an IP address, for example a Unix socket
        return "here"
    if address.version == 6:
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)
