# SPDX-License-Identifier: Apache-2.0
"""Events of the prefix cache, published to routers that send requests where their prefix is cached.

The messages are vLLM's (`vllm.distributed.kv_events` of vLLM 0.32): each is a ZeroMQ message of
three parts, the topic, a sequence number of eight bytes (big-endian, from 0, increasing by one),
and an `EventBatch` in MessagePack, a list that holds events as maps. A subscriber that has missed
messages sends the replay endpoint the first number it needs; it receives the retained messages from
there on, and finally one with the number -1.

A client that does not read costs limited memory: at most 32 events and 16 KiB per message, and a
limited number of queued messages per client.

A block is a page. Its hash covers all tokens from the beginning of the prompt, and the cache salt
and the LoRA adapter of the request.
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
from specops.engine.memory.kv_cache import AdaptedSalt, Prefix, Salt
from specops.service.wire import KvEventSettings

logger = logging.getLogger(__name__)

_MAX_EVENTS = 32  # maximum number of events per message
_MAX_RETAINED = 10_000  # messages that are retained for replays
_MAX_RETAINED_BYTES = 64 << 20
_UNSENT = 2048  # messages queued for a slow subscriber; further messages to it are dropped
_UNSENT_REPLAYED = 64  # messages queued for a client of the replay endpoint
_MAX_REPLAYS = 32  # clients with an unfinished replay
_MAX_REQUESTS = 100  # replay requests that are read before the next message is sent
_STALLED_SECONDS = 10.0  # a replay that sends no message for this long ends
_MAX_FRAME_BYTES = 1024  # per part of a client's message; a longer part ends the connection
_HANDSHAKE_SECONDS = 5  # time limit for a connection to become a client
_MAX_CLIENTS = 64  # maximum number of clients per endpoint
_POLL_SECONDS = 0.1
_REPLAY_SECONDS = 0.002  # pause between two parts of a replay
_HANDSHAKE_FAILED = {
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
}
_NUMBER_BYTES = 8
_END = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)


class BlockStored(Struct, tag=True):
    """Addition of blocks to the prefix cache.

    Attributes:
        block_hashes: hashes of the blocks, in order.
        parent_block_hash: hash of the block before the first block; None at the start of a prompt.
        token_ids: tokens of the blocks.
        block_size: tokens per block.
        lora_id: None.
        lora_name: name of the LoRA adapter that computed the blocks, or None.
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
    """Removal of blocks from the prefix cache."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(Struct, tag=True):
    """Notice that the prefix cache is empty, because an engine has started."""


CacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(Struct, array_like=True, omit_defaults=True):
    """Changes of the prefix cache.

    Attributes:
        ts: time of the changes, in seconds since 1970.
        events: changes, in order.
        data_parallel_rank: rank of the engine among the engines of one frontend.
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

    def stored(self, prefix: Prefix, token_ids: Sequence[int], salt: Salt) -> None:
        """Record a new prefix."""
        before = None if prefix.parent is None else self._hash_of.get(prefix.parent)
        block_hash = self._hash_of[prefix] = _hash_of(before, token_ids, salt)
        tokens = list(token_ids)
        name = salt.name if isinstance(salt, AdaptedSalt) else None
        self.events.append(
            BlockStored([block_hash], before, tokens, len(tokens), None, "GPU", name)
        )

    def removed(self, prefix: Prefix) -> None:
        """Record that a prefix was removed."""
        self.events.append(BlockRemoved([self._hash_of.pop(prefix)], "GPU"))


def _hash_of(before: int | None, token_ids: Sequence[int], salt: Salt) -> int:
    """Return the hash of a prefix from its parent's hash and the tokens of its last block.

    The salt, and an adapter's name and digest, are part of the first block's hash, and so of all
    that follow, as in vLLM.
    """
    first = b""
    if isinstance(salt, AdaptedSalt):
        first = hashlib.sha256(msgspec.msgpack.encode(list(salt))).digest()
    elif salt is not None:
        first = hashlib.sha256(salt.encode()).digest()
    data = first if before is None else before.to_bytes(8, "big")
    data += array("i", token_ids).tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


