# SPDX-License-Identifier: Apache-2.0
"""The log-probabilities of a prompt's tokens, as they are found chunk by chunk."""

from collections.abc import Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

from specops.engine.outputs import TokenLogprob


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

    def add(
        self,
        logprobs: NDArray[np.float32],
        ranks: NDArray[np.int32],
        top_ids: NDArray[np.int32],
        top_logprobs: NDArray[np.float32],
    ) -> None:
        """Adds those of the next tokens.

        Args:
            logprobs: [tokens].
            ranks: [tokens], 1 + how many logits were greater.
            top_ids: [tokens, at least num_alternatives], likeliest first.
            top_logprobs: of these.
        """
        count, width = len(self.token_ids) - 1, self.num_alternatives
        if self._scores is None or self._tops is None:  # not before the prompt's turn has come
            self._scores = np.empty(count, np.float32), np.empty(count, np.int32)
            self._tops = np.empty((count, width), np.int32), np.empty((count, width), np.float32)
        new = slice(self.num_scored, self.num_scored + len(logprobs))
        self._scores[0][new], self._scores[1][new] = logprobs, ranks
        self._tops[0][new], self._tops[1][new] = top_ids[:, :width], top_logprobs[:, :width]
        self.num_scored += len(logprobs)

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
