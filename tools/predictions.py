# SPDX-License-Identifier: Apache-2.0
"""docs/predictions.md as data: assumptions, the meter's caps, and the resulting predictions."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.cuda_toolkit import ROOT

DOCUMENT = ROOT / "docs" / "predictions.md"
CARDS, ASSUMED, CAPS, BYTES = "Cards", "Assumed", "Caps", "Caches of 8 bits"
PREDICTIONS = "Predictions"


@dataclass(frozen=True)
class Card:
    """Properties that distinguish one card from another.

    Attributes:
        name: part of the name that its driver reports.
        read_tb_s: memory read bandwidth.
        sms: multiprocessors.
        ghz: clock of the multiprocessors.
    """

    name: str
    read_tb_s: float
    sms: int
    ghz: float


@dataclass(frozen=True)
class Prediction:
    """One row of the table of predictions.

    Attributes:
        goal: G1 to G10 (tools/gpu_check/goals.py).
        figure: id of the figure that will decide.
        unit: predicted field of the figure: its time in `us`, or its `ratio`.
        values: predictions by card name; some cards have none.
    """

    goal: str
    figure: str
    unit: str
    values: Mapping[str, float]

    def value_on(self, gpu: str) -> float | None:
        """Return the prediction for a GPU, or None."""
        return next((value for card, value in self.values.items() if card in gpu), None)


def rows_of(text: str, title: str) -> list[list[str]]:
    """Return the cells of the table below a heading, without its head.

    Raises:
        ValueError: there is no such table.
    """
    section = re.search(rf"^## {title}$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    lines = [line for line in section[1].splitlines() if line.startswith("|")] if section else []
    if len(lines) < 3:
        raise ValueError(f"docs/predictions.md has no table below {title}")
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def with_rows(text: str, title: str, rows: Sequence[Sequence[str]]) -> str:
    """Return the text with the rows of the table below a heading replaced."""
    old = [line for line in _table_lines(text, title)]
    new = [*old[:2], *("| " + " | ".join(row) + " |" for row in rows)]
    return text.replace("\n".join(old), "\n".join(new))


def _table_lines(text: str, title: str) -> list[str]:
    start = text.index(f"## {title}\n")
    end = text.find("\n## ", start + 1)
    section = text[start : end if end > 0 else len(text)]
    return [line for line in section.splitlines() if line.startswith("|")]


def read_numbers(text: str, title: str) -> dict[str, float]:
    """Return the names (first cell) and numbers (second cell) of a table."""
    return {row[0]: float(row[1]) for row in rows_of(text, title)}


def read_cards(text: str) -> list[Card]:
    """Return the cards that predictions are for."""
    return [Card(row[0], float(row[1]), int(row[2]), float(row[3])) for row in rows_of(text, CARDS)]


def read_predictions(document: Path = DOCUMENT) -> list[Prediction]:
    """Return the predictions of the document."""
    text = document.read_text()
    cards = [card.name for card in read_cards(text)]
    said = []
    for goal, figure, unit, *cells in rows_of(text, PREDICTIONS):
        values = {card: float(cell) for card, cell in zip(cards, cells, strict=True) if cell}
        said.append(Prediction(goal, figure.strip("`"), unit, values))
    return said


def rows_for(predictions: Sequence[Prediction], cards: Sequence[Card]) -> list[list[str]]:
    """Return the rows of the table of predictions."""
    return [
        [
            *(said.goal, f"`{said.figure}`", said.unit),
            *(f"{said.values[c.name]:.3g}" if c.name in said.values else "" for c in cards),
        ]
        for said in predictions
    ]


def rows_for_numbers(numbers: Mapping[str, float]) -> list[list[str]]:
    """Return the rows of a table of names and numbers."""
    return [[name, f"{value:.3g}"] for name, value in numbers.items()]
