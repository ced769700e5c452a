# SPDX-License-Identifier: Apache-2.0
"""Reasoning before an answer: one table of its formats, and a parser that separates it.

gpt-oss' format is in `harmony.py`: it also has tool calls.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from specops.server.call_forms import CallForm
from specops.server.call_reader import CallReader, num_held

_SPACE = " \t\r\n"

# State of a prompt: its end opens reasoning, closes it, or leaves it to the model to open it.
Begin: TypeAlias = Literal["open", "closed", "free"]


@dataclass(frozen=True)
class Reasoning:
    """Piece of the reasoning of an answer."""

    text: str


Piece: TypeAlias = "str | Reasoning | dict[str, Any]"  # content, reasoning, or a tool call


class Reader(Protocol):
    """Parser of an answer that arrives in pieces."""

    @property
    def num_calls(self) -> int:
        """Number of tool calls read so far."""
        ...

    @property
    def num_reasoning_bytes(self) -> int:
        """Length of the text up to the end of the reasoning, in UTF-8."""
        ...

    def pieces(self, text: str) -> Iterator[Piece]:
        """Add a piece of the text; yield what is final."""
        ...

    def finish(self) -> Iterator[Piece]:
        """Yield what is still held at the end of the text."""
        ...


@dataclass(frozen=True)
class ReasoningForm:
    """Format of reasoning: text between two tags, at the start of an answer.

    Attributes:
        names: names for `--reasoning-parser`; those after the first are vLLM's.
        mark: regular expression that occurs in chat templates of this format.
        opening, closing: the tags; a prompt may end with the opening tag.
        wrapper: the tags around the content after the reasoning, if the format has any.
    """

    names: tuple[str, ...]
    mark: str
    opening: str
    closing: str
    wrapper: tuple[str, str] | None = None

    def begin(self, prompt: str) -> Begin:
        """Return the state of a prompt."""
        end = prompt.rstrip()
        if end.endswith(self.opening):
            return "open"
        return "closed" if end.endswith(self.closing) else "free"

    def prefix(self, begin: Begin, *, calls: bool) -> str | None:
        """Return a Lark grammar of the reasoning before a constrained text; None if there is none.

        Args:
            begin: state of the prompt.
            calls: whether the constrained text is that of tool calls.
        """
        if begin == "closed":
            return None
        start = "reasoning" if begin == "open" else "(OPENING reasoning)?"
        wrapper = "" if self.wrapper is None or calls else f' ("{self.wrapper[0]}" GAP)?'
        return "\n".join(
            [
                "%llguidance {}",
                f"start: {start}",
                f'OPENING: /[ \\n]{{0,4}}/ "{self.opening}"',
                f"reasoning: until GAP{wrapper}",
                f'until[lazy]: /(.|\\n)*/ "{self.closing}"',
                r"GAP: /\n{0,4}/",
            ]
        )

    def reader(
        self, begin: Begin, form: CallForm | None, schemas: Mapping[str, Mapping[str, Any]]
    ) -> Reader | None:
        """Return a parser of an answer; None if the answer is all content.

        Args:
            begin: state of the prompt.
            form: format of tool calls; None if the answer may not call tools.
            schemas: schemas of the functions' arguments by name.
        """
        calls = None if form is None else CallReader(form, schemas)
        if begin == "closed" and self.wrapper is None:
            return None if calls is None else TagReader(None, calls)
        return TagReader(self, calls, begin=begin)

    def in_history(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return an assistant's message with its reasoning as templates of this format read it."""
        return message


ERNIE = ReasoningForm(
    ("ernie45",), "<response>", "<think>", "</think>", ("<response>", "</response>")
)
THINK = ReasoningForm(
    ("think", "deepseek_r1", "deepseek_v3", "glm45", "kimi_k2", "qwen3"),
    "</?think>",
    "<think>",
    "</think>",
)
MISTRAL_THINK = ReasoningForm(("mistral",), r"\[THINK\]", "[THINK]", "[/THINK]")


