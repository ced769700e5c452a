# SPDX-License-Identifier: Apache-2.0
"""Between an engine's loop and its door: what jobs' `kv_transfer` asks for.

On the way in, a job whose prompt another engine has computed waits until its pages are there, and
then finds them in the prefix cache. If they do not come, it goes on without: the engine computes
the prompt itself, with the same bits. On the way out, the pages of a prompt that another engine is
to go on with are leased as soon as its choice has ended.
"""

import json
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from specops.disaggregated.handoff import HandoffError, Header, Pages, PagesEngine
from specops.disaggregated.transport import Address, Leases, TcpTransport, Transport
from specops.engine.engine import Engine
from specops.service.loop import Compiled, Inbox
from specops.service.messages import (
    Abort,
    Batch,
    Command,
    Failed,
    KvTransfer,
    Output,
    Refused,
    Stop,
    Submit,
)
from specops.service.wire import RoleSettings

if TYPE_CHECKING:
    from specops.service.child import SocketInbox

logger = logging.getLogger(__name__)

_FETCHING_THREADS = 8


@dataclass(frozen=True)
class _Fetched:
    """What became of fetching a job's pages."""

    job: Submit
    expected: Header
    pages: "Future[Pages]"


class Exchange(Inbox):
    """The inbox of a loop whose engine has a role, and the end of its batches.

    Args:
        engine: of the loop.
        transport: of pages.
        inbox: where commands come from.
        wake: has the inbox's `take` return, from any thread.
        deliver: called with every batch.
    """

    def __init__(
        self,
        engine: PagesEngine,
        transport: Transport,
        inbox: Inbox,
        wake: Callable[[], None],
        deliver: Callable[[Batch], None],
    ) -> None:
        self._engine, self._transport = engine, transport
        self._inbox, self._wake, self._deliver = inbox, wake, deliver
        self._threads = ThreadPoolExecutor(_FETCHING_THREADS, "specops-fetches")
        self._fetching: set[int] = set()  # jobs
        self._fetched: deque[_Fetched] = deque()
        self._leasing: dict[int, Submit] = {}  # jobs whose pages are for another engine

    def __enter__(self) -> "Exchange":
        return self

    def __exit__(self, *error: object) -> None:
        """Ends the transport and what is being fetched."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._transport.close()

    def put(self, command: Compiled) -> None:
        """Adds one, from any thread."""
        self._inbox.put(command)

    def take(self, seconds: float | None) -> Sequence[Command | Compiled]:
        """Returns commands whose pages are there, or that need none; called between two steps."""
        ready: list[Command | Compiled] = []
        for command in self._inbox.take(0.0 if self._fetched else seconds):
            if isinstance(command, Submit) and command.kv_transfer is not None:
                if command.kv_transfer.do_remote_decode:
                    self._leasing[command.job] = command
                if self._starts_fetching(command, command.kv_transfer):
                    continue
            elif isinstance(command, Abort):
                self._fetching.discard(command.job)
                self._leasing.pop(command.job, None)
            elif isinstance(command, Stop):
                self._fetching.clear()
            ready.append(command)
        while self._fetched:
            done = self._fetched.popleft()
            if done.job.job in self._fetching:
                self._fetching.remove(done.job.job)
                self._put_in(done)
                ready.append(done.job)
        return ready

    def send(self, batch: Batch) -> None:
        """Delivers what a step brought, with the leases of prompts that it has ended."""
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

    def _starts_fetching(self, job: Submit, wanted: KvTransfer) -> bool:
        """Begins to fetch a job's pages; False if there is nothing to wait for."""
        if not wanted.do_remote_prefill:
            return False
        name, host, port = wanted.remote_request_id, wanted.remote_host, wanted.remote_port
        try:
            if name is None or host is None or port is None:
                raise HandoffError(
                    "handoff: remote_request_id, remote_host and remote_port must be given"
                )
            expected = self._engine.expected(job.prompts[0], job.params, speculative_of(job))
        except ValueError as error:  # of the request itself: the engine refuses it in its own words
            logger.warning("the prompt of a job is computed here: %s", error)
            return False
        fetch = partial(self._transport.fetch, Address(name, host, port), expected)
        self._fetching.add(job.job)
        self._threads.submit(fetch).add_done_callback(partial(self._note, job, expected))
        return True

    def _note(self, job: Submit, expected: Header, pages: "Future[Pages]") -> None:
        self._fetched.append(_Fetched(job, expected, pages))
        self._wake()

    def _put_in(self, done: _Fetched) -> None:
        """Gives a job's pages to the engine, if they came and are the right ones."""
        try:
            self._engine.give_pages(done.pages.result(), done.expected)
        except (HandoffError, OSError) as error:
            logger.warning("the prompt of a job is computed here: %s", error)
        except Exception:
            logger.exception("the prompt of a job is computed here")

    def _leased(self, job: Submit) -> KvTransfer | None:
        """Where another engine finds the pages of a prompt; None: there are none."""
        try:
            pages = self._engine.take_pages(job.prompts[0], job.params, speculative_of(job))
            address = self._transport.lease(pages)
        except Exception:
            logger.exception("the pages of a prompt could not be leased")
            return None
        return KvTransfer(
            do_remote_prefill=True,
            remote_engine_id=self._engine.contract,
            remote_request_id=address.lease,
            remote_block_ids=list(range(pages.header.num_pages)),
            remote_host=address.host,
            remote_port=address.port,
        )


def speculative_of(job: Submit) -> dict[str, object] | None:
    """What a job asks of its drafts."""
    return None if job.speculative_config is None else json.loads(job.speculative_config)


def exchange_of(
    engine: Engine, role: RoleSettings, inbox: "SocketInbox", deliver: Callable[[Batch], None]
) -> Exchange:
    """The exchange of an engine process.

    Raises:
        ValueError: its transport cannot listen where it should.
    """
    assert isinstance(engine, PagesEngine)
    leases = Leases(role.lease_seconds, role.lease_bytes)
    try:
        transport = TcpTransport(role.host, role.port, leases, frozenset(role.peers))
    except OSError as error:
        raise ValueError(
            f"kv_host and kv_port must be an address to listen on, got {role.host}:{role.port}: "
            f"{error}"
        ) from None
    return Exchange(engine, transport, inbox, inbox.wake, deliver)
