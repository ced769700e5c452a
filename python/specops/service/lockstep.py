# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel ranks in lockstep, one process each: all process the same commands per step.

The server talks only to the first rank. The first rank starts the other ranks and forwards all
commands that its own loop takes. The other ranks run the same loops on the same commands; their
results are discarded. If one rank ends, or fails in a step, all ranks end, and the server starts a
new first rank.
"""

import contextlib
import ctypes
import fcntl
import logging
import os
import secrets
import select
import shutil
import signal
import socket
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from msgspec import structs

import specops
from specops.api.config import EngineConfig
from specops.api.messages import Command, Fetched, NoEngine, Overdue, Stop
from specops.api.outputs import RequestOutput
from specops.engine.device import open_device
from specops.engine.engine import Engine
from specops.engine.parallel.group import Group
from specops.service.loop import Compiled, Inbox
from specops.service.process import EngineProcess
from specops.service.wire import (
    Frames,
    GrammarReady,
    RoleSettings,
    Setup,
    StepCommands,
    encoded,
    from_process,
    receive,
    to_process,
)

logger = logging.getLogger(__name__)

_END_SECONDS = 3.0  # time for all other ranks to end; they have nothing to save
_PR_SET_PDEATHSIG = 1  # option of Linux's prctl
_NEWS_SECONDS = 1.0  # time for the watcher thread to notice and report the end of a rank
_FOLDERS = "specops-ranks-"  # prefix of the folders through which ranks meet
_OWNER = "owner"  # file in such a folder; the first rank holds a lock on it
_NEW_SECONDS = 60.0  # a younger folder may not have its lock yet
_OLD_SECONDS = 86400.0  # an older folder without an owner file is left over


class RankLost(BaseException):
    """Failure of a step or a barrier on this rank. A BaseException, so that the loop must end."""


def group_of(setup: Setup) -> Group:
    """Join the tensor-parallel group of a rank's process; wait until all ranks have joined."""
    config = EngineConfig.from_plain(setup.settings)
    return Group(
        Path(setup.store),
        setup.rank,
        config.tensor_parallel_size,
        config.num_virtual_ranks,
        open_device(config.device).device.type,
        config.enable_expert_parallel,
    )


class Lockstep:
    """Steps and barriers of one rank's engine. After a failure this rank cannot continue alone.

    Args:
        engine: the engine of the rank.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ranks = engine.ranks

    def step(self) -> list[RequestOutput]:
        """Run a step of the engine.

        Raises:
            RankLost: the step failed. It may have succeeded on other ranks.
        """
        try:
            return self._engine.step()
        except Exception as error:
            raise RankLost(f"a step failed on rank {self._ranks.rank}") from error

    def barrier(self) -> None:
        """Return when all ranks have called this method.

        Raises:
            RankLost: another rank has ended.
        """
        try:
            self._ranks.least(0)
        except Exception as error:
            raise RankLost(f"the barrier failed on rank {self._ranks.rank}") from error


class Followers:
    """Processes of the other ranks, which the first rank starts and ends.

    Args:
        setup: setup of the first rank; the constructor fills in settings on which all ranks must
            agree.
        lost: called from a thread, with an error message, when a rank ends unexpectedly.
    """

    def __init__(self, setup: Setup, lost: Callable[[str], None]) -> None:
        settings = setup.settings
        size = settings["tensor_parallel_size"]
        if settings.get("device", "auto").startswith("cuda:"):
            raise ValueError(
                f"device must be auto, cpu or cuda with several ranks, got {settings['device']}"
            )
        if settings.get("seed") is None:
            settings["seed"] = secrets.randbits(63)
        if settings.get("num_threads") is None:
            settings["num_threads"] = max(specops.get_num_threads() // size, 1)
        first = size * (setup.data_parallel_rank or 0)  # GPU of the first rank
        remove_abandoned_folders()
        self._folder = tempfile.mkdtemp(prefix=f"{_FOLDERS}{os.getpid()}-")
        self._owner = os.open(Path(self._folder) / _OWNER, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._owner, fcntl.LOCK_EX)
        setup.store = str(Path(self._folder) / "meeting")
        self._lost = lost
        self._is_ending = False
        self._processes = [
            EngineProcess(
                Setup(
                    of_rank(settings, first + rank),
                    "error",
                    rank,
                    setup.store,
                    role=_role_of_rank(setup.role, rank),
                    log_format=setup.log_format,
                )
            )
            for rank in range(1, size)
        ]
        setup.settings = of_rank(settings, first)
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def forward(self, commands: Sequence[Command | Compiled]) -> None:
        """Forward the commands that the first rank's loop took. Ranks may end after `Stop`."""
        if any(isinstance(command, Stop) for command in commands):
            self._is_ending = True
        messages = [
            GrammarReady(command.job) if isinstance(command, Compiled) else command
            for command in commands
        ]
        data = encoded(StepCommands(b"".join(map(encoded, messages))))
        for process in self._processes:
            process.connection.sendall(data)

    def __enter__(self) -> "Followers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        """Wait for the other ranks to end, which they do after the first rank's loop."""
        if error is not None:  # perhaps another rank has ended: let the watcher report that
            self._watcher.join(_NEWS_SECONDS)
        self._is_ending = True
        latest = time.monotonic() + _END_SECONDS
        for process in self._processes:
            process.end(max(latest - time.monotonic(), 0.0))
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._owner)

    def _watch(self) -> None:
        """Wait until a rank ends, and report it unless all ranks are to end."""
        poll = select.poll()
        rank_of = {}  # rank by file descriptor
        for rank, process in enumerate(self._processes, 1):
            file = process.connection.fileno()
            poll.register(file, select.POLLIN | select.POLLHUP)
            rank_of[file] = rank
        file, _ = poll.poll()[0]
        rank = rank_of[file]
        process = self._processes[rank - 1]
        messages = [_message(body) for body in _rest(process.connection)]
        if self._is_ending:
            return
        ending = f"rank {rank} has ended ({process.end(_END_SECONDS)})"
        shutil.rmtree(self._folder, ignore_errors=True)
        self._lost(messages[0] if messages else ending)


