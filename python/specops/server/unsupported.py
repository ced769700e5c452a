# SPDX-License-Identifier: Apache-2.0
"""Fields of other servers' APIs that this server does not implement.

A value without effect on the output is accepted, since clients send many of them by default. Any
other value is an error, or ignored, as `--unsupported-fields` says.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple
from urllib.parse import quote

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

Policy = Literal["error", "warn", "ignore"]

HEADER = "x-ignored-fields"  # header of an answer that names the ignored fields of its request
_MAX_NAMES = 20  # names in the header and in a log line
_MAX_NAME = 64  # characters of a name


class Unsupported(NamedTuple):
    """Unsupported field.

    Attributes:
        reason: why it is not supported, or why it has no effect.
        values: values that are accepted because they have no effect; None: every value.
    """

    reason: str
    values: tuple[Any, ...] | None = ()

    def accepts(self, value: Any) -> bool:
        """Return whether a value has no effect."""
        if value is None or self.values is None:
            return True
        return any(
            type(value) is type(option) and value == option for option in self.values
        )  # False equals 0


Table = Mapping[str, Unsupported]

ANY = None
_STRUCTURED = "use structured_outputs"
_SAMPLER = "the server lacks this sampler"
_NO_SAMPLER = "a setting of a sampler that is off"
_ONE_TIER = "there is one tier"
_CACHED = "every prompt is cached, and no token depends on it"

# Fields of every API.
_COMMON: dict[str, Unsupported] = {
    # OpenAI
    "moderation": Unsupported("texts are not moderated"),
    "prompt_cache_options": Unsupported("caching is implicit", ({}, {"mode": "implicit"})),
    "prompt_cache_retention": Unsupported("the cache is in memory", ("in_memory",)),
    "service_tier": Unsupported(_ONE_TIER, ("auto", "default")),
    "verbosity": Unsupported("no chat template reads it", ("low", "medium", "high")),
    # vLLM
    "priority": Unsupported("clients share the engine fairly", (0,)),
    "request_id": Unsupported("send the header x-request-id instead", ANY),
    # llama.cpp
    "cache_prompt": Unsupported(_CACHED, ANY),
    "id_slot": Unsupported("the server chooses the slot", ANY),
    "n_cache_reuse": Unsupported(_CACHED, ANY),
}

# Fields of /v1/completions and /v1/chat/completions.
OPENAI: Table = {
    **_COMMON,
    # OpenAI
    "audio": Unsupported("answers are text"),
    "function_call": Unsupported("use tools and tool_choice", ("none", "auto")),
    "functions": Unsupported("use tools", ([],)),
    "modalities": Unsupported("answers are text", (["text"],)),
    "parallel_tool_calls": Unsupported("only a chat has tools", (True, False)),
    "prediction": Unsupported("only a chat has predictions"),
    "store": Unsupported("no answer is stored, which changes no answer", (True, False)),
    "suffix": Unsupported("only a completion has a suffix"),
    "tool_choice": Unsupported("only a chat has tools", ("none", "auto")),
    "tools": Unsupported("only a chat has tools", ([],)),
    "web_search_options": Unsupported("the server does not search the web"),
    # vLLM
    "best_of": Unsupported("use n", (1,)),
    "continue_final_message": Unsupported("only a chat has messages", (False,)),
    "detokenize": Unsupported("answers are text", (True,)),
    "documents": Unsupported("write them into a message", ([],)),
    "early_stopping": Unsupported("the server lacks beam search", (False,)),
    "echo": Unsupported("only a completion repeats its prompt", (False,)),
    "guided_choice": Unsupported(f"{_STRUCTURED}.choice"),
    "guided_decoding_backend": Unsupported("there is one backend", ANY),
    "guided_grammar": Unsupported(f"{_STRUCTURED}.grammar"),
    "guided_json": Unsupported(f"{_STRUCTURED}.json"),
    "guided_regex": Unsupported(f"{_STRUCTURED}.regex"),
    "guided_whitespace_pattern": Unsupported(f"{_STRUCTURED}.whitespace_pattern"),
    "include_reasoning": Unsupported("only a chat separates reasoning", (True, False)),
    "length_penalty": Unsupported("the server lacks beam search", (1.0, 1)),
    "mm_processor_kwargs": Unsupported("only text is read", ({},)),
    "return_tokens_as_token_ids": Unsupported("use return_token_ids", (False,)),
    "skip_special_tokens": Unsupported("special tokens are not text", (True,)),
    "spaces_between_special_tokens": Unsupported("special tokens are not text", (True,)),
    "truncate_prompt_tokens": Unsupported("a prompt is never cut"),
    "use_beam_search": Unsupported("the server lacks beam search", (False,)),
    "vllm_xargs": Unsupported("there are no extension arguments", ({},)),
    # SGLang
    "ebnf": Unsupported(f"{_STRUCTURED}.grammar"),
    "json_schema": Unsupported(f"{_STRUCTURED}.json"),
    "lora_path": Unsupported("name the adapter as model"),
    "no_stop_trim": Unsupported("use include_stop_str_in_output", (False,)),
    "regex": Unsupported(f"{_STRUCTURED}.regex"),
    "return_hidden_states": Unsupported("answers are text", (False,)),
    "rid": Unsupported("send the header x-request-id instead", ANY),
    "separate_reasoning": Unsupported("the server decides", (True,)),
    "stream_reasoning": Unsupported("streams have all of the answer", (True,)),
    "top_a": Unsupported(_SAMPLER, (0,)),
    # llama.cpp
    "dry_allowed_length": Unsupported(_NO_SAMPLER, ANY),
    "dry_base": Unsupported(_NO_SAMPLER, ANY),
    "dry_multiplier": Unsupported(_SAMPLER, (0, 0.0)),
    "dry_penalty_last_n": Unsupported(_NO_SAMPLER, ANY),
    "dry_sequence_breakers": Unsupported(_NO_SAMPLER, ANY),
    "dynatemp_exponent": Unsupported(_NO_SAMPLER, ANY),
    "dynatemp_range": Unsupported("the temperature is constant", (0, 0.0)),
    "grammar": Unsupported(f"{_STRUCTURED}.grammar", ("",)),
    "lora": Unsupported("name the adapter as model", ([],)),
    "min_keep": Unsupported("use top_k", (0,)),
    "mirostat": Unsupported(_SAMPLER, (0,)),
    "mirostat_eta": Unsupported(_NO_SAMPLER, ANY),
    "mirostat_tau": Unsupported(_NO_SAMPLER, ANY),
    "n_keep": Unsupported("a text that exceeds the context is refused, not shifted", ANY),
    "n_predict": Unsupported("use max_tokens"),
    "n_probs": Unsupported("use logprobs", (0,)),
    "repeat_last_n": Unsupported("use repetition_penalty, which counts the whole text", ANY),
    "repeat_penalty": Unsupported("use repetition_penalty", (1, 1.0)),
    "return_progress": Unsupported("the progress of a prompt is not reported", (False,)),
    "samplers": Unsupported("the order of samplers is fixed"),
    "timings_per_token": Unsupported("an answer has timings at its end", ANY),
    "top_n_sigma": Unsupported(_SAMPLER, (0, 0.0, -1, -1.0)),
    "typ_p": Unsupported("use typical_p", (1, 1.0)),
    "xtc_probability": Unsupported(_SAMPLER, (0, 0.0)),
    "xtc_threshold": Unsupported(_NO_SAMPLER, ANY),
}

# Fields of /v1/responses.
RESPONSES: Table = {
    **_COMMON,
    "access_programs": Unsupported("there are no programs"),
    "background": Unsupported("a response is answered at once", (False,)),
    "background_options": Unsupported("a response is answered at once"),
    "context_management": Unsupported("no item is removed", ([],)),
    "conversation": Unsupported("use previous_response_id"),
    "image": Unsupported("answers are text"),
    "prompt": Unsupported("no prompt is stored; use input"),
    # An input that exceeds the context is an error with either value, so no text is lost silently.
    "truncation": Unsupported("no item is removed", ("disabled", "auto")),
}

# Edit of context_management that removes nothing.
_KEEP_ALL = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}

# Fields of /v1/messages.
ANTHROPIC: Table = {
    **_COMMON,
    "container": Unsupported("no tool runs in the server"),
    "context_management": Unsupported(
        "no part of the conversation is removed", ({}, {"edits": []}, _KEEP_ALL)
    ),
    "diagnostics": Unsupported("there are no diagnostics"),
    "inference_geo": Unsupported("the server has one place"),
    "mcp_servers": Unsupported("no tool runs in the server", ([],)),
    "service_tier": Unsupported(_ONE_TIER, ("auto", "standard_only")),
    "speed": Unsupported("there is one speed", ("standard",)),
}


def names_text(names: Iterable[str]) -> str:
    """Return names for a header or a log line: printable ASCII of bounded length."""
    names = list(dict.fromkeys(names))
    shown = [quote(name[:_MAX_NAME], safe="[]", errors="replace") for name in names[:_MAX_NAMES]]
    return ", ".join(shown + ["..."] * (len(names) > _MAX_NAMES))


class IgnoredFields:
    """ASGI middleware that names the ignored fields of a request in a header of its answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, and add the header when the answer begins."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)

        async def named(message: Message) -> None:
            names = scope["state"].get("ignored_fields")
            if message["type"] == "http.response.start" and names:
                MutableHeaders(scope=message)[HEADER] = names_text(names)
            await send(message)

        await self._app(scope, receive, named)
