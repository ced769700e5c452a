# SPDX-License-Identifier: Apache-2.0
"""Parser of tool calls in text that arrives in pieces, for every format of `call_forms.py`."""

import json
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal

from specops.server.call_forms import HERMES, CallForm
from specops.server.json_text import MAX_ARGUMENTS_DEPTH, ObjectScanner, is_json, members_of

_SPACE = " \t\r\n"
_MAX_HEADER = 256  # maximum characters between the opening of a call and its arguments


class CallReader:
    """Parser of tool calls in a text that arrives in pieces.

    A call stays text if it is incomplete, is not valid, lacks a name or arguments, or is nested
    more than MAX_ARGUMENTS_DEPTH levels deep.

    Args:
        form: format in which the model writes calls.
        schemas: schemas of the functions' arguments by name, which decide whether a value that is
            not in JSON is a string.

    Attributes:
        num_calls: number of calls read so far.
    """

    def __init__(
        self,
        form: CallForm = HERMES,
        schemas: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    ) -> None:
        self.num_calls = 0
        self._form = form
        self._schemas = schemas
        self._header = form.header
        self._held = ""  # text that may become a call, or space before one
        self._opening = ""  # text before a possible call in `_held`; content if it is no call
        self._is_open = False
        self._is_content = False  # for a form without an opening: the text began without a call
        self._name = ""  # name before the arguments that `_held` begins with
        self._label = ""  # label after the name, for forms that have one
        self._scanner: ObjectScanner | None = None  # scanner of the object that `_held` begins with
        self._end: int | None = None  # end of that object in `_held`
        self._searched = 0  # length of the beginning of `_held` that has no further closing

    def feed(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """Add a piece of the text; return its content and its complete calls."""
        pieces = list(self.pieces(text))
        content = "".join(piece for piece in pieces if isinstance(piece, str))
        return content, [piece for piece in pieces if not isinstance(piece, str)]

    def pieces(self, text: str) -> Iterator[str | dict[str, Any]]:
        """Add a piece of the text; yield contents and complete calls in their order."""
        self._held += text
        while True:
            if not self._is_open:
                content, self._is_open = self._outside()
                if content:
                    yield content
                if not self._is_open:
                    return
            piece = self._next() if self._form.pairs is None else self._next_of_pairs()
            if piece is None:
                return
            if piece:
                yield piece

    def finish(self) -> str:
        """Return the content that is still held at the end of the text, such as half of a call."""
        rest = (self._opening if self._is_open else "") + self._held
        between = self._held.strip(_SPACE + "[],;")
        is_closing = not self._opening and self._form.closing.startswith(between)
        is_rest = self._is_open and (not between or is_closing)
        self._held = ""
        self._is_open = False
        if self.num_calls and (is_rest or not rest.strip()):
            return ""
        return rest

    def _outside(self) -> tuple[str, bool]:
        """Remove and return content at the start of the held text, and whether calls follow it."""
        opening = self._form.opening
        if not opening:
            begun = self._held.lstrip(_SPACE)
            if not self._is_content and not begun:
                return "", False
            if not self._is_content and begun[0] == "{":
                self._held = begun
                return "", True
            self._is_content = True
            content = self._held
            self._held = ""
            return content, False
        before, found, rest = self._held.partition(opening)
        if found:
            content = before.rstrip()
            # Space after a call separates it from the next one; other space is content.
            space = "" if self.num_calls else before[len(content) :]
            self._opening = space + opening
            self._held = rest
            return content, True
        free = len(self._held) - num_held(self._held, opening)
        content = self._held[:free]
        self._held = self._held[free:]
        return content, False

    def _next(self) -> str | dict[str, Any] | None:
        """Remove the next call, or text that is not a call, from the held text.

        Returns:
            The call; or the text, "" at the end of a list; or None if more text must arrive first.
        """
        form = self._form
        if self._scanner is None:
            text, has_begun = self._begin()
            if not has_begun:
                return text
            self._scanner = ObjectScanner()
        if self._end is None:
            self._end = self._scanner.end_in(self._held)
        if self._end is None:
            return None
        rest = self._held[self._end :]
        if form.tail:
            _, tail, rest = rest.partition(form.tail)
            if not tail:
                return None
        call = self._call(self._held[: self._end])
        if call is None:
            return self._as_text(self._end)
        return self._taken(call, rest)

    def _begin(self) -> tuple[str | None, bool]:
        """Remove the text before the next object in the held text.

        Returns:
            What `_next` must return if no object begins now, and whether one begins.
        """
        form = self._form
        body = self._held.lstrip(_SPACE + ("[,;" if form.is_list or not form.opening else ""))
        if not body:
            return None, False
        if form.is_list and not self._opening and (text := self._end_of_list(body)) is not False:
            return text, False
        if form.member is not None:
            at, is_header = 0, body[0] == "{"
        else:
            at = body.find("{")
            if at < 0 and len(body) <= _MAX_HEADER:
                return None, False
            found = self._header.fullmatch(body, 0, at) if 0 <= at <= _MAX_HEADER else None
            is_header = found is not None
            if found is not None:
                self._name, self._label = found["name"], found["label"]
        if not is_header:
            return self._as_text(0), False
        self._opening += self._held[: len(self._held) - len(body) + at]
        self._held = body[at:]
        return None, True

    def _end_of_list(self, body: str) -> str | Literal[False] | None:
        """Remove the closing of a list, with which `body` begins, from the held text.

        Returns:
            What `_next` returns then: "" if the list ends here, None if it might; or False if
            another call follows.
        """
        closing = self._form.closing
        if body.startswith(closing):
            self._held = body[len(closing) :]
            self._is_open = False
            return ""
        return None if closing.startswith(body) else False

    def _next_of_pairs(self) -> str | dict[str, Any] | None:
        """Do as `_next`, for arguments that are not a JSON object."""
        form, pairs = self._form, self._form.pairs
        assert pairs is not None
        if form.is_list and not self._opening:
            text = self._end_of_list(self._held.lstrip(_SPACE))
            if text is not False:
                return text
        tail = form.tail
        while True:
            end = self._held.find(tail, self._searched)
            if end < 0:
                self._searched = max(self._searched, len(self._held) - len(tail) + 1)
                return None
            self._searched = end + 1
            header = self._header.match(self._held, 0, end)
            if header is None:
                return self._as_text(0)
            text = self._held[header.end() : end]
            # The arguments end with `after`; otherwise the closing may be in a value.
            if not form.is_list and text.rstrip().endswith(form.after.strip()):
                text = text.rstrip().removesuffix(form.after.strip())
            try:
                arguments = pairs.read(text, self._schemas.get(header["name"]))
            except ValueError:
                return self._as_text(0)
            if arguments is None:
                continue
            self._name = header["name"]
            call = self._made(self._name, arguments)
            return self._taken(call, self._held[end + len(tail) :])

    def _taken(self, call: dict[str, Any], rest: str) -> dict[str, Any]:
        """Return a call after it has been removed from the held text, of which `rest` remains."""
        self._held = rest
        self._opening = ""
        self._is_open = self._form.is_list or not self._form.opening
        self._scanner = self._end = None
        self._searched = 0
        return call

    def _as_text(self, end: int) -> str:
        """Remove the opening and the held text up to `end`; return them as content."""
        content = self._opening + self._held[:end]
        self._held = self._held[end:]
        self._opening = ""
        self._is_open = False
        self._scanner = self._end = None
        self._searched = 0
        self._is_content = True
        return content

    def _call(self, text: str) -> dict[str, Any] | None:
        """Return a call in an answer's format, with the model's own text as arguments."""
        if self._form.member is None:
            return self._made(self._name, text) if is_json(text) else None
        assert self._scanner is not None
        if self._scanner.depth > 1 + MAX_ARGUMENTS_DEPTH:  # 1 is the call's own level
            return None
        try:
            members = members_of(text)
            name, arguments = json.loads(members["name"]), members[self._form.member]
        except (ValueError, KeyError):
            return None
        return self._made(name, arguments) if isinstance(name, str) else None

    def _made(self, name: str, arguments: str) -> dict[str, Any]:
        self.num_calls += 1
        return {
            "index": self.num_calls - 1,
            "id": self._form.new_id(name, self._label),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }


def num_held(text: str, opening: str) -> int:
    """Return how many of the last characters may be space and the beginning of an opening."""
    length = next(size for size in range(len(opening), -1, -1) if text.endswith(opening[:size]))
    before = text[: len(text) - length]
    return length + len(before) - len(before.rstrip())
