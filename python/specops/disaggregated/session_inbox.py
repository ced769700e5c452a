# SPDX-License-Identifier: Apache-2.0
"""Sessions of a server: jobs with a session resume from its file, and are saved to it at their end.

A file is read before its job begins, and written after the job's answer has ended, both by threads.
Between two steps, the loop copies a few MiB of the pages to be written. If a file cannot be used,
the engine computes the prompt. If a file cannot be written, the older file stays.
"""

import hashlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock

from specops.api.messages import (
    Abort,
    Batch,
    Command,
    Failed,
    Fetched,
    Output,
    Overdue,
    Refused,
    Submit,
)
from specops.disaggregated.fair_threads import FairThreads
from specops.disaggregated.session_file import (
    Session,
    SessionDirectory,
    SessionError,
    UnsavedSession,
)
from specops.disaggregated.sessions import SessionCopy, Sessions
from specops.disaggregated.transfer_inbox import speculative_of
from specops.engine.engine import Engine
from specops.engine.prompt_pages import PagesEvicted
from specops.service.loop import Compiled, Inbox
from specops.service.wire import SessionSettings

logger = logging.getLogger(__name__)

_READING_THREADS = 4  # each holds a file in memory; a single client may use half of them
_PIECE_BYTES = 4 << 20  # bytes of pages after which the loop stops copying between two steps
_MAX_COPIES = 64  # conversations that wait to be copied
_MAX_UNWRITTEN_BYTES = 1 << 30  # copied bytes that may wait to be written
_MAX_REASON_LENGTH = 300  # maximum characters of a reason in a log line


@dataclass
class _Job:
    """Job with a session.

    Attributes:
        job: the job.
        path: file of the session.
        token_ids: tokens of the answer so far.
    """

    job: Submit
    path: Path
    token_ids: list[int] = field(default_factory=list)


