# SPDX-License-Identifier: Apache-2.0
"""An engine in a process of its own, which is restarted when it dies."""

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from msgspec.structs import replace

from specops.api.messages import (
    AdapterChange,
    Batch,
    Begin,
    Command,
    Hello,
    LoadAdapter,
    NoEngine,
    Stop,
    UnloadAdapter,
)
from specops.service.client import EngineClient
from specops.service.wire import Frames, Setup, encoded, from_process, receive

logger = logging.getLogger(__name__)

# Python program of the engine's process; it imports modules from the same paths as this process.
_CODE = "import sys; sys.path[:] = {path!r}; from specops.service.child import main; main()"

# Seconds to wait before the first, second and third restart after deaths in a row.
_PAUSES = (0.0, 2.0, 8.0)
_WELL_SECONDS = 60.0  # an engine that ran this long resets the count of deaths
_STOP_SECONDS = 4.0  # time for the loop to end; a process that takes longer has hung
_END_SECONDS = 60.0  # time for the process to end, since it may save what its drafters learnt
_REAP_SECONDS = 2.0  # time for the process to end once its socket is closed
_MAX_UNREAD_BYTES = 64 << 20  # bytes that may wait for a process before jobs are refused
_SECRETS = ("SPECOPS_API_KEY", "SPECOPS_SCHEDULER_PASSWORD")  # the engine does not need them
_LOST = "the engine's process has ended; the server's log says more"

# Properties that an engine with other weights must share with the old one.
_CONSTANT = ("model_name", "max_model_len", "vocab_size", "page_size", "methods")

# Seconds without a batch after which an engine counts as hung: more than a step, or saving the
# drafters' state, takes.
ENGINE_TIMEOUT = 300.0
_STALLED_SHARE = 0.1  # fraction of the timeout after which the engine counts as stalled
_TICKS = 100  # checks per timeout
_TICK_SECONDS = 1.0  # longest time between checks


class EngineProcess:
    """Process of an engine, which begins to load at once.

    Args:
        setup: configuration of the engine.
        code: Python program of the process; by default specops' own.
    """

    def __init__(self, setup: Setup, code: str | None = None) -> None:
        self._setup = setup
        self._code = code
        self.connection, child_end = socket.socketpair()
        program = code or _CODE.format(path=sys.path)
        with child_end:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program, "specops-engine", str(child_end.fileno())],
                pass_fds=[child_end.fileno()],
                stdin=subprocess.DEVNULL,
                env={name: os.environ[name] for name in os.environ if name not in _SECRETS},
            )
        self.pid = self._process.pid
        self.connection.sendall(encoded(setup))

    def again(self, settings: Mapping[str, Any] = MappingProxyType({})) -> "EngineProcess":
        """Start and return another process with the same setup, apart from some settings."""
        changed = {**self._setup.settings, **settings}
        return EngineProcess(replace(self._setup, settings=changed), self._code)

    def hello(self) -> Hello:
        """Wait until the engine is loaded. Call this once, before sending a command.

        Raises:
            ValueError: its configuration or its model cannot be used, or the process has ended.
        """
        frames = Frames()
        messages: list[object] = []
        try:
            while not messages:
                messages += map(from_process, receive(self.connection, frames))
        except (EOFError, ConnectionError):
            raise ValueError(
                f"the engine's process ended ({self.end()}) before it had loaded its engine"
            ) from None
        (message,) = messages
        if isinstance(message, NoEngine):
            raise ValueError(message.message)
        assert isinstance(message, Hello)
        return message

    def send_kill(self) -> None:
        """Kill the process, even if it hangs or is suspended, without waiting for its end."""
        self._process.kill()

    def kill(self) -> None:
        """End the process at once, unless it has ended."""
        self.send_kill()
        self.end()

    def wait(self) -> None:
        """Wait for the end of a process that has been told to stop; kill it if it hangs."""
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.send_kill()
            self._process.wait()

    def end(self, seconds: float = _END_SECONDS) -> str:
        """Wait for the end of the process, kill it after `seconds`, and return how it ended."""
        self.connection.close()
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            try:
                code = self._process.wait(_REAP_SECONDS)
            except subprocess.TimeoutExpired:  # the kernel waits for a device
                return "it was killed, but has not ended yet"
        if code >= 0:
            return f"exit status {code}"
        names = {int(number): number.name for number in signal.Signals}
        return names.get(-code, f"signal {-code}")


