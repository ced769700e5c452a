# SPDX-License-Identifier: Apache-2.0
"""Anthropic's Messages API: requests are converted to chats, and answers to lists of blocks."""

from collections.abc import Callable
from functools import partial

from specops.server.anthropic_messages.answer import MessagesAnswer
from specops.server.anthropic_messages.errors import error_body
from specops.server.anthropic_messages.request import CountTokensRequest, MessagesRequest
from specops.server.protocol import ChatCompletionRequest

__all__ = ["CountTokensRequest", "MessagesRequest", "begin_message", "error_body"]


def begin_message(
    body: MessagesRequest, client: str
) -> tuple[ChatCompletionRequest, Callable[..., MessagesAnswer]]:
    """Return the chat that a body asks for, and the factory of its answer.

    Raises:
        ApiError: the body cannot be converted to a chat.
    """
    return body.chat(), partial(MessagesAnswer, body)
