# SPDX-License-Identifier: Apache-2.0
"""Request bodies of OpenAI's protocol: validation by pydantic, and conversion for the engine.

A field either takes effect or is refused by name, unless the server is told to ignore it
(`unsupported.py`).
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError
from pydantic.config import JsonDict

from specops.api.did_you_mean import did_you_mean
from specops.api.messages import KvTransfer
from specops.api.sampling_params import (
    MAX_BIASES,
    MAX_SEQUENCES,
    SamplingParams,
    check_cache_salt,
)
from specops.api.structured import StructuredOutput
from specops.server.api_error import ApiError, bad_value
from specops.server.call_forms import HERMES, CallForm
from specops.server.clients import scoped_salt
from specops.server.json_text import MAX_DEPTH, refuse_constant, require_shallow
from specops.server.outline import without_long_lists
from specops.server.strict import CacheControl, Strict
from specops.server.structured import ResponseFormat, StructuredOutputs, output_format
from specops.server.tools import (
    Tool,
    ToolCall,
    ToolChoice,
    calls_format,
    check_tools,
    schema_of,
)
from specops.server.unsupported import OPENAI, Table

MAX_STOPS = 16
MAX_STOP_LENGTH = 1024
MAX_STOPTOKEN_IDS = 256
MAX_PROMPTS = 256
# Maximum lengths, checked before any element is examined.
MAX_LISTS = {
    "stop": MAX_STOPS,
    "stop_sequences": MAX_STOPS,
    "stop_token_ids": MAX_STOPTOKEN_IDS,
    "stop_token_sequences": MAX_SEQUENCES,
    "bad_words": MAX_SEQUENCES,
    "bad_words_token_ids": MAX_SEQUENCES,
    "allowed_token_ids": 1 << 18,  # no vocabulary is larger
    "logit_bias": MAX_BIASES,
}
MAX_PARTS = 1000  # maximum number of parts of a message
UNLIMITED = -1  # llama.cpp's max_tokens without a limit: the answer may fill the context
_SIMILAR = 0.7  # least similarity of a field that an error suggests

# JSON's escape of half a surrogate pair; a complete pair is written as two of these.
_HALF_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")

# Pydantic's names of union branches, which are left out of the paths in error messages.
_UNION_BRANCHES = (
    "str",
    "NamedTool",
    "ToolsAllowed",
    "NamedFunction",
    "FunctionsAllowed",
    "system",
    "developer",
    "user",
    "assistant",
    "tool",
    "auto",
    "any",
    "none",
)

# JSON's names of the types that pydantic's errors require.
_TYPES = {
    "bool_type": "a boolean",
    "int_type": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "list_type": "a list",
    "none_required": "null",
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "an object"),
}


class Body(Strict):
    """Body of a request.

    Attributes:
        neutral: unsupported fields, with the values that have no effect and are accepted.
        chat_names: chat field -> this API's name for it, for fields with another name.
    """

    neutral: ClassVar[Table] = OPENAI
    chat_names: ClassVar[Mapping[str, str]] = {}


B = TypeVar("B", bound=Body)


class StreamOptions(Strict):
    """Options for what a stream reports besides the text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False  # report usage so far in every chunk
    include_steps: bool = False  # report each step's tokens and drafts per choice
    include_obfuscation: Literal[False] = False  # padding of chunks, not supported


_Port = Annotated[int, Field(ge=1, le=65535)]


class KvTransferParams(Strict):
    """Source or destination of the prompt's KV pages: vLLM's fields, as its routers send them."""

    do_remote_prefill: bool = False
    do_remote_decode: bool = False
    remote_engine_id: str | None = None
    remote_request_id: str | None = None
    remote_block_ids: list[int] | None = Field(None, fail_fast=True)
    remote_host: str | None = None
    remote_port: _Port | None = None
    remote_ports: list[_Port] | None = Field(None, fail_fast=True)
    tp_size: Literal[1] | None = None

    def as_message(self) -> KvTransfer | None:
        """Return the engine's form of the parameters; None if no transfer is requested."""
        if not (self.do_remote_prefill or self.do_remote_decode):
            return None
        return KvTransfer(**self.model_dump(exclude={"tp_size"}))