class KvEvents:
    """Publisher of the prefix cache's changes, after each batch of the engine's loop.

    Args:
        prefixes: listener of the engine's page pool.
        settings: endpoints and topic.
        data_parallel_rank: rank of the engine among the engines of one frontend; None: a single
            engine.
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
        self._prefixes = prefixes
        self._deliver = deliver
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
        endpoint_socket = self._context.socket(kind)
        endpoint_socket.linger = 0
        endpoint_socket.sndhwm = _UNSENT if kind == zmq.PUB else _UNSENT_REPLAYED
        endpoint_socket.maxmsgsize = _MAX_FRAME_BYTES  # limits incoming messages
        endpoint_socket.handshake_ivl = 1000 * _HANDSHAKE_SECONDS
        self._gate.watch(endpoint_socket, name)
        if kind == zmq.ROUTER:
            endpoint_socket.router_mandatory = 1  # raises if a client has too many unread messages
        try:
            endpoint_socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise ValueError(
                f"{name} must be an endpoint to bind, such as tcp://127.0.0.1:5557, got "
                f"{endpoint}: {error}"
            ) from None
        return endpoint_socket

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
        events = self._prefixes.events
        self._prefixes.events = []
        if self._has_failed:
            return
        now = time.time()
        for begin in range(0, len(events), _MAX_EVENTS):
            part = events[begin : begin + _MAX_EVENTS]
            self._queue.put(EventBatch(now, part, self._data_parallel_rank))

    def _run(self) -> None:
        """Publish until `__exit__`. After a failure, drop events, so that no queue grows."""
        try:
            self._work()
        except Exception:
            self._has_failed = True
            logger.exception("publishing of prefix cache events failed and has stopped")

    def _work(self) -> None:
        """Send from a separate thread, so that sockets do not delay the loop."""
        retained = _RetainedMessages()
        encode = msgspec.msgpack.Encoder().encode
        replays: dict[bytes, _Replay] = {}  # by client
        while True:
            self._gate.answer()
            with contextlib.suppress(queue.Empty):
                batch = self._queue.get(timeout=_REPLAY_SECONDS if replays else _POLL_SECONDS)
                if batch is None:
                    return
                data = encode(batch)
                assert self._publisher is not None
                self._publisher.send_multipart((self._topic, _number(retained.add(data)), data))
            if self._replayer is not None:
                self._read_requests(self._replayer, replays)
                for client, replay in list(replays.items()):
                    if not self._send_on(self._replayer, client, replay, retained):
                        del replays[client]

    def _read_requests(
        self, replayer: "zmq.Socket[bytes]", replays: "dict[bytes, _Replay]"
    ) -> None:
        """Start the replays that clients request; a client's new replay replaces its last one."""
        for _ in range(_MAX_REQUESTS):
            if not replayer.poll(0):
                return
            parts = replayer.recv_multipart()
            client = parts[0]
            number = parts[-1]
            if len(number) != _NUMBER_BYTES:
                logger.warning(
                    "kv_events_replay: a sequence number must have 8 bytes, got %d", len(number)
                )
            elif client in replays or len(replays) < _MAX_REPLAYS:
                replays[client] = _Replay(int.from_bytes(number, "big"), time.monotonic())
            else:
                logger.warning(
                    "kv_events_replay: refused a replay, since %d replays run already", len(replays)
                )

    def _send_on(
        self,
        replayer: "zmq.Socket[bytes]",
        client: bytes,
        replay: "_Replay",
        retained: "_RetainedMessages",
    ) -> bool:
        """Send as much of a replay as fits the client's queue; return False if the replay ended."""
        now = time.monotonic()
        try:
            replay.next = max(replay.next, retained.first)
            while replay.next < retained.end:
                number = _number(replay.next)
                parts = (client, b"", self._topic, number, retained.data[replay.next])
                replayer.send_multipart(parts, zmq.NOBLOCK)
                replay.next += 1
                replay.moved_at = now
            replayer.send_multipart((client, b"", b"", _END, b""), zmq.NOBLOCK)
        except zmq.Again:
            return now - replay.moved_at < _STALLED_SECONDS
        except zmq.ZMQError:  # the client has gone
            return False
        return False


class _Gate:
    """Limit on each endpoint's clients, enforced by ZeroMQ's authentication protocol (ZAP, RFC 27).

    A host may use half (rounded up) of an endpoint's client limit that other hosts leave free. A
    refused client tries again after the time limit of its handshake.

    Args:
        context: context of the endpoints' sockets.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self._requests = context.socket(zmq.REP)
        self._requests.bind("inproc://zeromq.zap.01")
        self._clients: dict[bytes, _Clients] = {}  # by endpoint

    def watch(self, endpoint: "zmq.Socket[bytes]", name: str) -> None:
        """Limit the clients of an endpoint; call this before the endpoint is bound."""
        endpoint.zap_domain = name.encode()
        self._clients[name.encode()] = _Clients(endpoint.get_monitor_socket())

    def answer(self) -> None:
        """Admit or refuse clients that want to connect."""
        for clients in self._clients.values():
            clients.count()
        for _ in range(_MAX_REQUESTS):
            if not self._requests.poll(0):
                return
            version, request, name, host = self._requests.recv_multipart()[:4]
            clients = self._clients[name]
            clients.count()  # includes this connection
            is_admitted = clients.admits(host.decode())
            answer = (b"200", b"") if is_admitted else (b"300", b"too many clients")
            self._requests.send_multipart((version, request, *answer, b"", b""))


class _Clients:
    """Connected clients of an endpoint, counted by host.

    Args:
        monitor: reports events of the endpoint's connections. It does not report which of them were
            admitted, but it reports a failed handshake right before the disconnection.
    """

    def __init__(self, monitor: "zmq.Socket[bytes]") -> None:
        self._monitor = monitor
        self._host_of: dict[int, str] = {}  # host of every connection, by file descriptor
        self._admitted: Counter[str] = Counter()  # by host
        self._is_handshake_over = True  # whether the next disconnection follows one

    def count(self) -> None:
        """Update the counts from connections that began or ended since the last call."""
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
        """Return whether a host may have one more client; if so, count that client."""
        host = host if host in self._host_of.values() else ""  # a connection without an address
        others = self._admitted.total() - self._admitted[host]
        if self._admitted[host] >= (_MAX_CLIENTS - others + 1) // 2:
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
    """Replay of retained messages for one client.

    Attributes:
        next: number of the next message.
        moved_at: time when a message was last sent.
    """

    next: int
    moved_at: float


class _RetainedMessages:
    """The latest messages, retained for replays.

    Attributes:
        data: messages by number.
        first, end: numbers of the oldest message and of the next new message.
    """

    def __init__(self) -> None:
        self.data: dict[int, bytes] = {}
        self.first = self.end = self._num_bytes = 0

    def add(self, data: bytes) -> int:
        """Add a message, evicting the oldest if necessary; return its number."""
        number = self.end
        self.data[number] = data
        self.end = number + 1
        self._num_bytes += len(data)
        while len(self.data) > _MAX_RETAINED or self._num_bytes > _MAX_RETAINED_BYTES:
            self._num_bytes -= len(self.data.pop(self.first))
            self.first += 1
        return number


def _number(value: int) -> bytes:
    return value.to_bytes(_NUMBER_BYTES, "big")
