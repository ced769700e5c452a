# SPDX-License-Identifier: Apache-2.0
"""Identification of requests by their texts.

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
        started: rows with a new request: the drafter must learn their whole text.
        forgotten: numbers without a row for a long time: the requests have finished, or will get
            a new number if they return.
    """

    numbers: list[int | None]
    started: frozenset[int]
    forgotten: list[int]


class FollowedTexts:
    """Finder of the requests in the rows of a batch.

    A row continues a request if the row's text without its new tokens is the request's text. The
    request that had this row in the previous step is preferred. Requests with equal texts may be
    confused, which makes no difference. A text that grew by more than its new tokens (for example
    the next turn of a conversation) belongs to a new request.

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
        found: dict[int, _Text] = {}
        stayed = [(text.row, text) for text in free.values()]
        for row, text in stayed:
            if row not in found and before.get(row) == text.text:
                found[row] = free.pop(text.number)
        for row in before.keys() - found.keys():
            moved = next((text for text in free.values() if text.text == before[row]), None)
            if moved is not None:
                found[row] = free.pop(moved.number)
        started = sorted(before.keys() - found.keys())
        for row in started:
            found[row] = self._texts[self._next] = _Text(self._next, b"", row, 0)
            self._next += 1
        for row, text in found.items():
            text.text, text.row, text.last_step = rows[row], row, self._step
        numbers = [found[row].number if row in found else None for row in range(len(rows))]
        return Step(numbers, frozenset(started), self._forget())

    def _forget(self) -> list[int]:
        oldest = self._step - self._forget_after
        old = [number for number, text in self._texts.items() if text.last_step <= oldest]
        for number in old:
            del self._texts[number]
        return old
