# SPDX-License-Identifier: Apache-2.0
"""Disk cache of packed weights, which are packed once per checkpoint and memory-mapped later.

The cache has a folder for each combination of checkpoint, build and instruction set. It holds a
safetensors file for each packed weight, for an embedding that is not stored in the checkpoint as
the model reads it, and for each table of a rotary embedding. The folder's name is a digest of

    the bytes of the checkpoint's files, regardless of their names and location, and the part of the
        configuration that describes how weights are stored in them;
    the sources of the kernels, the compiler, and the Python code that reads and packs weights;
    the instruction set,

and a file's name is a digest of the requested weight: names, shape, dtype, kind. So no entry is
ever out of date, and a lookup compares names only.

Computing the digest of a whole checkpoint takes seconds. So digests are stored, together with the
file's path, size, inode, mtime and ctime. A program can set a file's mtime but not its ctime, so
every change of a file is noticed. The digest of a file that changed within the last seconds is not
stored, because a second change might have the same time.

Files are written under a temporary name and then renamed, so that other processes see a whole file
or none. Each file holds a checksum of every tensor, which is verified when the file is mapped; a
truncated or damaged file is replaced. Users with write access to the folder are trusted, like those
with write access to the checkpoint.

Mapped memory belongs to the page cache: it is available at once, processes share it, and the system
may reclaim it. Kernels never write to a weight.
"""

import contextlib
import functools
import hashlib
import json
import logging
import math
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

import specops
from specops._huge_pages import ask_for_huge_pages
from specops.checkpoints.gguf_directory import SUFFIX
from specops.dense import PackedWeight

logger = logging.getLogger(__name__)

# "auto" caches checkpoints of at least this size; smaller ones are packed within a second. GGUF
# files of any size are cached: decoding them takes several times as long as packing.
_LEAST_BYTES = 256 << 20
_FREE_SHARE = 20  # 1 / _FREE_SHARE of the disk stays free
_SETTLED_SECONDS = 2.0  # resolution of the coarsest file timestamps
_PIECE = 1 << 20  # bytes per read
_ALIGNMENT = 4096  # bytes; alignment of a file's first tensor
_VECTOR = 64  # bytes; alignment of its other tensors

_DIGESTS = "digests"  # folder of stored digests
_OWN_FOLDER = re.compile(r"[0-9a-f]{32}")  # name of a checkpoint's folder: a digest
_UNFINISHED = "unfinished-"
_STALE_SECONDS = 3600.0  # age at which the writer of an unfinished file must have died


class _Table(NamedTuple):
    """A plain tensor in the cache."""

    rows: Tensor


_Entry = TypeVar("_Entry", PackedWeight, _Table)


