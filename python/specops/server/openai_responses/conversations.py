# SPDX-License-Identifier: Apache-2.0
"""Conversations that a next response may go on with, kept in memory up to a bound."""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from specops.server.api_error import ApiError
from specops.server.protocol import AnyMessage

MAX_BYTES = 64 << 20


class _Kept(NamedTuple):
    """A conversation, and its bytes in JSON."""

    messages: tuple[AnyMessage, ...]
    size: int


class Conversations:
    """What clients have said up to each of their responses.

    A client sees its own alone. Beyond the bound the client that holds most of it loses the one
    that it has not used for longest.

    Args:
        max_bytes: of all conversations, each counted as a whole, in JSON.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._kept: dict[str, OrderedDict[str, _Kept]] = {}  # by client, then by response
        self._sizes: Counter[str] = Counter()  # of a client's

    def find(self, client: str, response_id: str) -> tuple[AnyMessage, ...]:
        """The conversation up to a response.

        Raises:
            ApiError: 400; it is not kept, or another client's.
        """
        mine = self._kept.get(client, OrderedDict())
        if response_id not in mine:
            raise ApiError(
                400,
                f"previous_response_id {response_id!r} is not kept: responses are, in memory, "
                f"unless store is false, up to {self._max_bytes >> 20} MiB of all clients' text; "
                "send the conversation as input",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        mine.move_to_end(response_id)
        return mine[response_id].messages

    def keep(self, client: str, response_id: str, messages: Sequence[AnyMessage]) -> None:
        """Keeps a conversation that ends with a response."""
        size = sum(len(one.model_dump_json()) for one in messages)
        mine = self._kept.setdefault(client, OrderedDict())
        mine[response_id] = _Kept(tuple(messages), size)
        self._sizes[client] += size
        while self._sizes.total() > self._max_bytes:
            self._drop_oldest(self._sizes.most_common(1)[0][0])

    def _drop_oldest(self, client: str) -> None:
        _, dropped = self._kept[client].popitem(last=False)
        self._sizes[client] -= dropped.size
        if not self._kept[client]:
            del self._kept[client], self._sizes[client]
