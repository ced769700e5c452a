# SPDX-License-Identifier: Apache-2.0
"""/openapi.json: OpenAPI description of the API, generated from the models that validate bodies.

Routes read their bodies themselves, with limits, so FastAPI does not know the bodies. This module
completes FastAPI's description of each route.
"""

import copy
import functools
import inspect
import re
import warnings
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

import specops
from specops.api.sampling_params import (
    MAX_BIAS,
    POSITIVE,
    REAL_RANGES,
    WHOLE_RANGES,
    SamplingParams,
)
from specops.server.adapters import LoadAdapterRequest, UnloadAdapterRequest
from specops.server.anthropic_messages import CountTokensRequest, MessagesRequest
from specops.server.audits import AuditRequest
from specops.server.openai_responses import ResponsesRequest
from specops.server.protocol import (
    MAX_LISTS,
    MAX_PARTS,
    MAX_STOP_LENGTH,
    Body,
    ChatCompletionRequest,
    CompletionRequest,
)
from specops.server.replies import ErrorReply
from specops.server.scores import ScoreRequest
from specops.server.tokens import DetokenizeRequest, TokenizeRequest
from specops.server.updates import UpdateRequest

_TEXT = "def add(a, b):"
_MESSAGES_EXAMPLE = [{"role": "user", "content": f"Complete this function: {_TEXT}"}]
# Bodies with examples that every model answers, if it has a chat template for those of _CHATS; no
# example: {}.
_BODIES: dict[type[Body], dict[str, Any]] = {
    CompletionRequest: {"prompt": _TEXT, "max_tokens": 32},
    ChatCompletionRequest: {"messages": _MESSAGES_EXAMPLE, "max_tokens": 32},
    ResponsesRequest: {"input": _MESSAGES_EXAMPLE[0]["content"], "max_output_tokens": 32},
    MessagesRequest: {"messages": _MESSAGES_EXAMPLE, "max_tokens": 32},
    CountTokensRequest: {"messages": _MESSAGES_EXAMPLE},
    TokenizeRequest: {"prompt": _TEXT},
    DetokenizeRequest: {"tokens": [1, 2, 3]},
    AuditRequest: {},
    ScoreRequest: {"prompt": _TEXT, "continuations": ["\n    return a + b"]},
    UpdateRequest: {},
    LoadAdapterRequest: {},
    UnloadAdapterRequest: {},
}
_CHATS = (ChatCompletionRequest, ResponsesRequest, MessagesRequest, CountTokensRequest)
_SCHEMAS = "#/components/schemas/"

# Classes of the elements of a body's `messages` or `input`.
_MESSAGES = (
    "Message",
    "AssistantMessage",
    "ToolMessage",
    "AnthropicMessage",
    "InputMessage",
    "FunctionCall",
    "FunctionCallOutput",
)

# Only `itemSchema`, without `schema`, which OpenAPI would read as an array of all events.
_EVENTS = {
    "itemSchema": {
        "type": "object",
        "properties": {
            "data": {
                "type": "string",
                "description": "a chunk of the answer as JSON in OpenAI's format, or an error like "
                "that of other answers; [DONE] at the end",
            }
        },
        "required": ["data"],
    },
}

_REASONS = {
    400: "the request does not match the schema, or the model cannot use a value",
    401: "the API key is missing or wrong",
    403: "web pages may not do this",
    404: "the model or the response does not exist",
    408: "the body arrived too slowly",
    413: "the body is too long",
    415: "the content type is not application/json",
    429: "too many requests are waiting; retry after the time in Retry-After",
    500: "the engine failed",
    503: "the server is shutting down, or its engine has stopped",
}
_OF_BODIES = (400, 404, 408, 413, 415, 500)
_OF_GENERATION = (*_OF_BODIES, 429, 503)


