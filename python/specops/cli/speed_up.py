# SPDX-License-Identifier: Apache-2.0
"""Speed-up of decoding with drafts over plain decoding, from alternating runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low, quantiles

_FOR_QUARTERS = 4  # minimum number of pairs for quartiles


@dataclass(frozen=True)
class SpeedUp:
    """A speed-up and its spread.

    A step with drafts takes at least as long as a step without, so the speed-up cannot exceed the
    tokens per step. A higher measured value comes from disturbances, so values are capped there.

    Attributes:
        factor: median over the pairs; for an even number, the lower of the two middle values.
        plain_tokens_per_s: speed of plain decoding in the median pair.
        tokens_per_s: speed with drafts in the median pair.
        low: lower quartile; with fewer than four pairs, the minimum.
        high: upper quartile; with fewer than four pairs, the maximum.
        num_pairs: number of pairs of runs.
        is_capped: whether the median was above the cap.
    """

    factor: float
    plain_tokens_per_s: float
    tokens_per_s: float
    low: float
    high: float
    num_pairs: int
    is_capped: bool

    def __str__(self) -> str:
        bound = "at most " if self.is_capped else ""
        spread = "one pair of runs"
        if self.num_pairs > 1:
            half = "half of " if self.num_pairs >= _FOR_QUARTERS else ""
            spread = f"{self.low:.2f} to {self.high:.2f} in {half}{self.num_pairs} pairs"
        noise = "; the timing was disturbed" if self.is_capped else ""
        return f"{bound}{self.factor:.2f} times as fast as plain ({spread}{noise})"


def speed_up(pairs: Sequence[tuple[float, float]], tokens_per_step: float) -> SpeedUp:
    """Return the speed-up from pairs of alternating runs.

    Args:
        pairs: at least one pair of tokens per second, (plain, with drafts).
        tokens_per_step: mean tokens per step with drafts, the upper bound of the speed-up.
    """
    # Take ratios within a pair, because a machine's speed varies over time.
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
