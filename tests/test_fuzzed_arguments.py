# SPDX-License-Identifier: Apache-2.0
"""Whatever an argument of an op is given, the op works or says what is wrong; it never crashes."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ci

PROGRAM = Path(__file__).with_name("fuzzed_arguments.py")


@pytest.mark.fast("17-*-cpu", "37-compiled-simt")
@pytest.mark.parametrize("module", ["cpu", "simt"])
@pytest.mark.parametrize("calls", ["compiled", "public"])
@pytest.mark.parametrize("every", [1, 17, 37])
def test_fuzzed_arguments(module: str, calls: str, every: int) -> None:
    """In a process of its own, which a crash would end."""
    program = [sys.executable, str(PROGRAM), module, calls, str(every)]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    tried = int(done.stdout.split()[-6])
    assert tried > 20_000 / every if calls == "compiled" else tried > 10_000 / every