def without_body(
    reply: type[BaseModel], *errors: int, query: Mapping[str, dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Return FastAPI's keyword arguments for a route without a body.

    Args:
        reply: class of the answer.
        errors: HTTP statuses of the route's errors, except the status for a wrong API key.
        query: schemas of the query parameters; the route itself reads and validates them.
    """
    declared: dict[str, Any] = {"responses": {200: {"model": reply}, **_refusals(errors)}}
    if query:
        parameters = [
            {"name": name, "in": "query", "schema": schema} for name, schema in query.items()
        ]
        declared["openapi_extra"] = {"parameters": parameters}
    return declared


def with_body(
    body: type[Body],
    reply: type[BaseModel],
    *,
    streams: bool = False,
    generates: bool = False,
    error: type[BaseModel] = ErrorReply,
) -> dict[str, Any]:
    """Return FastAPI's keyword arguments for a route with a body.

    Args:
        body: class of the body, one of `_BODIES`.
        reply: class of the answer.
        streams: whether the route generates text and may answer with server-sent events.
        generates: whether the route runs the engine.
        error: class of the route's errors.
    """
    success: dict[str, Any] = {"model": reply}
    if streams:
        success["content"] = {"text/event-stream": _EVENTS}
    statuses = _OF_GENERATION if streams or generates else _OF_BODIES
    schema = {"$ref": _SCHEMAS + body.__name__}
    content = {"application/json": {"schema": schema}}
    return {
        "responses": {200: success, **_refusals(statuses, error)},
        "openapi_extra": {"requestBody": {"required": True, "content": content}},
    }


def operation_id(route: APIRoute) -> str:
    """Return a route's operation id, which generated clients use: the name of its handler."""
    return route.name


def _refusals(
    statuses: tuple[int, ...], error: type[BaseModel] = ErrorReply
) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": error, "description": _REASONS[status]} for status in statuses}


def describe(app: FastAPI, *, keyed: frozenset[str], has_chats: bool) -> dict[str, Any]:
    """Return the OpenAPI description of an application's routes.

    Args:
        app: application with routes that were declared with `without_body` and `with_body`.
        keyed: paths that need an API key.
        has_chats: whether the model has a chat template; otherwise chats get no examples.
    """
    examples = {
        _SCHEMAS + body.__name__: example
        for body, example in _BODIES.items()
        if example and (has_chats or body not in _CHATS)
    }
    with warnings.catch_warnings():
        # GET and HEAD are one route; _complete gives HEAD an id of its own.
        warnings.filterwarnings("ignore", message="Duplicate Operation ID")
        described = get_openapi(
            title="specops",
            version=specops.__version__,
            summary="OpenAI-compatible server with speculative decoding",
            routes=app.routes,
            separate_input_output_schemas=False,
        )
    schemas = described["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's, never sent
        schemas.pop(name, None)
    schemas.update(_body_schemas())
    for path, item in described["paths"].items():
        for method in sorted(item):  # methods come from a set; make the order deterministic
            operation = item.pop(method)
            _complete(operation, method, path in keyed)
            for content in operation.get("requestBody", {}).get("content", {}).values():
                if (example := examples.get(content["schema"]["$ref"])) is not None:
                    content["example"] = example
            item[method] = operation
    if keyed:
        described["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return described


def _complete(operation: dict[str, Any], method: str, needs_key: bool) -> None:
    responses = operation["responses"]
    responses.pop("422", None)  # FastAPI adds it for parameters, but ours cannot be invalid
    if needs_key:
        operation["security"] = [{"key": []}]
        error = {"application/json": {"schema": {"$ref": f"{_SCHEMAS}{ErrorReply.__name__}"}}}
        responses["401"] = {"description": _REASONS[401], "content": error}
    if method == "head":
        operation["operationId"] += "_head"
        for response in responses.values():
            response.pop("content", None)


def _body_schemas() -> dict[str, Any]:
    """Return the schemas of bodies, including the checks that are made outside pydantic."""
    _, definitions = models_json_schema(
        [(body, "validation") for body in _BODIES], ref_template=_SCHEMAS + "{model}"
    )
    schemas: dict[str, Any] = definitions["$defs"]
    for body in _BODIES:
        _complete_body(schemas[body.__name__], body)
    message = schemas["InputMessage"]  # recognized by its role if it has no type
    message["required"].remove("type")
    message["properties"]["type"] = _nullable(message["properties"]["type"])
    for name in _MESSAGES:
        # Allow empty fields, which client libraries send back.
        nothing = [{"type": "null"}, {"type": "array", "maxItems": 0}]
        schemas[name]["additionalProperties"] = {"anyOf": nothing}
        for branch in _branches(schemas[name]["properties"].get("content", {}), "array"):
            branch["maxItems"] = MAX_PARTS
    return schemas


def _complete_body(schema: dict[str, Any], body: type[Body]) -> None:
    properties = schema["properties"]
    ranges: dict[str, tuple[float, float | None]] = {**WHOLE_RANGES, **REAL_RANGES}
    ranges["top_logprobs"] = WHOLE_RANGES["logprobs"]
    if body is not CompletionRequest:
        ranges |= dict.fromkeys(("max_tokens", "max_completion_tokens"), (1, None))
    unlimited = {"top_k"}
    if body in (CompletionRequest, ChatCompletionRequest):
        unlimited |= {"max_tokens", "max_completion_tokens"}
    meanings = _meanings()
    for name, field in properties.items():
        if name in meanings:
            field.setdefault("description", meanings[name])
        if name in ranges:
            low, high = ranges[name]
            for branch in _branches(field, "integer", "number"):
                least = "exclusiveMinimum" if name in POSITIVE else "minimum"
                branch[least] = -1 if name in unlimited else low  # -1 means off, or no limit
                if high is not None:
                    branch["maximum"] = high
        if name in MAX_LISTS:
            for branch in _branches(field, "array", "object"):
                limit = "maxItems" if branch["type"] == "array" else "maxProperties"
                branch[limit] = MAX_LISTS[name]
        if name in ("messages", "input"):
            for branch in _branches(field, "array"):
                branch["minItems"] = 1
                # The roles in the schemas already determine a message's class. Several roles share
                # one class, which tools do not expect of a discriminator.
                branch["items"].pop("discriminator", None)
    if "stop" in properties:
        for branch in _branches(properties["stop"], "string"):
            branch |= {"minLength": 1, "maxLength": MAX_STOP_LENGTH}
    if "logit_bias" in properties:
        bias = {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS}
        properties["logit_bias"] |= {"additionalProperties": bias}
        properties["logit_bias"]["propertyNames"] = {"pattern": "^[0-9]+$"}
    for name, unsupported in body.neutral.items():
        if name not in properties:
            described = f"no effect: {unsupported.reason}"
            if unsupported.values is None:
                properties[name] = {"description": described}
                continue
            described = f"only these values are allowed, which have {described}"
            values = [*copy.deepcopy(unsupported.values)]
            properties[name] = {"enum": values, "description": described}
    for name, field in properties.items():
        if name not in schema.get("required", ()):
            properties[name] = _nullable(field)


@functools.cache
def _meanings() -> dict[str, str]:
    """Return the descriptions of `SamplingParams`' attributes by name, from its docstring."""
    attributes = (inspect.getdoc(SamplingParams) or "").partition("Attributes:\n")[2]
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", attributes, re.MULTILINE)
    return {name: " ".join(meaning.split()) for name, meaning in entries}


def _branches(field: dict[str, Any], *types: str) -> list[dict[str, Any]]:
    """Return the alternatives in a field's schema that have one of the types."""
    return [branch for branch in field.get("anyOf", [field]) if branch.get("type") in types]


def _nullable(field: dict[str, Any]) -> dict[str, Any]:
    """Return a field's schema extended by null, which means absent."""
    if "enum" in field and "type" not in field:
        return {**field, "enum": [*field["enum"], None]}
    if _branches(field, "null"):
        return field
    about = ("default", "title", "description")
    outer: dict[str, Any] = {name: field[name] for name in about if name in field}
    inner = {name: value for name, value in field.items() if name not in outer}
    return {"anyOf": [inner, {"type": "null"}], **outer}
