# SPDX-License-Identifier: Apache-2.0
"""Detection of overlong lists in a JSON body before their elements are parsed.

Python's JSON parser holds the interpreter's lock until it has created the last value: 20 to 40 ms
for a body of 600,000 values, during which neither the event loop nor the engine's thread runs. So a
body with many values is first split into its top-level fields, without creating the values. Lists
that exceed their limits are removed from the body; pydantic validates a placeholder with the list's
length instead, and always refuses it. `json` parses the rest.
"""

import codecs
import re
from collections.abc import Mapping
from typing import Any

import msgspec

# Bodies with fewer commas are parsed fast enough without an outline.
_MANY = 1 << 12

_OUTLINE = msgspec.json.Decoder(dict[str, msgspec.Raw])

# Tokens of valid JSON: strings and flat lists, which may contain commas; commas; brackets.
_INNER = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|\[[^\[\]{}"]*\]|[,\[\]{}]')
_NUMBER = re.compile(rb"\[\s*-?[0-9]+\s*,")  # the beginning of a list of token ids


class ListPlaceholder(list[Any]):
    """Placeholder for a long list: `len` is the list's length, but it holds one element."""

    def __init__(self, element: Any, length: int) -> None:
        super().__init__([element])
        self._length = length

    def __len__(self) -> int:
        return self._length


def without_long_lists(
    body: bytes, max_lengths: Mapping[str, int], max_ids: int
) -> tuple[bytes, dict[str, Any]]:
    """Remove lists that are too long from a body that has many values.

    Args:
        body: JSON text, which may be invalid.
        max_lengths: maximum number of elements of each field.
        max_ids: maximum number of token ids of a prompt.

    Returns:
        The body with an empty list in place of each removed list, and the placeholders by field.
    """
    if body.count(b",") < _MANY:
        return body, {}
    try:
        fields = _OUTLINE.decode(body.removeprefix(codecs.BOM_UTF8))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return body, {}  # json.loads will report the error
    placeholders: dict[str, Any] = {}
    for name, raw in fields.items():
        value = bytes(raw)
        placeholder = None
        if name == "prompt":
            placeholder = _long_prompt(value, max_ids)
        elif name in max_lengths and _has_more(value, max_lengths[name]):
            placeholder = ListPlaceholder(None, max_lengths[name] + 1)
        shorter = None if placeholder is None else _replaced(body, name, value)
        if shorter is not None:
            body, placeholders[name] = shorter, placeholder
    return body, placeholders


def _has_more(value: bytes, max_length: int) -> bool:
    """Return whether a list or an object has more than `max_length` elements."""
    if value[:1] not in (b"[", b"{") or value.count(b",") < max_length:
        return False
    if _is_flat(value):
        return True  # every comma is between two elements
    depth = num_commas = 0
    for match in _INNER.finditer(value, 1):
        mark = match[0]
        if mark == b"," and not depth:
            num_commas += 1
            if num_commas == max_length:
                return True
        elif mark in (b"[", b"{"):
            depth += 1
        elif mark in (b"]", b"}"):
            depth -= 1
    return False


def _is_flat(value: bytes) -> bool:
    """Return whether a list has only scalars other than strings: each comma separates elements."""
    return all(value.find(mark, 1) < 0 for mark in (b"[", b'"', b"{"))


def _long_prompt(value: bytes, max_ids: int) -> list[Any] | None:
    """Return a placeholder if a prompt, or the first of several, has too many ids; else None."""
    if value.count(b",") < max_ids:
        return None
    if _is_flat(value):
        return _long_ids(value, max_ids)
    first = value[1 : value.find(b"]") + 1].lstrip()
    ids = _long_ids(first, max_ids) if _is_flat(first) else None
    return None if ids is None else [ids]


def _long_ids(value: bytes, max_ids: int) -> ListPlaceholder | None:
    """Return a placeholder for an overlong flat list that begins with an integer, else None."""
    length = value.count(b",") + 1
    return ListPlaceholder(0, length) if length > max_ids and _NUMBER.match(value) else None


def _replaced(body: bytes, name: str, value: bytes) -> bytes | None:
    """Return a body in which an empty list replaces a field's value; None if it is not found."""
    for match in re.finditer(rb'"%s"\s*:\s*' % name.encode(), body):
        if body.startswith(value, match.end()):
            return body[: match.end()] + b"[]" + body[match.end() + len(value) :]
    return None
