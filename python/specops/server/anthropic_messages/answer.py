# SPDX-License-Identifier: Apache-2.0
"""The answer of POST /v1/messages, as one object or as a stream of events."""

import json
from collections.abc import Iterator
from typing import Any

from specops.server.anthropic_messages.errors import error_body
from specops.server.anthropic_messages.request import MessagesRequest
from specops.server.api_error import ApiError
from specops.server.blocks import Block, BlockAnswer, Change, TextBlock
from specops.server.streaming import event

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesAnswer(BlockAnswer):
    """A message: its blocks are texts and uses of tools.

    Args:
        body: as the client has sent it.
    """

    id_prefix = "msg_"

    def __init__(self, body: MessagesRequest, *args: Any) -> None:
        super().__init__(*args)
        self._body = body

    def begin(self) -> Iterator[bytes]:
        """The message before there is anything in it."""
        num_tokens = sum(map(len, self.job.prompts))
        usage = {"input_tokens": num_tokens, "output_tokens": 0}
        yield _event("message_start", message=self._message([], None, None, usage))

    def change(self, index: int, change: Change) -> Iterator[bytes]:
        """The events of a block."""
        block = change.block
        if change.kind == "grow":
            delta = {"type": "text_delta", "text": change.text}
            yield _event("content_block_delta", index=index, delta=delta)
        elif change.kind == "begin":
            begun = _content(TextBlock()) if isinstance(block, TextBlock) else _content(block, {})
            yield _event("content_block_start", index=index, content_block=begun)
        else:
            if not isinstance(block, TextBlock):
                delta = {"type": "input_json_delta", "partial_json": block.arguments}
                yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)

    def finish(self, end: str) -> Iterator[bytes]:
        """Why the message ends, and what it has cost."""
        message = self.reply(end)
        delta = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        own = {name: message[name] for name in ("metrics", "timings", "seed")}
        yield _event("message_delta", delta=delta, usage=message["usage"], **own)
        yield _event("message_stop")

    def failed(self, error: ApiError) -> bytes:
        """The event of an error."""
        return event(error_body(error), "error")

    def reply(self, end: str) -> dict[str, Any]:
        """The whole message."""
        totals = self._totals()
        counts = totals.pop("usage")
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        usage = {
            # Anthropic counts what was found in the cache apart.
            "input_tokens": counts["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": counts["completion_tokens"],
        }
        text = self._ends[0].stop_reason
        stop = text if isinstance(text, str) and text in self._body.stop_sequences else None
        # "abort" is a text that cannot go on: the nearest word is that for one that must not.
        reason = _REASONS.get(end, "refusal") if stop is None else "stop_sequence"
        blocks = [_content(block) for block in self.blocks]
        message = self._message(blocks, reason, stop, usage)
        return {**message, "seed": self._ends[0].seed, **totals}

    def _message(
        self,
        blocks: list[dict[str, Any]],
        reason: str | None,
        stop: str | None,
        usage: dict[str, int],
    ) -> dict[str, Any]:
        frame = self._frame
        return {
            "id": frame["id"],
            "type": "message",
            "role": "assistant",
            "model": frame["model"],
            "content": blocks,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": usage,
            "system_fingerprint": frame["system_fingerprint"],
        }


def _event(name: str, /, **members: Any) -> bytes:
    return event({"type": name, **members}, name)


def _content(block: Block, given: dict[str, Any] | None = None) -> dict[str, Any]:
    """A block as a message has it; of a call with `given` as input, if there is any."""
    if isinstance(block, TextBlock):
        return {"type": "text", "text": block.text}
    called = json.loads(block.arguments) if given is None else given
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": called}