class Sampling(Body):
    """Sampling fields, which have the same names in every API that generates."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] = Field({})
    bad_words: list[str] = Field([], fail_fast=True)
    bad_words_token_ids: list[list[int]] = Field([], fail_fast=True)
    allowed_token_ids: list[int] | None = Field(None, fail_fast=True)
    min_tokens: int = 0
    seed: int | None = None
    stop_token_ids: list[int] = Field([], fail_fast=True)
    stop_token_sequences: list[list[int]] = Field([], fail_fast=True)
    ignore_eos: bool = False
    think_end_token_id: int | None = None
    reasoning_max_tokens: int | None = None
    response_max_tokens: int | None = None
    think_inject_token_ids: list[int] | None = Field(None, fail_fast=True)
    speculative_config: dict[str, Any] | None = None
    cache_salt: str | None = None  # requests share caches only if their salts are equal
    session_id: str | None = None  # the file of the conversation's KV cache (docs/sessions.md)

    def sampling(self) -> dict[str, Any]:
        """Return the sampling fields that the client has sent, by name."""
        sent = self.model_fields_set & Sampling.model_fields.keys()
        return {name: getattr(self, name) for name in sent}


class _Request(Sampling):
    """Fields that completions and chat completions have in common."""

    model: str | None = None
    max_tokens: int | None = None
    n: int = 1
    stop: str | list[str] = Field([])
    include_stop_str_in_output: bool = False  # the text then ends with the stop string
    return_token_ids: bool = False  # the answer then has the ids of prompt and output
    audit: bool = False  # each choice then has its audit record
    prompt_logprobs: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    kv_transfer_params: KvTransferParams | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    # Identification of the user and purpose, which does not affect the output.
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None  # unused: the cache finds prompts by their tokens

    def sampling_params(
        self, call_form: CallForm = HERMES, cache_scope: str = ""
    ) -> SamplingParams:
        """Return the request's parameters in the engine's form.

        Args:
            call_form: the format in which the model writes tool calls.
            cache_scope: the client's, as returned by `Clients.cache_scope`.

        Raises:
            ApiError: a parameter is out of range or conflicts with another one.
        """
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if any(len(text) > MAX_STOP_LENGTH for text in stop):
            raise ApiError(
                400,
                f"stop must hold strings of at most {MAX_STOP_LENGTH} characters, "
                f"got one of {max(map(len, stop))}",
                param="stop",
            )
        if self.stream_options is not None and not self.stream:
            message = "stream_options requires stream to be true"
            raise ApiError(400, message, param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            message = "prompt_logprobs must be absent when stream is true"
            raise ApiError(400, message, param="prompt_logprobs")
        output_format = self.output_format(call_form)
        try:
            check_cache_salt(self.cache_salt)
            return SamplingParams(
                structured_output=output_format,
                cache_salt=scoped_salt(cache_scope, self.cache_salt),
                max_tokens=self._max_tokens(),
                top_k=max(self.top_k, 0) if self.top_k >= -1 else self.top_k,  # -1 means off
                stop=stop,
                logit_bias=self._logit_bias(),
                logprobs=self._num_record_logprobs(),
                report_drafts=bool(self.stream_options and self.stream_options.include_steps),
                prompt_logprobs=self._num_prompt_logprobs(),
                prediction=self._predicted_text(),
                **{name: getattr(self, name) for name in _AS_THEY_ARE},
            )
        except ValueError as error:
            raise bad_value(error, type(self)) from None

    def output_format(self, call_form: CallForm) -> StructuredOutput | None:
        """Return the required format of the output; None for free text.

        Raises:
            ApiError: the format is invalid, or two are given.
        """
        return output_format(self.response_format, self.structured_outputs)

    @property
    def form_field(self) -> str:
        """Name of the field that constrains the output's format, if one does."""
        return "response_format" if self.structured_outputs is None else "structured_outputs"

    def _max_tokens(self) -> int | None:
        return None if self.max_tokens == UNLIMITED else self.max_tokens

    def _logit_bias(self) -> dict[int, float]:
        """Return the biases by token id: keys are strings in JSON."""
        biases = {}
        for key, bias in self.logit_bias.items():
            if not (key.isascii() and key.isdecimal()):
                raise ValueError(f"logit_bias must have token ids as keys, got {key!r}")
            biases[int(key)] = bias
        return biases

    def _num_record_logprobs(self) -> int | None:
        """Return the number of alternatives per token; an audit record always has logprobs."""
        count = self._num_logprobs()
        return 0 if count is None and self.audit else count

    def _num_logprobs(self) -> int | None:
        raise NotImplementedError

    def _num_prompt_logprobs(self) -> int | None:
        return self.prompt_logprobs

    def _predicted_text(self) -> str | tuple[int, ...]:
        return ()


