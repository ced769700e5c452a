# SPDX-License-Identifier: Apache-2.0
"""The process that an engine has to itself; `process.py` starts it.

It ends when it is told to, and when the other end of its socket is closed: it outlives nobody.
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

from specops.service.garbage import search_seldom
from specops.service.messages import Batch, Command, Fetched, Hello, NoEngine, Overdue, Stop
from specops.service.wire import Frames, Setup, encoded, receive, to_process

if TYPE_CHECKING:
    from specops.engine.engine import Engine
    from specops.service.loop import Compiled, EngineLoop, Inbox

# After so long a thread that has Python's lock gives way: those that compile grammars, to the loop.
_SWITCH_SECONDS = 0.0005
# That an engine may take to end, and to save what its drafters learnt, when its server is gone.
_LAST_SECONDS = 90.0


class SocketInbox:
    """Commands of a socket, and of threads of this process.

    Args:
        connection: where the commands come from.
        frames: what has been read of the next message.
        early: commands that have been read already.
    """

    def __init__(
        self, connection: socket.socket, frames: Frames, early: Iterable[Command] = ()
    ) -> None:
        self._connection, self._frames = connection, frames
        self._own: deque[Command | Compiled] = deque(early)
        self._read: list[Command | Compiled] = []
        self._has_unread = False  # messages that have come, but could not be read
        self._waker, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._poll.register(self._waker, select.POLLIN)

    def put(self, command: "Compiled | Fetched | Overdue") -> None:
        """Add a command, from any thread; a `take` that waits returns it at once."""
        self._own.append(command)
        with contextlib.suppress(BlockingIOError):  # then it is awake, or about to be
            self._wake.send(b"x")

    def take(self, seconds: float | None) -> "Sequence[Command | Compiled]":
        """Return the commands that have come; wait for one for `seconds`, or None: without end.

        After a failure nothing is lost, and the next call reads the same messages again.
        """
        if seconds != 0.0 and not self._own and not self._has_unread:
            ready = self._poll.poll(None if seconds is None else 1e3 * seconds)
            if any(number == self._waker.fileno() for number, _ in ready):
                self._waker.recv(1 << 12)
        has_unread, self._has_unread = self._has_unread, True
        if has_unread:
            self._read += [*map(to_process, self._frames.feed(b""))]
        try:
            while True:
                bodies = receive(self._connection, self._frames, socket.MSG_DONTWAIT)
                self._read += [*map(to_process, bodies)]  # of some bytes all or none
        except BlockingIOError:
            pass
        except (EOFError, ConnectionError):
            self._read.append(Stop())
        self._has_unread = False
        commands = [*(self._own.popleft() for _ in range(len(self._own))), *self._read]
        self._read.clear()
        return commands


def run(connection: socket.socket, make: "Callable[[Setup], Engine]") -> int:
    """Makes an engine as the first message says, and runs it until the end.

    Args:
        connection: to the process that has started this one.
        make: makes the engine; ValueError says why it cannot be made.

    Returns:
        The exit code.
    """
    # A terminal and a supervisor tell all processes to end; this one ends when its parent says so.
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, signal.SIG_IGN)
    frames = Frames()
    messages: list[Any] = []
    try:
        while not messages:
            messages += map(to_process, receive(connection, frames))
    except (EOFError, ConnectionError):
        return 1
    setup, *early = messages
    logging.basicConfig(level=setup.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    if setup.rank:
        return _follow(connection, frames, setup, make)
    return _serve(_Parent(connection), setup, SocketInbox(connection, frames, early), make)


class _Parent:
    """Whoever has started this process, and is told what becomes of it.

    Args:
        connection: to it.

    Attributes:
        has_engine: set when there is an engine, or will be none.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._told = threading.Lock()
        self.has_engine = threading.Event()
        threading.Thread(target=_watch, args=(connection, self.has_engine), daemon=True).start()

    def send(self, message: Hello | NoEngine | Batch) -> None:
        """Says something, if anybody hears it: the inbox tells if nobody does."""
        with contextlib.suppress(ConnectionError):
            self._connection.sendall(encoded(message))

    def refuse(self, sentence: str) -> None:
        """Says why there is no engine; once, whichever thread comes to it first."""
        if self._told.acquire(blocking=False):
            self.send(NoEngine(sentence))

    def end(self, sentence: str) -> None:
        """Ends this process because another rank is gone."""
        if not self.has_engine.is_set():
            self.refuse(sentence)
        logging.getLogger(__name__).critical("%s: all ranks end", sentence)
        os._exit(1)


