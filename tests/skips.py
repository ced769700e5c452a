# SPDX-License-Identifier: Apache-2.0
"""Summary at the end of a run: how many tests were skipped, and why."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

MOST_LINES = 10


def summary(skipped: Iterable[Any]) -> list[str]:
    """Return a line for each reason, the most frequent first, at most `MOST_LINES` lines.

    Args:
        skipped: pytest's reports of skipped tests and files.
    """
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    lines = [f"SKIPPED {count}: {reason}" for reason, count in reasons.most_common()]
    if len(lines) > MOST_LINES:
        rest = reasons.most_common()[MOST_LINES - 1 :]
        count = sum(count for _, count in rest)
        lines[MOST_LINES - 1 :] = [f"SKIPPED {count} for {len(rest)} other reasons (pytest -rs)"]
    return lines
