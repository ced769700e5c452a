# SPDX-License-Identifier: Apache-2.0
"""No argument value crashes an op: it works or raises an error that names the argument."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ci

PROGRAM = Path(__file__).with_name("fuzzed_arguments.py")


@pytest.mark.fast("37-*-cpu", "37-compiled-simt")
@pytest.mark.parametrize("module", ["cpu", "simt"])
@pytest.mark.parametrize("calls", ["compiled", "public"])
@pytest.mark.parametrize("every", [1, 17, 37])
def test_no_argument_value_crashes_an_op(module: str, calls: str, every: int) -> None:
    """The cases run in a separate process, because a crash ends it."""
    program = [sys.executable, str(PROGRAM), module, calls, str(every)]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    tried = int(done.stdout.split()[-6])
    assert tried > 20_000 / every if calls == "compiled" else tried > 10_000 / every
