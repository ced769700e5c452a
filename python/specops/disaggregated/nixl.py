# SPDX-License-Identifier: Apache-2.0
"""Transfer of pages by NIXL: the reader gets their address in the sender's memory and reads them.

UCX, NIXL's backend here, chooses the transfer: RDMA, shared memory or TCP. Requests, headers and
releases still use TCP. NIXL serializes addresses with pickle, so this module sends plain numbers
instead.

Source: https://github.com/ai-dynamo/nixl (1.5.1), src/api/python/_api.py.
"""

import contextlib
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Sequence

import torch
from msgspec import Struct
from nixl import nixl_agent, nixl_agent_config, nixl_thread_sync_t

from specops.disaggregated.transport import Deadline, Leases, TcpTransport, received, send
from specops.service.wire import Peer

_POLL_SECONDS = 2e-4


class Place(Struct, frozen=True, tag=True):
    """Location of pages in another engine's memory.

    Attributes:
        agent: metadata by which UCX connects to the engine that holds the pages.
        address: address of their first byte in that engine.
    """

    agent: bytes
    address: int


class NixlTransport(TcpTransport):
    """Transport of pages by NIXL.

    A reader creates an agent per fetch: a long-lived agent would keep a connection of every fetch
    open.

    Args:
        host, port, leases, peers, clock: as in `TcpTransport`.

    Raises:
        OSError: the address does not exist or is in use.
        ValueError: UCX does not start.
    """

    name = "nixl"

    def __init__(
        self,
        host: str,
        port: int,
        leases: Leases,
        peers: Sequence[Peer],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        try:
            self._agent = _new_agent(nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT)  # for all readers
        except OSError as error:
            raise ValueError(f"kv_transport nixl cannot be used: {error}") from None
        super().__init__(host, port, leases, peers, clock)

    @contextlib.contextmanager
    def send_data(
        self, connection: socket.socket, data: bytearray, deadline: Deadline
    ) -> Iterator[None]:
        """Offer the bytes of pages to a reader, who may read them until the `with` block ends."""
        if not data:
            yield
            return
        pages = torch.frombuffer(data, dtype=torch.uint8)
        registered = self._agent.register_memory([pages])
        try:
            agent = self._agent.get_partial_agent_metadata(registered, True, ["UCX"])
            send(connection, Place(agent, pages.data_ptr()), deadline)
            yield
        finally:
            self._agent.deregister_memory(registered)

    def receive_data(
        self, connection: socket.socket, num_bytes: int, deadline: Deadline
    ) -> bytearray:
        """Return the bytes that another engine offers on a connection.

        Raises:
            OSError: the other engine disconnected, or takes too long.
        """
        data = bytearray(num_bytes)
        if num_bytes:
            _read(received(connection, Place, deadline), data, deadline)
        return data


def _read(place: Place, data: bytearray, deadline: Deadline) -> None:
    """Fill `data` from the other engine's memory.

    Raises:
        OSError: the other engine disconnected, or takes too long.
    """
    pages = torch.frombuffer(data, dtype=torch.uint8)
    agent = _new_agent(nixl_thread_sync_t.NIXL_THREAD_SYNC_NONE)
    reading = None
    try:
        agent.register_memory([pages])
        local = agent.get_xfer_descs([pages])
        remote = agent.get_xfer_descs([(place.address, len(data), 0)], "DRAM")
        reading = agent.initialize_xfer("READ", local, remote, agent.add_remote_agent(place.agent))
        state = agent.transfer(reading)
        while state == "PROC":
            time.sleep(min(_POLL_SECONDS, deadline.remaining()))
            state = agent.check_xfer_state(reading)
    except TimeoutError:
        raise TimeoutError("NIXL did not read the pages in time") from None
    except Exception as error:  # NIXL's exceptions have no common class
        raise ConnectionError(f"NIXL cannot read the pages: {error}") from None
    finally:
        # Release these before `data` is freed: until then UCX may write to it.
        del reading, agent
    if state != "DONE":
        raise ConnectionError(f"NIXL cannot read the pages: the transfer ended in state {state}")


def _new_agent(threads: nixl_thread_sync_t) -> nixl_agent:
    """Return an agent with a unique name.

    Raises:
        OSError: UCX does not start.
    """
    try:
        return nixl_agent(uuid.uuid4().hex, nixl_agent_config(backends=["UCX"], sync_mode=threads))
    except Exception as error:  # NIXL's exceptions have no common class
        raise OSError(f"NIXL cannot start UCX: {error}") from None
