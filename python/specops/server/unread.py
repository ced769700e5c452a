# SPDX-License-Identifier: Apache-2.0
"""Accounting of output that clients have not read yet, in bytes per client."""

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Protocol

from specops.api.messages import Output

# Estimated memory of the objects that an output consists of: the output, a token with its
# log-probability, an alternative of a token, and a draft.
_OUTPUT_BYTES = 500
_TOKEN_BYTES = 250
_ALTERNATIVE_BYTES = 120
_DRAFT_BYTES = 150
_PROMPT_ALTERNATIVE_BYTES = 8  # the log-probabilities of a prompt are arrays


class Stream(Hashable, Protocol):
    """Stream of outputs of one client."""

    client: str


class Unread:
    """Counters of the bytes of output that wait for each client. Use it on the event loop only.

    Args:
        max_bytes: maximum number of bytes that may wait for one client.
        end: ends a stream. It is called when more than `max_bytes` bytes wait for a client, with
            the stream of that client for which the most bytes wait.

    Attributes:
        total: bytes that wait for all clients. Any thread may read it.
    """

    def __init__(self, max_bytes: int, end: Callable[[Stream], None]) -> None:
        self.max_bytes = max_bytes
        self.total = 0
        self._end = end
        self._totals: Counter[str] = Counter()
        self._streams: dict[str, Counter[Stream]] = {}  # by client

    def of(self, client: str) -> int:
        """Return the number of bytes that a client has not read yet."""
        return self._totals[client]

    def add(self, stream: Stream, size: int) -> None:
        """Add to a stream's unsent bytes; `size` is negative for sent bytes."""
        client = stream.client
        streams = self._streams.setdefault(client, Counter())
        streams[stream] += size
        if not streams[stream]:
            self._forget(stream)
        self.add_body(client, size)
        if size > 0 and self._totals[client] > self.max_bytes:
            self._end(max(streams, key=streams.__getitem__))

    def add_body(self, client: str, size: int) -> None:
        """Add to a client's unsent bytes of complete answers; `size` is negative for sent bytes."""
        self.total += size
        self._totals[client] += size
        if not self._totals[client]:
            del self._totals[client]

    def drop(self, stream: Stream) -> None:
        """Remove a stream that has ended, with all its unsent bytes."""
        size = self._streams.get(stream.client, Counter())[stream]
        if size:
            self._forget(stream)
            self.add_body(stream.client, -size)

    def _forget(self, stream: Stream) -> None:
        streams = self._streams[stream.client]
        del streams[stream]
        if not streams:
            del self._streams[stream.client]


def size_of(output: Output) -> int:
    """Estimate the bytes of memory that an output takes."""
    alternatives = sum(len(token.alternatives) for token in output.logprobs)
    size = _OUTPUT_BYTES + 4 * len(output.text) + _ALTERNATIVE_BYTES * alternatives
    size += _TOKEN_BYTES * len(output.token_ids)
    if output.drafts is not None:
        size += _DRAFT_BYTES * len(output.drafts.token_ids)
    if output.prompt_logprobs is not None and len(output.prompt_logprobs) > 1:
        last = output.prompt_logprobs[len(output.prompt_logprobs) - 1]
        width = 2 + (len(last.alternatives) if last is not None else 0)
        size += _PROMPT_ALTERNATIVE_BYTES * width * len(output.prompt_logprobs)
    return size
