# SPDX-License-Identifier: Apache-2.0
"""docs/predictions.md as data: what is assumed, what the meter allows, and what follows."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.cuda_toolkit import ROOT

DOCUMENT = ROOT / "docs" / "predictions.md"
ASSUMED, CAPS, PREDICTIONS = "Assumed", "Caps", "Predictions"


@dataclass(frozen=True)
class Prediction:
    """One row.

    Attributes:
        goal: G1 to G8 (tools/gpu_check/goals.py).
        figure: id of the figure that will say.
        unit: what is predicted of it: its time in `us`, or its `ratio`.
        value: predicted.
    """

    goal: str
    figure: str
    unit: str
    value: float


def rows_of(text: str, title: str) -> list[list[str]]:
    """The cells of the table below a heading, without its head.

    Raises:
        ValueError: there is no such table.
    """
    section = re.search(rf"^## {title}$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    lines = [line for line in section[1].splitlines() if line.startswith("|")] if section else []
    if len(lines) < 3:
        raise ValueError(f"docs/predictions.md has no table below {title}")
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def with_rows(text: str, title: str, rows: Sequence[Sequence[str]]) -> str:
    """The text with other rows in the table below a heading."""
    old = [line for line in _table_lines(text, title)]
    new = [*old[:2], *("| " + " | ".join(row) + " |" for row in rows)]
    return text.replace("\n".join(old), "\n".join(new))


def _table_lines(text: str, title: str) -> list[str]:
    start = text.index(f"## {title}\n")
    end = text.find("\n## ", start + 1)
    section = text[start : end if end > 0 else len(text)]
    return [line for line in section.splitlines() if line.startswith("|")]


def read_numbers(text: str, title: str) -> dict[str, float]:
    """Names (in the first cell) and numbers (in the second) of a table."""
    return {row[0]: float(row[1]) for row in rows_of(text, title)}


def read_predictions(document: Path = DOCUMENT) -> list[Prediction]:
    """The predictions as they are written down."""
    rows = rows_of(document.read_text(), PREDICTIONS)
    return [
        Prediction(goal, figure.strip("`"), unit, float(value))
        for goal, figure, unit, value in rows
    ]


def rows_for(predictions: Sequence[Prediction]) -> list[list[str]]:
    """The table of predictions."""
    return [[p.goal, f"`{p.figure}`", p.unit, f"{p.value:.3g}"] for p in predictions]


def rows_for_numbers(numbers: Mapping[str, float]) -> list[list[str]]:
    """A table of names and numbers."""
    return [[name, f"{value:.3g}"] for name, value in numbers.items()]
