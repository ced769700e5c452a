# SPDX-License-Identifier: Apache-2.0
"""What a run leaves out and whoever reads its end should know: the tests of the page."""

from collections import Counter
from collections.abc import Iterable
from pathlib import PurePath
from typing import Any

PAGE = {
    *("test_page_access.py", "test_page_chats.py", "test_page_firefox.py"),
    *("test_page_replay.py", "test_playground.py"),
}


def of_page(skipped: Iterable[Any]) -> str | None:
    """One line about tests of the page that were skipped, and why; None: there are none.

    Args:
        skipped: pytest's reports of skipped tests and files.
    """
    reasons: Counter[str] = Counter()
    for report in skipped:
        if PurePath(report.nodeid.partition("::")[0]).name in PAGE:
            reasons[report.longrepr[2].removeprefix("Skipped: ")] += 1
    if not reasons:
        return None
    why = "; ".join(sorted(reasons))
    return f"SKIPPED {reasons.total()} of the page's tests, in a browser: {why}"
