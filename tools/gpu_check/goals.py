# SPDX-License-Identifier: Apache-2.0
"""Performance goals for a GPU, and the figures that decide them."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Figures = Mapping[str, Mapping[str, Any]]  # rows of the results by id


def worst_high(values: Sequence[float]) -> float:
    """Return the worst of values that should be low."""
    return max(values)


def worst_low(values: Sequence[float]) -> float:
    """Return the worst of values that should be high."""
    return min(values)


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean of ratios."""
    return math.exp(sum(map(math.log, values)) / len(values))


@dataclass(frozen=True)
class Goal:
    """Goal for a group of figures.

    Attributes:
        id: G1 to G10.
        what: description.
        figures: pattern of the ids that decide it.
        number: field used of each figure: its `ratio`, or its time in `us`.
        combine: reduces the figures' numbers to one.
        is_at_most: whether low is good.
        bar: required value.
        stretch: more ambitious value.
        gpus: GPUs that the goal applies to, as parts of their names. A time in microseconds
            depends on the card's memory bandwidth, so its bar holds for one card only.
        but_gpus: GPUs that the goal does not apply to, if `gpus` is empty.
    """

    id: str
    what: str
    figures: str
    number: str
    combine: Callable[[Sequence[float]], float]
    is_at_most: bool
    bar: float
    stretch: float | None = None
    gpus: tuple[str, ...] = ()
    but_gpus: tuple[str, ...] = ()

    def is_for(self, gpu: str) -> bool:
        """Return whether the goal applies to a GPU."""
        if self.gpus:
            return any(name in gpu for name in self.gpus)
        return not any(name in gpu for name in self.but_gpus)

    @property
    def whose(self) -> str:
        """The GPUs that the goal applies to, in words."""
        if self.gpus:
            return f"for {' and '.join(self.gpus)}"
        return f"for others than {' and '.join(self.but_gpus)}" if self.but_gpus else "for all"

    def meets(self, value: float, bar: float) -> bool:
        """Return whether a number is at least as good as a bar."""
        return value <= bar if self.is_at_most else value >= bar

    @property
    def wanted(self) -> str:
        """The bar in words."""
        unit = " us" if self.number == "us" else ""
        text = f"{'at most' if self.is_at_most else 'at least'} {self.bar:g}{unit}"
        return text if self.stretch is None else f"{text} (better {self.stretch:g})"


BIG = "(b1.32k|b8.4k|b32.4k|b32.4k.page64|b8.32k)"  # loads with at least 128 MiB of keys and values
HOPPER = ("H100", "H200")

GOALS = (
    Goal(
        "G1",
        "append_attention bf16, 128 MiB of keys and values and more, 1 to 8 rows: share of read "
        "bandwidth, the lowest",
        rf"attention\.{BIG}\.g[48]\.q[1258]",
        "ratio",
        worst_low,
        False,
        0.85,
        gpus=HOPPER,
    ),
    Goal(
        "G2",
        "append_attention: time of 8 rows over that of 1, the highest",
        rf"attention\.{BIG}\.g[48]\.q8_over_q1",
        "ratio",
        worst_high,
        True,
        1.10,
        gpus=HOPPER,
    ),
    Goal(
        "G3",
        "append_attention, one request of 4,096 tokens, group 4: the longest time",
        r"attention\.b1\.4k\.g4\.q[1258]",
        "us",
        worst_high,
        True,
        10,
        gpus=("H200",),
    ),
    Goal(
        "G4",
        "append_attention beside FlashInfer's fastest path, uniform lengths: geometric mean",
        r"attention_peers\.b\d+\.\d+k\.g\d\.q\d",
        "ratio",
        geometric_mean,
        False,
        1.0,
        1.1,
    ),
    Goal(
        "G5",
        "declared prefixes beside FlashInfer's fastest cascade: geometric mean",
        r"cascade\..*\.peers",
        "ratio",
        geometric_mean,
        False,
        1.3,
        1.6,
    ),
    Goal(
        "G6",
        "greedy verify of 1,280 rows of 128,256 logits in bf16",
        r"sampling\.verify\.bf16\.b256\.greedy",
        "us",
        worst_high,
        True,
        90,
        gpus=("H200",),
    ),
    Goal(
        "G7",
        "rejection with top-p and one-hot drafts, of a model's own logits: time over greedy's",
        r"recorded\.verify\.bf16\.rejection",
        "ratio",
        worst_high,
        True,
        1.25,
    ),
    Goal(
        "G8",
        "price of exactness: time over the best split for each load, batch 8 and more, the highest",
        r"exactness\.b(8|32)\..*\.q[15]",
        "ratio",
        worst_high,
        True,
        1.05,
        1.03,
    ),
    Goal(
        "G9",
        "linear bf16 over the matrices of a layer, 1 to 16 rows: times faster than torch.mm, the "
        "lowest",
        r"linear\.layer\.m(1|2|4|5|8|16)\.vs_torch",
        "ratio",
        worst_low,
        False,
        1.0,
    ),
    Goal(
        "G10",
        "as G1, on other cards",
        rf"attention\.{BIG}\.g[48]\.q[1258]",
        "ratio",
        worst_low,
        False,
        0.70,
        but_gpus=HOPPER,
    ),
)


def bar_of(id: str, gpu: str) -> str | None:
    """Return the requirement of a goal, such as "ratio >= 1.2"; None if it has none for the GPU."""
    goal = next(goal for goal in GOALS if goal.id == id)
    if not goal.is_for(gpu):
        return None
    number = "value" if goal.number == "us" else "ratio"
    return f"{number} {'<=' if goal.is_at_most else '>='} {goal.bar:g}"


@dataclass(frozen=True)
class Verdict:
    """Verdict of a run on a goal.

    Attributes:
        goal: one of GOALS.
        value: number that combines all figures of the goal; None if there are none.
        reached: whether the value meets the bar; None if that is not decided.
        decisive: id of the worst figure.
        reason: why `reached` is None.
    """

    goal: Goal
    value: float | None
    reached: bool | None
    decisive: str = ""
    reason: str = ""


def verdict(goal: Goal, figures: Figures, notes: Mapping[str, str], gpu: str) -> Verdict:
    """Return whether the figures reach a goal; `notes` give the reasons for missing figures."""
    numbers = {
        id: float(row[goal.number])
        for id, row in figures.items()
        if re.fullmatch(goal.figures, id) and _counts(goal, row)
    }
    if not numbers:
        family = re.split(r"\\|\.", goal.figures)[0]
        because = sorted({note for id, note in notes.items() if id.split(".")[0] == family})
        return Verdict(goal, None, None, reason="; ".join(because[:3]) or "not measured")
    value = goal.combine(list(numbers.values()))
    furthest = (max if goal.is_at_most else min)(numbers, key=lambda id: numbers[id])
    if gpu in ("", "none"):
        return Verdict(goal, value, None, furthest, "no GPU: a rehearsal")
    if not goal.is_for(gpu):
        return Verdict(goal, value, None, furthest, f"a bar {goal.whose}")
    return Verdict(goal, value, goal.meets(value, goal.bar), furthest)


def _counts(goal: Goal, row: Mapping[str, Any]) -> bool:
    """Return whether a figure has the number, and a FlashInfer peer if the goal compares peers."""
    beside = "peers" not in goal.figures or str(row.get("peer") or "").startswith("FlashInfer")
    return row.get(goal.number) is not None and beside
