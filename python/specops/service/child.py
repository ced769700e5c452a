# SPDX-License-Identifier: Apache-2.0
"""The process of an engine, which `process.py` starts.

It ends on a `Stop` command, or when the other end of its socket is closed, so it never outlives its
parent.
"""

import contextlib
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from specops._garbage import garbage_collection_paused
from specops.api.messages import Batch, Command, Fetched, Hello, NoEngine, Overdue, Stop
from specops.service import logs
from specops.service.garbage import raise_gc_thresholds
from specops.service.wire import Frames, Setup, encoded, receive, to_process

if TYPE_CHECKING:
    from specops.engine.engine import Engine
    from specops.engine.memory.kv_cache import PrefixListener
    from specops.service.loop import Compiled, EngineLoop, Inbox

    MakeEngine = Callable[[Setup, PrefixListener | None], Engine]

# Time after which a thread must yield Python's lock, so that threads that compile grammars do not
# delay the loop.
_SWITCH_SECONDS = 0.0005
# Time for an engine to end, and to save what its drafters learnt, after its server has ended.
_LAST_SECONDS = 90.0


class SocketInbox:
    """Inbox of commands from a socket and from threads of this process.

    Args:
        connection: socket from which commands are received.
        frames: buffer with the beginning of the next message.
        first_commands: commands that have been read already.
    """

    def __init__(
        self, connection: socket.socket, frames: Frames, first_commands: Iterable[Command] = ()
    ) -> None:
        self._connection = connection
        self._frames = frames
        self._queued: deque[Command | Compiled] = deque(first_commands)
        self._decoded: list[Command | Compiled] = []
        self._has_unread = False  # whether an error left received messages undecoded
        self._waker, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._poll.register(self._waker, select.POLLIN)

    def put(self, command: "Compiled | Fetched | Overdue") -> None:
        """Add a command, from any thread; a waiting `take` returns it at once."""
        self._queued.append(command)
        with contextlib.suppress(BlockingIOError):  # enough bytes are there to wake it
            self._wake.send(b"x")

    def take(self, seconds: float | None) -> "Sequence[Command | Compiled]":
        """Return the available commands; wait up to `seconds` (None: forever) for one.

        After a failure nothing is lost, and the next call reads the same messages again.
        """
        if seconds != 0.0 and not self._queued and not self._has_unread:
            ready = self._poll.poll(None if seconds is None else 1e3 * seconds)
            if any(number == self._waker.fileno() for number, _ in ready):
                self._waker.recv(1 << 12)
        has_unread = self._has_unread
        self._has_unread = True
        if has_unread:
            self._decoded += [*map(to_process, self._frames.feed(b""))]
        try:
            while True:
                bodies = receive(self._connection, self._frames, socket.MSG_DONTWAIT)
                self._decoded += [*map(to_process, bodies)]  # decodes all of these messages or none
        except BlockingIOError:
            pass
        except (EOFError, ConnectionError):
            self._decoded.append(Stop())
        self._has_unread = False
        commands = [self._queued.popleft() for _ in range(len(self._queued))]
        commands += self._decoded
        self._decoded.clear()
        return commands


def run(connection: socket.socket, make: "MakeEngine") -> int:
    """Make the engine that the first message (`Setup`) describes, and run it until it ends.

    Args:
        connection: socket to the parent process.
        make: makes the engine, given a listener for changes of the prefix cache; raises ValueError
            with the reason if the engine cannot be made.

    Returns:
        The exit code.
    """
    # Terminals and supervisors send signals to all processes of a group; ignore these, since this
    # process must end only when its parent ends it.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    frames = Frames()
    messages: list[Any] = []
    try:
        while not messages:
            messages += map(to_process, receive(connection, frames))
    except (EOFError, ConnectionError):
        return 1
    setup, *first_commands = messages
    logs.configure(setup.log_level, setup.log_format)
    if setup.rank:
        return _follow(connection, frames, setup, make)
    return _serve(_Parent(connection), setup, SocketInbox(connection, frames, first_commands), make)


