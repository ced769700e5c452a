# SPDX-License-Identifier: Apache-2.0
"""What a step costs by its requests and its drafts, learnt from the steps themselves."""

from bisect import bisect_left, bisect_right

import numpy as np
from numpy.typing import NDArray

# The numbers of drafts at which costs are kept, with straight lines between. Small ones each have
# their own, so that the stairs of padded steps are seen.
KNOTS: list[int] = [
    *range(9),
    *(part * 2**power for power in range(1, 22) for part in (5, 6, 7, 8)),
]
_FAR = 1e9  # drafts
_COLD_SHARE = 0.4  # of a step's time, for a draft per request, before any was met
_COLD_REQUESTS = 2  # at least, in that guess: a step has a fixed part
_COLD_DRAFTING = 0.01  # of a step's time, for the drafter, likewise
_SLOW, _FAST = 0.005, 0.2  # a new time's weight in its knot, and in the common speed
_EARLY_WEIGHT = 0.4  # of one of the first times in its knot that is below the average
_TRUSTED = 4  # times, from which on a knot tells the speed
_KNOWN = 8.0  # times, from which on a knot is known well
_LEAST_EVIDENCE, _MOST_EVIDENCE = 2.0, 50.0  # for a slope, of which other curves learn
_LINE_WEIGHT = 8  # times that a knot must have had to be half-way between the line and its own
_MEMORY = 0.998  # what a knot's times still count for after another step
_PRIOR_WEIGHT = 16  # times, with a draft a request, that other curves' slopes count for
_BUILD = 0.03  # a step's weight in what new shapes take
_OUTLIER = 0.3  # a time counts as at most so much above, or below, what was expected; and, while
_FIRST_OUTLIER = 1.0  # little is known, as at most so much above
_TABLE_STEPS, _EARLY = 8, 8  # steps for which an array of the costs is good; but not of the first
_LIGHT_STEPS = 100  # with few drafts, after which one with many shows what they cost
# Steps after which one shows what drafts cost: after the first of all, while little is known, then.
_FIRST_REFERENCE, _EARLY_REFERENCE_STEPS, _REFERENCE_STEPS = 4, 16, 200


