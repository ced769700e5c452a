# SPDX-License-Identifier: Apache-2.0
"""The answer of POST /v1/messages, as one object or as a stream of events."""

from collections.abc import Iterator
from typing import Any

from specops.server.anthropic_messages.errors import error_body
from specops.server.anthropic_messages.request import MessagesRequest
from specops.server.api_error import ApiError
from specops.server.blocks import Block, BlockAnswer, CallBlock, Change, ReasoningBlock, TextBlock
from specops.server.json_text import with_short_integers
from specops.server.streaming import dumped, event, with_members

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


# Clients send the signature back with the thinking. It is not checked, but some drop an empty one.
_SIGNATURE = "unsigned"


class MessagesAnswer(BlockAnswer):
    """Answer in the form of an Anthropic message: thinking, text and tool_use blocks.

    Args:
        body: the request's body.
    """

    id_prefix = "msg_"

    def __init__(self, body: MessagesRequest, *args: Any) -> None:
        super().__init__(*args)
        self._body = body

    def begin(self) -> Iterator[bytes]:
        """Yield the event that starts the message, which is still empty."""
        num_tokens = sum(map(len, self.job.prompts))
        usage = {"input_tokens": num_tokens, "output_tokens": 0}
        message = {**self._message(None, None, usage), "content": []}
        yield _event("message_start", message=message)

    def change(self, index: int, change: Change) -> Iterator[bytes]:
        """Yield the events of a change of a block."""
        block = change.block
        delta: dict[str, Any]
        if change.kind == "grow":
            delta = {"type": "text_delta", "text": change.text}
            if isinstance(block, ReasoningBlock):
                delta = {"type": "thinking_delta", "thinking": change.text}
            yield _event("content_block_delta", index=index, delta=delta)
        elif change.kind == "begin":
            begun: dict[str, Any] = {"type": "text", "text": ""}
            if isinstance(block, ReasoningBlock):
                begun = {"type": "thinking", "thinking": "", "signature": ""}
            elif isinstance(block, CallBlock):
                begun = {**_tool_use(block), "input": {}}
            yield _event("content_block_start", index=index, content_block=begun)
        else:
            if not isinstance(block, TextBlock):
                delta = {"type": "signature_delta", "signature": _SIGNATURE}
                if isinstance(block, CallBlock):
                    delta = {"type": "input_json_delta", "partial_json": block.arguments}
                yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)

    def finish(self, end: str) -> Iterator[bytes]:
        """Yield the events with the reason for the message's end and its usage."""
        message = self.reply(end)
        delta = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        extras = {name: message[name] for name in ("metrics", "timings", "seed")}
        yield _event("message_delta", delta=delta, usage=message["usage"], **extras)
        yield _event("message_stop")

    def failed(self, error: ApiError) -> bytes:
        """Return the event for an error."""
        return event(error_body(error), "error")

    def complete_reply(self, end: str) -> bytes:
        """Return the complete message in JSON, with tool inputs as the model wrote them."""
        blocks = b",".join(map(_content, self.blocks))
        return with_members(dumped(self.reply(end)), {"content": b"[%b]" % blocks})

    def reply(self, end: str) -> dict[str, Any]:
        """Return the message without its content blocks, which the caller sends separately."""
        totals = self._totals()
        counts = totals.pop("usage")
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        usage = {
            # Anthropic counts cached tokens separately.
            "input_tokens": counts["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": counts["completion_tokens"],
        }
        text = self.ends[0].stop_reason
        stop = text if isinstance(text, str) and text in self._body.stop_sequences else None
        # "abort" means that no token can continue the text; "refusal" is the nearest reason.
        reason = _REASONS.get(end, "refusal") if stop is None else "stop_sequence"
        message = self._message(reason, stop, usage)
        return {**message, "seed": self.ends[0].seed, **totals}

    def _message(
        self, reason: str | None, stop: str | None, usage: dict[str, int]
    ) -> dict[str, Any]:
        frame = self.frame
        return {
            "id": frame["id"],
            "type": "message",
            "role": "assistant",
            "model": frame["model"],
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": usage,
            "system_fingerprint": frame["system_fingerprint"],
        }


def _event(name: str, /, **members: Any) -> bytes:
    return event({"type": name, **members}, name)


def _content(block: Block) -> bytes:
    """Return a block of a complete message in JSON."""
    if isinstance(block, TextBlock):
        return dumped({"type": "text", "text": block.text})
    if isinstance(block, ReasoningBlock):
        return dumped({"type": "thinking", "thinking": block.text, "signature": _SIGNATURE})
    called = with_short_integers(block.arguments).encode()
    return with_members(dumped(_tool_use(block)), {"input": called})


def _tool_use(block: CallBlock) -> dict[str, Any]:
    return {"type": "tool_use", "id": block.id, "name": block.name}
