# SPDX-License-Identifier: Apache-2.0
"""How many times as fast one way of decoding is as another, from runs that took turns."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low, quantiles

_FOR_QUARTERS = 4  # pairs


@dataclass(frozen=True)
class SpeedUp:
    """A speed-up and its spread.

    A step with drafts takes at least as long as one without, so nothing is faster by more than its
    tokens per step. A higher measured value is a disturbance, so the figures stop there.

    Attributes:
        factor: the median over the pairs, of two middle ones the lower.
        plain_tokens_per_s: of the pair that has it.
        tokens_per_s: with drafts, of that pair.
        low: a quarter of the pairs are below; of fewer than four, none is.
        high: a quarter of the pairs are above; of fewer than four, none is.
        num_pairs: of runs.
        is_capped: whether the median was above the limit.
    """

    factor: float
    plain_tokens_per_s: float
    tokens_per_s: float
    low: float
    high: float
    num_pairs: int
    is_capped: bool

    def __str__(self) -> str:
        most = "at most " if self.is_capped else ""
        spread = "one pair of runs"
        if self.num_pairs > 1:
            half = "half of " if self.num_pairs >= _FOR_QUARTERS else ""
            spread = f"{self.low:.2f} to {self.high:.2f} in {half}{self.num_pairs} pairs"
        noise = "; the timing was disturbed" if self.is_capped else ""
        return f"{most}{self.factor:.2f} times as fast as plain ({spread}{noise})"


def speed_up(pairs: Sequence[tuple[float, float]], tokens_per_step: float) -> SpeedUp:
    """Compares the speeds of runs that took turns.

    Args:
        pairs: at least one, each tokens a second of plain decoding and with drafts.
        tokens_per_step: of the runs with drafts; no figure is above it.
    """
    # Both speeds are of one pair of runs, because a machine's speed varies over time.
    factors = sorted((drafted / plain, plain, drafted) for plain, drafted in pairs)
    middle, plain, drafted = median_low(factors)
    low, high = factors[0][0], factors[-1][0]
    if len(factors) >= _FOR_QUARTERS:
        low, _, high = quantiles([factor for factor, *_ in factors], n=4, method="inclusive")
    return SpeedUp(
        factor=min(middle, tokens_per_step),
        plain_tokens_per_s=plain,
        tokens_per_s=drafted,
        low=min(low, tokens_per_step),
        high=min(high, tokens_per_step),
        num_pairs=len(factors),
        is_capped=middle > tokens_per_step,
    )
