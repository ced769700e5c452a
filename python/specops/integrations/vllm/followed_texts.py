# SPDX-License-Identifier: Apache-2.0
"""Identification of requests by their texts, for drafters that keep state.

vLLM passes a proposer the rows of its batch without request ids. Rows move when requests finish,
are preempted and resume, so a request's state is found by its text so far.
"""

from collections.abc import Sequence
from dataclasses import dataclass

_TOKEN_BYTES = 4  # size of an int32 token id


@dataclass(eq=False)
class _Text:
    number: int
    text: bytes
    row: int
    last_step: int


@dataclass(frozen=True)
class Step:
    """The requests of one step's rows.

    Attributes:
        numbers: number of each row's request; None for a row without new tokens.
        started: rows with a new request, whose whole text the drafter must learn.
        forgotten: numbers of requests without a row for a long time, which have probably
            finished; a request that returns gets a new number.
    """

    numbers: list[int | None]
    started: frozenset[int]
    forgotten: list[int]


class FollowedTexts:
    """Assignment of a batch's rows to requests.

    A row continues a request if the row's text without its new tokens is the request's text. If
    several requests match, the one that had this row in the previous step is preferred; confusing
    requests with equal texts does no harm. A text that grew by more than its new tokens (for
    example the next turn of a conversation) belongs to a new request.

    Args:
        forget_after: steps without a row after which a request is forgotten. If it returns later,
            it is treated as a new request.
    """

    def __init__(self, forget_after: int = 64) -> None:
        self._forget_after = forget_after
        self._texts: dict[int, _Text] = {}
        self._step = 0
        self._next = 0

    def __len__(self) -> int:
        return len(self._texts)

    def follow(self, rows: Sequence[bytes], num_new: Sequence[int]) -> Step:
        """Find the request of each row.

        Args:
            rows: each row's tokens as int32 bytes, the new ones at the end.
            num_new: number of new tokens of each row; a row without any is ignored.

        Returns:
            The numbers of the requests. A number is never reused.
        """
        self._step += 1
        before = {
            row: text[: len(text) - _TOKEN_BYTES * new]
            for row, (text, new) in enumerate(zip(rows, num_new, strict=True))
            if new > 0
        }
        free = dict(self._texts)
        texts: dict[int, _Text] = {}
        stayed = [(text.row, text) for text in free.values()]
        for row, text in stayed:
            if row not in texts and before.get(row) == text.text:
                texts[row] = free.pop(text.number)
        for row in before.keys() - texts.keys():
            moved = next((text for text in free.values() if text.text == before[row]), None)
            if moved is not None:
                texts[row] = free.pop(moved.number)
        started = sorted(before.keys() - texts.keys())
        for row in started:
            texts[row] = self._texts[self._next] = _Text(self._next, b"", row, 0)
            self._next += 1
        for row, text in texts.items():
            text.text = rows[row]
            text.row = row
            text.last_step = self._step
        numbers = [texts[row].number if row in texts else None for row in range(len(rows))]
        return Step(numbers, frozenset(started), self._forget())

    def _forget(self) -> list[int]:
        oldest = self._step - self._forget_after
        old = [number for number, text in self._texts.items() if text.last_step <= oldest]
        for number in old:
            del self._texts[number]
        return old