def remove_abandoned_folders() -> None:
    """Remove the meeting folders of ranks that were all killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDERS}*"):
        with contextlib.suppress(OSError):
            if _is_abandoned(folder):
                shutil.rmtree(folder)


def _is_abandoned(folder: Path) -> bool:
    """Return whether a folder belongs to this user and no process holds its lock.

    Process ids are no evidence, because containers may share a folder of temporary files.
    """
    status = folder.lstat()
    age = time.time() - status.st_mtime
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or age < _NEW_SECONDS:
        return False
    try:
        owner = os.open(folder / _OWNER, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return age > _OLD_SECONDS
    try:
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(owner)
    return True


def of_rank(settings: dict[str, object], rank: int) -> dict[str, object]:
    """Return the settings of one rank, or of one of several engines: each uses its own GPU."""
    device = str(settings.get("device", "auto"))
    is_gpu = device != "cpu" and open_device(device).device.type == "cuda"
    return {**settings, "device": f"cuda:{rank}" if is_gpu else "cpu"}


def _role_of_rank(role: RoleSettings | None, rank: int) -> RoleSettings | None:
    """Return a rank's settings of KV transfer: each rank has its own port."""
    return structs.replace(role, port=role.port + rank) if role and role.port else role


def _rest(connection: socket.socket) -> Iterator[memoryview]:
    """Yield all messages until the end of a connection."""
    frames = Frames()
    try:
        while True:
            yield from receive(connection, frames)
    except (EOFError, OSError):
        return


def _message(body: memoryview) -> str:
    message = from_process(body)
    return message.message if isinstance(message, NoEngine) else str(message)


class LeadInbox:
    """Inbox of the first rank, which forwards all commands to the other ranks.

    Args:
        inbox: source of commands.
        followers: the other ranks.
    """

    def __init__(self, inbox: Inbox, followers: Followers) -> None:
        self._inbox = inbox
        self._followers = followers

    def put(self, command: Compiled | Fetched | Overdue) -> None:
        """Add a command, from any thread."""
        self._inbox.put(command)

    def take(self, seconds: float | None) -> Sequence[Command | Compiled]:
        """Return and forward the available commands; wait up to `seconds` (None: forever)."""
        commands = self._inbox.take(seconds)
        self._followers.forward(commands)
        return commands


class FollowInbox:
    """Inbox of a follower rank, which receives the commands that the first rank took.

    Args:
        connection: socket to the first rank.
        frames: buffer with the beginning of the next message.
    """

    def __init__(self, connection: socket.socket, frames: Frames) -> None:
        self._connection = connection
        self._frames = frames
        self._received: list[StepCommands] = []
        self._compiled: dict[int, Compiled] = {}  # by job
        self._has_compiled = threading.Condition()

    def put(self, command: Compiled | Fetched | Overdue) -> None:
        """Add a compiled grammar, from any thread, for `take`; ignore other commands."""
        if not isinstance(command, Compiled):
            return
        with self._has_compiled:
            self._compiled[command.job] = command
            self._has_compiled.notify_all()

    def take(self, seconds: float | None) -> Sequence[Command | Compiled]:
        """Return the commands that the first rank took; wait for them, ignoring `seconds`."""
        try:
            while not self._received:
                self._received += map(to_process, receive(self._connection, self._frames))
        except (EOFError, ConnectionError):
            threading.Event().wait()  # until `end_with_the_first` ends the process
        frames = Frames()
        return [
            self._compiled_grammar(message) if isinstance(message, GrammarReady) else message
            for message in map(to_process, frames.feed(self._received.pop(0).commands))
        ]

    def _compiled_grammar(self, ready: GrammarReady) -> Compiled:
        with self._has_compiled:
            self._has_compiled.wait_for(lambda: ready.job in self._compiled)
            return self._compiled.pop(ready.job)


def end_with_the_first(connection: socket.socket, store: str) -> None:
    """Start a thread that ends this process as soon as the first rank has ended."""
    if sys.platform == "linux":  # wake a suspended rank as well, so that its thread ends it
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)

    def watch() -> None:
        poll = select.poll()
        poll.register(connection, 0)  # POLLHUP is always reported
        poll.poll()
        shutil.rmtree(Path(store).parent, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
