# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup: draft what followed an earlier occurrence of a request's last tokens."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specops.api.methods.ngram import NgramOptions
from specops.engine.drafters.base import (
    Drafter,
    DrafterContext,
    DrafterStep,
    Proposals,
    TargetStep,
    stage_limit,
)
from specops.engine.memory.step_memory import Array, Layout
from specops.engine.memory.step_shape import StepShape
from specops.engine.plan import Part
from specops.engine.request import Request
from specops.ngram import NgramIndex, ngram_propose

_MAX_SIZES = 16  # maximum n-gram sizes with separate index memory; further sizes share it


def load(context: DrafterContext) -> Drafter:
    """Make the drafter; every model supports it."""
    return NgramDrafter(context)


class NgramDrafter(Drafter):
    """Drafter that calls `specops.ngram.ngram_propose` once per step, for all requests.

    Each slot's tokens are indexed as they arrive, so the cost of a step does not depend on the text
    length. After a preemption, a request is indexed again, a piece per step. The index is allocated
    when the first request uses this method.
    """

    name = "ngram"

    def __init__(self, context: DrafterContext) -> None:
        config = context.config
        self._speculative = config.speculative_config
        self._slots, self._max_len = config.max_num_seqs, context.target.max_model_len
        self._device = context.target.device
        self._index: NgramIndex | None = None
        self.limits: list[tuple[int, int]] = []  # (slot, maximum number of drafts)
        self._choices: Tensor
        self._rows: tuple[Tensor, ...]

    def start(self, request: Request) -> bool:
        """Store the request's n-gram sizes and match side, and reset the slot's index."""
        own = request.speculative.options_of(NgramOptions)
        has_moved = self._index is None
        if self._index is None:
            self._index = self._new_index()
            self._choices = torch.ones((3, self._slots), dtype=torch.int32, device=self._device)
            self._rows = tuple(self._choices)  # min and max n-gram size, is leftmost
        choices = [own.min_ngram_size, own.max_ngram_size, own.ngram_match == "leftmost"]
        self._choices[:, request.slot] = torch.tensor(choices, dtype=torch.int32)
        self._index.reset(request.slot)
        return has_moved

    def _new_index(self) -> NgramIndex:
        shared = self._speculative.options_of(NgramOptions)
        num_sizes = min(shared.max_ngram_size - shared.min_ngram_size + 1, _MAX_SIZES)
        return NgramIndex.empty(
            self._slots, self._max_len, num_sizes=num_sizes, device=self._device
        )

    def plan(self, parts: Sequence[Part], shape: StepShape) -> Hashable | None:
        """Return a key if any request may get drafts, else None."""
        if self._index is None:
            return None
        self.limits = []
        for part in parts:
            limit = stage_limit(part, self.name)
            if limit:
                self.limits.append((part.request.slot, limit))
        return self.name if self.limits else None

    def new_step(
        self, key: Hashable, shape: StepShape, inputs: Layout, results: Layout
    ) -> DrafterStep:
        """Make the drafter's part of the steps of one shape."""
        slots = self._slots
        return _NgramStep(self, _Found(inputs.int32(slots), results.int32(slots)))

    def propose(self, target: TargetStep, found: "_Found") -> None:
        """Append drafts to the proposals of every request, in one call."""
        ngram_propose(
            target.token_ids,
            target.lens,
            found.limits.device,
            min_ngram_size=self._rows[0],
            max_ngram_size=self._rows[1],
            leftmost=self._rows[2],
            index=self._index,
            draft_token_ids=target.draft_token_ids,
            num_draft_tokens=target.num_draft_tokens,
            num_given_drafts=target.num_draft_tokens,
            match_lens=found.match_lens.device,
            max_total_draft_tokens=self._speculative.max_total_draft_tokens,
        )


@dataclass(frozen=True, slots=True)
class _Found:
    """Arrays of the n-gram search by slot: draft limits (in), and match lengths (out)."""

    limits: Array
    match_lens: Array


class _NgramStep(DrafterStep):
    def __init__(self, drafter: NgramDrafter, found: _Found) -> None:
        self._drafter, self._found = drafter, found

    def fill(self, parts: Sequence[Part]) -> None:
        self._found.limits.host.fill(0)
        for slot, limit in self._drafter.limits:
            self._found.limits.host[slot] = limit

    def launch(self, target: TargetStep) -> None:
        self._drafter.propose(target, self._found)

    def read(self, parts: Sequence[Part], proposals: Proposals) -> None:
        for part in parts:
            slot = part.request.slot
            length = int(self._found.match_lens.host[slot])
            if length and part.request.speculative.selects_drafts:
                found = proposals.confidences[slot, : proposals.counts[slot]]
                # Longer matches give higher confidence; acceptance counts calibrate it.
                found[found == 0] = length / (length + 1)
