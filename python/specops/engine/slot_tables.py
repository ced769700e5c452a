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

from specops.engine.request import Request
from specops.sampling import LogitsProcessors, count_tokens

# By table: what a row holds that asks for nothing.
_OFF: dict[str, float] = {
    "stop_token_ids": -1,
    "min_tokens": 0,
    "stop_sequences": -1,
    "think_end_token_id": -1,
    "thinking_budget": -1,
    "reply_budget": -1,
    "inject_token_ids": -1,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias_token_ids": -1,
    "logit_bias": 0.0,
    "bad_words": -1,
    "allowed_token_mask": 0,
}
_COUNTS = ("counted_token_ids", "token_counts")
_ENDINGS = (
    "stop_sequences",
    "think_end_token_id",
    "thinking_budget",
    "reply_budget",
    "inject_token_ids",
)
_PROCESSORS = (
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias_token_ids",
    "logit_bias",
    "bad_words",
    "min_tokens",
    "allowed_token_mask",
)


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
        self._has_moved = False
        self.token_ids = torch.zeros((slots, max_len), dtype=torch.int32, device=device)

    def start(self, request: Request) -> bool:
        """Writes the rows of a request that got its slot, as they are after all its tokens so far.

        Returns:
            Whether a table was made or moved.
        """
        self._has_moved = False
        params, slot = request.params, request.slot
        token_ids = torch.tensor(request.token_ids, dtype=torch.int32)
        self.token_ids[slot, : len(token_ids)] = token_ids
        self._max_lens[slot] = request.max_len
        self._write("stop_token_ids", slot, request.stop_token_ids)
        self._write("min_tokens", slot, params.min_tokens)
        self._write("stop_sequences", slot, _rectangle(params.stop_token_sequences))
        self._write("think_end_token_id", slot, request.think_end_token_id)
        self._write("thinking_budget", slot, _or_off(params.reasoning_max_tokens))
        self._write("reply_budget", slot, _or_off(params.response_max_tokens))
        self._write("inject_token_ids", slot, request.inject_token_ids)
        self._write("repetition_penalty", slot, params.repetition_penalty)
        self._write("presence_penalty", slot, params.presence_penalty)
        self._write("frequency_penalty", slot, params.frequency_penalty)
        # One that is 0 asks for nothing, and would have no row in a table that is not there.
        biases = [(token_id, bias) for token_id, bias in params.bias() if np.float32(bias)]
        self._write("logit_bias_token_ids", slot, [token_id for token_id, _ in biases])
        self._write("logit_bias", slot, [bias for _, bias in biases])
        self._write("bad_words", slot, _rectangle(request.bad_words))
        if params.allowed_token_ids is not None:
            mask = token_mask(params.allowed_token_ids, self._vocab_size)
            self._write("allowed_token_mask", slot, mask)
        self._count(request, token_ids)
        return self._has_moved

    def processors(
        self,
        slots: Tensor,
        prompt_lens: Tensor,
        mask_indices: Tensor,
        token_masks: Tensor | None = None,
    ) -> Any:
        """What changes logits, of the tables there are.

        Args:
            slots: [batch], int32. Of each request that asks for any of it; -1 for others.
            prompt_lens: [slots], int32.
            mask_indices: [rows of logits], int32.
            token_masks: [masks, words], int32. Those of the step, in the place of the table's.
        """
        given = {name: self._tables.get(name) for name in (*_PROCESSORS, *_COUNTS)}
        given["stop_token_ids"] = self._tables.get("stop_token_ids")
        if given["stop_token_ids"] is None:
            given["min_tokens"] = None  # there is nothing to hold back
        if token_masks is not None:
            given["allowed_token_mask"] = token_masks
        if given["allowed_token_mask"] is not None:
            given["mask_indices"] = mask_indices
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

    def _write(self, name: str, slot: int, row: Any) -> None:
        """Writes a row unless it is there already, or asks for nothing and there is no table."""
        off = _OFF[name]
        dtype: Any = np.float32 if isinstance(off, float) else np.int32
        values: NDArray[Any] = np.asarray(row, dtype=dtype)
        table = self._tables.get(name)
        if table is None and bool((values == off).all()):
            return
        if table is None or any(
            have < want for have, want in zip(table.shape[1:], values.shape, strict=True)
        ):
            table = self._grow(name, values.shape, off)
        padded: NDArray[Any] = np.full(tuple(table.shape[1:]), off, dtype=dtype)
        padded[tuple(slice(size) for size in values.shape)] = values
        content = padded.tobytes()
        if self._written.get((name, slot)) != content:
            self._written[name, slot] = content
            table[slot] = torch.from_numpy(padded)

    def _grow(self, name: str, shape: Sequence[int], off: float) -> Tensor:
        """Makes a table, or one with longer rows, of lengths that leave room for the next."""
        old = self._tables.get(name)
        have = [0] * len(shape) if old is None else list(old.shape[1:])
        sizes = [max(got, _rung(want)) for got, want in zip(have, shape, strict=True)]
        if name == "allowed_token_mask":
            sizes = list(shape)
        dtype = torch.float32 if isinstance(off, float) else torch.int32
        table = torch.full((self._slots, *sizes), off, dtype=dtype, device=self._device)
        if old is not None:
            table[(slice(None), *(slice(size) for size in have))] = old
        for slot in range(self._slots):
            self._written.pop((name, slot), None)
        self._tables[name] = table
        self._has_moved = True
        return table

    def _count(self, request: Request, token_ids: Tensor) -> None:
        """Counts a request's tokens, if its penalties need that.

        While there are counts, `commit` keeps those of all requests: the rows of others begin
        empty, and have room.
        """
        ids, counts = (self._tables.get(name) for name in _COUNTS)
        if ids is None and not request.params.has_penalties:
            return
        # `commit` wants room for a whole step's tokens, but for the last of which it is not used.
        room = min(max(self._max_lens), self._vocab_size)
        if ids is None or ids.shape[1] < room:
            ids = self._grow("counted_token_ids", [room], -1)
            counts = self._grow("token_counts", [room], 0)
        assert counts is not None
        slot = request.slot
        known = token_ids if request.params.has_penalties else token_ids[:0]
        count_tokens(
            known.to(self._device),
            min(request.prompt_len, len(known)),
            counted_token_ids=ids[slot],
            token_counts=counts[slot],
        )


def token_mask(token_ids: Sequence[int], vocab_size: int) -> NDArray[np.int32]:
    """One bit per token of a vocabulary, set for these."""
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _rung(size: int) -> int:
    """The next power of two, at least 4, so that tables are seldom widened."""
    return max(4, 1 << (size - 1).bit_length()) if size else 0


def _or_off(value: int | None) -> int:
    return -1 if value is None else value


def _rectangle(sequences: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    """Sequences below each other, padded with -1."""
    longest = max(map(len, sequences), default=0)
    rows: NDArray[np.int32] = np.full((len(sequences), longest), -1, dtype=np.int32)
    for row, sequence in zip(rows, sequences, strict=True):
        row[: len(sequence)] = sequence
    return rows
