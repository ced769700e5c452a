# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  (where the server's packages are missing, nothing else is imported)
"""Formats of answers of each chat family: prompts, grammars, and parsing of any pieces of text."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest

for name in ("fastapi", "uvicorn", "pydantic", "jinja2", "httpx", "llguidance"):
    pytest.importorskip(name)

import httpx
import numpy as np
from fake_engine import FakeEngine, byte_tokenizer
from serving import serving
from specops.api.structured import StructuredOutput
from specops.engine import EngineConfig, SpeculativeConfig
from specops.engine.structured import GrammarCompiler, GrammarState
from specops.server.chat import ChatFormat
from specops.server.protocol import AnyMessage, AssistantMessage, Message, ToolMessage
from specops.server.reasoning import Piece, Reader, Reasoning
from specops.server.tools import Tool, calls_format, schema_of

N = '{{ "\\n" }}'  # a line end, which Jinja would drop after a block
NAME, ARGUMENTS = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"
OBJECT = f'{{"name": "{NAME}", "arguments": {ARGUMENTS}}}'
# Call formats: text before all calls, of one call `c`, between calls, and after all calls.
HERMES = ("", f"<tool_call>{N}{OBJECT}{N}</tool_call>", N, "")
LLAMA = ("", f'{{"name": "{NAME}", "parameters": {ARGUMENTS}}}', "; ", "")
MISTRAL = ("[TOOL_CALLS][", OBJECT, ", ", "]")
MISTRAL_ARGS = ("", f"[TOOL_CALLS]{NAME}[ARGS]{ARGUMENTS}", "", "")
MISTRAL_IDS = ("", f"[TOOL_CALLS]{NAME}[CALL_ID]{{{{ c.id }}}}[ARGS]{ARGUMENTS}", "", "")
VALUE = "{{ v if v is string else v | tojson(ensure_ascii=False) }}"
ITEMS = "{% for k, v in c.function.arguments.items() %}"
QWEN3_CODER = (
    "",
    f"<tool_call>{N}<function={NAME}>{N}{ITEMS}<parameter={{{{ k }}}}>{N}{VALUE}{N}</parameter>{N}"
    f"{{% endfor %}}</function>{N}</tool_call>",
    N,
    "",
)
GLM45 = (
    "",
    f"<tool_call>{NAME}{N}{ITEMS}<arg_key>{{{{ k }}}}</arg_key>{N}<arg_value>{VALUE}</arg_value>{N}"
    "{% endfor %}</tool_call>",
    N,
    "",
)
GLM47 = ("", GLM45[1].replace(N, ""), "", "")
DEEPSEEK_V3 = (
    "<\uff5ctool\u2581calls\u2581begin\uff5c>",
    "{{ '<\uff5ctool\u2581call\u2581begin\uff5c>function<\uff5ctool\u2581sep\uff5c>'"
    " + c.function.name + '\\n```json\\n' + c.function.arguments"
    " + '\\n```<\uff5ctool\u2581call\u2581end\uff5c>' }}",
    N,
    "<\uff5ctool\u2581calls\u2581end\uff5c>",
)
DEEPSEEK_V31 = (
    DEEPSEEK_V3[0],
    DEEPSEEK_V3[1].replace("function<\uff5ctool\u2581sep\uff5c>'", "'")
    .replace("\\n```json\\n", "<\uff5ctool\u2581sep\uff5c>").replace("\\n```", ""),
    "",
    DEEPSEEK_V3[3],
)  # fmt: skip
DSML = "<\uff5cDSML\uff5c"
IS_TEXT = "{{ 'true' if v is string else 'false' }}"
DEEPSEEK_V32 = (
    f"{N}{N}{DSML}function_calls>{N}",
    f'{DSML}invoke name="{NAME}">{N}{ITEMS}{{% if not loop.first %}}{N}{{% endif %}}'
    f'{DSML}parameter name="{{{{ k }}}}" string="{IS_TEXT}">{VALUE}</{DSML[1:]}parameter>'
    f"{{% endfor %}}{N}</{DSML[1:]}invoke>",
    N,
    f"{N}</{DSML[1:]}function_calls>",
)
KIMI_K2 = (
    "<|tool_calls_section_begin|>",
    f"<|tool_call_begin|>{{{{ c.id }}}}<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|>",
    "",
    "<|tool_calls_section_end|>",
)
THINK = "<think>\\n{{ m.reasoning_content }}\\n</think>\\n\\n".replace("\\n", N)
NEXT = "<|start|>assistant"


@dataclass(frozen=True)
class Family:
    """Excerpt of a published chat template: how it writes a message of the assistant.

    Attributes:
        calls, reasoning: expected names of the formats of tool calls and of reasoning.
        call: one of the call formats above.
        think: Jinja of the reasoning of message `m`.
        begin: begin of the assistant's message.
        prompt: what follows `begin` in a prompt.
        content: Jinja of the content.
        end: end of the message.
    """

    calls: str | None
    reasoning: str | None
    call: tuple[str, str, str, str] = ("", "", "", "")
    think: str = ""
    begin: str = "<|im_start|>assistant\n"
    prompt: str = ""
    content: str = "{{ m.content }}"
    end: str = "<|im_end|>"

    @cached_property
    def chat(self) -> ChatFormat:
        return ChatFormat(self.template, {"bos_token": "<s>"})

    @property
    def template(self) -> str:
        before, call, between, after = self.call
        calls = f"{before}{{% for c in m.tool_calls %}}{call}"
        calls += f"{{% if not loop.last %}}{between}{{% endif %}}{{% endfor %}}{after}"
        think = f"{{% if m.reasoning_content or m.thinking %}}{self.think}{{% endif %}}"
        return (
            "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}"
            "{% for m in messages %}{% if m.role == 'assistant' %}"
            f"{self.begin}{think}{{% if m.content %}}{self.content}{{% endif %}}"
            f"{{% if m.tool_calls %}}{calls}{{% endif %}}{self.end}"
            "{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
            f"{{% if add_generation_prompt %}}{self.begin}{self.prompt}{{% endif %}}"
        )


HARMONY_CALL = f"<|channel|>commentary to=functions.{NAME} <|constrain|>json<|message|>{ARGUMENTS}"
FAMILIES = {
    "Llama 3": Family("llama3_json", None, LLAMA, begin="<|start_header_id|>assistant\n\n"),
    "Mistral 7B": Family("mistral", None, MISTRAL, begin="[/INST]", end="</s>"),
    "Mistral Small 3.2": Family("mistral", None, MISTRAL_IDS, begin="[/INST]", end="</s>"),
    "Ministral 3": Family(
        "mistral", "mistral", MISTRAL_ARGS, "[THINK]{{ m.reasoning_content }}[/THINK]",
        begin="[/INST]", end="</s>",
    ),
    "Qwen2.5": Family("hermes", None, HERMES),
    "Qwen3": Family("hermes", "think", HERMES, THINK),
    "MiMo": Family("hermes", "think", HERMES, THINK),
    "Qwen3-Coder": Family("qwen3_coder", None, QWEN3_CODER),
    "Qwen3.5": Family("qwen3_coder", "think", QWEN3_CODER, THINK, prompt=f"<think>{N}"),
    "GLM-4.5": Family(
        "glm45", "think", GLM45, f"{N}<think>{{{{ m.reasoning_content }}}}</think>{N}",
        begin="<|assistant|>", end="<|user|>",
    ),
    "GLM-4.7": Family(
        "glm47", "think", GLM47, "<think>{{ m.reasoning_content }}</think>",
        begin="<|assistant|>", prompt="<think>", end="<|user|>",
    ),
    "DeepSeek-R1": Family("deepseek_v3", "think", DEEPSEEK_V3, THINK, prompt=f"<think>{N}"),
    "DeepSeek-V3.1": Family(
        "deepseek_v31", "think", DEEPSEEK_V31, "<think>{{ m.reasoning_content }}</think>",
        prompt="<think>",
    ),
    "DeepSeek-V3.2": Family(
        "deepseek_v32", "think", DEEPSEEK_V32, "<think>{{ m.reasoning_content }}</think>",
        prompt="<think>",
    ),
    "Kimi-K2": Family(
        "kimi_k2", "think", KIMI_K2, "<think>{{ m.reasoning_content }}</think>",
    ),
    "gpt-oss": Family(
        "openai", "harmony", ("", HARMONY_CALL, "", ""),
        f"<|channel|>analysis<|message|>{{{{ m.thinking }}}}<|end|>{NEXT}", begin=NEXT,
        content="<|channel|>{% if m.tool_calls %}commentary{% else %}final{% endif %}<|message|>"
        f"{{{{ m.content }}}}{{% if m.tool_calls %}}<|end|>{NEXT}{{% endif %}}",
        end="<|return|>",
    ),
    "Gemma 3": Family(None, None, begin="<start_of_turn>model\n", end="<end_of_turn>"),
    "ERNIE-4.5": Family(None, None, begin="Assistant: ", end="</s>"),
    "ERNIE-4.5-Thinking": Family(
        "hermes", "ernie45", HERMES, THINK, prompt=f"<think>{N}",
        content=f"<response>{N}{{{{ m.content }}}}{N}</response>{N}",
    ),
}  # fmt: skip

PARAMETERS = {
    "type": "object",
    "properties": {
        "place": {"type": "string", "description": "a city"},
        "days": {"type": "integer", "minimum": 1},
        "unit": {"enum": ["C", "F"]},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        "hours": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["place", "days"],
}
TOOLS = [
    Tool.model_validate({"type": "function", "function": function})
    for function in ({"name": "get.weather", "parameters": PARAMETERS}, {"name": "now"})
]
SCHEMAS = {tool.function.name: schema_of(tool.function) for tool in TOOLS}
RAIN = (
    "get.weather",
    {"place": 'é "x"\n <b>{', "days": 3, "unit": "C", "note": None, "hours": [1]},
)
LOND = ("get.weather", {"place": "12", "days": 7, "note": "  two\n\nlines\n"})
NOW = ("now", {})

# Answers: reasoning, content, and calls.
Answer = tuple[str, str, list[tuple[str, dict[str, Any]]]]
ANSWERS: dict[str, Answer] = {
    "plain": ("", "Hello <b>, {é}.", []),
    "tools": ("", "I look.", [RAIN]),
    "forced": ("", "", [LOND]),
    "several": ("", "", [RAIN, NOW, LOND]),
    "reasoning": ("2 < 3,\n\nor <thin", "Yes.\n\n  <think>No</think>!", []),
    "reasoning and a call": ("They ask.", "", [RAIN]),
    "reasoning, text and a call": ("{}", "See:", [NOW]),
}


def message_of(family: Family, answer: Answer) -> AssistantMessage:
    """Return an answer as a message of the history."""
    reasoning, content, calls = answer
    called = [
        {
            "id": f"functions.{name}:{index}" if family.calls == "kimi_k2" else f"{index:09}",
            "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
        }
        for index, (name, arguments) in enumerate(calls)
    ]
    return AssistantMessage.model_validate(
        {
            "role": "assistant",
            "content": content,
            "tool_calls": called,
            **({"reasoning_content": reasoning} if reasoning else {}),
        }
    )


def rendered(family: Family, messages: Sequence[AnyMessage], *, prompt: bool) -> str:
    tools = [tool.model_dump(exclude_none=True) for tool in TOOLS] if family.calls else None
    return family.chat.render(
        [message.for_template() for message in messages],
        add_generation_prompt=prompt,
        tools=tools,
    )


ASK = Message(role="user", content="How is the weather?")


def written(family: Family, answer: Answer) -> tuple[str, str]:
    """Return the prompt of an answer, and the text that the model writes after it."""
    prompt = rendered(family, [ASK], prompt=True)
    whole = rendered(family, [ASK, message_of(family, answer)], prompt=False)
    whole = whole.removesuffix(family.end)
    if not whole.startswith(prompt):  # an answer without reasoning after a prompt that opens it
        whole = prompt + "</think>" + whole[len(rendered(family, [ASK], prompt=False)) :]
        whole = whole.replace("</think>" + family.begin, "</think>")
    return prompt, whole[len(prompt) :]


def found(reader: Reader | None, pieces: Sequence[str]) -> Answer:
    """Return what a reader finds in the pieces of an answer."""
    every: list[Piece] = []
    for piece in pieces:
        every += [piece] if reader is None else reader.pieces(piece)
    every += [] if reader is None else reader.finish()
    reasoning = "".join(one.text for one in every if isinstance(one, Reasoning))
    content = "".join(one for one in every if isinstance(one, str))
    calls = [one["function"] for one in every if isinstance(one, dict)]
    return reasoning, content, [(one["name"], json.loads(one["arguments"])) for one in calls]


CASES = [
    pytest.param(family, case, id=f"{name}, {case}")
    for name, family in FAMILIES.items()
    for case, (reasoning, content, calls) in ANSWERS.items()
    if (family.calls or not calls)
    and (family.reasoning or not reasoning)
    and not (family.calls == "llama3_json" and content and calls)
    # gpt-oss' answers have one call, and its template writes no text beside reasoning and a call.
    and not (family.calls == "openai" and (len(calls) > 1 or (reasoning and content and calls)))
]


def test_formats_are_found_in_templates() -> None:
    for family in FAMILIES.values():
        chat = family.chat
        assert (chat.call_form.name if chat.call_form else None) == family.calls
        assert (chat.reasoning_form.names[0] if chat.reasoning_form else None) == family.reasoning


@pytest.mark.parametrize("family,case", CASES)
def test_answers_are_parsed_from_any_pieces(family: Family, case: str) -> None:
    answer = ANSWERS[case]
    prompt, text = written(family, answer)
    schemas = SCHEMAS if answer[2] else None

    def reader() -> Reader | None:
        return family.chat.reader(prompt, schemas)

    assert found(reader(), [text]) == answer
    for cut in range(len(text)):
        assert found(reader(), [text[:cut], text[cut:]]) == answer, text[:cut]
    for size in (1, 2, 7):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert found(reader(), pieces) == answer


@pytest.mark.parametrize("family,case", CASES)
def test_cut_answers_are_parsed_alike_in_streams(family: Family, case: str) -> None:
    prompt, text = written(family, ANSWERS[case])
    for end in range(len(text)):
        cut = text[:end]
        whole = found(family.chat.reader(prompt, SCHEMAS if family.calls else None), [cut])
        assert found(family.chat.reader(prompt, SCHEMAS if family.calls else None), [*cut]) == whole


COMPILER = GrammarCompiler(byte_tokenizer(), 257)


def accepts(constraint: StructuredOutput, text: str) -> bool:
    """Return whether a constraint allows a text, byte by byte, as the whole output."""
    state = GrammarState(COMPILER.compile(constraint), [0])
    for byte in text.encode():
        mask = np.frombuffer(state.matcher.compute_bitmask(), dtype=np.int32)
        token = byte + 1
        is_allowed = bool(mask[token >> 5] >> (token & 31) & 1)
        assert state.take(token) == is_allowed
        if not is_allowed:
            return False
    return state.may_end


# Further tools: any arguments, and every kind of string.
ODD_TOOLS = [
    *TOOLS,
    *(
        Tool.model_validate({"type": "function", "function": function})
        for function in (
            {"name": "free", "parameters": {"type": "object"}},
            {
                "name": "strings",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "short": {"type": "string", "maxLength": 3},
                        "null": {"type": ["string", "null"]},
                        "one": {"enum": ["x", "yy"]},
                        "other": {"type": ["integer", "string"]},
                        "any": {},
                        "named": {"$ref": "#/$defs/Name"},
                    },
                    "required": ["null", "other", "named"],
                    "additionalProperties": {"type": "integer"},
                    "$defs": {"Name": {"type": "string", "pattern": "^[a-z]+$"}},
                },
            },
        )
    ),
]


def random_text(constraint: StructuredOutput, marks: Sequence[str], draw: random.Random) -> str:
    """Return a text that a constraint admits, with the marks of its format in odd places."""
    state = GrammarState(COMPILER.compile(constraint), [0])
    text = bytearray()
    while not state.is_complete and not (state.may_end and draw.random() < 0.5):
        if draw.random() < 0.15:
            for byte in draw.choice(marks).encode():
                if state.is_complete or not state.take(byte + 1):
                    break
                text.append(byte)
            continue
        mask = np.frombuffer(state.matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")[1:257])
        usual = [byte for byte in allowed if byte in b'<>/{}[]":,\n |aT']
        byte = int(draw.choice(usual if usual and draw.random() < 0.8 else list(allowed)))
        assert state.take(byte + 1)
        text.append(byte)
    return text.decode()


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.calls])
def test_calls_that_a_grammar_admits_are_read_with_valid_arguments(name: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    family = FAMILIES[name]
    chat, prompt = family.chat, rendered(family, [ASK], prompt=True)
    assert chat.call_form is not None
    constraint = calls_format(ODD_TOOLS, "required", True, chat.call_form)
    assert constraint is not None and constraint.grammar is not None
    prefix = chat.reasoning_prefix(prompt, calls=True)
    constraint = StructuredOutput(grammar=constraint.grammar, prefix=prefix)
    schemas = {tool.function.name: schema_of(tool.function) for tool in ODD_TOOLS}
    form, reasoning = chat.call_form, chat.reasoning_form
    marks = [form.opening, form.after + form.closing, form.pairs.end if form.pairs else ""]
    marks = [*filter(None, marks), "<|end|>", *([reasoning.closing] if reasoning else [])]
    for seed in range(4):
        text = random_text(constraint, marks, random.Random(seed))
        answer = found(chat.reader(prompt, schemas), [text])
        assert answer == found(chat.reader(prompt, schemas), [*text])
        assert answer[2], text
        assert not answer[1].strip() or family.calls == "openai", text
        for name, arguments in answer[2]:
            jsonschema.validate(arguments, schemas[name])


@pytest.mark.parametrize("name", FAMILIES)
def test_damaged_answers_are_parsed_alike_in_streams(name: str) -> None:
    family, draw = FAMILIES[name], random.Random(name)
    schemas = SCHEMAS if family.calls else None
    cases = [one.values for one in CASES if one.values[0] is family]
    for _ in range(40):
        prompt, text = written(family, ANSWERS[draw.choice(cases)[1]])
        for _ in range(draw.randrange(1, 4)):
            at, end = sorted(draw.randrange(len(text) + 1) for _ in range(2))
            end = min(end, at + draw.choice([1, 2, 9, 40]))
            odd = draw.choice(["", text[at:end] * 2, '"', "{", "}", "<", "\n", "<think>", "\\"])
            text = text[:at] + odd + text[end:]
        answer = found(family.chat.reader(prompt, schemas), [text])
        assert answer == found(family.chat.reader(prompt, schemas), [*text]), text
        cut = draw.randrange(len(text) + 1)
        assert answer == found(family.chat.reader(prompt, schemas), [text[:cut], text[cut:]]), text


def constraint_of(family: Family, prompt: str, choice: Any, parallel: bool) -> StructuredOutput:
    chat = family.chat
    assert chat.call_form is not None
    constraint = calls_format(TOOLS, choice, parallel, chat.call_form)
    assert constraint is not None and constraint.grammar is not None
    prefix = chat.reasoning_prefix(prompt, calls=True)
    return StructuredOutput(grammar=constraint.grammar, prefix=prefix)


@pytest.mark.parametrize("family,case", [one for one in CASES if one.values[0].calls])
def test_grammars_admit_the_published_formats(family: Family, case: str) -> None:
    _, content, calls = ANSWERS[case]
    prompt, text = written(family, ANSWERS[case])
    assert accepts(constraint_of(family, prompt, "auto", True), text)
    must = constraint_of(family, prompt, "required", len(calls) > 1)
    is_preamble = family.calls == "openai"  # text may precede a call that must be made
    assert accepts(must, text) == bool(calls and (not content or is_preamble))
    if calls:
        name = {"type": "function", "function": {"name": "other"}}
        assert not accepts(must, text.replace(calls[0][0], name["function"]["name"]))  # type: ignore[index]
        if "days" in calls[0][1]:
            assert not accepts(must, text.replace(str(calls[0][1]["days"]), "x"))


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.reasoning])
def test_constrained_output_follows_the_reasoning(name: str) -> None:
    family = FAMILIES[name]
    prompt, text = written(family, ("I add.", '{"sum": 3}', []))
    text = text.removesuffix("\n</response>\n")
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
    prefix = family.chat.reasoning_prefix(prompt, calls=False)
    constraint = StructuredOutput(json_schema=schema, prefix=prefix)
    assert accepts(constraint, text)
    assert not accepts(constraint, text.replace("3", "x"))
    assert not accepts(constraint, text.replace('{"sum": 3}', "Three."))
    closed = prompt.removesuffix(family.prompt.replace(N, "\n")) + "<think>\n\n</think>\n\n"
    if family.reasoning == "think":
        assert family.chat.reasoning_prefix(closed, calls=False) is None


def test_history_is_rendered_as_in_transformers() -> None:
    pytest.importorskip("transformers")
    from transformers.utils.chat_template_utils import render_jinja_template

    for family in FAMILIES.values():
        spoken = [ANSWERS["reasoning and a call"], ANSWERS["plain"]]
        answers = [
            message_of(family, (r, c, calls if family.calls else [])) for r, c, calls in spoken
        ]
        messages: list[AnyMessage] = [ASK, answers[0]]
        if family.calls:
            messages.append(ToolMessage(role="tool", content="rain", tool_call_id="000000000"))
        messages += [answers[1], ASK]
        plain = [message.for_template() for message in messages]
        if family.reasoning == "harmony":
            plain[1]["thinking"] = plain[1]["reasoning_content"]
        if family.calls in ("deepseek_v3", "deepseek_v31"):  # the arguments are a text
            for call in plain[1]["tool_calls"]:
                call["function"]["arguments"] = json.dumps(
                    call["function"]["arguments"], ensure_ascii=False
                )
        tools = [tool.model_dump(exclude_none=True) for tool in TOOLS] if family.calls else None
        (theirs,), _ = render_jinja_template(
            conversations=[plain],
            tools=tools,
            chat_template=family.template,
            add_generation_prompt=True,
            bos_token="<s>",
        )
        assert rendered(family, messages, prompt=True) == theirs


HARMONY_TEXTS: list[tuple[str, Answer]] = [
    (
        f"<|channel|>analysis<|message|>a<|end|>{NEXT}<|channel|>commentary<|message|>I look."
        f'<|end|>{NEXT} to=functions.now<|channel|>commentary json<|message|>{{"a": 1}}',
        ("a", "I look.", [("now", {"a": 1})]),
    ),
    (
        f"<|channel|>analysis<|message|>a<|end|>{NEXT}<|channel|>analysis<|message|>b",
        ("a\n\nb", "", []),
    ),
    (f"<|channel|>final<|message|>a <b|> <|en<|end|>{NEXT}<|channel|>fi", ("", "a <b|> <|en", [])),
    ("<|channel|>commentary to=functions.now json<|message|>[1]", ("", "[1]", [])),
    ("<|channel|>commentary to=functions.now json<|message|>{", ("", "{", [])),
    ("no message", ("", "no message", [])),
]  # fmt: skip


@pytest.mark.parametrize("text,answer", HARMONY_TEXTS)
def test_messages_of_gpt_oss_are_told_apart(text: str, answer: Answer) -> None:
    chat = FAMILIES["gpt-oss"].chat
    for cut in range(len(text) + 1):
        assert found(chat.reader(NEXT, SCHEMAS), [text[:cut], text[cut:]]) == answer
    assert found(chat.reader(NEXT, SCHEMAS), [*text]) == answer


def test_marks_are_text_even_if_they_are_special_tokens() -> None:
    marks = ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "<think>", "</think>"]
    marks += ["<tool_call>", "</arg_value>", "<|tool_calls_section_begin|>", "<|tool_call_end|>"]
    marks += ["\uff5cDSML\uff5c", "<response>", "</response>"]
    marks += [
        f"<\uff5ctool\u2581{one}\uff5c>" for one in ("calls\u2581begin", "sep", "call\u2581end")
    ]
    others = ["<s>", "<|tool_call|>", "<|im_end|>"]
    for special in ([*marks, *others], ["<|channel|>"]):
        tokenizer = byte_tokenizer(special)
        for text in [*special, "<|end|>"]:
            (token,) = tokenizer.encode(text)
            is_shown = text in marks or special == ["<|channel|>"]
            assert tokenizer.is_special(token) != is_shown, text


class Repeating(FakeEngine):
    """Engine that repeats its prompt despite a grammar, so that any text is an answer.

    Attributes:
        constraints: constraints of the requests so far.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.constraints: list[StructuredOutput] = []

    def compile_structured_output(self, constraint: StructuredOutput, overdue: object) -> None:
        self.constraints.append(constraint)


