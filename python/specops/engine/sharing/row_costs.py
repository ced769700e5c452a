# SPDX-License-Identifier: Apache-2.0
"""Costs of a step's rows, used to share the time of steps among clients."""

from dataclasses import dataclass

from specops.engine.request import Request


@dataclass(frozen=True, slots=True)
class RowCosts:
    """Time of a step without rows, and time that each row adds. Only the ratios matter.

    Attributes:
        step: time of a step without rows.
        row: time that a row adds, of a prompt or of a decoding request.
        scored_row: additional time of a prompt row with log-probabilities, with as many
            alternatives as a request may have.
    """

    step: float
    row: float = 1.0
    scored_row: float = 0.0

    def of_step(self, rows: int) -> float:
        """Return the time of a step with `rows` decode rows."""
        return self.step + rows * self.row

    def of_prompt_row(self, request: Request) -> float:
        """Return the time that each of a prompt's next rows adds."""
        requested = request.prompt_logprobs
        is_scored = requested is not None and bool(requested.num_missing)
        return self.row + (self.scored_row if is_scored else 0.0)
