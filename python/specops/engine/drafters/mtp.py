# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction: the target's own drafting modules, fed with its hidden states."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specops import batching, sampling
from specops.batching import DraftIndices
from specops.engine.device import Device
from specops.engine.drafters.base import DraftBatch, Drafter, TargetRows
from specops.engine.models import KvCache, MtpBatch, MtpModules
from specops.engine.request import Request
from specops.sampling import Purpose

# Positions of a request whose states are kept, for modules that have been behind: as many as they
# catch up with, and as they begin anew with, what is before these on their page included.
WINDOW = 128
# That they may be behind and catch up with; and, where it is more, those that they begin anew with.
CATCH_UP, BEGIN_ANEW = 64, 32
LONG_REST = 64  # steps of a rest to come, with which no states are kept yet

_MAX_KEPT_VIEWS = 64  # of the index arrays, by their sizes


@dataclass(frozen=True)
class _Choices:
    """Per request of a step: what a draft is chosen from, and the choice."""

    states: Tensor  # [batch, hidden_size]
    logits: Tensor  # float32 [batch, draft vocabulary]
    sampled: Tensor  # int32 [batch]
    drawn: Tensor  # int32 [batch]; the same with numbers of its own
    token_ids: Tensor  # int32 [batch]; the same but for a reduced draft vocabulary
    positions: Tensor  # int32 [batch]; of the tokens, where the pass is of a second module or later
    anchors: Tensor  # int32 [batch]
    is_drawn: Tensor  # bool [batch]; with numbers of its own


