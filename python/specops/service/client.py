# SPDX-License-Identifier: Apache-2.0
"""The one thing that a server knows of an engine.

The engine may run in a thread of the same process (`thread.ThreadClient`) or in a process of its
own (`process.ProcessClient`); whoever uses a client need not know which.
"""

from collections.abc import Callable

from specops.service.messages import Abort, Batch, Capabilities, Command, Health, Status, Submit


class EngineClient:
    """An engine, as somebody on an event loop sees it. Everything belongs to that event loop.

    Attributes:
        capabilities: what never changes about the engine.
        status: what it was doing last. Any thread may read it.
        health: "ok"; "failing", its last steps failed; "stalled", it has been silent for long;
            "restarting"; "disconnected", the queue of its jobs cannot be reached; or "failed", it
            runs no more.
        silent_seconds: time since the engine's last sign of life, as far as this process was awake.
            An engine gives one after each step, and each second when it is idle. 0 while an
            engine is loaded, for an engine in a thread of this process, and for several engines.
        full: clients whose share of the room to wait is full, and what they are to be told.
        pid: the engine's process; None: this one.
    """

    def __init__(self, capabilities: Capabilities, status: Status) -> None:
        self.capabilities = capabilities
        self.status = status
        self.health: Health = "ok"
        self.silent_seconds = 0.0
        self.full: dict[str, str] = {}
        self.pid: int | None = None
        self._receive: Callable[[Batch], None] = lambda batch: None
        self._lost: Callable[[str], None] = lambda message: None

    @property
    def is_behind(self) -> bool:
        """Whether the engine has not read so much that no further job may be handed over."""
        return False

    async def start(
        self, receive: Callable[[Batch], None], lost: Callable[[str], None], num_clients: int
    ) -> None:
        """Begins; called once, on the event loop.

        Args:
            receive: called with every batch.
            lost: called with a sentence when the engine is gone, and with it every job.
            num_clients: as in `Begin`.
        """
        self._receive, self._lost = receive, lost

    async def stop(self) -> None:
        """Drops what is left, and waits for the engine to end."""
        raise NotImplementedError

    def submit(self, job: Submit) -> None:
        """Hands over a job, to which the engine answers with `Accepted`, `Refused` or `Failed`.

        Raises:
            ValueError: a value in it is too large to be handed over.
        """
        self._send(job)

    def abort(self, job: int) -> None:
        """Drops what is unfinished of a job."""
        self._send(Abort(job))

    def _send(self, command: Command) -> None:
        raise NotImplementedError

    def _take(self, batch: Batch) -> None:
        self.status, self.health = batch.status, batch.health
        if batch.full is not None:
            self.full = batch.full
        self._receive(batch)
