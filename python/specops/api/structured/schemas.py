# SPDX-License-Identifier: Apache-2.0
"""Preparation of JSON Schemas for llguidance: white space, and numbers that it would misread.

Schemas occur alone, or in a grammar after `%json`.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

# llguidance's options for white space between JSON tokens, by the values of `json_whitespace`.
# "bounded" allows what compact and pretty JSON printers write: at most one space, or a line end and
# indentation, between two tokens. So white space cannot go on forever, whatever the model prefers.
WHITESPACE: dict[str, dict[str, Any]] = {
    "bounded": {"whitespace_pattern": r"\x20|\r?\n[\x20\t]{0,32}"},
    "any": {"whitespace_flexible": True},
    "none": {"whitespace_flexible": False},
}

# llguidance reads numbers as 64-bit floats, and does arithmetic on bounds.
_MAX_EXACT = 2**53
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_VALUES = ("const", "enum")  # their contents are values, not schemas
_NOTES = ("default", "examples")  # annotations, which constrain nothing
_NAMED = ("properties", "patternProperties", "$defs", "definitions")  # map any name to a schema
_WHITE_SPACE = ("whitespace_pattern", "whitespace_flexible")

# Parts of a Lark grammar with any contents (strings, regular expressions, comments), or %json.
_PARTS = re.compile(
    r'"(?:\\.|[^"\\\n])*"|/(?![/*])(?:\\.|[^/\\\n])+/|(?://|#)[^\n]*|(?P<schema>%json\s*)'
)


def with_options(schema: Any, options: Mapping[str, Any]) -> Any:
    """Return a schema with llguidance's options added; options that it already has are kept.

    Raises:
        ValueError: the schema has a number that llguidance cannot represent exactly.
    """
    _check_numbers(schema)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        return schema
    own = schema.get("x-guidance", {})
    if isinstance(own, dict):
        # llguidance would follow only one of two white space options: use the schema's own.
        has_own = any(name in own for name in _WHITE_SPACE)
        ours = {k: v for k, v in options.items() if not (has_own and k in _WHITE_SPACE)}
        own = {**ours, **own}
    return {**schema, "x-guidance": own}


def lark_with_options(grammar: str, options: Mapping[str, Any]) -> str:
    """Return a Lark grammar with these options added to its schemas by `with_options`.

    Raises:
        ValueError: as for `with_options`.
    """
    return "".join(_lark_parts(grammar, options))


def _lark_parts(grammar: str, options: Mapping[str, Any]) -> Iterator[str]:
    decoder = json.JSONDecoder()
    begin = at = 0
    while (part := _PARTS.search(grammar, at)) is not None:
        at = part.end()
        if part["schema"] is None:
            continue
        try:
            schema, end = decoder.raw_decode(grammar, at)
        except (ValueError, RecursionError):  # llguidance will report the error
            continue
        yield grammar[begin:at]
        yield json.dumps(with_options(schema, options), ensure_ascii=False)
        begin = at = end
    yield grammar[begin:]


def _check_numbers(schema: Any) -> None:
    """Check that bounds and values are exact as 64-bit floats."""
    level = [schema]
    while level:  # one round per level; the depth is bounded
        inner: list[Any] = []
        for one in level:
            if isinstance(one, list):
                inner += one
            elif isinstance(one, dict):
                for name in _BOUNDS:
                    _check_bound(name, one.get(name))
                for name in _VALUES:
                    _check_values(name, one.get(name))
                for name, value in one.items():
                    if name in _NAMED and isinstance(value, dict):
                        inner += value.values()
                    elif name not in _VALUES + _NOTES:
                        inner.append(value)
        level = inner


def _check_bound(name: str, value: Any) -> None:
    if isinstance(value, (int, float)) and abs(value) > _MAX_EXACT:
        raise ValueError(
            f"{name} must be at most 2^53 in magnitude, where numbers are still exact, got {value}"
        )


def _check_values(name: str, value: Any) -> None:
    level = [value]
    while level:
        for one in level:
            if isinstance(one, int) and abs(one) > _MAX_EXACT:
                raise ValueError(
                    f"{name} must hold integers of at most 2^53 in magnitude, which are still "
                    f"exact, got {one}"
                )
        level = [
            inner
            for one in level
            if isinstance(one, (list, dict))
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
