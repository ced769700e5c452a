# SPDX-License-Identifier: Apache-2.0
"""The body of POST /v1/messages, and its conversion to a chat."""

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from specops.server.api_error import ApiError
from specops.server.protocol import (
    AnyMessage,
    AssistantMessage,
    Body,
    ChatCompletionRequest,
    Message,
    Sampling,
    TextPart,
    Thinking,
    ToolMessage,
)
from specops.server.strict import CacheControl, Strict
from specops.server.structured import JsonSchema, ResponseFormat
from specops.server.tools import (
    CalledFunction,
    Function,
    FunctionName,
    NamedTool,
    Tool,
    ToolCall,
    ToolChoice,
)
from specops.server.unsupported import ANTHROPIC, Table


class _Block(Strict):
    cache_control: CacheControl | None = None


class Text(_Block):
    """Text part of a message."""

    type: Literal["text"]
    text: str
    citations: None = None


class ThinkingBlock(Strict):
    """Reasoning of an earlier answer; its signature is not checked."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class ToolUse(_Block):
    """Tool call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResult(_Block):
    """Result of a tool call; the text describes a failure, and `is_error` is ignored."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[Text] = ""
    is_error: bool | None = None


Content = Annotated[Text | ThinkingBlock | ToolUse | ToolResult, Field(discriminator="type")]


class AnthropicMessage(Strict):
    """Message of the user or the assistant."""

    role: Literal["user", "assistant"]
    content: str | list[Content]


class AnthropicTool(_Block):
    """Tool that the model may call; server-side tools are not supported."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None  # the schema is always enforced
    eager_input_streaming: bool | None = None  # a call is one event once it is complete
    defer_loading: Literal[False] | None = None


class Auto(Strict):
    """`tool_choice` "auto": the model may call tools or answer with text."""

    type: Literal["auto"]
    disable_parallel_tool_use: bool = False


class AnyTool(Strict):
    """`tool_choice` "any": the model must call at least one tool."""

    type: Literal["any"]
    disable_parallel_tool_use: bool = False


class ThisTool(Strict):
    """`tool_choice` "tool": the model must call the named tool."""

    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool = False


class NoTool(Strict):
    """`tool_choice` "none": the model must not call a tool."""

    type: Literal["none"]


Choice = Annotated[Auto | AnyTool | ThisTool | NoTool, Field(discriminator="type")]


class OutputFormat(Strict):
    """JSON Schema that the text must match."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    """Format of the text, and reasoning effort of the model."""

    format: OutputFormat | None = None
    effort: str | None = None


class Metadata(Strict):
    """Identification of the user, which is ignored."""

    user_id: str | None = None


class CountTokensRequest(Body):
    """Body of POST /v1/messages/count_tokens."""

    neutral: ClassVar[Table] = ANTHROPIC
    chat_names: ClassVar[Mapping[str, str]] = {
        "stop": "stop_sequences",
        "response_format": "output_config.format",
        "reasoning_effort": "output_config.effort",
    }

    messages: list[AnthropicMessage] = Field(fail_fast=True)
    model: str | None = None
    system: str | list[Text] | None = None
    tools: list[AnthropicTool] = Field([], fail_fast=True)
    tool_choice: Choice | None = None
    output_config: OutputConfig | None = None
    thinking: Thinking | None = None
    cache_control: CacheControl | None = None
    chat_template_kwargs: dict[str, Any] = Field({})

    def as_chat(self, **fields: Any) -> ChatCompletionRequest:
        """Return the chat that this request asks for.

        Args:
            fields: further fields of the chat, which do not affect its prompt.

        Raises:
            ApiError: the request cannot be converted to a chat.
        """
        system = [] if self.system is None else [self.system]
        system_messages = [Message(role="system", content=_text(one)) for one in system]
        choice = self.tool_choice
        return ChatCompletionRequest(
            model=self.model,
            messages=[
                *system_messages,
                *itertools.chain.from_iterable(map(_messages, self.messages)),
            ],
            tools=[_tool(tool) for tool in self.tools],
            tool_choice=_choice(choice),
            parallel_tool_calls=not getattr(choice, "disable_parallel_tool_use", False),
            response_format=self._response_format(),
            reasoning_effort=self.output_config.effort if self.output_config else None,
            thinking=self.thinking,
            continue_final_message=self.messages[-1].role == "assistant",
            chat_template_kwargs=self.chat_template_kwargs,
            **fields,
        )

    def _response_format(self) -> ResponseFormat | None:
        form = self.output_config.format if self.output_config else None
        if form is None:
            return None
        return ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=form.schema_))


class MessagesRequest(CountTokensRequest, Sampling):
    """Body of POST /v1/messages."""

    max_tokens: int = Field(ge=1)
    stop_sequences: list[str] = Field([])
    stream: bool = False
    metadata: Metadata | None = None

    def chat(self) -> ChatCompletionRequest:
        """Return the chat that this request asks for.

        Raises:
            ApiError: the request cannot be converted to a chat.
        """
        fields = {
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "stream": self.stream,
        }
        return self.as_chat(**fields, **self.sampling())


def _text(content: str | list[Text]) -> str | list[TextPart]:
    if isinstance(content, str):
        return content
    return [TextPart(type="text", text=block.text) for block in content]


def _messages(message: AnthropicMessage) -> Iterator[AnyMessage]:
    """Yield a message as chat messages; a user's yields one per tool result, then one for text."""
    content = message.content
    is_user = message.role == "user"
    blocks = [Text(type="text", text=content)] if isinstance(content, str) else content
    texts: list[Text] = []
    calls: list[ToolCall] = []
    thoughts: list[str] = []
    for block in blocks:
        if isinstance(block, Text):
            texts.append(block)
        elif isinstance(block, ThinkingBlock) and not is_user:
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUse) and not is_user:
            arguments = json.dumps(block.input, ensure_ascii=False)
            function = CalledFunction(name=block.name, arguments=arguments)
            calls.append(ToolCall(id=block.id, function=function))
        elif isinstance(block, ToolResult) and is_user and not texts:
            result = _text(block.content)
            yield ToolMessage(role="tool", content=result, tool_call_id=block.tool_use_id)
        else:
            raise ApiError(
                400,
                "messages must have thinking and tool_use blocks only in assistant messages, and "
                "tool_result blocks only in user messages before any text, got "
                f"{block.type} in a message of the {message.role}{' after text' if texts else ''}",
                param="messages",
                code="invalid_value",
            )
    if is_user and texts:
        yield Message(role="user", content=_text(texts))
    elif not is_user:
        text = _text(texts) if texts else None
        reasoning = "\n\n".join(thoughts) if thoughts else None
        yield AssistantMessage(
            role="assistant", content=text, tool_calls=calls, reasoning_content=reasoning
        )


def _tool(tool: AnthropicTool) -> Tool:
    function = Function(name=tool.name, description=tool.description, parameters=tool.input_schema)
    return Tool(type="function", function=function)


def _choice(choice: Auto | AnyTool | ThisTool | NoTool | None) -> ToolChoice | None:
    if choice is None:
        return None
    if isinstance(choice, ThisTool):
        return NamedTool(type="function", function=FunctionName(name=choice.name))
    return "required" if isinstance(choice, AnyTool) else choice.type
