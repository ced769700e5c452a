# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup: what followed where a request's last tokens stood before in its own text."""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from specops.engine.drafters.base import (
    Drafter,
    DrafterContext,
    DrafterStep,
    Proposals,
    TargetStep,
    stage_limit,
)
from specops.engine.plan import Scheduled
from specops.engine.request import Request
from specops.engine.step_memory import Array, Layout
from specops.engine.step_shape import StepShape
from specops.ngram import NgramIndex, ngram_propose

_MAX_SIZES = 16  # of n-grams that most requests look for; others share the room for so many


def load(context: DrafterContext) -> Drafter:
    """Every model can draft so."""
    return NgramDrafter(context)


class NgramDrafter(Drafter):
    """Drafts with `specops.ngram.ngram_propose`, all requests of a step in one call.

    Each slot's tokens are indexed as they come, so a step costs the same at any length. A request
    that comes back after a preemption is indexed anew, a piece a step. The index is there once a
    request drafts so.
    """

    name = "ngram"

    def __init__(self, context: DrafterContext) -> None:
        config = context.config
        self._speculative = config.speculative_config
        self._slots, self._max_len = config.max_num_seqs, context.target.max_model_len
        self._device = context.target.device
        self._index: NgramIndex | None = None
        self.limits: list[tuple[int, int]] = []  # of the step: slots, and the drafts behind them
        self._choices: Tensor
        self._rows: tuple[Tensor, ...]

    def start(self, request: Request) -> bool:
        """Notes the request's n-gram sizes and its side; what was in the slot is forgotten."""
        has_moved = self._index is None
        if self._index is None:
            shared = self._speculative
            num_sizes = min(shared.max_ngram_size - shared.min_ngram_size + 1, _MAX_SIZES)
            self._index = NgramIndex.empty(
                self._slots, self._max_len, num_sizes=num_sizes, device=self._device
            )
            self._choices = torch.ones((3, self._slots), dtype=torch.int32, device=self._device)
            self._rows = tuple(self._choices)  # shortest, longest, and whether the leftmost wins
        config = request.speculative
        choices = [config.min_ngram_size, config.max_ngram_size, config.ngram_match == "leftmost"]
        self._choices[:, request.slot] = torch.tensor(choices, dtype=torch.int32)
        self._index.reset(request.slot)
        return has_moved

    def plan(self, parts: Sequence[Scheduled], shape: StepShape) -> Hashable | None:
        """Whether anybody wants drafts."""
        if self._index is None:
            return None
        limits = [(part.request.slot, stage_limit(part, self.name)) for part in parts]
        self.limits = [pair for pair in limits if pair[1]]
        return True if self.limits else None

    def new_step(
        self, key: Hashable, shape: StepShape, inputs: Layout, results: Layout
    ) -> DrafterStep:
        """Makes its part of the steps of one shape."""
        return _NgramStep(self, inputs.int32(self._slots), results.int32(self._slots))

    def propose(self, target: TargetStep, max_draft_tokens: Tensor, match_lens: Tensor) -> None:
        """Continues the proposals of every request in one call."""
        ngram_propose(
            target.token_ids,
            target.lens,
            max_draft_tokens,
            min_ngram_size=self._rows[0],
            max_ngram_size=self._rows[1],
            leftmost=self._rows[2],
            draft_token_ids=target.draft_token_ids,
            num_draft_tokens=target.num_draft_tokens,
            num_given_drafts=target.num_draft_tokens,
            match_lens=match_lens,
            max_total_draft_tokens=self._speculative.max_total_draft_tokens,
            index=self._index,
        )


class _NgramStep(DrafterStep):
    def __init__(self, drafter: NgramDrafter, max_drafts: Array, match_lens: Array) -> None:
        self._drafter = drafter
        self._max_drafts, self._match_lens = max_drafts, match_lens

    def fill(self, parts: Sequence[Scheduled]) -> None:
        limits = self._max_drafts.host
        limits.fill(0)
        for slot, limit in self._drafter.limits:
            limits[slot] = limit

    def launch(self, target: TargetStep) -> None:
        self._drafter.propose(target, self._max_drafts.device, self._match_lens.device)

    def read(self, parts: Sequence[Scheduled], proposals: Proposals) -> None:
        for part in parts:
            slot = part.request.slot
            length = int(self._match_lens.host[slot])
            if length and part.request.speculative.selects_drafts:
                found = proposals.confidences[slot, : proposals.counts[slot]]
                # The longer a match, the surer; how sure that is the counts of the method say.
                found[found == 0] = length / (length + 1)
