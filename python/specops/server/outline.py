# SPDX-License-Identifier: Apache-2.0
"""Lists of a body that are refused for their length: seen before their elements are made.

Python's JSON holds the interpreter's lock until the last value is made: 20 to 40 ms for a body of
600,000, in which neither the event loop nor the engine's thread goes on. So of a body with many
values the outline is read first, which makes none of them. Lists beyond their limits are taken out
of it, and stand-ins that know their length are checked in their place. What is valid is still up to
`json`, which reads the rest; and a body with a stand-in is refused in any case.
"""

import codecs
import re
from collections.abc import Mapping
from typing import Any

import msgspec

# Of fewer values nobody notices how long they take.
_MANY = 1 << 12

_OUTLINE = msgspec.json.Decoder(dict[str, msgspec.Raw])

# Of what is valid JSON already: what commas may be in, and commas; and how a list of ids begins.
_INNER = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|\[[^\[\]{}"]*\]|[,\[\]{}]')
_NUMBER = re.compile(rb"\[\s*-?[0-9]+\s*,")


class StandIn(list[Any]):
    """A list of which there is the length, and an element of the first one's kind."""

    def __init__(self, element: Any, length: int) -> None:
        super().__init__([element])
        self._length = length

    def __len__(self) -> int:
        return self._length


def without_long_lists(
    body: bytes, most: Mapping[str, int], max_ids: int
) -> tuple[bytes, dict[str, Any]]:
    """Takes out of a body what is too long, where it has many values.

    Args:
        body: in JSON, if it is valid.
        most: elements that a field may have.
        max_ids: token ids that a prompt may have.

    Returns:
        The body with short lists in the place of what is too long, and what stands for it by field.
    """
    if body.count(b",") < _MANY:
        return body, {}
    try:
        fields = _OUTLINE.decode(body.removeprefix(codecs.BOM_UTF8))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return body, {}  # json knows what is wrong
    found: dict[str, Any] = {}
    for name, raw in fields.items():
        value, stand_in = bytes(raw), None
        if name == "prompt":
            stand_in = _long_prompt(value, max_ids)
        elif name in most and _has_more(value, most[name]):
            stand_in = StandIn(None, most[name] + 1)
        shorter = None if stand_in is None else _replaced(body, name, value)
        if shorter is not None:
            body, found[name] = shorter, stand_in
    return body, found


def _has_more(value: bytes, most: int) -> bool:
    """Whether a list or an object has more elements than it may."""
    if value[:1] not in (b"[", b"{") or value.count(b",") < most:
        return False
    if _is_flat(value):
        return True  # every comma is between two elements
    depth = num_commas = 0
    for found in _INNER.finditer(value, 1):
        mark = found[0]
        if mark == b"," and not depth:
            num_commas += 1
            if num_commas == most:
                return True
        elif mark in (b"[", b"{"):
            depth += 1
        elif mark in (b"]", b"}"):
            depth -= 1
    return False


def _is_flat(value: bytes) -> bool:
    """Whether a list has numbers and the like alone, so that commas are between its elements."""
    return all(value.find(mark, 1) < 0 for mark in (b"[", b'"', b"{"))


def _long_prompt(value: bytes, max_ids: int) -> list[Any] | None:
    """What stands for a prompt, or the first of several, of too many ids; None: it is not that."""
    if value.count(b",") < max_ids:
        return None
    if _is_flat(value):
        return _long_ids(value, max_ids)
    first = value[1 : value.find(b"]") + 1].lstrip()
    ids = _long_ids(first, max_ids) if _is_flat(first) else None
    return None if ids is None else [ids]


def _long_ids(value: bytes, max_ids: int) -> StandIn | None:
    """What stands for a flat list, if the first of too many elements is an integer."""
    length = value.count(b",") + 1
    return StandIn(0, length) if length > max_ids and _NUMBER.match(value) else None


def _replaced(body: bytes, name: str, value: bytes) -> bytes | None:
    """A body with a short list in the place of a field's value; None: it is not found."""
    for found in re.finditer(rb'"%s"\s*:\s*' % name.encode(), body):
        if body.startswith(value, found.end()):
            return body[: found.end()] + b"[]" + body[found.end() + len(value) :]
    return None
