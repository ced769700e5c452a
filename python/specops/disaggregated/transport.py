# SPDX-License-Identifier: Apache-2.0
"""Transfer of pages between engines: leases on the sending side, and a reader on the other.

An engine that has computed a prompt leases its pages: it keeps a copy under a name until readers
have fetched and released it, or until a time limit. A reader that is too late computes the prompt
itself. If the reading engine has more ranks, several ranks read one lease, which ends when the last
of them releases it.

One connection fetches one lease. The reader sends a `Fetch` with the lease's name and its own rank.
The other engine answers with an `Offer`, followed by the bytes that this rank needs. The reader
ends with a `Release`. `TcpTransport` sends the bytes on the same connection; `NixlTransport`
(nixl.py) sends the address of the bytes instead.

A message is MessagePack after eight bytes: its length and its CRC-32. An offer contains a CRC-32 of
each block of the bytes. So a damaged message or damaged pages are refused, and the reader computes
the prompt. Messages contain no code, but are neither encrypted nor signed. A peer could send wrong
pages with correct checksums, so engines fetch only from configured addresses. Each message has a
time limit, and the port has a limit of connections.
"""

import contextlib
import logging
import socket
import socketserver
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from specops.disaggregated.pages import Header, KvTransferError, Pages, check, cut
from specops.disaggregated.peers import Peers
from specops.service.wire import Peer

logger = logging.getLogger(__name__)

_PREFIX = struct.Struct("<II")  # the length of a message, and its CRC-32
_MAX_HEADER_BYTES = 64 << 20  # a header consists mostly of a prompt's token ids
# Maximum size of a reader's message: any host that reaches the port can send one.
_MAX_REQUEST_BYTES = 1 << 12
_BLOCK_BYTES = 1 << 20  # bytes of pages per checksum
SECONDS = 10.0  # time limit of connecting and of a message; `seconds_for` is that of pages
_BYTES_PER_SECOND = 10e6  # minimum network speed that the time limit of pages allows for
_MAX_CONNECTIONS = 256  # maximum number; each takes a thread and a file descriptor
_PAUSE_SECONDS = 0.1  # pause before accepting again if no file descriptor is left


class DamagedError(KvTransferError):
    """Error: a message or pages were damaged in transit, since a checksum does not match."""


