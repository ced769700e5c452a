# SPDX-License-Identifier: Apache-2.0
"""The body of POST /v1/responses, and its conversion to a chat."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from specops.server.api_error import ApiError
from specops.server.protocol import (
    AnyMessage,
    AssistantMessage,
    ChatCompletionRequest,
    Message,
    Sampling,
    TextPart,
    ToolMessage,
)
from specops.server.strict import Strict
from specops.server.structured import JsonSchema, ResponseFormat
from specops.server.tools import (
    AllowedTools,
    CalledFunction,
    Function,
    FunctionName,
    NamedTool,
    Tool,
    ToolCall,
    ToolChoice,
    ToolsAllowed,
)
from specops.server.unsupported import RESPONSES, Table

Status = Literal["completed", "incomplete", "in_progress"]


class InputPart(Strict):
    """Text part of a message; an answer that is sent back may include annotations and logprobs."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = Field(None, fail_fast=True)
    logprobs: list[Any] | None = Field(None, fail_fast=True)


Role = Literal["user", "system", "developer"]


class InputMessage(Strict):
    """Message of the conversation."""

    type: Literal["message"]
    role: Role | Literal["assistant"]
    content: str | list[InputPart]
    id: str | None = None
    status: Status | None = None


class ReasoningPart(Strict):
    """Text of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Strict):
    """Reasoning of an earlier answer; answers have neither summaries nor encrypted content."""

    type: Literal["reasoning"]
    content: list[ReasoningPart] = Field([], fail_fast=True)
    summary: list[Any] = Field([], max_length=0)
    encrypted_content: None = None
    id: str | None = None
    status: Status | None = None


class FunctionCall(Strict):
    """Function call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str  # JSON
    id: str | None = None
    status: Status | None = None


class FunctionCallOutput(Strict):
    """Result of a function call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[InputPart]
    id: str | None = None
    status: Status | None = None


SentBack = InputMessage | ReasoningItem | FunctionCall  # items of an answer
Item = Annotated[
    InputMessage | ReasoningItem | FunctionCall | FunctionCallOutput, Field(discriminator="type")
]


class FunctionTool(Strict):
    """Function that may be called; other tools are not supported."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # the schema is always enforced


class NamedFunction(Strict):
    """Function that must be called."""

    type: Literal["function"]
    name: str


