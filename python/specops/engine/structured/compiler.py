# SPDX-License-Identifier: Apache-2.0
"""From what a request asks for to a grammar, checked, within bounds, and kept for the next one.

Any thread may compile: a server does it beside the engine's thread, which then finds the result.
"""

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from specops.engine.structured.gbnf import is_gbnf, lark_of_gbnf
from specops.engine.structured.matching import Grammar
from specops.engine.structured.schemas import WHITESPACE, lark_with_options, with_options
from specops.engine.structured.tags import grammar_of_tags
from specops.engine.structured.vocabulary import Vocabulary
from specops.engine.structured.wanted import StructuredOutput
from specops.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

_MAX_KEPT = 64  # grammars that no request uses
_MAX_LEXER_STATES = 50_000  # of a grammar, of one to two KB each

# Of one mask, which others wait for. Schemas of thousands of properties take a fraction of that.
_MAX_ROW_ITEMS = 500  # of the parser, between two bytes
_MAX_STEP_ITEMS = 10_000  # of the parser
_MAX_STEP_FUEL = 100_000  # of the lexer
# What else bounds a grammar is llguidance's default: 500,000 symbols, and a million steps of the
# lexer to begin with.

# llguidance calls itself for every rule that a rule refers to, and the longest text has room for
# a chain of ten thousand and more. Only what is used of a stack takes memory.
_STACK_BYTES = 1 << 29

# Processor time of one compilation. Time on the wall would count what others do on the machine, and
# a process that was stopped.
_COMPILE_SECONDS = 10.0
_LEAST_WAIT_SECONDS = 0.05  # between two looks at it


