# SPDX-License-Identifier: Apache-2.0
"""KV transfer between an engine's loop and other engines, as requested by jobs' `kv_transfer`.

Incoming: if another engine has computed a job's prompt, the job waits for the pages and then finds
them in the prefix cache. If they do not arrive, the job continues without them: the engine computes
the prompt itself, with the same bits. Outgoing: the pages of a prompt that another engine will
continue are leased as soon as its choice has ended.
"""

import hashlib
import json
import logging
import re
import secrets
import struct
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from msgspec import structs

from specops.api.messages import (
    Abort,
    Batch,
    Command,
    Failed,
    Fetched,
    KvTransfer,
    Output,
    Overdue,
    Refused,
    Stop,
    Submit,
)
from specops.api.sampling_params import SamplingParams
from specops.disaggregated.fair_threads import FairThreads
from specops.disaggregated.page_transfer import PageTransfer
from specops.disaggregated.pages import Header, KvTransferError, Pages, joined, sources
from specops.disaggregated.transport import (
    SECONDS,
    Address,
    DamagedError,
    Leases,
    TcpTransport,
    Transport,
)
from specops.engine.engine import Engine
from specops.engine.memory.kv_cache import adapted_salt
from specops.service.loop import Compiled, Inbox
from specops.service.wire import RoleSettings

logger = logging.getLogger(__name__)

_FETCHING_THREADS = 16  # a single client may use half of them
_LEASE_NAME = re.compile(r"[0-9a-f]{32}")
_MAX_REASON_LENGTH = 300  # maximum characters of a peer's or client's text in a log line
_SECRET_BITS = 53  # ranks exchange integers as float64, exact up to this width


@dataclass(frozen=True)
class _Fetching:
    """Job that waits for its pages."""

    job: Submit
    expected: Header
    pages: "Future[Pages]"


