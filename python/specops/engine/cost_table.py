# SPDX-License-Identifier: Apache-2.0
"""What steps and drafters cost, in seconds: measured once per model and device, kept in a file."""

import hashlib
import json
import logging
import math
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

Key: TypeAlias = tuple[str, int, int]
Run: TypeAlias = Callable[[str, int, int], float]
STEP = ""  # stands for the step itself where others are named by their method

_ROWS_PER_REQUEST = (1, 1.25, 1.5, 2, 3, 5, 9, 17)
_COARSE = (1, 2, 5)  # of these: measured first, and however long it takes
_ROUNDS = 7
_RUNS = 3  # of a shape in a round, each behind one of the shape that it is compared with


def cost_path(*identity: str) -> Path:
    """The file of a cost table in the user's cache folder.

    Args:
        identity: everything that costs depend on: model, device, threads, version.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]
    return Path(cache, "specops", "costs", f"{key}.json")


class CostTable:
    """Seconds of a step by its rows and decoding requests, and of each drafter by its requests.

    Seconds never fall with rows; they are linear between measured points and go on with the last
    slope. For a number of requests between two that were measured, it is between the seconds of
    both for as many rows per request.

    Args:
        seconds: by (STEP, rows, requests) and (method, rows, requests). A drafter's rows are its
            requests, and those that it runs again because it rested. A method without any entry
            costs nothing.

    Raises:
        ValueError: there is no step, or an entry is out of range.
    """

    def __init__(self, seconds: Mapping[Key, float]) -> None:
        if not all(m >= n >= 1 and 0 < t < math.inf for (_, m, n), t in seconds.items()):
            raise ValueError(f"CostTable: expected times and rows >= requests >= 1, got {seconds}")
        self.seconds = dict(seconds)
        self._batches = sorted({requests for name, _, requests in seconds if name == STEP})
        if not self._batches:
            raise ValueError("CostTable: expected at least one step, got none")
        self._curves: dict[int, list[float]] = {}
        self._drafting: dict[tuple[str, int], float] = {}
        self._per_row: dict[str, float] = {}

    def curve(self, requests: int, rows: int) -> list[float]:
        """Seconds of a step of so many requests, by its rows; `rows` + 1 entries or more."""
        if rows >= len(self._curves.get(requests, ())):
            known = self._batches
            index = max(min(bisect_right(known, requests) - 1, len(known) - 2), 0)
            low, high = known[index], known[min(index + 1, len(known) - 1)]
            at = np.arange(1 << max(rows.bit_length(), 6)) / requests
            seconds = self._at(low, at)
            if requests > low:
                more = np.maximum(self._at(high, at) - seconds, 0)
                seconds += (requests - low) / max(high - low, 1) * more
            self._curves[requests] = np.maximum.accumulate(seconds).tolist()
        return self._curves[requests]

    def drafting(self, method: str, requests: int) -> float:
        """Seconds in which a method's drafter drafts for so many requests."""
        if (method, requests) not in self._drafting:
            times = {n: t for (name, m, n), t in self.seconds.items() if name == method and m == n}
            seconds = _along(times.items(), np.array([requests])) if times and requests else [0.0]
            self._drafting[method, requests] = float(seconds[0])
        return self._drafting[method, requests]

    def drafting_row(self, method: str) -> float:
        """Seconds that each row takes which a drafter runs again because it rested."""
        if method not in self._per_row:
            found = [(key, t) for key, t in self.seconds.items() if key[0] == method]
            slopes = [(t - self.drafting(method, n)) / (m - n) for (_, m, n), t in found if m > n]
            self._per_row[method] = max([0.0, *slopes])
        return self._per_row[method]

    def _at(self, batch: int, per_request: NDArray[np.float64]) -> NDArray[np.float64]:
        """Seconds of a step for a measured number of requests, by rows per request."""
        times = self.seconds.items()
        points = [(m / n, t) for (name, m, n), t in times if name == STEP and n == batch]
        return _along(points, per_request)

    @classmethod
    def measure(
        cls,
        run: Run,
        methods: Mapping[str, int],
        max_drafts: int,
        max_requests: int,
        limit: float = 4.0,
    ) -> "CostTable":
        """Measures a table over some dozens of shapes.

        A machine's speed changes from second to second. So a step is timed side by side with the
        step of one row, and one with drafters with the same step without: of each the least of a
        few runs, and of the quotients the median over some rounds.

        Args:
            run: runs a step without drafters (STEP), or with those of a method, at (STEP or the
                method, rows, requests); returns its seconds, without those that preparing for the
                shape takes once. Rows are as in `CostTable`.
            methods: those with a drafter, and the rows to measure that it runs again; 0: it never
                does.
            max_drafts: most drafts of a request.
            max_requests: most decoding requests of a step.
            limit: seconds, after which only the shapes that are needed are measured.
        """
        end = time.perf_counter() + limit
        is_needed = _shapes(methods, max_drafts, max_requests)
        unit, first = (STEP, 1, 1), math.inf
        quotients: dict[Key, list[float]] = {key: [] for key in is_needed}
        for _ in range(_ROUNDS):
            for key in sorted(is_needed, key=lambda key: not is_needed[key]):
                if time.perf_counter() >= end and (not is_needed[key] or quotients[key]):
                    continue
                name, _, requests = key
                beside = unit if name == STEP else (STEP, requests, requests)
                pairs = [(run(*beside), run(*key)) for _ in range(_RUNS)]
                plain = min(taken for taken, _ in pairs)
                quotients[key].append(min(taken for _, taken in pairs) / plain)
                if beside == unit:
                    first = min(first, plain)
        times = {key: median(some) for key, some in quotients.items() if some}
        steps = cls({key: t * first for key, t in times.items() if key[0] == STEP})
        more = {
            (name, m, n): max(t - 1, 1e-6) * steps.curve(n, n)[n]
            for (name, m, n), t in times.items()
            if name != STEP
        }
        return cls(steps.seconds | more)

    @classmethod
    def load(cls, path: Path) -> "CostTable | None":
        """The table in a file; None if there is no file, or it is damaged, which is logged."""
        try:
            entries = json.loads(path.read_text())
            return cls({(str(name), int(m), int(n)): float(t) for name, m, n, t in entries})
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, OverflowError) as error:
            logger.warning("ignoring the cost table %s: %r", path, error)
            return None

    def save(self, path: Path) -> None:
        """Writes the table to a file, whole or not at all; that it cannot is logged."""
        partial = path.with_suffix(f".{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps([[*key, taken] for key, taken in self.seconds.items()]))
            partial.replace(path)
        except OSError as error:
            logger.warning("cannot write the cost table %s: %r", path, error)


def _shapes(methods: Mapping[str, int], max_drafts: int, max_requests: int) -> dict[Key, bool]:
    """What is measured, and whether it is needed however long it takes."""
    shapes: dict[Key, bool] = {}
    for batch in {min(1 << i, max_requests) for i in range(max_requests.bit_length() + 1)}:
        is_coarse = batch in (1, max_requests)
        for per_request in reversed(_ROWS_PER_REQUEST):
            rows = int(min(per_request, 1 + max_drafts) * batch)
            shapes[STEP, rows, batch] = is_coarse and per_request in _COARSE
        shapes |= {(method, batch, batch): is_coarse for method in methods}
    return shapes | {(method, 1 + rows, 1): True for method, rows in methods.items() if rows}


def _along(points: Iterable[tuple[float, float]], at: NDArray[Any]) -> NDArray[np.float64]:
    """The line through some points, made monotone, and on with its last slope.

    What falls is noise: neighbours that do are replaced by their mean.
    """
    places, found = zip(*sorted(points), strict=True)
    means: list[tuple[float, int]] = []  # and of how many points
    for value in found:
        mean, count = value, 1
        while means and means[-1][0] > mean:
            before, more = means.pop()
            mean, count = (before * more + mean * count) / (more + count), more + count
        means.append((mean, count))
    values = np.repeat([mean for mean, _ in means], [count for _, count in means])
    slope = np.diff(values[-2:]).sum() / max(np.diff(places[-2:]).sum(), 1e-9)
    line = np.interp(at, places, values) + slope * np.maximum(at - places[-1], 0)
    return np.asarray(line)
