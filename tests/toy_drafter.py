# SPDX-License-Identifier: Apache-2.0
"""A drafter as somebody would add one: this file and a line in the registry.

It reads the states of two layers, keeps their mean on pages of its own, and drafts what the LM head
says of that mean at a request's last position and at earlier ones.
"""

from collections.abc import Hashable, Sequence

import torch
from specops.engine.drafters import (
    Drafter,
    DrafterContext,
    DrafterStep,
    Scheduled,
    TargetStep,
    stage_limit,
)
from specops.engine.memory.kv_cache import DraftKv
from specops.engine.memory.step_memory import Layout
from specops.engine.memory.step_shape import StepShape
from specops.engine.request import Request


def load(context: DrafterContext) -> Drafter:
    return ToyDrafter(context)


class ToyDrafter(Drafter):
    name = "toy"
    taps = (0, 2)

    def __init__(self, context: DrafterContext) -> None:
        self.target, self.config = context.target, context.config
        self.kv_bytes_per_token = 4 * context.target.config.hidden_size

    def allocate(self, num_pages: int) -> None:
        rows = num_pages * self.config.page_size
        self.kept = torch.zeros(rows, self.target.config.hidden_size)

    def draft_kv(self, request: Request) -> DraftKv:
        return DraftKv(self.name, 0, 0)

    def plan(self, parts: Sequence[Scheduled], shape: StepShape) -> Hashable | None:
        is_here = [self.name in part.request.draft_stages for part in parts]
        return True if any(is_here) else None

    def new_step(self, key: Hashable, shape: StepShape, inputs: Layout, out: Layout) -> "ToyStep":
        return ToyStep(self)


class ToyStep(DrafterStep):
    def __init__(self, drafter: ToyDrafter) -> None:
        self.drafter = drafter

    def fill(self, parts: Sequence[Scheduled]) -> None:
        self.limits = {row: stage_limit(part, "toy") for row, part in enumerate(parts)}
        for part in parts:  # every row of the step is kept, whatever its request
            part.request.num_final_draft_kv = part.request.num_computed

    def launch(self, target: TargetStep) -> None:
        kept, size = self.drafter.kept, self.drafter.config.page_size
        mean = (target.taps[0].float() + target.taps[2].float()) / 2
        kept[target.cache_slots] = mean
        for row, limit in self.limits.items():
            slot, pages = int(target.slots[row]), target.kv_indices[int(target.kv_indptr[row]) :]
            for draft in range(limit):
                position = int(target.lens[slot]) - 2 - draft  # the newest token has no states
                state = kept[int(pages[position // size]) * size + position % size]
                logits = self.drafter.target.logits(state.to(target.hidden.dtype)[None])
                target.draft_token_ids[slot, draft] = logits.argmax()
            target.num_draft_tokens[slot] = limit