def answers_of_apis(client: httpx.Client, text: str, size: int) -> list[tuple[Answer, int]]:
    """Return the answer, and its reasoning tokens, of each API for a text of `size` tokens."""
    answers = []

    def post(path: str, **body: Any) -> httpx.Response:
        response = client.post(f"/v1/{path}", json=body)
        assert response.status_code == 200, response.text
        return response

    def events(response: httpx.Response) -> list[Any]:
        return [json.loads(one[6:]) for one in response.text.split("\n") if one[:7] == "data: {"]

    def add(
        reasoning: Sequence[str],
        content: Sequence[str],
        calls: Sequence[tuple[str, str]],
        usage: dict[str, Any],
    ) -> None:
        called = [(name, json.loads(arguments)) for name, arguments in calls]
        answer = "".join(reasoning), "".join(content), called
        details = usage.get("completion_tokens_details", usage.get("output_tokens_details"))
        answers.append((answer, details["reasoning_tokens"] if details else -1))

    ends = {"ignore_eos": True}
    ask = {"messages": [{"role": "user", "content": text}], "max_tokens": size, **ends}
    functions = [tool.function.model_dump(exclude_none=True) for tool in TOOLS]
    tools: list[dict[str, Any]] = [{"type": "function", "function": one} for one in functions]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    for more in ({}, {"include_reasoning": False}):
        whole = post("chat/completions", **ask, tools=tools, **more).json()
        streamed = events(post("chat/completions", **ask, tools=tools, **options, **more))
        deltas = [choice["delta"] for one in streamed for choice in one["choices"]]
        for parts, usage in (
            ([whole["choices"][0]["message"]], whole["usage"]),
            (deltas, streamed[-1]["usage"]),
        ):
            calls = [call["function"] for one in parts for call in one.get("tool_calls", ())]
            add(
                [one.get("reasoning_content", "") for one in parts],
                [one.get("content") or "" for one in parts],
                [(one["name"], one["arguments"]) for one in calls],
                usage,
            )

    tools = [{"type": "function", **one} for one in functions]
    ask_items = {"input": text, "max_output_tokens": size, "tools": tools, **ends}
    whole = post("responses", **ask_items).json()
    streamed = events(post("responses", **ask_items, stream=True))
    for response in (whole, streamed[-1]["response"]):
        items = {kind: [] for kind in ("reasoning", "message", "function_call")}  # type: ignore[var-annotated]
        for item in response["output"]:
            items[item["type"]].append(item)
        add(
            [part["text"] for item in items["reasoning"] for part in item["content"]],
            [part["text"] for item in items["message"] for part in item["content"]],
            [(item["name"], item["arguments"]) for item in items["function_call"]],
            response["usage"],
        )
    grown = [one["delta"] for one in streamed if one["type"] == "response.reasoning_text.delta"]
    assert "".join(grown) == answers[-1][0][0]

    tools = [
        {"name": one["name"], "input_schema": one.get("parameters", {"type": "object"})}
        for one in functions
    ]
    whole = post("messages", **ask, tools=tools).json()
    blocks = {kind: [] for kind in ("thinking", "text", "tool_use")}  # type: ignore[var-annotated]
    for block in whole["content"]:
        blocks[block["type"]].append(block)
    called = [(block["name"], json.dumps(block["input"])) for block in blocks["tool_use"]]
    thoughts = [block["thinking"] for block in blocks["thinking"]]
    add(thoughts, [block["text"] for block in blocks["text"]], called, {})
    streamed = events(post("messages", **ask, tools=tools, stream=True))
    deltas = [one["delta"] for one in streamed if one["type"] == "content_block_delta"]
    begun = [one["content_block"] for one in streamed if one["type"] == "content_block_start"]
    names = [one["name"] for one in begun if one["type"] == "tool_use"]
    inputs = [one["partial_json"] for one in deltas if "partial_json" in one]
    assert [one["type"] for one in begun] == [one["type"] for one in whole["content"]]
    assert all(block["signature"] for block in blocks["thinking"])
    assert sum("signature" in one for one in deltas) == len(thoughts)
    add(
        [one.get("thinking", "") for one in deltas],
        [one.get("text", "") for one in deltas],
        list(zip(names, inputs, strict=True)),
        {},
    )
    return answers


