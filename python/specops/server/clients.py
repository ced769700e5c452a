# SPDX-License-Identifier: Apache-2.0
"""Clients: requests with one API key, or, on a server without keys, those from one address.

Clients with keys share neither pages of the prefix cache nor earlier responses. Addresses do share
them: an address is no identity.
"""

import hashlib
import hmac
import ipaddress
import json
from collections.abc import Sequence
from typing import Literal

from starlette.requests import HTTPConnection


class Clients:
    """Tells clients apart.

    Args:
        api_keys: that a client may send as bearer token, or as Anthropic's x-api-key; none: nobody
            needs one.
        cache_scope: "key", clients of different keys share no cache; "server", all share one.

    Attributes:
        shares_caches: whether clients of different keys share caches.
    """

    def __init__(
        self, api_keys: Sequence[str], cache_scope: Literal["key", "server"] = "key"
    ) -> None:
        self._expected = [f"Bearer {key}".encode() for key in api_keys]
        self.shares_caches = cache_scope == "server" and len(set(api_keys)) > 1
        # Saved with responses and sent to other servers: the key must not follow from it, and it
        # must not depend on the order of the keys.
        self._scopes = {}
        if cache_scope == "key":
            for index, key in enumerate(api_keys):
                digest = hashlib.sha256(b"specops cache scope\0" + key.encode()).hexdigest()
                self._scopes[f"key-{index}"] = digest

    def identify(self, connection: HTTPConnection) -> tuple[str, bool]:
        """The client's name, and whether it may ask."""
        headers = connection.headers
        sent = headers.get("authorization") or f"Bearer {headers.get('x-api-key', '')}"
        # Every key is compared, so that the time says nothing about which one was close.
        same = [hmac.compare_digest(sent.encode(), one) for one in self._expected]
        if any(same):
            return f"key-{same.index(True)}", True
        host = connection.client.host if connection.client else ""
        return f"from {network_of(host)}", not same

    def cache_scope(self, name: str) -> str:
        """Return what a client's requests share caches by; empty: with all without a scope."""
        return self._scopes.get(name, "")


def scoped_salt(scope: str, salt: str | None) -> str | None:
    """Return the salt that the engine separates caches by.

    Args:
        scope: of the client, as `Clients.cache_scope` has it.
        salt: the request's own `cache_salt`.
    """
    if not scope and salt is None:
        return None
    return hashlib.sha256(json.dumps([scope, salt]).encode()).hexdigest()[:32]


def network_of(host: str) -> str:
    """An address; of IPv6 its network, in which a client may choose addresses."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # a socket of this machine
        return "here"
    if address.version == 6:
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)
