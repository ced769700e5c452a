# SPDX-License-Identifier: Apache-2.0
"""Structural tags with a `format`: accepted texts of each kind, and refused formats."""

import json
from typing import Any

import pytest

pytest.importorskip("llguidance")

from specops.api.structured.tags import grammar_of_tags
from specops.engine import StructuredOutput
from test_structured import state_of, tokens_of


def text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def regex(pattern: str) -> dict[str, Any]:
    return {"type": "regex", "pattern": pattern}


def form(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, **fields}


def tag(begin: Any, content: Any, end: Any) -> dict[str, Any]:
    return form("tag", begin=begin, content=content, end=end)


def sequence(*elements: Any) -> dict[str, Any]:
    return form("sequence", elements=elements)


ANY = form("any_text")
NUMBER = form("json_schema", json_schema={"type": "integer"}, style="json", any_order=False)
CALLS = [tag("<f=a>", NUMBER, "</f>"), tag("<f=b>", regex("[xy]*"), ["</f>", "</g>"])]
CALLED = form("triggered_tags", triggers=["<f="], tags=CALLS)
LISTED = form("tags_with_separator", tags=CALLS, separator=", ")

# Each format with complete, incomplete and impossible texts.
FORMATS: dict[str, tuple[dict[str, Any], list[str], list[str], list[str]]] = {
    "const_string": (text('é"\\/'), ['é"\\/'], ["", "é"], ["e", 'é"\\/é']),
    "json_schema": (NUMBER, ["3", "-12"], ["-"], ["x", '"3"']),
    "json_schema of anything": (form("json_schema", json_schema=True), ["[3]"], ["{"], ["x"]),
    "regex": (regex("a/b[/\n]|[0-9]+\\/"), ["a/b/", "a/b\n", "12/"], ["a/b", "1"], ["b", "a/b/ "]),
    "grammar": (form("grammar", grammar='root ::= "(" root ")" | "x"'), ["((x))"], ["(x"], ["x)"]),
    "grammar with JSON, in a tag": (
        tag("<", form("grammar", grammar='start: "=" %json {"enum": [[1, 2]]}'), ">"),
        ["<=[1, 2]>"], ["<="], ["<[", "<=[1,  2"],
    ),
    "any_text": (ANY, ["", "a\nb"], [], []),
    "any_text, excluded": (form("any_text", excludes=["<b", "%%"]), ["<a% %"], [], ["a<b", "%%"]),
    "tag": (tag("<t>", text("x"), "</t>"), ["<t>x</t>"], ["<t>x"], ["<t></t>", "<t>x</t> "]),
    "tag of text": (
        tag("<t>", form("any_text", excludes=["no"]), ["</t>", "."]),
        ["<t>a<b</t>", "<t>."], ["<t>a</", "<t>\n"], ["<t>no", "<t></t>a", "<t>a. "],
    ),
    "tag with an end, or none": (tag("a", NUMBER, ["", ";"]), ["a3", "a3;"], ["a"], ["a;", "a3;;"]),
    # The expression may extend into the end of its tag.
    "tag of a regex": (tag("<", regex("[a-z>]+"), ">e"), ["<abc>e", "<a>e>e"], ["<a>"], ["<A"]),
    "sequence": (
        sequence(tag("<t>", ANY, "</t>"), text("="), NUMBER, CALLED),
        ["<t>so</t>=3", "<t></t>=3 and <f=b>x</f>!"], ["<t>", "<t></t>=", "<t></t>=3<f=a>"],
        ["<t></t>3", "<t></t>=x", "<t></t>=3<f=c"],
    ),
    "or": (
        form("or", elements=[text("yes"), tag("no", NUMBER, "."), sequence(text("so "), ANY)]),
        ["yes", "no7.", "so it is"], ["no", "no7"], ["yes.", "maybe", "no."],
    ),
    "or, in a tag": (
        tag("<t>", form("or", elements=[NUMBER, sequence(text(":"), ANY)]), "</t>"),
        ["<t>3</t>", "<t>:3</</t>"], ["<t>:a"], ["<t>a", "<t>3</t>a"],
    ),
    "triggered_tags": (
        CALLED,
        ["", "any <f", "a <f=a>3</f> b <f=b>xy</g>"], ["<f=", "<f=b>x</f"],
        ["<f=c", "<f=a>x", "<f=a>3</f><f=b></f><f=c"],
    ),
    "triggered_tags, at least one": (
        {**CALLED, "at_least_one": True},
        ["<f=a>3</f>", "<f=a>3</f> and <f=b></f>!"], ["", "<f=a>3"], ["a", "<f=a>3</f><f=c"],
    ),
    "triggered_tags, the first": (
        {**CALLED, "stop_after_first": True},
        ["", "any", "so <f=a>3</f>"], ["so <f=a>3"], ["<f=c", "so <f=a>3</f> "],
    ),
    "triggered_tags, one": (
        sequence({**CALLED, "stop_after_first": True, "at_least_one": True}, text(".")),
        ["<f=b>y</g>."], ["", "<f=a>3</f>"], ["a", "<f=a>3</f> "],
    ),
    "triggered_tags, excluded": (
        {**CALLED, "excludes": ["no"]}, ["n <f=a>3</f>o"], ["n<f="], ["no", "<f=a>3</f>no"],
    ),
    "triggered_tags, in a tag": (
        tag("<t>", CALLED, "</t>"),
        ["<t>a</t>", "<t><f=a>3</f> </t>"], ["<t>a", "<t><f=a>3</f>"], ["<t></t>a", "<t><f=c"],
    ),
    "triggered_tags, the first, in a tag": (
        tag("<t>", {**CALLED, "stop_after_first": True}, "</t>"),
        ["<t>a</t>", "<t>a<f=a>3</f></t>"], ["<t>a<f=a>3</f>"], ["<t>a<f=a>3</f> "],
    ),
    "tags_with_separator": (
        LISTED,
        ["", "<f=a>3</f>", "<f=a>3</f>, <f=b></g>, <f=b></f>"],
        ["<f=a>3</f>, "], ["a", "<f=a>3</f>,<"],
    ),
    "tags_with_separator, at least one": (
        {**LISTED, "at_least_one": True}, ["<f=a>3</f>, <f=a>4</f>"], ["", "<f=a>3"], [","],
    ),
    "tags_with_separator, one": (
        {**LISTED, "at_least_one": True, "stop_after_first": True},
        ["<f=b>x</f>"], ["", "<f=b>"], ["<f=b>x</f>,"],
    ),
    "tags_with_separator, the first": (
        tag("(", {**LISTED, "stop_after_first": True}, ")"),
        ["()", "(<f=a>3</f>)"], ["(<f=a>3</f>"], ["(<f=a>3</f>,"],
    ),
    "tags_with_separator, of text": (
        {**LISTED, "separator": "", "tags": [{"begin": "<", "content": ANY, "end": ">"}]},
        ["", "<a>", "<a><>"], ["<a"], ["a", "<a>a"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_format_accepts_its_texts(name: str) -> None:
    """Take each text in one step and character by character."""
    value, *texts = FORMATS[name]
    tags = {"type": "structural_tag", "format": value}
    for expected, some in zip((True, False, None), texts, strict=True):
        for one in some:
            for tokens in (tokens_of(one), [token for char in one for token in tokens_of(char)]):
                state = state_of(structural_tag=json.dumps(tags))
                fits = all(map(state.take, tokens))
                assert (state.may_end if fits else None) == expected, one


@pytest.mark.parametrize(
    "value,message",
    [
        (3, "format must be an object, got int"),
        ({}, "format.type must be one of const_string, .*, got None"),
        (form("star", content=ANY), "format.type must be one of .*, got 'star'"),
        (text(""), "format.value must be a non-empty string, got ''"),
        (form("const_string"), "format of type 'const_string' must have value"),
        (form("any_text", more=1), "format of type 'any_text' has an unknown field 'more'"),
        (form("any_text", max_tokens=3), "format.max_tokens must be None or absent, got 3"),
        (form("any_text", excludes=[""]), "format.excludes must be non-empty strings"),
        ({**NUMBER, "style": "qwen_xml"}, "format.style must be 'json' or absent, got 'qwen_xml'"),
        (form("json_schema", json_schema=3), "format.json_schema must be an object, true or false"),
        (regex("(" * 65), "structural_tag: pattern must be nested at most 64 deep"),
        (tag("", regex("a" * 20_000), ""), "structural_tag: pattern must have at most 16384"),
        (sequence(regex("[(]"), form("grammar", grammar="(" * 99)), "grammar must be nested"),
        (sequence(), r"format.elements must be a list of 1 to 128"),
        (sequence(ANY, text("a")), r"format.elements\[0\] of type 'any_text' must be last in the"),
        (sequence(CALLED, text("a")), r"format.elements\[0\] of type 'triggered_tags' must be"),
        (sequence(form("or", elements=[ANY]), text("a")), r"elements\[0\].elements\[0\] of type"),
        (form("or", elements=[text("a"), 3]), r"format.elements\[1\] must be an object, got int"),
        (tag({"type": "token"}, ANY, "a"), "format.begin must be a string, got {'type': 'token'}"),
        (tag("a", ANY, ""), "format.content of type 'any_text' must be last .* a tag whose end"),
        (tag("a", ANY, [3]), "format.end must be a string or a list of strings, got"),
        (tag("a", ANY, {"type": "token"}), "format.end must be a list of 1 to 128"),
        (tag("a", tag("b", 3, "c"), "d"), "format.content.content must be an object, got int"),
        ({**CALLED, "tags": [text("a")]}, r"format.tags\[0\].type must be 'tag', got 'const_str"),
        ({**CALLED, "tags": [3]}, r"format.tags\[0\] must be an object, got int"),
        ({**CALLED, "at_least_one": 1}, "format.at_least_one must be true or false, got 1"),
        ({**CALLED, "triggers": ["<f=a"]}, "format.begin must start with a trigger, got '<f=b>'"),
        ({**CALLED, "triggers": ["<f=", "<"]}, "format.triggers must not contain each other"),
        ({**CALLED, "triggers": ["<f=", "a"]}, "each be a prefix of a tag's begin, got 'a'"),
        (tag("a", CALLED, "<f"), "format.content.triggers must not contain the end of the tag"),
        ({**LISTED, "separator": None}, "format.separator must be a string, got None"),
        ({**LISTED, "tags": [tag("", ANY, "")]}, r"format.tags\[0\].content of type 'any_text'"),
    ],
)  # fmt: skip
def test_invalid_formats_are_refused_with_their_field(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StructuredOutput(structural_tag={"format": value})


@pytest.mark.parametrize(
    "value",
    [
        regex("("),
        form("grammar", grammar="start: missing"),
        form("grammar", grammar='start: "a" }\nstart2: "b"'),
        form("json_schema", json_schema=False),
        form("json_schema", json_schema={"maximum": 10**20}),
    ],
)
def test_formats_that_llguidance_refuses_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="structured_output: structural_tag cannot be used: "):
        state_of(structural_tag={"format": tag("a", value, "b")})


def test_grammar_of_a_nested_format_stays_short() -> None:
    """Parts that a format repeats are written once."""
    for inner in (NUMBER, regex("[0-9]")):
        for depth in range(15):
            outer = {**CALLED, "at_least_one": True} if depth % 2 else LISTED
            inner = {**outer, "tags": [tag("<f=", inner, f" {depth};")], "triggers": ["<f="]}
            if outer is LISTED:
                del inner["triggers"]
        lark, _ = grammar_of_tags({"format": inner})
        assert len(lark) < 6 * len(json.dumps(inner))
        state = state_of(structural_tag={"format": inner})
        assert all(map(state.take, tokens_of("<f=" * 15 + "7 0; 1;")))