@pytest.mark.parametrize(
    "name", ["Qwen3", "Qwen3.5", "gpt-oss", "Kimi-K2", "DeepSeek-V3.2", "ERNIE-4.5-Thinking"]
)
def test_every_api_separates_reasoning_and_calls(name: str) -> None:
    """Several tokens arrive in one step, as many as the drafts that are accepted."""
    speculative = SpeculativeConfig(method="ngram", num_speculative_tokens=6)
    config = EngineConfig(speculative_config=speculative, max_model_len=40_000)
    family = FAMILIES[name]
    chat = ChatFormat(
        "{% if tools %}{% endif %}{{ messages[0].content }}",
        tool_call_parser=family.calls,
        reasoning_parser=family.reasoning or "none",
    )
    engine = Repeating(config, most_accepted=4)
    if name == "gpt-oss":  # its marks are special tokens
        engine.tokenizer = byte_tokenizer(["<|channel|>", "<|message|>", "<|start|>"])
        engine.vocab_size = engine.tokenizer.vocab_size
    with (
        serving(engine, chat_format=chat) as served,
        httpx.Client(base_url=served.url) as client,
    ):
        for case in ("plain", "forced", "reasoning", "reasoning and a call"):
            answer = ANSWERS[case]
            prompt, text = written(family, answer)
            if family.prompt:  # the server finds the opening tag in the answer
                text = prompt[len(prompt.rstrip()) - len("<think>") :] + text
            number = 0
            if answer[0]:
                is_harmony = family.reasoning == "harmony"
                end = text.index("<|end|>") if is_harmony else text.index("</think>") + 8
                number = len(engine.tokenizer.encode(text[:end]))
            without = ("", *answer[1:])  # include_reasoning is false
            expected = [(answer, number)] * 2 + [(without, number)] * 2 + [(answer, number)] * 2
            expected += [(answer, -1)] * 2
            size = len(engine.tokenizer.encode(text))
            assert answers_of_apis(client, text, size) == expected