class FunctionsAllowed(Strict):
    """Subset of the functions that may be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedFunction] = Field(min_length=1, fail_fast=True)


FunctionChoice = Literal["none", "auto", "required"] | NamedFunction | FunctionsAllowed


class TextFormat(Strict):
    """Format of the text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class TextConfig(Strict):
    """Configuration of the text."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None  # no chat template reads it


class Reasoning(Strict):
    """Reasoning effort, which becomes a variable of the chat template."""

    effort: str | None = None
    # No answer has a summary: reasoning is shown as it is.
    summary: Literal["auto", "concise", "detailed", "none"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None  # the former name


class ResponseStreamOptions(Strict):
    """Options for what a stream reports besides the text."""

    include_obfuscation: Literal[False] = False  # padding of events, not supported


class ResponsesRequest(Sampling):
    """Body of POST /v1/responses."""

    neutral: ClassVar[Table] = RESPONSES
    chat_names: ClassVar[Mapping[str, str]] = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
        "logprobs": "top_logprobs",
    }

    input: str | list[Item]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    max_output_tokens: int | None = Field(None, ge=1)
    tools: list[FunctionTool] = Field([], fail_fast=True)
    tool_choice: FunctionChoice = "auto"
    parallel_tool_calls: bool = True
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] = Field(
        [], fail_fast=True
    )  # encrypted reasoning does not exist, so requesting it has no effect
    top_logprobs: int | None = None
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    chat_template_kwargs: dict[str, Any] = Field({})
    # Identification of the user and purpose, which does not affect the output.
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    max_tool_calls: int | None = None  # limit on server-side tools, which do not exist here

    @model_validator(mode="before")
    @classmethod
    def _typed(cls, values: Any) -> Any:
        """Add the type "message" to items that lack a type but have a role."""
        items = values.get("input") if isinstance(values, dict) else None
        if not isinstance(items, list):
            return values
        typed = [
            {"type": "message", **item} if isinstance(item, dict) and "role" in item else item
            for item in items
        ]
        return {**values, "input": typed}

    @property
    def items(self) -> list[Item]:
        """Items of the input; a text becomes one message of the user."""
        if isinstance(self.input, str):
            return [InputMessage(type="message", role="user", content=self.input)]
        return self.input

    @property
    def wants_logprobs(self) -> bool:
        """True if the answer must include log-probabilities of its text's tokens."""
        return "message.output_text.logprobs" in self.include or self.top_logprobs is not None

    def messages(self, earlier: Sequence[AnyMessage]) -> list[AnyMessage]:
        """Return the conversation so far, including this request's input.

        Args:
            earlier: the conversation up to the previous response.

        Raises:
            ApiError: the conversation is empty.
        """
        messages = [*earlier, *messages_of(self.items)]
        if not messages:
            raise ApiError(400, "input must hold at least one item, got none", param="input")
        return messages

    def as_chat(self, messages: Sequence[AnyMessage]) -> ChatCompletionRequest:
        """Return the chat that this request asks for.

        Raises:
            ApiError: fields of the request conflict with each other.
        """
        instructions = [] if self.instructions is None else [self.instructions]
        system_messages = [Message(role="system", content=text) for text in instructions]
        if self.stream_options is not None and not self.stream:
            message = "stream_options requires stream to be true"
            raise ApiError(400, message, param="stream_options")
        chat = ChatCompletionRequest(
            **self.sampling(),
            model=self.model,
            messages=[*system_messages, *messages],
            max_tokens=self.max_output_tokens,
            tools=[_tool(tool) for tool in self.tools],
            tool_choice=_choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=self._response_format(),
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            chat_template_kwargs=self.chat_template_kwargs,
            logprobs=self.wants_logprobs,
            top_logprobs=self.top_logprobs,
            stream=self.stream,
        )
        if chat.logprobs and chat.may_call:
            message = (
                "include must not hold logprobs when tools may be called: they apply to text only"
            )
            raise ApiError(400, message, param="include", code="invalid_value")
        return chat

    def _response_format(self) -> ResponseFormat | None:
        form = self.text.format if self.text else None
        if form is None:
            return None
        if (form.schema_ is not None) != (form.type == "json_schema"):
            message = "text.format must have a schema if its type is 'json_schema', and only then"
            raise ApiError(400, message, param="text.format", code="invalid_value")
        if form.schema_ is None:
            return ResponseFormat(type=form.type)
        schema = JsonSchema(name=form.name, schema=form.schema_)
        return ResponseFormat(type=form.type, json_schema=schema)


def _tool(tool: FunctionTool) -> Tool:
    function = Function(**tool.model_dump(exclude={"type"}))
    return Tool(type="function", function=function)


def _choice(choice: FunctionChoice) -> ToolChoice:
    def named(function: NamedFunction) -> NamedTool:
        return NamedTool(type="function", function=FunctionName(name=function.name))

    if isinstance(choice, NamedFunction):
        return named(choice)
    if isinstance(choice, FunctionsAllowed):
        allowed = AllowedTools(
            mode=choice.mode, tools=[named(function) for function in choice.tools]
        )
        return ToolsAllowed(type="allowed_tools", allowed_tools=allowed)
    return choice


def messages_of(items: Iterable[Item]) -> Iterator[AnyMessage]:
    """Yield items as chat messages; consecutive items of the assistant become one."""
    texts: list[TextPart] = []
    calls: list[ToolCall] = []
    thoughts: list[str] = []

    def assistant() -> Iterator[AnyMessage]:
        if texts or calls or thoughts:
            yield AssistantMessage(
                role="assistant",
                content=[*texts] if texts else None,
                tool_calls=[*calls],
                reasoning_content="\n\n".join(thoughts) if thoughts else None,
            )
        for part in (texts, calls, thoughts):
            part.clear()

    for item in items:
        if isinstance(item, FunctionCall):
            function = CalledFunction(name=item.name, arguments=item.arguments)
            calls.append(ToolCall(id=item.call_id, function=function))
        elif isinstance(item, ReasoningItem):
            thoughts += [part.text for part in item.content]
        elif isinstance(item, InputMessage):
            if item.role == "assistant":
                texts += _parts(item.content)
            else:
                yield from assistant()
                yield Message(role=item.role, content=_parts(item.content))
        else:
            yield from assistant()
            output = _parts(item.output)
            yield ToolMessage(role="tool", content=output, tool_call_id=item.call_id)
    yield from assistant()


def _parts(content: str | list[InputPart]) -> list[TextPart]:
    texts = [content] if isinstance(content, str) else [part.text for part in content]
    return [TextPart(type="text", text=text) for text in texts]
