# SPDX-License-Identifier: Apache-2.0
"""Structured output: compiled grammars, their state per request, and token masks."""

from specops.engine.structured.compiler import GrammarCompiler
from specops.engine.structured.masks import MaskFiller, MaskRows
from specops.engine.structured.matching import Grammar, GrammarState, has_begun, num_unconstrained

__all__ = [
    "Grammar",
    "GrammarCompiler",
    "GrammarState",
    "MaskFiller",
    "MaskRows",
    "has_begun",
    "num_unconstrained",
]
