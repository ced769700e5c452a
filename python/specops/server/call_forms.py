# SPDX-License-Identifier: Apache-2.0
"""How models write calls of tools: grammars of them, and calls read from a text as it comes.

A call is a JSON object with the tool's name and arguments; models differ in what stands around it.
"""

import json
import re
import secrets
import string
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_TEXT = "TEXT: /(.|\\n)*/"
_SPACE = " \t\r\n"


@dataclass(frozen=True)
class CallForm:
    """A way to write calls.

    Attributes:
        name: as vLLM's `--tool-call-parser` has it.
        opening: what stands before calls; nothing: a text that begins with an object is calls.
        closing: what stands behind every call, or behind all of them.
        arguments: the name of a call's arguments.
        is_list: the calls are one JSON list, and the text ends with it.
        id_length: of a call's id, where templates insist on one.
    """

    name: str
    opening: str
    closing: str
    arguments: str = "arguments"
    is_list: bool = False
    id_length: int | None = None

    def rules(self, *, must: bool, several: bool) -> list[str]:
        """Rules of a Lark grammar from `start` down to `call`, one call.

        Args:
            must: there has to be a call; else any text may stand in its place, or before it.
            several: there may be more than one.
        """
        opening, closing = json.dumps(self.opening), json.dumps(self.closing)
        if not self.opening:
            calls = 'calls: call ("; " call)*' if several else "calls: call"
            # What begins as an object is a call.
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
        """An id for a call."""
        if self.id_length is None:
            return f"call_{secrets.token_hex(12)}"
        letters = string.ascii_letters + string.digits
        return "".join(secrets.choice(letters) for _ in range(self.id_length))


HERMES = CallForm("hermes", "<tool_call>", "</tool_call>")
LLAMA = CallForm("llama3_json", "", "", arguments="parameters")
MISTRAL = CallForm("mistral", "[TOOL_CALLS]", "]", is_list=True, id_length=9)
CALL_FORMS = {form.name: form for form in (HERMES, LLAMA, MISTRAL)}


def _rest(text: str) -> list[str]:
    return ["rest: TEXT", text]


def form_of_template(source: str) -> CallForm | None:
    """How a chat template teaches calls; None: in no way that is known here."""
    if "[TOOL_CALLS]" in source:
        return None if "[ARGS]" in source else MISTRAL  # newer ones name the tool outside of JSON
    if "<tool_call>" in source:
        others = ("<function=", "<arg_key>")
        has_form = all(word in source for word in ("name", "arguments"))
        return HERMES if has_form and not any(word in source for word in others) else None
    if re.search(r'"name"\s*:.*"parameters"\s*:', source) and "<|" in source:
        return LLAMA
    return None


class CallReader:
    """Takes the calls out of a text, as it comes.

    Args:
        form: how they are written.

    Attributes:
        num_calls: read so far.
    """

    def __init__(self, form: CallForm = HERMES) -> None:
        self.num_calls = 0
        self._form = form
        self._held = ""  # may become a call, or space before one
        self._is_open = False
        self._is_content = False  # without an opening: the text has begun, and with no call
        self._decoder = json.JSONDecoder()

    def feed(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """Adds a piece of the text; returns what of it is no call, and the complete calls."""
        pieces = list(self.pieces(text))
        content = "".join(one for one in pieces if isinstance(one, str))
        return content, [one for one in pieces if not isinstance(one, str)]

    def pieces(self, text: str) -> Iterator[str | dict[str, Any]]:
        """Adds a piece of the text; yields texts that are no calls, and calls, as they stand."""
        self._held += text
        while True:
            if not self._is_open:
                content, self._is_open = self._outside()
                if content:
                    yield content
                if not self._is_open:
                    return
            # Nothing can have become complete but with one of these.
            may_end = any(mark in text for mark in "}" + self._form.closing[-1:])
            calls: list[dict[str, Any]] = []
            is_found = may_end and self._read_call(calls)
            yield from calls
            if not is_found:
                return

    def finish(self) -> str:
        """The content that is left when the text has ended: a call that is not complete is text."""
        left = (self._form.opening if self._is_open else "") + self._held
        is_rest = self._is_open and not self._held.strip(_SPACE + "[],;")
        self._held, self._is_open = "", False
        if self.num_calls and (is_rest or not left.strip()):
            return ""
        return left

    def _outside(self) -> tuple[str, bool]:
        """Takes content off what is held; returns it, and whether calls begin behind it."""
        opening = self._form.opening
        if not opening:
            begun = self._held.lstrip(_SPACE)
            if not self._is_content and not begun:
                return "", False
            if not self._is_content and begun[0] == "{":
                self._held = begun
                return "", True
            self._is_content = True
            content, self._held = self._held, ""
            return content, False
        before, found, rest = self._held.partition(opening)
        if found:
            self._held = rest
            return before.rstrip(), True
        free = len(self._held) - _num_held(self._held, opening)
        content, self._held = self._held[:free], self._held[free:]
        return content, False

    def _read_call(self, calls: list[dict[str, Any]]) -> bool:
        """Reads the next call, or what stands behind the last one; whether it found something."""
        form = self._form
        body = self._held.lstrip(_SPACE + ("[,;" if form.is_list or not form.opening else ""))
        if form.is_list and body.startswith(form.closing):
            self._held, self._is_open = body[len(form.closing) :], False
            return True
        try:
            call, end = self._decoder.raw_decode(body)
        except ValueError:
            return False
        rest = body[end:]
        if form.closing and not form.is_list:
            _, closing, rest = rest.partition(form.closing)
            if not closing:
                return False
            self._is_open = False
        self._held = rest
        calls.append(self._call(call))
        return True

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        """A call as an answer has it; the grammar has seen to its form."""
        arguments = json.dumps(call[self._form.arguments], ensure_ascii=False)
        self.num_calls += 1
        return {
            "index": self.num_calls - 1,
            "id": self._form.new_id(),
            "type": "function",
            "function": {"name": call["name"], "arguments": arguments},
        }


def _num_held(text: str, opening: str) -> int:
    """How many of the last characters may be space before a call, and its beginning."""
    length = next(size for size in range(len(opening), -1, -1) if text.endswith(opening[:size]))
    before = text[: len(text) - length]
    return length + len(before) - len(before.rstrip())
