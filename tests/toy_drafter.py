# SPDX-License-Identifier: Apache-2.0
"""A drafter with weights as a third party would add it: this file and a line in the registry.

Its weights say how likely tokens follow each token, for a reduced vocabulary. The states of two
layers, and a value stored on the pages of the previous position, scale the logits a little.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from specops.api.errors import ModelError
from specops.api.methods import Method, Options, checks
from specops.engine.drafters.base import Drafter, DrafterContext, MethodUnavailable, TargetStep
from specops.engine.drafters.head import DraftRows
from specops.engine.drafters.recurrent import RecurrentDrafter
from specops.engine.models import CacheCapacity
from torch import Tensor

FILE = "toy.safetensors"


@dataclass(frozen=True, kw_only=True)
class ToyOptions(Options):
    """Location of the weights, and the influence of the states."""

    model: str | None = None
    toy_weight: float = 0.1

    def __post_init__(self) -> None:
        checks.path("model", self.model)
        checks.number("toy_weight", self.toy_weight, 0.0, 1.0)


METHOD = Method(
    name="toy",
    title="toy table",
    short="toy",
    drafter="toy_drafter",
    options=ToyOptions,
    files=("model",),
    needs_weights=True,
    draws=True,
)


def load(context: DrafterContext) -> Drafter:
    own = context.config.speculative_config.options_of(ToyOptions)
    if own.model is None:
        raise MethodUnavailable("no weights of a toy", "no weights of a toy")
    file = Path(own.model) / FILE
    if not file.is_file():
        raise ModelError(f"{file}: no such file")
    head = ToyHead(context, load_file(file), own.toy_weight)
    return RecurrentDrafter(METHOD.name, context, head, draws=True)


def write_weights(folder: Path, texts: Sequence[Sequence[int]], vocab_size: int, size: int) -> None:
    """Count which token follows which, and write the tables."""
    counts = torch.zeros(vocab_size, vocab_size)
    for text in texts:
        pairs = torch.tensor(text)
        counts.index_put_((pairs[:-1], pairs[1:]), torch.ones(len(text) - 1), accumulate=True)
    tokens = counts.sum(0).topk(size).indices.sort().values
    tables = {"follows": (counts[:, tokens] + 0.02).log(), "tokens": tokens.int()}
    save_file({name: table.contiguous() for name, table in tables.items()}, folder / FILE)


class ToyHead:
    num_passes = 1
    is_chained = True
    lookahead = 1
    reads_states = True
    max_drafts = None
    aux_layers = (0, 2)
    dtype = torch.float32

    def __init__(self, context: DrafterContext, tables: dict[str, Tensor], weight: float) -> None:
        self.follows = tables["follows"].to(context.target.device)
        self.token_map = tables["tokens"].to(context.target.device)
        self.vocab_size = self.hidden_size = len(self.token_map)
        self.kv_bytes_per_token = 4 * self.hidden_size
        self.weight = weight
        self.kept: Tensor

    def reserve(self, rows: int) -> None:
        pass

    def allocate(self, capacity: CacheCapacity) -> None:
        self.page_size = capacity.page_size
        # One more entry, for rows of no request.
        shape = (capacity.num_pages * capacity.page_size + 1, self.hidden_size)
        self.kept = torch.zeros(shape, device=self.follows.device)

    def workspace_size(self, rows: int, batch: int, pages: int) -> int:
        return 0

    def sums_size(self, rows: int, outputs: int) -> int:
        return 0

    def target_states(self, target: TargetStep) -> Tensor:
        first, second = (
            target.aux_hidden_states[layer][:, : self.hidden_size].float()
            for layer in self.aux_layers
        )
        return (first + second) / 2

    def forward(self, index: int, rows: DraftRows, states: Tensor) -> tuple[Tensor, Tensor]:
        request = rows.row_to_request.clamp(min=0)
        own = states[rows.source_rows.clamp(min=0)]
        if rows.kept is not None:
            earlier = rows.kept.flatten(0, 1)[(-2 - rows.source_rows).clamp(min=0)]
            own = torch.where(rows.source_rows[:, None] < 0, earlier, own)
        places = torch.where(rows.cache_slots < 0, len(self.kept) - 1, rows.cache_slots)
        self.kept.index_copy_(0, places, own)
        before = self.kept[self._before(rows, request)]
        hidden = self.follows[self._tokens(rows, request)] + self.weight * (own + before).tanh()
        return hidden, own

    def logits(
        self, index: int, hidden: Tensor, *, out: Tensor | None = None, sums: Tensor | None = None
    ) -> Tensor:
        return hidden.float() if out is None else out.copy_(hidden)

    def _before(self, rows: DraftRows, request: Tensor) -> Tensor:
        """Return where the previous position's value is stored; the row's own entry if none."""
        ends = (rows.qo_indptr[1:] - 1).clamp(min=0)
        skipped = rows.positions[ends.clamp(max=len(rows.positions) - 1)] + 1 - rows.kv_lens
        position = rows.positions - skipped[request] - 1
        entry = rows.kv_indptr[request] + position.clamp(min=0) // self.page_size
        page = rows.kv_indices[entry.clamp(0, len(rows.kv_indices) - 1)]
        place = page.long() * self.page_size + position.clamp(min=0) % self.page_size
        is_here = (position >= 0) & (rows.cache_slots >= 0)
        found = torch.where(is_here, place, rows.cache_slots)
        return torch.where(found < 0, len(self.kept) - 1, found)

    def _tokens(self, rows: DraftRows, request: Tensor) -> Tensor:
        """Return the token after each row, from the text or from the drafts."""
        slot = rows.slots[request].clamp(min=0).long()
        position = rows.positions + 1
        draft = position - rows.lens[slot]
        of_text = rows.token_ids[slot, position.clamp(0, rows.token_ids.shape[1] - 1)]
        of_drafts = rows.draft_token_ids[slot, draft.clamp(0, rows.draft_token_ids.shape[1] - 1)]
        return torch.where(draft < 0, of_text, of_drafts).clamp(min=0).long()
