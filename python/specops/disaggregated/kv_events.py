# SPDX-License-Identifier: Apache-2.0
"""Contents of the prefix cache, published to routers that send a request to its cached prefix.

The messages are vLLM's (`vllm.distributed.kv_events` of vLLM 0.32): each is a ZeroMQ message of
three parts, the topic, a sequence number of eight bytes (big-endian, from 0, increasing by one),
and an `EventBatch` in MessagePack, a list that holds events as maps. A subscriber that has missed
messages sends the replay endpoint the first number it needs; it receives the retained messages from
there on, and finally one with the number -1.

A client that does not read costs a limited number of bytes: messages have at most 32 events, and
therefore less than 16 KiB, and a limited number of them is queued for each client.

A block is a page. Its hash covers all tokens from the prompt's first on, and the cache salt of its
request.
"""

import contextlib
import hashlib
import logging
import os
import queue
import socket
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import zmq
from msgspec import Struct
from zmq.utils.monitor import parse_monitor_message

from specops.api.messages import Batch
from specops.engine.memory.kv_cache import Prefix
from specops.service.wire import KvEventSettings

logger = logging.getLogger(__name__)

_MOST_EVENTS = 32  # per message
_MOST_KEPT = 10_000  # messages that are retained for replays
_MOST_KEPT_BYTES = 64 << 20
_UNSENT = 2048  # messages queued for a slow subscriber; it misses further ones
_UNSENT_REPLAYED = 64  # messages queued for a client of the replay endpoint
_MOST_REPLAYS = 32  # clients with an unfinished replay
_MOST_REQUESTS = 100  # requests that are read between two messages
_STALLED_SECONDS = 10.0  # without a message sent, after which a replay ends
_MOST_FRAME = 1024  # bytes of a part of a client's message; a longer one ends its connection
_HANDSHAKE_SECONDS = 5  # time limit for a connection to become a client
_MOST_CLIENTS = 64  # per endpoint
_POLL_SECONDS = 0.1
_REPLAY_SECONDS = 0.002  # between two parts of a replay
_HANDSHAKE_FAILED = {
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
}
_NUMBER_BYTES = 8
_END = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)


class BlockStored(Struct, tag=True):
    """Blocks were added to the prefix cache.

    Attributes:
        block_hashes: hashes of the blocks, in order.
        parent_block_hash: hash of the block before the first one; None: it has no parent.
        token_ids: tokens of the blocks.
        block_size: tokens per block.
        lora_id, lora_name: None.
        medium: "GPU", vLLM's name for the engine's own memory of any kind.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(Struct, tag=True):
    """Blocks were removed from the prefix cache."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(Struct, tag=True):
    """The cache is empty: an engine starts."""


CacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(Struct, array_like=True, omit_defaults=True):
    """Changes of the prefix cache.

    Attributes:
        ts: time of the changes, in seconds since 1970.
        events: changes, in order.
        data_parallel_rank: rank of the engine, among those behind one frontend.
    """

    ts: float
    events: list[CacheEvent]
    data_parallel_rank: int | None = None


class PrefixEvents:
    """Listener of a page pool that records which prefixes are stored and removed.

    Attributes:
        events: changes since the list was last taken.
    """

    def __init__(self) -> None:
        self.events: list[CacheEvent] = [AllBlocksCleared()]
        self._hash_of: dict[Prefix, int] = {}

    def stored(self, prefix: Prefix, token_ids: Sequence[int], salt: str | None) -> None:
        """Record a new prefix."""
        before = None if prefix.parent is None else self._hash_of.get(prefix.parent)
        own = self._hash_of[prefix] = _hash_of(before, token_ids, salt)
        tokens = list(token_ids)
        self.events.append(BlockStored([own], before, tokens, len(tokens), None, "GPU", None))

    def removed(self, prefix: Prefix) -> None:
        """Record the end of a prefix."""
        self.events.append(BlockRemoved([self._hash_of.pop(prefix)], "GPU"))


def _hash_of(before: int | None, token_ids: Sequence[int], salt: str | None) -> int:
    """Return the hash of a prefix from its parent's hash and the tokens of its last block.

    The salt is part of the first block's hash, and so of all that follow, as in vLLM.
    """
    first = b"" if salt is None else hashlib.sha256(salt.encode()).digest()
    data = first if before is None else before.to_bytes(8, "big")
    data += array("i", token_ids).tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