class Deadline:
    """Time limit of a whole message, however many pieces it arrives in.

    Args:
        seconds: time limit from now on.
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def remaining(self) -> float:
        """Return the seconds that are left.

        Raises:
            TimeoutError: no time is left.
        """
        seconds = self._end - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("the peer did not answer in time")
        return seconds


def seconds_for(num_bytes: int) -> float:
    """Return the time limit in seconds of a transfer of pages."""
    return SECONDS + num_bytes / _BYTES_PER_SECOND


class Fetch(Struct, frozen=True, tag=True):
    """Request for a lease.

    Attributes:
        lease: name of the lease.
        transport: transport of the reader.
        num_readers: number of ranks of the reading engine.
        reader: rank that sends this request.
    """

    lease: str
    transport: str
    num_readers: int
    reader: int


class Offer(Struct, frozen=True, tag=True):
    """Announcement of pages.

    Attributes:
        header: description of the pages.
        checksums: CRC-32 of each MiB of their bytes, in order.
    """

    header: Header
    checksums: list[int]


class Gone(Struct, frozen=True, tag=True):
    """Answer to a reader: the lease does not exist, or has ended."""


class Refused(Struct, frozen=True, tag=True):
    """Answer to a reader that gets no part of the lease; `sentence` gives the reason."""

    sentence: str


class Release(Struct, frozen=True, tag=True):
    """Confirmation of a reader that its pages have arrived, so that the lease may end."""


class Address(Struct, frozen=True):
    """Address of a lease.

    Attributes:
        lease: name of the lease.
        host, port: address of the transport that holds it.
    """

    lease: str
    host: str
    port: int


class Transport(Protocol):
    """Transport of pages from one engine to another. Methods may be called from any thread.

    Attributes:
        host, port: address at which other engines fetch its leases.
    """

    host: str
    port: int

    def lease(self, name: str, pages: Pages) -> None:
        """Keep pages for another engine under a new name."""

    def require_peer(self, address: Address) -> None:
        """Refuse an address that is not configured.

        Raises:
            KvTransferError: the address is not configured.
        """

    def fetch(self, address: Address, expected: Header) -> Pages:
        """Wait for pages that another engine has leased, and release them there.

        Args:
            address: address of the lease.
            expected: header that the pages must match; on a mismatch their bytes are not read.

        Raises:
            DamagedError: the pages were damaged in transit.
            KvTransferError: the pages do not match, the lease is over, or the peer is not
                configured or did not answer recently.
            OSError: the other engine cannot be reached, or disconnected.
        """

    def close(self) -> None:
        """Stop serving and drop all leases."""


@dataclass
class _Lease:
    end: float
    pages: Pages
    readers: set[int] = field(default_factory=set)  # readers that have released their part


class Leases:
    """Store of leased pages that wait for their readers.

    Args:
        seconds: time limit of each lease.
        max_bytes: upper bound on the bytes of all leases. The oldest leases are dropped for a new
            one.
        clock: clock in seconds.
    """

    def __init__(
        self, seconds: float, max_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._seconds = seconds
        self._max_bytes = max_bytes
        self._clock = clock
        self._leases: dict[str, _Lease] = {}  # oldest first
        self._lock = threading.Lock()

    def add(self, name: str, pages: Pages) -> None:
        """Begin a lease under a new name."""
        with self._lock:
            self._leases[name] = _Lease(self._clock() + self._seconds, pages)
            self._drop_old()

    def get(self, name: str) -> Pages | None:
        """Return the pages of a lease, or None if the lease has ended."""
        with self._lock:
            self._drop_old()
            lease = self._leases.get(name)
        return None if lease is None else lease.pages

    def release(self, name: str, num_readers: int, reader: int) -> None:
        """Release one reader's part; end the lease once all readers have. No-op if it has ended.

        Args:
            name: name of the lease.
            num_readers: number of ranks of the reading engine.
            reader: rank that has received its part.
        """
        with self._lock:
            lease = self._leases.get(name)
            if lease is not None:
                lease.readers.add(reader)
                if len(lease.readers) * lease.pages.header.num_ranks >= num_readers:
                    del self._leases[name]

    @property
    def num_bytes(self) -> int:
        """Bytes of all leases."""
        with self._lock:
            self._drop_old()
            return self._total

    @property
    def _total(self) -> int:
        return sum(lease.pages.num_bytes for lease in self._leases.values())

    def _drop_old(self) -> None:
        total, now = self._total, self._clock()
        for name, lease in list(self._leases.items()):
            if lease.end > now and total <= self._max_bytes:
                break
            total -= lease.pages.num_bytes
            del self._leases[name]


class TcpTransport:
    """Transport of pages over TCP, with a thread for each reader.

    A subclass may override `name`, `send_data` and `receive_data` to move the bytes in another way.

    Args:
        host, port: address to listen on; port 0: any free one.
        leases: leases to serve.
        peers: addresses that pages are fetched from.
        clock: clock in seconds, for the pauses between attempts to reach a peer.

    Attributes:
        name: value of `--kv-transport`.
        host, port: address where it listens.

    Raises:
        OSError: the address does not exist or is in use.
    """

    name = "tcp"

    def __init__(
        self,
        host: str,
        port: int,
        leases: Leases,
        peers: Sequence[Peer],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.leases = leases
        self._peers = Peers(peers, SECONDS, clock)
        self._server = _Server(host, port, self)
        self.host = host
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="specops-pages", daemon=True
        )
        self._thread.start()

    def lease(self, name: str, pages: Pages) -> None:
        """Keep pages for another engine under a new name."""
        self.leases.add(name, pages)

    def require_peer(self, address: Address) -> None:
        """Refuse an address that is not configured.

        Raises:
            KvTransferError: the address is not configured.
        """
        self._peers.require(address.host, address.port)

    def fetch(self, address: Address, expected: Header) -> Pages:
        """Wait for pages that another engine has leased, and release them there.

        Raises:
            DamagedError: the pages were damaged in transit.
            KvTransferError: the pages do not match, the lease is over, or the peer is not
                configured or did not answer recently.
            OSError: the other engine cannot be reached, or disconnected.
        """
        with self._peers.attempt(address.host, address.port):
            return self._fetch(address, expected)

    def _fetch(self, address: Address, expected: Header) -> Pages:
        deadline = Deadline(SECONDS)
        where = address.host, address.port
        with socket.create_connection(where, timeout=deadline.remaining()) as connection:
            request = Fetch(address.lease, self.name, expected.num_readers, expected.reader)
            send(connection, request, deadline)
            answer = received(connection, Offer | Gone | Refused, deadline)
            if isinstance(answer, Gone):
                raise KvTransferError("KV transfer: the lease does not exist or has ended")
            if isinstance(answer, Refused):
                raise KvTransferError(answer.sentence)
            header = answer.header
            check(header, expected)  # this also bounds the number of bytes to read
            deadline = Deadline(seconds_for(header.num_bytes))
            data = self.receive_data(connection, header.num_bytes, deadline)
            with contextlib.suppress(OSError):  # if this fails, the lease ends by its time limit
                send(connection, Release(), Deadline(SECONDS))
        if checksums_of(data) != answer.checksums:
            raise DamagedError(
                "KV transfer: the pages were damaged in transit: a checksum does not match"
            )
        return Pages(header, data)

    @contextlib.contextmanager
    def send_data(
        self, connection: socket.socket, data: bytearray, deadline: Deadline
    ) -> Iterator[None]:
        """Send the bytes of pages to a reader; its release ends the `with` block."""
        connection.settimeout(deadline.remaining())  # a limit for all bytes together
        connection.sendall(data)
        yield

    def receive_data(
        self, connection: socket.socket, num_bytes: int, deadline: Deadline
    ) -> bytearray:
        """Return the bytes that another engine offers on a connection.

        Raises:
            OSError: the other engine disconnected, or takes too long.
        """
        return _exactly(connection, num_bytes, deadline)

    def close(self) -> None:
        """Stop serving, and end all leases."""
        self._server.shutdown()
        self._server.server_close()


@dataclass(eq=False)
class _Connection:
    """An open connection to the port.

    Attributes:
        socket: socket of the connection.
        host: address of the other end.
        is_reader: whether the other end has named an existing lease.
    """

    socket: socket.socket
    host: str
    is_reader: bool = False


class _Connections:
    """Open connections to the port; each costs a thread and a file descriptor.

    A connection that has named a lease stays until its time limit. Names of leases cannot be
    guessed, so only a known peer can have named one. If there are too many connections, the host
    with the most of the other ones loses its oldest.

    Args:
        max_connections: upper bound on the connections.
    """

    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections
        self._open: dict[socket.socket, _Connection] = {}  # oldest first
        self._lock = threading.Lock()

    def add(self, connection: socket.socket, host: str) -> None:
        """Add a connection; if there are too many, shut one of them down, possibly this one."""
        with self._lock:
            self._open[connection] = _Connection(connection, host)
            if len(self._open) <= self._max_connections:
                return
            by_host: dict[str, list[_Connection]] = {}
            for other in self._open.values():
                if not other.is_reader:
                    by_host.setdefault(other.host, []).append(other)
            oldest = max(by_host.values(), key=len)[0]
            del self._open[oldest.socket]
            with contextlib.suppress(OSError):
                oldest.socket.shutdown(socket.SHUT_RDWR)  # the connection's thread closes it

    def mark_reader(self, connection: socket.socket) -> None:
        """Mark a connection that has named an existing lease."""
        with self._lock:
            if connection in self._open:
                self._open[connection].is_reader = True

    def remove(self, connection: socket.socket) -> None:
        """Remove a connection that ends."""
        with self._lock:
            self._open.pop(connection, None)


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, host: str, port: int, transport: "TcpTransport") -> None:
        self.connections = _Connections(_MAX_CONNECTIONS)
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), _reader_of(transport))

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:  # no file descriptor is left: an immediate retry would fail again
            time.sleep(_PAUSE_SECONDS)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.add(request, client_address[0])
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.connections.remove(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a reader of pages disconnected", exc_info=True)


def _reader_of(transport: TcpTransport) -> type[socketserver.BaseRequestHandler]:
    leases = transport.leases

    class Reader(socketserver.BaseRequestHandler):
        server: _Server

        def handle(self) -> None:
            connection: socket.socket = self.request
            deadline = Deadline(SECONDS)
            request = received(connection, Fetch, deadline, _MAX_REQUEST_BYTES)
            if request.transport != transport.name:
                sentence = (
                    f"KV transfer: kv_transport must be {transport.name}, as in the other engine, "
                    f"got {request.transport}"
                )
                return send(connection, Refused(sentence), deadline)
            pages = leases.get(request.lease)
            if pages is None:
                return send(connection, Gone(), deadline)
            self.server.connections.mark_reader(connection)
            try:
                part = cut(pages, request.num_readers, request.reader)
            except KvTransferError as error:
                return send(connection, Refused(str(error)), deadline)
            deadline = Deadline(SECONDS + seconds_for(len(part.data)))  # the reader gives up first
            send(connection, Offer(part.header, checksums_of(part.data)), deadline)
            with transport.send_data(connection, part.data, deadline):
                received(connection, Release, deadline, _MAX_REQUEST_BYTES)
            leases.release(request.lease, request.num_readers, request.reader)

    return Reader


def checksums_of(data: bytearray) -> list[int]:
    """Return the CRC-32 of each block of the pages."""
    with memoryview(data) as view:
        return [
            zlib.crc32(view[begin : begin + _BLOCK_BYTES])
            for begin in range(0, len(data), _BLOCK_BYTES)
        ]


def send(connection: socket.socket, message: Struct, deadline: Deadline) -> None:
    """Send a message.

    Raises:
        OSError: the peer has disconnected, or takes too long.
    """
    body = msgspec.msgpack.encode(message)
    connection.settimeout(deadline.remaining())
    connection.sendall(_PREFIX.pack(len(body), zlib.crc32(body)) + body)


def received(
    connection: socket.socket, kind: Any, deadline: Deadline, max_bytes: int = _MAX_HEADER_BYTES
) -> Any:
    """Wait for the next message, of at most `max_bytes` bytes.

    Raises:
        DamagedError: its checksum does not match.
        KvTransferError: it is of another kind, or longer.
        OSError: the peer has disconnected, or takes too long.
    """
    length, checksum = _PREFIX.unpack(_exactly(connection, _PREFIX.size, deadline))
    if length > max_bytes:
        raise KvTransferError(
            f"KV transfer: a message must have at most {max_bytes} bytes, got {length}"
        )
    body = _exactly(connection, length, deadline)
    if zlib.crc32(body) != checksum:
        raise DamagedError(
            "KV transfer: a message was damaged in transit, or the peer has another version of "
            "specops: its checksum does not match"
        )
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise KvTransferError(
            f"KV transfer: cannot decode a message of the peer: {error}"
        ) from None


def _exactly(connection: socket.socket, count: int, deadline: Deadline) -> bytearray:
    data = bytearray(count)
    with memoryview(data) as view:
        begin = 0
        while begin < count:
            connection.settimeout(deadline.remaining())
            count_received = connection.recv_into(view[begin:])
            if not count_received:
                raise ConnectionError("the peer has closed the connection")
            begin += count_received
    return data
