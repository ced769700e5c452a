# SPDX-License-Identifier: Apache-2.0
"""OpenAI's Responses API: a request becomes a chat, and its answer a list of items."""

from collections.abc import Callable
from functools import partial

from specops.server.openai_responses.answer import ResponsesAnswer
from specops.server.openai_responses.conversations import Conversations
from specops.server.openai_responses.request import (
    FunctionCall,
    InputMessage,
    ResponsesRequest,
    messages_of,
)
from specops.server.protocol import ChatCompletionRequest

__all__ = ["Responses", "ResponsesRequest"]


class Responses:
    """What requests become, and the conversations that they may go on with."""

    def __init__(self) -> None:
        self._conversations = Conversations()

    def begin(
        self, body: ResponsesRequest, client: str
    ) -> tuple[ChatCompletionRequest, Callable[..., ResponsesAnswer]]:
        """The chat that a client asks for, and what makes a response of its answer.

        Raises:
            ApiError: there is no such chat.
        """
        previous = body.previous_response_id
        earlier = () if previous is None else self._conversations.find(client, previous)
        messages = body.messages(earlier)

        def keep(response_id: str, items: list[InputMessage | FunctionCall]) -> None:
            whole = [*messages, *messages_of(items)]
            self._conversations.keep(client, response_id, whole)

        return body.as_chat(messages), partial(ResponsesAnswer, body, keep)