class KvEvents:
    """Publisher of the prefix cache's changes, after each batch of the engine's loop.

    Args:
        prefixes: listener of the engine's page pool.
        settings: endpoints and topic.
        data_parallel_rank: rank of the engine among those behind one frontend; None: the only one.
        deliver: called with every batch.

    Raises:
        ValueError: an endpoint cannot be bound.
    """

    def __init__(
        self,
        prefixes: PrefixEvents,
        settings: KvEventSettings,
        data_parallel_rank: int | None,
        deliver: Callable[[Batch], None],
    ) -> None:
        self._prefixes, self._deliver = prefixes, deliver
        self._topic = settings.topic.encode()
        self._data_parallel_rank = data_parallel_rank
        self._context = zmq.Context()
        self._gate = _Gate(self._context)
        self._publisher = self._bound(zmq.PUB, "kv_events_endpoint", settings.endpoint)
        self._replayer = self._bound(zmq.ROUTER, "kv_events_replay", settings.replay)
        self._queue: queue.SimpleQueue[EventBatch | None] = queue.SimpleQueue()
        self._has_warned = False  # about a malformed replay request
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="specops-kv-events", daemon=True)
        self._thread.start()

    def _bound(self, kind: int, name: str, endpoint: str) -> "zmq.Socket[bytes] | None":
        if not endpoint:
            return None
        found = self._context.socket(kind)
        found.linger = 0
        found.sndhwm = _UNSENT if kind == zmq.PUB else _UNSENT_REPLAYED
        found.maxmsgsize = _MOST_FRAME  # limits incoming messages
        found.handshake_ivl = 1000 * _HANDSHAKE_SECONDS
        self._gate.watch(found, name)
        if kind == zmq.ROUTER:
            found.router_mandatory = 1  # raises if a client has too many unread messages
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
        """Send the remaining events, and stop."""
        self._queue.put(None)
        self._thread.join()
        self._context.destroy(linger=0)

    def send(self, batch: Batch) -> None:
        """Deliver the batch of a step, and queue its changes of the cache."""
        self._deliver(batch)
        events, self._prefixes.events = self._prefixes.events, []
        if self._has_failed:
            return
        now = time.time()
        for begin in range(0, len(events), _MOST_EVENTS):
            part = events[begin : begin + _MOST_EVENTS]
            self._queue.put(EventBatch(now, part, self._data_parallel_rank))

    def _run(self) -> None:
        """Publish until the end. After a failure, events are dropped: a queue would only grow."""
        try:
            self._work()
        except Exception:
            self._has_failed = True
            logger.exception("events of the prefix cache are published no more")

    def _work(self) -> None:
        """Send from a separate thread, so that sockets do not delay the loop."""
        kept, encode = _Kept(), msgspec.msgpack.Encoder().encode
        replays: dict[bytes, _Replay] = {}  # by client
        while True:
            self._gate.answer()
            with contextlib.suppress(queue.Empty):
                batch = self._queue.get(timeout=_REPLAY_SECONDS if replays else _POLL_SECONDS)
                if batch is None:
                    return
                data = encode(batch)
                assert self._publisher is not None
                self._publisher.send_multipart((self._topic, _number(kept.add(data)), data))
            if self._replayer is not None:
                self._read_requests(self._replayer, replays)
                for client, replay in list(replays.items()):
                    if not self._send_on(self._replayer, client, replay, kept):
                        del replays[client]

    def _read_requests(
        self, replayer: "zmq.Socket[bytes]", replays: "dict[bytes, _Replay]"
    ) -> None:
        """Begin the replays that clients request. A client has one replay: the latest."""
        for _ in range(_MOST_REQUESTS):
            if not replayer.poll(0):
                return
            client, *_, asked = replayer.recv_multipart()
            if len(asked) != _NUMBER_BYTES:
                logger.warning("kv_events_replay: a number must have 8 bytes, got %d", len(asked))
            elif client in replays or len(replays) < _MOST_REPLAYS:
                replays[client] = _Replay(int.from_bytes(asked, "big"), time.monotonic())
            else:
                logger.warning("kv_events_replay: %d replays run; one is refused", len(replays))

    def _send_on(
        self, replayer: "zmq.Socket[bytes]", client: bytes, replay: "_Replay", kept: "_Kept"
    ) -> bool:
        """Send as much of a replay as the client's queue takes; return False if it is over."""
        now = time.monotonic()
        try:
            replay.next = max(replay.next, kept.first)
            while replay.next < kept.end:
                number = _number(replay.next)
                parts = (client, b"", self._topic, number, kept.data[replay.next])
                replayer.send_multipart(parts, zmq.NOBLOCK)
                replay.next, replay.moved_at = replay.next + 1, now
            replayer.send_multipart((client, b"", b"", _END, b""), zmq.NOBLOCK)
        except zmq.Again:
            return now - replay.moved_at < _STALLED_SECONDS
        except zmq.ZMQError:  # the client has gone
            return False
        return False


