# SPDX-License-Identifier: Apache-2.0
"""Errors in the format of Anthropic's API."""

from typing import Any

from specops.server.api_error import ApiError

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


def error_body(error: ApiError) -> dict[str, Any]:
    """Return an error's body in Anthropic's format; only the message names the field."""
    type_ = _TYPES.get(error.status, "invalid_request_error")
    return {"type": "error", "error": {"type": type_, "message": error.message}}
