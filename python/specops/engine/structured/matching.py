# SPDX-License-Identifier: Apache-2.0
"""Compiled grammars, and their state for the text of one request.

Four rules apply to the use of llguidance's matcher. (1) It consumes the tokens that a request has
committed; drafts are rolled back in the same call. (2) It gets no tokens past the end of a text,
where a rejected call would leave it unusable. (3) It never gets special tokens. (4) If drafts make
it exceed a limit, it is recreated from the committed tokens.

All work of a matcher is timed by its thread's processor time, because steps wait for this work. On
tensor-parallel ranks, which must make the same decisions, the timer always reads 0.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from specops.engine.structured.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher


# Time of a row from which limits may be exceeded; most rows take 20 us. A matcher that exceeded a
# limit must be recreated from all tokens. So slow rows use a copy, which takes about 40 us to make.
_SLOW_SECONDS = 2e-3


def has_begun(thinking_state: int, num_injected: int) -> bool:
    """Return whether a grammar applies to the next token; it does not during the thinking.

    Args:
        thinking_state: the request's thinking state, as in `sampling.commit`.
        num_injected: number of tokens injected to end the thinking early.
    """
    return not 0 <= thinking_state <= num_injected


def num_unconstrained(thinking_state: int, num_injected: int, count: int) -> int:
    """Return how many of the last `count` tokens of an output precede the constrained text.

    Args:
        thinking_state, num_injected: as in `has_begun`.
        count: number of tokens.
    """
    if thinking_state < 0:
        return 0
    # After the thinking, the state has counted its end and each token of the reply.
    in_reply = max(thinking_state - num_injected - 1, 0)
    return count - min(count, in_reply)


class Grammar:
    """Compiled grammar, shared by any number of requests.

    Args:
        matcher: matcher at the start of a text, owned by this object.
        vocabulary: the model's vocabulary.
    """

    def __init__(self, matcher: "LLMatcher", vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._matcher = matcher

    def why_unusable(self) -> str:
        """Return why no text can match, or "" if any can. Call once, before sharing the grammar."""
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
        """Return a matcher at the start of a text."""
        return self._matcher.deep_copy()


Ending: TypeAlias = tuple[str, "int | str | None"]  # finish_reason and stop_reason


class GrammarState:
    """Grammar state of one request.

    Args:
        grammar: grammar of its output.
        end_token_ids: tokens that end the output; each is allowed where the text may end.
        allowed_token_ids: the only tokens that the request may choose, or None.
        timer: clock for the work of the matcher.

    Attributes:
        ready: mask of the next token, once `prepare` has computed it.
        preparing: future of `prepare` while it may be running; the matcher must not be used then.
        limit: name of the llguidance limit that the committed text exceeded; empty: none.
        has_limited_rows: whether a limit left a row of the last step without a mask.
        seconds: time of all work since the last `note_step`.
        step_seconds: exponential moving average of the time per step.
        row_seconds: exponential moving average of the time per row.
        timer: the argument.
    """

    def __init__(
        self,
        grammar: Grammar,
        end_token_ids: Iterable[int],
        allowed_token_ids: Sequence[int] | None = None,
        timer: Callable[[], float] = time.thread_time,
    ) -> None:
        self.timer = timer
        self.vocabulary = vocabulary = grammar.vocabulary
        self.matcher = grammar.new_matcher()
        self._grammar = grammar
        self._taken: list[int] = []
        self.ready: NDArray[np.int32] | None = None
        self.preparing: Future[None] | None = None
        self.limit = ""
        self.has_limited_rows = False
        self.seconds = self.step_seconds = self.row_seconds = 0.0
        self._forced_seconds = 0.0  # average time to compute the forced tokens
        self._text, self._ends = vocabulary.text_mask, vocabulary.mask(end_token_ids)
        self._always: NDArray[np.int32] | None = None
        if allowed_token_ids is not None:
            self._always = vocabulary.mask(allowed_token_ids)
            self._text, self._ends = self._text & self._always, self._ends & self._always

    @property
    def is_complete(self) -> bool:
        """True if the text is complete and cannot be extended."""
        return self.matcher.is_stopped() and not self.matcher.is_error()

    @property
    def may_end(self) -> bool:
        """True if the text is complete; it may still be extensible."""
        return not self.matcher.is_error() and self.matcher.is_accepting()

    @property
    def is_slow(self) -> bool:
        """True if rows are so slow that limits may be exceeded."""
        return self.row_seconds > _SLOW_SECONDS

    def judge(self, token_id: int, is_end: bool) -> tuple[bool, Ending | None]:
        """Consume the next token of the output, or check a token that ends the output.

        Returns:
            Whether the token fits, and the ending if the output ends with it. An output always ends
            at a token that does not fit.
        """
        if is_end and self.fits_end(token_id):
            # An end token may cut a text short; only then is it the stop_reason.
            return True, ("stop", None if self.may_end else token_id)
        if not is_end and self.take(token_id):
            return True, ("stop", None) if self.is_complete else None
        if self.limit:
            return False, ("abort", f"structured_output: {self.limit}")
        # If the text is complete, other parameters than the grammar excluded all tokens.
        return False, ("stop", None) if self.may_end else ("abort", "structured_output")

    def take(self, token_id: int) -> bool:
        """Consume the next token of the output; return False if it does not fit.

        This happens only if no token fits or a limit was exceeded (`limit`): the step then chose an
        arbitrary token, and the output ends.
        """
        if self._is_limited() or not self.advance(token_id):
            self.note_limit()
            return False
        self._taken.append(token_id)
        self.ready = None
        return True

    def fits_end(self, token_id: int) -> bool:
        """Return whether an end token fits here: after a complete text, or as part of a text."""
        if self._is_limited():
            return False
        if self.may_end:
            return True
        fits = self.advance(token_id)
        if not fits:
            self.note_limit()
        self.go_back(int(fits))
        return fits

    def _is_limited(self) -> bool:
        """Return whether computing the mask of the next token exceeds a limit of llguidance."""
        if self.has_limited_rows and not self.limit:
            matcher, self.matcher = self.matcher, self.matcher.deep_copy()
            self.compute_mask(np.empty(self.vocabulary.size // 32 + 1, dtype=np.int32))
            self.note_limit()
            self.matcher = matcher
        return bool(self.limit)

    def note_limit(self) -> None:
        """Record the limit that the matcher has exceeded at the end of the text, if any."""
        if self.matcher.is_error() and not self.limit:
            message = self.matcher.get_error().partition("<state>")[0]  # the rest is internal state
            self.limit = f"llguidance met a limit: {' '.join(message.split())}"

    def advance(self, token_id: int) -> bool:
        """Advance only the matcher by a token, unless it does not fit; `go_back` undoes this."""
        if self.matcher.is_stopped() or not self.vocabulary.is_text(token_id):
            return False
        begun = self.timer()
        fits = self.matcher.try_consume_tokens([token_id]) == 1
        self.seconds += self.timer() - begun
        return fits

    def go_back(self, count: int) -> None:
        """Undo the last `count` successful calls of `advance`."""
        if count and not self.matcher.rollback(count):
            self.restart()

    def restart(self) -> None:
        """Recreate the matcher and feed it the consumed tokens."""
        begun = self.timer()
        self.matcher = self._grammar.new_matcher()
        self.matcher.consume_tokens(self._taken)
        self.seconds += self.timer() - begun

    def compute_mask(self, row: NDArray[np.int32]) -> None:
        """Write the mask of the next token to `row`, over llguidance's vocabulary."""
        begun = self.timer()
        self.matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self.seconds += self.timer() - begun

    def prepare(self) -> None:
        """Compute the next mask in advance, in any thread; no other thread may use the matcher."""
        row = np.empty(self.vocabulary.size // 32 + 1, dtype=np.int32)
        self.compute_mask(row)
        if self.matcher.is_error():
            self.note_limit()
            row.fill(0)
        self.ready = row

    def settle(self) -> None:
        """Wait until `prepare` no longer uses the matcher."""
        if self.preparing is not None:
            wait([self.preparing])
            self.preparing = None

    def tried(self) -> "LLMatcher":
        """Return a matcher for work that may exceed a limit: a copy if rows are slow."""
        return self.matcher.deep_copy() if self.is_slow else self.matcher

    def note_step(self, num_rows: int) -> None:
        """Update the average times after the tokens of a step of `num_rows` rows are consumed."""
        # Weight 1/2, so that the slow first masks of a text, which build the lexer, fade quickly.
        self.step_seconds = (self.step_seconds + self.seconds) / 2
        self.row_seconds = (self.row_seconds + self.seconds / num_rows) / 2
        self.seconds = 0.0

    def allow(self, rows: NDArray[np.int32], out: NDArray[np.int32]) -> None:
        """Convert the matcher's masks to masks of the model's vocabulary.

        Args:
            rows: int32 [rows, words of llguidance's vocabulary].
            out: int32 [rows, num_words]; written.
        """
        end = self.vocabulary.end
        np.bitwise_and(rows[:, : out.shape[1]], self._text, out=out)
        may_end = (rows[:, end >> 5] >> np.int32(end & 31)) & 1
        out |= self._ends & -may_end[:, None]

    def allow_all(self, out: NDArray[np.int32]) -> None:
        """Write masks for rows to which the grammar does not apply."""
        out[:] = -1 if self._always is None else self._always

    def forced(self) -> list[int]:
        """Return the next tokens that the grammar forces.

        The list is empty if computing them has been slow on average.
        """
        if self.matcher.is_stopped() or self._forced_seconds > _SLOW_SECONDS:
            return []
        begun = self.timer()
        matcher = self.tried()
        found = matcher.compute_ff_tokens()
        seconds = self.timer() - begun
        self.seconds += seconds
        # Use a moving average, so that one slow call on a busy machine does not disable forced
        # tokens.
        self._forced_seconds += (seconds - self._forced_seconds) / 4
        if matcher.is_error():
            if matcher is self.matcher:
                self.restart()
            return []
        return list(found)
