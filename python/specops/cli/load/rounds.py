# SPDX-License-Identifier: Apache-2.0
"""Comparison of two servers measured in turn: medians, and ratios of adjacent runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

# Title -> path of a value in a run's figures. Latencies are medians over the run's requests.
FIGURES = {
    "output tokens/s": ("output_tokens_per_s",),
    "requests/s": ("requests_per_s",),
    "first token, ms": ("first_token_ms", "p50"),
    "per output token, ms": ("per_output_token_ms", "p50"),
    "whole, ms": ("whole_ms", "p50"),
}


@dataclass(frozen=True)
class Spread:
    """Median (`middle`) and the lower (`low`) and upper (`high`) quartile of some values."""

    middle: float
    low: float
    high: float


@dataclass(frozen=True)
class Row:
    """One measured quantity, compared between two servers.

    Attributes:
        title: a key of FIGURES.
        of_each: spread over the rounds, for the first and the second server.
        ratio: spread of the ratio first / second. Ratios are taken within a round, because a
            machine's speed varies less within a round than over time.
    """

    title: str
    of_each: tuple[Spread, Spread]
    ratio: Spread


def spread_of(values: Sequence[float]) -> Spread:
    """Return the spread of at least one value; a single value is its own spread."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, _, high = quantiles(values, n=4, method="inclusive")
    return Spread(median(values), low, high)


def compare(rounds: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> list[Row]:
    """Return a row per figure; skip a figure that is missing or 0 in any run."""
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
