# SPDX-License-Identifier: Apache-2.0
"""Finds requests again by their texts.

vLLM hands a proposer the rows of its batch and no names. Rows move when requests finish, are
preempted and come back, so a request's state is found by its text so far.
"""

from collections.abc import Sequence
from dataclasses import dataclass

_TOKEN_BYTES = 4  # of an int32


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
        numbers: of each row's request; None for a row that has no new token.
        started: rows whose request is new: all of their text is to be learnt.
        forgotten: numbers that no row has had for long: they have finished, or will start again.
    """

    numbers: list[int | None]
    started: frozenset[int]
    forgotten: list[int]


class FollowedTexts:
    """Finds the requests of the rows of a batch.

    A row continues the request whose text is the row's without its new tokens: the one that had
    this row before, else any other. Requests whose texts are equal may be taken for each other,
    which makes no difference. A text that grew by other tokens than its new ones (a conversation's
    next turn, for one) is a new request's.

    Args:
        forget_after: steps without a row after which a request is forgotten. One that comes back
            later is a new one.
    """

    def __init__(self, forget_after: int = 64) -> None:
        self._forget_after = forget_after
        self._texts: dict[int, _Text] = {}
        self._step = 0
        self._next = 0

    def __len__(self) -> int:
        return len(self._texts)

    def follow(self, rows: Sequence[bytes], num_new: Sequence[int]) -> Step:
        """Finds the request of each row.

        Args:
            rows: each row's tokens, int32, the new ones at its end.
            num_new: how many of them are new; a row without any is ignored.

        Returns:
            Their numbers. A number is never given twice.
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
