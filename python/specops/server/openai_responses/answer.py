# SPDX-License-Identifier: Apache-2.0
"""The answer of POST /v1/responses, as one object or as a stream of events."""

from collections.abc import Callable, Iterator
from typing import Any

from specops.server.api_error import ApiError
from specops.server.blocks import (
    Block,
    BlockAnswer,
    CallBlock,
    Change,
    GrowingBlock,
    ReasoningBlock,
    TextBlock,
)
from specops.server.openai_responses.request import (
    FunctionCall,
    InputMessage,
    ReasoningItem,
    ReasoningPart,
    ResponsesRequest,
    SentBack,
)
from specops.server.streaming import event


class ResponsesAnswer(BlockAnswer):
    """Answer in the form of a response: an item for each reasoning, text and function call.

    Args:
        body: the request's body.
        store: called with a complete response, and with its items in the form of input items of a
            later request.
    """

    id_prefix = "resp_"

    def __init__(
        self,
        body: ResponsesRequest,
        store: Callable[[dict[str, Any], list[SentBack]], None],
        *args: Any,
    ) -> None:
        super().__init__(*args)
        if self.request.logprobs and self._reader(0) is not None:
            message = (
                "include must not hold logprobs if the model reasons: they apply to text only; "
                "use /v1/chat/completions"
            )
            raise ApiError(400, message, param="include", code="invalid_value")
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
        name = f"response.{'output' if isinstance(block, TextBlock) else 'reasoning'}_text"
        if kind == "grow":
            grown: dict[str, Any] = {"delta": change.text}
            if isinstance(block, TextBlock):
                grown["logprobs"] = change.logprobs
            yield self._event(f"{name}.delta", **part, **grown)
            return
        is_begun = kind == "begin"
        item = self._item(index, block, is_begun=is_begun)
        members = {"output_index": index, "item": item}
        if is_begun:
            yield self._event("response.output_item.added", **members)
            if not isinstance(block, CallBlock):
                empty = _part(type(block)())
                yield self._event("response.content_part.added", **part, part=empty)
            return
        if isinstance(block, CallBlock):
            name = "response.function_call_arguments"
            yield self._event(f"{name}.delta", **place, delta=block.arguments)
            done: dict[str, Any] = {"name": block.name, "arguments": block.arguments}
            yield self._event(f"{name}.done", **place, **done)
        else:
            done = {"text": block.text}
            if isinstance(block, TextBlock):
                done["logprobs"] = block.logprobs
            yield self._event(f"{name}.done", **part, **done)
            yield self._event("response.content_part.done", **part, part=_part(block))
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
        reasoning = counts["completion_tokens_details"]["reasoning_tokens"]
        usage = {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": reasoning},
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
        kind = {TextBlock: "msg", ReasoningBlock: "rs", CallBlock: "fc"}[type(block)]
        return f"{kind}_{self.frame['id'].removeprefix(self.id_prefix)}_{index}"

    def _item(self, index: int, block: Block, *, is_begun: bool = False) -> dict[str, Any]:
        """Return an item, without its text or arguments if it has only begun."""
        status = "in_progress" if is_begun else "completed"
        item = {"id": self._item_id(index, block), "status": status}
        if not isinstance(block, CallBlock):
            content = [] if is_begun else [_part(block)]
            item["status"] = "incomplete" if block.is_cut else status
            if isinstance(block, ReasoningBlock):
                return {**item, "type": "reasoning", "summary": [], "content": content}
            return {**item, "type": "message", "role": "assistant", "content": content}
        arguments = "" if is_begun else block.arguments
        call = {"call_id": block.id, "name": block.name, "arguments": arguments}
        return {**item, "type": "function_call", **call}


def _part(block: GrowingBlock) -> dict[str, Any]:
    if isinstance(block, ReasoningBlock):
        return {"type": "reasoning_text", "text": block.text}
    text = {"type": "output_text", "text": block.text, "annotations": []}
    return {**text, "logprobs": block.logprobs}


def _sent_back(block: Block) -> SentBack:
    """Return a block as an input item of the next request."""
    if isinstance(block, TextBlock):
        return InputMessage(type="message", role="assistant", content=block.text)
    if isinstance(block, ReasoningBlock):
        part = ReasoningPart(type="reasoning_text", text=block.text)
        return ReasoningItem(type="reasoning", content=[part], summary=[])
    return FunctionCall(
        type="function_call", call_id=block.id, name=block.name, arguments=block.arguments
    )
