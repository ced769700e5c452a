# SPDX-License-Identifier: Apache-2.0
"""gpt-oss' format of answers: messages of several channels, with reasoning and tool calls.

An answer is a row of messages, `<|channel|>CHANNEL<|message|>TEXT<|end|>`, each but the first after
`<|start|>assistant`. Reasoning is in the channel "analysis", content in "final" and "commentary".
A call is a message `to=functions.NAME` whose text is its arguments; it ends the answer.
"""

import json
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from specops.server.call_forms import ANY, NAME, CallForm
from specops.server.json_text import ObjectScanner, is_json
from specops.server.reasoning import Begin, Piece, Reader, Reasoning, ReasoningForm

_MESSAGE = "<|message|>"
_HEADERS = ("<|channel|>", "<|start|>", "<|constrain|>", _MESSAGE, " to=")  # how a header begins
_ENDS = ("<|end|>", "<|start|>")  # how a text ends; `<|return|>` and `<|call|>` end the answer
_TO = re.compile(rf"\bto=functions\.({NAME})")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")

# Messages before the last one of an answer.
_EARLIER = [
    'analysis: "<|channel|>analysis<|message|>" until "<|start|>assistant"',
    'preamble: "<|channel|>commentary<|message|>" until "<|start|>assistant"',
    'until[lazy]: ANY "<|end|>"',
    ANY,
]


class HarmonyCallForm(CallForm):
    """Format of calls in gpt-oss' answers, of which each has one call at most."""

    def grammar(self, functions: Mapping[str, dict[str, Any]], *, must: bool, several: bool) -> str:
        """Return a Lark grammar of whole answers, as `CallForm.grammar`."""
        last = "call" if must else "(call | final)"
        rules = ["%llguidance {}", f"start: (analysis | preamble)* {last}", *_EARLIER]
        rules += [
            'final: "<|channel|>final<|message|>" FINAL',
            'FINAL: ANY & ~(ANY "<|end|>" ANY)',
        ]
        rules.append(f"call: {' | '.join(f'call{i}' for i in range(len(functions)))}")
        for index, (name, schema) in enumerate(functions.items()):
            to = f"to=functions.{name}"
            heads = [f"<|channel|>commentary {to} ", f" {to}<|channel|>commentary "]
            begin = " | ".join(map(json.dumps, heads))
            rules.append(f'HEAD{index}: ({begin}) "<|constrain|>"? "json<|message|>"')
            rules.append(f"call{index}: HEAD{index} arguments{index}")
            rules.append(f"arguments{index}: %json {json.dumps(schema)} // tool {name}")
        return "\n".join(rules)


