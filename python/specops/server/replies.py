# SPDX-License-Identifier: Apache-2.0
"""Pydantic models of the server's answers, for /openapi.json and for tests of answers.

The server builds its answers as plain dicts (`answers.py`), since streams build one per step.
"""

from typing import Any, Literal

from pydantic import BaseModel, Field

from specops.server.strict import Strict
from specops.server.tools import CalledFunction

Reason = Literal["stop", "length", "abort", "tool_calls"]


class Failure(Strict):
    """Reason for a refusal or a failure."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(Strict):
    """Body of every error."""

    error: Failure


class Health(Strict):
    """Health of the engine."""

    status: Literal["ok", "failing", "stalled", "restarting", "disconnected", "failed"]
    # Failures of drafters by method since the start; absent if there are none. A failure changes
    # neither tokens nor the status.
    drafter_failures: dict[str, int] | None = None
    # Sentences about drafters whose drafts seem useless; absent if there are none.
    drafter_warnings: list[str] | None = None


class Version(Strict):
    """Version of specops."""

    version: str


class Model(Strict):
    """The served model or a LoRA adapter, and the methods that a request may choose."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    has_chat_template: bool
    # Whether that template marks whose turn it is; without marks, a model only continues the text.
    can_chat: bool
    methods: list[str]
    drafters: list[dict[str, Any]]
    speculative_config: dict[str, Any]
    # The model that a LoRA adapter changes; absent for the model itself.
    parent: str | None = None


class ModelList(Strict):
    """List of models: one entry for each name of the served model and each LoRA adapter."""

    object: Literal["list"]
    data: list[Model]


class AdapterReply(Strict):
    """Report that a LoRA adapter was loaded or unloaded."""

    message: str


class TokensReply(Strict):
    """Tokens of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class TextReply(Strict):
    """Text of tokens."""

    prompt: str


class Contract(BaseModel):
    """Execution contract: everything that output bits depend on; may have further fields."""

    specops: str
    digest: str


class PromptDetails(Strict):
    cached_tokens: int


class CompletionDetails(Strict):
    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Strict):
    """Token counts of an answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class SpeculativeMetrics(Strict):
    """Counts of speculation for an answer, in vLLM's format."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int


class RequestMetrics(Strict):
    speculative_decoding: SpeculativeMetrics


class Timings(Strict):
    """Durations of an answer's phases, by the server's clock."""

    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    verify_seconds: float | None
    draft_seconds: float | None
    tokens_per_second: float | None


class PromptLogprob(Strict):
    """Log-probability of one token at a position of a prompt, in vLLM's format."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionLogprobs(Strict):
    """Log-probabilities of a completion's tokens."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    # Lists of integers, since JSON has no type for bytes.
    bytes_: list[list[int]] = Field(alias="bytes")


class TokenLogprob(Strict):
    token: str
    logprob: float
    bytes_: list[int] = Field(alias="bytes")


class ChatToken(TokenLogprob):
    """Token of a message, and the likeliest tokens at its position."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Strict):
    content: list[ChatToken]
    refusal: None


class _Choice(Strict):
    index: int
    finish_reason: Reason
    stop_reason: int | str | list[int] | None
    seed: int
    token_ids: list[int] | None = None
    audit: dict[str, Any] | None = None


class TextChoice(_Choice):
    """One continuation of a prompt."""

    text: str
    logprobs: CompletionLogprobs | None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class Call(Strict):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Strict):
    """Message of the assistant: reasoning, text and tool calls, of which some may be absent."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[Call] | None = None


class ChatChoice(_Choice):
    """One answer to a chat."""

    message: ChatMessage
    logprobs: ChatLogprobs | None


class KvTransferReply(Strict):
    """Location of the prompt's KV pages, which wait for another server."""

    do_remote_prefill: bool
    do_remote_decode: bool
    remote_engine_id: str
    remote_request_id: str
    remote_block_ids: list[int]
    remote_host: str
    remote_port: int
    remote_ports: list[int] | None


class _Reply(Strict):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage
    metrics: RequestMetrics
    timings: Timings
    kv_transfer_params: KvTransferReply | None = None


class TextCompletion(_Reply):
    """The answer of POST /v1/completions."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class ChatCompletion(_Reply):
    """The answer of POST /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


# ---- the Responses API ----


class OutputText(Strict):
    """Text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ChatToken]


class OutputMessage(Strict):
    """Message of the model, between calls."""

    type: Literal["message"]
    id: str
    status: Literal["completed", "incomplete"]
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningText(Strict):
    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(Strict):
    """Reasoning of the model; there is no summary of it."""

    type: Literal["reasoning"]
    id: str
    status: Literal["completed", "incomplete"]
    summary: list[Any]
    content: list[ReasoningText]


class OutputCall(Strict):
    """A call of a function."""

    type: Literal["function_call"]
    id: str
    status: Literal["completed"]
    call_id: str
    name: str
    arguments: str


class InputDetails(Strict):
    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(Strict):
    reasoning_tokens: int


class ResponsesUsage(Strict):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponsesReply(Strict):
    """The answer of POST /v1/responses."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "failed"]
    background: Literal[False]
    error: dict[str, str] | None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputReasoning | OutputMessage | OutputCall]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None]
    seed: int
    store: bool
    system_fingerprint: str
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponsesUsage
    user: str | None
    metrics: RequestMetrics
    timings: Timings


class InputText(Strict):
    type: Literal["input_text"]
    text: str


class _InputItem(Strict):
    id: str
    status: Literal["completed", "incomplete", "in_progress"]


class ListedMessage(_InputItem):
    """Message in a request's input."""

    type: Literal["message"]
    role: Literal["user", "system", "developer", "assistant"]
    content: list[InputText | OutputText]


class ListedReasoning(_InputItem):
    """Reasoning in a request's input, sent back from an earlier answer."""

    type: Literal["reasoning"]
    summary: list[Any]
    content: list[ReasoningText]


class ListedCall(_InputItem):
    """Function call in a request's input, sent back from an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class ListedOutput(_InputItem):
    """Result of a function call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[InputText]


class InputItems(Strict):
    """Page of the input items of a response's request."""

    object: Literal["list"]
    data: list[ListedMessage | ListedReasoning | ListedCall | ListedOutput]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(Strict):
    """The answer of DELETE /v1/responses/{response_id}."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


# ---- Anthropic's API ----


class MessageText(Strict):
    type: Literal["text"]
    text: str


class MessageThinking(Strict):
    """Reasoning of the model; the signature is a constant."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class MessageToolUse(Strict):
    """Use of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(Strict):
    """Token counts of a message."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens: int


class MessageReply(Strict):
    """The answer of POST /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessageText | MessageThinking | MessageToolUse]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal"]
    stop_sequence: str | None
    usage: MessageUsage
    system_fingerprint: str
    seed: int
    metrics: RequestMetrics
    timings: Timings


class TokenCount(Strict):
    """The answer of POST /v1/messages/count_tokens."""

    input_tokens: int


class MessagesFailure(Strict):
    type: str
    message: str


class MessagesError(Strict):
    """Body of every error below /v1/messages."""

    type: Literal["error"]
    error: MessagesFailure
