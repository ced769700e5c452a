# SPDX-License-Identifier: Apache-2.0
"""Store of responses that clients may retrieve or continue, in memory and of bounded size."""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

from specops.server.protocol import AnyMessage
from specops.server.streaming import dumped

MAX_BYTES = 64 << 20


class Kept(NamedTuple):
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
        said = sum(len(one.model_dump_json()) for one in self.messages)
        return len(self.response) + len(self.items) + said


class Conversations:
    """Store of responses and the conversations that end with them.

    A client sees only its own responses. When the bound is exceeded, the client with the most bytes
    loses its least recently used response.

    Args:
        max_bytes: bound on the JSON bytes of all responses, each with its whole conversation.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._kept: dict[str, OrderedDict[str, tuple[Kept, int]]] = {}  # by client, by response
        self._sizes: Counter[str] = Counter()  # bytes by client

    @property
    def bound(self) -> str:
        """Description of the bound, for error messages."""
        most = f"up to {self._max_bytes >> 20} MiB of all clients' text"
        return f"responses are, in memory, unless store is false, {most}"

    def find(self, client: str, response_id: str) -> Kept | None:
        """Return a response; None if it is not stored or belongs to another client."""
        mine = self._kept.get(client, OrderedDict())
        if response_id not in mine:
            return None
        mine.move_to_end(response_id)
        return mine[response_id][0]

    def keep(
        self,
        client: str,
        response: dict[str, Any],
        items: Sequence[dict[str, Any]],
        messages: Sequence[AnyMessage],
    ) -> None:
        """Store a response with its input items and conversation; evict others if necessary."""
        kept = Kept(dumped(response), dumped(items), tuple(messages))
        size = kept.size
        self._kept.setdefault(client, OrderedDict())[response["id"]] = kept, size
        self._sizes[client] += size
        while self._sizes.total() > self._max_bytes:
            most = self._sizes.most_common(1)[0][0]
            self.drop(most, next(iter(self._kept[most])))

    def drop(self, client: str, response_id: str) -> bool:
        """Delete a response; return whether it was stored."""
        mine = self._kept.get(client, OrderedDict())
        if response_id not in mine:
            return False
        _, size = mine.pop(response_id)
        self._sizes[client] -= size
        if not mine:
            del self._kept[client], self._sizes[client]
        return True
