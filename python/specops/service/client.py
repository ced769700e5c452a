# SPDX-License-Identifier: Apache-2.0
"""The server's interface to an engine.

The engine may run in a thread of the same process (`thread.ThreadClient`) or in a process of its
own (`process.ProcessClient`); both have this interface.
"""

from collections.abc import Callable, Mapping
from typing import Any

from specops.api.messages import (
    Abort,
    AdapterChange,
    Batch,
    Capabilities,
    Command,
    Health,
    Status,
    Submit,
)


class EngineClient:
    """Interface of an event loop to an engine. All methods must be called on that event loop.

    Attributes:
        capabilities: constant properties of the engine.
        status: last known state of the engine. Any thread may read it.
        health: "ok"; "failing": its last steps failed; "stalled": it has been silent for long;
            "restarting"; "disconnected": the queue of its jobs cannot be reached; or "failed": it
            has ended for good.
        silent_seconds: time since the engine's last batch, not counting time in which this process
            was suspended. An engine sends a batch after each step, and every second when idle. 0
            while an engine loads, for an engine in a thread of this process, and for several
            engines.
        full: error message for each client whose share of the queue is full.
        pid: process id of the engine; None if it runs in this process.
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
        """True if so much unread input waits for the engine that further jobs must be refused."""
        return False

    async def start(
        self, receive: Callable[[Batch], None], lost: Callable[[str], None], num_clients: int
    ) -> None:
        """Start receiving batches. Call this once, on the event loop.

        Args:
            receive: called with every batch.
            lost: called with an error message when the engine, and every job in it, is lost.
            num_clients: as in `Begin`.
        """
        self._receive = receive
        self._lost = lost

    async def stop(self) -> None:
        """Drop the remaining jobs and wait for the engine to end."""
        raise NotImplementedError

    async def update(self, settings: Mapping[str, Any]) -> None:
        """Replace the engine, which must have no job, by one with other settings.

        Args:
            settings: changes of the argument of `EngineConfig.from_plain`.

        Raises:
            ValueError: the new engine cannot be made, or differs in more than its weights; the old
                one continues.
        """
        raise ValueError("weights can only be updated in a single engine with its own process")

    def submit(self, job: Submit) -> None:
        """Submit a job, to which the engine answers with `Accepted`, `Refused` or `Failed`.

        Raises:
            ValueError: a value in it is too large to be sent.
        """
        self._send(job)

    def abort(self, job: int) -> None:
        """Abort the unfinished choices of a job."""
        self._send(Abort(job))

    def change_adapters(self, change: AdapterChange) -> None:
        """Load or unload a LoRA adapter; the engine answers like to a job."""
        self._send(change)

    def keep_adapter_change(self, change: AdapterChange) -> None:
        """Remember a change that succeeded, if the engine may be restarted."""

    def _send(self, command: Command) -> None:
        raise NotImplementedError

    def _handle_batch(self, batch: Batch) -> None:
        self.status = batch.status
        self.health = batch.health
        if batch.full is not None:
            self.full = batch.full
        self._receive(batch)