class SessionInbox:
    """Inbox of an engine loop with sessions; the loop's batches pass through `send` as well.

    Args:
        engine: engine of the loop.
        directory: directory of the files.
        inbox: source of commands.
        deliver: called with every batch.

    Attributes:
        contract: execution contract of the engine.
    """

    def __init__(
        self,
        engine: Engine,
        directory: SessionDirectory,
        inbox: Inbox,
        deliver: Callable[[Batch], None],
    ) -> None:
        self._sessions = Sessions(engine)
        self._directory = directory
        self._inbox = inbox
        self._deliver = deliver
        self.contract = self._sessions.contract
        self._readers = FairThreads[Session](_READING_THREADS, "specops-sessions")
        self._writer = ThreadPoolExecutor(1, "specops-session-writer")
        self._reading: dict[int, tuple[_Job, Future[Session]]] = {}  # by job
        self._running: dict[int, _Job] = {}  # by job
        self._copies: dict[Path, SessionCopy] = {}  # oldest first
        self._lock = Lock()
        self._num_unwritten = 0  # copied bytes that wait to be written

    def __enter__(self) -> "SessionInbox":
        return self

    def __exit__(self, *error: object) -> None:
        """Save the conversations that have ended, and wait until their files are written."""
        self._readers.shutdown()
        while self._copies:
            self._copy()
        self._writer.shutdown()

    def put(self, command: Compiled | Fetched | Overdue) -> None:
        """Add a command, from any thread."""
        self._inbox.put(command)

    def take(self, seconds: float | None) -> Sequence[Command | Compiled]:
        """Return commands whose jobs need no file or have it; called between two steps."""
        commands = self._inbox.take(0.0 if self._copies else seconds)
        while self._copies:
            self._copy()
            if commands or seconds == 0.0:
                break
            commands = self._inbox.take(0.0 if self._copies else seconds)
        ready: list[Command | Compiled] = []
        for command in commands:
            if isinstance(command, Submit) and command.session is not None:
                if self._starts_reading(command, command.session):
                    continue
            elif isinstance(command, Fetched):
                reading = self._reading.pop(command.job, None)
                if reading is not None:
                    ready.append(reading[0].job)
                    self._finish_reading(*reading)
                continue
            elif isinstance(command, Abort):
                if (reading := self._reading.pop(command.job, None)) is not None:
                    reading[1].cancel()  # has no effect if reading has begun
                self._running.pop(command.job, None)
            ready.append(command)
        return ready

    def send(self, batch: Batch) -> None:
        """Deliver the events of a step, and begin to save the conversations that it has ended."""
        for event in batch.events:
            job = self._running.get(event.job)
            if job is None:
                continue
            if isinstance(event, (Refused, Failed)):
                del self._running[event.job]
            elif isinstance(event, Output):
                job.token_ids += event.token_ids
                if event.end is not None:
                    del self._running[event.job]
                    self._begin_copy(job)
        self._deliver(batch)

    def _file_of(self, session: str, salt: str | None) -> Path:
        """Return the file of a session: sessions of different cache salts are different ones."""
        if salt is None:
            return self._directory.file(session)
        # No session's name has a dot.
        return self._directory.file(f"{session}.{hashlib.sha256(salt.encode()).hexdigest()[:32]}")

    def _starts_reading(self, job: Submit, session: str) -> bool:
        """Start to read a job's session; return False if the job need not wait."""
        running = _Job(job, self._file_of(session, job.params.cache_salt))
        try:
            if self._sessions.is_cached(running.path, job.params, speculative_of(job)):
                self._running[job.job] = running
                return False
        except ValueError:  # the request is invalid: the engine refuses it with a message
            return False
        read = partial(self._directory.read, running.path, self.contract)
        future = self._readers.submit(job.client, read)
        self._reading[job.job] = running, future
        future.add_done_callback(lambda _: self._inbox.put(Fetched(job.job)))
        return True

    def _finish_reading(self, running: _Job, reading: "Future[Session]") -> None:
        """Resume a session if its file can be used."""
        job = running.job
        self._running[job.job] = running
        reason: object
        try:
            self._sessions.take_in(running.path, reading.result(), job.params, speculative_of(job))
            return
        except FileNotFoundError:  # it is new, or was evicted
            return
        except (SessionError, OSError) as error:
            reason = error
        except Exception:
            reason = "internal error while resuming it"
            logger.exception("could not resume a session")
        logger.warning(
            "session file %s is not used, so the prompt is computed: %s",
            running.path.name,
            _shown(reason),
        )

    def _begin_copy(self, ended: _Job) -> None:
        """Begin to copy the conversation of a job that has ended."""
        job, path = ended.job, ended.path
        self._copies.pop(path, None)
        try:
            if len(self._copies) >= _MAX_COPIES:
                raise SessionError(f"{len(self._copies)} others wait to be copied")
            self._copies[path] = self._sessions.copy(
                path,
                job.prompts[0],
                ended.token_ids,
                job.params,
                speculative_of(job),
                most=_PIECE_BYTES,
            )
        except Exception as error:
            _log_unsaved(path, error)

    def _copy(self) -> None:
        """Copy a few MiB of the oldest conversation; if it is complete, have it written."""
        path, copy = next(iter(self._copies.items()))
        try:
            num_bytes = 0
            for size in copy:
                num_bytes += size
                if num_bytes >= _PIECE_BYTES:
                    return
            del self._copies[path]
            self._have_written(path, copy.session)
        except Exception as error:
            self._copies.pop(path, None)
            _log_unsaved(path, error)

    def _have_written(self, path: Path, session: UnsavedSession) -> None:
        """Queue a session for the writing thread.

        Raises:
            SessionError: too many bytes wait to be written.
        """
        num_bytes = session.num_bytes
        with self._lock:
            if self._num_unwritten and self._num_unwritten + num_bytes > _MAX_UNWRITTEN_BYTES:
                raise SessionError(f"{self._num_unwritten} bytes of others wait to be written")
            self._num_unwritten += num_bytes

        def write() -> None:
            try:
                self._directory.write(path, session)
            except Exception as error:
                _log_unsaved(path, error)
            finally:
                with self._lock:
                    self._num_unwritten -= num_bytes

        self._writer.submit(write)


def _log_unsaved(path: Path, error: Exception) -> None:
    """Log why a session is not saved."""
    if isinstance(error, PagesEvicted):
        error = SessionError("its pages were evicted before they were copied; raise num_pages")
    is_known = isinstance(error, (ValueError, OSError))
    logger.error(
        "session file %s could not be saved: %s",
        path.name,
        _shown(error if is_known else "internal error"),
        exc_info=None if is_known else error,
    )


def _shown(reason: object) -> str:
    """Return a reason for a log line, cut to its maximum length."""
    text = str(reason)
    return text if len(text) <= _MAX_REASON_LENGTH else f"{text[:_MAX_REASON_LENGTH]} ..."


def session_inbox_of(
    engine: Engine, settings: SessionSettings, inbox: Inbox, deliver: Callable[[Batch], None]
) -> SessionInbox:
    """Return the inbox of an engine process with sessions.

    Raises:
        ValueError: the directory cannot be used, or the engine does not support sessions.
    """
    return SessionInbox(
        engine, SessionDirectory(settings.directory, settings.max_bytes), inbox, deliver
    )
