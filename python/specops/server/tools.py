# SPDX-License-Identifier: Apache-2.0
"""Tools of a chat: what a client offers, and the grammar of calls.

The output is constrained to calls as the model writes them (`call_forms.py`), so whatever has been
called can be read, and its arguments are of the tool's schema.
"""

import json
import re
from typing import Any, Literal

from pydantic import Field

from specops.engine.structured import StructuredOutput
from specops.server.api_error import ApiError
from specops.server.call_forms import HERMES, CallForm
from specops.server.json_text import loads
from specops.server.strict import Strict
from specops.server.structured import refusal

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Function(Strict):
    """A tool's name, and the schema of its arguments; without one it takes none."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # they hold whatever it says


class Tool(Strict):
    """A tool; there are no others than functions."""

    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    """Which function is to be called."""

    name: str


class NamedTool(Strict):
    """Which tool is to be called."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(Strict):
    """Tools that may be called, of those that are offered."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1, fail_fast=True)


class ToolsAllowed(Strict):
    """The choice is among some of the tools; the model is shown all of them."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | NamedTool | ToolsAllowed


class CalledFunction(Strict):
    """A function that an assistant has called."""

    name: str
    arguments: str  # JSON


class ToolCall(Strict):
    """A call in an assistant's message."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = Field(default=None, exclude=True)  # as streams have it

    def for_template(self) -> dict[str, Any]:
        """Return the call as chat templates expect it: with arguments as an object.

        Raises:
            ValueError: the arguments are no JSON object.
        """
        try:
            arguments = loads(self.function.arguments or "{}")
        except ValueError as error:
            raise ValueError(f"messages: arguments of a tool call are no JSON: {error}") from None
        if not isinstance(arguments, dict):
            raise ValueError("messages: arguments of a tool call must be a JSON object")
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": self.type, "function": function}


def check_tools(tools: list[Tool], choice: ToolChoice | None) -> None:
    """Refuses tools that cannot be told apart, and choices that there are not.

    Raises:
        ApiError: 400.
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
        raise _bad("tools must have different names, got one twice")
    if choice == "required" and not tools:
        raise _bad("tool_choice 'required' needs tools", "tool_choice")
    for name in _chosen(choice) or ():
        if name not in names:
            raise _bad(f"tool_choice must name one of the tools, got {name!r}", "tool_choice")


def _chosen(choice: ToolChoice | None) -> list[str] | None:
    """The names of the tools that may be called; None: of all."""
    if isinstance(choice, ToolsAllowed):
        return [tool.function.name for tool in choice.allowed_tools.tools]
    return [choice.function.name] if isinstance(choice, NamedTool) else None


def _bad(message: str, param: str = "tools") -> ApiError:
    return ApiError(400, message, param=param, code="invalid_value")


def calls_wanted(
    tools: list[Tool], choice: ToolChoice | None, parallel: bool, form: CallForm = HERMES
) -> StructuredOutput | None:
    """The form of an output that may call tools; None: it may not.

    Args:
        tools: that are offered.
        choice: whether and which it may call; None is "auto".
        parallel: it may call several.
        form: how the model writes calls.

    Raises:
        ApiError: a schema is too large.
    """
    if not tools or choice == "none":
        return None
    chosen = _chosen(choice)
    offered = [tool.function for tool in tools if chosen is None or tool.function.name in chosen]
    mode = choice.allowed_tools.mode if isinstance(choice, ToolsAllowed) else choice
    must, several = mode not in (None, "auto"), parallel and not isinstance(choice, NamedTool)
    rules = ["%llguidance {}", *form.rules(must=must, several=several)]
    rules.append(f"call: {' | '.join(f'call{i}' for i in range(len(offered)))}")
    for index, function in enumerate(offered):
        name = json.dumps(f'{{"name": "{function.name}", "{form.arguments}": ')
        rules.append(f'call{index}: {name} arguments{index} "}}"')
        rules.append(f"arguments{index}: %json {json.dumps(_schema(function))}")
    try:
        return StructuredOutput(grammar="\n".join(rules))
    except ValueError as error:
        raise refusal(error, "tools") from None


def _schema(function: Function) -> dict[str, Any]:
    if function.parameters is not None:
        return function.parameters
    return {"type": "object", "properties": {}, "additionalProperties": False}