# Fields that have the same name in the engine.
_AS_THEY_ARE = (
    "temperature",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "bad_words",
    "bad_words_token_ids",
    "allowed_token_ids",
    "min_tokens",
    "n",
    "seed",
    "stop_token_ids",
    "stop_token_sequences",
    "ignore_eos",
    "think_end_token_id",
    "reasoning_max_tokens",
    "response_max_tokens",
    "think_inject_token_ids",
)


TOKEN_IDS: JsonDict = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0},
    "minItems": 1,
}
_SEVERAL: JsonDict = {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS}
_PROMPT_SCHEMA: JsonDict = {
    "anyOf": [
        {"type": "string"},
        {**_SEVERAL, "items": {"type": "string"}},
        TOKEN_IDS,
        {**_SEVERAL, "items": TOKEN_IDS},
    ]
}


class CompletionRequest(_Request):
    """Body of POST /v1/completions."""

    prompt_field: ClassVar[str] = "prompt"
    prompt: Any = Field(json_schema_extra=_PROMPT_SCHEMA)
    max_tokens: int | None = 16
    echo: bool = False
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None  # text that follows the completion (infilling)

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, each a text or a list of token ids.

        Raises:
            ApiError: the prompt has none of the four shapes that OpenAI allows.
        """
        prompt = self.prompt
        if isinstance(prompt, str) or is_token_ids(prompt):
            return [prompt]
        if isinstance(prompt, list) and prompt:
            if len(prompt) > MAX_PROMPTS:
                raise ApiError(
                    400,
                    f"prompt must hold at most {MAX_PROMPTS} prompts, got {len(prompt)}",
                    param="prompt",
                )
            if all(isinstance(element, str) for element in prompt) or all(
                map(is_token_ids, prompt)
            ):
                return prompt
        raise ApiError(
            400,
            "prompt must be a string, a list of strings, a list of token ids, or a list of lists "
            "of token ids; no list may be empty",
            param="prompt",
        )

    def sampling_params(
        self, call_form: CallForm = HERMES, cache_scope: str = ""
    ) -> SamplingParams:
        """Return the parameters in the engine's form; check the fields of completions as well."""
        if self.best_of is not None and self.best_of != self.n:
            raise ApiError(
                400,
                f"best_of is not supported: it must be absent or equal n, got {self.best_of}",
                param="best_of",
                code="unsupported_parameter",
            )
        if self.suffix is not None and self.echoes_logprobs:
            message = "suffix must be absent when echo and logprobs are set"
            raise ApiError(400, message, param="suffix", code="invalid_value")
        return super().sampling_params(call_form, cache_scope)

    @property
    def echoes_logprobs(self) -> bool:
        """True if the answer repeats the prompt with its log-probabilities."""
        return self.echo and self.logprobs is not None

    def _num_logprobs(self) -> int | None:
        return self.logprobs

    def _num_prompt_logprobs(self) -> int | None:
        if not self.echoes_logprobs:
            return self.prompt_logprobs
        return max(self.logprobs or 0, self.prompt_logprobs or 0)