class GrammarCompiler:
    """Compiles grammars for one model.

    Args:
        tokenizer: of the model.
        vocab_size: of the model.
        whitespace: between JSON's tokens where a request says nothing: "bounded", "any" or "none".
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, *, whitespace: str = "bounded"
    ) -> None:
        self._tokenizer, self._vocab_size, self._whitespace = tokenizer, vocab_size, whitespace
        self._vocabulary: Vocabulary | None = None
        self._lock = threading.Lock()
        self._kept: OrderedDict[StructuredOutput, Grammar] = OrderedDict()
        self._used: WeakValueDictionary[StructuredOutput, Grammar] = WeakValueDictionary()

    def compile(
        self, wanted: StructuredOutput, overdue: Callable[[], None] | None = None
    ) -> Grammar:
        """Return the grammar of what a request asks for; at once, if it is known already.

        Args:
            wanted: the constraint.
            overdue: called from the calling thread if compilation takes more than 10 seconds of
                processor time. Compilation cannot be interrupted, and continues.

        Raises:
            ValueError: it is not valid, too large, or says what is not supported; or llguidance is
                not installed.
        """
        with self._lock:
            found = self._used.get(wanted)
            if found is None:
                vocabulary = self._vocabulary_of_model()
        if found is None:
            # Two threads may compile the same: neither waits for what a third one compiles.
            work = partial(_grammar, vocabulary, wanted, self._whitespace)
            found = _with_a_deep_stack(work, overdue)
        with self._lock:
            found = self._used.setdefault(wanted, found)
            self._kept[wanted] = found
            self._kept.move_to_end(wanted)
            while len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        return found

    def _vocabulary_of_model(self) -> Vocabulary:
        if self._vocabulary is None:
            try:
                self._vocabulary = Vocabulary(self._tokenizer, self._vocab_size)
            except ImportError:
                raise ValueError(
                    "structured_output needs the package llguidance, which is not installed: "
                    "pip install 'specops[structured]'"
                ) from None
        return self._vocabulary


_EBNF = re.compile(r"^\s*<[\w -]+>\s*::=", re.MULTILINE)
_TEMPERATURE = re.compile(r"^\s*\w+\s*\[[^\]\n]*\btemperature\b", re.MULTILINE)  # of a rule
_starting = threading.Lock()  # the size of the next thread's stack is the process's


def _with_a_deep_stack(work: Callable[[], Grammar], overdue: Callable[[], None] | None) -> Grammar:
    """Run `work` in a thread whose stack is deep enough for rules that refer to rules."""
    done: list[Grammar] = []
    failed: list[Exception] = []
    clocks: list[int] = []  # of the thread, which may read its own safely

    def run() -> None:
        clocks.append(time.pthread_getcpuclockid(threading.get_ident()))
        try:
            done.append(work())
        except Exception as error:
            failed.append(error)

    with _starting:
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread = threading.Thread(target=run, name="specops-grammar")
            thread.start()
        finally:
            threading.stack_size(before)
    if overdue is not None:
        left = _COMPILE_SECONDS
        while thread.is_alive() and left > 0:
            thread.join(max(left, _LEAST_WAIT_SECONDS))
            left = _COMPILE_SECONDS - _seconds_of(clocks)
        if thread.is_alive():
            overdue()
    thread.join()
    if failed:
        raise failed[0]
    return done[0]


def _seconds_of(clocks: list[int]) -> float:
    """Return the processor time of a thread; 0 before it has begun and after it has ended."""
    try:
        return time.clock_gettime(clocks[0]) if clocks else 0.0
    except OSError:
        return 0.0


def _grammar(vocabulary: Vocabulary, wanted: StructuredOutput, whitespace: str) -> Grammar:
    grammar = Grammar(_matcher(vocabulary, wanted, whitespace), vocabulary)
    if reason := grammar.why_unusable():
        raise _refused(wanted, reason)
    return grammar


def _matcher(vocabulary: Vocabulary, wanted: StructuredOutput, whitespace: str) -> "LLMatcher":
    """llguidance's matcher at the beginning of a text.

    Raises:
        ValueError: llguidance refuses the grammar.
    """
    from llguidance import LLMatcher, LLParserLimits

    source = _source(wanted, whitespace)
    try:
        matcher = LLMatcher(
            vocabulary.matcher_tokenizer,
            source,
            log_level=0,
            limits=LLParserLimits(
                max_lexer_states=_MAX_LEXER_STATES,
                max_items_in_row=_MAX_ROW_ITEMS,
                step_max_items=_MAX_STEP_ITEMS,
                step_lexer_fuel=_MAX_STEP_FUEL,
            ),
        )
    except ValueError as error:
        raise _refused(wanted, str(error)) from None
    if matcher.is_error():
        raise _refused(wanted, matcher.get_error())
    return matcher


def _source(wanted: StructuredOutput, whitespace: str) -> str:
    """What is asked for in llguidance's own terms.

    Raises:
        ValueError: it has what llguidance would get wrong.
    """
    from llguidance import LLMatcher

    if wanted.whitespace_pattern is not None:
        options = {"whitespace_pattern": wanted.whitespace_pattern}
    elif wanted.disable_any_whitespace is not None:
        options = WHITESPACE["none" if wanted.disable_any_whitespace else "any"]
    else:
        options = WHITESPACE[whitespace]
    try:
        if isinstance(wanted.json_schema, str):
            schema = with_options(json.loads(wanted.json_schema), options)
            return LLMatcher.grammar_from_json_schema(json.dumps(schema, ensure_ascii=False))
        if isinstance(wanted.structural_tag, str):
            tags, named = grammar_of_tags(json.loads(wanted.structural_tag))
            grammars = [{"lark_grammar": lark_with_options(tags, options)}]
            for name, text in named.items():
                lark = lark_with_options(_lark(text), options)
                grammars.append({"name": name, "lark_grammar": lark})
            return json.dumps({"grammars": grammars}, ensure_ascii=False)
        if wanted.grammar is not None:
            lark = lark_with_options(_lark(wanted.grammar), options)
            return LLMatcher.grammar_from_lark(lark)
    except ValueError as error:
        raise _refused(wanted, str(error)) from None
    if wanted.regex is not None:
        return LLMatcher.grammar_from_regex(wanted.regex)
    assert wanted.choice is not None
    return LLMatcher.grammar_from_regex("|".join(map(_literally, wanted.choice)))


def _lark(grammar: str) -> str:
    """A grammar in llguidance's dialect of Lark.

    Raises:
        ValueError: it is in neither of the two dialects, or sets a temperature.
    """
    if is_gbnf(grammar):
        return lark_of_gbnf(grammar)
    if _EBNF.search(grammar):
        raise ValueError(
            "it must be in llguidance's dialect of Lark, such as 'start: \"a\" b', or in "
            "GBNF, such as 'root ::= \"a\" b'; got EBNF with rules in <>"
        )
    if _TEMPERATURE.search(grammar):
        raise ValueError("a rule's temperature is not supported: a request has one")
    return grammar


def _literally(text: str) -> str:
    """A regular expression that matches this text alone."""
    return "".join(
        char if char.isalnum() and char.isascii() else f"\\x{{{ord(char):x}}}" for char in text
    )


def _refused(wanted: StructuredOutput, reason: str) -> ValueError:
    told = " ".join(reason.partition("<state>")[0].split())  # behind it is the parser's inside
    if told.startswith("NoExtension"):
        told = (
            "no text can begin it: what it starts with leads only back to itself (a rule or $ref "
            "in a loop), or allows nothing"
        )
    return ValueError(f"structured_output: {wanted.kind} cannot be used: {told}")
