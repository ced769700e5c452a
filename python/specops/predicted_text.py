# SPDX-License-Identifier: Apache-2.0
"""Drafts from a predicted output: the continuation of the prediction after the current output."""

from bisect import bisect_right
from collections.abc import Sequence

_LONGEST_MATCH = 8  # tokens before a place in the prediction that are compared
_SHORTEST_MATCH = 2
_MOST_PLACES = 256  # places compared after the last known one, and from the beginning


class PredictedText:
    """A prediction and the place in it that an output has reached.

    The place advances with every output token that equals the predicted one. After any other token
    there is no place, and so no draft, until the last tokens of the output (at least two) occur in
    the prediction. The place is then after the longest match of up to eight tokens; of equally long
    matches, the first after the last known place or, if there is none, the first in the prediction.
    Only the next 256 and the first 256 occurrences of the last two tokens are compared. Drafts
    depend only on the prediction and the output.

    Args:
        prediction: token ids.
        num_prompt_tokens: index at which the output begins in a text.

    Attributes:
        match_len: number of the output's last tokens that precede the place in the prediction: the
            match that found the place, plus all tokens since.
    """

    def __init__(self, prediction: Sequence[int], num_prompt_tokens: int) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self._prediction = list(prediction)
        self._num_seen = num_prompt_tokens
        self._place: int | None = 0
        self._last_place = 0
        self.match_len = 0
        self._ends: dict[tuple[int, ...], list[int]] = {}  # ends of each token pair, ascending
        for end in range(_SHORTEST_MATCH, len(self._prediction) + 1):
            pair = tuple(self._prediction[end - _SHORTEST_MATCH : end])
            self._ends.setdefault(pair, []).append(end)

    def draft(self, text: Sequence[int], max_drafts: int) -> list[int]:
        """Advance to the end of a text, and draft its continuation.

        Args:
            text: prompt and output; it extends the text of the last call.
            max_drafts: maximum number of drafts.

        Returns:
            The drafts; empty if the output has left the prediction.
        """
        for index in range(self._num_seen, len(text)):
            self._see(text, index)
        self._num_seen = len(text)
        if self._place is None:
            return []
        return self._prediction[self._place : self._place + max_drafts]

    def _see(self, text: Sequence[int], index: int) -> None:
        """Advance the place if the prediction continues with this token; else find a new place."""
        place, token = self._place, int(text[index])
        if place is not None and self._prediction[place : place + 1] == [token]:
            self._place = self._last_place = place + 1
            self.match_len += 1
            return
        self._place, self.match_len = self._found(text, index + 1)
        if self._place is not None:
            self._last_place = self._place

    def _found(self, text: Sequence[int], end: int) -> tuple[int | None, int]:
        """Return the place after the best match of the tokens before `end`, and its length."""
        if end - self.num_prompt_tokens < _SHORTEST_MATCH:
            return None, 0
        first = max(self.num_prompt_tokens, end - _LONGEST_MATCH)
        last = [int(token) for token in text[first:end]]
        places = self._ends.get(tuple(last[-_SHORTEST_MATCH:]), [])
        behind = bisect_right(places, self._last_place)
        found, longest = None, 0
        for place in (
            *places[behind : behind + _MOST_PLACES],
            *places[: min(behind, _MOST_PLACES)],
        ):
            length = self._length_of_match(last, place)
            if length > longest:
                found, longest = place, length
        return found, longest

    def _length_of_match(self, last: Sequence[int], place: int) -> int:
        """Return how many of the last tokens equal those before a place of the prediction."""
        length = 0
        while (
            length < min(len(last), place)
            and last[-1 - length] == (self._prediction[place - 1 - length])
        ):
            length += 1
        return length
