# SPDX-License-Identifier: Apache-2.0
"""One request's MTP drafts, step by step as an engine makes them: right, or with one mistake.

The request's text is known beforehand, because drafts do not change it. So the target runs once,
over the whole text. This leaves the possible mistakes: prompts in chunks, cached prefixes, drafts
that are kept or rejected.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from specops.engine.models import MtpBatch, MtpModules, MtpOutput, StepBatch, Transformer
from torch import Tensor

PAGE_SIZE = 16


class Mistake(Enum):
    """Mistakes observed in engines, one at a time."""

    IDS_NOT_SHIFTED = "row i reads t[i]: ids are not shifted"
    STATES_SHIFTED = "row i reads h[i+1]: states are shifted, too"
    STATES_LATE = "row i reads h[i-1]"
    HALVES_SWAPPED = "the projection's halves are swapped"
    POSITION_0_MASKED = "position 0 reads zeros for its token"
    UNCHAINED = "every module reads the target's states"
    RECYCLED_UNNORMED = "recycled before the head's norm"
    POSITIONS_SHIFTED = "row i is at position i + 1"
    RECYCLED_TOO_FAR = "recycled rows are one position too far"
    RECYCLED_STAY = "recycled rows stay at the first draft's position"
    ACCEPTED_NOT_RUN_AGAIN = "accepted drafts keep the keys of recycled rows"
    REJECTED_STAY = "rejected drafts' keys stay visible"
    CHUNK_TAIL_SAMPLED = "a chunk's last row reads the token sampled there"
    PLAIN_BLOCK_KEY = "a shared page's last row has read another prompt's token"
    PREFIX_EMPTY = "a shared prefix has no draft keys"


_CONVENTIONS = {
    Mistake.POSITION_0_MASKED: {"masks_position_0": True},
    Mistake.UNCHAINED: {"chained": False},
    Mistake.RECYCLED_UNNORMED: {"recycle_normed": False},
}


@dataclass(frozen=True)
class Text:
    """A request's prompt and output, and the target's results on them.

    Attributes:
        token_ids: all of it.
        hidden: [tokens, hidden_size], the target's states after its final norm.
        chosen: the target's most likely token after each position.
        others: the next token of another prompt with the same prefix: the target's first or second
            choice, the one that the text does not have.
    """

    token_ids: list[int]
    hidden: Tensor
    chosen: list[int]
    others: list[int]

    @classmethod
    @torch.inference_mode()
    def read(cls, target: Transformer, token_ids: Sequence[int]) -> Text:
        """Run the target over a text."""
        rows, pages = len(token_ids), -(-len(token_ids) // PAGE_SIZE)
        step = StepBatch(
            token_ids=torch.tensor(token_ids, dtype=torch.int32),
            positions=torch.arange(rows, dtype=torch.int32),
            **_places(0, rows),
        )
        hidden = target.forward(step, target.new_kv_cache(pages, PAGE_SIZE)).clone()
        first, second = target.logits(hidden).topk(2).indices.T.tolist()
        following = [*token_ids[1:], -1]
        others = [b if a == t else a for a, b, t in zip(first, second, following, strict=True)]
        return cls(list(token_ids), hidden, first, others)


class Drafting:
    """Draft state of one request.

    Args:
        modules: MTP modules of the target that read the text.
        text: the request's present and future tokens.
        mistake: the mistake to make; None for none.
    """

    def __init__(self, modules: MtpModules, text: Text, mistake: Mistake | None = None) -> None:
        self._modules = copy.copy(modules)
        changes = dict(_CONVENTIONS.get(mistake, {}))
        if mistake is Mistake.HALVES_SWAPPED:
            changes = {"hidden_first": not modules.convention.hidden_first}
        self._modules.convention = dataclasses.replace(modules.convention, **changes)
        self._text, self._mistake = text, mistake
        slots = len(text.token_ids) + 16
        if mistake is Mistake.REJECTED_STAY:
            slots *= 8
        self._cache = modules.new_kv_cache(-(-slots // PAGE_SIZE), PAGE_SIZE)
        self._final = 0  # rows that need not run again
        self._recycled = 0  # rows after them that the last drafts wrote
        self._used = 0  # cache slots ever written

    def chunk(self, end: int) -> None:
        """Read a chunk of the prompt up to `end`; the prompt continues after it."""
        wrong = self._mistake is Mistake.CHUNK_TAIL_SAMPLED
        self._prefill(end, self._text.chosen[end - 1] if wrong else None)

    def take_over(self, end: int) -> None:
        """Use the pages up to `end` of another prompt, which continued with its own token.

        The correct content is what this prompt would have written itself.
        """
        assert end % PAGE_SIZE == 0
        if self._mistake is Mistake.PREFIX_EMPTY:
            self._final = end
            return
        wrong = self._mistake is Mistake.PLAIN_BLOCK_KEY
        self._prefill(end, self._text.others[end - 1] if wrong else None)

    def forget(self, row: int) -> None:
        """Run the rows from `row` on again."""
        self._final = min(self._final, row)

    @torch.inference_mode()
    def draft(self, known: int, count: int) -> list[int]:
        """Return the drafts after the first `known` tokens, which the target has emitted."""
        text, modules = self._text.token_ids[:known], self._modules
        begin, last = self._final, modules.num_modules - 1
        if self._mistake is Mistake.ACCEPTED_NOT_RUN_AGAIN:
            assert modules.num_modules == 1
            begin = min(begin + self._recycled, known - 2)
        for out in self._rows(text, begin, known - 1):
            text.append(self._choice(out))
        self._final = max(known - modules.num_modules, 0)
        self._recycled = max(count - modules.num_modules, 0)
        first = known - 2
        for ahead in range(1, self._recycled + 1):
            position = first + ahead
            if self._mistake is Mistake.RECYCLED_TOO_FAR:
                position += 1
            elif self._mistake is Mistake.RECYCLED_STAY:
                position = first
            slot = self._used if self._mistake is Mistake.REJECTED_STAY else first + ahead
            out = self._run(last, text[-1:], position, slot, out.recycled[-1:])
            text.append(self._choice(out))
        return text[known : known + count]

    @torch.inference_mode()
    def _prefill(self, end: int, wrong_token: int | None) -> None:
        text = list(self._text.token_ids)
        if wrong_token is not None:
            text[end] = wrong_token
        for _ in self._rows(text, self._final, end):
            pass
        self._final = end

    def _rows(self, text: list[int], begin: int, end: int) -> Iterator[MtpOutput]:
        """Yield rows of every module over the target's states; `text` may grow in between."""
        mistake, states = self._mistake, self._text.hidden
        hidden = states[begin:end]
        if mistake is Mistake.STATES_SHIFTED:  # the last row has no later state
            hidden = torch.cat((states[begin + 1 : end], states[end - 1 : end]))
        elif mistake is Mistake.STATES_LATE:
            hidden = torch.cat((states[max(begin, 1) - 1 : max(begin, 1)], states[begin : end - 1]))
        slot = self._used if mistake is Mistake.REJECTED_STAY else begin
        for index in range(self._modules.num_modules):
            shift = index if mistake is Mistake.IDS_NOT_SHIFTED else index + 1
            out = self._run(index, text[begin + shift : end + shift], begin, slot, hidden)
            yield out
            if self._modules.convention.chained:
                hidden = out.recycled.clone()

    def _run(
        self, index: int, token_ids: list[int], position: int, slot: int, hidden: Tensor
    ) -> MtpOutput:
        """Run a module's rows from `position` on with these tokens, writing from `slot` on."""
        if self._mistake is Mistake.POSITIONS_SHIFTED:
            position += 1
        rows, behind = len(token_ids), position + index + 1
        self._used = slot + rows
        batch = MtpBatch(
            positions=torch.arange(position, position + rows, dtype=torch.int32),
            row_to_request=torch.zeros(rows, dtype=torch.int32),
            source_rows=torch.arange(rows, dtype=torch.int32),
            slots=torch.zeros(1, dtype=torch.int32),
            token_ids=torch.tensor([[0] * behind + token_ids], dtype=torch.int32),
            lens=torch.tensor([behind + rows], dtype=torch.int32),
            draft_token_ids=torch.full((1, 1), -1, dtype=torch.int32),
            **_places(slot, slot + rows),
        )
        return self._modules.forward(index, batch, hidden, self._cache)

    def _choice(self, out: MtpOutput) -> int:
        return int(self._modules.logits(out.hidden[-1:])[0].argmax())


def drafts_along(
    drafting: Drafting, rows: Sequence[int], count: int, *, edges: Sequence[int], shared: bool
) -> list[list[int]]:
    """Return drafts for each of some rows: those after the text up to the token that the row reads.

    Args:
        drafting: draft state of the text; nothing has run yet.
        rows: the rows, in ascending order.
        count: number of drafts per row.
        edges: where chunks of the prompt end, in ascending order.
        shared: whether another prompt has computed the pages up to each edge.
    """
    drafts, edges = [], list(edges)
    for row in rows:
        while edges and edges[0] <= row:
            (drafting.take_over if shared else drafting.chunk)(edges.pop(0))
        drafts.append(drafting.draft(row + 2, count))
        drafting.forget(row)  # it may be the last row of a later chunk
    return drafts


@dataclass(frozen=True)
class Drafted:
    """The drafts of one step, and how many of them were kept."""

    known: int  # tokens of the text before them
    drafts: list[int]
    kept: int


def decode(
    drafting: Drafting,
    text: Text,
    prompt_len: int,
    count: int,
    *,
    chunk: int,
    shared: int = 0,
    known_to_fail: frozenset[int] = frozenset(),
) -> Iterator[Drafted]:
    """Yield the steps from a prompt to the end of a text; each drafts and keeps the right drafts.

    Args:
        drafting: draft state of the text; nothing has run yet.
        text: the prompt and what follows, with `count` more tokens to judge by.
        prompt_len: tokens of the prompt.
        count: drafts of a step.
        chunk: rows of a step while the prompt is read.
        shared: number of leading tokens whose pages another prompt has computed.
        known_to_fail: text lengths after which all drafts count as rejected.
    """
    if shared:
        drafting.take_over(shared)
    for end in range(shared + chunk, prompt_len, chunk):
        drafting.chunk(end)
    known = prompt_len + 1
    while known + count <= len(text.token_ids):
        drafts, kept = drafting.draft(known, count), 0
        if known not in known_to_fail:
            while kept < count and drafts[kept] == text.token_ids[known + kept]:
                kept += 1
        yield Drafted(known, drafts, kept)
        known += kept + 1


def _places(begin: int, end: int) -> dict[str, Tensor]:
    """Return the index arrays for one request's rows at these slots."""
    num_pages = -(-end // PAGE_SIZE)
    return {
        "cache_slots": torch.arange(begin, end),
        "qo_indptr": torch.tensor([0, end - begin], dtype=torch.int32),
        "kv_indptr": torch.tensor([0, num_pages], dtype=torch.int32),
        "kv_indices": torch.arange(num_pages, dtype=torch.int32),
        "kv_lens": torch.tensor([end], dtype=torch.int32),
    }
