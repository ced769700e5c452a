# SPDX-License-Identifier: Apache-2.0
"""Per-slot tables on the device: the tokens of each running request and its sampling options.

A table has a row per slot and a fixed address, so that steps can be captured. It is created when a
request needs it for the first time. When a table is created or widened, all steps must be rebuilt.
The host writes a row when a request gets its slot; the device updates some rows later.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specops.engine.memory.step_shape import bucket
from specops.engine.request import Request
from specops.sampling import EndingRules, LogitsProcessors, TokenCounts, count_tokens

# Value of unused entries, by table, for tables that end requests, that change logits, and in which
# `commit` counts tokens.
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
    """Per-slot tables, and a record of the rows that the host has written to them.

    Args:
        slots: number of rows of each table.
        max_len: maximum number of tokens of a request.
        vocab_size: the model's vocabulary size.
        device: device of the tables.

    Attributes:
        token_ids: [slots, max_len], int32. Prompt and output of each request; `commit` appends to
            them.
    """

    def __init__(self, slots: int, max_len: int, vocab_size: int, device: torch.device) -> None:
        self._slots = slots
        self._vocab_size = vocab_size
        self._device = device
        self._tables: dict[str, Tensor] = {}
        # Bytes of the last row written, by table and slot: equal rows are not written again.
        self._written: dict[tuple[str, int], bytes] = {}
        self._max_lens = [0] * slots
        self.token_ids = torch.zeros((slots, max_len), dtype=torch.int32, device=device)

    def start(self, request: Request) -> bool:
        """Write the rows of a request that got a slot, including all its tokens so far.

        All missing tables are allocated before any of them is stored. So if memory runs out, no
        table exists without the tables that are used together with it.

        Returns:
            Whether a table was created or moved.
        """
        slot = request.slot
        token_ids = torch.tensor(request.token_ids, dtype=torch.int32)
        self.token_ids[slot, : len(token_ids)] = token_ids
        self._max_lens[slot] = request.max_len
        rows = self._rows_of(request)
        grown = {name: self._grown(name, row.shape) for name, row in rows.items()}
        if request.params.has_penalties or "token_counts" in self._tables:
            # `commit` requires entries for all of a step's tokens, but does not use the last one.
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
        """Return the rows to write for a request, by table name.

        An option that the request does not use has a row only if its table already exists.
        """
        params = request.params
        # Do not create a table for biases of 0, which have no effect.
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
        """Return the logits processors that the existing tables define.

        Args:
            slots: [batch], int32. Slot of each request; -1 if it needs no processors.
            prompt_lens: [slots], int32.
            mask_indices: [rows of logits], int32; read only together with `token_masks`.
            token_masks: [masks, words], int32; None: all tokens are allowed.
        """
        given = {name: self._tables.get(name) for name in (*_PROCESSORS, *_COUNTS)}
        given["stop_token_ids"] = self._tables.get("stop_token_ids")
        if given["stop_token_ids"] is None:
            given["min_tokens"] = None  # without stop tokens, it has no effect
        if token_masks is not None:
            given |= {"allowed_token_mask": token_masks, "mask_indices": mask_indices}
        return LogitsProcessors(
            slots=slots, token_ids=self.token_ids, prompt_lens=prompt_lens, **given
        )

    def endings(self, max_lens: Tensor, *, all_rules: bool) -> EndingRules:
        """Return the arguments of `commit` that end requests, from the tables that exist.

        Without `all_rules`, only the length limit and the stop tokens are included.
        """
        names = ["stop_token_ids", *(("min_tokens", *_ENDINGS) if all_rules else ())]
        given = {name: self._tables[name] for name in names if name in self._tables}
        return EndingRules(max_lens=max_lens, **given)

    def counts(self) -> TokenCounts | None:
        """Return the token counts, or None if no request has needed them."""
        has_counts = "token_counts" in self._tables
        return TokenCounts(*(self._tables[name] for name in _COUNTS)) if has_counts else None

    def _write(self, name: str, slot: int, values: NDArray[Any]) -> None:
        """Write a row of a table unless the table holds it already."""
        table = self._tables[name]
        padded: NDArray[Any] = np.full(tuple(table.shape[1:]), _OFF[name], dtype=values.dtype)
        padded[tuple(slice(size) for size in values.shape)] = values
        content = padded.tobytes()
        if self._written.get((name, slot)) != content:
            table[slot] = torch.from_numpy(padded)
            self._written[name, slot] = content

    def _grown(self, name: str, shape: Sequence[int]) -> Tensor | None:
        """Return a new table that fits rows of `shape`; None if the present table fits them."""
        old = self._tables.get(name)
        have = [0] * len(shape) if old is None else list(old.shape[1:])
        if old is not None and all(got >= want for got, want in zip(have, shape, strict=True)):
            return None
        # At least 4 entries, so that tables are rarely widened.
        sizes = [
            max(got, max(4, bucket(want)) if want else 0)
            for got, want in zip(have, shape, strict=True)
        ]
        dtype = torch.from_numpy(np.empty(0, _dtype_of(name))).dtype
        table = torch.full((self._slots, *sizes), _OFF[name], dtype=dtype, device=self._device)
        if old is not None:
            table[(slice(None), *(slice(size) for size in have))] = old
        return table

    def _count(self, request: Request, token_ids: Tensor) -> None:
        """Count a request's tokens if its penalties need the counts.

        Once count tables exist, `commit` updates them for all requests, so a request without
        penalties starts with an empty row.
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
    """Return an array with the sequences as rows, padded with -1."""
    longest = max(map(len, sequences), default=0)
    rows: NDArray[np.int32] = np.full((len(sequences), longest), -1, dtype=np.int32)
    for row, sequence in zip(rows, sequences, strict=True):
        row[: len(sequence)] = sequence
    return rows