class _Gate:
    """Limiter of an endpoint's clients, by ZeroMQ's authentication protocol (ZAP, RFC 27).

    A host may have half of the clients of an endpoint that other hosts do not have, rounded up. A
    refused client tries again after the time limit of its handshake.

    Args:
        context: context of the endpoints' sockets.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self._requests = context.socket(zmq.REP)
        self._requests.bind("inproc://zeromq.zap.01")
        self._clients: dict[bytes, _Clients] = {}  # by endpoint

    def watch(self, endpoint: "zmq.Socket[bytes]", name: str) -> None:
        """Limit the clients of an endpoint, which is not bound yet."""
        endpoint.zap_domain = name.encode()
        self._clients[name.encode()] = _Clients(endpoint.get_monitor_socket())

    def answer(self) -> None:
        """Admit or refuse the clients that have connected."""
        for clients in self._clients.values():
            clients.count()
        for _ in range(_MOST_REQUESTS):
            if not self._requests.poll(0):
                return
            version, request, name, host, *_ = self._requests.recv_multipart()
            clients = self._clients[name]
            clients.count()  # includes this connection
            is_admitted = clients.admits(host.decode())
            answer = (b"200", b"") if is_admitted else (b"300", b"too many clients")
            self._requests.send_multipart((version, request, *answer, b"", b""))


class _Clients:
    """Clients of an endpoint.

    Args:
        monitor: reports events of the endpoint's connections. It does not report which of them were
            admitted, but it reports a failed handshake right before the disconnection.
    """

    def __init__(self, monitor: "zmq.Socket[bytes]") -> None:
        self._monitor = monitor
        self._host_of: dict[int, str] = {}  # by file descriptor, of all connections
        self._admitted: Counter[str] = Counter()  # by host
        self._is_handshake_over = True  # of the next connection to end

    def count(self) -> None:
        """Process the connections that have begun or ended."""
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())
            kind, file = event["event"], event["value"]
            if kind == zmq.EVENT_ACCEPTED:
                self._host_of[file] = _peer_of(file)
            elif kind == zmq.EVENT_DISCONNECTED:
                host = self._host_of.pop(file, "")
                self._admitted[host] -= self._is_handshake_over
            self._is_handshake_over = kind not in _HANDSHAKE_FAILED
        connected = Counter(self._host_of.values())
        self._admitted &= connected  # a client may disconnect between admission and handshake

    def admits(self, host: str) -> bool:
        """Return whether a host may have one more client, and count it if so."""
        host = host if host in self._host_of.values() else ""  # a connection without an address
        others = self._admitted.total() - self._admitted[host]
        if self._admitted[host] >= (_MOST_CLIENTS - others + 1) // 2:
            return False
        self._admitted[host] += 1
        return True


def _peer_of(file: int) -> str:
    """Return the address of a connection's other end; "" if it has none, or is closed."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(file)) as connection:
        if connection.family != socket.AF_UNIX:
            return str(connection.getpeername()[0])
    return ""


@dataclass
class _Replay:
    """Messages that a client has requested again.

    Attributes:
        next: number of the next message.
        moved_at: time when a message was last sent.
    """

    next: int
    moved_at: float


class _Kept:
    """The latest messages, retained for replays.

    Attributes:
        data: messages by number.
        first, end: number of the oldest message, and of the next new one.
    """

    def __init__(self) -> None:
        self.data: dict[int, bytes] = {}
        self.first = self.end = self._num_bytes = 0

    def add(self, data: bytes) -> int:
        """Add a message, evicting the oldest if necessary; return its number."""
        number = self.end
        self.data[number], self.end = data, number + 1
        self._num_bytes += len(data)
        while len(self.data) > _MOST_KEPT or self._num_bytes > _MOST_KEPT_BYTES:
            self._num_bytes -= len(self.data.pop(self.first))
            self.first += 1
        return number


def _number(value: int) -> bytes:
    return value.to_bytes(_NUMBER_BYTES, "big")
