# SPDX-License-Identifier: Apache-2.0
"""Errors as OpenAI spells them, with the status that they travel with."""

import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

_MAX_MESSAGE = 1000


class ApiError(Exception):
    """A refusal, with what OpenAI's shape has of it."""

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
        if len(message) > _MAX_MESSAGE:  # it may quote what the client sent
            message = message[:_MAX_MESSAGE] + "..."
        self.status, self.message, self.type = status, message, type
        self.param, self.code = param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The refusal in OpenAI's shape."""
        error = {"message": self.message, "type": self.type, "param": self.param}
        return {"error": {**error, "code": self.code}}

    def under_names(self, names: Mapping[str, str]) -> "ApiError":
        """The same refusal of an API where fields have other names."""

        def renamed(found: re.Match[str]) -> str:
            # "messages" is a field at the beginning alone, and max_tokens anywhere.
            is_field = not found.start() or "_" in found[0]
            return names.get(found[0], found[0]) if is_field else found[0]

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
    """A value the engine refuses; its messages begin with the parameter's name, or with no name."""
    message = str(error)
    found = re.match(r"\w+", message)
    is_named = found is not None and model is not None and found[0] in model.model_fields
    param = found[0] if found is not None and is_named else otherwise
    return ApiError(400, message, param=param, code="invalid_value")


def too_long(message: str, param: str) -> ApiError:
    """A prompt, or a prompt and what may follow it, does not fit the context."""
    return ApiError(400, message, param=param, code="context_length_exceeded")


def shutting_down() -> ApiError:
    """Return the error of an answer that was not complete when the time for draining was over."""
    return _unavailable("the server is shutting down", "shutting_down")


def restarting(message: str) -> ApiError:
    """Return the error of a request that finds no engine, or one that does not respond."""
    return _unavailable(message, "engine_restarting")


def disconnected(message: str) -> ApiError:
    """Return the error of a request that found no queue, or waited in one that is away."""
    return _unavailable(message, "queue_unavailable")


def _unavailable(message: str, code: str) -> ApiError:
    return ApiError(
        503, message, type="service_unavailable", code=code, headers={"Retry-After": "1"}
    )


def not_read(message: str) -> ApiError:
    """Return the error of a client that does not read what it has asked for."""
    return ApiError(408, message, code="output_not_read")


def server_error(message: str) -> ApiError:
    """Something failed that is not the client's fault."""
    return ApiError(500, message, type="server_error", code="internal_error")
