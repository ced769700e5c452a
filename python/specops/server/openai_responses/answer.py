# SPDX-License-Identifier: Apache-2.0
"""The answer of POST /v1/responses, as one object or as a stream of events."""

from collections.abc import Callable, Iterator
from typing import Any

from specops.server.api_error import ApiError
from specops.server.blocks import Block, BlockAnswer, Change, TextBlock
from specops.server.openai_responses.request import FunctionCall, InputMessage, ResponsesRequest
from specops.server.streaming import event


class ResponsesAnswer(BlockAnswer):
    """Answer in the form of a response: one item per text and one per function call.

    Args:
        body: the request's body.
        store: called with a complete response, and with its items in the form of input items of a
            later request.
    """

    id_prefix = "resp_"

    def __init__(
        self,
        body: ResponsesRequest,
        store: Callable[[dict[str, Any], list[InputMessage | FunctionCall]], None],
        *args: Any,
    ) -> None:
        super().__init__(*args)
        self._body = body
        self._store = store
        self._num_events = 0

    def begin(self) -> Iterator[bytes]:
        """Yield the events that start the response, which is still empty."""
        response = self._response("in_progress")
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def change(self, index: int, change: Change) -> Iterator[bytes]:
        """Yield the events of a change of an item and of its only content part."""
        block, kind = change.block, change.kind
        place = {"item_id": self._item_id(index, block), "output_index": index}
        part = {**place, "content_index": 0}
        if kind == "grow":
            grown = {"delta": change.text, "logprobs": change.logprobs}
            yield self._event("response.output_text.delta", **part, **grown)
            return
        is_text = isinstance(block, TextBlock)
        is_begun = kind == "begin"
        item = self._item(index, block, is_begun=is_begun)
        members = {"output_index": index, "item": item}
        if is_begun:
            yield self._event("response.output_item.added", **members)
            if is_text:
                text = _part(TextBlock())
                yield self._event("response.content_part.added", **part, part=text)
            return
        if isinstance(block, TextBlock):
            done = {"text": block.text, "logprobs": block.logprobs}
            yield self._event("response.output_text.done", **part, **done)
            yield self._event("response.content_part.done", **part, part=_part(block))
        else:
            name = "response.function_call_arguments"
            yield self._event(f"{name}.delta", **place, delta=block.arguments)
            done = {"name": block.name, "arguments": block.arguments}
            yield self._event(f"{name}.done", **place, **done)
        yield self._event("response.output_item.done", **members)

    def finish(self, end: str) -> Iterator[bytes]:
        """Yield the event with the complete response."""
        response = self.reply(end)
        yield self._event(f"response.{response['status']}", response=response)

    def failed(self, error: ApiError) -> bytes:
        """Return the event for a response that ends with an error."""
        error_members = {"code": "server_error", "message": error.message}
        return self._event(
            "response.failed", response=self._response("failed", error=error_members)
        )

    def reply(self, end: str) -> dict[str, Any]:
        """Return the complete response, and store it unless the request has `store` false."""
        status = {"length": "incomplete", "abort": "failed"}.get(end, "completed")
        output = [self._item(index, block) for index, block in enumerate(self.blocks)]
        ending: dict[str, Any] = {}
        if end == "length":
            ending["incomplete_details"] = {"reason": "max_output_tokens"}
        if end == "abort":
            message = f"no token can continue the text: {self.ends[0].stop_reason}"
            ending["error"] = {"code": "server_error", "message": message}
        totals = self._totals()
        counts = totals.pop("usage")
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        usage = {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counts["total_tokens"],
        }
        extras = {"seed": self.ends[0].seed, **totals}
        response = self._response(status, output=output, usage=usage, **ending, **extras)
        if self._body.store:
            self._store(response, list(map(_sent_back, self.blocks)))
        return response

    def _response(self, status: str, **members: Any) -> dict[str, Any]:
        """Return a response with the members that come from the request."""
        body, frame = self._body, self.frame
        form = body.text.format if body.text else None
        text = {"type": "text"} if form is None else form.model_dump(by_alias=True)
        choice = body.tool_choice
        return {
            "id": frame["id"],
            "object": "response",
            "created_at": frame["created"],
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": frame["model"],
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None},
            "store": body.store,
            "system_fingerprint": frame["system_fingerprint"],
            "temperature": body.temperature,
            "text": {"format": text},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in body.tools],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
            **members,
        }

    def _event(self, name: str, /, **members: Any) -> bytes:
        self._num_events += 1
        return event({"type": name, "sequence_number": self._num_events - 1, **members}, name)

    def _item_id(self, index: int, block: Block) -> str:
        kind = "msg" if isinstance(block, TextBlock) else "fc"
        return f"{kind}_{self.frame['id'].removeprefix(self.id_prefix)}_{index}"

    def _item(self, index: int, block: Block, *, is_begun: bool = False) -> dict[str, Any]:
        """Return an item, without its text or arguments if it has only begun."""
        status = "in_progress" if is_begun else "completed"
        item = {"id": self._item_id(index, block), "status": status}
        if isinstance(block, TextBlock):
            content = [] if is_begun else [_part(block)]
            item["status"] = "incomplete" if block.is_cut else status
            return {**item, "type": "message", "role": "assistant", "content": content}
        arguments = "" if is_begun else block.arguments
        call = {"call_id": block.id, "name": block.name, "arguments": arguments}
        return {**item, "type": "function_call", **call}


def _part(block: TextBlock) -> dict[str, Any]:
    text = {"type": "output_text", "text": block.text, "annotations": []}
    return {**text, "logprobs": block.logprobs}


def _sent_back(block: Block) -> InputMessage | FunctionCall:
    """Return a block as an input item of the next request."""
    if isinstance(block, TextBlock):
        return InputMessage(type="message", role="assistant", content=block.text)
    return FunctionCall(
        type="function_call", call_id=block.id, name=block.name, arguments=block.arguments
    )
