# SPDX-License-Identifier: Apache-2.0
"""Constraint on a request's output, checked for size and depth before it is parsed.

The limits are far above real requests, and below inputs that exhaust a parser's stack or take it
seconds.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specops.api.structured.tags import check_tags, texts_of_tags

MAX_TEXT = 1 << 18  # maximum characters of a schema, of a grammar, or of all choices
MAX_REGEX = 1 << 14
MAX_CHOICES = 1024
MAX_DEPTH = 64  # maximum nesting of values, and of brackets

_KINDS = ("json_schema", "regex", "grammar", "choice", "structural_tag")
_OPENING, _CLOSING = "([{", ")]}"
_WHITE_SPACE = re.compile(
    r"(?:[ \t\n\r]|\\(?:[tnr]|x20|x09|x0[aAdD])|\((?:\?:)?|[)|?*+\[\]]|\{[0-9]+(?:,[0-9]*)?\})*"
)


@dataclass(frozen=True, kw_only=True)
class StructuredOutput:
    """Constraint on an output; exactly one of the first five attributes must be set.

    Attributes:
        json_schema: the output is JSON that this JSON Schema allows. The schema is a text or the
            value that `json.loads` returns for it, such as True for any JSON; stored as text.
        regex: the whole output matches this regular expression.
        grammar: the output conforms to this context-free grammar, in llguidance's dialect of Lark
            or in GBNF.
        choice: the output is one of these texts.
        structural_tag: an object, or its JSON text. With `format`: a tree of formats such as tags,
            texts, JSON, regular expressions and grammars. Otherwise: any text in which each part
            that begins with one of `triggers` is one of `structures`, each with `begin`, JSON of
            `schema`, and `end`. Stored as text.
        disable_any_whitespace: for JSON, also inside a grammar: True allows no white space between
            tokens, False any amount. None: the engine's `json_whitespace` applies.
        whitespace_pattern: alternatively, a regular expression for the white space allowed between
            two tokens.
        prefix: a grammar in llguidance's dialect of Lark; a text of it precedes the constrained
            text, such as the model's reasoning.

    Raises:
        ValueError: none or several are set, or one is of the wrong type, too large or too deep.
    """

    json_schema: Mapping[str, Any] | bool | str | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: tuple[str, ...] | None = None
    structural_tag: Mapping[str, Any] | str | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None
    prefix: str | None = None

    def __post_init__(self) -> None:
        present = [name for name in _KINDS if getattr(self, name) is not None]
        if len(present) != 1:
            raise ValueError(
                f"structured_output must have exactly one of {', '.join(_KINDS)}, got "
                f"{' and '.join(present) or 'none of them'}"
            )
        self._check_whitespace()
        if self.prefix is not None:
            _check_text("prefix", self.prefix, MAX_TEXT)
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", _schema_text(self.json_schema))
        elif self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        elif self.structural_tag is not None:
            object.__setattr__(self, "structural_tag", _tags_text(self.structural_tag))
        else:
            name, most = ("regex", MAX_REGEX) if self.regex is not None else ("grammar", MAX_TEXT)
            _check_text(name, getattr(self, name), most)
        try:
            "".join([*(self.choice or (getattr(self, self.kind),)), self.prefix or ""]).encode()
        except UnicodeEncodeError:
            message = f"structured_output: {self.kind} must be valid Unicode, got a lone surrogate"
            raise ValueError(message) from None

    def _check_whitespace(self) -> None:
        disable, pattern = self.disable_any_whitespace, self.whitespace_pattern
        if disable is not None and not isinstance(disable, bool):
            raise ValueError(
                f"structured_output: disable_any_whitespace must be True or False, got {disable!r}"
            )
        if pattern is not None:
            _check_text("whitespace_pattern", pattern, MAX_REGEX)
            if not _WHITE_SPACE.fullmatch(pattern):
                raise ValueError(
                    "structured_output: whitespace_pattern must be a regular expression of "
                    r"spaces, \x20, \t, \n and \r in groups and sets, with |, ?, *, + and {m,n}, "
                    f"got {pattern!r}"
                )
            if disable:
                raise ValueError(
                    "structured_output: whitespace_pattern must be absent if "
                    "disable_any_whitespace is True"
                )
        # Clients send False with every kind of constraint.
        name = "whitespace_pattern" if pattern is not None else "disable_any_whitespace"
        if (disable or pattern is not None) and self.kind in ("regex", "choice"):
            raise ValueError(
                f"structured_output: {name} needs json_schema, structural_tag or grammar, got "
                f"{self.kind}"
            )

    @property
    def kind(self) -> str:
        """Name of the one attribute that is set among the first five."""
        return next(name for name in _KINDS if getattr(self, name) is not None)


def _schema_text(schema: Any) -> str:
    """Return a schema as text, with its keys in the given order."""
    if not isinstance(schema, (str, Mapping, bool)):
        raise ValueError(
            f"structured_output: json_schema must be an object, True or a string, got {schema!r}"
        )
    text, value = _json("json_schema", schema)
    if not isinstance(value, (dict, bool)):
        raise ValueError(
            "structured_output: json_schema must be an object, true or false, got "
            f"{type(value).__name__}"
        )
    return text


def _tags_text(tags: Any) -> str:
    """Return structural tags as text, with their keys in the given order."""
    if not isinstance(tags, (str, Mapping)):
        raise ValueError(
            f"structured_output: structural_tag must be an object or a string, got {tags!r}"
        )
    text, value = _json("structural_tag", tags)
    try:
        check_tags(value)
    except ValueError as error:
        raise ValueError(f"structured_output: structural_tag: {error}") from None
    for name, inner in texts_of_tags(value):
        _check_text(f"structural_tag: {name}", inner, MAX_REGEX if name == "pattern" else MAX_TEXT)
    return text


def _json(name: str, value_or_text: Any) -> tuple[str, Any]:
    """Return JSON both as text and as a value, given either; check its length and depth."""
    text = value_or_text
    if not isinstance(text, str):
        _check_depth(name, value_or_text)
        try:
            text = json.dumps(value_or_text, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"structured_output: {name} is not valid JSON: {error}") from None
    if len(text) > MAX_TEXT:
        raise _too_long(name, text, MAX_TEXT)
    try:
        value = json.loads(text)
    except RecursionError:
        raise _too_deep(name) from None
    except ValueError as error:
        raise ValueError(f"structured_output: {name} is not valid JSON: {error}") from None
    _check_depth(name, value)
    return text, value


def _check_depth(name: str, value: Any) -> None:
    """Check that a value is not nested too deeply, without recursion."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for one in level
            if isinstance(one, (Mapping, list, tuple))
            for inner in (one.values() if isinstance(one, Mapping) else one)
        ]
        if not level:
            return
    raise _too_deep(name)


