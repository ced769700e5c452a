# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  (where a package is missing, nothing else is imported)
"""KV transfer by NIXL, where it is installed: a pair of servers answers like one, bit for bit."""

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

for name in ("nixl", "fastapi", "uvicorn", "pydantic", "msgspec", "prometheus_client", "httpx"):
    pytest.importorskip(name)

from msgspec.structs import replace
from nixl import nixl_agent
from server_pairs import (
    Router,
    bodies,
    choices_of,
    of_ranks,
    one_server,
    pair_options,
    servers,
    wait_until_idle,
)
from serving import Served
from specops.disaggregated.nixl import NixlTransport, Place
from specops.disaggregated.pages import Header, KvTransferError, Layout, Pages, cut
from specops.disaggregated.transport import (
    Address,
    DamagedError,
    Deadline,
    Leases,
    TcpTransport,
    send,
)
from specops.service.wire import Peer

pytestmark = pytest.mark.ci

TWO_HEADS = Layout("uint8", (16, 2, 999), (1,))
HEADER = Header(1, 1, "", 1, 0, 1, 0, 16, list(range(33)), 2, "", 0, [TWO_HEADS], [], [])


def transport(kind: type[TcpTransport]) -> TcpTransport:
    return kind("127.0.0.1", 0, Leases(60, 1 << 30), [Peer("127.0.0.1", 1, 65535)])


def test_pair_of_servers_answers_like_one(mtp_model: Path, reference_server: Served) -> None:
    roles = pair_options(mtp_model, "--kv-transport", "nixl")
    requests = bodies(20, seed=37)
    with servers(*roles) as (prefill, decode):
        router = Router(prefill.url, decode.url)
        assert router.run(requests) == choices_of(reference_server, requests)
        pages = sum((len(body["prompt"]) - 1) // 16 for body in requests)
        assert decode.gauge("prefix_cache_hits_total") >= 16 * pages
        wait_until_idle(prefill)
        wait_until_idle(decode)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 2), (2, 1), (1, 2)], ids=str)
def test_ranks_transfer_their_shards(mtp_model: Path, sizes: tuple[int, int]) -> None:
    roles = [(*one, "--kv-transport", "nixl") for one in of_ranks(mtp_model, sizes)]
    requests = bodies(20, seed=38)
    with servers(*roles) as both, one_server(mtp_model, exact_across_tp=2) as one:
        assert Router(both[0].url, both[1].url).run(requests) == choices_of(one, requests)
        pages = sum((len(body["prompt"]) - 1) // 16 for body in requests)
        assert both[1].gauge("prefix_cache_hits_total") >= 16 * pages


@pytest.mark.parametrize("num_pages", [0, 1, 300])
def test_every_byte_is_transferred(num_pages: int) -> None:
    header = replace(HEADER, num_pages=num_pages)
    data = bytearray(n * n % 251 for n in range(header.num_bytes))
    here, there = transport(NixlTransport), transport(NixlTransport)
    there.lease("a", Pages(header, data))
    assert here.fetch(Address("a", there.host, there.port), header).data == data
    here.close()
    there.close()


@pytest.mark.parametrize("num_heads", [1, 2])
def test_several_ranks_read_one_lease(num_heads: int) -> None:
    """The ranks read at the same time: all of them the same bytes, or each rank other bytes."""
    layout = replace(TWO_HEADS, shape=(16, num_heads, 999))
    header = replace(HEADER, num_pages=300, model=[layout])
    pages = Pages(header, bytearray(n * n % 251 for n in range(header.num_bytes)))
    here, there = transport(NixlTransport), transport(NixlTransport)
    headers = [replace(header, num_readers=4, reader=reader) for reader in range(4)]
    for name in "abcdefgh":
        there.lease(name, pages)
        address = Address(name, there.host, there.port)
        with ThreadPoolExecutor(4) as pool:
            got = list(pool.map(here.fetch, [address] * 4, headers))
        assert [part.data for part in got] == [cut(pages, 4, reader).data for reader in range(4)]
    here.close()
    there.close()


def test_unreadable_pages_raise_an_error() -> None:
    """The memory was not offered, the engine has ended, or there is no engine."""
    here, one = transport(NixlTransport), torch.zeros(1 << 16, dtype=torch.uint8)
    there = nixl_agent("there")
    offered = there.register_memory([one])
    agent = there.get_partial_agent_metadata(offered, True, ["UCX"])
    for what, offset in ((agent, 1), (agent, 0), (b"none", 0)):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            send(theirs, Place(what, one.data_ptr() + offset), Deadline(60))
            with pytest.raises(ConnectionError, match="NIXL cannot read the pages: NIXL_ERR"):
                here.receive_data(ours, 1 << 16, Deadline(60))
        there = None
    here.close()


def test_pages_that_change_while_they_are_read_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their checksums are those of the offered bytes."""
    here, there = transport(NixlTransport), transport(NixlTransport)
    there.lease("a", Pages(HEADER, bytearray(HEADER.num_bytes)))
    receive_data = here.receive_data

    def damaged(*args: Any) -> bytearray:
        data = receive_data(*args)
        data[-1] ^= 1
        return data

    monkeypatch.setattr(here, "receive_data", damaged)
    with pytest.raises(DamagedError, match="the pages were damaged in transit"):
        here.fetch(Address("a", there.host, there.port), HEADER)
    here.close()
    there.close()


@pytest.mark.parametrize("kinds", [(TcpTransport, NixlTransport), (NixlTransport, TcpTransport)])
def test_another_transport_is_refused(kinds: tuple[type[TcpTransport], type[TcpTransport]]) -> None:
    here, there = (transport(kind) for kind in kinds)
    there.lease("a", Pages(HEADER, bytearray(HEADER.num_bytes)))
    message = f"kv_transport must be {there.name}, as in the other engine, got {here.name}"
    with pytest.raises(KvTransferError, match=message):
        here.fetch(Address("a", there.host, there.port), HEADER)
    here.close()
    there.close()
