# SPDX-License-Identifier: Apache-2.0
"""The corpus: Python's own standard library, minus everything that is not plainly PSF code.

A *document* is one `.py` file, named by its path below the library directory. Directories with
third-party code, fixtures or generated text, files with another copyright line or license, and
tables of pure data are excluded. The rest is split by file, by a hash of the path, so that the
split does not depend on the machine, on the order of a directory listing or on which other files
exist.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

PYTHON_VERSION = "3.11.7"
MANIFEST = Path(__file__).with_name("manifest.json")
HELD_OUT = Path(__file__).with_name("held_out.json")

HELD_OUT_PERCENT = 5
# Benchmark prompts are cut from held-out library modules, so enough of them must be long.
MIN_HELD_OUT_MODULES = 40
MIN_MODULE_BYTES = 6000

SKIPPED_DIRS = frozenset(
    {
        "site-packages",
        "dist-packages",
        "__pycache__",
        "idlelib",
        "lib2to3",
        "turtledemo",
        "pydoc_data",
        "ensurepip",
        "cjkencodings",
        "encoded_modules",
        "data",
        "testdata",
        "test_tomllib",
        "tomllib",
    }
)
# Generated files: build settings hold the paths of the machine that built Python.
SKIPPED_NAME = re.compile(r"^(_sysconfigdata.*|sitecustomize|usercustomize|stringprep|entities)$")
SKIPPED_TEST = re.compile(r"^(bad(syntax|_coding|_getattr).*|encoded_.*|.*_fixtures?|mime\..*)$")

# A line that claims a copyright: the word, then a year, a (c) or a name.
_CLAIM = re.compile(r"copyright\s*(?:\(c\)|©|:|\d{4}|(?:19|20)\d\d|disney)[^\n]*", re.IGNORECASE)
_PYTHON_OWNER = re.compile(r"Python Software Foundation|PSF|CNRI|Guido van Rossum|BeOpen")
_PSF_GRANT = re.compile(
    r"licensed\s+to\s+(?:the\s+)?PSF|python licen[sc]e|licen[sc]e: PSF|PSF licen[sc]e"
    r"|same terms as python",
    re.IGNORECASE,
)
_OTHER_LICENSE = re.compile(
    r"SPDX-(?:License|File)|Apache Licen[sc]e|\bMIT licen[sc]e|\bBSD\b.{0,20}licen[sc]e"
    r"|GNU (?:Lesser |General )|\bGPL\b|hereby granted|permission notice|Secret Labs"
    r"|choose between two licen[sc]es|Python [12]\.\d licen[sc]e",
    re.IGNORECASE,
)


class CorpusError(Exception):
    """Error: the library on this machine differs from the one that the manifest describes."""


@dataclass(frozen=True)
class Document:
    """One source file: path below the library directory, text, and whether it is held out."""

    path: str
    text: str
    held_out: bool

    @property
    def is_test(self) -> bool:
        """True if the file belongs to a test suite rather than to the library proper."""
        return is_test(self.path)


def is_test(path: str) -> bool:
    """Return whether `path` is in a test suite (`test/..`, `unittest/test/..`, `.../tests/..`)."""
    return any(part in ("test", "tests") for part in path.split("/")[:-1])


def _hash(path: str) -> int:
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big")


def carries_other_license(text: str) -> bool:
    """Return whether a file names a license, or a copyright holder, that is not Python's own."""
    if _OTHER_LICENSE.search(text):
        return True
    claims = [match.group(0) for match in _CLAIM.finditer(text)]
    if all(_PYTHON_OWNER.search(claim) for claim in claims):
        return False
    return not _PSF_GRANT.search(text)


def is_data_table(path: str, text: str) -> bool:
    """Return whether a file is a table rather than code (codec maps, long lists of numbers)."""
    if path.startswith("encodings/") and re.search(r"^(de|en)coding_(table|map)", text, re.M):
        return True
    letters = sum(character.isalpha() for character in text)
    return letters < 0.30 * len(text.replace(" ", "").replace("\n", ""))


def _candidate(path: str) -> bool:
    *folders, name = path.split("/")
    stem = name.removesuffix(".py")
    if any(folder in SKIPPED_DIRS or folder.startswith("config-") for folder in folders):
        return False
    if SKIPPED_NAME.match(stem):
        return False
    return not (is_test(path) and SKIPPED_TEST.match(stem))


def scan(root: Path) -> dict[str, bytes]:
    """Read every admissible file below `root`; keys are sorted, '/'-separated paths."""
    files: dict[str, bytes] = {}
    for file in sorted(root.rglob("*.py"), key=lambda item: item.relative_to(root).as_posix()):
        path = file.relative_to(root).as_posix()
        if not _candidate(path):
            continue
        content = file.read_bytes()
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:
            continue
        if len(text) < 64 or carries_other_license(text) or is_data_table(path, text):
            continue
        files[path] = content
    return files


def held_out_paths(sizes: dict[str, int]) -> set[str]:
    """Choose the held-out files from paths and sizes in bytes, by a hash of the path alone."""
    chosen = {path for path in sizes if _hash(path) % 100 < HELD_OUT_PERCENT}
    modules = [
        path for path, size in sizes.items() if not is_test(path) and size >= MIN_MODULE_BYTES
    ]
    modules.sort(key=lambda path: (_hash(path) % 100, _hash(path)))
    chosen.update(modules[:MIN_HELD_OUT_MODULES])
    return chosen


def write_manifest(root: Path) -> None:
    """Rewrite manifest.json and held_out.json from `root` (for the maintainers of the model)."""
    files = scan(root)
    hashes = {path: hashlib.sha256(content).hexdigest() for path, content in files.items()}
    manifest = {"python": platform.python_version(), "files": hashes}
    MANIFEST.write_text(json.dumps(manifest, indent=0, separators=(",", ":")) + "\n")
    held_out = held_out_paths({path: len(content) for path, content in files.items()})
    split = {
        "modules": sorted(path for path in held_out if not is_test(path)),
        "tests": sorted(path for path in held_out if is_test(path)),
    }
    HELD_OUT.write_text(json.dumps(split, indent=1) + "\n")


def manifest_sha256() -> str:
    """Return the hash of the manifest itself, which identifies the corpus."""
    return hashlib.sha256(MANIFEST.read_bytes()).hexdigest()


def _check(files: dict[str, bytes]) -> None:
    wanted: dict[str, str] = json.loads(MANIFEST.read_text())["files"]
    found = {path: hashlib.sha256(content).hexdigest() for path, content in files.items()}
    wrong = sorted(
        path for path in wanted.keys() | found.keys() if wanted.get(path) != found.get(path)
    )
    if wrong:
        raise CorpusError(
            f"this Python's library differs from CPython {PYTHON_VERSION}'s in {len(wrong)} of "
            f"{len(wanted)} files, first {wrong[0]}; run CPython {PYTHON_VERSION}, or pass "
            "--corpus DIR to train on another library without the check"
        )


def load(root: Path | None) -> list[Document]:
    """Load the corpus from a directory, or from this Python's standard library.

    Args:
        root: the directory; None: the standard library, which must match the manifest.

    Raises:
        CorpusError: the library does not match, or the directory has no admissible file.
    """
    if root is None:
        files = scan(Path(sysconfig.get_paths()["stdlib"]))
        _check(files)
    else:
        files = scan(root)
        if not files:
            raise CorpusError(f"no admissible .py file below {root}")
    held_out = held_out_paths({path: len(content) for path, content in files.items()})
    return [
        Document(path, content.decode("utf-8").replace("\r\n", "\n"), path in held_out)
        for path, content in files.items()
    ]
