# SPDX-License-Identifier: Apache-2.0
r"""Conversion of grammars in the notation GBNF to llguidance's dialect of Lark.

llguidance's converter does the work, with three corrections. (1) It turns rules without references
into terminals. A lexer takes the longest match of a terminal, so `ws "\n"` could never match if
`ws` may be a line end. Here every rule stays a rule and every terminal is one character, so exactly
the texts of the grammar match. (2) The converter's `.` excludes line ends; GBNF's `.` is any
character. (3) The converter's escapes of non-ASCII characters are not valid Lark, so it is given
the characters themselves. Size is limited, since for each rule that becomes a terminal, the
converter searches all rules again.
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
    """Return whether a grammar is in GBNF, recognized by `::=`, which Lark does not have."""
    return _RULE.search(grammar) is not None


def lark_of_gbnf(grammar: str) -> str:
    """Convert a GBNF grammar to llguidance's dialect of Lark.

    Raises:
        ValueError: the grammar is not valid, or too large.
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
    except Exception as error:  # the converter has no exception class for most errors
        raise ValueError(f"it is not valid GBNF: {error}") from None
    return _NAME.sub(lambda found: found[1] or found[0].lower(), lark)


def _apart(found: re.Match[str]) -> str:
    """Split a terminal into terminals of one character, in the converter's notation."""
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
    """Return a character of a string or a set, unescaped if it is beyond ASCII."""
    code = int(character[2:], 16) if len(character) > 2 else 0
    is_character = 0x80 <= code < 0x110000 and not 0xD800 <= code < 0xE000
    return chr(code) if is_character else character