class WeightCache:
    """Disk cache of the packed weights of checkpoints.

    Args:
        root: the cache's folder; created if missing.
        max_bytes: limit on the size of all files. The least recently used checkpoint is evicted.
        least_bytes: smaller checkpoints are not cached, except GGUF files.
    """

    def __init__(self, root: Path, max_bytes: int, least_bytes: int = 0) -> None:
        self._root, self._max_bytes, self._least_bytes = root, max_bytes, least_bytes
        self._left: int | None = None  # bytes left below the limit; None: not counted yet

    @classmethod
    def of_setting(cls, setting: str, max_bytes: int) -> "WeightCache | None":
        """Return the cache that a setting selects; None for no cache.

        Args:
            setting: a folder; "auto" for the user's cache folder, which takes only checkpoints that
                are slow to pack; or "none".
            max_bytes: as for `WeightCache`.
        """
        if setting == "none":
            return None
        if setting != "auto":
            return cls(Path(setting), max_bytes)
        try:
            home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        except RuntimeError:  # the user has no home directory
            return None
        return cls(Path(home) / "specops" / "weights", max_bytes, _LEAST_BYTES)

    def of(self, files: Sequence[Path], how: str = "") -> "CachedWeights | None":
        """Return the cached weights of a checkpoint; None if it is not cached.

        Args:
            files: the checkpoint's files.
            how: configuration outside these files that describes how weights are stored in them.
        """
        try:
            digests = self.digests(files)
            if digests is None:
                return None
            name = _digest([*digests, how, _code_digest(), specops.get_isa()])
            folder = self._root / name
            folder.mkdir(mode=0o700, exist_ok=True)
            with contextlib.suppress(OSError):  # a read-only cache can still be read
                os.utime(folder)  # determines the eviction order
        except OSError as error:
            logger.warning("the weight cache %s is disabled: %s", self._root, error)
            return None
        return CachedWeights(self, folder)

    def digests(self, files: Sequence[Path]) -> list[str] | None:
        """Return the stored or computed digest of each file; None if the checkpoint is too small.

        Raises:
            OSError: a file cannot be read, or the folder cannot be written to.
        """
        num_bytes = sum(file.stat().st_size for file in files)
        is_slow = any(file.suffix == SUFFIX for file in files)
        if num_bytes < self._least_bytes and not is_slow:
            return None
        (self._root / _DIGESTS).mkdir(mode=0o700, parents=True, exist_ok=True)
        with ThreadPoolExecutor(specops.get_num_threads()) as pool:
            return list(pool.map(self._digest_of, files))

    def make_room(self, num_bytes: int, folder: Path) -> str | None:
        """Evict other checkpoints until a new file fits.

        Args:
            num_bytes: size of the file.
            folder: folder of the new file, which is not evicted.

        Returns:
            None, or the reason why the file does not fit.
        """
        if self._left is None:
            self._left = self._max_bytes - sum(map(_bytes_of, self._folders()))
        if self._left < num_bytes:
            for other in self._folders():
                if other != folder and self._left < num_bytes:
                    self._left += _bytes_of(other)
                    shutil.rmtree(other, ignore_errors=True)
        disk = shutil.disk_usage(self._root)
        if disk.free - num_bytes < disk.total // _FREE_SHARE:
            return f"the disk has {disk.free >> 20} MiB left"
        if self._left < num_bytes:
            return f"it would be larger than {self._max_bytes >> 20} MiB"
        self._left -= num_bytes
        return None

    def _folders(self) -> list[Path]:
        """Return the folders of checkpoints, least recently used first."""
        found = [one for one in self._root.iterdir() if _OWN_FOLDER.fullmatch(one.name)]
        return sorted(found, key=lambda one: one.stat().st_mtime)

    def _digest_of(self, file: Path) -> str:
        """Return the digest of a file, from the cache if its size and times are unchanged."""
        facts = _facts(file)
        known = self._root / _DIGESTS / _digest(facts)
        with contextlib.suppress(OSError):
            data, _, check = known.read_bytes().partition(b" ")
            if check and check == _check([*facts, data.decode("latin-1")]):
                return data.decode("ascii")
        digest = digest_of_bytes(file)
        changed = max(file.stat().st_mtime, file.stat().st_ctime)
        if facts == _facts(file) and time.time() - changed > _SETTLED_SECONDS:
            with _replacing(known) as out:
                out.write(digest.encode() + b" " + _check([*facts, digest]))
        return digest


