# SPDX-License-Identifier: Apache-2.0
"""`kv_transfer_params`: one server computes a prompt's KV and another server decodes from it."""

import re
from collections.abc import Iterable
from typing import Any

from msgspec import structs

from specops.api.messages import End, KvTransfer
from specops.server.api_error import ApiError
from specops.server.protocol import ChatCompletionRequest, CompletionRequest

_FIELD = "kv_transfer_params"
_LEASE_NAME = re.compile(r"[0-9a-f]{32}")
_MOST_HOST = 255  # characters, as in DNS
_MOST_RANKS = 1024
# The roles that a server may have to accept a request with the field set.
_MAY = {"do_remote_decode": ("prefill", "mixed"), "do_remote_prefill": ("decode", "mixed")}


def kv_transfer_of(
    request: CompletionRequest | ChatCompletionRequest, num_prompts: int, role: str
) -> KvTransfer | None:
    """Return the KV transfer that a request asks for, or None if it asks for none.

    Args:
        request: the client's request.
        num_prompts: number of prompts in the request.
        role: this server's role; empty if it has none.

    Raises:
        ApiError: this server's role or this kind of request does not support KV transfer, or a
            field has a form that no server produces.
    """
    asked = request.kv_transfer_params
    message = None if asked is None else asked.as_message()
    if asked is None or message is None:
        return None
    name, host, ports = asked.remote_request_id, asked.remote_host, asked.remote_ports
    if name is not None and not _LEASE_NAME.fullmatch(name):
        raise _refused(
            "remote_request_id must have 32 hexadecimal digits, as the other server's answer has"
        )
    if host is not None and not 0 < len(host) <= _MOST_HOST:
        raise _refused(f"remote_host must have 1 to {_MOST_HOST} characters, got {len(host)}")
    if ports is not None and len(ports) > _MOST_RANKS:
        raise _refused(f"remote_ports must hold at most {_MOST_RANKS} ports, got {len(ports)}")
    for name, roles in _MAY.items():
        if getattr(message, name) and role not in roles:
            needed, got = " or ".join(roles), role or "none"
            raise _refused(f"{name} needs a server with --role {needed}, got {got}")
    if num_prompts > 1:
        raise _refused(f"must come with one prompt, got {num_prompts}")
    if message.do_remote_decode and request.stream:
        raise _refused("do_remote_decode must be absent where stream is true")
    return message


def kv_transfer_extras(ends: Iterable[End]) -> dict[str, Any]:
    """Return the answer's fields for KV pages that wait for another server; empty if none do."""
    told = [end.kv_transfer for end in ends if end.kv_transfer is not None]
    return {_FIELD: structs.asdict(told[0])} if told else {}


def _refused(message: str) -> ApiError:
    return ApiError(400, f"{_FIELD}: {message}", param=_FIELD, code="invalid_value")
