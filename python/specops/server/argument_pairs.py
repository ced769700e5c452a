# SPDX-License-Identifier: Apache-2.0
"""Arguments of tool calls that are written as keys and values between tags, not as JSON.

A value of a plain string parameter is the text itself. Every other value is JSON, also a string
with a pattern, a format or a length, so that the grammar enforces its schema. A parameter that may
be a plain string or null is null if its text is "null". In a syntax with `text_middle`, that mark
decides instead whether a value is a text or JSON.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specops.server.json_text import MAX_ARGUMENTS_DEPTH, end_of_value, is_json

_NOTES = {"title", "description", "default", "examples"}
_KNOWN = {"type", "properties", "required", "additionalProperties", *_NOTES}
_KNOWN |= {"$defs", "definitions", "$schema", "$id"}
_NULL = {"type": "null"}


@dataclass(frozen=True)
class Pairs:
    """Syntax of one argument: begin, key, middle, value, end, then `space` before the next one.

    Attributes:
        text_middle: what stands for `middle` before a value that is a text, if it differs.
        none: text that models write in place of the arguments if there are none.
    """

    begin: str
    middle: str
    end: str
    space: str
    text_middle: str | None = None
    none: str = ""

    def rules(self, name: str, schema: Mapping[str, Any], remark: str) -> list[str]:
        """Return the Lark rule `name` of the arguments of a schema, and the rules that it needs.

        Args:
            name: name of the rule, and prefix of the names of other rules.
            schema: JSON Schema of the arguments.
            remark: comment at the end of each line with a JSON Schema.

        Raises:
            ValueError: these arguments cannot be written in this syntax.
        """
        properties = _properties(schema)
        required = schema.get("required", [])
        definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        end = f"{_text(self.end)} {_text(self.space)}" if self.space else _text(self.end)
        space = _text(self.space) if self.space else ""
        parts, rules = [], [f"{name}_text[lazy]: ANY {_text(self.end)}"]

        def add(one: str, key: str, value: Any) -> None:
            rules.append(f"{one}: {_text(self.begin)} {key} {_text(self.middle)} {one}_json {end}")
            rules.append(f"{one}_json: %json {json.dumps(_with(value, definitions))}{remark}")

        for index, (key, value) in enumerate(properties.items()):
            if re.search(r"[<>\n]", key):
                raise ValueError(f"names must not contain <, > or line ends, got {key!r}")
            one = f"{name}_{index}"
            parts.append(one if key in required else f"{one}?")
            begin = _text(self.begin + key + (self.text_middle or self.middle))
            if (texts := self._choices(value)) is not None:
                rules.append(f"{one}: {begin} ({' | '.join(map(_text, texts))}) {end}")
            elif (may_be_null := _is_nullable(value)) is not None:
                rules.append(f"{one}: {begin} {name}_text {space}")
                if may_be_null and self.text_middle is not None:
                    rules[-1] += f" | {_text(self.begin + key + self.middle + 'null')} {end}"
            else:
                add(one, _text(key), value)
        others = schema.get("additionalProperties", not properties)
        if others is not False:
            parts.append(f"{name}_other*")
            key = rf"/[^<>\n{self.middle[0]}]+/"
            add(f"{name}_other", key, {} if others is True else others)
        none = f" | {_text(self.none)}" if self.none and not required else ""
        return [f"{name}: {' '.join(parts)}{none}", *rules]

    def read(self, text: str, schema: Mapping[str, Any] | None) -> str | None:
        """Return the arguments in a text as a JSON object; None if the text ends within a value.

        Args:
            text: keys and values.
            schema: schema of the arguments; None if the function is unknown.

        Raises:
            ValueError: the text has another syntax.
        """
        middles = "|".join(map(_spaced, (self.middle, self.text_middle or self.middle)))
        begin = re.compile(rf"\s*{re.escape(self.begin)}(?P<key>[^<>\n]+)(?:{middles})")
        arguments = {}
        at = 0
        while text[at:].strip():
            found = begin.match(text, at)
            if found is None:
                raise ValueError("expected a key")
            key = found["key"]
            may_be_null = self._is_text(key, schema)
            if self.text_middle is not None:
                may_be_null = False if found[0].endswith(self.text_middle) else None
            end = None
            if may_be_null is None and schema is not None:
                end = self._end_of_json(text, found.end())
            if end is None:
                end = text.find(self.end, found.end())
            if end < 0:
                return None
            arguments[key] = _json(text[found.end() : end], may_be_null)
            at = end + len(self.end)
        return f"{{{', '.join(f'{_text(key)}: {value}' for key, value in arguments.items())}}}"

    def _is_text(self, key: str, schema: Mapping[str, Any] | None) -> bool | None:
        """Return whether a parameter that is a text may also be null; None if it is no text."""
        value = None if schema is None else schema.get("properties", {}).get(key)
        return False if self._choices(value) is not None else _is_nullable(value)

    def _end_of_json(self, text: str, at: int) -> int | None:
        """Return the end of a JSON value, before its end tag; -1 if the text ends before it.

        Return None if the value is not valid JSON.
        """
        try:
            end = end_of_value(text, at)
        except ValueError:
            return None
        if end is None or not text[end:].strip():
            return -1
        return end if text.startswith(self.end, end) else None

    def _choices(self, value: Any) -> list[str] | None:
        """Return the strings that a schema lists; None if it is another schema."""
        if not isinstance(value, dict) or value.keys() - _NOTES - {"type", "enum", "const"}:
            return None
        if ("enum" in value) == ("const" in value) or value.get("type", "string") != "string":
            return None
        texts = value["enum"] if "enum" in value else [value["const"]]
        if not isinstance(texts, list) or not texts:
            return None
        is_text = all(isinstance(text, str) and text and self.end not in text for text in texts)
        return texts if is_text else None


def _json(text: str, may_be_null: bool | None) -> str:
    """Return the JSON text of a value.

    Args:
        text: the value as the model wrote it.
        may_be_null: for a text, whether "null" is null; None if the value is JSON.
    """
    is_json_text = text == "null" if may_be_null else may_be_null is None
    if is_json_text and is_json(text, MAX_ARGUMENTS_DEPTH - 1):
        return text.strip()
    return _text(text)


def _spaced(middle: str) -> str:
    """Return a regular expression of a middle, with any space for a line end within it."""
    pattern = re.sub(r"\\?\n", r"\\s*", re.escape(middle))
    if middle.endswith("\n"):  # further line ends are the value's
        pattern = pattern.removesuffix(r"\s*") + r"\n"
    return pattern


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _properties(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the properties of a schema, each required one included.

    Raises:
        ValueError: the schema is not that of an object, or has a keyword that the syntax cannot
            follow.
    """
    unknown = sorted(schema.keys() - _KNOWN)
    if unknown or schema.get("type", "object") != "object":
        got = unknown[0] if unknown else f"type {schema['type']!r}"
        raise ValueError(f"the schema must be one of an object with properties only, got {got}")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    is_list = isinstance(required, list) and all(isinstance(key, str) for key in required)
    if not isinstance(properties, dict) or not is_list:
        raise ValueError("properties must be an object, and required must be a list of names")
    return {**properties, **{key: {} for key in required if key not in properties}}


def _with(value: Any, definitions: Mapping[str, Any]) -> Any:
    """Return a property's schema with the definitions of its object, for its references."""
    return {**definitions, **value} if isinstance(value, dict) else value


def _is_nullable(value: Any) -> bool | None:
    """Return whether a plain string may also be null; None if the schema is of another kind."""
    if not isinstance(value, dict):
        return None
    kinds = value.get("anyOf")
    if kinds is None and isinstance(value.get("type"), list):
        kinds = [{"type": kind} for kind in value["type"]]
        value = {name: part for name, part in value.items() if name != "type"}
    if isinstance(kinds, list):
        rest = [kind for kind in kinds if kind != _NULL]
        has_others = bool(value.keys() - _NOTES - {"anyOf"})
        is_string = len(rest) == 1 and len(kinds) == 2 and _is_nullable(rest[0]) is False
        return True if is_string and not has_others else None
    is_string = value.get("type") == "string" and not value.keys() - _NOTES - {"type"}
    return False if is_string else None
