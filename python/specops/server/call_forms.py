# SPDX-License-Identifier: Apache-2.0
"""Formats of tool calls: one table of how models write calls, and the grammar of each format.

`call_reader.py` reads the calls of every format but gpt-oss', which is in `harmony.py`.
"""

import json
import re
import secrets
import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specops.server.argument_pairs import Pairs

NAME = r"[A-Za-z0-9_.-]{1,64}"  # name of a tool
ANY = r"ANY: /(.|\n)*/"  # Lark terminal for any text


@dataclass(frozen=True)
class CallForm:
    """Format of tool calls: opening, before, name, middle, arguments, after, closing.

    Attributes:
        name: name of the format, as in vLLM's `--tool-call-parser`.
        marks: regular expressions that all occur in chat templates of this format.
        opening: text that introduces calls; if empty, an output that begins with "{" is a call.
        before: text between the opening and a call's name.
        middle: text between the name and the arguments.
        after: text between the arguments and the closing.
        closing: text after each call, or after the list of calls if `is_list`.
        between: text between two calls.
        head: text between the opening and the list of calls.
        is_list: whether the opening introduces several calls, which end the text.
        member: if each call is a JSON object, the name of its member with the arguments.
        pairs: if the arguments are no JSON object, how they are written.
        label: what the model writes between the name and `middle`, if anything: a fixed text, then
            a label. Given as the text, a regular expression of the label, and a format string that
            makes a call's id from `{name}` and `{label}`.
        id_length: length of a call's id, if templates require a certain one.
        excluded: text that the answer must not begin with where it may be free text: the opening
            of reasoning.
        lead: text that the model writes before the opening, also where nothing precedes it.
    """

    name: str
    marks: tuple[str, ...]
    opening: str = ""
    before: str = ""
    middle: str = ""
    after: str = ""
    closing: str = ""
    between: str = ""
    head: str = ""
    is_list: bool = False
    member: str | None = None
    pairs: Pairs | None = None
    label: tuple[str, str, str] | None = None
    id_length: int | None = None
    excluded: str = ""
    lead: str = ""

    def grammar(self, functions: Mapping[str, dict[str, Any]], *, must: bool, several: bool) -> str:
        """Return a Lark grammar of answers that may call functions.

        Args:
            functions: schema of the arguments of each function, by its name.
            must: require a call; otherwise any text may occur before it or in its place.
            several: allow more than one call.

        Raises:
            ValueError: this format cannot express the arguments of a function.
        """
        rules = ["%llguidance {}", *self.rules(must=must, several=several), ANY]
        rules.append(f"call: {' | '.join(f'call{i}' for i in range(len(functions)))}")
        for index, (name, schema) in enumerate(functions.items()):
            rules.append(f"call{index}: {self._begin(name)} arguments{index} {_text(self.after)}")
            remark = f" // tool {name}"  # llguidance's errors quote the line of a schema
            if self.pairs is None:
                rules.append(f"arguments{index}: %json {json.dumps(schema)}{remark}")
                continue
            try:
                rules += self.pairs.rules(f"arguments{index}", schema, remark)
            except ValueError as error:
                raise ValueError(f"tools: parameters of {name!r} cannot be used: {error}") from None
        return "\n".join(rules)

    def rules(self, *, must: bool, several: bool) -> list[str]:
        """Return rules of a Lark grammar from `start` down to, but without, `call` (one call)."""
        opening, between = _text(self.opening), _text(self.between)
        calls = f"call ({between} call)*" if several else "call"
        if not self.opening:
            # Free text must not begin as an object, since that would be a call.
            free = self._free(r"/([ \t\r\n]*[^{ \t\r\n](.|\n)*)?/")
            rules = [f"calls: {calls}"]
            return ["start: calls", *rules] if must else ["start: rest | calls", *rules, *free]
        lazy = [*self._free("ANY"), f"opening[lazy]: TEXT {opening}"]
        if self.is_list:
            rules = [f"calls: {_text(self.head)} {calls} {_text(self.closing)}"]
            if must:
                lead = f"{_text(self.lead)}?" if self.lead else ""
                return [f"start: {lead} {opening} calls", *rules]
            return ["start: rest | opening calls", *rules, *lazy]
        written = f"written: call {_text(self.closing)}"
        if must:
            start = f"called ({between} called)*" if several else "called"
            return [f"start: {start}", f"called: {opening} written", written]
        start = "start: called* rest" if several else "start: rest | called"
        return [start, "called: opening written", written, *lazy]

    def _begin(self, name: str) -> str:
        """Return Lark for the text from the begin of a call to its arguments."""
        if self.label is None:
            return _text(self.before + name + self.middle)
        mark, pattern, _ = self.label
        return f"{_text(self.before + name + mark)} /{pattern}/ {_text(self.middle)}"

    def _free(self, text: str) -> list[str]:
        """Return the grammar rules of an answer without calls; `text` is their Lark expression."""
        if self.excluded:
            text = rf"{text} & ~(/[ \t\r\n]*/ {_text(self.excluded)} ANY)"
        return ["rest: TEXT", f"TEXT: {text}"]

    @property
    def header(self) -> re.Pattern[str]:
        """Pattern of the text between the opening and the arguments, with white space anywhere."""
        mark, pattern, _ = self.label or ("", "", "")
        label = f"{re.escape(mark)}(?P<label>{pattern})"
        before, middle = (re.escape(text.strip()) for text in (self.before, self.middle))
        return re.compile(rf"\s*{before}\s*(?P<name>{NAME}){label}\s*{middle}\s*")

    @property
    def tail(self) -> str:
        """Text after the arguments that completes a call; empty if the arguments do."""
        if not self.is_list:
            return self.closing
        return "" if self.member else self.after.strip()

    def new_id(self, name: str, label: str) -> str:
        """Return the id of a call: the one that the model wrote, or a random one."""
        if self.label is not None:
            return self.label[2].format(name=name, label=label)
        if self.id_length is None:
            return f"call_{secrets.token_hex(12)}"
        alphabet = string.ascii_letters + string.digits
        return "".join(secrets.choice(alphabet) for _ in range(self.id_length))


