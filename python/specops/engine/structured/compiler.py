# SPDX-License-Identifier: Apache-2.0
"""Compiler of constraints to grammars, with limits on size and time, and a cache.

Any thread may compile: a server compiles in other threads, and the engine's thread then finds the
grammar in the cache.
"""

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from specops.api.structured import StructuredOutput
from specops.api.structured.gbnf import is_gbnf, lark_of_gbnf
from specops.api.structured.schemas import WHITESPACE, lark_with_options, with_options
from specops.api.structured.tags import grammar_of_tags
from specops.api.tokenizer import Tokenizer
from specops.engine.structured.matching import Grammar
from specops.engine.structured.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

_MAX_KEPT = 64  # grammars in the LRU cache
_MAX_LEXER_STATES = 50_000  # maximum lexer states of a grammar; each takes one to two KB

# Limits on the work for one mask, since other requests wait for it. Schemas with thousands of
# properties need only a fraction.
_MAX_ROW_ITEMS = 500  # parser items per byte of text
_MAX_STEP_ITEMS = 10_000  # parser items per mask
_MAX_STEP_FUEL = 100_000  # lexer steps per mask
# All other limits are llguidance's defaults: 500,000 symbols, and a million lexer steps initially.

# Stack size for compilation: llguidance recurses into referenced rules, and the longest grammar can
# have a chain of more than ten thousand rules. Only the used part of a stack takes memory.
_STACK_BYTES = 1 << 29

# Processor time of a compilation after which `overdue` is called. Wall time would include other
# processes and time in which this process was stopped.
_COMPILE_SECONDS = 10.0
_LEAST_WAIT_SECONDS = 0.05  # minimum time between two checks of the processor time


