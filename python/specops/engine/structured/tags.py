# SPDX-License-Identifier: Apache-2.0
"""Structural tags: any text, in which whatever begins with a trigger has one of some forms.

The shape is vLLM's: `structures`, each with `begin`, `schema` and `end`, and `triggers`.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

MAX_TAGS = 128
_FIELDS = {"type", "structures", "triggers"}
_TAG_FIELDS = {"begin", "schema", "end"}


def check_tags(value: Any) -> None:
    """Refuses what are no structural tags, or cannot be told apart.

    Raises:
        ValueError: the message says what was expected.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"must be an object, got {type(value).__name__}")
    if "format" in value:
        raise ValueError("format is not supported: say structures and triggers")
    _check_fields(value, _FIELDS, {"structures", "triggers"}, "structural_tag")
    if value.get("type", "structural_tag") != "structural_tag":
        raise ValueError(f"type must be 'structural_tag', got {value['type']!r}")
    tags, triggers = value["structures"], value["triggers"]
    for name, given in (("structures", tags), ("triggers", triggers)):
        is_list = isinstance(given, Sequence) and not isinstance(given, str)
        if not is_list or not 1 <= len(given) <= MAX_TAGS:
            raise ValueError(f"{name} must be a list of 1 to {MAX_TAGS}")
    if not all(isinstance(one, str) and one for one in triggers):
        raise ValueError("triggers must be texts of a character or more")
    for one in triggers:
        if sum(one in other for other in triggers) > 1:
            raise ValueError(f"triggers must not contain each other, as {one!r} does another")
    for tag in tags:
        _check_tag(tag, triggers)
    for one in triggers:
        if not any(tag["begin"].startswith(one) for tag in tags):
            raise ValueError(f"triggers must each begin a structure, and {one!r} begins none")


def _check_tag(tag: Any, triggers: Sequence[str]) -> None:
    if not isinstance(tag, Mapping):
        raise ValueError(f"structures must hold objects, got {type(tag).__name__}")
    _check_fields(tag, _TAG_FIELDS, _TAG_FIELDS, "structures")
    for name in ("begin", "end"):
        if not isinstance(tag[name], str):
            raise ValueError(f"{name} of a structure must be a text, got {tag[name]!r}")
    if not isinstance(tag["schema"], (Mapping, bool)):
        raise ValueError(f"schema of a structure must be an object, got {tag['schema']!r}")
    if not any(tag["begin"].startswith(one) for one in triggers):
        raise ValueError(f"begin must start with a trigger, got {tag['begin']!r}")


def _check_fields(value: Mapping[str, Any], known: set[str], needed: set[str], what: str) -> None:
    for name in value:
        if name not in known:
            raise ValueError(f"{what} has an unknown field {name!r}")
    for name in sorted(needed):
        if name not in value:
            raise ValueError(f"{what} must have {name}")


def grammar_of_tags(value: Mapping[str, Any]) -> str:
    """The Lark grammar of checked tags, in llguidance's dialect.

    Text goes on as it likes up to the first trigger, which ends it; behind that stands the rest of
    a tag that begins so, and then text again.
    """
    triggers, tags = value["triggers"], value["structures"]
    starts = " | ".join(f"tagged{i}" for i in range(len(triggers)))
    rules = ["%llguidance {}", f"start: ({starts})* rest", "rest: TEXT", "TEXT: /(.|\\n)*/"]
    for i, trigger in enumerate(triggers):
        own = [j for j, tag in enumerate(tags) if tag["begin"].startswith(trigger)]
        rules.append(f"opening{i}[lazy]: TEXT {_quoted(trigger)}")
        rules.append(f"tagged{i}: opening{i} ({' | '.join(f'tag{j}' for j in own)})")
        for j in own:
            begin, end = tags[j]["begin"][len(trigger) :], tags[j]["end"]
            schema = json.dumps(tags[j]["schema"])
            rules.append(f"tag{j}: {_quoted(begin)} schema{j} {_quoted(end)}")
            rules.append(f"schema{j}: %json {schema if schema != 'true' else '{}'}")
    return "\n".join(rules)


def _quoted(text: str) -> str:
    """A text in a rule; nothing, where it is empty."""
    return json.dumps(text) if text else ""
