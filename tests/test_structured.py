# SPDX-License-Identifier: Apache-2.0
"""Constrained output: refused constraints, token masks and forced tokens.

Masks are compared with the meaning of a grammar, and masks after drafts with those of a matcher
that never drafted. test_structured_engine.py covers whole texts.
"""

import json
import random
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llguidance")
pytest.importorskip("jsonschema")

from schemas import BY_HAND, record
from specops.api.config import BUNDLED_MODEL
from specops.api.structured import StructuredOutput
from specops.api.structured.output import MAX_CHOICES, MAX_DEPTH, MAX_REGEX, MAX_TEXT
from specops.api.tokenizer import Tokenizer
from specops.engine.structured import Grammar, GrammarCompiler, GrammarState, MaskFiller, MaskRows
from specops.engine.structured.forcing import complete
from test_tokenizer import byte_fallback

VOCAB, EOS = 4096, 0


@lru_cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(BUNDLED_MODEL)


@lru_cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer(), VOCAB)


def compiled(**constraints: Any) -> Grammar:
    return compiler().compile(StructuredOutput(**constraints))


def state_of(
    *, taken: Sequence[int] = (), ends: Sequence[int] = (EOS,), **constraints: Any
) -> GrammarState:
    state = GrammarState(compiled(**constraints), ends)
    assert all(map(state.take, taken))
    return state