class TextPart(Strict):
    """Part of a message; only text is supported."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = Field(default=None, exclude=True)


class Message(Strict):
    """One message of a chat."""

    role: Literal["system", "developer", "user"]
    content: str | list[TextPart]
    name: str | None = None
    cache_control: CacheControl | None = Field(default=None, exclude=True)

    def for_template(self) -> dict[str, Any]:
        """Return the message in the form that chat templates expect."""
        # "developer" is OpenAI's newer name; templates expect "system".
        role = "system" if self.role == "developer" else self.role
        named = {} if self.name is None else {"name": self.name}
        return {"role": role, "content": _joined(self.content), **named}


class AssistantMessage(Strict):
    """Message of the assistant: reasoning, text and tool calls, of which some may be absent."""

    role: Literal["assistant"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    cache_control: CacheControl | None = Field(default=None, exclude=True)
    tool_calls: list[ToolCall] = Field([], fail_fast=True)
    reasoning_content: str | None = None
    reasoning: str | None = None  # another name of reasoning_content

    def for_template(self) -> dict[str, Any]:
        """Return the message in the form that chat templates expect.

        Raises:
            ValueError: it has neither content nor calls nor reasoning, its reasoning differs under
                its two names, or a call's arguments are no JSON object.
        """
        reasonings = {self.reasoning_content, self.reasoning} - {None}
        if len(reasonings) > 1:
            raise ValueError("messages: reasoning must be absent or equal to reasoning_content")
        if self.content is None and not self.tool_calls and not reasonings:
            raise ValueError(
                "messages: an assistant message must have content, tool_calls or "
                "reasoning_content, got none"
            )
        message: dict[str, Any] = {"role": self.role, "content": _joined(self.content or "")}
        if reasonings:
            (message["reasoning_content"],) = reasonings
        if self.name is not None:
            message["name"] = self.name
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return message


class ToolMessage(Strict):
    """Result of a tool call."""

    role: Literal["tool"]
    content: str | list[TextPart]
    tool_call_id: str
    name: str | None = None
    cache_control: CacheControl | None = Field(default=None, exclude=True)

    def for_template(self) -> dict[str, Any]:
        """Return the message in the form that chat templates expect."""
        named = {} if self.name is None else {"name": self.name}
        answer = {"role": self.role, "content": _joined(self.content)}
        return {**answer, "tool_call_id": self.tool_call_id, **named}


def _joined(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


AnyMessage = Annotated[Message | AssistantMessage | ToolMessage, Field(discriminator="role")]


class Prediction(Strict):
    """OpenAI's predicted output: text that the answer is expected to repeat in part."""

    type: Literal["content"]
    content: str | list[TextPart]


class ChatPrompt(Body):
    """Fields that say how a chat's prompt ends, and what its template reads."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False  # the answer continues the last message
    chat_template_kwargs: dict[str, Any] = Field({})

    @property
    def begins_answer(self) -> bool:
        """True if the prompt ends with the prefix of the assistant's next message.

        Raises:
            ValueError: the request also continues the last message.
        """
        if not self.continue_final_message:
            return self.add_generation_prompt
        if "add_generation_prompt" in self.model_fields_set and self.add_generation_prompt:
            raise ValueError("add_generation_prompt must be false if continue_final_message is set")
        return False


class Thinking(Strict):
    """Anthropic's switch of the thinking mode, which clients also send in chats."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1, le=2**31 - 1)


