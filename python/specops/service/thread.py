# SPDX-License-Identifier: Apache-2.0
"""An engine in a thread of the server's process, for debugging and for tests that inspect it."""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence

from specops.api.messages import Batch, Begin, Command, Stop
from specops.engine.engine import Engine
from specops.service.client import EngineClient
from specops.service.loop import Compiled, EngineLoop
from specops.service.snapshot import capabilities_of, status_of

logger = logging.getLogger(__name__)

_END_SECONDS = 60.0  # time for the thread to end, since it may save drafters' state


class _QueueInbox:
    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Command | Compiled] = queue.SimpleQueue()

    def put(self, command: Command | Compiled) -> None:
        self._queue.put(command)

    def take(self, seconds: float | None) -> Sequence[Command | Compiled]:
        commands = []
        if seconds != 0.0:
            try:
                commands.append(self._queue.get(timeout=seconds))
            except queue.Empty:
                return ()
        while not self._queue.empty():  # no other thread takes from the queue
            commands.append(self._queue.get())
        return commands


class ThreadClient(EngineClient):
    """Client of an engine in a thread of this process.

    Args:
        engine: the engine, which only the thread may use after `start`.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(capabilities_of(engine), status_of(engine))
        self._engine = engine
        self._inbox = _QueueInbox()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="specops-engine", daemon=True)

    async def start(
        self, receive: Callable[[Batch], None], lost: Callable[[str], None], num_clients: int
    ) -> None:
        """Start the thread."""
        await super().start(receive, lost, num_clients)
        self._loop = asyncio.get_running_loop()
        self._send(Begin(num_clients))
        self._thread.start()

    async def stop(self) -> None:
        """Drop the remaining jobs and wait for the thread to end."""
        self._send(Stop())
        await asyncio.to_thread(self._thread.join, _END_SECONDS)
        if self._thread.is_alive():
            logger.error("the engine's thread did not end within %g s", _END_SECONDS)

    def _send(self, command: Command) -> None:
        self._inbox.put(command)

    def _run(self) -> None:
        try:
            EngineLoop(
                self._engine,
                self._inbox,
                lambda batch: self._on_loop(lambda: self._handle_batch(batch)),
            ).run()
        finally:
            self._on_loop(self._end)

    def _end(self) -> None:
        self.health = "failed"
        self._lost("the engine has stopped")

    def _on_loop(self, work: Callable[[], None]) -> None:
        assert self._loop is not None, "the thread has been started"
        try:
            self._loop.call_soon_threadsafe(work)
        except RuntimeError:  # the event loop has ended, so the result is not needed
            logger.debug("dropped results, since the event loop has ended", exc_info=True)
