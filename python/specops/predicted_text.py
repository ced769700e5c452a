# SPDX-License-Identifier: Apache-2.0
"""Follows the text that a request is expected to produce, and drafts its continuation."""

from bisect import bisect_right
from collections.abc import Sequence

_LONGEST_MATCH = 8  # tokens before a place in the prediction that are compared
_SHORTEST_MATCH = 2
_MOST_PLACES = 256  # that are compared, on either side of the last known one


class PredictedText:
    """A prediction and the place in it that an output has reached.

    The place moves with every output token that is the predicted one. After another token it is
    lost, until the output's last tokens (at least two) occur in the prediction: of the longest such
    matches, up to eight tokens, the first after the last known place, else the first. The next 256
    places of the last two tokens and the first 256 are compared. Drafts are a function of
    prediction and output alone.

    Args:
        prediction: token ids.
        num_prompt_tokens: where a text's output begins.

    Attributes:
        match_len: how many of the output's last tokens the prediction has before the place: all
            those since it was found, and those by which it was found.
    """

    def __init__(self, prediction: Sequence[int], num_prompt_tokens: int) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self._prediction = list(prediction)
        self._num_seen = num_prompt_tokens
        self._place: int | None = 0
        self._last_place = 0
        self.match_len = 0
        self._ends: dict[tuple[int, ...], list[int]] = {}  # of each pair of tokens, ascending
        for end in range(_SHORTEST_MATCH, len(self._prediction) + 1):
            pair = tuple(self._prediction[end - _SHORTEST_MATCH : end])
            self._ends.setdefault(pair, []).append(end)

    def draft(self, text: Sequence[int], max_drafts: int) -> list[int]:
        """Advances to the end of a text, and drafts its continuation.

        Args:
            text: prompt and output, at least the text of the last call.
            max_drafts: maximum number of drafts.

        Returns:
            The drafts; none where the output has left the prediction.
        """
        for index in range(self._num_seen, len(text)):
            self._see(text, index)
        self._num_seen = len(text)
        if self._place is None:
            return []
        return self._prediction[self._place : self._place + max_drafts]

    def _see(self, text: Sequence[int], index: int) -> None:
        """Moves the place by one token of the output."""
        place, token = self._place, int(text[index])
        if place is not None and self._prediction[place : place + 1] == [token]:
            self._place = self._last_place = place + 1
            self.match_len += 1
            return
        self._place, self.match_len = self._found(text, index + 1)
        if self._place is not None:
            self._last_place = self._place

    def _found(self, text: Sequence[int], end: int) -> tuple[int | None, int]:
        """The place after the best match of the tokens before `end`, and the match's length."""
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
        """How many of the last tokens precede a place of the prediction."""
        length = 0
        while (
            length < min(len(last), place)
            and last[-1 - length] == (self._prediction[place - 1 - length])
        ):
            length += 1
        return length
