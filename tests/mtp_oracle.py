# SPDX-License-Identifier: Apache-2.0
"""Oracle of MTP drafts: computes the drafts of docs/mtp.md from scratch, without caches or batches.

It calls the same ops as an engine, and a row has the same bits in any batch. So an engine's drafts
and their logits must have the oracle's bits. `SlowModules.drafts` computes the drafts in plain
torch and float64.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from specops.engine.models import MtpBatch, MtpModules, MtpOutput, StepBatch, Transformer
from torch import Tensor

PAGE_SIZE = 16


@dataclass(frozen=True)
class Drafts:
    """Drafts of a request after a prefix."""

    token_ids: list[int]
    logits: Tensor  # [drafts, draft vocabulary], from which the drafts were chosen


def oracle_drafts(
    model: Transformer,
    modules: MtpModules,
    prefix: list[int],
    count: int,
    *,
    begin: int = 0,
    choose: Callable[[int, Tensor], int] | None = None,
) -> Drafts:
    """Return the first `count` drafts after `prefix`, whose last token the target has just chosen.

    The modules do not attend to positions before `begin`. `choose` takes a draft's number and its
    logits, and returns the token; without it, the most likely token is drafted.
    """
    rows, num_modules = len(prefix) - 1, modules.num_modules
    text, logits = list(prefix), []

    def draft(out: MtpOutput) -> None:
        row = modules.logits(out.hidden[-1:])[0].clone()
        if choose is not None:
            token = choose(len(logits), row)
        else:
            token = int(row.argmax())
            token = token if modules.token_map is None else int(modules.token_map[token])
        text.append(token)
        logits.append(row)

    hidden = inputs = target_states(model, prefix)[begin:rows]
    for index in range(min(num_modules, count)):
        inputs = hidden
        out = _whole(modules, index, text, inputs, begin)
        draft(out)
        if modules.convention.chained:
            hidden = out.recycled.clone()
    while len(logits) < count:
        inputs = torch.cat((inputs, out.recycled[-1:]))
        out = _whole(modules, num_modules - 1, text, inputs, begin)
        draft(out)
    return Drafts(text[len(prefix) :], torch.stack(logits))


def target_states(model: Transformer, token_ids: list[int]) -> Tensor:
    """Return the target's states after its final norm, for every position of a text."""
    positions, pages = _rows(len(token_ids))
    step = StepBatch(
        token_ids=torch.tensor(token_ids, dtype=torch.int32), positions=positions, **pages
    )
    cache = model.new_kv_cache(len(step.kv_indices), PAGE_SIZE)
    return model.forward(step, cache).clone()


def _whole(
    modules: MtpModules, index: int, text: list[int], hidden: Tensor, begin: int
) -> MtpOutput:
    """Run all rows of a module, one for each state."""
    rows, pages = _rows(len(hidden))
    batch = MtpBatch(
        positions=rows + begin,
        row_to_request=torch.zeros_like(rows),
        source_rows=rows,
        slots=torch.zeros(1, dtype=torch.int32),
        token_ids=torch.tensor([text], dtype=torch.int32),
        lens=torch.tensor([len(text)], dtype=torch.int32),
        draft_token_ids=torch.full((1, 1), -1, dtype=torch.int32),
        **pages,
    )
    cache = modules.new_kv_cache(len(batch.kv_indices), PAGE_SIZE)
    return modules.forward(index, batch, hidden, cache)


def _rows(count: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the positions of one request's first rows, and the index arrays of its KV pages."""
    num_pages = -(-count // PAGE_SIZE)
    return torch.arange(count, dtype=torch.int32), {
        "cache_slots": torch.arange(count),
        "qo_indptr": torch.tensor([0, count], dtype=torch.int32),
        "kv_indptr": torch.tensor([0, num_pages], dtype=torch.int32),
        "kv_indices": torch.arange(num_pages, dtype=torch.int32),
        "kv_lens": torch.tensor([count], dtype=torch.int32),
    }
