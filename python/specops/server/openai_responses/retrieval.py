# SPDX-License-Identifier: Apache-2.0
"""Retrieval of stored responses: query parameters, and the list of input items."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from starlette.datastructures import QueryParams

from specops.server.api_error import ApiError
from specops.server.openai_responses.request import (
    FunctionCall,
    FunctionCallOutput,
    InputMessage,
    InputPart,
    Item,
    ReasoningItem,
)

_MAX_ITEMS = 100
_NOT_SUPPORTED = "not supported: a stored response is returned complete, as its request included it"
_NEUTRAL = {"type": "string", "enum": ["false"], "description": f"true is {_NOT_SUPPORTED}"}

# Schemas of the query parameters for OpenAPI; other parameters are ignored or refused.
OF_A_RESPONSE: Mapping[str, dict[str, Any]] = {
    "stream": _NEUTRAL,
    "include_obfuscation": _NEUTRAL,
}
OF_ITEMS: Mapping[str, dict[str, Any]] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": _MAX_ITEMS, "default": 20},
    "order": {"type": "string", "enum": ["asc", "desc"], "default": "desc"},
    "after": {"type": "string", "description": "the id of the item before the first one"},
}
# Prefixes of the ids of items.
_KINDS = {
    InputMessage: "msg",
    ReasoningItem: "rs",
    FunctionCall: "fc",
    FunctionCallOutput: "fco",
}
_REFUSED = ("include", "include[]", "starting_after")


def read_query(query: QueryParams, schemas: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the values of the query parameters, with defaults for absent ones.

    Raises:
        ApiError: a value is out of range, or asks for an unsupported feature.
    """
    for name in _REFUSED:
        if name in query:
            raise _wrong(name.removesuffix("[]"), f"is {_NOT_SUPPORTED}", "unsupported_parameter")
    values = {}
    for name, schema in schemas.items():
        texts = query.getlist(name)
        if len(texts) > 1:
            raise _wrong(name, f"must occur once, got it {len(texts)} times")
        values[name] = _value(name, schema, texts[0]) if texts else schema.get("default")
    return values


def _value(name: str, schema: Mapping[str, Any], text: str) -> Any:
    if "enum" in schema and text not in schema["enum"]:
        expected = " or ".join(schema["enum"])
        raise _wrong(name, f"must be {expected}, got {text!r}")
    if schema["type"] != "integer":
        return text
    low, high = schema["minimum"], schema["maximum"]
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and low <= int(text) <= high):
        raise _wrong(name, f"must be an integer from {low} to {high}, got {text!r}")
    return int(text)


def _wrong(name: str, problem: str, code: str = "invalid_value") -> ApiError:
    return ApiError(400, f"{name} {problem}", param=name, code=code)


def listed(items: Iterable[Item], response_id: str) -> Iterator[dict[str, Any]]:
    """Yield input items in the format of the API's answers, each with an id and a status."""
    number = response_id.partition("_")[2]
    for index, item in enumerate(items):
        kind = _KINDS[type(item)]
        members = {"id": item.id or f"{kind}_{number}_in{index}", "type": item.type}
        members["status"] = item.status or "completed"
        if isinstance(item, InputMessage):
            content = [*_parts(item)]
            yield {**members, "role": item.role, "content": content}
        elif isinstance(item, ReasoningItem):
            content = [part.model_dump() for part in item.content]
            yield {**members, "summary": [], "content": content}
        elif isinstance(item, FunctionCall):
            called = {"name": item.name, "arguments": item.arguments}
            yield {**members, "call_id": item.call_id, **called}
        else:
            output = item.output
            texts = output if isinstance(output, str) else [_text(part) for part in output]
            yield {**members, "call_id": item.call_id, "output": texts}


def _parts(item: InputMessage) -> Iterator[dict[str, Any]]:
    """Yield a message's text parts; those of the assistant include annotations and logprobs."""
    parts = item.content
    if isinstance(parts, str):
        parts = [InputPart.model_validate({"type": "input_text", "text": parts})]
    for part in parts:
        if item.role == "assistant":
            members = {"annotations": part.annotations or [], "logprobs": part.logprobs or []}
            yield {"type": "output_text", "text": part.text, **members}
        else:
            yield _text(part)


def _text(part: InputPart) -> dict[str, Any]:
    return {"type": "input_text", "text": part.text}


def page_of(items: bytes, query: Mapping[str, Any]) -> dict[str, Any]:
    """Return one page of a list of items.

    Raises:
        ApiError: no item has the id in the query parameter "after".
    """
    all_items = json.loads(items)
    if query["order"] == "desc":
        all_items.reverse()
    begin = 0
    if query["after"] is not None:
        ids = [item["id"] for item in all_items]
        if query["after"] not in ids:
            got = f"got {query['after']!r}"
            raise _wrong("after", f"must be the id of an item of the response's input, {got}")
        begin = ids.index(query["after"]) + 1
    data = all_items[begin : begin + query["limit"]]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
    has_more = begin + len(data) < len(all_items)
    none = {"first_id": None, "last_id": None}
    return {"object": "list", "data": data, **none, **ends, "has_more": has_more}
