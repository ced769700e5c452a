# SPDX-License-Identifier: Apache-2.0
"""Lookup of the token before a given draft, for each request of a step."""

import torch
from torch import Tensor

from specops import batching
from specops.engine.drafters.head import DraftRows


class NewestTokens:
    """Gatherer of each request's newest token, or of one of its drafts.

    Args:
        slots: number of request slots.
        device: device that runs the steps.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        self._places = torch.empty((3, slots), dtype=torch.int32, device=device)
        self._same = torch.arange(slots, dtype=torch.int32, device=device)

    def before(self, index: int, rows: DraftRows) -> Tensor:
        """Return the token before draft `index` of each request, int32 [batch]; 0 if absent."""
        slot, position, out = self._places[:, : rows.slots.shape[0]]
        torch.clamp(rows.slots, min=0, out=slot)
        torch.index_select(rows.lens, 0, slot, out=position)
        position.add_(index - 1)
        is_absent = rows.slots < 0
        if index:
            # Requests without the preceding draft have no token to gather.
            draft = rows.draft_token_ids.index_select(0, slot)[:, index - 1]
            is_absent = is_absent | (draft < 0)
        slot.masked_fill_(is_absent, -1)
        return batching.gather_input_ids(
            slot,
            position,
            self._same[: rows.lens.shape[0]],
            rows.token_ids,
            rows.lens,
            rows.draft_token_ids,
            out=out,
        )
