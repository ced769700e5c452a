# SPDX-License-Identifier: Apache-2.0
"""Token masks of a step: one for each row that chooses a token of a request with a grammar.

A row after a draft is masked as if the draft had been emitted. Tokens of rows after a draft that
the grammar rejects, or after the end of a text, are never emitted; their masks allow every text
token.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from specops.engine.structured.matching import GrammarState

if TYPE_CHECKING:
    from llguidance import LLMatcher

# Number of rows from which threads are used. A mask takes 20 us, so fewer rows are done before
# another thread has woken up, which may take milliseconds if other work uses the same cores.
_MANY_ROWS = 64
_SLOW_SECONDS = 50e-6  # per row of a parallel call; above it, some request is slow


@dataclass(slots=True)
class MaskRows:
    """Rows of one request: the row of its last token, then one row for each draft.

    Attributes:
        state: the request's grammar state.
        first: index of the first row in the step.
        drafts: draft tokens of the other rows.
        opening: during the thinking, the token after which the grammar applies; -1: the grammar
            applies already.
    """

    state: GrammarState
    first: int
    drafts: list[int]
    opening: int = -1

    @property
    def last(self) -> int:
        """Index after the last row."""
        return self.first + 1 + len(self.drafts)


class MaskFiller:
    """Filler that computes the masks of steps, for several requests at a time.

    Args:
        num_threads: number of threads that compute masks.
    """

    def __init__(self, num_threads: int) -> None:
        from llguidance import LLExecutor

        self._num_threads = num_threads
        self._executor = LLExecutor(num_threads)
        self._is_slow = False  # some request is slow, but it is unknown which one
        self._rows: NDArray[np.int32] = np.empty((0, 0), dtype=np.int32)

    def fill(self, rows_to_fill: Sequence[MaskRows], out: NDArray[np.int32]) -> None:
        """Fill the masks of some requests.

        Args:
            rows_to_fill: rows of each request, in ascending order, without gaps from row 0 on.
            out: int32 [rows, ceil(vocab_size / 32)]; written.
        """
        rows = self._buffer(rows_to_fill[-1].last, rows_to_fill[0].state.vocabulary.size + 1)
        roots: list[tuple[GrammarState, int]] = []
        chains: list[tuple[GrammarState, LLMatcher, int, list[int]]] = []
        for one in rows_to_fill:
            one.state.settle()
            one.state.has_limited_rows = False
            begin = _begin(one)
            if begin > len(one.drafts):
                continue
            drafts = _readable(one.state, one.drafts[begin:])
            if drafts:
                chains.append((one.state, one.state.tried(), one.first + begin, drafts))
            else:
                roots.append((one.state, one.first + begin))
        self._compute(roots, chains, rows)
        met = [state for state, matcher, *_ in chains if matcher.is_error()]
        for one in rows_to_fill:
            if one.state.matcher.is_error() or one.state in met:
                if one.drafts:
                    _fill_anew(one, rows)
                else:
                    one.state.note_limit()
                    rows[one.first].fill(0)
            _translate(one, rows, out)

    def _compute(
        self,
        roots: list[tuple[GrammarState, int]],
        chains: list[tuple[GrammarState, "LLMatcher", int, list[int]]],
        rows: NDArray[np.int32],
    ) -> None:
        """Fill single rows (`roots`) and rows with drafts (`chains`), many rows in parallel.

        A parallel call does not report how long each request took. So if a parallel call was slow,
        the next step computes its rows one by one, to find the slow request.
        """
        place = rows.ctypes.data, 4 * rows.shape[1], len(rows)
        executor = self._executor
        for state, row in roots:
            if state.ready is not None:
                rows[row] = state.ready
        roots = [(state, row) for state, row in roots if state.ready is None]
        if self._num_threads > 1 and len(rows) >= _MANY_ROWS and not self._is_slow:
            begun = time.perf_counter()
            if roots:
                alone = [(state.matcher, row) for state, row in roots]
                executor.unsafe_compute_mask_ptr(alone, *place)
            if chains:
                executor.unsafe_compute_mask_ptr_with_draft_token(
                    [one[1:] for one in chains], *place
                )
            self._is_slow = time.perf_counter() - begun > _SLOW_SECONDS * len(rows)
            return
        self._is_slow = False
        for state, row in roots:
            state.compute_mask(rows[row])
        for state, matcher, row, drafts in chains:
            begun = state.timer()
            chain = [(matcher, row, drafts)]  # runs on the calling thread
            executor.unsafe_compute_mask_ptr_with_draft_token(chain, *place)
            state.seconds += state.timer() - begun

    def _buffer(self, count: int, vocab_size: int) -> NDArray[np.int32]:
        """Return `count` mask rows in which all bits are set."""
        words = -(-vocab_size // 32)
        if len(self._rows) < count or self._rows.shape[1] != words:
            self._rows = np.empty((max(count, 2 * len(self._rows)), words), dtype=np.int32)
        self._rows[:count] = -1
        return self._rows[:count]


def _begin(one: MaskRows) -> int:
    """Return the first row of a request to which the grammar applies, or the end of its rows."""
    if one.opening < 0:
        return 0
    found = one.opening in one.drafts
    return 1 + (one.drafts.index(one.opening) if found else len(one.drafts))


def _readable(state: GrammarState, drafts: Sequence[int]) -> list[int]:
    """Return the drafts before the first special token, which must not reach a matcher."""
    count = next((n for n, one in enumerate(drafts) if not state.vocabulary.is_text(one)), None)
    return list(drafts[:count])


def _fill_anew(one: MaskRows, rows: NDArray[np.int32]) -> None:
    """Fill each row from a fresh copy of the matcher; rows that exceed a limit are empty."""
    state = one.state
    if state.matcher.is_error():
        state.restart()
    root = state.matcher
    for node in range(-1, len(one.drafts)):
        row = rows[one.first + 1 + node]
        row.fill(-1)
        path = _path(one, node)
        if path is None:
            continue
        state.matcher = root.deep_copy()
        if all(map(state.advance, path)):
            state.compute_mask(row)
            if state.matcher.is_error():
                row.fill(0)
                state.has_limited_rows = True
    state.matcher = root


def _path(one: MaskRows, node: int) -> list[int] | None:
    """Return the drafts that precede a row in the grammar; None: it does not apply there yet."""
    path = one.drafts[: node + 1]
    if one.opening < 0:
        return path
    return path[path.index(one.opening) + 1 :] if one.opening in path else None


def _translate(one: MaskRows, rows: NDArray[np.int32], out: NDArray[np.int32]) -> None:
    """Convert a request's rows to masks of the model's vocabulary."""
    one.state.allow(rows[one.first : one.last], out[one.first : one.last])
    if one.opening < 0:
        return
    for node in range(-1, len(one.drafts)):
        if _path(one, node) is None:
            row = one.first + 1 + node
            one.state.allow_all(out[row : row + 1])
