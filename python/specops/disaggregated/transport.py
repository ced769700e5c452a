# SPDX-License-Identifier: Apache-2.0
"""Pages on their way between engines: leases here, and a reader there.

An engine that has computed a prompt leases its pages: a copy of them waits under a name until it is
fetched and released, or until its time is over. Who comes too late computes the prompt itself. If
the other engine has more ranks, several of them read one lease, and it ends with the last of them.

One connection fetches one lease: the reader's name for it, and which rank the reader is, in
MessagePack behind four bytes of length; the header in the same way, and the bytes of what that rank
needs; then the reader's `Release`. `TcpTransport` sends the bytes on the same connection,
`NixlTransport` (nixl.py) says where they are to be read. Nothing on the wire is code, encrypted or
signed: a peer can give wrong pages, so engines fetch from named hosts alone.
"""

import contextlib
import logging
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from specops.disaggregated.pages import HandoffError, Header, Pages, check, cut

logger = logging.getLogger(__name__)

_LENGTH = struct.Struct("<I")
_MOST_HEADER = 64 << 20  # bytes; a prompt's token ids are most of it
_MOST_ASKED = 1 << 12  # bytes of what a reader says, who may be anybody that reaches the port
SECONDS = 10.0  # that a peer may take over the next bytes


class Fetch(Struct, frozen=True, tag=True):
    """Asks for a lease.

    Attributes:
        lease: its name.
        transport: that the reader has.
        num_readers: ranks of the engine that reads.
        reader: which of these asks.
    """

    lease: str
    transport: str
    num_readers: int
    reader: int


class Gone(Struct, frozen=True, tag=True):
    """There is no such lease (any more)."""


class Refused(Struct, frozen=True, tag=True):
    """The reader gets nothing of it, and why."""

    sentence: str


class Release(Struct, frozen=True, tag=True):
    """The pages are there: the lease may end."""


class Address(Struct, frozen=True):
    """Where a lease is to be had.

    Attributes:
        lease: its name.
        host, port: of the transport that has it.
    """

    lease: str
    host: str
    port: int


class Transport(Protocol):
    """What carries pages from one engine to another. Any thread may call it.

    Attributes:
        host, port: where others fetch its leases.
    """

    host: str
    port: int

    def lease(self, name: str, pages: Pages) -> None:
        """Keeps pages for another engine under a new name."""

    def fetch(self, address: Address, expected: Header) -> Pages:
        """Waits for pages that another engine has leased, and releases them there.

        Args:
            address: of the lease.
            expected: what they must be of: nothing else is read to its end.

        Raises:
            HandoffError: they are of something else, or the lease is over.
            OSError: the other engine cannot be reached, or went away.
        """

    def close(self) -> None:
        """Ends; leases are over."""


@dataclass
class _Lease:
    end: float
    pages: Pages
    readers: set[int] = field(default_factory=set)  # that have theirs