class KvTransferInbox(Inbox):
    """Inbox of an engine loop with KV transfer; the loop's batches pass through `send` as well.

    With several ranks, each has such an inbox, and all receive the same commands. Each rank leases
    its own shard of a prompt's pages, and fetches its shard from the ranks of the other engine that
    hold it. Pages are used only if every rank has its shard.

    Args:
        engine: engine of the loop.
        transport: transport of pages.
        inbox: source of commands, the same for all ranks.
        deliver: called with every batch.

    Attributes:
        contract: execution contract of the engine.
    """

    def __init__(
        self,
        engine: Engine,
        transport: Transport,
        inbox: Inbox,
        deliver: Callable[[Batch], None],
    ) -> None:
        self._engine = engine
        self._transport = transport
        self._inbox = inbox
        self._deliver = deliver
        self._pages = PageTransfer(engine)
        self._ranks = engine.ranks
        self.contract = self._pages.contract
        self._threads = FairThreads[Pages](_FETCHING_THREADS, "specops-fetches")
        self._fetching: dict[int, _Fetching] = {}  # by job
        self._leasing: dict[int, Submit] = {}  # jobs with pages for another engine
        self._ports = [
            self._ranks.least(transport.port if rank == self._ranks.rank else 1 << 16)
            for rank in range(self._ranks.size)
        ]
        # Names of leases are the same on all ranks, and cannot be guessed.
        secret = [self._ranks.of_first(secrets.randbits(_SECRET_BITS)) for _ in range(4)]
        self._secret = struct.pack("<4d", *secret)
        self._num_leases = 0

    def __enter__(self) -> "KvTransferInbox":
        return self

    def __exit__(self, *error: object) -> None:
        """Stop the transport and all fetches."""
        self._threads.shutdown()
        self._transport.close()

    def put(self, command: Compiled | Fetched | Overdue) -> None:
        """Add a command, from any thread."""
        self._inbox.put(command)

    def take(self, seconds: float | None) -> Sequence[Command | Compiled]:
        """Return commands whose jobs need no pages or have them; called between two steps."""
        ready: list[Command | Compiled] = []
        for command in self._inbox.take(seconds):
            if isinstance(command, Submit) and command.kv_transfer is not None:
                if command.kv_transfer.do_remote_decode:
                    self._leasing[command.job] = command
                if self._starts_fetching(command, command.kv_transfer):
                    continue
            elif isinstance(command, Fetched):
                fetching = self._fetching.pop(command.job, None)
                if fetching is not None:
                    self._finish_fetch(fetching)
                    ready.append(fetching.job)
                continue
            elif isinstance(command, Abort):
                fetching = self._fetching.pop(command.job, None)
                if fetching is not None:
                    fetching.pages.cancel()  # has no effect if the fetch has begun
                self._leasing.pop(command.job, None)
            elif isinstance(command, Stop):
                self._fetching.clear()
            ready.append(command)
        return ready

    def send(self, batch: Batch) -> None:
        """Deliver the events of a step, after leasing the pages of prompts that it finished."""
        for event in batch.events:
            job = self._leasing.get(event.job)
            if job is None:
                continue
            if not isinstance(event, Output):
                if isinstance(event, (Refused, Failed)):
                    del self._leasing[event.job]
            elif event.end is not None:
                del self._leasing[event.job]
                event.end.kv_transfer = self._leased(job)
        self._deliver(batch)

    def _starts_fetching(self, job: Submit, transfer: KvTransfer) -> bool:
        """Start to fetch a job's pages; return False if the job need not wait."""
        if not transfer.do_remote_prefill:
            return False
        try:
            addresses = self._addresses_of(transfer)
            expected = self._pages.expected(*_request_of(job))
        except ValueError as error:  # the request is invalid: the engine refuses it with a message
            _log_computed(error)
            return False
        latest = time.monotonic() + SECONDS
        pages = self._threads.submit(job.client, partial(self._fetch, addresses, expected, latest))
        self._fetching[job.job] = _Fetching(job, expected, pages)
        if self._ranks.rank == 0:  # rank 0 informs the others
            pages.add_done_callback(lambda _: self._inbox.put(Fetched(job.job)))
        return True

    def _fetch(self, addresses: Sequence[Address], expected: Header, latest: float) -> Pages:
        """Fetch a job's pages from the ranks of the other engine, and join them.

        Raises:
            KvTransferError: earlier fetches took so long that the time `latest` has passed; or a
                transfer failed.
            OSError: the other engine cannot be reached, or disconnected.
        """
        if time.monotonic() > latest:
            raise KvTransferError(
                f"KV transfer: the fetch waited longer than {SECONDS:g} s for earlier ones"
            )
        parts = []
        for rank in sources(len(addresses), self._ranks.size, self._ranks.rank):
            part = structs.replace(expected, num_ranks=len(addresses), rank=rank)
            parts.append(self._transport.fetch(addresses[rank], part))
        return joined(parts, expected)

    def _addresses_of(self, transfer: KvTransfer) -> list[Address]:
        """Return the addresses of the ranks of the other engine.

        All ranks of this engine return the same addresses or raise the same error.

        Raises:
            KvTransferError: an address is missing or not configured, the lease's name is malformed,
                or neither engine's number of ranks divides the other's.
        """
        name = transfer.remote_request_id
        host = transfer.remote_host
        port = transfer.remote_port
        if name is None or host is None or port is None:
            raise KvTransferError(
                "KV transfer: remote_request_id, remote_host and remote_port must be given"
            )
        if not _LEASE_NAME.fullmatch(name):
            raise KvTransferError(
                f"KV transfer: remote_request_id must be 32 hexadecimal digits, got {name!r}"
            )
        ports = transfer.remote_ports or [port]
        sources(len(ports), self._ranks.size, self._ranks.rank)
        addresses = [Address(name, host, port) for port in ports]
        for address in addresses:
            self._transport.require_peer(address)
        return addresses

    def _finish_fetch(self, fetching: _Fetching) -> None:
        """Put a job's pages into the prefix cache, if all ranks received theirs undamaged."""
        pages = None
        num_damaged = 0
        reason: object = "another rank lacks its shard of the pages"
        try:
            pages = fetching.pages.result()
        except DamagedError as error:
            reason = error
            num_damaged = max(fetching.expected.num_pages, 1)
        except (KvTransferError, OSError) as error:
            reason = error
        except Exception:
            reason = "internal error while fetching the pages"
            logger.exception(reason)
        is_whole = self._ranks.least(int(pages is not None)) == 1
        if pages is None or not is_whole:
            self._engine.stats.num_damaged_kv_pages -= self._ranks.least(-num_damaged)
            return _log_computed(reason)
        job = fetching.job
        salt = adapted_salt(job.params.cache_salt, job.adapter)
        self._pages.give(pages, fetching.expected, salt)

    def _leased(self, job: Submit) -> KvTransfer | None:
        """Lease a prompt's pages; return their location for another engine, or None on failure."""
        is_leased = True
        count = 0
        self._num_leases += 1
        number = str(self._num_leases).encode()
        name = hashlib.blake2b(number, key=self._secret, digest_size=16).hexdigest()
        try:
            pages = self._pages.take(*_request_of(job))
            count = pages.header.num_pages
            self._transport.lease(name, pages)
        except Exception:
            logger.exception("could not lease the pages of a prompt")
            is_leased = False
        if self._ranks.least(int(is_leased)) == 0:  # also waits until all ranks have leased
            return None
        return KvTransfer(
            do_remote_prefill=True,
            remote_engine_id=self.contract["digest"],
            remote_request_id=name,
            remote_block_ids=list(range(count)),
            remote_host=self._transport.host,
            remote_port=self._ports[0],
            remote_ports=self._ports if self._ranks.size > 1 else None,
        )


def _log_computed(why: object) -> None:
    """Log why this engine computes a prompt itself that another engine has already computed."""
    reason = str(why)
    if len(reason) > _MAX_REASON_LENGTH:
        reason = f"{reason[:_MAX_REASON_LENGTH]} ..."
    logger.warning("computing a prompt that another engine has computed: %s", reason)


def _request_of(
    job: Submit,
) -> tuple[Sequence[int], SamplingParams, dict[str, object] | None, tuple[str, str] | None]:
    """Return the arguments of `PageTransfer` that describe a job's request."""
    return job.prompts[0], job.params, speculative_of(job), job.adapter


def speculative_of(job: Submit) -> dict[str, object] | None:
    """Return the speculative configuration of a job, or None."""
    return None if job.speculative_config is None else json.loads(job.speculative_config)


def transfer_inbox_of(
    engine: Engine, role: RoleSettings, inbox: Inbox, deliver: Callable[[Batch], None]
) -> KvTransferInbox:
    """Return the inbox of an engine process, or of one rank's process, with KV transfer.

    Raises:
        ValueError: its transport cannot listen at the configured address.
    """
    leases = Leases(role.lease_seconds, role.lease_bytes)
    make: type[TcpTransport] = TcpTransport
    if role.transport == "nixl":
        from specops.disaggregated.nixl import NixlTransport

        make = NixlTransport
    try:
        transport = make(role.host, role.port, leases, role.peers)
    except OSError as error:
        raise ValueError(
            f"kv_host and kv_port must be an address to listen on, got {role.host}:{role.port}: "
            f"{error}"
        ) from None
    return KvTransferInbox(engine, transport, inbox, deliver)
