# SPDX-License-Identifier: Apache-2.0
"""Formats of structural tags: a tree of texts, JSON, regular expressions, grammars and tags.

The syntax is that of xgrammar's structural tags, which vLLM accepts
(https://github.com/mlc-ai/xgrammar, documentation of version 0.2.6). Free text (`any_text`,
`triggered_tags`) must be ended by the `end` of the enclosing tag or by the end of the output.
output.py checks the length of texts.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MAX_PARTS = 128  # maximum number of entries of a list in a format

_FIELDS: dict[str, tuple[set[str], set[str]]] = {  # required fields, optional fields
    "const_string": ({"value"}, set()),
    "json_schema": ({"json_schema"}, {"style", "any_order"}),
    "regex": ({"pattern"}, set()),
    "grammar": ({"grammar"}, set()),
    "any_text": (set(), {"excludes", "max_tokens", "max_chars"}),
    "sequence": ({"elements"}, set()),
    "or": ({"elements"}, set()),
    "tag": ({"begin", "content", "end"}, set()),
    "triggered_tags": ({"triggers", "tags"}, {"at_least_one", "stop_after_first", "excludes"}),
    "tags_with_separator": ({"tags", "separator"}, {"at_least_one", "stop_after_first"}),
}
_FLAGS = ("at_least_one", "stop_after_first")
_ONLY = {"style": "json", "any_order": False, "max_tokens": None, "max_chars": None}

_Parts = list[tuple[str, bool]]  # (Lark text, whether it is a regular expression)


def check_format(value: Any, where: str = "format", ends: Sequence[str] | None = None) -> None:
    """Check that a value is a valid format that llguidance's Lark can express.

    Args:
        value: the format.
        where: path of the format in the request, for error messages.
        ends: texts that may follow the format and end it; empty: nothing ends it; None: the end of
            the output ends it.

    Raises:
        ValueError: the value is not valid; the message names the field and what was expected.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} must be an object, got {type(value).__name__}")
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise ValueError(f"{where}.type must be one of {', '.join(_FIELDS)}, got {kind!r}")
    needed, optional = _FIELDS[kind]
    check_fields(value, {"type"} | needed | optional, needed, f"{where} of type {kind!r}")
    _check_values(value, where)
    if ends is not None and not ends and _is_free(value):
        raise ValueError(
            f"{where} of type {kind!r} must be last in the output, or in a tag whose end has a "
            "character or more: nothing else ends its text"
        )
    if kind in ("sequence", "or"):
        elements = value["elements"]
        check_list(elements, f"{where}.elements")
        for i, one in enumerate(elements):
            is_last = kind == "or" or i == len(elements) - 1
            check_format(one, f"{where}.elements[{i}]", ends if is_last else ())
    elif kind == "tag":
        own = _ends(value)
        check_list(own, f"{where}.end")
        if not all(isinstance(one, str) for one in own):
            raise ValueError(
                f"{where}.end must be a string or a list of strings, got {value['end']!r}"
            )
        check_format(value["content"], f"{where}.content", () if "" in own else own)
    elif "tags" in value:
        check_list(value["tags"], f"{where}.tags")
        for i, one in enumerate(value["tags"]):
            at = f"{where}.tags[{i}]"
            if isinstance(one, Mapping) and one.get("type", "tag") != "tag":
                raise ValueError(f"{at}.type must be 'tag', got {one['type']!r}")
            check_format({"type": "tag", **one} if isinstance(one, Mapping) else one, at, ())
        if kind == "triggered_tags":
            begins = [one["begin"] for one in value["tags"]]
            check_triggers(value["triggers"], begins, f"{where}.", ends or ())


def _check_values(value: Mapping[str, Any], where: str) -> None:
    """Check the types of fields, and that unsupported options have their default."""
    for name, only in _ONLY.items():
        if value.get(name, only) != only:
            raise ValueError(f"{where}.{name} must be {only!r} or absent, got {value[name]!r}")
    for name in _FLAGS:
        if not isinstance(value.get(name, False), bool):
            raise ValueError(f"{where}.{name} must be true or false, got {value[name]!r}")
    for name in ("value", "pattern", "grammar", "begin", "separator"):
        may_be_empty = name in ("begin", "separator")
        if name in value and not (isinstance(value[name], str) and (value[name] or may_be_empty)):
            what = "a string" if may_be_empty else "a non-empty string"
            raise ValueError(f"{where}.{name} must be {what}, got {value[name]!r}")
    if not isinstance(value.get("json_schema", {}), (Mapping, bool)):
        got = value["json_schema"]
        raise ValueError(f"{where}.json_schema must be an object, true or false, got {got!r}")
    if value.get("excludes", []) != []:
        check_texts(value["excludes"], f"{where}.excludes")