def test_reasoning_of_requests_reaches_the_template_and_the_constraint() -> None:
    template = (
        "{% for m in messages %}{{ m.role }}{{ m.content }}{{ m.reasoning_content }}{% endfor %}"
        "{% if enable_thinking | default(true) %}<think>{% else %}<think></think>{% endif %}"
    )
    engine = Repeating(EngineConfig(max_model_len=4096))
    ask = {"role": "user", "content": "x"}
    with (
        serving(engine, chat_format=ChatFormat(template)) as served,
        httpx.Client(base_url=served.url) as client,
    ):

        def post(path: str, **body: Any) -> Any:
            return client.post(path, json=body).json()

        said = {"role": "assistant", "content": "said"}
        counts = [
            post(
                "/v1/chat/completions", messages=[ask, {**said, name: "thought"}, ask], max_tokens=1
            )
            for name in ("reasoning_content", "reasoning")
        ]
        item = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "thought"}]}
        counts.append(
            post(
                "/v1/responses", input=[ask, {**item, "id": "rs_1"}, said, ask], max_output_tokens=1
            )
        )
        blocks = [
            {"type": "thinking", "thinking": "thought", "signature": "s"},
            {"type": "text", "text": "said"},
        ]
        history = [ask, {"role": "assistant", "content": blocks}, ask]
        counts.append(post("/v1/messages", messages=history, max_tokens=1))
        expected = len("userxassistantsaidthoughtuserx<think>")
        for one in counts:
            usage = one["usage"]
            number = usage.get("prompt_tokens", usage.get("input_tokens"))
            assert number + usage.get("cache_read_input_tokens", 0) == expected

        form = {"response_format": {"type": "json_object"}}
        chat = {"messages": [ask], "max_tokens": 1}
        off = {"chat_template_kwargs": {"enable_thinking": False}}
        prefixes = []
        for more in ({}, off, {"reasoning_max_tokens": 5}):
            post("/v1/chat/completions", **chat, **form, **more)
            prefixes.append(engine.constraints[-1].prefix)
        assert prefixes[0] is not None and "start: reasoning" in prefixes[0]
        assert prefixes[1:] == [None, None]
        post("/v1/completions", prompt="<think>", max_tokens=1, **form)
        assert engine.constraints[-1].prefix is None

        two = {**said, "reasoning": "a", "reasoning_content": "b"}
        of_user = {**ask, "reasoning_content": "b"}
        for path, body, message in (
            ("chat/completions", {"messages": [two]},
             "reasoning must be absent or equal to reasoning_content"),
            ("chat/completions", {"messages": [of_user]}, "unknown field"),
            ("messages", {"messages": [{"role": "user", "content": blocks}], "max_tokens": 1},
             "got thinking in a message of the user"),
            ("responses", {"input": [{**item, "summary": ["x"]}]}, "input.0.summary must"),
            ("responses", {"input": "x", "top_logprobs": 1}, "must not hold logprobs if the model"),
        ):  # fmt: skip
            assert message in post(f"/v1/{path}", **body)["error"]["message"]
        closed = post("/v1/responses", input="x", top_logprobs=1, max_output_tokens=2, **off)
        assert closed["output"][0]["content"][0]["logprobs"]