class StepCosts:
    """Seconds of a step by its requests and drafts, learnt from steps that were timed.

    For every number of requests there is a curve over the number of drafts: averages at knots,
    which a time moves by a small part of its distance, and by no more than an outlier's limit, and
    a line through them, which a knot with few times keeps to. As far as its own times do not say,
    its slope is that of the others, the nearest ones above all. One factor, the speed, takes what
    all steps have in common, such as a busy machine or growing contexts, so that what has not been
    met for long is still comparable. A curve never falls: more drafts are never cheaper.
    """

    def __init__(self) -> None:
        self._curves: dict[int, _Curve] = {}
        # By the number of requests, to a power of two.
        self._shares: dict[int, tuple[float, int]] = {}  # of drafters, and how many times it was
        self._builds: dict[int, float] = {}  # seconds a step for what was met first
        self._ages: dict[int, int] = {}  # steps since the last without drafter and drafts
        self._light: dict[int, int] = {}  # steps since the last with many drafts
        self._speed = 1.0
        self._is_told = False  # what drafters take; then curves are of steps without

    def observe(
        self,
        batch: int,
        drafts: int,
        seconds: float,
        *,
        drafting: bool,
        draft_seconds: float | None = None,
        build_seconds: float = 0.0,
    ) -> None:
        """Takes in a step of `batch` requests, one row each and `drafts` more, and no other rows.

        Args:
            batch: requests, at least 1.
            drafts: rows beside one per request.
            seconds: what it took.
            drafting: a drafter ran in it.
            draft_seconds: what drafting took of it; None where that cannot be told.
            build_seconds: what it took beside that, once, for its number of drafts.
        """
        curve = self._curve(batch)
        self._is_told = self._is_told or draft_seconds is not None
        time = max(seconds - (draft_seconds or 0.0), 1e-9) / self._speed  # clocks may stand still
        is_plain = not drafting and drafts == 0 and not self._is_told
        guess, is_trusted = curve.learn(drafts, time, is_plain=is_plain)
        if is_trusted:
            error = min(max(time / guess - 1, -_OUTLIER), _OUTLIER)
            self._speed *= 1 + _FAST * error
        if drafting and draft_seconds is not None:
            size = batch.bit_length()
            share, count = self._shares.get(size, (0.0, 0))
            latest = draft_seconds / self._speed / float(curve.table(0)[0])
            self._shares[size] = _moved(share, count, latest), count + 1
        self.count(batch, drafts, drafting=drafting, build_seconds=build_seconds)

    def count(self, batch: int, drafts: int, *, drafting: bool, build_seconds: float = 0.0) -> None:
        """Takes in a step without looking at its time, which takes time, too; as `observe`."""
        size = batch.bit_length()
        is_light = 2 * drafts < batch
        self._light[size] = self._light.get(size, 0) + 1 if is_light and drafting else 0
        if drafting:
            self._ages[size] = self._ages.get(size, _EARLY_REFERENCE_STEPS - _FIRST_REFERENCE) + 1
            build = self._builds.get(size, 0.0)
            self._builds[size] = build + _BUILD * (build_seconds / self._speed - build)
        elif drafts == 0:
            self._ages[size] = 0

    def seconds(self, batch: int, most: int) -> NDArray[np.float64]:
        """Expected seconds with 0 .. most drafts, and perhaps more, and the drafter running.

        Before the first step only their ratios mean anything.
        """
        curve = self._curve(batch)
        table = curve.table(most)
        share, _ = self._shares.get(batch.bit_length(), (0.0, 0))
        return (table + share * float(table[0])) * self._speed

    def drafter_share(self, batch: int) -> float:
        """What drafting takes whatever it finds, as a part of a step without drafts, 0 to 1."""
        size = batch.bit_length()
        share, count = self._shares.get(size, (_COLD_DRAFTING, 0))
        if count:
            share /= 1 + share
        else:
            known = [other for other in self._curves.values() if other.drafter_share is not None]
            if known:
                near = min(known, key=lambda other: abs(other.batch - batch))
                share = near.drafter_share or 0.0
        if size in self._builds:
            share += self._builds[size] / float(self._curve(batch).table(0)[0])
        return min(max(share, 0.0), 0.9)

    def knows(self, batch: int, drafts: int) -> bool:
        """Whether there were many such steps lately."""
        curve = self._curves.get(batch)
        return curve is not None and curve.knows(drafts)

    def wants_load(self, batch: int) -> bool:
        """Whether there has been no step with many drafts for long."""
        return self._light.get(batch.bit_length(), 0) >= _LIGHT_STEPS

    def wants_reference(self, batch: int) -> bool:
        """Whether there has been no step without drafter and drafts for long."""
        steps = _REFERENCE_STEPS if self.knows(batch, 0) else _EARLY_REFERENCE_STEPS
        return self._ages.get(batch.bit_length(), 0) >= steps

    def _curve(self, batch: int) -> "_Curve":
        curve = self._curves.get(batch)
        if curve is None:
            curve = self._curves[batch] = _Curve(batch)
        if curve.is_stale:
            total = slopes = starts = 0.0
            for other in self._curves.values():
                if other is not curve and other.evidence >= _LEAST_EVIDENCE:
                    nearness = min(other.batch, batch) / max(other.batch, batch)
                    weight = nearness * nearness * min(other.evidence, _MOST_EVIDENCE)
                    total += weight
                    slopes += weight * other.slope
                    # A request is a row at least.
                    start = other.start + other.slope * (batch - other.batch)
                    starts += weight * max(start, 0.2 * other.start)
            if total:
                curve.prior, curve.guess = slopes / total, starts / total
        return curve


