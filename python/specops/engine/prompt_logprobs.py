# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of prompt tokens, computed chunk by chunk from the rows of steps.

A row of a prefill chunk gives the distribution of the token after it. Its logits come from the same
head as a decode row's, and the log-probability comes from the same op, `verify`, to which the
prompt's tokens are passed as drafts that are all accepted. So the bits equal those that plain
decoding reports for the same token.
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
from specops.api.outputs import PromptLogprobs, PromptScores
from specops.engine.device import Device, raise_reported
from specops.engine.models import Transformer
from specops.sampling import (
    AcceptPolicy,
    Drafts,
    SamplingTensors,
    VerifyOutputs,
    VerifyStrategy,
)

# Limits on the logits computed at a time. They bound the memory and do not change the results.
_MAX_LOGITS_BYTES = 32 << 20
_MAX_ROWS = 1024


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Consecutive rows of a request, each followed by a prompt token that has no logprob yet.

    Attributes:
        request_id: id of the request.
        slot: slot of the request.
        row: index of the first row, among the request's rows in a `Part`, else among all rows.
        position: position of the token after the first row.
        token_ids: the token after each row.
        num_alternatives: number of alternatives requested for each token.
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
        """Return the rows from position `begin` to `end` whose next tokens have no logprob yet.

        After a preemption, rows of tokens that have their logprobs already are computed again.
        Return None if there is no such row.
        """
        first, end = wanted.num_scored, min(end, len(wanted.token_ids) - 1)
        if end <= first:
            return None
        token_ids = wanted.token_ids[first + 1 : end + 1].tolist()
        count = wanted.num_alternatives
        return cls(request_id, slot, first - begin, first + 1, token_ids, count)

    def cut(self, count: int) -> "tuple[PromptRows, PromptRows]":
        """Split into the first `count` rows and the remaining rows."""
        first, rest = self.token_ids[:count], self.token_ids[count:]
        row, position = self.row + count, self.position + count
        return (
            replace(self, token_ids=first),
            replace(self, token_ids=rest, row=row, position=position),
        )


class PromptScorer:
    """Scorer that computes log-probabilities of prompt tokens from the rows of a step.

    Args:
        model: the model.
        device: the device of the steps.
        processed_logprobs: report logprobs after temperature and filters. Penalties and constraints
            on the output never apply to prompts.
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
        """Compute the scores of prompt tokens after a step, before the next step runs.

        Args:
            parts: for each part of the step: its number of rows, and the rows to score. The model
                still holds the hidden states of the step.
            sampling_of: returns the sampling parameters of some slots, by name.
            fail: function that ends the request with an id, called if its scores cannot be
                computed.

        Returns:
            Scores by request id, in several pieces for a long chunk.
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
                else:  # one at a time, to find the failing request; results are the same
                    tiles.extendleft([piece] for piece in reversed(tile))
                continue
            for piece, own in zip(tile, scores, strict=True):
                found.setdefault(piece.request_id, []).append(own)
        return found

    def _tiles(self, wanted: Sequence[PromptRows]) -> list[list[PromptRows]]:
        """Split rows into groups of at most `_max_rows`, counting one extra row per request."""
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
        """Compute the logits and scores of one group of rows."""
        rows, ends = [], [0]
        drafts = np.full((len(tile), max(len(piece.token_ids) for piece in tile)), -1, np.int32)
        for index, piece in enumerate(tile):
            # `verify` expects one row after the last draft; the token chosen there is ignored.
            last = piece.row + len(piece.token_ids) - 1
            rows += [*range(piece.row, last + 1), last]
            ends.append(len(rows))
            drafts[index, : len(piece.token_ids)] = piece.token_ids
        states = self._model.states(num_step_rows)
        logits = self._model.logits(batching.gather_output_rows(states, self._tensor(rows)))
        chains: dict[str, Any] = {
            "drafts": Drafts(self._tensor(ends), self._tensor(drafts)),
            "positions": self._tensor([piece.position for piece in tile]),
        }
        parameters = {name: self._tensor(values) for name, values in filters.items()}
        strategy = parameters.pop("strategy")
        if self._processed:
            seeds = strategy.new_zeros(len(tile), dtype=torch.int64)
            chains["sampling"] = SamplingTensors(**parameters, seeds=seeds)
        logprobs, ranks = self._verify(logits, chains, strategy)
        width = max(piece.num_alternatives for piece in tile)
        more = {"processed_logprobs": True, **chains} if self._processed else {}
        top_ids, top_logprobs, _ = sampling.top_logprobs(logits, width, **more)
        if self._device.is_async:  # on the CPU, ops raise at once
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
        self, logits: Tensor, chains: dict[str, Any], strategy: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return logprobs and ranks of the prompts' tokens, both [requests, max tokens + 1]."""
        drafts = chains["drafts"].token_ids
        logprobs = drafts.new_empty((len(drafts), drafts.shape[1] + 1), dtype=torch.float32)
        ranks = drafts.new_empty(logprobs.shape)
        greedy = VerifyStrategy.GREEDY
        strategy[strategy != int(greedy)] = int(VerifyStrategy.TARGET_MATCH)
        sampling.verify(
            logits,
            **chains,
            strategy=strategy if self._processed else greedy,
            policy=AcceptPolicy.ACCEPT_ALL,
            processed_logprobs=self._processed,
            outputs=VerifyOutputs(logprobs=logprobs, ranks=ranks),
        )
        return logprobs, ranks

    def _tensor(self, values: Any) -> Tensor:
        """Copy values to the device; lists become int32."""
        array = np.array(values, dtype=np.int32 if isinstance(values, list) else None, order="C")
        return torch.from_numpy(array).to(self._device.device)
