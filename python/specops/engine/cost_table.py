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
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

Key: TypeAlias = tuple[str, int, int]
Run: TypeAlias = Callable[[str, int, int], float]
STEP = ""  # stands for the step itself where others are named by their method

_ROWS_PER_REQUEST = (1, 1.125, 1.5, 2, 3, 4, 5, 7, 9, 17)
_COARSE = (1, 2, 5)  # of these: measured first, and however long it takes
_REPEATS = 5


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
        seconds: by (STEP, rows, requests) and (method, requests, requests). A method without any
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
            times = {n: taken for (name, n, _), taken in self.seconds.items() if name == method}
            seconds = _along(times.items(), np.array([requests])) if times and requests else [0.0]
            self._drafting[method, requests] = float(seconds[0])
        return self._drafting[method, requests]

    def _at(self, batch: int, per_request: NDArray[np.float64]) -> NDArray[np.float64]:
        """Seconds of a step for a measured number of requests, by rows per request."""
        times = self.seconds.items()
        points = [(m / n, t) for (name, m, n), t in times if name == STEP and n == batch]
        return _along(points, per_request)

    @classmethod
    def measure(
        cls, run: Run, methods: Iterable[str], max_rows: int, max_requests: int, limit: float = 2.0
    ) -> "CostTable":
        """Measures a table: the least of up to five rounds over some dozens of shapes.

        The least, since whatever disturbs a run only adds to it.

        Args:
            run: runs a step, or a method's drafter, at (STEP or the method, rows, requests), and
                returns its seconds, without those that preparing for the shape takes once.
            methods: those with a drafter.
            max_rows: most rows of a step, at least `max_requests`.
            max_requests: most decoding requests of a step.
            limit: seconds, after which only the shapes that are needed are measured.
        """
        end = time.perf_counter() + limit
        needed: dict[Key, bool] = {}
        for batch in {min(1 << i, max_requests) for i in range(max_requests.bit_length() + 1)}:
            is_coarse = batch in (1, max_requests)
            needed |= {(method, batch, batch): is_coarse for method in methods}
            for per_request in reversed(_ROWS_PER_REQUEST):
                rows = min(int(per_request * batch), max_rows)
                needed[STEP, rows, batch] = is_coarse and per_request in _COARSE
        times: dict[Key, list[float]] = {key: [] for key in needed}
        for _ in range(_REPEATS):
            for key in sorted(needed, key=lambda key: not needed[key]):
                if time.perf_counter() < end or (needed[key] and not times[key]):
                    times[key].append(run(*key))
        return cls({key: min(t) for key, t in times.items() if t})

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


def _along(points: Iterable[tuple[float, float]], at: NDArray[Any]) -> NDArray[np.float64]:
    """The line through some points, made monotone, and on with its last slope."""
    places, values = np.array(sorted(points), np.float64).T
    values = np.maximum.accumulate(values)
    slope = np.diff(values[-2:]).sum() / max(np.diff(places[-2:]).sum(), 1e-9)
    line = np.interp(at, places, values) + slope * np.maximum(at - places[-1], 0)
    return np.asarray(line)
