# SPDX-License-Identifier: Apache-2.0
"""How many times as fast one way of decoding is as another, from runs that took turns."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles


@dataclass(frozen=True)
class SpeedUp:
    """A speed-up and its spread.

    A step with drafts takes at least as long as one without, so nothing is faster by more than its
    tokens per step. Where clocks say more, they were disturbed: the figures stop at that limit.

    Attributes:
        factor: the median over the pairs.
        low: a quarter of the pairs are below.
        high: a quarter of the pairs are above.
        num_pairs: of runs.
        is_capped: whether the median was above the limit.
    """

    factor: float
    low: float
    high: float
    num_pairs: int
    is_capped: bool

    def __str__(self) -> str:
        most = "at most " if self.is_capped else ""
        spread = "one pair of runs"
        if self.num_pairs > 1:
            spread = f"{self.low:.2f} to {self.high:.2f} in half of {self.num_pairs} pairs"
        noise = "; the timing was disturbed" if self.is_capped else ""
        return f"{most}{self.factor:.2f} times as fast as plain ({spread}{noise})"


def speed_up(pairs: Sequence[tuple[float, float]], tokens_per_step: float) -> SpeedUp:
    """Compares the speeds of runs that took turns.

    Args:
        pairs: at least one, each tokens a second of plain decoding and with drafts.
        tokens_per_step: of the runs with drafts; no figure is above it.
    """
    factors = [drafted / plain for plain, drafted in pairs]
    middle = median(factors)
    low, high = middle, middle
    if len(factors) > 1:
        low, _, high = quantiles(factors, n=4, method="inclusive")
    return SpeedUp(
        factor=min(middle, tokens_per_step),
        low=min(low, tokens_per_step),
        high=min(high, tokens_per_step),
        num_pairs=len(factors),
        is_capped=middle > tokens_per_step,
    )
