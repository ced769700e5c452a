# SPDX-License-Identifier: Apache-2.0
"""A grammar, and where the text of one request stands in it.

llguidance's matcher is fed by four rules. It takes the tokens that a request has committed, and
drafts only until they are taken back in the same call. Past its end it is fed nothing: a call that
it refuses there would break it for good. No special token ever reaches it. And where a bound is met
among drafts, it is made anew from the committed tokens.

All work of a matcher is timed, in seconds of the thread that does it, since a step waits for it.
Ranks of one model, which have to decide the same, have a timer that stands still.
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


# Of a row, of which most take 20 us. From here on bounds are met, and a matcher that has met one
# must be made anew from all tokens, or be a copy, which takes some 40 us.
_DEAR_SECONDS = 2e-3


def has_begun(thinking_state: int, num_injected: int) -> bool:
    """Whether a grammar constrains the next token: behind the thinking, if there is one.

    Args:
        thinking_state: of the request, as `sampling.commit` has it.
        num_injected: tokens that end the thinking by force.
    """
    return not 0 <= thinking_state <= num_injected


def num_unconstrained(thinking_state: int, num_injected: int, count: int) -> int:
    """How many of the last `count` tokens of an output are in front of the grammar's first."""
    if thinking_state < 0:
        return 0
    # Behind the thinking the state counts: one for its end, one for each token of the reply.
    in_reply = max(thinking_state - num_injected - 1, 0)
    return count - min(count, in_reply)


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


Ending: TypeAlias = tuple[str, "int | str | None"]  # a finish_reason and a stop_reason


class GrammarState:
    """Where one request stands.

    Args:
        grammar: of its output.
        end_token_ids: the tokens that end its output; each may stand where the text may end.
        allowed_token_ids: the only tokens it may have beside; None: no others are excluded.
        timer: of the work.

    Attributes:
        ready: the mask of what comes next, once `prepare` has computed it.
        preparing: that computation, while it may be going on: nobody else may use the matcher then.
        limit: which bound of llguidance the text itself met; empty while it has met none.
        has_limited_rows: whether a bound left a row of the last step without a mask.
        seconds: of work since the last step was noted.
        step_seconds: of a step, of the last ones more than of those before.
        row_seconds: likewise of a row.
        timer: as above.
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
        self._forced_seconds = 0.0  # that it takes on average to be asked for forced tokens
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

    @property
    def is_dear(self) -> bool:
        """Whether rows take long."""
        return self.row_seconds > _DEAR_SECONDS

    def judge(self, token_id: int, is_end: bool) -> tuple[bool, Ending | None]:
        """Takes the next token of the output, or looks at one that ends it.

        Returns:
            Whether it fits; and how the output ends here, if it does: where nothing fits, too.
        """
        if is_end and self.fits_end(token_id):
            # One that is text itself may cut a text; only a whole one ends for no reason.
            return True, ("stop", None if self.may_end else token_id)
        if not is_end and self.take(token_id):
            return True, ("stop", None) if self.is_complete else None
        if self.limit:
            return False, ("abort", f"structured_output: {self.limit}")
        # Only the parameters beside the grammar left no token, if the text is whole.
        return False, ("stop", None) if self.may_end else ("abort", "structured_output")

    def take(self, token_id: int) -> bool:
        """Takes the next token of the output; False where it does not fit, which ends the output.

        That is so where nothing fits, or a bound was met (`limit`): then a step has chosen any
        token.
        """
        if self._is_limited() or not self.advance(token_id):
            self.note_limit()
            return False
        self._taken.append(token_id)
        self.ready = None
        return True

    def fits_end(self, token_id: int) -> bool:
        """Whether a token that ends the output may stand here: at an end, or as part of a text."""
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
        """Whether there is no mask for what comes next, since making it would exceed a bound."""
        if self.has_limited_rows and not self.limit:
            matcher, self.matcher = self.matcher, self.matcher.deep_copy()
            self.compute_mask(np.empty(self.vocabulary.size // 32 + 1, dtype=np.int32))
            self.note_limit()
            self.matcher = matcher
        return bool(self.limit)

    def note_limit(self) -> None:
        """Notes which bound the matcher has met at the end of the text, if it has met one."""
        if self.matcher.is_error() and not self.limit:
            told = self.matcher.get_error().partition("<state>")[0]  # behind it is its inside
            self.limit = f"llguidance met a limit: {' '.join(told.split())}"

    def advance(self, token_id: int) -> bool:
        """Moves the matcher alone by a token, if it fits; `go_back` undoes it."""
        if self.matcher.is_stopped() or not self.vocabulary.is_text(token_id):
            return False
        begun = self.timer()
        fits = self.matcher.try_consume_tokens([token_id]) == 1
        self.seconds += self.timer() - begun
        return fits

    def go_back(self, count: int) -> None:
        """Takes back the last moves of `advance`."""
        if count and not self.matcher.rollback(count):
            self.restart()

    def restart(self) -> None:
        """Makes the matcher anew as it is after the tokens taken."""
        begun = self.timer()
        self.matcher = self._grammar.new_matcher()
        self.matcher.consume_tokens(self._taken)
        self.seconds += self.timer() - begun

    def compute_mask(self, row: NDArray[np.int32]) -> None:
        """Has the matcher write the mask of what comes next: a row of llguidance's vocabulary."""
        begun = self.timer()
        self.matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self.seconds += self.timer() - begun

    def prepare(self) -> None:
        """Computes the mask of what comes next ahead of time, on any thread while no other does."""
        row = np.empty(self.vocabulary.size // 32 + 1, dtype=np.int32)
        self.compute_mask(row)
        if self.matcher.is_error():
            self.note_limit()
            row.fill(0)
        self.ready = row

    def settle(self) -> None:
        """Waits until the matcher is free."""
        if self.preparing is not None:
            wait([self.preparing])
            self.preparing = None

    def tried(self) -> "LLMatcher":
        """A matcher for what may meet a bound: a copy where that would be dear."""
        return self.matcher.deep_copy() if self.is_dear else self.matcher

    def note_step(self, num_rows: int) -> None:
        """Notes what a step of so many rows took, now that its tokens are taken."""
        # Half of what was: the first masks of a text take longer, since the lexer is made then.
        self.step_seconds = (self.step_seconds + self.seconds) / 2
        self.row_seconds = (self.row_seconds + self.seconds / num_rows) / 2
        self.seconds = 0.0

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
        """The tokens of which the grammar leaves no choice, from here on.

        A grammar that takes long to say so is not asked again.
        """
        if self.matcher.is_stopped() or self._forced_seconds > _DEAR_SECONDS:
            return []
        begun = self.timer()
        matcher = self.tried()
        found = matcher.compute_ff_tokens()
        seconds = self.timer() - begun
        self.seconds += seconds
        # A mean: one slow call of a busy machine does not end it.
        self._forced_seconds += (seconds - self._forced_seconds) / 4
        if matcher.is_error():
            if matcher is self.matcher:
                self.restart()
            return []
        return list(found)