class GrammarCompiler:
    """Compiler of grammars for one model.

    Args:
        tokenizer: the model's tokenizer.
        vocab_size: the model's vocabulary size.
        whitespace: white space between JSON tokens if a request does not set it: "bounded", "any"
            or "none".
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, *, whitespace: str = "bounded"
    ) -> None:
        self._tokenizer, self._vocab_size, self._whitespace = tokenizer, vocab_size, whitespace
        self._vocabulary: Vocabulary | None = None
        self._lock = threading.Lock()
        self._grammars: OrderedDict[StructuredOutput, Grammar] = OrderedDict()
        self._used: WeakValueDictionary[StructuredOutput, Grammar] = WeakValueDictionary()

    def compile(
        self, constraint: StructuredOutput, overdue: Callable[[], None] | None = None
    ) -> Grammar:
        """Return the grammar of a constraint, from the cache if it is there or in use.

        Args:
            constraint: the constraint.
            overdue: called from the calling thread if compilation takes more than 10 seconds of
                processor time. Compilation cannot be interrupted, and continues.

        Raises:
            ValueError: the constraint is not valid, too large or not supported, or llguidance is
                not installed.
        """
        with self._lock:
            found = self._used.get(constraint)
            if found is None:
                vocabulary = self._vocabulary_of_model()
        if found is None:
            # Compile without holding the lock; two threads may compile the same constraint.
            work = partial(_grammar, vocabulary, constraint, self._whitespace)
            found = _with_a_deep_stack(work, overdue)
        with self._lock:
            found = self._used.setdefault(constraint, found)
            self._grammars[constraint] = found
            self._grammars.move_to_end(constraint)
            while len(self._grammars) > _MAX_KEPT:
                self._grammars.popitem(last=False)
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
# Attribute of a Lark rule.
_TEMPERATURE = re.compile(r"^\s*\w+\s*\[[^\]\n]*\btemperature\b", re.MULTILINE)
_starting = threading.Lock()  # the stack size of new threads is set for the whole process


def _with_a_deep_stack(work: Callable[[], Grammar], overdue: Callable[[], None] | None) -> Grammar:
    """Run `work` in a thread whose stack is deep enough for long chains of rules."""
    done: list[Grammar] = []
    failed: list[Exception] = []
    clocks: list[int] = []  # the thread's CPU clock, which only the thread can look up safely

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
    """Return the processor time of a thread; 0 before it starts and after it has ended."""
    try:
        return time.clock_gettime(clocks[0]) if clocks else 0.0
    except OSError:
        return 0.0


def _grammar(vocabulary: Vocabulary, constraint: StructuredOutput, whitespace: str) -> Grammar:
    grammar = Grammar(_matcher(vocabulary, constraint, whitespace), vocabulary)
    if reason := grammar.why_unusable():
        raise _refused(constraint, reason)
    return grammar


def _matcher(vocabulary: Vocabulary, constraint: StructuredOutput, whitespace: str) -> "LLMatcher":
    """Return llguidance's matcher at the start of a text.

    Raises:
        ValueError: llguidance rejects the grammar.
    """
    from llguidance import LLMatcher, LLParserLimits

    source = _source(constraint, whitespace)
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
        raise _refused(constraint, str(error)) from None
    if matcher.is_error():
        raise _refused(constraint, matcher.get_error())
    return matcher


def _source(constraint: StructuredOutput, whitespace: str) -> str:
    """Convert a constraint to a grammar in llguidance's serialized form.

    Raises:
        ValueError: the constraint is not valid, or llguidance would misinterpret it.
    """
    if constraint.whitespace_pattern is not None:
        options = {"whitespace_pattern": constraint.whitespace_pattern}
    elif constraint.disable_any_whitespace is not None:
        options = WHITESPACE["none" if constraint.disable_any_whitespace else "any"]
    else:
        options = WHITESPACE[whitespace]
    try:
        source = _constrained(constraint, options)
        if constraint.prefix is None:
            return source
        prefix = lark_with_options(_lark(constraint.prefix), options)
    except ValueError as error:
        raise _refused(constraint, str(error)) from None
    is_lark = constraint.grammar is not None
    first, *named = [{"lark_grammar": source}] if is_lark else json.loads(source)["grammars"]
    grammars = [
        {"lark_grammar": "%llguidance {}\nstart: @prefix @constrained"},
        {"name": "prefix", "lark_grammar": prefix},
        {**first, "name": "constrained"},
        *named,
    ]
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


def _constrained(constraint: StructuredOutput, options: Mapping[str, Any]) -> str:
    """Return the grammar of the constrained text, without `prefix`, in the same form."""
    from llguidance import LLMatcher

    if isinstance(constraint.json_schema, str):
        schema = with_options(json.loads(constraint.json_schema), options)
        return LLMatcher.grammar_from_json_schema(json.dumps(schema, ensure_ascii=False))
    if isinstance(constraint.structural_tag, str):
        tags, named = grammar_of_tags(json.loads(constraint.structural_tag))
        grammars = [{"lark_grammar": lark_with_options(tags, options)}]
        for name, text in named.items():
            lark = lark_with_options(_lark(text), options)
            grammars.append({"name": name, "lark_grammar": lark})
        return json.dumps({"grammars": grammars}, ensure_ascii=False)
    if constraint.grammar is not None:
        lark = lark_with_options(_lark(constraint.grammar), options)
        return LLMatcher.grammar_from_lark(lark)
    if constraint.regex is not None:
        return LLMatcher.grammar_from_regex(constraint.regex)
    assert constraint.choice is not None
    return LLMatcher.grammar_from_regex("|".join(map(_literally, constraint.choice)))


def _lark(grammar: str) -> str:
    """Return a Lark grammar as it is, or convert a GBNF grammar to llguidance's dialect of Lark.

    Raises:
        ValueError: the grammar is in neither of the two notations, or sets a temperature.
    """
    if is_gbnf(grammar):
        return lark_of_gbnf(grammar)
    if _EBNF.search(grammar):
        raise ValueError(
            "it must be in llguidance's dialect of Lark, such as 'start: \"a\" b', or in "
            "GBNF, such as 'root ::= \"a\" b'; got EBNF with rules in <>"
        )
    if _TEMPERATURE.search(grammar):
        raise ValueError("the temperature of a rule is not supported; set that of the request")
    return grammar


def _literally(text: str) -> str:
    """Return a regular expression that matches only this text."""
    return "".join(
        char if char.isalnum() and char.isascii() else f"\\x{{{ord(char):x}}}" for char in text
    )


def _refused(constraint: StructuredOutput, reason: str) -> ValueError:
    message = " ".join(reason.partition("<state>")[0].split())  # the rest is internal state
    if message.startswith("NoExtension"):
        message = (
            "no text matches it: its first rule or $ref only refers back to itself, or "
            "allows nothing"
        )
    return ValueError(f"structured_output: {constraint.kind} cannot be used: {message}")