class _Curve:
    """The costs of one number of requests."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.slope = 0.0  # seconds a draft
        self.start = 0.0  # seconds without drafts
        self.evidence = 0.0  # for the slope: times without drafts and with one each, two by two
        # What the other curves say of both; before there are others, nothing and no unit.
        self.prior, self.guess = 0.0, 1.0
        self._drafts: list[int] = []  # knots that were met, ascending
        self._means: list[float] = []
        self._counts: list[float] = []  # of times, each for less the more others there were since
        self._plain = 0.0  # without drafts and without a drafter
        self._num_plain = 0
        self._table: NDArray[np.float64] = np.zeros(0)
        self._fresh = 0  # steps for which it may still be used

    @property
    def is_stale(self) -> bool:
        """Whether the table is made anew before it is used."""
        return self._fresh <= 0

    def knows(self, drafts: int) -> bool:
        """Whether the knot that is nearest to a number of drafts had many times."""
        index = bisect_left(self._drafts, _knot(drafts))
        return index < len(self._counts) and self._counts[index] >= _KNOWN

    def learn(self, drafts: int, time: float, *, is_plain: bool) -> tuple[float, bool]:
        """Moves the curve towards a time; returns what it said before, and if that was reliable.

        Args:
            drafts: of the step.
            time: that it took.
            is_plain: it stands apart, because the others' times are with a drafter.
        """
        self._fresh -= 1
        self._counts = [_MEMORY * count for count in self._counts]
        if is_plain:
            guess, is_trusted = self._plain, self._num_plain >= _TRUSTED
            self._plain = _moved(guess, self._num_plain, time)
            self._num_plain += 1
            return guess, is_trusted
        knot = _knot(drafts)
        index = bisect_left(self._drafts, knot)
        is_new = index == len(self._drafts) or self._drafts[index] != knot
        count = 0.0 if is_new else self._counts[index]
        knows = sum(self._counts) + self._num_plain >= _TRUSTED
        guess, moved = time, time
        if knows or not is_new:
            table = self.table(max(knot, drafts))
            guess = float(table[drafts])
            moved = time * float(table[knot]) / guess
        if is_new:
            if knows:
                moved = min(moved, guess * (1 + _FIRST_OUTLIER))
            self._drafts.insert(index, knot)
            self._means.insert(index, moved)
            self._counts.insert(index, 1.0)
        else:
            self._means[index] = _moved(self._means[index], count, moved)
            self._counts[index] = count + 1
        if count < _TRUSTED and sum(self._counts) < _EARLY:
            self._fresh = 0
        return guess, count >= _TRUSTED

    def table(self, most: int) -> NDArray[np.float64]:
        """The curve at 0 .. most drafts, and perhaps more."""
        if self._fresh <= 0 or len(self._table) <= most:
            drafts, times = self._line()
            self._table = np.interp(np.arange(max(most + 1, len(self._table))), drafts, times)
            self._fresh = _TABLE_STEPS
        return self._table

    @property
    def drafter_share(self) -> float | None:
        """What steps without drafts say of the part that the drafter takes, once they do."""
        if not self._drafts or self._drafts[0] or min(self._num_plain, self._counts[0]) < _TRUSTED:
            return None
        return 1 - self._plain / self._means[0]

    def _line(self) -> tuple[list[float], list[float]]:
        """Knots and their times: from 0 drafts on, never falling, and on beyond the last."""
        drafts, means = list(self._drafts), list(self._means)
        weights = list(self._counts)
        if self._num_plain and (not drafts or drafts[0] > 0):
            drafts.insert(0, 0)
            means.insert(0, self._plain * (1 + _COLD_DRAFTING))
            weights.insert(0, float(min(self._num_plain, _LINE_WEIGHT)))
        elif not drafts:
            drafts, means, weights = [0], [self.guess], [1.0]
        at_0, slope = self._fit(drafts, means, weights)
        self.slope, self.start = slope, at_0
        places: list[float] = []
        times: list[float] = []
        lowest = at_0 if drafts[0] > 0 else 0.0
        if drafts[0] > 0:
            places.append(0)
            times.append(at_0)
        for place, mean, weight in zip(drafts, means, weights, strict=True):
            line = at_0 + slope * place
            lowest = max(lowest, line + (mean - line) * weight / (weight + _LINE_WEIGHT))
            places.append(place)
            times.append(lowest)
        places.append(places[-1] + _FAR)
        times.append(times[-1] + _FAR * slope)
        return places, times

    def _fit(
        self, drafts: list[int], means: list[float], weights: list[float]
    ) -> tuple[float, float]:
        """The line through the knots, with a prior slope as far as they do not say."""
        total = sum(weights)
        place = sum(w * x for w, x in zip(weights, drafts, strict=True)) / total
        mean = sum(w * y for w, y in zip(weights, means, strict=True)) / total
        spread = sum(w * (x - place) ** 2 for w, x in zip(weights, drafts, strict=True))
        slope = sum(
            w * (x - place) * (y - mean) for w, x, y in zip(weights, drafts, means, strict=True)
        )
        # Times with few drafts say nothing of the slope, however many there are.
        unit = self.batch**2 / 4
        self.evidence = spread / unit
        prior, weight = self.prior, _PRIOR_WEIGHT * unit
        if not prior:
            cold = _COLD_SHARE / max(self.batch, _COLD_REQUESTS)
            prior, weight = mean * cold / (1 + cold * place), unit
        slope = max(slope + weight * prior, 0.0) / (spread + weight)
        if slope * place > 0.9 * mean:  # steps without drafts take time
            slope = 0.9 * mean / place
        return mean - slope * place, slope


def _knot(drafts: int) -> int:
    """The knot that is nearest."""
    right = bisect_right(KNOTS, drafts)
    if right == len(KNOTS) or drafts - KNOTS[right - 1] <= KNOTS[right] - drafts:
        right -= 1
    return KNOTS[right]


def _moved(mean: float, count: float, time: float) -> float:
    """A robust average: the mean of the first times, then an EWMA that outliers hardly move."""
    if count == 0:
        return time
    if count < _KNOWN and time < mean:  # what was slow at first was slow for another reason
        return mean + _EARLY_WEIGHT * (time - mean)
    known = count >= _TRUSTED
    highest = mean * (1 + (_OUTLIER if known else _FIRST_OUTLIER))
    lowest = mean * (1 - _OUTLIER) if known else 0.0
    return mean + max(1 / (1 + count), _SLOW) * (min(max(time, lowest), highest) - mean)
