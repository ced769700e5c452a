# SPDX-License-Identifier: Apache-2.0
"""Syntaxes of tool calls: their grammars, and a parser for text that arrives in pieces.

A call is a JSON object with the tool's name and arguments; models differ in the text around it.
"""

import json
import re
import secrets
import string
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from specops.server.json_text import MAX_ARGUMENTS_DEPTH, ObjectScanner, members_of

_TEXT = "TEXT: /(.|\\n)*/"
_SPACE = " \t\r\n"


@dataclass(frozen=True)
class CallForm:
    """Syntax of tool calls.

    Attributes:
        name: name of the syntax for vLLM's `--tool-call-parser`.
        opening: text that introduces calls; if empty, an output that begins with "{" is a call.
        closing: text after each call, or after the list of calls if `is_list`.
        arguments: name of the member with a call's arguments.
        is_list: whether the calls are one JSON list that ends the text.
        id_length: length of a call's id, if templates require a certain one.
    """

    name: str
    opening: str
    closing: str
    arguments: str = "arguments"
    is_list: bool = False
    id_length: int | None = None

    def rules(self, *, must: bool, several: bool) -> list[str]:
        """Return rules of a Lark grammar from `start` down to, but without, `call` (one call).

        Args:
            must: require a call; otherwise any text may occur before it or in its place.
            several: allow more than one call.
        """
        opening, closing = json.dumps(self.opening), json.dumps(self.closing)
        if not self.opening:
            calls = 'calls: call ("; " call)*' if several else "calls: call"
            # Free text must not begin as an object, since that would be a call.
            free = r"TEXT: /([ \t\r\n]*[^{ \t\r\n](.|\n)*)?/"
            return ["start: calls", calls] if must else ["start: rest | calls", calls, *_rest(free)]
        lazy = [*_rest(r"TEXT: /(.|\n)*/"), f"opening[lazy]: TEXT {opening}"]
        if self.is_list:
            calls = 'calls: "[" call (", " call)* ' if several else 'calls: "[" call '
            if must:
                return [f"start: {opening} calls", calls + closing]
            return ["start: rest | opening calls", calls + closing, *lazy]
        written = rf'written: "\n" call "\n" {closing}'
        if must:
            called = [f"called: {opening} written", written]
            return [r'start: called ("\n" called)*' if several else "start: called", *called]
        start = "start: called* rest" if several else "start: rest | called"
        return [start, "called: opening written", written, *lazy]

    def new_id(self) -> str:
        """Return a new random id for a call."""
        if self.id_length is None:
            return f"call_{secrets.token_hex(12)}"
        alphabet = string.ascii_letters + string.digits
        return "".join(secrets.choice(alphabet) for _ in range(self.id_length))


HERMES = CallForm("hermes", "<tool_call>", "</tool_call>")
LLAMA = CallForm("llama3_json", "", "", arguments="parameters")
MISTRAL = CallForm("mistral", "[TOOL_CALLS]", "]", is_list=True, id_length=9)
CALL_FORMS = {form.name: form for form in (HERMES, LLAMA, MISTRAL)}


def _rest(text: str) -> list[str]:
    return ["rest: TEXT", text]


def form_of_template(source: str) -> CallForm | None:
    """Return the syntax of tool calls in a chat template, or None if it has no known one."""
    if "[TOOL_CALLS]" in source:
        return None if "[ARGS]" in source else MISTRAL  # newer ones have names outside the JSON
    if "<tool_call>" in source:
        others = ("<function=", "<arg_key>")
        has_form = all(word in source for word in ("name", "arguments"))
        return HERMES if has_form and not any(word in source for word in others) else None
    if re.search(r'"name"\s*:.*"parameters"\s*:', source) and "<|" in source:
        return LLAMA
    return None


class CallReader:
    """Parser of tool calls in a text that arrives in pieces.

    A call stays text if it is incomplete, is invalid JSON, lacks a name or arguments, or is nested
    more than MAX_ARGUMENTS_DEPTH levels deep.

    Args:
        form: syntax in which the model writes calls.

    Attributes:
        num_calls: number of calls read so far.
    """

    def __init__(self, form: CallForm = HERMES) -> None:
        self.num_calls = 0
        self._form = form
        self._held = ""  # text that may become a call, or space before one
        self._opening = ""  # text before a possible call in `_held`; content if it is no call
        self._is_open = False
        self._is_content = False  # for a form without an opening: the text began without a call
        self._scanner: ObjectScanner | None = None  # scanner of the object that `_held` begins with
        self._end: int | None = None  # end of that object in `_held`

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
            piece = self._next()
            if piece is None:
                return
            if piece:
                yield piece

    def finish(self) -> str:
        """Return the content that is still held at the end of the text, such as half of a call."""
        rest = (self._opening if self._is_open else "") + self._held
        is_rest = self._is_open and not self._held.strip(_SPACE + "[],;")
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
        free = len(self._held) - _num_held(self._held, opening)
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
            body = self._held.lstrip(_SPACE + ("[,;" if form.is_list or not form.opening else ""))
            if not body:
                return None
            if form.is_list and not self._opening and body.startswith(form.closing):
                self._held = body[len(form.closing) :]
                self._is_open = False
                return ""
            if body[0] != "{":
                return self._as_text(0)
            self._opening += self._held[: len(self._held) - len(body)]
            self._held = body
            self._scanner = ObjectScanner()
        if self._end is None:
            self._end = self._scanner.end_in(self._held)
        if self._end is None:
            return None
        rest, is_single = self._held[self._end :], bool(form.closing) and not form.is_list
        if is_single:
            _, closing, rest = rest.partition(form.closing)
            if not closing:
                return None
        is_shallow = self._scanner.depth <= 1 + MAX_ARGUMENTS_DEPTH  # 1 is the call's own level
        call = self._call(self._held[: self._end]) if is_shallow else None
        if call is None:
            return self._as_text(self._end)
        self._held = rest
        self._opening = ""
        self._is_open = not is_single
        self._scanner = self._end = None
        return call

    def _as_text(self, end: int) -> str:
        """Remove the opening and the held text up to `end`; return them as content."""
        content = self._opening + self._held[:end]
        self._held = self._held[end:]
        self._opening = ""
        self._is_open = False
        self._scanner = self._end = None
        self._is_content = True
        return content

    def _call(self, text: str) -> dict[str, Any] | None:
        """Return a call in an answer's format, with the model's own text as arguments."""
        try:
            members = members_of(text)
            name, arguments = json.loads(members["name"]), members[self._form.arguments]
        except (ValueError, KeyError):
            return None
        if not isinstance(name, str):
            return None
        self.num_calls += 1
        return {
            "index": self.num_calls - 1,
            "id": self._form.new_id(),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }


def _num_held(text: str, opening: str) -> int:
    """Return how many of the last characters may be space and the beginning of an opening."""
    length = next(size for size in range(len(opening), -1, -1) if text.endswith(opening[:size]))
    before = text[: len(text) - length]
    return length + len(before) - len(before.rstrip())
