# SPDX-License-Identifier: Apache-2.0
"""Structural tags: text in which each part that begins with a trigger has one of several forms.

The input has vLLM's shapes: a `format`, or the older `structures`, each with `begin`, `schema` and
`end`, plus `triggers`, which is converted to a format of type `triggered_tags`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from specops.api.structured.formats import (
    check_fields,
    check_format,
    check_list,
    check_triggers,
    lark_of_format,
    texts_of_format,
)

_FIELDS = {"type", "structures", "triggers"}
_TAG_FIELDS = {"begin", "schema", "end"}


def check_tags(value: Any) -> None:
    """Check that a value is a valid structural tag object.

    Raises:
        ValueError: the value is not valid; the message says what was expected.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"must be an object, got {type(value).__name__}")
    if value.get("type", "structural_tag") != "structural_tag":
        raise ValueError(f"type must be 'structural_tag', got {value['type']!r}")
    if "format" in value:
        check_fields(value, {"type", "format"}, set(), "structural_tag with format")
        check_format(value["format"])
        return
    check_fields(value, _FIELDS, {"structures", "triggers"}, "structural_tag without format")
    check_list(value["structures"], "structures")
    for tag in value["structures"]:
        _check_tag(tag)
    begins = [tag["begin"] for tag in value["structures"]]
    check_triggers(value["triggers"], begins, "", ())


def _check_tag(tag: Any) -> None:
    if not isinstance(tag, Mapping):
        raise ValueError(f"structures must hold objects, got {type(tag).__name__}")
    check_fields(tag, _TAG_FIELDS, _TAG_FIELDS, "structures")
    for name in ("begin", "end"):
        if not isinstance(tag[name], str):
            raise ValueError(f"{name} of a structure must be a string, got {tag[name]!r}")
    if not isinstance(tag["schema"], (Mapping, bool)):
        raise ValueError(f"schema of a structure must be an object, got {tag['schema']!r}")


def texts_of_tags(value: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the regular expressions and grammars in checked tags, as `texts_of_format`."""
    return texts_of_format(_format(value))


def grammar_of_tags(value: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Return checked tags as a grammar in llguidance's Lark, and the grammars it refers to."""
    return lark_of_format(_format(value))


def _format(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return checked tags of either shape as a format."""
    if "format" in value:
        found: Mapping[str, Any] = value["format"]
        return found
    tags = [
        {
            "begin": tag["begin"],
            "content": {"type": "json_schema", "json_schema": tag["schema"]},
            "end": tag["end"],
        }
        for tag in value["structures"]
    ]
    return {"type": "triggered_tags", "triggers": value["triggers"], "tags": tags}
