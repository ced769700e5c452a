# SPDX-License-Identifier: Apache-2.0
"""Chat templates, which turn a conversation into the one text that a model was trained to read."""

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from specops.api.tokenizer import read_json_object
from specops.server.call_reader import CallReader
from specops.server.formats import CALL_PARSERS, forms_of
from specops.server.json_text import dumps
from specops.server.reasoning import Reader, TagReader


class ChatFormat:
    """Chat template of a model, and the formats of its answers.

    Args:
        template: Jinja source as in `transformers`; None if the model has no template.
        special_tokens: texts of special tokens by the names that templates use, such as
            "eos_token".
        tool_template: template for chats with tools; by default `template`.
        tool_call_parser: format in which the model writes tool calls, of `CALL_PARSERS`; by
            default detected from the template.
        reasoning_parser: format of the model's reasoning, of `REASONING_PARSERS`; "auto": detected
            from the template.

    Attributes:
        call_form: format of tool calls; None if the template has no known one.
        reasoning_form: format of reasoning; None if the model does not reason.

    Raises:
        ValueError: a template is invalid, or a parser is unknown.
    """

    def __init__(
        self,
        template: str | None,
        special_tokens: Mapping[str, str] | None = None,
        *,
        tool_template: str | None = None,
        tool_call_parser: str | None = None,
        reasoning_parser: str = "auto",
    ) -> None:
        tool_template = template if tool_template is None else tool_template
        self._template = None if template is None else _compile(template)
        self._tool_template = None if tool_template is None else _compile(tool_template)
        self.call_form, self.reasoning_form = forms_of(
            tool_template or "", tool_call_parser, reasoning_parser
        )
        self._variables = set() if template is None else _variables(template)
        self._tool_variables = set() if tool_template is None else _variables(tool_template)
        self._special_tokens = dict(special_tokens or {})

    @classmethod
    def from_dir(
        cls,
        path: str | Path,
        special_tokens: Mapping[str, str],
        *,
        tool_call_parser: str | None = None,
        reasoning_parser: str = "auto",
    ) -> "ChatFormat":
        """Load the templates of a model directory.

        The files are chat_template.jinja and additional_chat_templates/*.jinja, tokenizer_config
        and chat_template.json. If several of them have a template of the same name, the first in
        this order is used. The template "tool_use" is for chats with tools, "default" for others.

        Raises:
            ValueError: a file or a template is invalid.
        """
        path = Path(path)
        templates: dict[str, Any] = {}
        for file in ("chat_template.json", "tokenizer_config.json"):
            template = read_json_object(path / file).get("chat_template")
            named = template if isinstance(template, list) else []  # several named templates
            if template is not None and template is not named:
                named = [{"name": "default", "template": template}]
            try:
                templates |= {str(one["name"]): str(one["template"]) for one in named}
            except (TypeError, KeyError):
                message = f"{path / file}: chat_template must hold names and templates"
                raise ValueError(message) from None
        files = {"default": path / "chat_template.jinja"}
        files |= {file.stem: file for file in (path / "additional_chat_templates").glob("*.jinja")}
        templates |= {
            name: source.read_text(encoding="utf-8")
            for name, source in files.items()
            if source.is_file()
        }
        return cls(
            templates.get("default"),
            special_tokens,
            tool_template=templates.get("tool_use"),
            tool_call_parser=tool_call_parser,
            reasoning_parser=reasoning_parser,
        )

    def reader(self, prompt: str, schemas: Mapping[str, Mapping[str, Any]] | None) -> Reader | None:
        """Return a parser of an answer; None if the answer is all content.

        Args:
            prompt: rendered prompt of the answer.
            schemas: schemas of the arguments of the functions that the answer may call, by name;
                None if it may call none.
        """
        form = None if schemas is None else self.call_form
        if self.reasoning_form is not None:
            begin = self.reasoning_form.begin(prompt)
            return self.reasoning_form.reader(begin, form, schemas or {})
        return None if form is None else TagReader(None, CallReader(form, schemas or {}))

    def reasoning_prefix(self, prompt: str, *, calls: bool) -> str | None:
        """Return a Lark grammar of what may precede a constrained answer; None for nothing."""
        form = self.reasoning_form
        return None if form is None else form.prefix(form.begin(prompt), calls=calls)

    @property
    def has_template(self) -> bool:
        """True if the model has a template, which rendering a chat requires."""
        return self._template is not None

    def require_tools(self) -> None:
        """Check that the template supports tools.

        Raises:
            ValueError: it does not, or has tool calls in an unknown syntax.
        """
        if "tools" not in self._tool_variables:
            raise ValueError(
                "tools are not supported: the model's chat template does not list them; choose "
                "another with --chat-template"
            )
        if self.call_form is None:
            raise ValueError(
                "tools are not supported: the syntax of tool calls in the model's chat template is "
                f"unknown; set --tool-call-parser to one of {', '.join(CALL_PARSERS)}"
            )

    @property
    def variables(self) -> frozenset[str]:
        """Names of the variables that the template reads."""
        return frozenset(self._variables | self._tool_variables)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return the text of a conversation, up to where the assistant is to speak.

        Args:
            messages: messages of the conversation, each with role and content.
            add_generation_prompt: end with the prefix of the assistant's next message.
            continue_final_message: end with the content of the last message instead.
            variables: further variables that the template may read, such as "enable_thinking".
            tools: tools that the assistant may call, as the client has sent them.

        Raises:
            ValueError: the model has no chat template, a variable has a reserved name, the last
                message cannot be continued, or the template refuses the messages.
        """
        template = self._tool_template if tools else self._template
        if template is None:
            raise ValueError("the model has no chat template; send a prompt to /v1/completions")
        form = self.reasoning_form
        if continue_final_message:
            messages = _marked(messages)
        reserved = {
            "messages": messages if form is None else [form.in_history({**m}) for m in messages],
            "add_generation_prompt": add_generation_prompt,
            "tools": tools or None,
            "documents": None,
            **self._special_tokens,
        }
        for name in variables or {}:
            if name in reserved:
                raise ValueError(
                    f"chat_template_kwargs must hold variables that a request may set, got {name!r}"
                )
        try:
            text = template.render(**reserved, **(variables or {}))
        except Exception as error:  # a template may raise any exception
            raise ValueError(f"the chat template refused the messages: {error}") from None
        if not continue_final_message:
            return text
        text, mark, _ = text.rpartition(_MARK)
        if not mark:
            raise ValueError(
                "continue_final_message must be false: the chat template changes the last message"
            )
        return text


# Marks the end of the last message in a prompt. Not a space, which templates strip.
_MARK = "<|specops:continue|>"


def _marked(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return messages with a mark at the end of the last one.

    Raises:
        ValueError: the last message cannot be continued, since it has tool calls.
    """
    *earlier, last = messages
    if last.get("tool_calls"):
        raise ValueError("messages must end with a text to be continued, got tool calls")
    return [*earlier, {**last, "content": last["content"] + _MARK}]


class _Generation(jinja2.ext.Extension):
    """Jinja extension that ignores `{% generation %}`, which marks training targets."""

    tags = {"generation"}  # noqa: RUF012  (the base class says what this is)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _variables(source: str) -> set[str]:
    """Return the variables that a template reads and does not set itself."""
    return set(jinja2.meta.find_undeclared_variables(_environment().parse(source)))


def _compile(source: str) -> jinja2.Template:
    try:
        return _environment().from_string(source)
    except jinja2.TemplateError as error:
        raise ValueError(f"the model's chat template is not valid Jinja: {error}") from None


def _environment() -> jinja2.Environment:
    # The Jinja settings of transformers. Sandboxed, since templates are downloaded with weights.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        options = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
        return dumps(value, ensure_ascii=ensure_ascii, **options)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.datetime.now().strftime(form)

    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment
