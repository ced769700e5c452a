# SPDX-License-Identifier: Apache-2.0
"""The log-probabilities of a prompt's tokens, and how a step's rows give them, chunk by chunk.

A row of a prefill chunk says what the model makes of the token after it. Its logits come from the
same head as a decode row's, and its log-probability from the same op, `verify`: the prompt's tokens
are its drafts, all accepted. So the bits are those that plain decoding reports for such a token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import specops
from specops import batching, sampling
from specops.engine.memory.device import Device, raise_reported
from specops.engine.models import Transformer
from specops.engine.outputs import TokenLogprob
from specops.sampling import AcceptPolicy, VerifyStrategy

# Of logits at a time. It bounds the memory, and changes no bit.
_MAX_LOGITS_BYTES = 32 << 20
_MAX_ROWS = 1024

# Of the next tokens of a prompt: logprobs [tokens]; ranks [tokens], 1 + how many logits were
# greater; ids of the likeliest tokens [tokens, at least as many as are kept], and their logprobs.
PromptScores: TypeAlias = Sequence[NDArray[Any]]


class PromptLogprobs(Sequence["TokenLogprob | None"]):
    """What the model made of each token of a prompt, given those before it.

    The first entry is None: nothing stands before the first token. An entry takes 8 bytes and 8
    for each alternative, since prompts are long.

    Args:
        token_ids: the prompt.
        num_alternatives: kept beside each token, the likeliest ones.
    """

    def __init__(self, token_ids: Sequence[int], num_alternatives: int) -> None:
        self.token_ids: NDArray[np.int32] = np.array(token_ids, dtype=np.int32)
        self.num_alternatives = num_alternatives
        self.num_scored = 0  # tokens that have one, without the first
        self._scores: tuple[NDArray[np.float32], NDArray[np.int32]] | None = None
        self._tops: tuple[NDArray[np.int32], NDArray[np.float32]] | None = None

    @property
    def num_missing(self) -> int:
        """Tokens that have none yet, without the first."""
        return len(self.token_ids) - 1 - self.num_scored

    def add(self, scores: PromptScores) -> None:
        """Adds those of the next tokens."""
        logprobs, ranks, top_ids, top_logprobs = scores
        count, width = len(self.token_ids) - 1, self.num_alternatives
        if self._scores is None or self._tops is None:  # not before the prompt's turn has come
            self._scores = np.empty(count, np.float32), np.empty(count, np.int32)
            self._tops = np.empty((count, width), np.int32), np.empty((count, width), np.float32)
        new = slice(self.num_scored, self.num_scored + len(logprobs))
        self._scores[0][new], self._scores[1][new] = logprobs, ranks
        self._tops[0][new], self._tops[1][new] = top_ids[:, :width], top_logprobs[:, :width]
        self.num_scored += len(logprobs)

    def packed(self) -> tuple[int, list[bytes]]:
        """All of it as plain data, for `unpacked`."""
        arrays = [self.token_ids, *(self._scores or ()), *(self._tops or ())]
        return self.num_alternatives, [one.tobytes() for one in arrays]

    @classmethod
    def unpacked(cls, packed: tuple[int, list[bytes]]) -> "PromptLogprobs":
        """The same again, of a prompt whose tokens all have one, or none."""
        num_alternatives, arrays = packed
        made = cls((), num_alternatives)
        made.token_ids = np.frombuffer(arrays[0], np.int32)
        if len(arrays) > 1:
            made.num_scored = count = len(made.token_ids) - 1
            shape = count, num_alternatives
            made._scores = np.frombuffer(arrays[1], np.float32), np.frombuffer(arrays[2], np.int32)
            ids, logprobs = arrays[3:]
            made._tops = (
                np.frombuffer(ids, np.int32).reshape(shape),
                np.frombuffer(logprobs, np.float32).reshape(shape),
            )
        return made

    def __len__(self) -> int:
        return len(self.token_ids)

    @overload
    def __getitem__(self, index: int) -> TokenLogprob | None: ...
    @overload
    def __getitem__(self, index: slice) -> "list[TokenLogprob | None]": ...

    def __getitem__(self, index: int | slice) -> "TokenLogprob | list[TokenLogprob | None] | None":
        """The entry of a token, or those of several."""
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        row = index % len(self) - 1
        if row < 0 or self._scores is None or self._tops is None:
            return None
        logprobs, ranks = self._scores
        ids, values = (one[row].tolist() for one in self._tops)
        return TokenLogprob(
            int(self.token_ids[row + 1]),
            float(logprobs[row]),
            tuple(zip(ids, values, strict=True)),
            int(ranks[row]),
        )


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Consecutive rows of a request, each in front of a prompt token that has no logprob yet.

    Attributes:
        request_id: whose they are.
        slot: likewise.
        row: the first; in a plan among the request's, else among the step's.
        position: of the token behind the first row.
        token_ids: the tokens behind them.
        num_alternatives: that are wanted beside each.
    """

    request_id: str
    slot: int
    row: int
    position: int
    token_ids: Sequence[int]
    num_alternatives: int

    def cut(self, count: int) -> "tuple[PromptRows, PromptRows]":
        """Its first `count` rows, and the others."""
        first, rest = self.token_ids[:count], self.token_ids[count:]
        row, position = self.row + count, self.position + count
        return (
            replace(self, token_ids=first),
            replace(self, token_ids=rest, row=row, position=position),
        )