class ChatCompletionRequest(_Request, ChatPrompt):
    """Body of POST /v1/chat/completions."""

    prompt_field: ClassVar[str] = "messages"
    messages: list[AnyMessage] = Field(fail_fast=True)
    tools: list[Tool] = Field([], fail_fast=True)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    include_reasoning: bool = True  # false: the answer is without its reasoning_content
    # Variables of the chat template.
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    thinking: Thinking | None = None
    prediction: Prediction | None = None

    @property
    def uses_tools(self) -> bool:
        """True if tools are offered or have been called."""
        return bool(self.tools) or any(
            isinstance(message, ToolMessage)
            or (isinstance(message, AssistantMessage) and bool(message.tool_calls))
            for message in self.messages
        )

    @property
    def may_call(self) -> bool:
        """True if the answer may call tools."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def schemas(self) -> dict[str, dict[str, Any]] | None:
        """Schemas of the functions' arguments by name; None if the answer may not call tools."""
        functions = [tool.function for tool in self.tools]
        return {one.name: schema_of(one) for one in functions} if self.may_call else None

    def output_format(self, call_form: CallForm) -> StructuredOutput | None:
        """Return the required format of the output, including the format of tool calls."""
        check_tools(self.tools, self.tool_choice)
        form = super().output_format(call_form)
        calls = calls_format(self.tools, self.tool_choice, self.parallel_tool_calls, call_form)
        if form is not None and calls is not None:
            message = f"{self.form_field} must be absent where tools may be called"
            raise ApiError(400, message, param=self.form_field, code="invalid_value")
        return calls or form

    @property
    def form_field(self) -> str:
        """Name of the field that constrains the output's format: "tools" if only tools do."""
        is_form = self.structured_outputs is not None or self.response_format is not None
        return super().form_field if is_form or not self.tools else "tools"

    @property
    def thinks(self) -> bool | None:
        """True if the model must think, False if it must not; None: the chat template decides."""
        if self.enable_thinking is not None or self.thinking is None:
            return self.enable_thinking
        return {"enabled": True, "disabled": False}.get(self.thinking.type)

    def template_variables(self) -> dict[str, Any]:
        """Return the chat template's variables other than the messages and tools.

        Raises:
            ValueError: two fields contradict each other.
        """
        variables: dict[str, Any] = {}
        if self.thinks is not None:  # templates use either name
            variables |= {"enable_thinking": self.thinks, "thinking": self.thinks}
        mode = None if self.thinking is None else self.thinking.type
        if mode == ("disabled" if self.thinks else "enabled"):
            raise ValueError(
                f"enable_thinking must agree with thinking, got {self.thinks} and {mode}"
            )
        if self.reasoning_effort:
            variables["reasoning_effort"] = self.reasoning_effort
        return {**variables, **self.chat_template_kwargs}

    def unread(self, read: Collection[str]) -> list[str]:
        """Return the fields that change no prompt, since the template does not read them.

        Args:
            read: variables that the chat template reads.
        """
        names = [f"chat_template_kwargs.{name}" for name in self.chat_template_kwargs.keys() - read]
        if self.reasoning_effort and "reasoning_effort" not in read:
            names.append("reasoning_effort")
        if self.thinks and not {"enable_thinking", "thinking"} & set(read):
            names.append("enable_thinking" if self.thinking is None else "thinking")
        return sorted(names)

    def _max_tokens(self) -> int | None:
        for name in ("max_tokens", "max_completion_tokens"):
            if getattr(self, name) == 0:
                raise ValueError(f"{name} must be at least 1, got 0")
        if self.max_completion_tokens is None:
            return super()._max_tokens()
        if self.max_tokens not in (None, self.max_completion_tokens):
            raise ValueError(
                "max_tokens must be absent or equal to max_completion_tokens, got both"
            )
        return None if self.max_completion_tokens == UNLIMITED else self.max_completion_tokens

    def _num_logprobs(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs requires logprobs to be true")
        return (self.top_logprobs or 0) if self.logprobs else None

    def _predicted_text(self) -> str | tuple[int, ...]:
        if self.prediction is None:
            return ()
        content = self.prediction.content
        return content if isinstance(content, str) else "".join(part.text for part in content)


def parse(model: type[B], body: bytes, max_ids: int, ignored: list[str] | None = None) -> B:
    """Parse and validate a body.

    Args:
        model: class of the body.
        body: bytes as received.
        max_ids: limit on a prompt's token ids. A longer prompt is refused later, so only the
            number of its ids is read.
        ignored: list to which the names of unsupported fields are added; None: such a field is an
            error.

    Raises:
        ApiError: 400; the body is not valid JSON, does not match the model, or uses an unsupported
            feature.
    """
    try:
        text = body.decode("utf-8-sig")
        body, long_lists = without_long_lists(body, MAX_LISTS, max_ids)
        if long_lists:
            text = body.decode("utf-8-sig")
        values = json.loads(text, parse_constant=refuse_constant, object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        message = f"the body must be UTF-8, got byte 0x{body[error.start]:02x} at {error.start}"
        raise ApiError(400, message, code="invalid_json") from None
    except RecursionError:
        message = f"the body is nested more than {MAX_DEPTH} levels deep"
        raise ApiError(400, message, code="invalid_json") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(values, dict):
        raise ApiError(400, f"the body must be a JSON object, got {_json_type(values)}")
    if body.count(b"{") + body.count(b"[") > MAX_DEPTH:
        try:
            require_shallow(values, MAX_DEPTH)
        except ValueError as error:
            raise ApiError(400, f"the body is {error}", code="invalid_json") from None
    values |= long_lists
    for name in list(values):
        if name not in model.model_fields:
            value = values.pop(name)
            field = model.neutral.get(name)
            if field is not None and field.accepts(value):
                continue
            if ignored is not None:
                ignored.append(name)
            elif field is None:
                raise _unknown_field(name, model.model_fields)
            else:
                message = f"{name} is not supported: {field.reason}"
                raise ApiError(400, message, param=name, code="unsupported_parameter")
        elif values[name] is None:
            del values[name]  # null means absent
    for name, limit in MAX_LISTS.items():
        elements = values.get(name)
        if isinstance(elements, (list, dict)) and len(elements) > limit:
            raise ApiError(400, f"{name} must hold at most {limit} elements", param=name)
    if values.get("messages") == []:
        raise ApiError(400, "messages must hold at least one message, got none", param="messages")
    for name in ("messages", "input"):
        if isinstance(values.get(name), list):
            values[name] = [_without_empty_fields(message, name) for message in values[name]]
    try:
        checked = _validated(model, values, ignored)
    except ValidationError as error:
        raise _from_validation(error) from None
    if _HALF_PAIR.search(body):  # rare, so that few bodies need the slow check
        for name, value in values.items():
            _check_unicode(name, value)
    return checked


def _validated(model: type[B], values: dict[str, Any], ignored: list[str] | None) -> B:
    """Return the body with these values; ignore unknown inner fields if `ignored` is a list."""
    try:
        return model.model_validate(values)
    except ValidationError:
        if ignored is None:
            raise
    body = model.model_validate(values, extra="ignore")
    ignored += _unknown_names(body, values)
    return body


def _unknown_names(value: Any, raw: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of the fields in JSON that the validated value lacks."""
    if isinstance(value, list) and isinstance(raw, list):
        for index, (inner, raw_inner) in enumerate(zip(value, raw, strict=True)):
            yield from _unknown_names(inner, raw_inner, f"{path}{index}.")
    elif isinstance(value, BaseModel) and isinstance(raw, dict):
        fields = {field.alias or name: name for name, field in type(value).model_fields.items()}
        for name, raw_inner in raw.items():
            if name in fields:
                inner = getattr(value, fields[name])
                yield from _unknown_names(inner, raw_inner, f"{path}{name}.")
            else:
                yield path + name


def _check_unicode(name: str, value: Any) -> None:
    """Refuse halves of surrogate pairs, also inside nested JSON such as a schema."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        message = f"{name} must be valid Unicode, got an unpaired surrogate"
        raise ApiError(400, message, param=name, code="invalid_value") from None


def _from_validation(error: ValidationError) -> ApiError:
    """Convert a pydantic error; of a union's errors, use the branch that matched furthest."""
    if error.error_count() > 100:  # formatting each one would take long
        return ApiError(400, f"the body has {error.error_count()} invalid fields")
    errors = error.errors()
    first = max(errors, key=lambda entry: len(entry["loc"]))
    kind = first["type"]
    param = _path(first["loc"])
    if kind == "extra_forbidden":
        return _unknown_field(param)
    if kind in ("union_tag_invalid", "union_tag_not_found"):  # a message with an unknown role
        context = first["ctx"]
        param = f"{param}.{context['discriminator'].strip(chr(39))}"
        if "tag" not in context:
            return ApiError(400, f"{param} is missing", param=param, code="missing_parameter")
        message = f"{param} must be one of {context['expected_tags']}, got {context['tag']!r}"
        return ApiError(400, message, param=param, code="invalid_value")
    if kind == "missing":
        return ApiError(400, f"{param} is missing", param=param, code="missing_parameter")
    if kind == "literal_error":
        expected = first["msg"].removeprefix("Input should be ")
        message = f"{param} must be {expected}, got {first['input']!r}"
        return ApiError(400, message, param=param, code="invalid_value")
    if kind == "string_unicode":
        return ApiError(400, f"{param or 'the body'} must be valid Unicode", param=param or None)
    if kind == "greater_than_equal":
        message = f"{param} must be at least {first['ctx']['ge']}, got {first['input']}"
        return ApiError(400, message, param=param, code="invalid_value")
    if kind == "less_than_equal":
        message = f"{param} must be at most {first['ctx']['le']}, got {first['input']}"
        return ApiError(400, message, param=param, code="invalid_value")
    expected_types = (_TYPES.get(entry["type"]) for entry in errors if _path(entry["loc"]) == param)
    expected = " or ".join(filter(None, dict.fromkeys(expected_types)))
    expected = expected or first["msg"].removeprefix("Input should be ")
    got = _json_type(first["input"])
    return ApiError(400, f"{param} must be {expected}, got {got}", param=param, code="invalid_type")


def _path(place: tuple[int | str, ...]) -> str:
    """Return the path of an erroneous field in a body, without names of union branches."""
    names: list[str] = []
    kind = ""  # union type of the elements of the list last entered
    for index, part in enumerate(place):
        if isinstance(part, str) and "[" in part:
            kind = part
        elif index and isinstance(place[index - 1], int) and "tagged-union" in kind:
            kind = ""
        elif not index or part not in _UNION_BRANCHES:  # the first part is a field
            names.append(str(part))
    return ".".join(names)


def _unknown_field(name: str, known: Collection[str] = ()) -> ApiError:
    message = f"unknown field {name}{did_you_mean(name, known, _SIMILAR)}"
    return ApiError(400, message, param=name, code="unknown_parameter")


def _object(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object of a body; refuse a name that occurs twice."""
    values = dict(items)
    if len(values) < len(items):
        for name, _ in items:
            if name not in values:  # an earlier round deleted it
                raise ApiError(
                    400, f"{name} occurs more than once", param=name, code="invalid_json"
                )
            del values[name]
    return values


def _without_empty_fields(message: Any, field: str) -> Any:
    """Return a message without empty fields such as `tool_calls`, which client libraries echo."""
    if not isinstance(message, dict):
        return message
    content = message.get("content")
    if isinstance(content, list) and len(content) > MAX_PARTS:
        raise ApiError(
            400, f"a message must have at most {MAX_PARTS} parts, got {len(content)}", param=field
        )
    return {
        name: value
        for name, value in message.items()
        if name in ("role", "content") or value not in (None, [])
    }


def is_token_ids(value: Any) -> bool:
    """Return whether a value of a body is a list of token ids."""
    # Booleans and empty lists are refused, by the callers or by the engine.
    return (
        isinstance(value, list) and bool(value) and all(type(token_id) is int for token_id in value)
    )


def _json_type(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    names |= {int: "an integer", float: "a number", type(None): "null"}
    return names.get(type(value), type(value).__name__)
