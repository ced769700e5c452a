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
from specops.server.call_forms import CALL_FORMS, CallForm, form_of_template
from specops.server.json_text import dumps


class ChatFormat:
    """Chat template of a model.

    Args:
        template: Jinja source as in `transformers`; None if the model has no template.
        special_tokens: texts of special tokens by the names that templates use, such as
            "eos_token".
        call_form: syntax in which the model writes tool calls; by default detected from the
            template.

    Attributes:
        call_form: syntax of tool calls; None if the template has no known one.

    Raises:
        ValueError: the template is invalid.
    """

    def __init__(
        self,
        template: str | None,
        special_tokens: Mapping[str, str] | None = None,
        *,
        call_form: CallForm | None = None,
    ) -> None:
        self._template = None if template is None else _compile(template)
        self.call_form = call_form or form_of_template(template or "")
        self._variables = set() if template is None else _variables(template)
        self._special_tokens = dict(special_tokens or {})

    @classmethod
    def from_dir(
        cls,
        path: str | Path,
        special_tokens: Mapping[str, str],
        *,
        call_form: CallForm | None = None,
    ) -> "ChatFormat":
        """Load a model directory's chat_template.jinja, or else tokenizer_config.json's template.

        Raises:
            ValueError: a file or the template is invalid.
        """
        path = Path(path)
        if (path / "chat_template.jinja").is_file():
            text = (path / "chat_template.jinja").read_text(encoding="utf-8")
            return cls(text, special_tokens, call_form=call_form)
        template = read_json_object(path / "tokenizer_config.json").get("chat_template")
        if isinstance(template, list):  # several named templates
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        return cls(template, special_tokens, call_form=call_form)

    @property
    def has_template(self) -> bool:
        """True if the model has a template, which rendering a chat requires."""
        return self._template is not None

    def require_tools(self) -> None:
        """Check that the template supports tools.

        Raises:
            ValueError: it does not, or has tool calls in an unknown syntax.
        """
        if "tools" not in self._variables:
            raise ValueError(
                "tools are not supported: the model's chat template does not list them; choose "
                "another with --chat-template"
            )
        if self.call_form is None:
            raise ValueError(
                "tools are not supported: the syntax of tool calls in the model's chat template is "
                f"unknown; set --tool-call-parser to one of {', '.join(CALL_FORMS)}"
            )

    @property
    def variables(self) -> frozenset[str]:
        """Names of the variables that the template reads."""
        return frozenset(self._variables)

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
        if self._template is None:
            raise ValueError("the model has no chat template; send a prompt to /v1/completions")
        if continue_final_message:
            messages = _marked(messages)
        reserved = {
            "messages": messages,
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
            text = self._template.render(**reserved, **(variables or {}))
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

    def to_json(value: Any, indent: int | None = None, **options: Any) -> str:
        return dumps(value, indent=indent, **options)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.datetime.now().strftime(form)

    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment
