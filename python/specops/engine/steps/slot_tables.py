# SPDX-License-Identifier: Apache-2.0
"""What the device knows of every request that holds a slot: its tokens, and what it asks for.

A table has a row per slot and stays where it is, so that steps can be captured; one that nobody has
asked for does not exist. When one is made or widened, everything that used the tables must be made
anew. Rows are written when a request gets its slot, and some are kept by the device from then on.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specops.engine.memory.step_shape import rung
from specops.engine.request import Request
from specops.sampling import LogitsProcessors, count_tokens

# By table: what a row holds that asks for nothing. Those that end requests, that change logits, and
# that `commit` counts tokens in.
_ENDINGS: dict[str, float] = {
    "stop_sequences": -1,
    "think_end_token_id": -1,
    "thinking_budget": -1,
    "reply_budget": -1,
    "inject_token_ids": -1,
}
_PROCESSORS: dict[str, float] = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias_token_ids": -1,
    "logit_bias": 0.0,
    "bad_words": -1,
    "min_tokens": 0,
}
_COUNTS: dict[str, float] = {"counted_token_ids": -1, "token_counts": 0}
_OFF = {"stop_token_ids": -1, **_ENDINGS, **_PROCESSORS, **_COUNTS}


class SlotTables:
    """The tables, and their rows' contents as far as the host writes them.

    Args:
        slots: rows of each.
        max_len: tokens of the longest request.
        vocab_size: of the model.
        device: where they live.

    Attributes:
        token_ids: [slots, max_len], int32. Prompt and output of each request; `commit` appends.
    """

    def __init__(self, slots: int, max_len: int, vocab_size: int, device: torch.device) -> None:
        self._slots = slots
        self._vocab_size = vocab_size
        self._device = device
        self._tables: dict[str, Tensor] = {}
        # The row that was written last, by table and slot: writing it again is not needed.
        self._written: dict[tuple[str, int], bytes] = {}
        self._max_lens = [0] * slots
        self.token_ids = torch.zeros((slots, max_len), dtype=torch.int32, device=device)

    def start(self, request: Request) -> bool:
        """Writes the rows of a request that got its slot, as they are after all its tokens so far.

        Where that raises, no table is there without another that it goes with.

        Returns:
            Whether a table was made or moved.
        """
        slot = request.slot
        token_ids = torch.tensor(request.token_ids, dtype=torch.int32)
        self.token_ids[slot, : len(token_ids)] = token_ids
        self._max_lens[slot] = request.max_len
        rows = self._rows_of(request)
        grown = {name: self._grown(name, row.shape) for name, row in rows.items()}
        if request.params.has_penalties or "token_counts" in self._tables:
            # `commit` wants room for a step's tokens, but for the last of which it is not used.
            room = (min(max(self._max_lens), self._vocab_size),)
            grown |= {name: self._grown(name, room) for name in _COUNTS}
        moved = {name: table for name, table in grown.items() if table is not None}
        for name in moved:
            for other in range(self._slots):
                self._written.pop((name, other), None)
        self._tables |= moved
        for name, row in rows.items():
            self._write(name, slot, row)
        self._count(request, token_ids)
        return bool(moved)

    def _rows_of(self, request: Request) -> dict[str, NDArray[Any]]:
        """What a request asks for, but for what there is no table of and that asks for nothing."""
        params = request.params
        # One that is 0 asks for nothing, and would have no row in a table that is not there.
        biases = [(token_id, bias) for token_id, bias in params.bias() if np.float32(bias)]
        budgets = params.reasoning_max_tokens, params.response_max_tokens
        thinking, reply = (-1 if budget is None else budget for budget in budgets)
        asked: dict[str, Any] = {
            "stop_token_ids": request.stop_token_ids,
            "min_tokens": params.min_tokens,
            "stop_sequences": _rectangle(params.stop_token_sequences),
            "think_end_token_id": request.think_end_token_id,
            "thinking_budget": thinking,
            "reply_budget": reply,
            "inject_token_ids": request.inject_token_ids,
            "repetition_penalty": params.repetition_penalty,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "logit_bias_token_ids": [token_id for token_id, _ in biases],
            "logit_bias": [bias for _, bias in biases],
            "bad_words": _rectangle(request.bad_words),
        }
        rows = {name: np.asarray(row, dtype=_dtype_of(name)) for name, row in asked.items()}
        return {
            name: row
            for name, row in rows.items()
            if name in self._tables or not bool((row == _OFF[name]).all())
        }

    def processors(
        self,
        slots: Tensor,
        prompt_lens: Tensor,
        mask_indices: Tensor,
        token_masks: Tensor | None = None,
    ) -> LogitsProcessors:
        """Return what changes logits, of the tables there are.

        Args:
            slots: [batch], int32. Of each request that asks for any of it; -1 for others.
            prompt_lens: [slots], int32.
            mask_indices: [rows of logits], int32; read with `token_masks` only.
            token_masks: [masks, words], int32; None: all tokens are allowed.
        """
        given = {name: self._tables.get(name) for name in (*_PROCESSORS, *_COUNTS)}
        given["stop_token_ids"] = self._tables.get("stop_token_ids")
        if given["stop_token_ids"] is None:
            given["min_tokens"] = None  # there is nothing to hold back
        if token_masks is not None:
            given |= {"allowed_token_mask": token_masks, "mask_indices": mask_indices}
        return LogitsProcessors(
            slots=slots, token_ids=self.token_ids, prompt_lens=prompt_lens, **given
        )

    def endings(self, *, all_rules: bool, counts: bool) -> dict[str, Tensor]:
        """What `commit` takes of the tables there are.

        Args:
            all_rules: not only stop tokens.
            counts: keep the counts of tokens.
        """
        names = ["stop_token_ids"]
        if all_rules:
            names += [*_ENDINGS, "min_tokens"]
        if counts:
            names += _COUNTS
        return {name: self._tables[name] for name in names if name in self._tables}

    def _write(self, name: str, slot: int, values: NDArray[Any]) -> None:
        """Writes a row unless it is there already."""
        table = self._tables[name]
        padded: NDArray[Any] = np.full(tuple(table.shape[1:]), _OFF[name], dtype=values.dtype)
        padded[tuple(slice(size) for size in values.shape)] = values
        content = padded.tobytes()
        if self._written.get((name, slot)) != content:
            table[slot] = torch.from_numpy(padded)
            self._written[name, slot] = content

    def _grown(self, name: str, shape: Sequence[int]) -> Tensor | None:
        """A table that a row of some shape fits, with room for the next; None: it does already."""
        old = self._tables.get(name)
        have = [0] * len(shape) if old is None else list(old.shape[1:])
        if old is not None and all(got >= want for got, want in zip(have, shape, strict=True)):
            return None
        # At least 4 entries, so that tables are seldom widened.
        sizes = [
            max(got, max(4, rung(want)) if want else 0)
            for got, want in zip(have, shape, strict=True)
        ]
        dtype = torch.from_numpy(np.empty(0, _dtype_of(name))).dtype
        table = torch.full((self._slots, *sizes), _OFF[name], dtype=dtype, device=self._device)
        if old is not None:
            table[(slice(None), *(slice(size) for size in have))] = old
        return table

    def _count(self, request: Request, token_ids: Tensor) -> None:
        """Counts a request's tokens, if its penalties need that.

        While there are counts, `commit` keeps those of all requests: the rows of others begin
        empty, and have room.
        """
        if "token_counts" not in self._tables:
            return
        ids, counts = (self._tables[name] for name in _COUNTS)
        slot = request.slot
        known = token_ids if request.params.has_penalties else token_ids[:0]
        count_tokens(
            known.to(self._device),
            min(request.prompt_len, len(known)),
            counted_token_ids=ids[slot],
            token_counts=counts[slot],
        )


def _dtype_of(name: str) -> Any:
    return np.float32 if isinstance(_OFF[name], float) else np.int32


def _rectangle(sequences: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    """Sequences below each other, padded with -1."""
    longest = max(map(len, sequences), default=0)
    rows: NDArray[np.int32] = np.full((len(sequences), longest), -1, dtype=np.int32)
    for row, sequence in zip(rows, sequences, strict=True):
        row[: len(sequence)] = sequence
    return rows
