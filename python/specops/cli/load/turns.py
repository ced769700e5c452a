# SPDX-License-Identifier: Apache-2.0
"""Two servers measured in turn: medians, and the ratios of runs next to each other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

# By title: where a run has the figure. Of latencies, the median over its requests.
FIGURES = {
    "output tokens/s": ("output_tokens_per_s",),
    "requests/s": ("requests_per_s",),
    "first token, ms": ("first_token_ms", "p50"),
    "per output token, ms": ("per_output_token_ms", "p50"),
    "whole, ms": ("whole_ms", "p50"),
}


@dataclass(frozen=True)
class Spread:
    """The median of some values, and the quarters of them that are below `low` and above `high`."""

    middle: float
    low: float
    high: float


@dataclass(frozen=True)
class Row:
    """A figure of two servers.

    Attributes:
        title: of FIGURES.
        of_each: over the rounds, of one server and the other.
        ratio: of the first to the second, of the two runs of a round: a machine's speed varies over
            time, and less within a round.
    """

    title: str
    of_each: tuple[Spread, Spread]
    ratio: Spread


def spread_of(values: Sequence[float]) -> Spread:
    """The spread of at least one value; of a single one, it is that value."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, _, high = quantiles(values, n=4, method="inclusive")
    return Spread(median(values), low, high)


def compare(rounds: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> list[Row]:
    """Compares the figures of rounds; one that a run lacks, or that is 0, is left out."""
    rows = []
    for title, path in FIGURES.items():
        pairs = [(_figure(first, path), _figure(second, path)) for first, second in rounds]
        known = [(a, b) for a, b in pairs if a and b]
        if len(known) == len(pairs):
            firsts, seconds = zip(*known, strict=True)
            ratios = [a / b for a, b in known]
            of_each = spread_of(firsts), spread_of(seconds)
            rows.append(Row(title, of_each, spread_of(ratios)))
    return rows


def _figure(run: Mapping[str, Any], path: Sequence[str]) -> float | None:
    value: Any = run
    for name in path:
        value = None if value is None else value[name]
    return None if value is None else float(value)