def _text(text: str) -> str:
    """Return Lark for a constant text; "" for an empty one."""
    return json.dumps(text, ensure_ascii=False) if text else ""


HERMES = CallForm(
    "hermes",
    ("<tool_call>", "name", "arguments"),
    opening="<tool_call>",
    before='\n{"name": "',
    middle='", "arguments": ',
    after="}\n",
    closing="</tool_call>",
    between="\n",
    member="arguments",
)
LLAMA = CallForm(
    "llama3_json",
    (r'"name"\s*:.*"parameters"\s*:', r"<\|"),
    before='{"name": "',
    middle='", "parameters": ',
    after="}",
    between="; ",
    member="parameters",
)
MISTRAL = CallForm(
    "mistral",
    (r"\[TOOL_CALLS\]",),
    opening="[TOOL_CALLS]",
    before='{"name": "',
    middle='", "arguments": ',
    after="}",
    closing="]",
    between=", ",
    head="[",
    is_list=True,
    member="arguments",
    id_length=9,
)
MISTRAL_ARGS = CallForm(
    "mistral",
    (r"\[TOOL_CALLS\]", r"\[ARGS\]"),
    opening="[TOOL_CALLS]",
    middle="[ARGS]",
    id_length=9,
)
MISTRAL_IDS = CallForm(
    "mistral",
    (r"\[TOOL_CALLS\]", r"\[CALL_ID\]", r"\[ARGS\]"),
    opening="[TOOL_CALLS]",
    middle="[ARGS]",
    label=("[CALL_ID]", "[a-zA-Z0-9]{9}", "{label}"),
)
QWEN3_CODER = CallForm(
    "qwen3_coder",
    ("<tool_call>", "<function="),
    opening="<tool_call>",
    before="\n<function=",
    middle=">\n",
    after="</function>\n",
    closing="</tool_call>",
    between="\n",
    pairs=Pairs("<parameter=", ">\n", "\n</parameter>", "\n"),
)
GLM45 = CallForm(
    "glm45",
    ("<tool_call>", "<arg_key>"),
    opening="<tool_call>",
    middle="\n",
    closing="</tool_call>",
    between="\n",
    pairs=Pairs("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>", "\n"),
)
GLM47 = CallForm(
    "glm47",
    ("<tool_call>", "</arg_key><arg_value>"),
    opening="<tool_call>",
    closing="</tool_call>",
    pairs=Pairs("<arg_key>", "</arg_key><arg_value>", "</arg_value>", ""),
)


def _deepseek(words: str) -> str:
    """Return a special token of DeepSeek's models."""
    return f"<\uff5c{words.replace(' ', chr(0x2581))}\uff5c>"


DEEPSEEK_V3 = CallForm(
    "deepseek_v3",
    (_deepseek("tool sep"), "```json"),
    opening=_deepseek("tool calls begin"),
    before=f"{_deepseek('tool call begin')}function{_deepseek('tool sep')}",
    middle="\n```json\n",
    after=f"\n```{_deepseek('tool call end')}",
    closing=_deepseek("tool calls end"),
    between="\n",
    is_list=True,
)
DEEPSEEK_V31 = CallForm(
    "deepseek_v31",
    (_deepseek("tool sep"),),
    opening=_deepseek("tool calls begin"),
    before=_deepseek("tool call begin"),
    middle=_deepseek("tool sep"),
    after=_deepseek("tool call end"),
    closing=_deepseek("tool calls end"),
    is_list=True,
)
DEEPSEEK_V32 = CallForm(
    "deepseek_v32",
    ("\uff5cDSML\uff5c", "function_calls>"),
    opening="<\uff5cDSML\uff5cfunction_calls>",
    before='<\uff5cDSML\uff5cinvoke name="',
    middle='">\n',
    after="</\uff5cDSML\uff5cinvoke>\n",
    closing="</\uff5cDSML\uff5cfunction_calls>",
    head="\n",
    is_list=True,
    lead="\n\n",
    pairs=Pairs(
        '<\uff5cDSML\uff5cparameter name="',
        '" string="false">',
        "</\uff5cDSML\uff5cparameter>",
        "\n",
        text_middle='" string="true">',
        none="\n",
    ),
)
KIMI_K2 = CallForm(
    "kimi_k2",
    (r"<\|tool_calls_section_begin\|>",),
    opening="<|tool_calls_section_begin|>",
    before="<|tool_call_begin|>functions.",
    middle="<|tool_call_argument_begin|>",
    after="<|tool_call_end|>",
    closing="<|tool_calls_section_end|>",
    is_list=True,
    label=(":", "[0-9]{1,4}", "functions.{name}:{label}"),
)
