# SPDX-License-Identifier: Apache-2.0
"""A run without a browser says so at its end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("playwright")
pytest.importorskip("axe_playwright_python")

TESTS = Path(__file__).resolve().parent


def test_skipped_tests_of_the_page_are_told_in_one_line(tmp_path: Path) -> None:
    """Of a run with workers, as `make test` is one."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "1"]
    command += [str(TESTS / "test_page_access.py")]
    done = subprocess.run(
        command,
        cwd=TESTS.parent,
        env={**os.environ, "PATH": str(tmp_path)},  # where no browser is
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [one for one in done.stdout.splitlines() if "of the page's tests" in one]
    assert line.startswith("SKIPPED ")
    assert line.endswith(": Chromium is not installed (Debian's package chromium)")
