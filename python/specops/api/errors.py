# SPDX-License-Identifier: Apache-2.0
"""Errors that a caller may want to handle; any other invalid request is a plain ValueError."""

from collections.abc import Sequence

from specops.api.outputs import RequestOutput
from specops.checkpoints.errors import ModelError as ModelError


class ContextOverflow(ValueError):
    """The prompt, or the prompt and max_tokens, do not fit the model's context."""


class QueueFull(RuntimeError):
    """The waiting queue holds `max_waiting` requests already."""


class EngineError(RuntimeError):
    """A step failed as a whole, for example on the device. Its requests have been removed.

    Attributes:
        outputs: the last output of each of these requests, with `finish_reason` "error".
    """

    def __init__(self, message: str, outputs: Sequence[RequestOutput] = ()) -> None:
        super().__init__(message)
        self.outputs = outputs


def described(error: BaseException) -> str:
    """Return an exception's message, after its type unless it is an op's or the engine's own."""
    if isinstance(error, (EngineError, ValueError)):
        return str(error)
    return f"{type(error).__name__}: {error}"
