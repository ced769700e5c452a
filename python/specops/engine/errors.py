# SPDX-License-Identifier: Apache-2.0
"""The refusals a caller may want to tell apart; every other bad request is a plain ValueError."""


class ContextOverflow(ValueError):
    """The prompt, or the prompt and max_tokens, do not fit the model's context."""


class QueueFull(RuntimeError):
    """As many requests are waiting as the engine is configured to hold."""


class ModelError(ValueError):
    """The model directory is missing, incomplete, or of a kind this engine does not run."""


class EngineError(RuntimeError):
    """A step failed on the device. The requests that ran in it cannot go on."""
