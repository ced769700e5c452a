# SPDX-License-Identifier: Apache-2.0
"""JSON text: strict parsing that keeps the spelling of numbers; depth checks without recursion."""

import json
import re
import secrets
from typing import Any

# Maximum nesting of lists and objects in a body: other languages' JSON parsers support it, and it
# is far below Python's recursion limit. Tool arguments may nest less, since a body encloses them.
MAX_DEPTH = 128
MAX_ARGUMENTS_DEPTH = 100

# Python's json refuses an integer with more digits.
MAX_DIGITS = 4300

_BRACKET_OR_QUOTE = re.compile(r'["\[\]{}]')
_REST_OF_STRING = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
_SPACE = re.compile(r"[ \t\r\n]*")
_STRING_OR_NUMBER = re.compile(
    r'"[^"\\]*(?:\\.[^"\\]*)*"|-?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?'
)
_MARK = f"number {secrets.token_hex(8)} "  # random, so that no client can guess it
_MARKED = re.compile(f'"{_MARK}([^"]*)"')


class Number:
    """Number whose text Python's int or float would change, such as 1e999 or 1.50."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def require_shallow(value: Any, max_depth: int) -> None:
    """Check, without recursion, that a JSON value has at most `max_depth` levels.

    Raises:
        ValueError: it has more.
    """
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(max_depth):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return
    raise ValueError(f"nested more than {max_depth} levels deep")


def refuse_constant(name: str) -> None:
    """Refuse NaN and Infinity, which Python's json reads by default.

    Raises:
        ValueError: always.
    """
    raise ValueError(f"{name} is not a JSON number")


def loads(text: str) -> Any:
    """Parse a call's arguments; `dumps` writes their numbers back exactly as in the text.

    Raises:
        ValueError: the text is not valid JSON, or nested more than MAX_ARGUMENTS_DEPTH levels deep.
    """
    try:
        value = json.loads(
            text, parse_int=_integer, parse_float=_float, parse_constant=refuse_constant
        )
    except RecursionError:
        raise ValueError(f"nested more than {MAX_ARGUMENTS_DEPTH} levels deep") from None
    require_shallow(value, MAX_ARGUMENTS_DEPTH)
    return value


def dumps(value: Any, *, ensure_ascii: bool = False, **options: Any) -> str:
    """Return the JSON text of a value that may hold `Number`s."""
    text = json.dumps(value, ensure_ascii=ensure_ascii, default=_marked, **options)
    return _MARKED.sub(r"\1", text) if _MARK in text else text


def _integer(text: str) -> int | Number:
    if len(text) > MAX_DIGITS:
        return Number(text)
    value = int(text)
    return value if str(value) == text else Number(text)


def _float(text: str) -> float | Number:
    value = float(text)
    return value if repr(value) == text else Number(text)


def _marked(value: Any) -> str:
    if isinstance(value, Number):
        return f"{_MARK}{value}"
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def with_short_integers(text: str) -> str:
    """Return valid JSON text without integers that are too long for Python's json.

    A longer integer becomes a decimal number with the same digits and value.
    """

    def shorter(match: re.Match[str]) -> str:
        number = match[0]
        is_long = number.lstrip("-").isdecimal() and len(number.lstrip("-")) > MAX_DIGITS
        return f"{number}.0" if is_long else number

    return _STRING_OR_NUMBER.sub(shorter, text) if len(text) > MAX_DIGITS else text


# Finds the end of a member's value and validates it, without converting numbers.
_DECODER = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=refuse_constant)


def members_of(text: str) -> dict[str, str]:
    """Return the members of a JSON object as text, by name.

    Args:
        text: the object; its nesting must not be too deep for Python's json.

    Raises:
        ValueError: the text is not a valid JSON object.
    """
    members: dict[str, str] = {}
    at = _after(text, 0, "{")
    while True:
        name, at = _DECODER.raw_decode(text, _space(text, at))
        if not isinstance(name, str):
            raise ValueError("a member's name must be a string")
        begin = _space(text, _after(text, at, ":"))
        _, at = _DECODER.raw_decode(text, begin)
        members[name] = text[begin:at]
        if text[_space(text, at) :] == "}":
            return members
        at = _after(text, at, ",")


def is_json(text: str, max_depth: int = MAX_ARGUMENTS_DEPTH) -> bool:
    """Return whether a text is valid JSON of at most `max_depth` levels."""
    try:
        require_shallow(_DECODER.decode(text), max_depth)
    except (ValueError, RecursionError):
        return False
    return True


def end_of_value(text: str, at: int) -> int | None:
    """Return the end of the JSON value that begins at `at`; None if the text ends within it.

    Raises:
        ValueError: the value is not valid, or nested too deeply for Python's json.
    """
    try:
        return _DECODER.raw_decode(text, _space(text, at))[1]
    except json.JSONDecodeError as error:
        if error.msg.startswith("Unterminated string") or not text[error.pos :].strip():
            return None
        raise
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()


def _after(text: str, at: int, mark: str) -> int:
    at = _space(text, at)
    if not text.startswith(mark, at):
        raise ValueError(f"expected {mark} at character {at}")
    return at + 1


class ObjectScanner:
    """Scanner for the end of a JSON object in a growing text.

    It counts brackets outside of strings. So even for invalid JSON, the end depends only on the
    text and not on the pieces in which it arrives.

    Attributes:
        depth: maximum number of levels so far.
    """

    def __init__(self) -> None:
        self.depth = 0
        self._at = 0
        self._num_open = 0
        self._in_string = False

    def end_in(self, text: str) -> int | None:
        """Return the end of the object that the text begins with; None if the object is incomplete.

        Args:
            text: text that begins with "{" and extends the text of the previous call.
        """
        while True:
            if self._in_string:
                rest = _REST_OF_STRING.match(text, self._at)
                assert rest is not None
                self._at = rest.end()
                if not text.startswith('"', self._at):
                    return None
                self._at += 1
                self._in_string = False
            match = _BRACKET_OR_QUOTE.search(text, self._at)
            if match is None:
                self._at = len(text)
                return None
            self._at = match.end()
            if match[0] == '"':
                self._in_string = True
            elif match[0] in "[{":
                self._num_open += 1
                self.depth = max(self.depth, self._num_open)
            else:
                self._num_open -= 1
                if not self._num_open:
                    return self._at