def tokens_of(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


def allowed(masks: np.ndarray[Any, Any]) -> list[set[int]]:
    """Return the tokens that each row allows."""
    return [set(np.unpackbits(row.view(np.uint8), bitorder="little").nonzero()[0]) for row in masks]


def masks_of(
    state: GrammarState,
    drafts: Sequence[int] = (),
    opening: int = -1,
) -> list[set[int]]:
    out = np.full((1 + len(drafts), VOCAB // 32), 77, dtype=np.int32)
    MaskFiller(2).fill([MaskRows(state, 0, list(drafts), opening)], out)
    return allowed(out)


# ---- invalid constraints ----

TAGS: dict[str, Any] = {
    "structures": [
        {
            "begin": "<fn=add>",
            "schema": {
                "properties": {"a": {"type": "integer"}},
                "required": ["a"],
                "additionalProperties": False,
            },
            "end": "</fn>",
        },
        {"begin": "<fn=go>", "schema": {"enum": ["x", "y"]}, "end": "</fn>"},
        {"begin": "[[", "schema": True, "end": "]]"},
    ],
    "triggers": ["<fn=", "[["],
}


LETTERS = {"type": "json_schema", "json_schema": {"enum": ["x", "yy"]}}
FORMAT: dict[str, Any] = {
    "format": {
        "type": "sequence",
        "elements": [
            {"type": "tag", "begin": "<", "content": {"type": "any_text"}, "end": [">", "."]},
            {
                "type": "tags_with_separator",
                "tags": [{"begin": "[", "content": LETTERS, "end": "]"}],
                "separator": ", ",
            },
        ],
    }
}


def tagged(**changes: Any) -> dict[str, Any]:
    """Return a structural tag of one structure with its trigger."""
    return {"structures": [{"begin": "<t>", "schema": {}, "end": "", **changes}], "triggers": ["<"]}


@pytest.mark.parametrize(
    "fields,message",
    [
        ({}, "structured_output must have exactly one of json_schema, .*, got none of them"),
        ({"regex": "a", "choice": ("a",)}, "got regex and choice"),
        ({"regex": 3}, "regex must be a string, got 3"),
        ({"regex": "a" * (MAX_REGEX + 1)}, f"regex must have at most {MAX_REGEX} characters, got"),
        ({"regex": "(" * 65 + ")" * 65}, f"regex must be nested at most {MAX_DEPTH} deep"),
        ({"grammar": "a" * (MAX_TEXT + 1)}, "grammar must have at most"),
        ({"grammar": "start: " + "(" * 99}, "grammar must be nested at most"),
        ({"choice": "ab"}, "choice must be a list of strings, got 'ab'"),
        ({"choice": ()}, f"choice must hold 1 to {MAX_CHOICES} strings, got 0"),
        ({"choice": ("a", "")}, "choice must hold non-empty strings"),
        ({"choice": ("a",) * (MAX_CHOICES + 1)}, "choice must hold 1 to"),
        ({"choice": ("a" * MAX_TEXT, "b")}, "choice must have at most"),
        ({"json_schema": 3}, "json_schema must be an object, True or a string, got 3"),
        ({"json_schema": "{"}, "json_schema is not valid JSON"),
        ({"json_schema": "3"}, "json_schema must be an object, true or false, got int"),
        ({"json_schema": {"a": {1, 2}}}, "json_schema is not valid JSON"),
        ({"json_schema": {"a": float("nan")}}, "json_schema is not valid JSON"),
        ({"json_schema": '{"a": "' + "b" * MAX_TEXT + '"}'}, "json_schema must have at most"),
        ({"json_schema": "[" * 100_000}, "json_schema (must be nested at most|is not valid JSON)"),
        ({"json_schema": '{"not":' * 70 + "{}" + "}" * 70}, "json_schema must be nested at most"),
        ({"regex": "a", "disable_any_whitespace": True}, "needs json_schema, .*, got regex"),
        ({"choice": ("a",), "whitespace_pattern": " "}, "whitespace_pattern needs json_schema, .*"),
        ({"json_schema": {}, "whitespace_pattern": "a"}, "pattern must be a regular expression of"),
        ({"json_schema": {}, "whitespace_pattern": r"\s*"}, "pattern must be a regular expression"),
        ({"json_schema": {}, "whitespace_pattern": 3}, "whitespace_pattern must be a string"),
        ({"json_schema": {}, "whitespace_pattern": " ", "disable_any_whitespace": True},
         "whitespace_pattern must be absent if disable_any_whitespace is True"),
        ({"json_schema": {}, "disable_any_whitespace": 1}, "must be True or False, got 1"),
        ({"regex": "a", "prefix": 3}, "prefix must be a string, got 3"),
        ({"regex": "a", "prefix": "\ud800"}, "regex must be valid Unicode"),
        ({"structural_tag": 3}, "structural_tag must be an object or a string, got 3"),
        ({"structural_tag": "{"}, "structural_tag is not valid JSON"),
        ({"structural_tag": "[]"}, "structural_tag: must be an object, got list"),
        ({"structural_tag": {**TAGS, "format": {}}}, "unknown field 'structures'"),
        ({"structural_tag": {"triggers": ["<"]}}, "without format must have structures"),
        ({"structural_tag": {**TAGS, "type": "text"}}, "type must be 'structural_tag', got 'text'"),
        ({"structural_tag": {**TAGS, "more": 1}}, "unknown field 'more'"),
        ({"structural_tag": {**TAGS, "triggers": "<fn="}}, "triggers must be a list of 1 to 128"),
        ({"structural_tag": {**TAGS, "triggers": [""]}}, "triggers must be non-empty strings"),
        ({"structural_tag": {**TAGS, "triggers": ["<fn=", "[[", "<"]}}, "not contain each other"),
        ({"structural_tag": {**TAGS, "triggers": ["<fn=", "[[", "{"]}}, "prefix of a tag's begin"),
        ({"structural_tag": {**TAGS, "triggers": ["<fn="]}}, r"start with a trigger, got '\[\['"),
        ({"structural_tag": {**TAGS, "structures": []}}, "structures must be a list of 1 to 128"),
        ({"structural_tag": {**TAGS, "structures": [3]}}, "structures must hold objects, got int"),
        ({"structural_tag": tagged(schema=3)}, "schema of a structure must be an object, got 3"),
        ({"structural_tag": tagged(end=3)}, "end of a structure must be a string, got 3"),
        ({"structural_tag": tagged(schema={"a": "b" * MAX_TEXT})}, "structural_tag must have at"),
    ],
)  # fmt: skip
def test_invalid_constraints_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StructuredOutput(**fields)


@pytest.mark.parametrize(
    "fields,message",
    [
        ({"json_schema": {"type": "text"}}, "json_schema cannot be used: .*text"),
        ({"json_schema": False}, "json_schema cannot be used"),
        ({"json_schema": {"not": {"type": "string"}}}, 'json_schema cannot be used: .*"not"'),
        ({"json_schema": {"type": "string", "format": "zzz"}}, "Unknown format: zzz"),
        ({"json_schema": {"$ref": "http://example.com/x"}}, "json_schema cannot be used"),
        ({"json_schema": {"$ref": "#/$defs/none"}}, "json_schema cannot be used"),
        ({"json_schema": {"type": "string", "pattern": "("}}, "json_schema cannot be used"),
        ({"regex": "("}, "regex cannot be used: .*unclosed group"),
        ({"regex": "a(?=b)"}, "regex cannot be used"),
        ({"regex": "[^\\s\\S]"}, "regex cannot be used: no text .* allows nothing"),
        ({"grammar": "start: other"}, "grammar cannot be used: .*unknown name"),
        ({"grammar": "start: start"}, "grammar cannot be used: no text .* refers back"),
        ({"grammar": "start: a\na: b\nb: a"}, "grammar cannot be used: no text .* refers back"),
        ({"json_schema": {"$ref": "#"}}, "json_schema cannot be used: no text .* refers back"),
        ({"grammar": 'root ::= "a" b'}, "not valid GBNF: Rule 'b' not found"),
        ({"grammar": 'a ::= "a"'}, "not valid GBNF: No 'root' rule"),
        ({"grammar": "root ::= (" + "[a]" * 6000}, "16384 characters and 256 rules, got 18010 and"),
        ({"grammar": 'root ::= "a"\n' + 'x ::= "a"\n' * 256}, "and 256 rules, got .* and 257"),
        ({"grammar": '<root> ::= "a"'}, "dialect of Lark, .* got EBNF with rules in <>"),
        ({"grammar": ""}, "grammar cannot be used"),
        ({"grammar": "start: a\na[max_tokens=3, temperature=0.5]: /x+/"}, "temperature"),
        ({"grammar": "start: <|endoftext|>"}, "grammar cannot be used"),
        ({"grammar": "start: <[0]>"}, "grammar cannot be used"),
        ({"regex": "a", "prefix": "start: other"}, "regex cannot be used: .*unknown name"),
        ({"regex": "a", "prefix": '<root> ::= "a"'}, "got EBNF with rules in <>"),
        ({"structural_tag": tagged(schema={"type": "xml"})}, "structural_tag cannot be used"),
        ({"structural_tag": tagged(schema=False)}, "structural_tag cannot be used"),
    ],
)  # fmt: skip
def test_constraints_that_cannot_be_compiled_are_refused(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^structured_output: {message}|{message}"):
        compiled(**fields)


# An example of llama.cpp: a line end may be white space or end a line.
ARITHMETIC = """
root  ::= (expr "=" ws term "\\n")+  # equations
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \\t\\n]*
"""
SPELT = 'root ::= A-b | c{2,3}\nA-b ::= "\\u00e9\\x41" "."\nc ::= [^\\u00e9"\\]]'


@pytest.mark.parametrize(
    "grammar,text,fits",
    [
        (ARITHMETIC, "(a+b)*3= c\n", True),
        (ARITHMETIC, "a=b\n\nc= 1\n", True),
        (ARITHMETIC, "(a+b*3= c\n", False),
        (ARITHMETIC, "a=b", False),
        ('root ::= ("a" | "ab") "bc"', "abc", True),  # the first match is not the longest
        ('root ::= ("a" | "ab") "bc"', "abbc", True),
        ('root ::= ("a" | "ab") "bc"', "abb", False),
        ('root ::= "a" . "b"', "a\nb", True),
        ('root ::= "a" . "b"', "ab", False),
        (SPELT, "\u00e9A.", True),
        (SPELT, "\u00e9A", False),
        (SPELT, "x#", True),
        (SPELT, "x]", False),
        ('root ::= "#\\"" # a comment of "\nroot2 ::= "x"', '#"', True),
    ],
)  # fmt: skip
def test_grammars_of_llama_cpp_are_supported(grammar: str, text: str, fits: bool) -> None:
    state = state_of(grammar=grammar)
    taken = [state.take(token) for token in tokenizer().encode_as_text(text)]
    assert (all(taken) and state.may_end) == fits


def test_grammars_in_use_stay_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specops.engine.structured.compiler._MAX_KEPT", 2)
    own = GrammarCompiler(tokenizer(), VOCAB)
    held = own.compile(StructuredOutput(regex="a+"))
    for other in "bcd":
        own.compile(StructuredOutput(regex=other))
    assert own.compile(StructuredOutput(regex="a+")) is held
    assert len(own._grammars) == 2
    # A schema is the same constraint as an object and as a text.
    schema = {"type": "integer"}
    assert StructuredOutput(json_schema=schema) == StructuredOutput(json_schema=json.dumps(schema))


def test_missing_llguidance_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(ValueError, match=r"needs the package llguidance.*specops\[structured\]"):
        GrammarCompiler(tokenizer(), VOCAB).compile(StructuredOutput(regex="a"))


# ---- white space between the tokens of JSON ----

_VALUE = {"a": [1, 2], "b": {}}
_COMPACT, _LINE = '{"a":[1,2],"b":{}}', '{"a": [1, 2], "b": {}}'
_PRETTY, _TABS = json.dumps(_VALUE, indent=4), json.dumps(_VALUE, indent="\t")
_WIDE = '{"a":  [1, 2], "b": {}}'
_SPACED = _COMPACT.replace(",", " , ")
_PARTS: dict[str, Any] = {
    "a": {"type": "array", "items": {"type": "integer"}},
    "b": record(),
}


@pytest.mark.parametrize(
    "options,fits",
    [
        ({}, [_COMPACT, _LINE, _PRETTY, _TABS, _PRETTY.replace("\n", "\r\n"), _SPACED]),
        ({"whitespace": "any"}, [_COMPACT, _LINE, _PRETTY, _TABS, _WIDE, _SPACED]),
        ({"whitespace": "none"}, [_COMPACT]),
        ({"disable_any_whitespace": True}, [_COMPACT]),
        ({"disable_any_whitespace": False}, [_COMPACT, _LINE, _PRETTY, _TABS, _WIDE, _SPACED]),
        ({"whitespace_pattern": " ?"}, [_COMPACT, _LINE, _SPACED]),
        ({"whitespace_pattern": " {2}", "disable_any_whitespace": False}, [_COMPACT]),
        ({"whitespace": "none", "whitespace_pattern": "[ \\n]*"},
         [_COMPACT, _LINE, _PRETTY, _WIDE, _SPACED]),
    ],
)  # fmt: skip
def test_white_space_options_apply_to_all_json(options: dict[str, Any], fits: list[str]) -> None:
    """The options apply to schemas, tags and `%json`. A schema's own options take precedence."""
    options = dict(options)
    own = GrammarCompiler(tokenizer(), VOCAB, whitespace=options.pop("whitespace", "bounded"))
    schema = record(**_PARTS)
    tags = {"structures": [{"begin": "<", "schema": schema, "end": ">"}], "triggers": ["<"]}
    rules = 'start: "%json {" j "/" // %json {\nj: %json ' + json.dumps(schema)
    forms: list[tuple[dict[str, Any], str, str]] = [
        ({"json_schema": schema}, "", ""),
        ({"structural_tag": tags}, "<", ">"),
        ({"grammar": rules}, "%json {", "/"),
    ]
    for form, before, behind in forms:
        grammar = own.compile(StructuredOutput(**form, **options))
        for text in (_COMPACT, _LINE, _PRETTY, _TABS, _WIDE, _SPACED):
            state = GrammarState(grammar, [])
            taken = all(map(state.take, tokens_of(before + text + behind)))
            assert (taken and state.may_end) == (text in fits), (form, text)
    schema["x-guidance"] = {"whitespace_pattern": " {3}"}
    state = GrammarState(own.compile(StructuredOutput(json_schema=schema, **options)), [])
    assert all(map(state.take, tokens_of('{   "a"')))
    schema["x-guidance"] = {"whitespace_flexible": False}
    state = GrammarState(own.compile(StructuredOutput(json_schema=schema, **options)), [])
    assert not all(map(state.take, tokens_of('{ "a"')))


# ---- numbers ----

_BIG = 2**53


@pytest.mark.parametrize(
    "schema,message",
    [
        ({"type": "integer", "minimum": 10**20}, "got 100000000000000000000"),
        ({"minimum": -_BIG - 1}, "minimum must be at most 2^53"),
        ({"maximum": _BIG + 1}, "maximum must be at most 2^53"),
        ({"exclusiveMinimum": 1e17}, "exclusiveMinimum must be at most 2^53"),
        ({"exclusiveMaximum": 1e300}, "exclusiveMaximum must be at most 2^53"),
        ({"type": "integer", "multipleOf": _BIG + 1}, "multipleOf must be at most 2^53"),
        ({"const": _BIG + 1}, "const must hold integers of at most 2^53 in magnitude"),
        ({"enum": ["a", {"b": [1, _BIG + 1]}]}, "enum must hold integers of at most 2^53"),
        ({"anyOf": [{"items": {"maximum": _BIG + 1}}]}, "maximum must be at most 2^53"),
        ({"$defs": {"maximum": {"maximum": _BIG + 1}}}, "maximum must be at most 2^53"),
        ({"properties": {"default": {"maximum": _BIG + 1}}}, "maximum must be at most 2^53"),
        # llguidance reports this one.
        ({"type": "number", "multipleOf": 1e-12}, "'multipleOf' has too many digits"),
    ],
)  # fmt: skip
def test_numbers_beyond_double_precision_are_refused(schema: Any, message: str) -> None:
    tags = {"structures": [{"begin": "<", "schema": schema, "end": ""}], "triggers": ["<"]}
    for form in (
        {"json_schema": schema},
        {"structural_tag": tags},
        {"grammar": f"start: j\nj: %json {json.dumps(schema)}"},
    ):
        with pytest.raises(ValueError, match=f"cannot be used: .*{re.escape(message)}"):
            compiled(**form)


@pytest.mark.parametrize(
    "schema,fits,others",
    [
        ({"type": "integer", "minimum": _BIG - 1, "maximum": _BIG},
         [_BIG - 1, _BIG], [_BIG - 2, _BIG + 1]),
        ({"type": "integer", "exclusiveMaximum": 1 - _BIG}, [-_BIG], [1 - _BIG]),
        ({"const": _BIG}, [_BIG], [_BIG + 1]),
        ({"type": "number", "minimum": 0.1, "maximum": 0.3}, ["0.1", "0.3"], ["0.09", "0.31"]),
        ({"type": "number", "multipleOf": 0.3}, ["0.9", "1.2"], ["0.1", "1"]),
        # Fields that constrain nothing, and names that only look like bounds.
        ({"const": 1, "default": 10**20, "examples": [{"maximum": 10**20}]}, [1], [2]),
        ({"enum": [{"maximum": "x"}, 3]}, [3], [4]),
        ({**record(maximum={"const": 1})}, ['{"maximum": 1}'], ["{}"]),
    ],
)  # fmt: skip
def test_supported_numbers_are_exact(schema: Any, fits: list[Any], others: list[Any]) -> None:
    for text in map(str, [*fits, *others]):
        state = state_of(json_schema=schema)
        taken = all(map(state.take, tokens_of(text))) and state.may_end
        assert taken == (text in map(str, fits)), text


# ---- the vocabulary ----


def test_every_token_has_its_bytes() -> None:
    vocabulary = compiled(regex="a").vocabulary
    matching = vocabulary.matcher_tokenizer
    assert vocabulary.size == VOCAB and vocabulary.end == VOCAB and matching.eos_token == VOCAB
    for token in range(VOCAB):
        spelt = tokenizer().token_bytes(token)
        if tokenizer().is_special(token) or spelt[:1] == b"\xff":
            assert not vocabulary.is_text(token)
        else:
            assert vocabulary.is_text(token)
            assert matching.decode_bytes([token]) == spelt
    assert not vocabulary.is_text(-1) and not vocabulary.is_text(VOCAB)


@pytest.mark.parametrize("text", ["x = 1", "<|endoftext|>", "Köln ☃", "a\nb\t", '{"name": '])
def test_forced_texts_are_encoded_without_special_tokens(text: str) -> None:
    ids = compiled(regex="a").vocabulary.matcher_tokenizer.tokenize_str(text)
    assert b"".join(map(tokenizer().token_bytes, ids)) == text.encode()
    assert EOS not in ids
    if "<" not in text:
        assert ids == tokens_of(text)


@pytest.mark.parametrize("text", ["ab ab", "a", " b", "日é", "xyz ab", "<s>ab"])
def test_forced_texts_of_a_byte_fallback_tokenizer_have_no_extra_space(text: str) -> None:
    """Characters use tokens of their own where the vocabulary has them."""
    of_bytes = Tokenizer(byte_fallback())
    own = GrammarCompiler(of_bytes, of_bytes.vocab_size + 5)  # the model's vocabulary is larger
    ids = own.compile(StructuredOutput(regex="a")).vocabulary.matcher_tokenizer.tokenize_str(text)
    assert b"".join(map(of_bytes.token_bytes, ids)) == text.encode()
    expected = of_bytes.encode_as_text("\x02" + text)[2:]  # after a space and the byte of the mark
    assert ids == expected
    # If the grammar leaves a choice, a character may be either of the two tokens that stand for it.
    state = GrammarState(own.compile(StructuredOutput(regex="[ab]+")), [])
    out = np.zeros((1, -(-(of_bytes.vocab_size + 5) // 32)), dtype=np.int32)
    MaskFiller(1).fill([MaskRows(state, 0, [])], out)
    spelt = [of_bytes.token_bytes(token) for token in sorted(allowed(out)[0])]
    assert sorted(spelt) == [b"a", b"a", b"ab", b"b", b"b"]


# ---- masks ----

CHOICES = ("cat", "car", "dog", "do", "Köln")


def test_masks_match_the_meaning_of_a_choice() -> None:
    """A choice allows the tokens that begin the rest of one of its texts."""
    spelt = {token: tokenizer().token_bytes(token) for token in range(1, VOCAB)}
    state = state_of(choice=CHOICES)
    left = [text.encode() for text in CHOICES]
    draw = random.Random(1)
    for _ in range(40):
        expected = {
            token
            for token, piece in spelt.items()
            if any(text.startswith(piece) for text in left) and piece
        }
        if b"" in left:
            expected.add(EOS)
        got = masks_of(state)[0]
        if len(got) > 1 or len(expected) == 1:
            assert got == expected
        else:  # one text is left, in its own tokens
            assert got <= expected and len(set(left)) == 1
        following = sorted(got - {EOS})
        if not following:
            break
        token = draw.choice(following)
        assert state.take(token)
        left = [text[len(spelt[token]) :] for text in left if text.startswith(spelt[token])]
        if state.is_complete:
            assert left == [b""]
            state, left = state_of(choice=CHOICES), [text.encode() for text in CHOICES]


def walk(draw: random.Random, state: GrammarState, length: int) -> list[int]:
    """Take up to `length` random tokens that fit and return them; fewer if the text ends."""
    path: list[int] = []
    while len(path) < length and not state.is_complete:
        found = sorted(masks_of(state)[0] - {EOS})
        if not found:
            break
        path.append(draw.choice(found))
        assert state.take(path[-1])
    return path


FORMS: list[dict[str, Any]] = [
    {"json_schema": BY_HAND[25][0]},
    {"json_schema": BY_HAND[25][0], "disable_any_whitespace": True},
    {"json_schema": BY_HAND[28][0]},
    {"json_schema": {"type": "object"}},
    {"regex": "[a-z]{2,5}(-[0-9]+)*"},
    {"choice": CHOICES},
    {"grammar": 'start: item ("," item)*\nitem: /[a-z]+/ | "(" start ")"'},
    # Text up to a mark, and text that ends at a word.
    {"grammar": 'start: called* TEXT\nTEXT: /(.|\\n)*/\ncalled[lazy]: TEXT "<t>" /[0-9]{2}/ "."'},
    {"grammar": 'start: a /[0-9]+/\na[suffix="end"]: /[a-z ]+/'},
    {"structural_tag": TAGS},
    {"structural_tag": FORMAT},
]


@pytest.mark.parametrize(
    "text,is_whole",
    [
        ("any text, and < or [ or <fn", True),
        ('it is <fn=add>{"a": 3}</fn>, so', True),
        ('<fn=go>"y"</fn><fn=add>{"a":4}</fn>', True),
        ('[[{"any": ["value"]}]] [', True),
        ('<fn=add>{"a": 3}', False),
        ('<fn=add>{"b": 3}</fn>', None),
        ('<fn=go>"z"</fn>', None),
        ("<fn=sub>", None),
        ("[[1]?", None),
    ],
)  # fmt: skip
def test_trigger_must_be_followed_by_its_tag(text: str, is_whole: bool | None) -> None:
    """Take each text in one step and character by character.

    `is_whole` says whether the output may end after the text; None if the text is refused.
    """
    for tokens in (tokens_of(text), [one for char in text for one in tokens_of(char)]):
        state = state_of(structural_tag=TAGS)
        fits = all(map(state.take, tokens))
        assert (state.may_end if fits else None) == is_whole
    assert compiled(structural_tag=json.dumps({"type": "structural_tag", **TAGS})) is compiled(
        structural_tag=json.dumps({"type": "structural_tag", **TAGS})
    )


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(form))
def test_masks_after_drafts_equal_those_of_a_matcher_that_took_them(form: dict[str, Any]) -> None:
    draw = random.Random(repr(form))
    num_illegal = num_deep = 0
    for _ in range(24):
        taken = walk(draw, state_of(**form), draw.randrange(6))
        if state_of(taken=taken, **form).is_complete:
            continue
        count = draw.randrange(1, 9)
        drafts: list[int] = []
        paths: list[list[int] | None] = [[]]  # path of each row; None if a draft on it does not fit
        for _ in range(count):
            before = paths[-1]
            options = {draw.randrange(VOCAB), EOS, VOCAB + 5, -1}
            if before is not None and draw.random() < 0.9:
                here = state_of(taken=taken + before, **form)
                options = set() if here.is_complete else masks_of(here)[0] - {EOS}
            token = draw.choice(sorted(options or {7}))
            drafts.append(token)
            here = None if before is None else state_of(taken=taken + before, **form)
            fits = here is not None and here.take(token)
            paths.append([*before, token] if before is not None and fits else None)
        state = state_of(taken=taken, **form)
        for path, mask in zip(paths, masks_of(state, drafts), strict=True):
            if path is None:
                num_illegal += 1
                assert len(mask) >= VOCAB - 2, "a row that is never reached allows every text"
                continue
            num_deep += len(path) > 1
            expected = state_of(taken=taken + path, **form)
            assert mask == ({EOS} if expected.is_complete else masks_of(expected)[0])
        # The state is unchanged.
        assert masks_of(state) == masks_of(state_of(taken=taken, **form))
    assert num_illegal > 5 and num_deep > 5


def test_requests_of_one_step_do_not_affect_each_other() -> None:
    """Mix chains and single rows in one call on several threads."""
    draw = random.Random(3)
    states = [state_of(**form) for form in FORMS * 6]
    constraints, expected, first = [], [], 0
    for index, state in enumerate(states):
        path = walk(draw, state_of(**FORMS[index % len(FORMS)]), index % 5)
        constraints.append(MaskRows(state, first, path))
        expected += masks_of(state, path)
        first += 1 + len(path)
    out = np.zeros((first, VOCAB // 32), dtype=np.int32)
    MaskFiller(3).fill(constraints, out)
    assert allowed(out) == expected


def test_masks_follow_end_tokens_and_allowed_tokens() -> None:
    x, y = tokens_of("x")[0], tokens_of("y")[0]
    grammar = compiled(regex="[xy]*")
    assert {EOS, 5} & masks_of(GrammarState(grammar, [EOS, 5]))[0] == {EOS, 5}
    assert EOS not in masks_of(GrammarState(grammar, []))[0]
    assert masks_of(GrammarState(grammar, [EOS], [x, EOS]))[0] == {x, EOS}
    assert masks_of(GrammarState(grammar, [EOS], [y]))[0] == {y}
    # The grammar begins after the thinking. Before that, only allowed tokens count.
    state = GrammarState(grammar, [EOS], [x, y, 9])
    assert masks_of(state, [y, 9, x], opening=9) == [{x, y, 9}, {x, y, 9}, {x, y}, {x, y}]
    everything = masks_of(GrammarState(grammar, [EOS]), [y, 9, 9], opening=9)
    assert [len(mask) for mask in everything[:2]] == [VOCAB, VOCAB]
    assert everything[2] == masks_of(GrammarState(grammar, [EOS]))[0]


def test_complete_matcher_takes_no_more_tokens() -> None:
    state = state_of(choice=("ab",), taken=tokens_of("ab"))
    assert state.is_complete and state.may_end
    assert masks_of(state, [5, EOS, 7])[0] == {EOS}
    assert not state.take(EOS) and not state.take(5) and state.forced() == []
    assert state.is_complete, "refused tokens must not break the state"
    # This also holds for drafts that continue after the end.
    state = state_of(choice=("ab",))
    drafts = [*tokens_of("ab"), 5, EOS]
    got = masks_of(state, drafts)
    assert got[len(tokens_of("ab"))] == {EOS}
    assert not state.is_complete and all(map(state.take, tokens_of("ab")))


# ---- forced tokens ----

FIXED = record(alpha={"const": "beta gamma"}, n={"type": "integer"})


def forced_form() -> dict[str, Any]:
    return {"json_schema": FIXED, "disable_any_whitespace": True}


def test_forced_tokens_are_the_only_ones_that_masks_allow() -> None:
    state = state_of(**forced_form())
    forced = state.forced()
    assert len(forced) > 3
    for mask, token in zip(masks_of(state, forced), forced, strict=False):
        assert mask == {token}
    assert state.forced() == forced


def test_forced_tokens_replace_drafts_that_disagree() -> None:
    forced = state_of(**forced_form()).forced()
    count = len(forced)

    def completed(drafts: list[int], limit: int) -> Any:
        state = state_of(**forced_form())
        got = complete(state, drafts, limit)
        assert masks_of(state) == masks_of(state_of(**forced_form())), "the state must not change"
        return None if got is None else (got.token_ids, got.num_given)

    assert completed([], 0) is None
    assert completed([], 99) == (forced, 0)
    assert completed([], 2) == (forced[:2], 0)
    # Forced tokens replace drafts that disagree. Drafts that agree stay.
    assert completed([5, 6, 7], 99) == (forced, 0)
    assert completed([forced[0], 5], 99) == (forced, 0)
    assert completed(forced, count) is None
    assert completed(forced[:2], 2) is None
    assert completed([*forced, *tokens_of("3")], 99) is None


def test_forced_tokens_follow_drafts_that_fit() -> None:
    schema = {**FIXED, "properties": {"alpha": {"enum": ["x", "yy"]}, "n": {"const": 12}}}
    form = {"json_schema": schema, "disable_any_whitespace": True}
    start = state_of(**form).forced()
    state = state_of(taken=start, **form)
    assert state.forced() == []
    draft = next(token for token in sorted(masks_of(state)[0]))
    behind = state_of(taken=[*start, draft], **form).forced()
    assert behind
    got = complete(state, [draft], 20)
    assert got is not None and got.token_ids == [draft, *behind] and got.num_given == 1
    # If the grammar leaves a choice, a draft that it forbids stays: the verifier rejects it.
    illegal = next(token for token in range(1, VOCAB) if token not in masks_of(state)[0])
    assert complete(state, [illegal, 5], 20) is None
    got = complete(state, [draft, illegal, 5], 20)
    assert got is not None and got.token_ids == [draft, *behind]
    assert complete(state, [draft, illegal], 1) is None