def _serve(
    parent: _Parent, setup: Setup, inbox: SocketInbox, make: "Callable[[Setup], Engine]"
) -> int:
    """Makes the engine, or the first of several, and runs it."""
    from specops.service.snapshot import capabilities_of, status_of

    commands: Inbox = inbox
    send: Callable[[Batch], None] = parent.send
    with contextlib.ExitStack() as stack:
        try:
            if setup.settings.get("tensor_parallel_size", 1) > 1:
                from specops.service.lockstep import Followers, LeadInbox

                commands = LeadInbox(inbox, stack.enter_context(Followers(setup, parent.end)))
            engine = make(setup)
            role, contract = "", None
            if setup.role is not None:
                from specops.disaggregated.exchange import exchange_of

                exchange = stack.enter_context(exchange_of(engine, setup.role, commands, send))
                commands, send = exchange, exchange.send
                role, contract = setup.role.role, exchange.contract
            if setup.kv_events is not None:
                from specops.disaggregated.kv_events import KvEvents

                send = stack.enter_context(
                    KvEvents(engine, setup.kv_events, setup.data_parallel_rank, send)
                ).send
            hello = Hello(capabilities_of(engine, role, contract), status_of(engine))
        except ValueError as error:
            parent.refuse(str(error))
            return 1
        finally:
            parent.has_engine.set()
        search_seldom()
        sys.setswitchinterval(_SWITCH_SECONDS)
        parent.send(hello)
        _loop_of(engine, commands, send).run()
    return 0


def _follow(
    connection: socket.socket, frames: Frames, setup: Setup, make: "Callable[[Setup], Engine]"
) -> int:
    """Does as the first rank does, to which the connection is, until its loop ends."""
    from specops.service.lockstep import FollowInbox, end_with_the_first

    end_with_the_first(connection, setup.store)
    commands: Inbox = FollowInbox(connection, frames)
    send: Callable[[Batch], None] = lambda batch: None  # noqa: E731
    with contextlib.ExitStack() as stack:
        try:
            engine = make(setup)
            if setup.role is not None:
                from specops.disaggregated.exchange import exchange_of

                exchange = stack.enter_context(exchange_of(engine, setup.role, commands, send))
                commands, send = exchange, exchange.send
        except ValueError as error:
            connection.sendall(encoded(NoEngine(str(error))))
            return 1
        _loop_of(engine, commands, send).run()
    return 0


def _loop_of(engine: "Engine", commands: "Inbox", send: Callable[[Batch], None]) -> "EngineLoop":
    """Return the loop of an engine, or of one rank."""
    from specops.service.lockstep import RankEngine
    from specops.service.loop import EngineLoop

    if isinstance(engine, RankEngine):
        return EngineLoop(engine, commands, send, engine.meet)
    return EngineLoop(engine, commands, send)


def _watch(connection: socket.socket, loaded: threading.Event) -> None:
    """End this process when the other end goes away.

    While the engine loads, that is at once. Later the loop reads the same end of the connection,
    and ends by itself unless it hangs.
    """
    poll = select.poll()
    poll.register(connection, 0)  # POLLHUP is always told
    poll.poll()
    if loaded.is_set():
        time.sleep(_LAST_SECONDS)
    os._exit(1)


def _kind_of(setup: Setup) -> "tuple[type[Any], bool]":
    """The engine of a process, and whether it is one of several ranks."""
    is_rank = setup.settings.get("tensor_parallel_size", 1) > 1
    kind: type[Engine]
    if setup.role is not None and is_rank:
        from specops.disaggregated.exchange import PagesRankEngine as kind
    elif setup.role is not None:
        from specops.disaggregated.handoff import PagesEngine as kind
    elif is_rank:
        from specops.service.lockstep import RankEngine as kind
    else:
        from specops.engine.engine import Engine as kind
    if setup.kv_events is not None:
        from specops.disaggregated.kv_events import telling

        kind = telling(kind)
    return kind, is_rank


def main() -> None:
    """Runs an engine behind the socket whose number is the last argument; does not return."""

    def make(setup: Setup) -> "Engine":
        import torch

        from specops.engine.config import EngineConfig
        from specops.service.lockstep import of_rank

        kind, is_rank = _kind_of(setup)
        if setup.data_parallel_rank is not None and not is_rank:
            setup.settings = of_rank(setup.settings, setup.data_parallel_rank)
        engine: Engine = kind(setup if is_rank else EngineConfig.from_plain(setup.settings))
        # From now on the kernels' own threads have the cores: torch's would spin beside them.
        torch.set_num_threads(1)
        engine.measure_row_costs()
        return engine

    code = 1
    try:
        code = run(socket.socket(fileno=int(sys.argv[-1])), make)
    except BaseException:
        logging.getLogger(__name__).exception("the engine's process fails")
    finally:
        logging.shutdown()
        os._exit(code)  # a grammar that is still being compiled is nobody's any more
