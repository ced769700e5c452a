# SPDX-License-Identifier: Apache-2.0
"""Who asks: those who send one key are one client; without keys, those of one address are."""

import hmac
import ipaddress
from collections.abc import Sequence

from starlette.requests import HTTPConnection


class Clients:
    """Tells clients apart.

    Args:
        api_keys: that a client may send as bearer token, or as Anthropic's x-api-key; none: nobody
            needs one.
    """

    def __init__(self, api_keys: Sequence[str]) -> None:
        self._expected = [f"Bearer {key}".encode() for key in api_keys]

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


def network_of(host: str) -> str:
    """An address; of IPv6 its network, in which a client may choose addresses."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # a socket of this machine
        return "here"
    if address.version == 6:
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)
