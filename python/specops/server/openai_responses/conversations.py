# SPDX-License-Identifier: Apache-2.0
"""Responses that may be asked for, or gone on with, kept in memory up to a bound."""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

from specops.server.protocol import AnyMessage
from specops.server.streaming import dumped

MAX_BYTES = 64 << 20


class Kept(NamedTuple):
    """A response.

    Attributes:
        response: as it was answered, in JSON.
        items: of the input of its request, in JSON.
        messages: the conversation that ends with it.
    """

    response: bytes
    items: bytes
    messages: tuple[AnyMessage, ...]

    @property
    def size(self) -> int:
        """Its bytes in JSON."""
        said = sum(len(one.model_dump_json()) for one in self.messages)
        return len(self.response) + len(self.items) + said


class Conversations:
    """What clients have said up to each of their responses.

    A client sees its own alone. Beyond the bound the client that holds most of it loses the one
    that it has not used for longest.

    Args:
        max_bytes: of all responses, each with its whole conversation, in JSON.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._kept: dict[str, OrderedDict[str, tuple[Kept, int]]] = {}  # by client, by response
        self._sizes: Counter[str] = Counter()  # of a client's

    @property
    def bound(self) -> str:
        """What is kept, for messages."""
        most = f"up to {self._max_bytes >> 20} MiB of all clients' text"
        return f"responses are, in memory, unless store is false, {most}"

    def find(self, client: str, response_id: str) -> Kept | None:
        """A response; None: it is not kept, or another client's."""
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
        """Keeps a response, as Kept describes it."""
        kept = Kept(dumped(response), dumped(items), tuple(messages))
        size = kept.size
        self._kept.setdefault(client, OrderedDict())[response["id"]] = kept, size
        self._sizes[client] += size
        while self._sizes.total() > self._max_bytes:
            most = self._sizes.most_common(1)[0][0]
            self.drop(most, next(iter(self._kept[most])))

    def drop(self, client: str, response_id: str) -> bool:
        """Forgets a response; returns whether it was kept."""
        mine = self._kept.get(client, OrderedDict())
        if response_id not in mine:
            return False
        _, size = mine.pop(response_id)
        self._sizes[client] -= size
        if not mine:
            del self._kept[client], self._sizes[client]
        return True
