# SPDX-License-Identifier: Apache-2.0
"""Measured durations of steps of the Qwen3-0.6B shape, by number of requests and rows.

A table is a file of bench/results/step_costs/: {"machine", "command", "seconds": [[requests, rows,
seconds], ...]}. With a table, a method's steps on a small model get the durations of the large
model; the number of accepted drafts depends only on the texts.
"""

import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from bench.common import RESULTS

Floats: TypeAlias = NDArray[np.float64]
TABLES = RESULTS / "step_costs"


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a step by its numbers of requests and rows.

    Seconds never decrease with rows. They are interpolated linearly between measured points and
    extrapolated with the last slope. Between two measured numbers of requests, seconds are
    interpolated at equal rows per request.

    Attributes:
        name: name of the table.
        cpu: CPU of the measurement.
        isa: instruction set of the measurement.
        points: seconds by requests and rows.
    """

    name: str
    cpu: str
    isa: str
    points: dict[tuple[int, int], float]
    _curves: dict[int, list[float]] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> "StepCosts":
        """Read a table."""
        table = json.loads(path.read_text())
        points = {(requests, rows): taken for requests, rows, taken in table["seconds"]}
        return cls(path.stem, table["machine"]["cpu"], table["machine"]["isa"], points)

    def save(self, command: str) -> None:
        """Write the table, replacing one of the same name."""
        about = {"machine": {"cpu": self.cpu, "isa": self.isa}, "command": command}
        rows = ",\n".join(
            json.dumps([*key, round(taken, 6)]) for key, taken in sorted(self.points.items())
        )
        TABLES.mkdir(exist_ok=True)
        path = TABLES / f"{self.name}.json"
        path.write_text(f'{json.dumps(about)[:-1]}, "seconds": [\n{rows}\n]}}\n')

    @property
    def max_requests(self) -> int:
        """Largest measured number of requests."""
        return max(self._batches)

    @cached_property
    def _batches(self) -> list[int]:
        return sorted({requests for requests, _ in self.points})

    def of_rows(self, rows: int) -> float:
        """Return the seconds of a step by rows alone, as the engine measures them at start-up."""
        least = {}
        for (_, count), taken in sorted(self.points.items(), reverse=True):
            least[count] = taken  # of equal row counts, the one with the fewest requests
        return float(_along(sorted(least.items()), np.array([rows]))[0])

    def curve(self, requests: int) -> list[float]:
        """Return the seconds of steps of `requests` decoding requests, by rows from 0 on."""
        if requests not in self._curves:
            known = self._batches
            index = max(min(bisect_right(known, requests) - 1, len(known) - 2), 0)
            low, high = known[index], known[min(index + 1, len(known) - 1)]
            at = np.arange(1024) / requests
            seconds = self._at(low, at)
            if requests > low:
                more = np.maximum(self._at(high, at) - seconds, 0)
                seconds += (requests - low) / max(high - low, 1) * more
            self._curves[requests] = np.maximum.accumulate(seconds).tolist()
        return self._curves[requests]

    def total(self, steps: Iterable[tuple[int, int]]) -> float:
        """Return the total seconds of steps, given as (requests, rows)."""
        return sum(self.curve(requests)[rows] for requests, rows in steps if requests)

    def _at(self, batch: int, per_request: Floats) -> Floats:
        """Return the seconds at rows per request, for a measured number of requests."""
        points = sorted((m / n, taken) for (n, m), taken in self.points.items() if n == batch)
        return _along(points, per_request)


def _along(points: Sequence[tuple[float, float]], at: Floats) -> Floats:
    """Make the points monotone, interpolate them, and extrapolate with the last slope."""
    places, seconds = np.array(points).T
    seconds = np.maximum.accumulate(seconds)
    slope = np.diff(seconds[-2:]).sum() / max(np.diff(places[-2:]).sum(), 1e-9)
    line = np.interp(at, places, seconds) + slope * np.maximum(at - places[-1], 0)
    return np.asarray(line)


def tables() -> list[StepCosts]:
    """Load all stored tables."""
    return [StepCosts.load(path) for path in sorted(TABLES.glob("*.json"))]