class _Link(asyncio.Protocol):
    """Protocol of the socket to one process."""

    def __init__(self, client: "ProcessClient") -> None:
        self._client = client
        self._frames = Frames()

    def data_received(self, data: bytes) -> None:
        self._client.silent_seconds = 0.0
        for body in self._frames.feed(data):
            self._client.received(from_process(body))

    def connection_lost(self, error: Exception | None) -> None:
        self._client.disconnected()


class _Ended(asyncio.Protocol):
    """Protocol of the socket to a process that another one has replaced: drop all messages."""


class ProcessClient(EngineClient):
    """Client of an engine in a process, which it restarts when the process dies.

    The jobs of a process that dies are lost. After a few deaths in a row it is not restarted. An
    engine that sends nothing for `timeout` seconds is killed. Time is counted in ticks of this
    process's event loop, so that changes of the clock and a suspended machine do not count. If this
    process is too slow to read the engine's batches, its ticks are late as well.

    Args:
        process: the process; the constructor waits until its engine is loaded.
        timeout: seconds of silence after which an engine counts as hung and is killed. There is no
            limit while a process loads its engine.

    Raises:
        ValueError: the engine's configuration or its model cannot be used, or the process ended.
    """

    def __init__(self, process: EngineProcess, timeout: float = ENGINE_TIMEOUT) -> None:
        hello = process.hello()
        super().__init__(hello.capabilities, hello.status)
        self.pid = process.pid
        self._process = process
        self._timeout = timeout
        self._watching: asyncio.Task[None] | None = None
        self._num_clients = 1
        self._transport: asyncio.WriteTransport | None = None
        self._outgoing: list[bytes] = []
        self._adapter_changes: dict[str, AdapterChange] = {}  # the last change of each adapter
        self._is_stopping = False
        self._loop_has_ended = asyncio.Event()
        self._is_gone = asyncio.Event()
        self._restarting: asyncio.Task[None] | None = None
        self._num_deaths = 0  # number of deaths in a row
        self._begun_at: float | None = None  # when the current engine began; None until it begins

    @property
    def is_behind(self) -> bool:
        """True if so much unread input waits for the engine that further jobs must be refused."""
        unread = sum(map(len, self._outgoing))
        if self._transport is not None:
            unread += self._transport.get_write_buffer_size()
        return unread > _MAX_UNREAD_BYTES

    async def start(
        self, receive: Callable[[Batch], None], lost: Callable[[str], None], num_clients: int
    ) -> None:
        """Connect to the process and send `Begin`. Call this once, on the event loop."""
        await super().start(receive, lost, num_clients)
        self._num_clients = num_clients
        await self._connect()
        self._begin()
        self._watching = asyncio.ensure_future(self._watch())

    async def stop(self) -> None:
        """Drop the remaining jobs and wait for the process to end; kill it if it hangs."""
        self._is_stopping = True
        for task in (self._restarting, self._watching):
            if task is not None:
                task.cancel()
        if self._transport is not None and self._begun_at is None:  # it loads, and cannot read Stop
            self._transport.abort()
            return await asyncio.to_thread(self._process.kill)
        if self._transport is not None:
            self._send(Stop())
            try:
                await asyncio.wait_for(self._loop_has_ended.wait(), _STOP_SECONDS)
                await asyncio.wait_for(self._is_gone.wait(), _END_SECONDS)
            except asyncio.TimeoutError:  # another class than TimeoutError until Python 3.11
                logger.error("the engine's process did not end in time; killing it")
                self._process.send_kill()
                self._transport.abort()
        await asyncio.to_thread(self._process.end, _REAP_SECONDS)

    async def update(self, settings: Mapping[str, Any]) -> None:
        """Replace the engine by one with other settings, which is loaded before the old one ends.

        Args, Raises: as in `EngineClient.update`.
        """
        if self._transport is None or self._begun_at is None:
            raise ValueError("the engine is being restarted; try again later")
        process = await asyncio.to_thread(self._process.again, settings)
        try:
            hello = await asyncio.to_thread(process.hello)
            for name in _CONSTANT:
                new, old = (getattr(one, name) for one in (hello.capabilities, self.capabilities))
                if new != old:
                    raise ValueError(f"the new model must have {name} {old}, got {new}")
            if self._transport is None or self._is_stopping:
                raise ValueError("the engine ended while the new one was loaded")
        except BaseException:
            await asyncio.to_thread(process.kill)
            raise
        old_process, old = self._process, self._transport
        old.set_protocol(_Ended())
        self._flush()
        old.write(encoded(Stop()))
        self._process, self.pid = process, process.pid
        self._begun_at = None
        await self._connect()
        self.capabilities, self.status, self.health = hello.capabilities, hello.status, "ok"
        self.full, self.silent_seconds, self._num_deaths = {}, 0.0, 0
        self._begin()
        self._change_adapters_again()
        await asyncio.to_thread(old_process.wait)
        old.close()

    def received(self, message: Hello | NoEngine | Batch) -> None:
        """Handle a message of the process."""
        if isinstance(message, Batch):
            if message.health == "failed":  # its last batch; `disconnected` restarts the process
                self._loop_has_ended.set()
                message.health = "restarting"
            self._handle_batch(message)
        elif isinstance(message, NoEngine):
            logger.critical("cannot restart the engine: %s", message.message)
        elif message.capabilities.contract != self.capabilities.contract:
            logger.critical(
                "cannot restart the engine: its model has changed since the server started; "
                "restart the server to use it"
            )
            self._num_deaths = len(_PAUSES)
            self._close()
        else:
            self.capabilities = message.capabilities
            self.status = message.status
            self.health = "ok"
            self._begin()
            self._change_adapters_again()

    def keep_adapter_change(self, change: AdapterChange) -> None:
        """Remember a change, since a restarted engine has the adapters of its configuration."""
        self._adapter_changes[change.name] = change

    def _change_adapters_again(self) -> None:
        for change in self._adapter_changes.values():
            if change.name in self.status.adapters:
                self._send(UnloadAdapter(change.job, change.name))
            if isinstance(change, LoadAdapter):
                self._send(change)

    def disconnected(self) -> None:
        """Handle the end of the connection: fail all jobs and restart the process."""
        self._transport = None
        self._outgoing.clear()
        self._loop_has_ended.set()
        self._is_gone.set()
        if self._is_stopping:
            return
        self.health = "restarting"
        self.full = {}
        pages = self.capabilities.num_pages
        self.status = replace(self.status, num_running=0, num_waiting=0, num_free_pages=pages)
        self._lost(_LOST)
        self._restarting = asyncio.ensure_future(self._restart())

    async def _watch(self) -> None:
        """Measure the time since the engine's last batch, and kill an engine that hangs."""
        while True:
            stalled = _STALLED_SHARE * self._timeout
            tick = min(self._timeout / _TICKS, _TICK_SECONDS)
            await asyncio.sleep(tick)
            if self._transport is None or self._begun_at is None:  # no process, or it is loading
                self.silent_seconds = 0.0
                continue
            self.silent_seconds += tick
            if self.silent_seconds > self._timeout:
                logger.critical(
                    "the engine has been silent for %g s; killing it; raise --engine-timeout if "
                    "steps may take that long",
                    self._timeout,
                )
                self.silent_seconds = 0.0
                self._process.send_kill()
                self._transport.abort()
            elif self.silent_seconds > stalled and self.health in ("ok", "failing"):
                logger.error("the engine has been silent for %g s", stalled)
                self.health = "stalled"

    async def _restart(self) -> None:
        ending = await asyncio.to_thread(self._process.end)
        begun_at = self._begun_at
        self._begun_at = None
        if begun_at is not None and time.monotonic() - begun_at > _WELL_SECONDS:
            self._num_deaths = 0
        while self._num_deaths < len(_PAUSES):
            pause = _PAUSES[self._num_deaths]
            self._num_deaths += 1
            logger.critical("the engine's process ended (%s); restarting it in %g s", ending, pause)
            await asyncio.sleep(pause)
            try:
                self._process = await asyncio.to_thread(self._process.again)
                self.pid = self._process.pid
                return await self._connect()
            except OSError as error:
                ending = f"it could not be started: {error}"
        logger.critical(
            "the engine's process ended (%s); giving up after %d restarts in a row",
            ending,
            len(_PAUSES),
        )
        self.health = "failed"

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        self._loop_has_ended.clear()
        self._is_gone.clear()
        connected = loop.create_unix_connection(lambda: _Link(self), sock=self._process.connection)
        self._transport, _ = await connected

    def _begin(self) -> None:
        self._begun_at = time.monotonic()
        self._send(Begin(self._num_clients))

    def _send(self, command: Command) -> None:
        data = encoded(command)
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.append(data)

    def _flush(self) -> None:
        """Write all commands of one round of the event loop together."""
        if self._transport is not None and self._outgoing:
            self._transport.write(b"".join(self._outgoing))
        self._outgoing.clear()

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()