class MtpDrafter:
    """Drafts with a checkpoint's MTP modules; docs/mtp.md states what meets what.

    In every step the modules run over the rows whose next token the step made known, in place of
    what they drafted there before, and then on into the drafts. A request whose drafter has a rest
    keeps the target's states of its last positions; they run again, in one go, when the rest ends.
    After a long one the modules begin anew with the last of them, and see nothing before.

    Args:
        modules: of the target.
        cache: their keys and values, on the target's pages.
        slots: requests that run at once.
        max_rows: rows of a step.
        device: where steps run.
        make_ngram_drafter: makes what continues the drafts of requests that want it.

    Attributes:
        num_modules: how many modules there are.
        max_redrafts: rows before the step's that may run again in one step, but for those that
            several modules always run again.
        max_rows: rows of the longest pass.
        draft_probs: [slots, k, vocab_size], float32. What the last step's drafts were drawn from,
            by request of that step; None until a request draws its drafts.
    """

    def __init__(
        self,
        modules: MtpModules,
        cache: KvCache,
        *,
        slots: int,
        max_rows: int,
        device: Device,
        make_ngram_drafter: Callable[[], Drafter],
    ) -> None:
        self.num_modules = modules.num_modules
        self.max_redrafts = max(max_rows, WINDOW)
        self.max_rows = max_rows + self.max_redrafts + slots * (modules.num_modules - 1)
        self.draft_probs: Tensor | None = None
        self._modules = modules
        self._cache = cache
        self._page_size = cache.k[0].shape[1]
        self._slots = slots
        self._device = device
        self._make_ngram_drafter = make_ngram_drafter
        self._ngram: Drafter | None = None
        self._num_steps = 0  # passes that any request has asked for
        modules.reserve(self.max_rows)
        where, width = device.device, modules.hidden_size
        vocab_size = modules.lm_head.num_outputs
        self._kept = torch.zeros((slots, WINDOW, width), dtype=modules.dtype, device=where)
        # The first pass of a step, and those behind it, which read one and write the other.
        sizes = (self.max_rows, slots, slots)
        self._indices = [DraftIndices.empty(slots, total_rows=n, device=where) for n in sizes]
        # Read between passes where the host may look: numpy is the quickest way to do it.
        self._row_ends = [] if device.is_async else [one.qo_indptr.numpy() for one in self._indices]
        self._same_rows = torch.arange(self.max_rows, dtype=torch.int32, device=where)
        self._module_kv_lens = torch.zeros(slots, dtype=torch.int32, device=where)
        self._given = torch.zeros(slots, dtype=torch.int32, device=where)
        ints = torch.zeros((5, slots), dtype=torch.int32, device=where)
        self._choices = _Choices(
            torch.empty((slots, width), dtype=modules.dtype, device=where),
            torch.empty((slots, vocab_size), dtype=torch.float32, device=where),
            ints[0],
            ints[1],
            ints[0] if modules.token_map is None else ints[2],
            ints[3],
            ints[4],
            torch.zeros(slots, dtype=torch.bool, device=where),
        )
        workspace = sampling.sampling_workspace(self._choices.logits)
        if workspace is None:  # given, so that no call has to find out
            workspace = torch.empty(0, dtype=torch.uint8, device=where)
        self._workspace = workspace
        self._index_views: dict[tuple[int, int, int], DraftIndices] = {}
        self._choice_views: dict[int, _Choices] = {}

    def sums_size(self, rows: int, batch: int) -> int:
        """Returns the floats that projections of `rows` rows split their sums with."""
        return self._modules.sums_size(rows, batch)

    def start(self, request: Request) -> bool:
        """Makes room for what the request asks of its drafts."""
        config = request.speculative
        has_moved = config.num_model_steps > self._num_steps
        self._num_steps = max(self._num_steps, config.num_model_steps)
        if config.mtp_strategy == "with_ngram":
            if self._ngram is None:
                self._ngram = self._make_ngram_drafter()
                has_moved = True
            self._ngram.start(request)
        probs = self.draft_probs
        have = 0 if probs is None else probs.shape[1]
        # Once they are there every pass writes them, whoever asked for it.
        if (config.draws_drafts or have) and have < self._num_steps:
            shape = (self._slots, self._num_steps, self._modules.lm_head.num_outputs)
            self.draft_probs = torch.zeros(shape, dtype=torch.float32, device=self._device.device)
            if probs is not None:  # those of drafts that the next step verifies
                self.draft_probs[:, : probs.shape[1]] = probs
            has_moved = True
        return has_moved

    def stop(self, request: Request) -> None:
        """Nothing to forget: the next request of the slot starts anew."""

    def propose(self, batch: DraftBatch) -> None:
        """Runs the modules behind the target's step and fills the drafts."""
        rows = batch.target
        assert rows is not None
        if rows.total_rows:  # else all have a rest
            self._draft(batch, rows)
            if self._ngram is not None:
                self._continue(batch, rows)
        # After the passes: these rows may take the place of some that ran again.
        batching.keep_hidden_rows(
            rows.hidden, rows.slots, rows.qo_indptr, rows.kv_lens, batch.lens, self._kept
        )

    def _draft(self, batch: DraftBatch, rows: TargetRows) -> None:
        modules, size = self._modules, rows.slots.shape[0]
        first = batching.prepare_draft_batch(
            rows.drafting_slots,
            rows.qo_indptr,
            rows.kv_lens,
            rows.redraft_lens,
            rows.kv_indptr,
            rows.kv_indices,
            batch.lens,
            batch.max_draft_tokens,
            page_size=self._page_size,
            total_rows=rows.total_rows,
            window=WINDOW,
            out=self._view(0, size, rows.total_rows),
        )
        indices = self._with_rows(0, first)
        if indices is None:
            return
        num_passes = min(self._num_steps, batch.draft_token_ids.shape[1])
        if rows.has_anchors is not None:
            anchors = self._choice_view(size).anchors
            torch.add(first.draft_positions, 1, out=anchors)
            anchors.mul_(rows.has_anchors)
        hidden, source_rows = rows.hidden, indices.source_rows
        for index in range(self.num_modules):
            passed = self._pass(batch, rows, indices, source_rows)
            output = modules.forward(index, passed, hidden, self._cache)
            if modules.convention.chained:
                hidden = output.recycled
                source_rows = self._same_rows[: source_rows.shape[0]]
            if index < num_passes:
                self._choose(batch, rows, indices, output.hidden, step=index, num_passes=num_passes)
        for step in range(self.num_modules, num_passes):
            indices = self._with_rows(1 + step % 2, self._view(1 + step % 2, size, size))
            if indices is None:
                return
            passed = self._pass(batch, rows, indices, indices.source_rows)
            module = self.num_modules - 1
            output = modules.forward(module, passed, output.recycled, self._cache)
            self._choose(batch, rows, indices, output.hidden, step=step, num_passes=num_passes)

    def _pass(
        self, batch: DraftBatch, rows: TargetRows, indices: DraftIndices, source_rows: Tensor
    ) -> MtpBatch:
        kv_lens = indices.kv_lens
        if rows.skipped is not None:
            kv_lens = self._module_kv_lens[: rows.skipped.shape[0]]
            torch.sub(indices.kv_lens, rows.skipped, out=kv_lens)
            kv_lens.clamp_(min=0)  # without rows
        return MtpBatch(
            positions=indices.positions,
            cache_slots=indices.cache_slots,
            qo_indptr=indices.qo_indptr,
            kv_indptr=rows.module_kv_indptr,
            kv_indices=rows.kv_indices,
            kv_lens=kv_lens,
            workspace=rows.workspace,
            sums=rows.sums,
            row_to_request=indices.row_to_request,
            source_rows=source_rows,
            slots=rows.drafting_slots,
            token_ids=batch.token_ids,
            lens=batch.lens,
            draft_token_ids=batch.draft_token_ids,
            kept=self._kept,
        )

    def _choose(
        self,
        batch: DraftBatch,
        rows: TargetRows,
        indices: DraftIndices,
        hidden: Tensor,
        *,
        step: int,
        num_passes: int,
    ) -> None:
        """Chooses draft `step` of every request, and makes the rows of the pass behind it."""
        modules, size = self._modules, rows.slots.shape[0]
        choices = self._choice_view(size)
        batching.gather_output_rows(hidden, indices.last_rows, out=choices.states)
        modules.logits(choices.states, out=choices.logits, sums=rows.sums)
        positions = indices.draft_positions
        if 0 < step < self.num_modules and rows.choosing is not None:
            # The rows are the first module's, and the token is one further on for each module.
            positions = torch.add(positions, step, out=choices.positions)
        chosen_from = choices.logits, positions
        choosing: dict[str, Any] = {**(rows.choosing or {}), "workspace": self._workspace}
        sampling.sample(*chosen_from, **choosing, out=choices.sampled)
        if rows.has_own_numbers is not None:
            assert self.draft_probs is not None
            sampling.sample(
                *chosen_from,
                **choosing,
                anchors=choices.anchors,
                purpose=Purpose.DRAFT,
                probs=self.draft_probs[:size, step],
                out=choices.drawn,
            )
            torch.ne(rows.has_own_numbers, 0, out=choices.is_drawn)
            torch.where(choices.is_drawn, choices.drawn, choices.sampled, out=choices.sampled)
        if modules.token_map is not None:
            torch.index_select(modules.token_map, 0, choices.sampled, out=choices.token_ids)
        follows = self.num_modules <= step + 1 < num_passes
        batching.advance_draft_batch(
            choices.token_ids,
            indices.last_rows,
            rows.drafting_slots,
            rows.kv_indptr,
            rows.kv_indices,
            batch.lens,
            batch.max_draft_tokens,
            page_size=self._page_size,
            step=step,
            ahead=self.num_modules,
            draft_token_ids=batch.draft_token_ids,
            num_draft_tokens=self._counts(batch),
            out=self._view(1 + (step + 1) % 2, size, size) if follows else None,
        )

    def _counts(self, batch: DraftBatch) -> Tensor:
        """Where the numbers of the modules' drafts go."""
        return batch.num_draft_tokens if self._ngram is None else self._given

    def _continue(self, batch: DraftBatch, rows: TargetRows) -> None:
        """Has n-grams of the text and the drafts draft on, where that is asked for."""
        assert self._ngram is not None
        self._ngram.propose(
            DraftBatch(
                token_ids=batch.token_ids,
                lens=batch.lens,
                max_draft_tokens=rows.max_continued_drafts,
                draft_token_ids=batch.draft_token_ids,
                num_draft_tokens=batch.num_draft_tokens,
                num_given_drafts=self._given,
            )
        )

    def _with_rows(self, which: int, indices: DraftIndices) -> DraftIndices | None:
        """The rows there are, where the host may look; None: there are none."""
        if not self._row_ends:
            return indices
        size = indices.kv_lens.shape[0]
        rows = int(self._row_ends[which][size])
        return self._view(which, size, rows) if rows else None

    def _view(self, which: int, size: int, rows: int) -> DraftIndices:
        """The first requests and rows of the index arrays."""
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

    def _choice_view(self, size: int) -> _Choices:
        view = self._choice_views.get(size)
        if view is None:
            whole = self._choices
            view = self._choice_views[size] = _Choices(
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
