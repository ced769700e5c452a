# SPDX-License-Identifier: Apache-2.0
"""Fields of OpenAI's and vLLM's APIs that constrain an output's format."""

import re
from typing import Any, Literal

from pydantic import Field

from specops.api.structured import StructuredOutput
from specops.server.api_error import ApiError
from specops.server.strict import Strict

# In error messages, the engine's name of the schema becomes "json", its name in vLLM's API.
_SCHEMA = re.compile(r"^(structured_output: (?:\w+ needs )?)json_schema")


# Pattern of llguidance's error for a schema of a tool: line, reason, nearby lines, and the line,
# which ends with the tool's name and the mark ^.
_OF_A_TOOL = re.compile(
    r"at \d+\(\d+\): failed to compile JSON schema: (?P<why>.*?)\s+\d+ \| .*"
    r"// tool (?P<name>[\w.-]+)\s+\^",
    re.DOTALL,
)


class JsonSchema(Strict):
    """Schema in OpenAI's wrapper. It constrains the output regardless of `strict`."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None


class Structure(Strict):
    """Structural tag: begin text, schema of the JSON inside, and end text."""

    begin: str
    schema_: dict[str, Any] | bool = Field(alias="schema")
    end: str


class ResponseFormat(Strict):
    """OpenAI's field for the output's format, with vLLM's extension for structural tags."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    structures: list[Structure] | None = Field(default=None, fail_fast=True)
    triggers: list[str] | None = Field(default=None, fail_fast=True)
    format: dict[str, Any] | None = None


class StructuredOutputs(Strict):
    """vLLM's field for the output's format."""

    json_: dict[str, Any] | bool | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(None, fail_fast=True)
    grammar: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None


def output_format(
    response_format: ResponseFormat | None, structured_outputs: StructuredOutputs | None
) -> StructuredOutput | None:
    """Return the output format that a request asks for, or None if it asks for none.

    Raises:
        ApiError: both fields constrain the output, or the format is invalid.
    """
    first = None if response_format is None else _of_openai(response_format)
    second = None if structured_outputs is None else _of_vllm(structured_outputs)
    if first is not None and second is not None:
        message = "structured_outputs must be absent when response_format constrains the output"
        raise ApiError(400, message, param="structured_outputs", code="invalid_value")
    return second if first is None else first


def _of_openai(response_format: ResponseFormat) -> StructuredOutput | None:
    name = "response_format"
    if (response_format.json_schema is not None) != (response_format.type == "json_schema"):
        message = (
            "response_format must have json_schema if its type is 'json_schema', and only then"
        )
        raise ApiError(400, message, param=name, code="invalid_value")
    is_tags = response_format.type == "structural_tag"
    has = [
        value is not None
        for value in (response_format.format, response_format.structures, response_format.triggers)
    ]
    if has not in ([[True, False, False], [False, True, True]] if is_tags else [[False] * 3]):
        message = (
            "response_format must have format, or structures and triggers, if its type is "
            "'structural_tag', and only then"
        )
        raise ApiError(400, message, param=name, code="invalid_value")
    if response_format.format is not None:
        return _checked(name, structural_tag={"format": response_format.format})
    if response_format.structures is not None:
        structures = [value.model_dump(by_alias=True) for value in response_format.structures]
        tags = {"structures": structures, "triggers": response_format.triggers}
        return _checked(name, structural_tag=tags)
    if response_format.type == "text":
        return None
    schema = (
        {"type": "object"}
        if response_format.json_schema is None
        else response_format.json_schema.schema_
    )
    return _checked(name, json_schema=schema)


def _of_vllm(options: StructuredOutputs) -> StructuredOutput:
    schema = options.json_
    forms = {
        "json": schema,
        "json_object": options.json_object or None,
        "regex": options.regex,
        "choice": options.choice,
        "grammar": options.grammar,
        "structural_tag": options.structural_tag,
    }
    named = [name for name, form in forms.items() if form is not None]
    if len(named) != 1:
        message = (
            f"structured_outputs must have exactly one of {', '.join(forms)}, got "
            f"{' and '.join(named) or 'none'}"
        )
        raise ApiError(400, message, param="structured_outputs", code="invalid_value")
    if options.json_object:
        schema = {"type": "object"}
    return _checked(
        "structured_outputs",
        json_schema=schema,
        regex=options.regex,
        grammar=options.grammar,
        choice=None if options.choice is None else tuple(options.choice),
        structural_tag=options.structural_tag,
        disable_any_whitespace=options.disable_any_whitespace,
        whitespace_pattern=options.whitespace_pattern,
    )


def _checked(param: str, **fields: Any) -> StructuredOutput:
    try:
        return StructuredOutput(**fields)
    except ValueError as error:
        raise refusal(error, param) from None


def refusal(error: ValueError, param: str) -> ApiError:
    """Convert the engine's error about an output format: use the client's names of fields."""
    message = str(error)
    if param == "tools":  # clients do not know the grammar of calls
        message = message.replace("structured_output: grammar", param, 1)
        if match := _OF_A_TOOL.search(message):
            message = f"tools: parameters of {match['name']!r} cannot be used: {match['why']}"
    if param == "structured_outputs":
        message = _SCHEMA.sub(r"\1json", message)
    message = message.replace("structured_output", param, 1)
    return ApiError(400, message, param=param, code="invalid_value")
