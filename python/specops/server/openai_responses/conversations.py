# SPDX-License-Identifier: Apache-2.0
"""Store of responses that clients may retrieve or continue, in memory and of bounded size."""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

from specops.server.protocol import AnyMessage
from specops.server.streaming import dumped

MAX_BYTES = 64 << 20


class StoredResponse(NamedTuple):
    """Stored response.

    Attributes:
        response: the response as it was answered, in JSON.
        items: input items of its request, in JSON.
        messages: the conversation that ends with the response.
    """

    response: bytes
    items: bytes
    messages: tuple[AnyMessage, ...]

    @property
    def size(self) -> int:
        """Size in bytes of JSON."""
        num_characters = sum(len(message.model_dump_json()) for message in self.messages)
        return len(self.response) + len(self.items) + num_characters


class Conversations:
    """Store of responses and the conversations that end with them.

    A client sees only its own responses. When the bound is exceeded, the client with the most bytes
    loses its least recently used response.

    Args:
        max_bytes: bound on the JSON bytes of all responses, each with its whole conversation.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._stored: dict[
            str, OrderedDict[str, tuple[StoredResponse, int]]
        ] = {}  # by client, then by response id
        self._sizes: Counter[str] = Counter()  # bytes by client

    @property
    def bound(self) -> str:
        """Description of which responses are stored, for error messages."""
        size = f"{self._max_bytes >> 20} MiB"
        return f"responses are stored unless store is false, the latest {size} of all clients"

    def find(self, client: str, response_id: str) -> StoredResponse | None:
        """Return a response; None if it is not stored or belongs to another client."""
        responses = self._stored.get(client, OrderedDict())
        if response_id not in responses:
            return None
        responses.move_to_end(response_id)
        return responses[response_id][0]

    def store(
        self,
        client: str,
        response: dict[str, Any],
        items: Sequence[dict[str, Any]],
        messages: Sequence[AnyMessage],
    ) -> None:
        """Store a response with its input items and conversation; evict others if necessary."""
        stored = StoredResponse(dumped(response), dumped(items), tuple(messages))
        size = stored.size
        self._stored.setdefault(client, OrderedDict())[response["id"]] = stored, size
        self._sizes[client] += size
        while self._sizes.total() > self._max_bytes:
            largest = self._sizes.most_common(1)[0][0]
            self.delete(largest, next(iter(self._stored[largest])))

    def delete(self, client: str, response_id: str) -> bool:
        """Delete a response; return whether it was stored."""
        responses = self._stored.get(client, OrderedDict())
        if response_id not in responses:
            return False
        _, size = responses.pop(response_id)
        self._sizes[client] -= size
        if not responses:
            del self._stored[client], self._sizes[client]
        return True
