# SPDX-License-Identifier: Apache-2.0
"""Runs the checks until their time is up, prints each and adds it to the results."""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tools.gpu_check import results
from tools.gpu_check.numerics import checks
from tools.gpu_check.numerics.checks import Found
from tools.gpu_check.numerics.machines import Machine

CASES = 300  # of an op beside the interpreter
SMALL = 40  # of the checks that run each case several times


def all_checks(rehearsal: bool) -> list[tuple[str, Callable[[], Iterator[Found]]]]:
    """The checks, the quickest first; in a rehearsal both machines are the interpreter."""
    other = Machine("interpreter", "cpu", ("in_order", 0))
    device = Machine("again", "cpu", ("random", 1)) if rehearsal else Machine("device", "cuda")
    cases, small = (2, 1) if rehearsal else (CASES, SMALL)
    return [
        ("launch", lambda: checks.launches(device, is_small=rehearsal)),
        ("row identity", lambda: checks.rows_stand_anywhere(device, small)),
        ("schedules", lambda: checks.schedules_agree(device, small)),
        ("graph = eager", lambda: checks.graph_is_eager(device, small)),
        ("interpreter", lambda: checks.against_the_interpreter(device, other, cases)),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status says whether all is as it should be."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_check.numerics", description=__doc__)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=130.0)
    parser.add_argument("--rehearsal", action="store_true")
    asked = parser.parse_args(arguments)
    begun = time.monotonic()
    number = wrong = 0
    left_out: list[str] = []
    for name, check in all_checks(asked.rehearsal):
        for found in check():
            number += 1
            wrong += not found.passed
            print(line(found), flush=True)
            results.add(asked.results, "numerics", f"{name}: {found.subject}", found.as_dict())
            if time.monotonic() - begun > asked.seconds:
                left_out.append(name)
                break
        if left_out:
            break
    ending = f"; time was up in {left_out[0]}" if left_out else ""
    print(f"{number} checks of numbers, {wrong} not as they should be{ending}")
    return min(wrong, 1)


def line(found: Found) -> str:
    """One line of the table."""
    verdict = "ok" if found.passed else "WRONG"
    worst = f"{found.worst:.1e}" if found.worst else ""
    return (
        f"{found.check:14} {found.subject:44} {found.equal:4} of {found.cases:4} equal "
        f"{worst:8} {verdict} {found.remark}"
    ).rstrip()


if __name__ == "__main__":
    sys.exit(main())
