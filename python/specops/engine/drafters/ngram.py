# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup: draft what followed an earlier occurrence of a request's last tokens in its text.

A tree is made of two look-ups: the continuation of the most recent occurrence and that of the
leftmost one, where the two disagree.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specops.api.methods.ngram import NgramOptions
from specops.engine.drafters.base import (
    Drafter,
    DrafterContext,
    DrafterStep,
    Proposals,
    Scheduled,
    TargetStep,
    stage_limit,
)
from specops.engine.drafters.trees import join_chains
from specops.engine.memory.step_memory import Array, Layout
from specops.engine.memory.step_shape import StepShape
from specops.engine.request import Request
from specops.ngram import NgramIndex, ngram_propose

_MAX_SIZES = 16  # limit on the sizes with index memory of their own; more sizes share it
_SECOND = 0.3  # probability that the other look-up is right if the drafts are wrong


def load(context: DrafterContext) -> Drafter:
    """Make the drafter; every model supports it."""
    return NgramDrafter(context)


class NgramDrafter(Drafter):
    """Drafts with `specops.ngram.ngram_propose`, all requests of a step in one call.

    Each slot's tokens are indexed as they arrive, so the cost of a step does not depend on the
    length. After a preemption a request is indexed anew, a piece per step. The index is allocated
    when the first request uses this method.
    """

    name = "ngram"

    def __init__(self, context: DrafterContext) -> None:
        config = context.config
        self._speculative = config.speculative_config
        self._slots, self._max_len = config.max_num_seqs, context.target.max_model_len
        self._device = context.target.device
        self.shares_total = self._speculative.max_total_draft_tokens is not None
        self._index: NgramIndex | None = None
        self._other_index: NgramIndex | None = None  # for the second look-up of trees
        self.limits: list[tuple[int, int]] = []  # of the step: (slot, most drafts)
        self.tree_limits: list[tuple[int, int]] = []  # the same for requests with trees only
        self._choices: Tensor
        self._rows: tuple[Tensor, ...]

    def start(self, request: Request) -> bool:
        """Store the request's n-gram sizes and match side, and reset the slot's index."""
        config, own = request.speculative, request.speculative.options_of(NgramOptions)
        has_moved = self._index is None
        if self._index is None:
            self._index = self._new_index()
            self._choices = torch.ones((4, self._slots), dtype=torch.int32, device=self._device)
            self._rows = tuple(self._choices)  # shortest, longest, is leftmost, is not
        if config.tree and self._other_index is None:
            has_moved, self._other_index = True, self._new_index()
        is_leftmost = own.ngram_match == "leftmost"
        choices = [own.min_ngram_size, own.max_ngram_size, is_leftmost, not is_leftmost]
        self._choices[:, request.slot] = torch.tensor(choices, dtype=torch.int32)
        self._index.reset(request.slot)
        if self._other_index is not None:
            self._other_index.reset(request.slot)
        return has_moved

    def _new_index(self) -> NgramIndex:
        shared = self._speculative.options_of(NgramOptions)
        num_sizes = min(shared.max_ngram_size - shared.min_ngram_size + 1, _MAX_SIZES)
        return NgramIndex.empty(
            self._slots, self._max_len, num_sizes=num_sizes, device=self._device
        )

    def plan(self, parts: Sequence[Scheduled], shape: StepShape) -> Hashable | None:
        """Return "trees" or "chains", or None if no request takes drafts."""
        if self._index is None:
            return None
        self.limits, self.tree_limits = [], []
        for part in parts:
            limit = stage_limit(part, self.name)
            if limit:
                self.limits.append((part.request.slot, limit))
                if part.request.speculative.tree:
                    self.tree_limits.append((part.request.slot, limit))
        return ("trees" if self.tree_limits else "chains") if self.limits else None

    def new_step(
        self, key: Hashable, shape: StepShape, inputs: Layout, results: Layout
    ) -> DrafterStep:
        """Make its part of the steps of one shape."""
        slots = self._slots
        found = _Found(inputs.int32(slots), results.int32(slots))
        others = None
        if key == "trees":
            others = _Others(
                inputs.int32(slots),
                results.int32(slots, shape.proposals),
                results.int32(slots),
            )
        return _NgramStep(self, found, others)

    def propose(self, target: TargetStep, found: "_Found") -> None:
        """Continue the proposals of every request in one call."""
        self._look_up(
            target,
            found.limits,
            leftmost=self._rows[2],
            index=self._index,
            draft_token_ids=target.draft_token_ids,
            num_draft_tokens=target.num_draft_tokens,
            num_given_drafts=target.num_draft_tokens,
            match_lens=found.match_lens.device,
            max_total_draft_tokens=self._speculative.max_total_draft_tokens,
        )

    def propose_others(self, target: TargetStep, found: "_Others") -> None:
        """Look for drafts at the other occurrence, for requests with trees."""
        self._look_up(
            target,
            found.limits,
            leftmost=self._rows[3],
            index=self._other_index,
            draft_token_ids=found.token_ids.device,
            num_draft_tokens=found.counts.device,
        )

    def _look_up(self, target: TargetStep, limits: Array, **asked: Any) -> None:
        ngram_propose(
            target.token_ids,
            target.lens,
            limits.device,
            min_ngram_size=self._rows[0],
            max_ngram_size=self._rows[1],
            **asked,
        )


@dataclass(frozen=True, slots=True)
class _Found:
    """Arrays of the requests' own look-up, by slot."""

    limits: Array
    match_lens: Array


@dataclass(frozen=True, slots=True)
class _Others:
    """Arrays of the second look-up, by slot, with drafts of its own."""

    limits: Array
    token_ids: Array
    counts: Array


class _NgramStep(DrafterStep):
    def __init__(self, drafter: NgramDrafter, found: _Found, others: _Others | None) -> None:
        self._drafter, self._found, self._others = drafter, found, others

    def fill(self, parts: Sequence[Scheduled]) -> None:
        _fill(self._found.limits, self._drafter.limits)
        if self._others is not None:
            _fill(self._others.limits, self._drafter.tree_limits)

    def launch(self, target: TargetStep) -> None:
        self._drafter.propose(target, self._found)
        if self._others is not None:
            self._drafter.propose_others(target, self._others)

    def read(self, parts: Sequence[Scheduled], proposals: Proposals) -> None:
        if self._others is not None:
            for slot, limit in self._drafter.tree_limits:
                self._branch(slot, limit, proposals)
        for part in parts:
            slot = part.request.slot
            length = int(self._found.match_lens.host[slot])
            if length and part.request.speculative.selects_drafts:
                found = proposals.confidences[slot, : proposals.counts[slot]]
                # Confidence grows with the match; the method's counts calibrate it.
                found[found == 0] = length / (length + 1)

    def _branch(self, slot: int, limit: int, proposals: Proposals) -> None:
        """Make a tree of a request's drafts and those of the second look-up."""
        assert self._others is not None
        others = self._others.token_ids.host[slot, : self._others.counts.host[slot]].tolist()
        drafts = proposals.token_ids[slot, : proposals.counts[slot]].tolist()
        if self._drafter.shares_total:  # the drafts are the request's share of the total
            limit = len(drafts)
        length = int(self._found.match_lens.host[slot])
        chance = length / (length + 1)
        second_chance = (1 - chance) * _SECOND
        tree = join_chains(drafts, others, limit, chance, second_chance)
        proposals.put_tree(slot, tree)


def _fill(array: Array, pairs: Sequence[tuple[int, int]]) -> None:
    array.host.fill(0)
    for slot, limit in pairs:
        array.host[slot] = limit
