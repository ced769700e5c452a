# SPDX-License-Identifier: Apache-2.0
"""Device arrays that all steps of a recurrent drafter share, and views of them by size."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specops import sampling
from specops.batching import DraftIndices
from specops.engine.device import Device
from specops.engine.drafters.head import DraftHead

_MAX_KEPT_VIEWS = 64  # views of the index arrays


@dataclass(frozen=True)
class Choices:
    """Per-request arrays for choosing one draft token per request."""

    states: Tensor  # [batch, hidden_size]
    logits: Tensor  # float32 [batch, draft vocabulary]
    sampled: Tensor  # int32 [batch]; chosen with the target's random numbers, or greedily
    drawn: Tensor  # int32 [batch]; drawn with the drafter's own random numbers
    token_ids: Tensor  # int32 [batch]; `sampled`, mapped if the draft vocabulary is reduced
    positions: Tensor  # int32 [batch]; positions of the tokens, unused in the first pass
    anchors: Tensor  # int32 [batch]; as in `sampling.sample`
    is_drawn: Tensor  # bool [batch]; whether the draft is `drawn` instead of `sampled`


class DraftArrays:
    """Index arrays of the passes of a step, and arrays for choosing drafts.

    Args:
        head: the model that drafts.
        slots: number of request slots.
        max_rows: rows of the longest pass.
        device: device that runs the steps.

    Attributes:
        same_rows: int32 [max_rows], the identity mapping 0, 1, 2, ...
        kv_lens: int32 [slots], KV lengths for a head that skips leading pages.
        no_pages: int32 [slots], zeros: a page for each request of a head without pages.
        lens: int32 [slots], text lengths for a head whose rows read the token at their position.
        choices: arrays for choosing drafts, sized for all slots.
        workspace: workspace of the sampling ops.
    """

    def __init__(self, head: DraftHead, slots: int, max_rows: int, device: Device) -> None:
        where, width, is_reduced = device.device, head.hidden_size, head.token_map is not None
        # One set for the first pass of a step, and two that later passes read and write in turn.
        sizes = (max_rows, slots, slots)
        self._indices = [DraftIndices.empty(slots, total_rows=n, device=where) for n in sizes]
        # On the CPU, the host reads these arrays between passes; numpy is the fastest way to do so.
        self._row_ends = [] if device.is_async else [one.qo_indptr.numpy() for one in self._indices]
        self.same_rows = torch.arange(max_rows, dtype=torch.int32, device=where)
        self.kv_lens, self.lens, self.no_pages = torch.zeros(
            (3, slots), dtype=torch.int32, device=where
        ).unbind()
        ints = torch.zeros((5, slots), dtype=torch.int32, device=where)
        self.choices = Choices(
            torch.empty((slots, width), dtype=head.dtype, device=where),
            torch.empty((slots, head.vocab_size), dtype=torch.float32, device=where),
            ints[0],
            ints[1],
            ints[2] if is_reduced else ints[0],
            ints[3],
            ints[4],
            torch.zeros(slots, dtype=torch.bool, device=where),
        )
        workspace = sampling.sampling_workspace(self.choices.logits)
        if workspace is None:  # with None, each call would determine the size again
            workspace = torch.empty(0, dtype=torch.uint8, device=where)
        self.workspace = workspace
        self._index_views: dict[tuple[int, int, int], DraftIndices] = {}
        self._choice_views: dict[int, Choices] = {}

    def with_rows(self, which: int, indices: DraftIndices) -> DraftIndices | None:
        """Return `indices` without padding rows; None if none is left. A GPU keeps the padding."""
        if not self._row_ends:
            return indices
        size = indices.kv_lens.shape[0]
        rows = int(self._row_ends[which][size])
        return self.index_view(which, size, rows) if rows else None

    def index_view(self, which: int, size: int, rows: int) -> DraftIndices:
        """Return a view of index arrays `which`: the first `size` requests and `rows` rows."""
        view = self._index_views.get((which, size, rows))
        if view is None:
            if len(self._index_views) >= _MAX_KEPT_VIEWS:
                self._index_views.clear()
            whole = self._indices[which]
            view = self._index_views[which, size, rows] = DraftIndices(
                qo_indptr=whole.qo_indptr[: size + 1],
                kv_lens=whole.kv_lens[:size],
                last_rows=whole.last_rows[:size],
                draft_positions=whole.draft_positions[:size],
                row_to_request=whole.row_to_request[:rows],
                positions=whole.positions[:rows],
                cache_slots=whole.cache_slots[:rows],
                source_rows=whole.source_rows[:rows],
            )
        return view

    def choice_view(self, size: int) -> Choices:
        """Return a view of the choice arrays for the first `size` requests."""
        view = self._choice_views.get(size)
        if view is None:
            whole = self.choices
            view = self._choice_views[size] = Choices(
                whole.states[:size],
                whole.logits[:size],
                whole.sampled[:size],
                whole.drawn[:size],
                whole.token_ids[:size],
                whole.positions[:size],
                whole.anchors[:size],
                whole.is_drawn[:size],
            )
        return view
