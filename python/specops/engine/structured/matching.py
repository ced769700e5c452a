# SPDX-License-Identifier: Apache-2.0
"""A grammar, and where the text of one request stands in it.

llguidance's matcher is fed by four rules. It takes the tokens that a request has committed, and
drafts only until they are taken back in the same call. Past its end it is fed nothing: a call that
it refuses there would break it for good. No special token ever reaches it. And where a bound is met
among drafts, it is made anew from the committed tokens.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from specops.engine.structured.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher


class Grammar:
    """A compiled grammar, which any number of requests share.

    Args:
        matcher: at the beginning; nobody else uses it.
        vocabulary: of the model.
    """

    def __init__(self, matcher: "LLMatcher", vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._matcher = matcher

    def why_unusable(self) -> str:
        """Why no text can come of it; empty, if one can. Asked once, before it is shared."""
        matcher = self._matcher.deep_copy()
        allowed = np.frombuffer(matcher.compute_bitmask(), dtype=np.int32)
        if matcher.is_error():
            return matcher.get_error() or "it admits no text"
        words, end = self.vocabulary.num_words, self.vocabulary.end
        if (allowed[:words] & self.vocabulary.text_mask).any() or allowed[end >> 5] >> (
            end & 31
        ) & 1:
            return ""
        return "no token of the model's vocabulary can begin it"

    def new_matcher(self) -> "LLMatcher":
        """A matcher at the beginning of a text."""
        return self._matcher.deep_copy()


class GrammarState:
    """Where one request stands.

    Args:
        grammar: of its output.
        end_token_ids: the tokens that end its output; each may stand where the text may end.
        allowed_token_ids: the only tokens it may have beside; None: no others are excluded.
    """

    def __init__(
        self,
        grammar: Grammar,
        end_token_ids: Iterable[int],
        allowed_token_ids: Sequence[int] | None = None,
    ) -> None:
        self.vocabulary = vocabulary = grammar.vocabulary
        self.matcher = grammar.new_matcher()
        self._grammar = grammar
        self._taken: list[int] = []
        self._text, self._ends = vocabulary.text_mask, vocabulary.mask(end_token_ids)
        self._always: NDArray[np.int32] | None = None
        if allowed_token_ids is not None:
            self._always = vocabulary.mask(allowed_token_ids)
            self._text, self._ends = self._text & self._always, self._ends & self._always

    @property
    def is_complete(self) -> bool:
        """Whether the text is whole and nothing can follow."""
        return self.matcher.is_stopped() and not self.matcher.is_error()

    @property
    def may_end(self) -> bool:
        """Whether the text is whole, and something may follow."""
        return not self.matcher.is_error() and self.matcher.is_accepting()

    def take(self, token_id: int) -> bool:
        """Takes the next token of the output; False where it does not fit, and nothing changes.

        That is so where nothing fits, or a bound was met: then a step has chosen any token.
        """
        if not self.advance(token_id):
            if self.matcher.is_error():
                self.restart()
            return False
        self._taken.append(token_id)
        return True

    def fits_end(self, token_id: int) -> bool:
        """Whether a token that ends the output may stand here: at an end, or as part of a text."""
        if self.may_end:
            return True
        fits = self.advance(token_id)
        self.go_back(int(fits))
        return fits

    def advance(self, token_id: int) -> bool:
        """Moves the matcher alone by a token, if it fits; `go_back` undoes it."""
        if self.matcher.is_stopped() or not self.vocabulary.is_text(token_id):
            return False
        return self.matcher.try_consume_tokens([token_id]) == 1

    def go_back(self, count: int) -> None:
        """Takes back the last moves of `advance`."""
        if count and not self.matcher.rollback(count):
            self.restart()

    def restart(self) -> None:
        """Makes the matcher anew as it is after the tokens taken."""
        self.matcher = self._grammar.new_matcher()
        self.matcher.consume_tokens(self._taken)

    def allow(self, rows: NDArray[np.int32], out: NDArray[np.int32]) -> None:
        """Makes masks of what the matcher says.

        Args:
            rows: int32 [rows, words of llguidance's vocabulary].
            out: int32 [rows, num_words]; written.
        """
        end = self.vocabulary.end
        np.bitwise_and(rows[:, : out.shape[1]], self._text, out=out)
        may_end = (rows[:, end >> 5] >> np.int32(end & 31)) & 1
        out |= self._ends & -may_end[:, None]

    def allow_all(self, out: NDArray[np.int32]) -> None:
        """Makes masks of rows that the grammar says nothing about."""
        out[:] = -1 if self._always is None else self._always

    def forced(self) -> list[int]:
        """The tokens of which the grammar leaves no choice, from here on."""
        if self.matcher.is_stopped():
            return []
        found = self.matcher.compute_ff_tokens()
        if self.matcher.is_error():
            self.restart()
            return []
        return list(found)
