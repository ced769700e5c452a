# SPDX-License-Identifier: Apache-2.0
"""Differences between two answers to the same request, and where they begin."""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specops.cli.lossless.answers import Answer, Token

KINDS = ("text", "token", "logprob", "ending")
_BEFORE, _AFTER = 48, 32  # characters of context around a difference


@dataclass(frozen=True)
class Side:
    """One of the two answers, at the first difference.

    Attributes:
        next: the token there, or the following text if tokens are not reported; None at the end of
            the answer.
        ending: finish reason of the answer.
        logprob: logprob of that token; this and the next are None if not reported.
        others_logprob: this answer's logprob of the other answer's token.
        alternatives: all reported (text, logprob) there, sorted by falling logprob.
    """

    next: str | None
    ending: str | None
    logprob: float | None = None
    others_logprob: float | None = None
    alternatives: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Difference:
    """Difference between two answers.

    Attributes:
        kinds: what differs, entries of KINDS. Logprobs are compared up to the first differing
            token, and finish reasons only if texts and tokens are equal.
        place: index of the first differing token, or else of the first token with a differing
            logprob; the first differing character if tokens show no difference.
        unit: unit of `place`, "token" or "character".
        before: the end of the text before the difference.
        plain: side of the answer without speculation.
        other: side of the answer that is compared with it.
        logprob_place: index of the first token with a differing logprob; None if there is none.
        logprob_gap: largest difference between the answers' logprobs of the same token at the same
            place; None if there is no such pair.
    """

    kinds: tuple[str, ...]
    place: int
    unit: str
    before: str
    plain: Side
    other: Side
    logprob_place: int | None
    logprob_gap: float | None


def difference(plain: Answer, other: Answer) -> Difference | None:
    """Compare two answers to the same request; return None if they are equal.

    Tokens are compared by id if both answers have ids, else by text. Logprobs, including those
    of alternatives, are compared by the bits of the numbers that were sent.
    """
    a, b = plain.tokens, other.tokens
    token = _first_unequal(*_names(a, b))
    until = min(len(a), len(b)) if token is None else token
    logprob = None
    if _has_logprobs(a) and _has_logprobs(b):
        logprob = _first_unequal(_bits(a[:until]), _bits(b[:until]))
    differs = {
        "text": plain.text != other.text,
        "token": token is not None,
        "logprob": logprob is not None,
    }
    differs["ending"] = plain.ending != other.ending and not (differs["text"] or differs["token"])
    kinds = tuple(kind for kind in KINDS if differs[kind])
    if not kinds:
        return None
    unit = "token"
    place = until if token is not None or logprob is None else logprob
    if kinds == ("text",) or not a or not b:
        unit = "character"
        place = _common(plain.text, other.text)
        before = plain.text[:place]
        sides = _text_side(plain, place), _text_side(other, place)
    else:
        before = "".join(entry.text or "" for entry in a[:place])
        sides = _token_sides(plain, other, place)
    gap = _gap(a[: until + 1], b[: until + 1])
    return Difference(kinds, place, unit, before[-_BEFORE:], *sides, logprob, gap)


def _names(a: Sequence[Token], b: Sequence[Token]) -> tuple[list[Any], list[Any]]:
    """Return both answers' token ids, else their token texts; empty if either reports neither."""
    if a and b:
        for name in ("id", "text"):
            names = [[getattr(token, name) for token in tokens] for tokens in (a, b)]
            if None not in names[0] and None not in names[1]:
                return names[0], names[1]
    return [], []


def _bits(tokens: Sequence[Token]) -> list[tuple[Any, ...]]:
    return [
        (_packed(token.logprob), [(text, _packed(logprob)) for text, logprob in token.alternatives])
        for token in tokens
    ]


def _packed(value: float | None) -> bytes:
    return b"" if value is None else struct.pack("<d", value)


def _has_logprobs(tokens: Sequence[Token]) -> bool:
    return any(token.logprob is not None for token in tokens)


def _first_unequal(a: Sequence[Any], b: Sequence[Any]) -> int | None:
    for place, (first, second) in enumerate(zip(a, b, strict=False)):
        if first != second:
            return place
    return None if len(a) == len(b) else min(len(a), len(b))


def _common(a: str, b: str) -> int:
    place = _first_unequal(a, b)
    return len(a) if place is None else place


def _gap(a: Sequence[Token], b: Sequence[Token]) -> float | None:
    gaps = [
        abs(logprob - known[text])
        for first, second in zip(a, b, strict=False)
        for known in [dict(_logprobs(second))]
        for text, logprob in _logprobs(first)
        if text in known and math.isfinite(logprob) and math.isfinite(known[text])
    ]
    return max(gaps, default=None)


def _logprobs(token: Token) -> list[tuple[str | None, float]]:
    own_logprob = [] if token.logprob is None else [(token.text, token.logprob)]
    return [*token.alternatives, *own_logprob]


def _token_sides(plain: Answer, other: Answer, place: int) -> tuple[Side, Side]:
    tokens = [
        answer.tokens[place] if place < len(answer.tokens) else None for answer in (plain, other)
    ]
    return _side(plain, tokens[0], tokens[1]), _side(other, tokens[1], tokens[0])


def _side(answer: Answer, token: Token | None, others: Token | None) -> Side:
    if token is None:
        return Side(None, answer.ending)
    shown = token.text if token.text is not None else f"token {token.id}"
    of_other = dict(_logprobs(token)).get(others.text) if others is not None else None
    return Side(shown, answer.ending, token.logprob, of_other, token.alternatives)


def _text_side(answer: Answer, place: int) -> Side:
    return Side(answer.text[place : place + _AFTER] or None, answer.ending)
