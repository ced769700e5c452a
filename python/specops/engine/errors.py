# SPDX-License-Identifier: Apache-2.0
"""The refusals a caller may want to tell apart; every other bad request is a plain ValueError."""

from collections.abc import Sequence

from specops.checkpoints.errors import ModelError as ModelError
from specops.engine.outputs import RequestOutput


class ContextOverflow(ValueError):
    """The prompt, or the prompt and max_tokens, do not fit the model's context."""


class QueueFull(RuntimeError):
    """As many requests are waiting as the engine is configured to hold."""


class EngineError(RuntimeError):
    """A step failed as a whole, such as on the device. The requests that ran in it are gone.

    Attributes:
        outputs: the last output of each of them, with `finish_reason` "error".
    """

    def __init__(self, message: str, outputs: Sequence[RequestOutput] = ()) -> None:
        super().__init__(message)
        self.outputs = outputs


def described(error: BaseException) -> str:
    """An exception in words: the sentences of ops and of the engine say all, others lack a name."""
    if isinstance(error, (EngineError, ValueError)):
        return str(error)
    return f"{type(error).__name__}: {error}"
