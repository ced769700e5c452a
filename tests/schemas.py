# SPDX-License-Identifier: Apache-2.0
"""JSON Schemas for tests: handwritten ones, each with a value, and generated ones."""

import random
from typing import Any

TEXT, NUMBER, WHOLE, FLAG = ({"type": name} for name in ("string", "number", "integer", "boolean"))


def record(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    """Return an object schema with these properties; by default all of them are required."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
    }


def several(items: Any, low: int = 0, high: int | None = None) -> dict[str, Any]:
    made = {"type": "array", "items": items, "minItems": low}
    return made if high is None else made | {"maxItems": high}


# Each schema with a value that it allows: an example for the prompt.
BY_HAND: list[tuple[Any, Any]] = [
    (TEXT, "a text"),
    (NUMBER, 1.5),
    (WHOLE, 12),
    (FLAG, True),
    ({"type": "null"}, None),
    ({"enum": ["red", "green", "blue"]}, "green"),
    ({"enum": [1, 2, "three", None, False]}, "three"),
    ({"const": {"a": [1, 2]}}, {"a": [1, 2]}),
    ({"type": ["string", "null"]}, None),
    ({"type": "string", "minLength": 3, "maxLength": 6}, "abcd"),
    ({"type": "string", "pattern": "^[a-f]{4}-[0-9]{2}$"}, "abcd-12"),
    ({"type": "string", "format": "date"}, "2024-02-29"),
    ({"type": "string", "format": "time"}, "10:20:30Z"),
    ({"type": "string", "format": "date-time"}, "2024-02-29T10:20:30Z"),
    ({"type": "string", "format": "email"}, "a@example.com"),
    ({"type": "string", "format": "ipv4"}, "10.0.0.1"),
    ({"type": "string", "format": "uuid"}, "12345678-1234-1234-1234-123456789abc"),
    ({"type": "integer", "minimum": 3, "maximum": 17}, 9),
    ({"type": "integer", "exclusiveMinimum": -5, "exclusiveMaximum": 5}, 0),
    ({"type": "number", "minimum": 0, "maximum": 1}, 0.25),
    ({"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100}, 15),
    (several(WHOLE, 2, 4), [1, 2, 3]),
    (several(TEXT, 1, 2), ["one", "two"]),
    (several(several(WHOLE, 1, 2), 1, 2), [[1, 2], [3]]),
    ({"type": "array", "prefixItems": [TEXT, WHOLE], "items": False, "minItems": 2}, ["a", 1]),
    (record(name=TEXT, age=WHOLE), {"name": "Ann", "age": 30}),
    (record(["id"], id=WHOLE, note=TEXT), {"id": 3}),
    (record(point=record(x=NUMBER, y=NUMBER), tag=TEXT), {"point": {"x": 1, "y": 2}, "tag": "t"}),
    (record(items=several(record(k=TEXT, v=WHOLE), 1, 3)), {"items": [{"k": "a", "v": 1}]}),
    ({"type": "object"}, {"any": "thing"}),
    ({"type": "object", "additionalProperties": WHOLE}, {"a": 1, "b": 2}),
    (
        {"type": "object", "patternProperties": {"^x": FLAG}, "additionalProperties": False},
        {"x": True},
    ),
    ({"anyOf": [WHOLE, several(FLAG, 1, 2)]}, [True]),
    ({"oneOf": [record(kind={"const": "a"}), record(kind={"const": "b"}, n=WHOLE)]}, {"kind": "a"}),
    ({"allOf": [{"type": "integer"}, {"minimum": 2}, {"maximum": 50}]}, 20),
    (
        {
            "$ref": "#/$defs/node",
            "$defs": {"node": record(["v"], v=WHOLE, next={"$ref": "#/$defs/node"})},
        },
        {"v": 1, "next": {"v": 2}},
    ),
    ({"definitions": {"n": WHOLE}, **several({"$ref": "#/definitions/n"}, 1, 3)}, [1]),
    (
        record(city={"enum": ["Bonn", "Köln"]}, zip={"type": "string", "pattern": "^[0-9]{5}$"}),
        {"city": "Köln", "zip": "50667"},
    ),
    (
        record(q={"type": "string", "maxLength": 12}, ok={"type": ["boolean", "null"]}),
        {"q": "a", "ok": None},
    ),
    (record(a=record(b=record(c=record(d={"const": 1})))), {"a": {"b": {"c": {"d": 1}}}}),
]  # fmt: skip


def bounded(schema: Any) -> Any | None:
    """Return the schema with bounds on strings and numbers; None if its texts stay unbounded."""
    if isinstance(schema, list):
        made = [bounded(one) for one in schema]
        return None if None in made else made
    if not isinstance(schema, dict):
        return schema
    kind = schema.get("type")
    is_open = kind == "object" and schema.get("additionalProperties", True) is not False
    if is_open or "patternProperties" in schema or schema.get("$ref") == "#/$defs/node":
        return None  # the number of properties or levels is unbounded
    made = {name: bounded(value) for name, value in schema.items() if name not in ("const", "enum")}
    if None in made.values():
        return None
    made |= {name: schema[name] for name in ("const", "enum") if name in schema}
    if kind == "string" or (isinstance(kind, list) and "string" in kind):
        made = {"maxLength": 36, **made} if "pattern" not in made else made
    if kind == "integer" and "exclusiveMinimum" not in made:
        made = {"minimum": -999, "maximum": 9999, **made}
    if kind == "number":
        made = {"minimum": -99, "maximum": 999, "multipleOf": 0.25, **made}
    return made


def generated(draw: random.Random, depth: int = 3) -> Any:
    """Return a random schema of up to `depth` levels, using what llguidance supports."""
    kinds = ["text", "whole", "number", "flag", "null", "enum", "const", "bounded", "pattern"]
    if depth:
        kinds += ["record", "record", "array", "array", "any", "tuple"]
    kind = draw.choice(kinds)
    if kind == "record":
        names = draw.sample(["id", "name", "value", "size", "note", "x", "y_1", "größe"], 3)
        needed = [name for name in names if draw.random() < 0.7]
        return record(needed, **{name: generated(draw, depth - 1) for name in names})
    if kind == "array":
        low = draw.randrange(3)
        return several(generated(draw, depth - 1), low, low + draw.randrange(3))
    if kind == "any":
        return {"anyOf": [generated(draw, depth - 1) for _ in range(draw.randrange(2, 4))]}
    if kind == "tuple":
        items = [generated(draw, depth - 1) for _ in range(draw.randrange(1, 4))]
        size = len(items)
        return {"type": "array", "prefixItems": items, "items": False, "minItems": size}
    low = draw.randrange(-20, 20)
    return {
        "text": {"type": "string", "maxLength": draw.randrange(1, 20)},
        "whole": WHOLE,
        "number": NUMBER,
        "flag": FLAG,
        "null": {"type": "null"},
        "enum": {"enum": draw.sample(["a", "bc", "d e", 1, 22, 3.5, None, True], 3)},
        "const": {"const": draw.choice(["fixed", 7, [1, "two"], {"k": None}])},
        "bounded": {"type": "integer", "minimum": low, "maximum": low + draw.randrange(30)},
        "pattern": {"type": "string", "pattern": draw.choice(["^[A-Z]{2,4}$", "^(on|off)$"])},
    }[kind]  # fmt: skip