class PromptScorer:
    """Computes what the rows of a step say of prompts.

    Args:
        model: on the device.
        device: where steps run.
        processed_logprobs: logprobs are of what temperature and filters leave. Penalties and all
            that constrains an output are no prompt's affair.
    """

    def __init__(self, model: Transformer, device: Device, *, processed_logprobs: bool) -> None:
        self._model = model
        self._device = device
        self._processed = processed_logprobs
        row_bytes = 4 * model.config.vocab_size
        self._max_rows = max(2, min(_MAX_ROWS, _MAX_LOGITS_BYTES // row_bytes))

    def score(
        self,
        wanted: Sequence[PromptRows],
        num_step_rows: int,
        sampling_of: Callable[[Sequence[int]], dict[str, NDArray[Any]]],
        fail: Callable[[str, Exception], None],
    ) -> dict[str, list[PromptScores]]:
        """Computes what a step's rows say of prompts, when it has run and before the next one.

        Args:
            wanted: the rows, by their numbers in the step.
            num_step_rows: of the step, whose states the model still has.
            sampling_of: the sampling parameters of some slots, by name.
            fail: ends the request of an id, where its own cannot be computed.

        Returns:
            By request id; those of long chunks come in several pieces.
        """
        found: dict[str, list[PromptScores]] = {}
        for tile in self._tiles(wanted):
            try:
                filters = sampling_of([piece.slot for piece in tile])
                scores = self._scores(tile, num_step_rows, filters)
            except Exception as error:
                for piece in tile:
                    fail(piece.request_id, error)
                continue
            for piece, own in zip(tile, scores, strict=True):
                found.setdefault(piece.request_id, []).append(own)
        return found

    def _tiles(self, wanted: Sequence[PromptRows]) -> list[list[PromptRows]]:
        """Cuts rows into groups of few enough; a request needs one more than it has."""
        tiles: list[list[PromptRows]] = []
        room = 0
        for rows in wanted:
            rest = rows
            while rest.token_ids:
                if room < 2:
                    tiles.append([])
                    room = self._max_rows
                now, rest = rest.cut(min(len(rest.token_ids), room - 1))
                tiles[-1].append(now)
                room -= len(now.token_ids) + 1
        return tiles

    def _scores(
        self, tile: Sequence[PromptRows], num_step_rows: int, filters: dict[str, NDArray[Any]]
    ) -> list[PromptScores]:
        """Computes the logits of so many rows as are in memory at a time."""
        rows, ends = [], [0]
        drafts = np.full((len(tile), max(len(piece.token_ids) for piece in tile)), -1, np.int32)
        for index, piece in enumerate(tile):
            # A chain has a row more than drafts; whatever that one chooses, nobody reads it.
            last = piece.row + len(piece.token_ids) - 1
            rows += [*range(piece.row, last + 1), last]
            ends.append(len(rows))
            drafts[index, : len(piece.token_ids)] = piece.token_ids
        states = self._model.states(num_step_rows)
        logits = self._model.logits(batching.gather_output_rows(states, self._tensor(rows)))
        chains: dict[str, Any] = {
            "output_indptr": self._tensor(ends),
            "draft_token_ids": self._tensor(drafts),
            "positions": self._tensor([piece.position for piece in tile]),
        }
        parameters = {name: self._tensor(values) for name, values in filters.items()}
        logprobs, ranks = self._verify(logits, chains, dict(parameters))
        del parameters["strategy"]
        width = max(piece.num_alternatives for piece in tile)
        more = {"processed_logprobs": True, **chains, **parameters} if self._processed else {}
        top_ids, top_logprobs, _ = sampling.top_logprobs(logits, width, **more)
        if self._device.is_async:  # on the CPU, ops have raised themselves
            raise_reported(int(specops.take_error(self._tensor([0])).item()))
        found = [one.cpu().numpy() for one in (logprobs, ranks, top_ids, top_logprobs)]
        return [
            [
                *(one[index, : len(piece.token_ids)] for one in found[:2]),
                *(one[ends[index] : ends[index] + len(piece.token_ids)] for one in found[2:]),
            ]
            for index, piece in enumerate(tile)
        ]

    def _verify(
        self, logits: Tensor, chains: dict[str, Any], parameters: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Logprobs and ranks of the prompts' tokens, [requests, most tokens + 1]."""
        drafts = chains["draft_token_ids"]
        logprobs = drafts.new_empty((len(drafts), drafts.shape[1] + 1), dtype=torch.float32)
        ranks = drafts.new_empty(logprobs.shape)
        more: dict[str, Any] = {"strategy": VerifyStrategy.GREEDY}
        if self._processed:
            greedy, strategy = int(VerifyStrategy.GREEDY), parameters["strategy"]
            strategy[strategy != greedy] = int(VerifyStrategy.TARGET_MATCH)
            seeds = drafts.new_zeros(len(drafts), dtype=torch.int64)
            more = {**parameters, "processed_logprobs": True, "seeds": seeds}
        sampling.verify(
            logits,
            **chains,
            policy=AcceptPolicy.ACCEPT_ALL,
            logprobs=logprobs,
            ranks=ranks,
            **more,
        )
        return logprobs, ranks

    def _tensor(self, values: Any) -> Tensor:
        """On the device; lists as int32."""
        array = np.array(values, dtype=np.int32 if isinstance(values, list) else None, order="C")
        return torch.from_numpy(array).to(self._device.device)
