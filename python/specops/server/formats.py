# SPDX-License-Identifier: Apache-2.0
"""Table of the formats of answers, and how a chat template or an option selects one.

A further format is one entry: its marks in chat templates, its grammar and its parser.
"""

import re
from dataclasses import replace

from specops.server.call_forms import (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    DEEPSEEK_V32,
    GLM45,
    GLM47,
    HERMES,
    KIMI_K2,
    LLAMA,
    MISTRAL,
    MISTRAL_ARGS,
    MISTRAL_IDS,
    QWEN3_CODER,
    CallForm,
)
from specops.server.harmony import HARMONY, HARMONY_REASONING
from specops.server.reasoning import ERNIE, MISTRAL_THINK, THINK, ReasoningForm

# The first form whose marks are all in a template is the template's.
CALL_FORMS: tuple[CallForm, ...] = (
    HARMONY,
    MISTRAL_IDS,
    MISTRAL_ARGS,
    MISTRAL,
    KIMI_K2,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    DEEPSEEK_V32,
    QWEN3_CODER,
    GLM47,
    GLM45,
    HERMES,
    LLAMA,
)
REASONING_FORMS: tuple[ReasoningForm, ...] = (HARMONY_REASONING, MISTRAL_THINK, ERNIE, THINK)

CALL_PARSERS = tuple(sorted({form.name for form in CALL_FORMS}))
REASONING_PARSERS = ("auto", "none", *(name for form in REASONING_FORMS for name in form.names))


def call_form_of(template: str, name: str | None = None) -> CallForm | None:
    """Return the format of tool calls in a chat template; None if it has no known one.

    Args:
        template: Jinja source.
        name: name in `CALL_PARSERS`, if an option sets the format. Of several formats of that
            name, the template's is returned, or else the last one.

    Raises:
        ValueError: no format has this name.
    """
    if name not in (None, *CALL_PARSERS):
        raise ValueError(f"tool_call_parser must be one of {', '.join(CALL_PARSERS)}, got {name!r}")
    forms = [form for form in CALL_FORMS if name in (None, form.name)]
    for form in forms:
        if all(re.search(mark, template) for mark in form.marks):
            return form
    return None if name is None else forms[-1]


def reasoning_form_of(template: str, name: str = "auto") -> ReasoningForm | None:
    """Return the format of reasoning in a chat template, or the one of a name; None for none.

    Raises:
        ValueError: no format has this name.
    """
    if name not in REASONING_PARSERS:
        known = ", ".join(REASONING_PARSERS)
        raise ValueError(f"reasoning_parser must be one of {known}, got {name!r}")
    if name == "none":
        return None
    for form in REASONING_FORMS:
        if name in form.names or (name == "auto" and re.search(form.mark, template)):
            return form
    return None


def forms_of(
    template: str, call_parser: str | None, reasoning_parser: str
) -> tuple[CallForm | None, ReasoningForm | None]:
    """Return the formats of tool calls and of reasoning for a chat template and two options.

    Raises:
        ValueError: an option has an unknown name, or the two formats do not fit together.
    """
    calls = call_form_of(template, call_parser)
    reasoning = reasoning_form_of(template, reasoning_parser)
    if calls is HARMONY and reasoning_parser == "auto":
        reasoning = HARMONY_REASONING
    elif calls is HARMONY and call_parser is None and reasoning is not HARMONY_REASONING:
        calls = None
    if calls is not None and (calls is HARMONY) != (reasoning is HARMONY_REASONING):
        raise ValueError(
            f"reasoning_parser must be {HARMONY_REASONING.names[0]} if tool_call_parser is "
            f"{HARMONY.name}, and only then, got {reasoning_parser} and {calls.name}"
        )
    if calls is not None and reasoning is not None and calls is not HARMONY:
        calls = replace(calls, excluded=reasoning.opening)
    return calls, reasoning