@dataclass(frozen=True)
class HarmonyReasoningForm(ReasoningForm):
    """Format of reasoning in gpt-oss' answers."""

    def begin(self, prompt: str) -> Begin:
        """Return "free", or "closed" if the prompt begins the text of a message."""
        return "closed" if prompt.endswith(_MESSAGE) else "free"

    def prefix(self, begin: Begin, *, calls: bool) -> str | None:
        """Return a grammar of the messages before the final one.

        None if the prompt begins the final text, or if the answer may call tools: the grammar of
        calls contains these messages.
        """
        if calls or begin == "closed":
            return None
        start = 'start: (analysis | preamble)* "<|channel|>final<|message|>"'
        return "\n".join(["%llguidance {}", start, *_EARLIER])

    def reader(
        self, begin: Begin, form: CallForm | None, schemas: Mapping[str, Mapping[str, Any]]
    ) -> Reader:
        """Return a parser of an answer."""
        return HarmonyReader(may_call=form is not None)

    def in_history(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message with its reasoning as `thinking`.

        If the message has calls, its content is added to the reasoning, because the template writes
        only one message before a call.
        """
        reasoning, content = message.get("reasoning_content"), message["content"]
        if not reasoning:
            return message
        if content and "tool_calls" in message:
            return {**message, "thinking": f"{reasoning}\n\n{content}", "content": ""}
        return {**message, "thinking": reasoning}


HARMONY = HarmonyCallForm("openai", (r"<\|channel\|>", r"<\|message\|>"))
HARMONY_REASONING = HarmonyReasoningForm(
    ("harmony", "openai_gptoss"), r"<\|channel\|>[\s\S]*<\|message\|>", "<|channel|>analysis", ""
)


class HarmonyReader:
    """Parser of gpt-oss' answers.

    A call stays text if it is incomplete or not valid.

    Args:
        may_call: whether the answer may call tools; otherwise a call is content.

    Attributes:
        num_calls: number of calls read so far.
        num_reasoning_bytes: length of the text up to the end of the reasoning, in UTF-8.
    """

    def __init__(self, *, may_call: bool) -> None:
        self.num_calls = 0
        self.num_reasoning_bytes = 0
        self._may_call = may_call
        self._held = ""
        self._num_bytes = 0
        self._state = "start"  # or "header", "reasoning", "content", "call"
        self._name = ""  # of the function that the message calls
        self._scanner = ObjectScanner()
        self._seen: set[str] = set()  # states with text in an earlier message
        self._is_new = False  # whether the message has no text yet

    def pieces(self, text: str) -> Iterator[Piece]:
        """Add a piece of the text; yield what is final."""
        self._num_bytes += len(text.encode("utf-8", "replace"))
        self._held += text
        yield from self._read(is_end=False)

    def finish(self) -> Iterator[Piece]:
        """Yield what is still held at the end of the text, except an incomplete header."""
        yield from self._read(is_end=True)

    def _read(self, *, is_end: bool) -> Iterator[Piece]:
        while True:
            if self._state == "start":
                if not is_end and any(one.startswith(self._held) for one in _HEADERS):
                    return
                is_header = self._held.startswith(_HEADERS)
                self._begin("header" if is_header else "content")
            if self._state == "header":
                header, found, rest = self._held.partition(_MESSAGE)
                if not found:
                    return
                self._held = rest
                self._begin(self._kind(header))
            if self._state == "call":
                end = self._scanner.end_in(self._held) if self._held.strip() else None
                if end is None and not is_end:
                    return
                call = None if end is None else self._call(self._held[:end])
                if call is not None:
                    self._held = self._held[end:]
                    self._state = "header"
                    yield call
                    continue
                self._begin("content")
            ends = [at for one in _ENDS if (at := self._held.find(one)) >= 0]
            end = min(ends, default=len(self._held) if is_end else self._free())
            text, self._held = self._held[:end], self._held[end:]
            if self._state == "reasoning":
                behind = len(self._held.encode("utf-8", "replace"))
                self.num_reasoning_bytes = self._num_bytes - behind
            if text:
                yield from self._text(text)
            if not ends:
                return
            self._state = "header"

    def _begin(self, state: str) -> None:
        self._state = state
        self._is_new = True
        self._scanner = ObjectScanner()

    def _kind(self, header: str) -> str:
        """Return the state for the text after a header."""
        called = _TO.search(header)
        channel = _CHANNEL.search(header)
        if called is not None and self._may_call:
            self._name = called[1]
            return "call"
        return "reasoning" if channel is not None and channel[1] == "analysis" else "content"

    def _text(self, text: str) -> Iterator[Piece]:
        """Yield text of a message; an empty line separates it from an earlier message's."""
        if self._is_new and self._state in self._seen:
            text = "\n\n" + text
        self._is_new = False
        self._seen.add(self._state)
        yield Reasoning(text) if self._state == "reasoning" else text

    def _free(self) -> int:
        """Return the length of the held text that cannot be part of an end."""
        longest = max(
            size for one in _ENDS for size in range(len(one)) if self._held.endswith(one[:size])
        )
        return len(self._held) - longest

    def _call(self, text: str) -> dict[str, Any] | None:
        """Return a call in an answer's format, with the model's own text as arguments."""
        arguments = text.strip()
        if not arguments.startswith("{") or not is_json(arguments):
            return None
        self.num_calls += 1
        return {
            "index": self.num_calls - 1,
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": self._name, "arguments": arguments},
        }
