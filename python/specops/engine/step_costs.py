# SPDX-License-Identifier: Apache-2.0
"""What a step of the engine takes, learnt from its steps: plain ones, and ones that draft."""

from bisect import bisect_left
from collections.abc import Iterable
from itertools import pairwise

import numpy as np

_PLAIN_WEIGHT, _WEIGHT = 0.2, 0.08  # least weights of a new time: machines change their speed
_EARLY_WEIGHT = 0.7  # of one of the first times, where it is below the average
_TRUSTED = 3  # times, from which on one that is far off counts as an outlier
# Parts of what was expected, by which a time counts at most: of many, of one of the first, and of
# the first at a place.
_OUTLIER, _FIRST_OUTLIER, _NEW_OUTLIER = 0.3, 1.5, 0.6
# Where costs are kept, in drafts per request; a time counts at the nearest.
_PLACES = [0, 0.125, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, *range(3, 17), 20, 24, 32, 48, 64]
_BORDERS = [(low + high) / 2 for low, high in pairwise(_PLACES)]
_COLD_SLOPE = 0.25  # plain steps, that a draft per request is thought to take
_COLD_DRAFTING = 0.03  # and a drafter
_COLD_WEIGHT = 2  # times that this counts for
# Parts of the most drafts so far; and drafts per request, before there were any.
_REACH, _FIRST_REACH = 2.0, 0.25
_LINE_WEIGHT = 4  # times that a place must have had to be half-way between the line and its own


class StepCosts:
    """Seconds of plain steps by their requests, and what drafting costs, as a multiple of these.

    What drafting costs is everything that such a step takes longer than a plain one, whatever
    for: rows, drafters, decisions. It is kept by drafts per request, for batches of similar size
    (up to a power of two) together: averages at some places and a line through them, which a place
    with few times keeps to. More drafts are never cheaper.
    """

    def __init__(self) -> None:
        self._plain: dict[int, tuple[float, int]] = {}  # by requests: seconds and times
        self._curves: dict[int, _Curve] = {}

    def observe_plain(self, batch: int, seconds: float) -> None:
        """Takes in the time of a step in which nothing was drafted or verified.

        Args:
            batch: its requests, at least 1, with one row each.
            seconds: what it took.
        """
        mean, count = self._plain.get(batch, (0.0, 0))
        self._plain[batch] = _moved(mean, count, max(seconds, 1e-9), _PLAIN_WEIGHT), count + 1

    def knows_plain(self, batch: int) -> bool:
        """Whether there were steps without drafts of about so many requests."""
        size = batch.bit_length()
        if self._plain.get(batch, (0.0, 0))[1] >= _TRUSTED:
            return True
        return any(n.bit_length() == size and t[1] >= _TRUSTED for n, t in self._plain.items())

    def plain_seconds(self, batch: int) -> float:
        """What a plain step takes; where there was none of so many requests, by the nearest ones.

        Raises:
            ValueError: there was none at all.
        """
        mean, count = self._plain.get(batch, (0.0, 0))
        if count >= _TRUSTED:
            return mean
        known = sorted(n for n, (_, count) in self._plain.items() if count >= _TRUSTED)
        if not known:
            if count:
                return mean
            raise ValueError("no step without drafts was timed yet")
        near = min(max(batch, known[0]), known[-1])
        seconds = float(np.interp(near, known, [self._plain[n][0] for n in known]))
        return seconds * (near + batch) / (2 * near)  # half of it is for requests

    def observe(self, batch: int, times: Iterable[tuple[float, float]]) -> None:
        """Takes in steps that drafted.

        Args:
            batch: their requests, about.
            times: of each step: its drafts per request, and its time in plain steps.
        """
        self._curve(batch).observe(times)

    def multiple(self, batch: int, drafts: float) -> float:
        """What a step with so many drafts per request is expected to take, in plain steps."""
        return self._curve(batch).at(drafts)

    def reach(self, batch: int) -> int:
        """Up to how many drafts in all the costs are known well enough to try them."""
        curve = self._curve(batch)
        return max(int(_REACH * curve.places[-2] * batch), int(_FIRST_REACH * batch), 1)

    def _curve(self, batch: int) -> "_Curve":
        size = batch.bit_length()
        curve = self._curves.get(size)
        if curve is None:
            curve = self._curves[size] = _Curve()
        if not curve.is_known:  # a draft takes as many seconds as in the batch that is nearest
            known = [other for other, one in self._curves.items() if one.is_known]
            if known:
                near = min(known, key=lambda other: abs(other - size))
                other = 2 ** (near - 1)
                ratio = self.plain_seconds(other) / self.plain_seconds(batch)
                curve.guess(self._curves[near].slope * ratio * batch / other)
        return curve