class Leases:
    """Pages that wait for their readers.

    Args:
        seconds: that each may wait.
        most_bytes: of all. The oldest make room for a new one.
        clock: in seconds.
    """

    def __init__(
        self, seconds: float, most_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._seconds, self._most_bytes, self._clock = seconds, most_bytes, clock
        self._leases: dict[str, _Lease] = {}  # oldest first
        self._lock = threading.Lock()

    def add(self, name: str, pages: Pages) -> None:
        """Begins a lease under a name that no other has."""
        with self._lock:
            self._leases[name] = _Lease(self._clock() + self._seconds, pages)
            self._drop_old()

    def get(self, name: str) -> Pages | None:
        """The pages of a lease; None: it is over."""
        with self._lock:
            self._drop_old()
            found = self._leases.get(name)
        return None if found is None else found.pages

    def release(self, name: str, num_readers: int, reader: int) -> None:
        """Ends a lease, if it has not ended, when all have released it who read it.

        Args:
            name: of the lease.
            num_readers: ranks of the engine that reads.
            reader: the one that has its part.
        """
        with self._lock:
            lease = self._leases.get(name)
            if lease is not None:
                lease.readers.add(reader)
                if len(lease.readers) * lease.pages.header.num_ranks >= num_readers:
                    del self._leases[name]

    @property
    def num_bytes(self) -> int:
        """What all take."""
        with self._lock:
            self._drop_old()
            return self._total

    @property
    def _total(self) -> int:
        return sum(lease.pages.num_bytes for lease in self._leases.values())

    def _drop_old(self) -> None:
        total, now = self._total, self._clock()
        for name, lease in list(self._leases.items()):
            if lease.end > now and total <= self._most_bytes:
                break
            total -= lease.pages.num_bytes
            del self._leases[name]


class TcpTransport:
    """Pages over TCP, a thread for each reader.

    Another way of moving the bytes is a subclass with another `name`, `offered` and `taken`.

    Args:
        host, port: to listen on; port 0: any free one.
        leases: what it serves.
        peers: hosts, as names or addresses, that pages are fetched from.

    Attributes:
        name: as `--kv-transport` has it.
        host, port: where it listens.

    Raises:
        OSError: the address does not exist or is in use.
    """

    name = "tcp"

    def __init__(self, host: str, port: int, leases: Leases, peers: frozenset[str]) -> None:
        self.leases, self._peers = leases, peers
        self._server = _Server((host, port), _reader_of(self))
        self.host, self.port = host, int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="specops-pages", daemon=True
        )
        self._thread.start()

    def lease(self, name: str, pages: Pages) -> None:
        """Keeps pages for another engine under a new name."""
        self.leases.add(name, pages)

    def fetch(self, address: Address, expected: Header) -> Pages:
        """Waits for pages that another engine has leased, and releases them there.

        Raises:
            HandoffError: they are of something else, or the lease is over, or the host is none of
                the peers.
            OSError: the other engine cannot be reached, or went away.
        """
        if address.host not in self._peers:
            raise HandoffError(
                f"handoff: remote_host must be one of kv_peers, got {address.host!r}"
            )
        where = address.host, address.port
        with socket.create_connection(where, timeout=SECONDS) as connection:
            asked = Fetch(address.lease, self.name, expected.num_readers, expected.reader)
            send(connection, asked)
            answer = received(connection, Header | Gone | Refused)
            if isinstance(answer, Gone):
                raise HandoffError("handoff: the lease is over")
            if isinstance(answer, Refused):
                raise HandoffError(answer.sentence)
            check(answer, expected)  # which bounds the bytes, too
            data = self.taken(connection, answer.num_bytes)
            with contextlib.suppress(OSError):  # then its time ends it
                send(connection, Release())
        return Pages(answer, data)

    @contextlib.contextmanager
    def offered(self, connection: socket.socket, data: bytearray) -> Iterator[None]:
        """Has the bytes of pages for a reader until the block ends, when it has released them."""
        connection.sendall(data)
        yield

    def taken(self, connection: socket.socket, num_bytes: int) -> bytearray:
        """The bytes that another engine offers on a connection.

        Raises:
            OSError: the other engine went away, or takes too long.
        """
        return _exactly(connection, num_bytes)

    def close(self) -> None:
        """Ends; leases are over."""
        self._server.shutdown()
        self._server.server_close()


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a reader of pages went away", exc_info=True)


def _reader_of(transport: TcpTransport) -> type[socketserver.BaseRequestHandler]:
    leases = transport.leases

    class Reader(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            connection: socket.socket = self.request
            connection.settimeout(SECONDS)
            asked = received(connection, Fetch, _MOST_ASKED)
            if asked.transport != transport.name:
                sentence = (
                    f"handoff: kv_transport must be {transport.name} as the other engine's, "
                    f"got {asked.transport}"
                )
                return send(connection, Refused(sentence))
            pages = leases.get(asked.lease)
            if pages is None:
                return send(connection, Gone())
            try:
                part = cut(pages, asked.num_readers, asked.reader)
            except HandoffError as error:
                return send(connection, Refused(str(error)))
            send(connection, part.header)
            with transport.offered(connection, part.data):
                received(connection, Release, _MOST_ASKED)
            leases.release(asked.lease, asked.num_readers, asked.reader)

    return Reader


def send(connection: socket.socket, message: Struct) -> None:
    """Sends a message."""
    body = msgspec.msgpack.encode(message)
    connection.sendall(_LENGTH.pack(len(body)) + body)


def received(connection: socket.socket, kind: Any, most: int = _MOST_HEADER) -> Any:
    """The next message, of at most so many bytes.

    Raises:
        HandoffError: it is none of this kind, or longer.
        OSError: the peer has gone, or takes too long.
    """
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    if length > most:
        raise HandoffError(f"handoff: a message must have at most {most} bytes, got {length}")
    try:
        return msgspec.msgpack.decode(_exactly(connection, length), type=kind)
    except msgspec.DecodeError as error:
        raise HandoffError(f"handoff: what a peer says cannot be read: {error}") from None


def _exactly(connection: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    with memoryview(data) as view:
        begin = 0
        while begin < count:
            got = connection.recv_into(view[begin:])
            if not got:
                raise ConnectionError("the peer has closed the connection")
            begin += got
    return data
