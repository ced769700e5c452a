# SPDX-License-Identifier: Apache-2.0
"""What the prefix cache has, told to routers that send a request where its prefix is.

The messages are vLLM's (`vllm.distributed.kv_events` of vLLM 0.32): each is a ZeroMQ message of
three parts, the topic, a number of eight bytes (big-endian, from 0, one more each time), and an
`EventBatch` in MessagePack, a list whose events are maps. Who has missed some sends the replay
endpoint the first number that it wants again; it gets those messages that are kept, and at last one
with the number -1.

A block is a page. Its hash stands for all tokens from the prompt's first on.
"""

import contextlib
import hashlib
import logging
import queue
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq
from msgspec import Struct

from specops.engine.engine import Engine
from specops.engine.memory.kv_cache import PagePool
from specops.service.messages import Batch
from specops.service.wire import KvEventSettings

logger = logging.getLogger(__name__)

_KEPT = 10_000  # messages, for those who have missed them
_UNSENT = 100_000  # messages that may wait for a slow subscriber; further ones it misses
_POLL_SECONDS = 0.1
_MOST_REPLAYS = 64  # between two messages, or strangers that ask for replays would stop them
_NUMBER_BYTES = 8
_END = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)


class BlockStored(Struct, tag=True):
    """Blocks can be found from now on.

    Attributes:
        block_hashes: of these, in order.
        parent_block_hash: of the block before the first one; None: there is none.
        token_ids: theirs.
        block_size: tokens of each.
        lora_id, lora_name: None.
        medium: "GPU", as vLLM says of the engine's own memory, whatever it is.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(Struct, tag=True):
    """Blocks cannot be found any more."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(Struct, tag=True):
    """There are no blocks: an engine begins."""


CacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(Struct, array_like=True, omit_defaults=True):
    """What has changed.

    Attributes:
        ts: when, in seconds since 1970.
        events: in order.
        data_parallel_rank: of the engine, among those behind one door.
    """

    ts: float
    events: list[CacheEvent]
    data_parallel_rank: int | None = None


class TellingPool(PagePool):
    """A page pool that notes which prefixes come and go.

    Attributes:
        events: since somebody has taken them.
    """

    def __init__(self, num_pages: int, page_size: int, *, enable_prefix_caching: bool) -> None:
        super().__init__(num_pages, page_size, enable_prefix_caching=enable_prefix_caching)
        self.events: list[CacheEvent] = [AllBlocksCleared()]
        self._hash_of: dict[object, int] = {}  # by prefix

    def register(
        self,
        page: int,
        parent: int | None,
        token_ids: Sequence[int],
        draft_key: bytes | None = None,
    ) -> int:
        """Does what `PagePool.register` does, and notes a prefix that had no page before."""
        known = super().register(page, parent, token_ids, draft_key)
        found = self._place_of.get(known)
        if found is not None and found[0] not in self._hash_of:
            prefix = found[0]
            before = self._hash_of.get(prefix.parent)
            own = self._hash_of[prefix] = _hash_of(before, token_ids)
            told = list(token_ids)
            self.events.append(BlockStored([own], before, told, self.page_size, None, "GPU", None))
        return known

    def _forget(self, page: int) -> None:
        prefix, _ = self._place_of[page]
        super()._forget(page)
        if not prefix.pages:
            self.events.append(BlockRemoved([self._hash_of.pop(prefix)], "GPU"))


def _hash_of(before: int | None, token_ids: Sequence[int]) -> int:
    """Of a prefix, from that of the one before it and its last block's tokens."""
    data = b"" if before is None else before.to_bytes(8, "big")
    data += array("i", token_ids).tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


def telling(kind: type[Engine]) -> type[Any]:
    """An engine of this kind whose pool notes what comes and goes."""
    return type(kind.__name__, (kind,), {"_pool_type": TellingPool})


class KvEvents:
    """Publishes what an engine's prefix cache has, behind the batches of its loop.

    Args:
        engine: made by `telling`.
        settings: where.
        data_parallel_rank: of the engine among those behind one door; None: it is the only one.
        deliver: called with every batch.

    Raises:
        ValueError: an endpoint cannot be bound.
    """

    def __init__(
        self,
        engine: Engine,
        settings: KvEventSettings,
        data_parallel_rank: int | None,
        deliver: Callable[[Batch], None],
    ) -> None:
        assert isinstance(engine._pool, TellingPool)
        self._pool, self._deliver = engine._pool, deliver
        self._topic = settings.topic.encode()
        self._data_parallel_rank = data_parallel_rank
        self._context = zmq.Context()
        self._publisher = self._bound(zmq.PUB, "kv_events_endpoint", settings.endpoint)
        self._replayer = self._bound(zmq.ROUTER, "kv_events_replay", settings.replay)
        self._queue: queue.SimpleQueue[EventBatch | None] = queue.SimpleQueue()
        self._has_warned = False  # of a replay request that is malformed
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="specops-kv-events", daemon=True)
        self._thread.start()

    def _bound(self, kind: int, name: str, endpoint: str) -> "zmq.Socket[bytes] | None":
        if not endpoint:
            return None
        found = self._context.socket(kind)
        found.linger = 0
        found.sndhwm = _UNSENT
        try:
            found.bind(endpoint)
        except zmq.ZMQError as error:
            raise ValueError(
                f"{name} must be an endpoint to bind, such as tcp://127.0.0.1:5557, got "
                f"{endpoint}: {error}"
            ) from None
        return found

    def __enter__(self) -> "KvEvents":
        return self

    def __exit__(self, *error: object) -> None:
        """Sends what is left, and ends."""
        self._queue.put(None)
        self._thread.join()
        self._context.destroy(linger=0)

    def send(self, batch: Batch) -> None:
        """Delivers what a step brought, and tells what it has done to the cache."""
        self._deliver(batch)
        events, self._pool.events = self._pool.events, []
        if events and not self._has_failed:
            self._queue.put(EventBatch(time.time(), events, self._data_parallel_rank))

    def _run(self) -> None:
        """Publish until the end. After a failure, events are dropped: a queue would only grow."""
        try:
            self._work()
        except Exception:
            self._has_failed = True
            logger.exception("events of the prefix cache are published no more")

    def _work(self) -> None:
        """Send from a thread of its own: sockets do not hold up the loop."""
        kept: deque[tuple[int, bytes]] = deque(maxlen=_KEPT)
        encode, number = msgspec.msgpack.Encoder().encode, 0
        while True:
            with contextlib.suppress(queue.Empty):
                batch = self._queue.get(timeout=_POLL_SECONDS)
                if batch is None:
                    return
                data = encode(batch)
                kept.append((number, data))
                assert self._publisher is not None
                self._publisher.send_multipart((self._topic, _number(number), data))
                number += 1
            for _ in range(_MOST_REPLAYS):
                if self._replayer is None or not self._replayer.poll(0):
                    break
                self._replay(self._replayer, kept)

    def _replay(self, socket: "zmq.Socket[bytes]", kept: "deque[tuple[int, bytes]]") -> None:
        """Answers one who has missed messages."""
        client, *_, asked = socket.recv_multipart()
        if len(asked) != _NUMBER_BYTES:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "kv_events_replay: a number must have 8 bytes, got %d; further such requests "
                    "are dropped silently",
                    len(asked),
                )
            return
        first = int.from_bytes(asked, "big")
        for number, data in kept:
            if number >= first:
                socket.send_multipart((client, b"", self._topic, _number(number), data))
        socket.send_multipart((client, b"", b"", _END, b""))


def _number(value: int) -> bytes:
    return value.to_bytes(_NUMBER_BYTES, "big")
