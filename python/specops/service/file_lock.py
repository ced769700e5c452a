# SPDX-License-Identifier: Apache-2.0
"""Lock of a file that one server at a time may use."""

import fcntl
import logging
import os
from pathlib import Path
from types import TracebackType

logger = logging.getLogger(__name__)


class FileLock:
    """Exclusive lock of a file, held from construction until `release` or the end of this process.

    The file itself is replaced when it is saved, which would lose a lock on it. So the lock is on a
    second file, FILE.lock, which stays. Child processes do not inherit the lock.

    Args:
        option: option that names the file, for errors.
        file: file to lock; it need not exist.

    Raises:
        ValueError: another process has the lock.
    """

    def __init__(self, option: str, file: str) -> None:
        self._number: int | None = None
        path = Path(f"{file}.lock")
        try:
            number = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            # If the directory is not writable, the code that uses the file reports the error.
            logger.debug("%s: cannot open %s: %s", option, path, error.strerror)
            return
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(number, 32, 0).decode(errors="replace").strip()
            os.close(number)
            raise ValueError(
                f"{option}: {file} is in use by another server"
                f"{f' (process {owner})' if owner else ''}; name another file"
            ) from None
        except OSError as error:  # for example, the file system has no locks
            logger.warning(
                "%s: cannot lock %s (%s); make sure that no other server uses the file",
                option,
                path,
                error.strerror,
            )
            os.close(number)
            return
        os.ftruncate(number, 0)
        os.pwrite(number, f"{os.getpid()}\n".encode(), 0)
        self._number = number

    def release(self) -> None:
        """Release the lock, if this object holds it."""
        if self._number is not None:
            os.close(self._number)
            self._number = None

    def __enter__(self) -> "FileLock":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()
