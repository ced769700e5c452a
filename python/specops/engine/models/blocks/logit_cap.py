# SPDX-License-Identifier: Apache-2.0
"""Soft cap on logits."""

import torch
from torch import Tensor

from specops import dense

_ROWS = 8  # rows that are capped at once


class LogitCap:
    """Replaces logits x by cap * tanh(x / cap).

    It is computed as 2 * cap * sigmoid(2 * x / cap) - cap with an op whose rows do not depend on
    one another. The bits of torch's tanh may depend on the position of an element in its tensor.

    Args:
        cap: the cap.
        device: device of the logits.
    """

    def __init__(self, cap: float, device: torch.device) -> None:
        self._cap = cap
        self._twice = torch.empty(_ROWS, 1, 0, device=device)
        self._scaled = self._twice

    def apply(self, logits: Tensor) -> None:
        """Cap float32 logits [rows, vocabulary] in place."""
        if logits.shape[1] != self._twice.shape[2]:
            self._twice = self._twice.new_full((_ROWS, 1, logits.shape[1]), 2 * self._cap)
            self._scaled = torch.empty_like(self._twice)
        for rows in torch.split(logits, _ROWS):
            gate, out = rows.mul_(2 / self._cap)[:, None], self._scaled[: len(rows)]
            dense.output_gate(self._twice[: len(rows)], gate, out=out)
            torch.sub(out[:, 0], self._cap, out=rows)