class _Curve:
    """What drafting costs, in plain steps, by drafts per request.

    Attributes:
        slope: of the line; for a draft per request.
        places: drafts per request, ascending from 0.
        values: plain steps there, never falling; between them lines lead.
    """

    def __init__(self) -> None:
        self._cold_slope = _COLD_SLOPE
        self._points: dict[int, tuple[float, float, int]] = {}  # place, mean, times
        self._draw()

    @property
    def is_known(self) -> bool:
        """Whether there were times with drafts."""
        return max(self._points, default=0) > 0

    def guess(self, slope: float) -> None:
        """Says what the slope is likely to be."""
        if slope != self._cold_slope:
            self._cold_slope = slope
            self._draw()

    def observe(self, times: Iterable[tuple[float, float]]) -> None:
        """Takes in steps: the drafts per request of each, and its time in plain steps."""
        for drafts, time in times:
            key = bisect_left(_BORDERS, drafts)
            place, mean, count = self._points.get(key, (drafts, 0.0, 0))
            if count:
                time += self.at(place) - self.at(drafts)
            elif self._points:
                time = min(time, self.at(drafts) * (1 + _NEW_OUTLIER))
            weight = max(1 / (1 + count), _WEIGHT)
            place += weight * (drafts - place)
            self._points[key] = place, _moved(mean, count, time, _WEIGHT), count + 1
        self._draw()

    def at(self, drafts: float) -> float:
        """The value at some drafts per request."""
        index = bisect_left(self.places, drafts)
        if self.places[index] == drafts:
            return self.values[index]
        low, high = self.places[index - 1], self.places[index]
        part = (drafts - low) / (high - low)
        return self.values[index - 1] + part * (self.values[index] - self.values[index - 1])

    def _draw(self) -> None:
        at_0, slope = self._fit(list(self._points.values()))
        self.slope = slope
        self.places: list[float] = []
        self.values: list[float] = []
        lowest = max(at_0, 1.0)
        for key in range(max(self._points, default=0) + 1):
            place, mean, count = self._points.get(key, (_PLACES[key], lowest, 0))
            if count:
                line = at_0 + slope * place
                value = line + (mean - line) * count / (count + _LINE_WEIGHT)
                lowest = max(value, lowest if key else 1.0)
            self.places.append(place)
            self.values.append(lowest)
        self.places.append(self.places[-1] + 1e6)
        self.values.append(self.values[-1] + 1e6 * slope)

    def _fit(self, points: list[tuple[float, float, int]]) -> tuple[float, float]:
        """The line through the points and through what is thought before there are any."""
        cold = 1 + _COLD_DRAFTING
        points = [
            *((place, mean, min(count, 20)) for place, mean, count in points),
            (0.0, cold, _COLD_WEIGHT),
            (1.0, cold + self._cold_slope, _COLD_WEIGHT),
        ]
        total = sum(weight for _, _, weight in points)
        place = sum(weight * x for x, _, weight in points) / total
        mean = sum(weight * y for _, y, weight in points) / total
        spread = sum(weight * (x - place) ** 2 for x, _, weight in points)
        slope = sum(weight * (x - place) * (y - mean) for x, y, weight in points) / spread
        slope = min(max(slope, 0.0), (mean - 1) / place if mean > 1 else 0.0)
        return mean - slope * place, slope


def _moved(mean: float, count: int, time: float, least: float) -> float:
    """A robust average: the mean of the first times, then an EWMA that outliers hardly move."""
    if count == 0:
        return time
    if count < 2 * _TRUSTED and time < mean:  # what was slow at first was slow for another reason
        return mean + _EARLY_WEIGHT * (time - mean)
    known = count >= _TRUSTED
    highest = mean * (1 + (_OUTLIER if known else _FIRST_OUTLIER))
    lowest = mean * (1 - _OUTLIER) if known else 0.0
    return mean + max(1 / (1 + count), least) * (min(max(time, lowest), highest) - mean)
