# SPDX-License-Identifier: Apache-2.0
"""OpenAI's Responses API: requests are converted to chats, and answers to lists of items."""

from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.datastructures import QueryParams

from specops.server.api_error import ApiError
from specops.server.openai_responses.answer import ResponsesAnswer
from specops.server.openai_responses.conversations import Conversations, StoredResponse
from specops.server.openai_responses.request import (
    ResponsesRequest,
    SentBack,
    messages_of,
)
from specops.server.openai_responses.retrieval import (
    OF_A_RESPONSE,
    OF_ITEMS,
    listed,
    page_of,
    read_query,
)
from specops.server.protocol import ChatCompletionRequest

__all__ = ["OF_A_RESPONSE", "OF_ITEMS", "Responses", "ResponsesRequest"]


class Responses:
    """Conversion of requests to chats, and the store of earlier responses."""

    def __init__(self) -> None:
        self._conversations = Conversations()

    def begin(
        self, body: ResponsesRequest, client: str
    ) -> tuple[ChatCompletionRequest, Callable[..., ResponsesAnswer]]:
        """Return the chat that a body asks for, and the factory of its answer.

        Raises:
            ApiError: the body cannot be converted to a chat, or its previous response is unknown.
        """
        previous = body.previous_response_id
        stored = None if previous is None else self._conversations.find(client, previous)
        if previous is not None and stored is None:
            raise ApiError(
                400,
                f"previous_response_id {previous!r} is not stored: {self._conversations.bound}; "
                "send the conversation as input",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        messages = body.messages(stored.messages if stored else ())

        def store(response: dict[str, Any], output: list[SentBack]) -> None:
            items = [*listed(body.items, response["id"])]
            conversation = [*messages, *messages_of(output)]
            self._conversations.store(client, response, items, conversation)

        return body.as_chat(messages), partial(ResponsesAnswer, body, store)

    def retrieve(self, client: str, response_id: str, query: QueryParams) -> bytes:
        """Return a stored response in JSON, as it was answered.

        Raises:
            ApiError: 404; the response is not stored. 400; the query is invalid.
        """
        read_query(query, OF_A_RESPONSE)
        return self._find(client, response_id).response

    def input_items(self, client: str, response_id: str, query: QueryParams) -> dict[str, Any]:
        """Return a page of the input items of a stored response's own request.

        Raises:
            ApiError: 404; the response is not stored. 400; the page does not exist.
        """
        values = read_query(query, OF_ITEMS)
        return page_of(self._find(client, response_id).items, values)

    def delete(self, client: str, response_id: str) -> dict[str, Any]:
        """Delete a stored response, and return the API's answer to that.

        Raises:
            ApiError: 404; the response is not stored.
        """
        if not self._conversations.delete(client, response_id):
            raise self._absent(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    def _find(self, client: str, response_id: str) -> StoredResponse:
        stored = self._conversations.find(client, response_id)
        if stored is None:
            raise self._absent(response_id)
        return stored

    def _absent(self, response_id: str) -> ApiError:
        message = f"response_id {response_id!r} is not stored: {self._conversations.bound}"
        return ApiError(404, message, param="response_id", code="response_not_found")
