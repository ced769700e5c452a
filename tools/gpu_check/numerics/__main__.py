# SPDX-License-Identifier: Apache-2.0
"""Run the trials until the time is up, print each and add it to the results."""

import argparse
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tools.gpu_check import results
from tools.gpu_check.numerics import checks, replays
from tools.gpu_check.numerics.machines import Machine
from tools.gpu_check.numerics.trials import Found, Trial


def machines(rehearsal: bool) -> tuple[Machine, Machine]:
    """Return the device and the interpreter; in a rehearsal both are interpreters."""
    device = Machine("again", "cpu", ("random", 1)) if rehearsal else Machine("device", "cuda")
    return device, Machine("interpreter", "cpu", ("in_order", 0))


def all_trials(
    device: Machine, other: Machine, *, rehearsal: bool, cases: int | None = None
) -> Iterator[Trial]:
    """Yield trials: those that must run first, then the most informative per second, then the rest.

    cases: cases of every op compared with the interpreter, however long they take; None for the
    usual number.
    """
    sizes = checks.REHEARSED if rehearsal else checks.REAL
    if cases:
        sizes = replace(sizes, cases=cases, seconds=math.inf)
    yield from checks.first_calls(device)
    yield from checks.launches(device, is_small=rehearsal)
    yield from checks.against_the_interpreter(device, other, sizes, of_verification=True)
    yield from checks.codes_are_exact(device)
    yield from checks.rows_stand_anywhere(device, sizes)
    yield from replays.replays(device, replays.REHEARSED if rehearsal else replays.REAL)
    yield from checks.schedules_agree(device, sizes)
    yield from checks.graph_is_eager(device, sizes)
    yield from checks.against_the_interpreter(device, other, sizes, of_verification=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the trials; return 0 if all passed, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_check.numerics", description=__doc__)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=230.0)
    parser.add_argument("--rehearsal", action="store_true")
    parser.add_argument("--cases", type=int, help="random cases of an op beside the interpreter")
    parser.add_argument("--after", type=int, default=0, help="trials that another process has made")
    parser.add_argument("--wrong", type=int, default=0, help="how many of them were wrong")
    asked = parser.parse_args(arguments)
    begun = time.monotonic()
    device, other = machines(asked.rehearsal)
    trials = all_trials(device, other, rehearsal=asked.rehearsal, cases=asked.cases)
    number, wrong, ending = asked.after, asked.wrong, ""
    for place, trial in enumerate(trials):
        if place < asked.after:
            continue
        left = asked.seconds - (time.monotonic() - begun)
        if left <= 0 and number > asked.after:
            ending = f"; time was up in {trial.check}"
            break
        found = trial.found()
        number += 1
        wrong += not found.passed
        print(line(found), flush=True)
        name = f"{found.check}: {found.subject}"
        results.add(asked.results, "numerics", name, found.as_dict())
        if not device.answers():
            print("the device no longer answers: the rest is for another process", flush=True)
            _go_on(asked, number, wrong, left)
    print(f"{number} checks of numbers, {wrong} not as they should be{ending}")
    return min(wrong, 1)


def _go_on(asked: argparse.Namespace, number: int, wrong: int, seconds: float) -> None:
    """Replace this process by one with a fresh device context, to run the remaining trials."""
    arguments = [
        "--results",
        str(asked.results),
        "--seconds",
        str(max(1.0, seconds)),
        "--after",
        str(number),
        "--wrong",
        str(wrong),
        *(["--rehearsal"] if asked.rehearsal else []),
        *(["--cases", str(asked.cases)] if asked.cases else []),
    ]
    os.execv(sys.executable, [sys.executable, "-m", "tools.gpu_check.numerics", *arguments])


def line(found: Found) -> str:
    """Format one line of the table."""
    verdict = "ok" if found.passed else "WRONG"
    worst = f"{found.worst:.1e} {found.ulps:.1f} ulp" if found.worst else ""
    return (
        f"{found.check:14} {found.subject:44} {found.equal:4} of {found.cases:4} equal "
        f"{worst:18} {verdict} {found.remark}"
    ).rstrip()


if __name__ == "__main__":
    sys.exit(main())
