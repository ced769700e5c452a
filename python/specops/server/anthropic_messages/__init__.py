# SPDX-License-Identifier: Apache-2.0
"""Anthropic's Messages API: a request becomes a chat, and its answer a list of blocks."""

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
    """The chat that a client asks for, and what makes a message of its answer.

    Raises:
        ApiError: there is no such chat.
    """
    return body.chat(), partial(MessagesAnswer, body)
