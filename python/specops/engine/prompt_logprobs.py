# SPDX-License-Identifier: Apache-2.0
"""How a step's rows give the log-probabilities of a prompt's tokens, chunk by chunk.

A row of a prefill chunk says what the model makes of the token after it. Its logits come from the
same head as a decode row's, and its log-probability from the same op, `verify`: the prompt's tokens
are its drafts, all accepted. So the bits are those that plain decoding reports for such a token.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import specops
from specops import batching, sampling
from specops.engine.device import Device, raise_reported
from specops.engine.models import Transformer
from specops.engine.outputs import PromptLogprobs, PromptScores
from specops.sampling import AcceptPolicy, VerifyStrategy

# Of logits at a time. It bounds the memory, and changes no bit.
_MAX_LOGITS_BYTES = 32 << 20
_MAX_ROWS = 1024


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

    @classmethod
    def missing(
        cls, request_id: str, slot: int, wanted: PromptLogprobs, begin: int, end: int
    ) -> "PromptRows | None":
        """Those of the rows from position `begin` to `end` whose prompt tokens have no logprob yet.

        After a preemption, rows of tokens that have theirs come again.
        """
        first, end = wanted.num_scored, min(end, len(wanted.token_ids) - 1)
        if end <= first:
            return None
        token_ids = wanted.token_ids[first + 1 : end + 1].tolist()
        count = wanted.num_alternatives
        return cls(request_id, slot, first - begin, first + 1, token_ids, count)

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
        parts: Iterable[tuple[int, PromptRows | None]],
        sampling_of: Callable[[Sequence[int]], dict[str, NDArray[Any]]],
        fail: Callable[[str, Exception], None],
    ) -> dict[str, list[PromptScores]]:
        """Computes what a step's rows say of prompts, when it has run and before the next one.

        Args:
            parts: of the step, of which the model still has the states: each one's number of rows,
                and the wanted ones among them.
            sampling_of: the sampling parameters of some slots, by name.
            fail: ends the request of an id, where its own cannot be computed.

        Returns:
            By request id; those of long chunks come in several pieces.
        """
        found: dict[str, list[PromptScores]] = {}
        num_step_rows, wanted = 0, []
        for num_rows, rows in parts:
            if rows is not None:
                wanted.append(replace(rows, row=num_step_rows + rows.row))
            num_step_rows += num_rows
        tiles = deque(self._tiles(wanted))
        while tiles:
            tile = tiles.popleft()
            try:
                filters = sampling_of([piece.slot for piece in tile])
                scores = self._scores(tile, num_step_rows, filters)
            except Exception as error:
                if len(tile) == 1:
                    fail(tile[0].request_id, error)
                else:  # each alone shows whose fault it is, and changes no bit of the others
                    tiles.extendleft([piece] for piece in reversed(tile))
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
