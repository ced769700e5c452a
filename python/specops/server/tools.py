# SPDX-License-Identifier: Apache-2.0
"""Tools of a chat: the tools that a client offers, and the grammar of calls.

The output is constrained to the model's own format of calls (`call_forms.py`), so every call can be
parsed, and its arguments match the tool's schema.
"""

import re
from typing import Any, Literal

from pydantic import Field

from specops.api.structured import StructuredOutput
from specops.server.api_error import ApiError
from specops.server.call_forms import HERMES, CallForm
from specops.server.json_text import dumps, loads
from specops.server.strict import CacheControl, Strict
from specops.server.structured import refusal

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Function(Strict):
    """Name of a tool and the schema of its arguments; no schema means no arguments."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # schemas are always enforced
    cache_control: CacheControl | None = Field(default=None, exclude=True)


class Tool(Strict):
    """Tool; only functions are supported."""

    type: Literal["function"]
    function: Function
    cache_control: CacheControl | None = Field(default=None, exclude=True)


class FunctionName(Strict):
    """Name of the function to call."""

    name: str


class NamedTool(Strict):
    """Tool that must be called."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(Strict):
    """Subset of the offered tools that may be called."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1, fail_fast=True)


class ToolsAllowed(Strict):
    """`tool_choice` "allowed_tools": the prompt lists all tools, but only some may be called."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | NamedTool | ToolsAllowed


class Arguments(dict[str, Any]):
    """Arguments of a call in a chat template; if it adds them to a text, they become JSON."""

    def __radd__(self, text: str) -> str:
        return text + dumps(self)


class CalledFunction(Strict):
    """Function that an assistant has called."""

    name: str
    arguments: str  # JSON


class ToolCall(Strict):
    """Tool call in an assistant's message."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = Field(default=None, exclude=True)  # present in streamed calls

    def for_template(self) -> dict[str, Any]:
        """Return the call as chat templates expect it: with arguments as an object.

        Raises:
            ValueError: the arguments are no JSON object.
        """
        try:
            arguments = loads(self.function.arguments or "{}")
        except ValueError as error:
            raise ValueError(
                f"messages: arguments of a tool call must be valid JSON: {error}"
            ) from None
        if not isinstance(arguments, dict):
            raise ValueError(
                "messages: arguments of a tool call must be a JSON object, "
                f"got {self.function.arguments}"
            )
        function = {"name": self.function.name, "arguments": Arguments(arguments)}
        return {"id": self.id, "type": self.type, "function": function}


def check_tools(tools: list[Tool], choice: ToolChoice | None) -> None:
    """Check that tools have valid, distinct names and that the choice is among them.

    Raises:
        ApiError: 400; the tools or the choice are invalid.
    """
    names = [tool.function.name for tool in tools]
    if len(tools) > MAX_TOOLS:
        raise _bad(f"tools must hold at most {MAX_TOOLS} tools, got {len(tools)}")
    for name in names:
        if not _NAME.fullmatch(name):
            raise _bad(
                "tools must have names of 1 to 64 letters, digits, dots, dashes and underscores, "
                f"got {name!r}"
            )
    if len(set(names)) < len(names):
        raise _bad(f"tools must have different names, got {max(names, key=names.count)!r} twice")
    if choice == "required" and not tools:
        raise _bad("tool_choice 'required' requires tools, got none", "tool_choice")
    for name in _chosen(choice) or ():
        if name not in names:
            raise _bad(f"tool_choice must name one of the tools, got {name!r}", "tool_choice")


def _chosen(choice: ToolChoice | None) -> list[str] | None:
    """Return the names of the tools that may be called; None if all may."""
    if isinstance(choice, ToolsAllowed):
        return [tool.function.name for tool in choice.allowed_tools.tools]
    return [choice.function.name] if isinstance(choice, NamedTool) else None


def _bad(message: str, param: str = "tools") -> ApiError:
    return ApiError(400, message, param=param, code="invalid_value")


def calls_format(
    tools: list[Tool], choice: ToolChoice | None, parallel: bool, form: CallForm = HERMES
) -> StructuredOutput | None:
    """Return the format of an output that may call tools; None if it may not.

    Args:
        tools: the offered tools.
        choice: whether to call tools, and which ones; None means "auto".
        parallel: whether the output may have several calls.
        form: format in which the model writes calls.

    Raises:
        ApiError: a schema is too large.
    """
    if not tools or choice == "none":
        return None
    chosen = _chosen(choice)
    offered = {
        tool.function.name: schema_of(tool.function)
        for tool in tools
        if chosen is None or tool.function.name in chosen
    }
    mode = choice.allowed_tools.mode if isinstance(choice, ToolsAllowed) else choice
    must = mode not in (None, "auto")
    several = parallel and not isinstance(choice, NamedTool)
    try:
        grammar = form.grammar(offered, must=must, several=several)
        return StructuredOutput(grammar=grammar)
    except ValueError as error:
        raise refusal(error, "tools") from None


def schema_of(function: Function) -> dict[str, Any]:
    """Return the schema of a function's arguments."""
    if function.parameters is not None:
        return function.parameters
    return {"type": "object", "properties": {}, "additionalProperties": False}