class CachedWeights:
    """Packed weights of one checkpoint; created by `WeightCache.of`."""

    def __init__(self, cache: WeightCache, folder: Path) -> None:
        self._cache, self._folder = cache, folder
        self._writes = True

    def get(self, key: str, make: Callable[[], PackedWeight]) -> PackedWeight:
        """Return a weight mapped from its file; make the weight and write the file if missing.

        Args:
            key: identifies the weight within the folder.
            make: makes the weight.
        """
        return self._get(key, make, PackedWeight)

    def table(self, key: str, make: Callable[[], Tensor]) -> Tensor:
        """Return a tensor mapped from its file; make the tensor and write the file if missing.

        Unlike a weight's pages, those of a table become resident only when rows are read.

        Args:
            key: identifies the tensor within the folder.
            make: makes the tensor.
        """
        return self._get(key, lambda: _Table(make()), _Table).rows

    def _get(self, key: str, make: Callable[[], _Entry], kind: type[_Entry]) -> _Entry:
        path = self._folder / f"{_digest([key])}.safetensors"
        entry = self._read(path, key, kind)
        if entry is None:
            made = make()
            if self._writes:
                self._write(path, key, made)
                entry = self._read(path, key, kind)
        return made if entry is None else entry

    def numbers(self, key: str, measure: Callable[[], list[float]], count: int) -> list[float]:
        """Return stored measurements, or measure and store them.

        Args:
            key: identifies the numbers within the folder.
            measure: function that returns `count` numbers, each finite and at least 0.
            count: how many numbers `measure` returns.
        """
        path = self._folder / f"{_digest([key])}.json"
        try:
            data = path.read_bytes()
        except OSError:
            data = b""
        text, _, check = data.partition(b"\n")
        # The checksum shows that the file is intact. Other code may have written it, so count and
        # range are checked, too.
        if check and check == _check([key, text.decode("latin-1")]):
            with contextlib.suppress(ValueError, RecursionError):
                found = json.loads(text)
                if _are_numbers(found, count):
                    return [float(number) for number in found]
        numbers = measure()
        text = json.dumps(numbers).encode()
        with contextlib.suppress(OSError), _replacing(path) as out:
            out.write(text + b"\n" + _check([key, text.decode()]))
        return numbers

    def _read(self, path: Path, key: str, kind: type[_Entry]) -> _Entry | None:
        """Map a file and return its entry; return None if the file is missing or damaged."""
        try:
            return _mapped(path, key, kind)
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError, RuntimeError, TypeError, ValueError) as error:
            logger.warning("the weight cache file %s is damaged and is rebuilt: %s", path, error)
            return None

    def _write(self, path: Path, key: str, entry: PackedWeight | _Table) -> None:
        tensors, header = _file_of(entry, key)
        size = len(header) + sum(one.numel() for one in tensors)
        try:
            problem = self._cache.make_room(size, self._folder)
            if problem is None:
                self._folder.mkdir(mode=0o700, exist_ok=True)  # another process may have evicted it
                with _replacing(path) as out:
                    out.write(header)
                    for one in tensors:
                        out.write(one.numpy().data)
        except OSError as error:
            problem = str(error)
        if problem is not None:
            self._writes = False
            logger.warning("the weight cache %s stores no more weights: %s", self._folder, problem)


def digest_of_bytes(file: Path) -> str:
    """Read a file and return the digest of its bytes."""
    digest = hashlib.sha256()
    with open(file, "rb") as bytes_:
        while piece := bytes_.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def _file_of(entry: PackedWeight | _Table, key: str) -> tuple[list[Tensor], bytes]:
    """Return the tensors of an entry as bytes, and the header of its safetensors file."""
    plain: dict[str, Any] = {}
    records: dict[str, dict[str, Any]] = {}
    entries: dict[str, Any] = {}
    tensors: list[Tensor] = []
    begin = 0
    for name, value in entry._asdict().items():
        if not isinstance(value, Tensor):
            plain[name] = value
            continue
        data = value.contiguous().view(-1).view(torch.uint8)
        slack = -data.numel() % _VECTOR
        tensors.append(torch.cat((data, data.new_zeros(slack))) if slack else data)
        end = begin + tensors[-1].numel()
        entries[name] = {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
        dtype = str(value.dtype).removeprefix("torch.")
        records[name] = {"dtype": dtype, "shape": list(value.shape), "sum": _sum(tensors[-1])}
        begin = end
    description = json.dumps({"key": key, "plain": plain, "tensors": records})
    entries["__metadata__"] = {"weight": description, "digest": _digest([description])}
    header = json.dumps(entries).encode()
    header += b" " * (-(8 + len(header)) % _ALIGNMENT)
    return tensors, len(header).to_bytes(8, "little") + header


def _mapped(path: Path, key: str, kind: type[_Entry]) -> _Entry:
    """Map a file and return its entry.

    Raises:
        FileNotFoundError: the file is missing.
        OSError, SafetensorError, RuntimeError, TypeError, ValueError: the file is damaged.
    """
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        description = metadata.get("weight", "")
        if metadata.get("digest") != _digest([description]):
            raise ValueError("the digest of its description does not match")
        facts = json.loads(description)
        if facts["key"] != key:
            raise ValueError("it holds another weight")
        fields = dict(facts["plain"])
        for name, one in facts["tensors"].items():
            data = file.get_tensor(name)
            # A table's file is read, since a read through the mapping would keep its pages.
            found = _sum_of_file(path) if kind is _Table else _sum(ask_for_huge_pages(data))
            if found != one["sum"]:
                raise ValueError(f"the checksum of {name} does not match")
            dtype = getattr(torch, one["dtype"])
            num_bytes = dtype.itemsize
            for size in one["shape"]:
                num_bytes *= size
            fields[name] = data[:num_bytes].view(dtype).view(one["shape"])
    return kind(**fields)


def _sum(data: Tensor) -> int:
    """Return a fast checksum: the sum of the bytes as 8-byte integers."""
    # NumPy's one thread reads as fast as torch's threads, which in addition take up to milliseconds
    # to wake up.
    return int(data.numpy().view(np.int64).sum())


def _sum_of_file(path: Path) -> int:
    """Return the checksum of a file's only tensor, without keeping its bytes in memory."""
    total = 0
    piece = memoryview(bytearray(_PIECE))
    with open(path, "rb", buffering=0) as file:
        file.seek(8 + int.from_bytes(file.read(8), "little"))
        while count := file.readinto(piece):
            total += _sum(torch.frombuffer(piece, dtype=torch.uint8, count=count))
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)  # int64 arithmetic


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file that replaces `path` on success and is removed on failure."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=_UNFINISHED, delete=False) as out:
        try:
            yield out
            out.close()
            os.replace(out.name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(out.name)
            raise


def _facts(file: Path) -> list[str]:
    """Return strings that change whenever the file changes: path, size, inode and times."""
    of = file.stat()
    times = (of.st_mtime_ns, of.st_ctime_ns)
    return list(map(str, (file.resolve(), of.st_size, of.st_dev, of.st_ino, *times)))


def _bytes_of(folder: Path) -> int:
    """Return the size of a folder's files; remove stale unfinished files."""
    found = 0
    for file in folder.iterdir():
        with contextlib.suppress(OSError):
            of = file.stat()
            if file.name.startswith(_UNFINISHED) and time.time() - of.st_mtime > _STALE_SECONDS:
                file.unlink()
            else:
                found += of.st_size
    return found


def _code_files() -> list[Path]:
    """Return the Python files that determine the bytes of a cached tensor."""
    package = Path(specops.__file__).parent
    ops = [package / f"{name}.py" for name in ("attention", "dense", "moe", "quantization")]
    folders = [package / "checkpoints", package / "engine" / "models"]
    return sorted([*ops, *(file for one in folders for file in one.rglob("*.py"))])


@functools.lru_cache
def _code_digest() -> str:
    """Return the digest of the code that determines the bytes of a cached tensor."""
    facts = specops.runtime.build_facts()
    texts = [file.read_text(encoding="utf-8") for file in _code_files()]
    return _digest([facts["source_digest"], facts["compiler"], *texts])


def _are_numbers(found: Any, count: int) -> bool:
    """Return whether a JSON value is a list of `count` finite numbers, each at least 0."""
    if not isinstance(found, list) or len(found) != count:
        return False
    return all(type(one) in (int, float) and 0 <= one < math.inf for one in found)


def _check(texts: Sequence[str]) -> bytes:
    """Return the checksum that is stored behind a small file's content to detect damage."""
    return _digest(texts).encode()


def _digest(texts: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(list(texts)).encode()).hexdigest()[:32]