class _Parent:
    """Connection to the parent process, which started this process.

    Args:
        connection: socket to the parent.

    Attributes:
        has_engine: set when the engine has been made or has failed to be made.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._has_reported = threading.Lock()
        self.has_engine = threading.Event()
        threading.Thread(target=_watch, args=(connection, self.has_engine), daemon=True).start()

    def send(self, message: Hello | NoEngine | Batch) -> None:
        """Send a message; ignore a closed socket, which the inbox reports."""
        with contextlib.suppress(ConnectionError):
            self._connection.sendall(encoded(message))

    def refuse(self, sentence: str) -> None:
        """Report why the engine cannot be made; only the first call, in any thread, does so."""
        if self._has_reported.acquire(blocking=False):
            self.send(NoEngine(sentence))

    def end(self, sentence: str) -> None:
        """End this process because another rank has ended."""
        if not self.has_engine.is_set():
            self.refuse(sentence)
        logging.getLogger(__name__).critical("%s; stopping all ranks", sentence)
        os._exit(1)


def _serve(parent: _Parent, setup: Setup, inbox: SocketInbox, make: "MakeEngine") -> int:
    """Make and run a single engine or the engine of the first rank; return the exit code."""
    with garbage_collection_paused():  # this imports torch
        from specops.service.snapshot import capabilities_of, status_of

    commands: Inbox = inbox
    send: Callable[[Batch], None] = parent.send
    with contextlib.ExitStack() as stack:
        try:
            if setup.settings.get("tensor_parallel_size", 1) > 1:
                from specops.service.lockstep import Followers, LeadInbox

                commands = LeadInbox(inbox, stack.enter_context(Followers(setup, parent.end)))
            events = None
            if setup.kv_events is not None:
                from specops.disaggregated.kv_events import KvEvents, PrefixEvents

                events = PrefixEvents()
            engine = make(setup, events)
            role = ""
            contract = None
            if setup.role is not None:
                from specops.disaggregated.transfer_inbox import transfer_inbox_of

                transfers = stack.enter_context(
                    transfer_inbox_of(engine, setup.role, commands, send)
                )
                commands = transfers
                send = transfers.send
                role = setup.role.role
                contract = transfers.contract
            if setup.sessions is not None:
                from specops.disaggregated.session_inbox import session_inbox_of

                sessions = stack.enter_context(
                    session_inbox_of(engine, setup.sessions, commands, send)
                )
                commands = sessions
                send = sessions.send
                contract = sessions.contract
            if events is not None and setup.kv_events is not None:
                rank = setup.data_parallel_rank
                send = stack.enter_context(KvEvents(events, setup.kv_events, rank, send)).send
            capabilities = capabilities_of(
                engine, role, contract, has_sessions=setup.sessions is not None
            )
            hello = Hello(capabilities, status_of(engine))
        except ValueError as error:
            parent.refuse(str(error))
            return 1
        finally:
            parent.has_engine.set()
        raise_gc_thresholds()
        sys.setswitchinterval(_SWITCH_SECONDS)
        parent.send(hello)
        _loop_of(engine, commands, send).run()
    return 0


def _follow(connection: socket.socket, frames: Frames, setup: Setup, make: "MakeEngine") -> int:
    """Run a follower rank's engine; `connection` leads to the first rank. Return the exit code."""
    from specops.service.lockstep import FollowInbox, end_with_the_first

    end_with_the_first(connection, setup.store)
    commands: Inbox = FollowInbox(connection, frames)
    send: Callable[[Batch], None] = lambda batch: None  # noqa: E731
    with contextlib.ExitStack() as stack:
        try:
            engine = make(setup, None)
            if setup.role is not None:
                from specops.disaggregated.transfer_inbox import transfer_inbox_of

                transfers = stack.enter_context(
                    transfer_inbox_of(engine, setup.role, commands, send)
                )
                commands = transfers
                send = transfers.send
        except ValueError as error:
            connection.sendall(encoded(NoEngine(str(error))))
            return 1
        _loop_of(engine, commands, send).run()
    return 0


def _loop_of(engine: "Engine", commands: "Inbox", send: Callable[[Batch], None]) -> "EngineLoop":
    """Return the loop of an engine, or of one rank."""
    from specops.service.lockstep import Lockstep
    from specops.service.loop import EngineLoop

    if engine.ranks.size == 1:
        return EngineLoop(engine, commands, send)
    lockstep = Lockstep(engine)
    return EngineLoop(engine, commands, send, lockstep.step, lockstep.barrier)


def _watch(connection: socket.socket, loaded: threading.Event) -> None:
    """End this process when the other end of its socket is closed.

    While the engine loads, end the process at once. Later, leave time for the loop, which also
    notices the end of the connection and stops by itself unless it hangs.
    """
    poll = select.poll()
    poll.register(connection, 0)  # POLLHUP is always reported
    poll.poll()
    if loaded.is_set():
        time.sleep(_LAST_SECONDS)
    os._exit(1)


def main() -> None:
    """Run an engine on the socket whose file descriptor is the last argument; never return."""

    def make(setup: Setup, on_prefix: "PrefixListener | None") -> "Engine":
        import torch

        from specops.api.config import EngineConfig
        from specops.engine.engine import Engine
        from specops.service.lockstep import group_of, of_rank

        ranks = None
        if setup.settings.get("tensor_parallel_size", 1) > 1:
            ranks = group_of(setup)
        elif setup.data_parallel_rank is not None:
            setup.settings = of_rank(setup.settings, setup.data_parallel_rank)
        engine = Engine(EngineConfig.from_plain(setup.settings), ranks, on_prefix)
        # The kernels' own threads use all cores from now on; torch's threads would only spin beside
        # them.
        torch.set_num_threads(1)
        engine.measure_row_costs()
        engine.check_drafters()
        return engine

    code = 1
    try:
        code = run(socket.socket(fileno=int(sys.argv[-1])), make)
    except BaseException:
        logging.getLogger(__name__).exception("the engine's process failed")
    finally:
        logging.shutdown()
        os._exit(code)  # abandons unfinished grammar compilations
