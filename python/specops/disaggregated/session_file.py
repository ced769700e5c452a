# SPDX-License-Identifier: Apache-2.0
"""Files of sessions: the pages of a conversation, and what drafters have learned from it.

A file begins with a magic number, the version of the format, and the length and CRC-32 of a
MessagePack object, a `Contents`. The pages follow in the order of `Contents.parts`, in the format
of a KV transfer, with a CRC-32 of each MiB. The file ends with them. So damage anywhere in a file,
a missing end and additional bytes are detected. A file contains no code.

A file is written under a temporary name and then renamed. So the final name always leads to a
complete file, even if the process is killed.
"""

import contextlib
import fcntl
import os
import struct
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO

import msgspec
import numpy as np
from msgspec import Struct

from specops.disaggregated.pages import Header
from specops.disaggregated.transport import checksums_of
from specops.engine.drafters.base import prompt_digest

VERSION = 1
SUFFIX = ".session"
_TEMPORARY = ".tmp"
_MAGIC = b"SPECOPS-SESSION\0"
_PREFIX = struct.Struct("<16sIII")  # magic, version, and length and CRC-32 of the contents


class SessionError(ValueError):
    """Error: a file is no session that this engine can resume; the message says why."""


class Answer(Struct, frozen=True, array_like=True):
    """Answer of the conversation, from which drafters learn.

    Attributes:
        prompt: `prompt_digest` of its prompt.
        token_ids: token ids of the answer, as int32.
    """

    prompt: bytes
    token_ids: bytes

    @classmethod
    def of(cls, prompt: Sequence[int], token_ids: Sequence[int]) -> "Answer":
        """Return the answer to a prompt."""
        return cls(prompt_digest(prompt), np.array(token_ids, dtype="<i4").tobytes())

    @property
    def num_bytes(self) -> int:
        """Bytes of its fields."""
        return len(self.prompt) + len(self.token_ids)


class Part(Struct, frozen=True):
    """Pages of a text.

    Attributes:
        header: description of the pages, with the text.
        num_bytes: bytes of the pages in the file.
        checksums: CRC-32 of each MiB of these bytes.
    """

    header: Header
    num_bytes: int
    checksums: list[int]


class Contents(Struct, frozen=True):
    """Description of a session.

    Attributes:
        contract: execution contract of the engine that saved it, with its digest.
        parts: pages of the conversation. A model with linear attention may have another part
            before them, with the pages and states of the last prompt.
        answers: the latest answers, oldest first.
    """

    contract: dict[str, Any]
    parts: list[Part]
    answers: list[Answer]


class Session(Struct, frozen=True):
    """Session that was read from a file.

    Attributes:
        contents: its description.
        data: bytes of the pages of each part.
    """

    contents: Contents
    data: list[bytearray]


class UnsavedSession(Struct, frozen=True):
    """Session to be written to a file.

    Attributes:
        contract: as in `Contents`.
        parts: description of the pages and their bytes in pieces, for each part.
        answers: as in `Contents`.
    """

    contract: dict[str, Any]
    parts: list[tuple[Header, list[bytes]]]
    answers: list[Answer]

    @property
    def num_bytes(self) -> int:
        """Bytes of the pages."""
        return sum(len(piece) for _, pieces in self.parts for piece in pieces)

    def encoded(self) -> list[bytes]:
        """Return the bytes of the file in pieces."""
        parts = [
            Part(header, sum(map(len, pieces)), checksums_of(*pieces))
            for header, pieces in self.parts
        ]
        body = msgspec.msgpack.encode(Contents(self.contract, parts, self.answers))
        prefix = _PREFIX.pack(_MAGIC, VERSION, len(body), zlib.crc32(body))
        return [prefix, body, *(piece for _, pieces in self.parts for piece in pieces)]


def write(path: Path, pieces: Sequence[bytes]) -> None:
    """Write an encoded session to a file, which is replaced atomically.

    Raises:
        OSError: the file cannot be written. An older file is left unchanged.
    """
    with _temporary(path) as file:
        try:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(file.name)
            raise
    with contextlib.suppress(OSError):  # some file systems cannot make a rename durable
        _sync(path.parent)


