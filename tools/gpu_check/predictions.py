# SPDX-License-Identifier: Apache-2.0
"""The predictions of predictions.md, which `make gpu-check` reports beside its results."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

DOCUMENT = Path(__file__).with_suffix(".md")


@dataclass(frozen=True)
class Prediction:
    """One row of the table of predictions.

    Attributes:
        goal: G1 to G10 (tools/gpu_check/goals.py).
        figure: id of the predicted figure.
        unit: `us` for its time, or `ratio`.
        values: predicted value by the name of the card.
    """

    goal: str
    figure: str
    unit: str
    values: Mapping[str, float]

    def value_on(self, gpu: str) -> float | None:
        """Return the value predicted for a GPU, or None if there is none."""
        return next((value for card, value in self.values.items() if card in gpu), None)


def read_predictions(document: Path = DOCUMENT) -> list[Prediction]:
    """Return the predictions of the document.

    Raises:
        ValueError: the document has no table below the heading "Predictions".
    """
    section = re.search(r"^## Predictions$(.*?)(?=^## |\Z)", document.read_text(), re.M | re.S)
    lines = [line for line in section[1].splitlines() if line.startswith("|")] if section else []
    if len(lines) < 3:
        raise ValueError(f"{document.name} has no table below Predictions")
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return [
        Prediction(
            row[0],
            row[1].strip("`"),
            row[2],
            {card: float(cell) for card, cell in zip(head[3:], row[3:], strict=True) if cell},
        )
        for row in rows
    ]
