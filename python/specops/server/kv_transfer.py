# SPDX-License-Identifier: Apache-2.0
"""Fields by which a prompt's KV comes from elsewhere: `kv_transfer_params` and `session_id`.

With `kv_transfer_params`, one server computes a prompt's KV and another server decodes from it.
With `session_id`, the KV of a conversation is in a file between its turns.
"""

import re
from collections.abc import Iterable
from typing import Any

from msgspec import structs

from specops.api.messages import End, KvTransfer
from specops.server.api_error import ApiError
from specops.server.protocol import ChatCompletionRequest, CompletionRequest

_FIELD = "kv_transfer_params"
_SESSION_FIELD = "session_id"
_SESSION_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_LEASE_NAME = re.compile(r"[0-9a-f]{32}")
_MAX_HOST_LENGTH = 255  # characters, as in DNS
_MAX_RANKS = 1024
# The roles that a server may have to accept a request with the field set.
_ROLES = {"do_remote_decode": ("prefill", "mixed"), "do_remote_prefill": ("decode", "mixed")}


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
    params = request.kv_transfer_params
    message = None if params is None else params.as_message()
    if params is None or message is None:
        return None
    name = params.remote_request_id
    host = params.remote_host
    ports = params.remote_ports
    if name is not None and not _LEASE_NAME.fullmatch(name):
        raise _refused(
            "remote_request_id must have 32 hexadecimal digits, as in the other server's answer"
        )
    if host is not None and not 0 < len(host) <= _MAX_HOST_LENGTH:
        raise _refused(f"remote_host must have 1 to {_MAX_HOST_LENGTH} characters, got {len(host)}")
    if ports is not None and len(ports) > _MAX_RANKS:
        raise _refused(f"remote_ports must hold at most {_MAX_RANKS} ports, got {len(ports)}")
    for name, roles in _ROLES.items():
        if getattr(message, name) and role not in roles:
            needed = " or ".join(roles)
            raise _refused(f"{name} requires a server with --role {needed}, got {role or 'none'}")
    if num_prompts > 1:
        raise _refused(f"requires exactly one prompt, got {num_prompts}")
    if message.do_remote_decode and request.stream:
        raise _refused("do_remote_decode must be absent when stream is true")
    return message


def kv_transfer_extras(ends: Iterable[End]) -> dict[str, Any]:
    """Return the answer's fields for KV pages that wait for another server; empty if none do."""
    transfers = [end.kv_transfer for end in ends if end.kv_transfer is not None]
    return {_FIELD: structs.asdict(transfers[0])} if transfers else {}


def session_of(
    request: CompletionRequest | ChatCompletionRequest,
    num_prompts: int,
    has_sessions: bool,
    adapter: tuple[str, str] | None,
) -> str | None:
    """Return the name of the session that a request resumes and is saved to, or None.

    Args:
        request: the client's request.
        num_prompts: number of prompts in the request.
        has_sessions: whether this server has sessions.
        adapter: name and digest of the LoRA adapter of the request; None: the model alone.

    Raises:
        ApiError: this server or this kind of request has no sessions, or the name is not valid.
    """
    name = request.session_id
    if name is None:
        return None
    if not _SESSION_NAME.fullmatch(name):
        raise _refused(
            "must have 1 to 64 characters out of letters, digits, dashes and underscores",
            _SESSION_FIELD,
        )
    if not has_sessions:
        raise _refused("requires a server with --session-dir", _SESSION_FIELD)
    if adapter is not None:
        raise _refused(f"requires the model without the adapter {adapter[0]!r}", _SESSION_FIELD)
    if num_prompts > 1 or request.n > 1:
        raise _refused(
            f"requires exactly one prompt and n 1, got {num_prompts} and {request.n}",
            _SESSION_FIELD,
        )
    return name


def _refused(message: str, field: str = _FIELD) -> ApiError:
    return ApiError(400, f"{field}: {message}", param=field, code="invalid_value")
