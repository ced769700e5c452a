# SPDX-License-Identifier: Apache-2.0
"""The end of a run reports why tests were skipped, and what to install."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import skips

pytestmark = pytest.mark.ci

pytest.importorskip("playwright")
pytest.importorskip("axe_playwright_python")

TESTS = Path(__file__).resolve().parent


def report(reason: str) -> SimpleNamespace:
    return SimpleNamespace(longrepr=("file", 1, f"Skipped: {reason}"))


def test_skip_reasons_are_summarized_in_ten_lines() -> None:
    skipped = [report(f"reason {i}") for i in range(12) for _ in range(20 - i)]
    lines = skips.summary(skipped)
    assert lines[0] == "SKIPPED 20: reason 0" and len(lines) == 10
    assert lines[-1] == "SKIPPED 30 for 3 other reasons (pytest -rs)"
    assert skips.summary(skipped[:20]) == ["SKIPPED 20: reason 0"] and skips.summary([]) == []


@pytest.mark.slow
def test_skipped_tests_of_the_page_name_the_package(tmp_path: Path) -> None:
    """The run has workers, like `make test`."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "1"]
    command += [str(TESTS / "test_page_access.py")]
    done = subprocess.run(
        command,
        cwd=TESTS.parent,
        env={**os.environ, "PATH": str(tmp_path)},  # a directory without a browser
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [one for one in done.stdout.splitlines() if one.startswith("SKIPPED ")]
    assert line.endswith(": Chromium is not installed (apt install chromium)")
