# SPDX-License-Identifier: Apache-2.0
"""Table of the distributions that drafts were drawn from, in the layout that `verify` reads."""

from collections.abc import Mapping

import torch
from torch import Tensor

from specops.engine.drafters.base import DrawnFrom
from specops.sampling import DraftProbs


class DraftProbTable:
    """Table of draft distributions with one row per slot for each drafter that samples its drafts.

    If any drafter has a reduced vocabulary, the table also lists the token id of every entry, in
    every step: results must not depend on the batch.

    Args:
        owners: draft vocabulary of each drafter that samples, by drafter name.
        slots: number of request slots.
        device: device that runs the steps.

    Attributes:
        probs: [rows, drafts, entries], float32; None: no request has needed it yet.
        token_ids: token id of each entry, int32, the same shape, padded with -1; None: entry i is
            token i.
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
        if old is not None:  # the next step still verifies with these
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
        """Return each drafter's part of the table, [slots, drafts, vocabulary]; {} if unused."""
        if self.probs is None:
            return {}
        return {
            name: self.probs[self._rows_of(name), :, : one.size]
            for name, one in self._owners.items()
        }

    def of_step(self, width: int, rows: Tensor) -> DraftProbs:
        """Return the argument of `verify` for `width` drafts; `rows` has each request's row."""
        assert self.probs is not None
        listed = None if self.token_ids is None else self.token_ids[:, :width]
        return DraftProbs(self.probs[:, :width], listed, rows)

    def row(self, name: str, place: int) -> int:
        """Return the table row that a drafter wrote for the step's request with index `place`."""
        return self._first_row[name] + place

    def _rows_of(self, name: str) -> slice:
        return slice(self._first_row[name], self._first_row[name] + self._slots)
