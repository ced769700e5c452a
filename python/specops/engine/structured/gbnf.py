# SPDX-License-Identifier: Apache-2.0
"""Grammars in GBNF, the notation of ggml's programs and of xgrammar, as llguidance's Lark.

llguidance's converter does the work, with three corrections. It makes terminals of rules without
references; a lexer takes the longest match of a terminal, so `ws "\\n"` could never end where `ws`
may be a line end. Here every rule stays a rule, and every terminal is one character, so the texts
are those of the grammar. Its `.` is no line end, and GBNF's is any character. It spells
characters beyond ASCII as Lark does not read them: it is given these themselves.

It looks through all rules again for each one that turns out to be a terminal: hence the bounds.
"""

import re

MAX_TEXT = 1 << 14
MAX_RULES = 256

_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
_CHARACTER = r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)|[^\\]"
_CHARACTERS = re.compile(_CHARACTER, re.DOTALL)
_TERMINAL = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*|\.', re.DOTALL)
_NAME = re.compile(r'("(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])*/|//[^\n]*)|\b[A-Z][A-Z0-9_]*\b')


def is_gbnf(grammar: str) -> bool:
    """Whether a grammar is in this notation: a rule of it is none of Lark's."""
    return _RULE.search(grammar) is not None


def lark_of_gbnf(grammar: str) -> str:
    """The same grammar in llguidance's dialect of Lark.

    Raises:
        ValueError: it is not valid, or too large.
    """
    from llguidance.gbnf_to_lark import gbnf_to_lark

    num_rules = len(_RULE.findall(grammar))
    if len(grammar) > MAX_TEXT or num_rules > MAX_RULES:
        raise ValueError(
            f"a grammar in GBNF must have at most {MAX_TEXT} characters and {MAX_RULES} rules, got "
            f"{len(grammar)} and {num_rules}"
        )
    try:
        lark = gbnf_to_lark(_TERMINAL.sub(_apart, grammar))
    except Exception as error:  # the converter has no class of its own for most
        raise ValueError(f"it is not valid GBNF: {error}") from None
    return _NAME.sub(lambda found: found[1] or found[0].lower(), lark)


def _apart(found: re.Match[str]) -> str:
    """A terminal of one character each, in the converter's spelling."""
    text = found[0]
    if text == ".":
        return r'([^\n] | "\n")'
    if text[0] == "#":
        return ""
    inner = _CHARACTERS.findall(text[1:-1])
    if text[0] == "[":
        return f"[{''.join(map(_spelt, inner))}]"
    return "(" + (" ".join(f'"{_spelt(one)}"' for one in inner) or '""') + ")"


def _spelt(character: str) -> str:
    """A character of a string or a set; an escaped one beyond ASCII as it is."""
    code = int(character[2:], 16) if len(character) > 2 else 0
    is_character = 0x80 <= code < 0x110000 and not 0xD800 <= code < 0xE000
    return chr(code) if is_character else character
