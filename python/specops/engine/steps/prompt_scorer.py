# SPDX-License-Identifier: Apache-2.0
"""Computes log-probabilities of prompt tokens, for requests that ask for them.

A row of a prefill chunk says what the model makes of the token after it. Its logits come from the
same head as a decode row's, and its log-probability from the same op, `verify`: the prompt's tokens
are its drafts, all accepted. So the bits are those that plain decoding reports for such a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import specops
from specops import batching, sampling
from specops.engine.memory.device import Device, raise_reported
from specops.engine.models import Transformer
from specops.engine.plan import Plan
from specops.engine.request import Request
from specops.sampling import AcceptPolicy, VerifyStrategy

# Of logits at a time. It bounds the memory, and changes no bit.
_MAX_LOGITS_BYTES = 32 << 20
_MAX_ROWS = 1024


@dataclass(frozen=True, slots=True)
class _Piece:
    """Consecutive rows of a step, each in front of a prompt token that has no logprob yet."""

    request: Request
    row: int  # of the step, the first
    begin: int  # in the text, the first row's token
    count: int

    def parts(self, room: int) -> "tuple[_Piece, _Piece]":
        """Its first `room` rows, and the others."""
        rest = self.count - room
        return (
            _Piece(self.request, self.row, self.begin, room),
            _Piece(self.request, self.row + room, self.begin + room, rest),
        )


class PromptScorer:
    """Looks at the rows of steps.

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

    def score(self, plan: Plan) -> None:
        """Adds what a step's rows say of prompts; called when it has run, before the next one.

        Where that cannot be computed, the requests that want it fail.

        Args:
            plan: of the step, whose states the model still has.
        """
        first, pieces = 0, []
        for part in plan.parts:
            wanted = part.request.prompt_logprobs
            if wanted is not None and wanted.num_missing:
                # After a preemption, rows of tokens that have theirs come again.
                begin = wanted.num_scored
                end = min(part.request.num_computed + part.num_rows, part.request.prompt_len - 1)
                if end > begin:
                    row = first + begin - part.request.num_computed
                    pieces.append(_Piece(part.request, row, begin, end - begin))
            first += part.num_rows
        for tile in self._tiles(pieces):
            try:
                scores = self._scores(tile, first)
            except Exception as error:
                for piece in tile:
                    plan.fail(piece.request, error)
                continue
            for piece, own in zip(tile, scores, strict=True):
                wanted = piece.request.prompt_logprobs
                assert wanted is not None
                try:
                    wanted.add(*own)
                except Exception as error:
                    plan.fail(piece.request, error)

    def _tiles(self, pieces: Sequence[_Piece]) -> list[list[_Piece]]:
        """Cuts the pieces into groups of few enough rows; a piece needs one more than it has."""
        tiles: list[list[_Piece]] = []
        room = 0
        for piece in pieces:
            rest = piece
            while rest.count:
                if room < 2:
                    tiles.append([])
                    room = self._max_rows
                now, rest = rest.parts(min(rest.count, room - 1))
                tiles[-1].append(now)
                room -= now.count + 1
        return tiles

    def _scores(self, tile: Sequence[_Piece], num_step_rows: int) -> list[list[NDArray[Any]]]:
        """Computes the logits of so many rows as are in memory at a time.

        Returns:
            What `PromptLogprobs.add` takes, of each piece.
        """
        rows, ends = [], [0]
        drafts = np.full((len(tile), max(piece.count for piece in tile)), -1, np.int32)
        for index, piece in enumerate(tile):
            # A chain has a row more than drafts; whatever that one chooses, nobody reads it.
            rows += [*range(piece.row, piece.row + piece.count), piece.row + piece.count - 1]
            ends.append(len(rows))
            after = piece.begin + 1
            drafts[index, : piece.count] = piece.request.token_ids[after : after + piece.count]
        states = self._model.states(num_step_rows)
        logits = self._model.logits(batching.gather_output_rows(states, self._tensor(rows)))
        chains: dict[str, Any] = {
            "output_indptr": self._tensor(ends),
            "draft_token_ids": torch.from_numpy(drafts).to(self._device.device),
            "positions": self._tensor([piece.begin + 1 for piece in tile]),
        }
        logprobs, ranks = self._verify(tile, logits, chains)
        top_ids, top_logprobs = self._tops(tile, logits, chains)
        self._check()
        found = [one.cpu().numpy() for one in (logprobs, ranks, top_ids, top_logprobs)]
        scores = []
        for index, piece in enumerate(tile):
            tokens, rows_of = slice(piece.count), slice(ends[index], ends[index] + piece.count)
            scores.append([*(one[index, tokens] for one in found[:2])])
            scores[-1] += (one[rows_of] for one in found[2:])
        return scores

    def _verify(
        self, tile: Sequence[_Piece], logits: Tensor, chains: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Logprobs and ranks of the prompts' tokens, [pieces, most tokens + 1]."""
        drafts = chains["draft_token_ids"]
        shape = (drafts.shape[0], drafts.shape[1] + 1)
        logprobs = drafts.new_empty(shape, dtype=torch.float32)
        ranks = drafts.new_empty(shape)
        more: dict[str, Any] = {"strategy": VerifyStrategy.GREEDY}
        if self._processed:
            strategies = [_strategy(piece.request) for piece in tile]
            more = {"strategy": self._tensor(strategies), "processed_logprobs": True}
            more["seeds"] = drafts.new_zeros(len(tile), dtype=torch.int64)
            more |= self._filters(tile)
        sampling.verify(
            logits,
            **chains,
            policy=AcceptPolicy.ACCEPT_ALL,
            logprobs=logprobs,
            ranks=ranks,
            **more,
        )
        return logprobs, ranks

    def _tops(
        self, tile: Sequence[_Piece], logits: Tensor, chains: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """The likeliest tokens of every row, as many as anybody wants."""
        wanted = [piece.request.prompt_logprobs for piece in tile]
        width = max(one.num_alternatives for one in wanted if one is not None)
        more: dict[str, Any] = {}
        if self._processed:
            more = {"processed_logprobs": True, **chains, **self._filters(tile)}
        token_ids, logprobs, _ = sampling.top_logprobs(logits, width, **more)
        return token_ids, logprobs

    def _filters(self, tile: Sequence[_Piece]) -> dict[str, Tensor]:
        """The parameters of what a token would have been drawn from."""
        params = [piece.request.params for piece in tile]
        device = self._device.device
        filters = {
            name: torch.tensor(
                [getattr(one, name) for one in params], dtype=torch.float32, device=device
            )
            for name in ("temperature", "top_p", "min_p", "typical_p")
        }
        return {**filters, "top_k": self._tensor([one.top_k for one in params])}

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._device.device)

    def _check(self) -> None:
        """Raises what a kernel has met; on the CPU, ops have raised themselves."""
        if self._device.is_async:
            raise_reported(int(specops.take_error(self._tensor([0])).item()))


def _strategy(request: Request) -> VerifyStrategy:
    """How the request's tokens are chosen, as far as the distribution of a row goes."""
    is_greedy = request.speculative.verify_strategy == "greedy"
    return VerifyStrategy.GREEDY if is_greedy else VerifyStrategy.TARGET_MATCH