def check_triggers(triggers: Any, begins: Sequence[str], where: str, ends: Sequence[str]) -> None:
    """Check that no trigger contains another trigger or an end text, and that each begins a tag."""
    check_texts(triggers, f"{where}triggers")
    for one in triggers:
        if sum(one in other for other in triggers) > 1:
            raise ValueError(
                f"{where}triggers must not contain each other, as {one!r} does another"
            )
        for end in ends:
            if one in end or end in one:
                raise ValueError(
                    f"{where}triggers must not contain the end of the tag around them, nor be "
                    f"in it, got {one!r} and {end!r}"
                )
        if not any(begin.startswith(one) for begin in begins):
            raise ValueError(f"{where}triggers must each be a prefix of a tag's begin, got {one!r}")
    for begin in begins:
        if not any(begin.startswith(one) for one in triggers):
            raise ValueError(f"{where}begin must start with a trigger, got {begin!r}")


def check_list(value: Any, where: str) -> None:
    """Check that a value is a list, neither empty nor too long."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    if not is_list or not 1 <= len(value) <= MAX_PARTS:
        raise ValueError(f"{where} must be a list of 1 to {MAX_PARTS} items")


def check_texts(value: Any, where: str) -> None:
    """Check that a value is a list of non-empty texts."""
    check_list(value, where)
    if not all(isinstance(one, str) and one for one in value):
        raise ValueError(f"{where} must be non-empty strings")


def check_fields(value: Mapping[str, Any], known: set[str], needed: set[str], what: str) -> None:
    """Check that all fields are known and that no required field is missing."""
    for name in value:
        if name not in known:
            raise ValueError(f"{what} has an unknown field {name!r}")
    for name in sorted(needed):
        if name not in value:
            raise ValueError(f"{what} must have {name}")


def texts_of_format(value: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the texts to check in a format, each as ("pattern" or "grammar", text)."""
    for name in ("pattern", "grammar"):
        if name in value:
            yield name, value[name]
    for one in [*value.get("elements", ()), *value.get("tags", ())]:
        yield from texts_of_format(one)
    if "content" in value:
        yield from texts_of_format(value["content"])


