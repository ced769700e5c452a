# SPDX-License-Identifier: Apache-2.0
"""Errors in OpenAI's format, with their HTTP statuses."""

import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

_MAX_MESSAGE = 1000


class ApiError(Exception):
    """Refusal of a request, with the fields of OpenAI's error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        if len(message) > _MAX_MESSAGE:  # the message may quote the client's input
            message = message[:_MAX_MESSAGE] + "..."
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The response body in OpenAI's format."""
        error = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}

    def under_names(self, names: Mapping[str, str]) -> "ApiError":
        """Return this error with fields renamed for an API that has other names for them."""

        def renamed(word: re.Match[str]) -> str:
            # Replace "messages" only at the beginning, where it is a field's name, but max_tokens
            # anywhere.
            is_field = not word.start() or "_" in word[0]
            return names.get(word[0], word[0]) if is_field else word[0]

        return ApiError(
            self.status,
            re.sub(r"\w+", renamed, self.message),
            type=self.type,
            param=names.get(self.param or "", self.param),
            code=self.code,
            headers=self.headers,
        )


def bad_value(
    error: ValueError, model: type[BaseModel] | None = None, otherwise: str | None = None
) -> ApiError:
    """Return the HTTP 400 error for a parameter that the engine refused.

    Args:
        error: the engine's error; its message may begin with the parameter's name.
        model: the body's class; a name that is one of its fields becomes `param`.
        otherwise: value of `param` if the message does not begin with a field's name.
    """
    message = str(error)
    first_word = re.match(r"\w+", message)
    is_named = first_word is not None and model is not None and first_word[0] in model.model_fields
    param = first_word[0] if first_word is not None and is_named else otherwise
    return ApiError(400, message, param=param, code="invalid_value")


def too_long(message: str, param: str) -> ApiError:
    """Return the error for a prompt that, with its possible output, does not fit the context."""
    return ApiError(400, message, param=param, code="context_length_exceeded")


def shutting_down() -> ApiError:
    """Return the error for an answer that was incomplete when the time for draining was over."""
    return _unavailable("the server is shutting down", "shutting_down")


def restarting(message: str) -> ApiError:
    """Return the error for a request while the engine is restarting or does not respond."""
    return _unavailable(message, "engine_restarting")


def disconnected(message: str) -> ApiError:
    """Return the error for a request whose queue cannot be reached or was lost while it waited."""
    return _unavailable(message, "queue_unavailable")


def _unavailable(message: str, code: str) -> ApiError:
    return ApiError(
        503, message, type="service_unavailable", code=code, headers={"Retry-After": "1"}
    )


def not_read(message: str) -> ApiError:
    """Return the error that ends the stream of a client that does not read its output."""
    return ApiError(408, message, code="output_not_read")


def server_error(message: str) -> ApiError:
    """Return the error for a failure that the client did not cause."""
    return ApiError(500, message, type="server_error", code="internal_error")