def _check_text(name: str, text: Any, most: int) -> None:
    if not isinstance(text, str):
        raise ValueError(f"structured_output: {name} must be a string, got {text!r}")
    if len(text) > most:
        raise _too_long(name, text, most)
    depth = 0
    for char in text:
        if char in _OPENING:
            depth += 1
            if depth > MAX_DEPTH:
                raise _too_deep(name)
        elif char in _CLOSING and depth:
            depth -= 1


def _choices(choice: Any) -> tuple[str, ...]:
    if not isinstance(choice, (list, tuple)) or not all(isinstance(one, str) for one in choice):
        raise ValueError(f"structured_output: choice must be a list of strings, got {choice!r}")
    if not 1 <= len(choice) <= MAX_CHOICES:
        raise ValueError(
            f"structured_output: choice must hold 1 to {MAX_CHOICES} strings, got {len(choice)}"
        )
    if not all(choice):
        raise ValueError("structured_output: choice must hold non-empty strings, got ''")
    if (total := sum(map(len, choice))) > MAX_TEXT:
        raise ValueError(
            f"structured_output: choice must have at most {MAX_TEXT} characters, got {total}"
        )
    return tuple(choice)


def _too_long(name: str, text: str, most: int) -> ValueError:
    return ValueError(
        f"structured_output: {name} must have at most {most} characters, got {len(text)}"
    )


def _too_deep(name: str) -> ValueError:
    return ValueError(
        f"structured_output: {name} must be nested at most {MAX_DEPTH} deep, got more"
    )