def lark_of_format(value: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Return a checked format in llguidance's Lark, and its embedded grammars by name."""
    writer = _Writer()
    start = _joined(writer, writer.parts(value, ()))
    lines = ["%llguidance {}", f"start: {start}", "TEXT: /(.|\\n)*/", *writer.rules]
    return "\n".join(lines), writer.grammars


class _Writer:
    """Conversion of a format to Lark rules, which are collected here.

    Adjacent regular parts become one terminal, so that the longest match of one part cannot swallow
    the start of the next. Free text and its end form a lazy rule, so the text stops at the first
    occurrence of its end.
    """

    def __init__(self) -> None:
        self.rules: list[str] = []
        self.grammars: dict[str, str] = {}

    def rule(self, name: str, body: str, options: str = "") -> str:
        """Add a rule, or a terminal if the name is in capitals; return its full name."""
        name += str(len(self.rules))
        self.rules.append(f"{name}{options}: {body}")
        return name

    def parts(self, value: Mapping[str, Any], ends: Sequence[str]) -> _Parts:
        """Return the parts of a format, followed by one of the ends if there are any."""
        kind = value.get("type", "tag")
        if kind == "sequence":
            *first, last = value["elements"]
            before = [part for one in first for part in self.parts(one, ())]
            return before + self.parts(last, ends)
        if kind == "or":
            return self.one_of([self.parts(one, ends) for one in value["elements"]])
        if kind == "any_text":
            return [self.until(value, ends)]
        if kind == "triggered_tags":
            return self.triggered(value, ends)
        return self.bounded(kind, value) + _one_of_texts(ends)

    def bounded(self, kind: str, value: Mapping[str, Any]) -> _Parts:
        """Return the parts of a format that ends by itself, whatever follows."""
        if kind == "const_string":
            return _one_of_texts([value["value"]])
        if kind == "regex":
            return [(f"/{_escaped(value['pattern'])}/", True)]
        if kind == "json_schema":
            schema = json.dumps(value["json_schema"])
            return [(self.rule("json", f"%json {schema if schema != 'true' else '{}'}"), False)]
        if kind == "grammar":
            name = f"grammar{len(self.grammars)}"
            self.grammars[name] = value["grammar"]
            return [(f"@{name}", False)]
        if kind == "tag":
            return _one_of_texts([value["begin"]]) + self.parts(value["content"], _ends(value))
        return self.separated(value)

    def one_of(self, forms: Sequence[_Parts]) -> _Parts:
        """Return a reference to a new rule that matches any of several forms."""
        if all(is_regular for form in forms for _, is_regular in form):
            inner = " | ".join(" ".join(text for text, _ in form) for form in forms)
            return [(self.rule("T", inner), True)]
        return [(self.rule("form", " | ".join(_joined(self, form) for form in forms)), False)]

    def separated(self, value: Mapping[str, Any]) -> _Parts:
        one = self.one_of([self.parts(tag, ()) for tag in value["tags"]])
        form = one
        if not value.get("stop_after_first"):
            more = _one_of_texts([value["separator"]]) + one
            form = one + self.repeated(more, "*")
        return form if value.get("at_least_one") else self.repeated(form, "?")

    def repeated(self, form: _Parts, sign: str) -> _Parts:
        [(text, is_regular)] = self.one_of([form])
        return [(text + sign, is_regular)]

    def until(self, value: Mapping[str, Any], ends: Sequence[str]) -> tuple[str, bool]:
        """Return Lark for free text, up to and including the first of the ends if there are any."""
        free = "TEXT"
        if value.get("excludes"):
            free = f"(TEXT & ~(TEXT ({' | '.join(map(json.dumps, value['excludes']))}) TEXT))"
        if not ends:
            return free, True
        [(end, _)] = _one_of_texts(ends)
        return self.rule("until", f"{self.rule('FREE', free)} {end}", "[lazy]"), False

    def triggered(self, value: Mapping[str, Any], ends: Sequence[str]) -> _Parts:
        begins = [tag["begin"] for tag in value["tags"]]
        bodies = [self.parts({**tag, "begin": ""}, ()) for tag in value["tags"]]

        def one_tag(behind: str) -> _Parts:
            return self.one_of(
                [
                    _one_of_texts([begin.removeprefix(behind)]) + body
                    for begin, body in zip(begins, bodies, strict=True)
                    if begin.startswith(behind)
                ]
            )

        tagged = self.one_of(
            [[self.until(value, [one]), *one_tag(one)] for one in value["triggers"]]
        )
        behind = _one_of_texts(ends)
        if not value.get("stop_after_first"):
            form = [*self.repeated(tagged, "*"), self.until(value, ends)]
            return one_tag("") + form if value.get("at_least_one") else form
        if value.get("at_least_one"):
            return one_tag("") + behind
        return self.one_of([[self.until(value, ends)], tagged + behind])


def _joined(writer: _Writer, form: _Parts) -> str:
    """Return the body of a rule for `form`; adjacent regular parts become one terminal."""
    texts: list[str] = []
    run: list[str] = []
    for text, is_regular in [*form, ("", False)]:
        if is_regular:
            run.append(text)
            continue
        if run:
            texts.append(writer.rule("T", " ".join(run)))
            run = []
        texts.append(text)
    return " ".join(texts)


def _is_free(value: Mapping[str, Any]) -> bool:
    """Return whether a format ends with free text, which continues until something ends it."""
    if value["type"] == "triggered_tags":
        return not all(value.get(name) for name in _FLAGS)
    return bool(value["type"] == "any_text")


def _ends(tag: Mapping[str, Any]) -> Any:
    return [tag["end"]] if isinstance(tag["end"], str) else tag["end"]


def _one_of_texts(texts: Sequence[str]) -> _Parts:
    """Return Lark for one of several texts; optional if one is empty, no parts if all are."""
    literals = [json.dumps(text) for text in texts if text]
    if not literals:
        return []
    return [(f"({' | '.join(literals)}){'' if len(literals) == len(texts) else '?'}", True)]


def _escaped(pattern: str) -> str:
    """Escape a regular expression for use between Lark's slashes on one line."""
    return re.sub(r"\\?\n|\\.|/", lambda m: {"\n": "\\n", "/": "\\/"}.get(m[0][-1], m[0]), pattern)
