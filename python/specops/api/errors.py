# SPDX-License-Identifier: Apache-2.0
"""Errors that a caller may want to handle; any other invalid request is a plain ValueError."""

from collections.abc import Sequence

from specops.api.outputs import RequestOutput
from specops.checkpoints.errors import ModelError as ModelError


class ContextOverflow(ValueError):
    """Error: the prompt, or the prompt and max_tokens, do not fit the model's context."""


class UnknownAdapter(ValueError):
    """Error: no LoRA adapter with this name is loaded."""


class QueueFull(RuntimeError):
    """Error: the waiting queue already holds `max_waiting` requests."""


class EngineError(RuntimeError):
    """Error: a whole step failed, for example on the device. Its requests have been removed.

    Attributes:
        outputs: the last output of each of these requests, with `finish_reason` "error".
    """

    def __init__(self, message: str, outputs: Sequence[RequestOutput] = ()) -> None:
        super().__init__(message)
        self.outputs = outputs


def described(error: BaseException) -> str:
    """Return an exception's message, with its type in front unless specops raised it."""
    if isinstance(error, (EngineError, ValueError)):
        return str(error)
    return f"{type(error).__name__}: {error}"