class TagReader:
    """Parser of an answer with reasoning between tags, and tool calls after it.

    White space around the reasoning and line ends before the content are dropped: templates write
    their own. So are the tags around the content, and line ends inside them. Tags elsewhere are
    content.

    Args:
        form: format of the reasoning; None if the answer has none.
        calls: parser of the text after the reasoning; None if it has no calls.
        begin: state of the prompt.
    """

    def __init__(
        self, form: ReasoningForm | None, calls: CallReader | None, *, begin: Begin = "free"
    ) -> None:
        self._form = form
        self._calls = calls
        self._is_open = begin == "open"
        self._state = "content" if form is None else "gap" if begin == "closed" else "start"
        self._held = ""
        self._has_begun = False  # whether some reasoning has been yielded
        self._num_bytes = 0
        self._end = 0  # bytes up to the end of the reasoning

    @property
    def num_calls(self) -> int:
        """Number of calls read so far."""
        return 0 if self._calls is None else self._calls.num_calls

    @property
    def num_reasoning_bytes(self) -> int:
        """Length of the text up to the end of the reasoning, in UTF-8; 0 if there is none."""
        return self._end if self._has_begun else 0

    def pieces(self, text: str) -> Iterator[Piece]:
        """Add a piece of the text; yield what is final."""
        if self._state == "content":
            yield from self._content(text)
            return
        self._num_bytes += len(text.encode("utf-8", "replace"))
        self._held += text
        yield from self._split(is_end=False)

    def finish(self) -> Iterator[Piece]:
        """Yield what is still held at the end of the text."""
        yield from self._split(is_end=True)
        if self._calls is not None and (rest := self._calls.finish()):
            yield rest

    def _content(self, text: str) -> Iterator[Piece]:
        if not text:
            return
        if self._calls is None:
            yield text
        else:
            yield from self._calls.pieces(text)

    def _split(self, *, is_end: bool) -> Iterator[Piece]:
        """Yield what is final of the held text, going through the states in their order."""
        form = self._form
        if form is None or self._state == "content":
            return
        if self._state == "start":
            body = self._held.lstrip(_SPACE)
            if form.opening.startswith(body) and not is_end:
                return
            is_tag = body.startswith(form.opening)
            self._state = "reasoning" if is_tag or self._is_open else "content"
            if is_tag:
                self._held = body[len(form.opening) :]
        if self._state == "reasoning":
            before, closing, rest = self._held.partition(form.closing)
            self._end = self._num_bytes - len(rest.encode("utf-8", "replace"))
            is_end_of_it = is_end or bool(closing)
            free = len(before) if is_end_of_it else len(before) - num_held(before, form.closing)
            self._held = rest if closing else before[free:]
            reasoning = before[:free] if self._has_begun else before[:free].lstrip(_SPACE)
            if is_end_of_it:
                reasoning = reasoning.rstrip(_SPACE)
                self._state = "gap"
            if reasoning:
                self._has_begun = True
                yield Reasoning(reasoning)
        if self._state == "gap":
            self._held = self._held.lstrip("\n")
            opening = "" if form.wrapper is None else form.wrapper[0]
            if opening and self._held.startswith(opening):
                self._held = self._held[len(opening) :]
                self._state = "wrapped gap"
            elif self._held and (is_end or not opening.startswith(self._held)):
                self._state = "content"
        if self._state == "wrapped gap":
            self._held = self._held.lstrip("\n")
            if self._held:
                self._state = "wrapped"
        if self._state == "wrapped" and form.wrapper is not None:
            yield from self._wrapped(form.wrapper[1], is_end=is_end)
        if self._state == "end":
            self._held = self._held.lstrip("\n")
            if self._held:
                self._state = "content"
        if self._state == "content":
            content, self._held = self._held, ""
            yield from self._content(content)

    def _wrapped(self, closing: str, *, is_end: bool) -> Iterator[Piece]:
        """Yield what is final of the content up to a closing tag."""
        before, found, rest = self._held.partition(closing)
        if found:
            content, self._held = before.rstrip("\n"), rest
            self._state = "end"
        else:
            free = len(before) if is_end else len(before) - num_held(before, closing)
            content, self._held = before[:free], before[free:]
        yield from self._content(content)
