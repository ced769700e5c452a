# SPDX-License-Identifier: Apache-2.0
"""Distributions that drafts were drawn from: one table for all drafters, as `verify` reads it."""

from collections.abc import Mapping

import torch
from torch import Tensor

from specops.engine.drafters.base import DrawnFrom
from specops.sampling import DraftProbs


class DraftProbTable:
    """A table of draft distributions with one row per slot for each drafter that draws.

    If any drafter has a reduced vocabulary, the table also lists the token id of every entry. This
    depends on the loaded drafters and not on a step, so a request's bits do not depend on its
    batch.

    Args:
        owners: vocabularies of the drafters that draw, by drafter name.
        slots: requests that run at once.
        device: where steps run.

    Attributes:
        probs: [rows, drafts, entries], float32; None: no request has needed it yet.
        token_ids: int32, the same shape, -1 padded; None: entry i is token i.
    """

    def __init__(self, owners: Mapping[str, DrawnFrom], slots: int, device: torch.device) -> None:
        self._owners, self._slots, self._device = dict(owners), slots, device
        self._first_row = {name: slots * place for place, name in enumerate(owners)}
        self._is_listed = any(one.token_map is not None for one in owners.values())
        self.probs: Tensor | None = None
        self.token_ids: Tensor | None = None

    def reserve(self, drafts: int) -> bool:
        """Allocate columns for `drafts` drafts per request; return whether the table has moved."""
        old = self.probs
        if old is not None and old.shape[1] >= drafts:
            return False
        rows = self._slots * len(self._owners)
        shape = (rows, drafts, max(one.size for one in self._owners.values()))
        self.probs = torch.zeros(shape, dtype=torch.float32, device=self._device)
        if old is not None:  # still needed for drafts that the next step verifies
            self.probs[:, : old.shape[1]] = old
        if self._is_listed:
            self.token_ids = torch.full(shape, -1, dtype=torch.int32, device=self._device)
            for name, one in self._owners.items():
                tokens = one.token_map
                if tokens is None:
                    tokens = torch.arange(one.size, dtype=torch.int32, device=self._device)
                self.token_ids[self._rows_of(name), :, : one.size] = tokens
        return True

    def views(self) -> dict[str, Tensor]:
        """Return each drafter's part of the table, [slots, drafts, vocabulary]; empty if unused."""
        if self.probs is None:
            return {}
        return {
            name: self.probs[self._rows_of(name), :, : one.size]
            for name, one in self._owners.items()
        }

    def of_step(self, width: int, rows: Tensor) -> DraftProbs:
        """Return the table for steps with `width` drafts, with the row of each request."""
        assert self.probs is not None
        listed = None if self.token_ids is None else self.token_ids[:, :width]
        return DraftProbs(self.probs[:, :width], listed, rows)

    def row(self, name: str, place: int) -> int:
        """Return the table row that a drafter wrote for request `place` of the step."""
        return self._first_row[name] + place

    def _rows_of(self, name: str) -> slice:
        return slice(self._first_row[name], self._first_row[name] + self._slots)