def read(path: Path, contract: dict[str, Any]) -> Session:
    """Read a session from a file, and check it.

    Args:
        path: the file.
        contract: execution contract of the engine that will resume the session.

    Raises:
        FileNotFoundError: the file does not exist.
        OSError: the file cannot be read.
        SessionError: the file is damaged, is no session, or is from an engine with another
            execution contract.
    """
    with open(path, "rb") as file:
        left = os.fstat(file.fileno()).st_size - _PREFIX.size
        magic, version, length, checksum = _PREFIX.unpack(
            file.read(_PREFIX.size) if left >= 0 else bytes(_PREFIX.size)
        )
        if magic != _MAGIC:
            raise SessionError("it is no session file: its first bytes differ")
        if version != VERSION:
            raise SessionError(f"version must be {VERSION}, got {version}")
        if length > left:
            raise SessionError(f"it is cut short or damaged: {length} bytes must follow its prefix")
        body = file.read(length)
        if zlib.crc32(body) != checksum:
            raise SessionError("it is damaged: the checksum of its contents does not match")
        try:
            contents = msgspec.msgpack.decode(body, type=Contents)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise SessionError(f"its contents cannot be decoded: {error}") from None
        difference = _difference("contract", contract, contents.contract)
        if difference is not None:
            raise SessionError(difference)
        sizes = [part.num_bytes for part in contents.parts]
        if min(sizes, default=0) < 0 or sum(sizes) != left - length:
            raise SessionError(
                f"it is cut short or damaged: its pages must have {sum(sizes)} bytes, got "
                f"{left - length}"
            )
        return Session(contents, [_pages(file, part) for part in contents.parts])


def _pages(file: BinaryIO, part: Part) -> bytearray:
    """Read the bytes of a part.

    Raises:
        SessionError: a checksum does not match.
    """
    data = bytearray(part.num_bytes)
    if file.readinto(data) != len(data) or checksums_of(data) != part.checksums:  # type: ignore[attr-defined]
        raise SessionError("it is damaged: a checksum of its pages does not match")
    return data


def _difference(name: str, expected: object, got: object) -> str | None:
    """Return a sentence on the first fact in which two contracts differ, or None."""
    if isinstance(expected, dict) and isinstance(got, dict):
        keys = dict.fromkeys((*expected, *got))
        keys.pop("digest" if name == "contract" else "", None)  # the facts say more
        found = (_difference(f"{name}.{key}", expected.get(key), got.get(key)) for key in keys)
        return next(filter(None, found), None)
    return None if expected == got else f"{name} must be {expected!r}, got {got!r}"


class SessionDirectory:
    """Directory of session files, of which the least recently used ones are removed.

    Methods may be called from any thread; only one thread writes.

    Args:
        path: the directory, which is created if it does not exist.
        max_bytes: maximum total size of the files.

    Raises:
        ValueError: the directory cannot be created or written.
    """

    def __init__(self, path: str, max_bytes: int) -> None:
        self._path = Path(path)
        self._max_bytes = max_bytes
        try:
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"session_dir: {path} cannot be created: {error.strerror}") from None
        if not os.access(self._path, os.R_OK | os.W_OK | os.X_OK):
            raise ValueError(f"session_dir: files in {path} cannot be written")
        for file in self._path.glob(f".*{SUFFIX}.*{_TEMPORARY}"):
            _remove_abandoned(file)

    def file(self, name: str) -> Path:
        """Return the path of the session with this name: letters, digits, "-", "_" and "."."""
        return self._path / f"{name}{SUFFIX}"

    def read(self, path: Path, contract: dict[str, Any]) -> Session:
        """Read a session as `read` does, and mark it as recently used."""
        session = read(path, contract)
        with contextlib.suppress(OSError):
            os.utime(path)
        return session

    def write(self, path: Path, session: UnsavedSession) -> None:
        """Write a session, after removing the least recently used ones that exceed the limit.

        Raises:
            OSError: the file cannot be written.
            SessionError: the session alone exceeds the limit.
        """
        pieces = session.encoded()
        num_bytes = sum(map(len, pieces))
        if num_bytes > self._max_bytes:
            raise SessionError(
                f"session_bytes must be at least {num_bytes}, the bytes of its file, got "
                f"{self._max_bytes}"
            )
        self._make_space(num_bytes, path)
        write(path, pieces)

    def _make_space(self, num_bytes: int, path: Path) -> None:
        """Remove the least recently used files until `path` with `num_bytes` new bytes fits."""
        files: list[tuple[int, int, Path]] = []
        for file in self._path.glob(f"*{SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):
                status = file.stat()
                files.append((status.st_mtime_ns, status.st_size, file))
        files = [one for one in files if one[2] != path]
        excess = num_bytes + sum(size for _, size, _ in files) - self._max_bytes
        for _, size, file in sorted(files):  # least recently used first
            if excess <= 0:
                return
            file.unlink(missing_ok=True)
            excess -= size


def _temporary(path: Path) -> IO[bytes]:
    """Create a temporary file beside a file, which only this user may read, and lock it."""
    file = tempfile.NamedTemporaryFile(  # noqa: SIM115  (the caller closes it)
        dir=path.parent, prefix=f".{path.name}.", suffix=_TEMPORARY, delete=False
    )
    with contextlib.suppress(OSError):  # the file system has no locks
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return file


def _remove_abandoned(temporary: Path) -> None:
    """Remove a temporary file, unless a process has locked it and so still writes it."""
    with contextlib.suppress(OSError), open(temporary, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        temporary.unlink()


def _sync(folder: Path) -> None:
    """Make a rename in a folder durable."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
