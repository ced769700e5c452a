# SPDX-License-Identifier: Apache-2.0
"""Readers of config.json fields, which reject invalid values."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specops.api.errors import ModelError

# Kinds of attention of a layer.
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
# Limits on counts, which guard against damaged files: memory for some is allocated before any
# tensor is read.
_COUNTED_ONE_BY_ONE = ("_layers", "_heads", "_experts")
_MOST_OF_THESE, _MOST = 1 << 14, (1 << 31) - 1
# Fields for which null is a value, while absence means the family's default. Null means: no window,
# no compression of queries, or a size that follows from others.
_NULL_IS_A_VALUE = frozenset({"sliding_window", "q_lora_rank", "head_dim", "num_key_value_heads"})


def read_config(directory: str | Path) -> dict[str, Any]:
    """Return the content of `directory/config.json`, without fields that are null.

    Programs that save a configuration write null for fields that are not set. So null means absent,
    except for the fields in `_NULL_IS_A_VALUE`.

    Raises:
        ModelError: the file is missing or not a JSON object.
    """
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise ModelError(f"{directory}: config.json is missing; expected a Hugging Face directory")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path}: expected a JSON object, got {type(raw).__name__}")
    found: dict[str, Any] = _without_nulls(raw)
    return found


def _without_nulls(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {
        name: _without_nulls(one)
        for name, one in value.items()
        if one is not None or name in _NULL_IS_A_VALUE
    }


def flag(raw: Mapping[str, Any], field: str, default: bool = False) -> bool:
    """Return the value of a field that must be true or false.

    Raises:
        ModelError: the value is neither true nor false.
    """
    value = raw.get(field, default)
    if not isinstance(value, bool):
        raise ModelError(f"{field} must be true or false, got {value!r:.60}")
    return value


def text_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config.json that describes the decoder; multimodal models nest it."""
    text = raw.get("text_config")
    return text if isinstance(text, dict) else raw


def count(raw: Mapping[str, Any], field: str, default: int | None = None) -> int:
    """Return the value of a field that is a count, or the default if it is absent or null.

    Raises:
        KeyError: the field is absent, and there is no default.
        ModelError: the value is not an integer of at least 1, or it exceeds the limits above.
    """
    value = raw[field] if default is None else raw.get(field)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{field} must be an integer of at least 1, got {value!r:.60}")
    most = _MOST_OF_THESE if field.endswith(_COUNTED_ONE_BY_ONE) else _MOST
    if value > most:
        raise ModelError(f"{field} must be at most {most}, got {value}")
    return value


def index(raw: Mapping[str, Any], field: str, default: int) -> int:
    """Return the value of a field that must be an integer of at least 0.

    Raises:
        ModelError: the value is not an integer of at least 0.
    """
    value = raw.get(field, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST:
        raise ModelError(f"{field} must be an integer of at least 0, got {value!r:.60}")
    return value


def dtype_of(raw: Mapping[str, Any]) -> str | None:
    """Return `dtype` from a config.json, or the older `torch_dtype`; None if both are absent."""
    return raw.get("dtype") or raw.get("torch_dtype")


def number(field: str, value: Any, *, or_zero: bool = False) -> float:
    """Return the value of a field that must be a number above 0, or at least 0 with `or_zero`.

    Raises:
        ModelError: the value is not such a number.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0 or (value == 0 and not or_zero):
        least = "of at least" if or_zero else "above"
        raise ModelError(f"{field} must be a number {least} 0, got {value!r:.60}")
    return float(value)


def mapping(raw: Mapping[str, Any], *fields: str) -> dict[str, Any]:
    """Return a copy of the first field that is present and not empty, or {}.

    Raises:
        ModelError: the field is not an object.
    """
    for field in fields:
        value = raw.get(field)
        if value:
            if not isinstance(value, dict):
                raise ModelError(f"{field} must be an object, got {value!r:.60}")
            return dict(value)
    return {}


def layer_types(raw: Mapping[str, Any], num_layers: int, other: str = SLIDING) -> list[str] | None:
    """Return each layer's kind of attention, FULL or `other`; None if the file does not list them.

    Raises:
        ModelError: the list has the wrong length, or lists another kind.
    """
    types = raw.get("layer_types")
    if not types:
        return None
    if not isinstance(types, list) or len(types) != num_layers:
        got = len(types) if isinstance(types, list) else f"{types!r:.60}"
        raise ModelError(f"layer_types must hold num_hidden_layers={num_layers} items, got {got}")
    for one in types:
        if one not in (FULL, other):
            raise ModelError(f"layer_types must only hold {FULL} or {other}, got {one!r:.60}")
    return types


def refuse_values(
    raw: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]], prefix: str = ""
) -> None:
    """Reject fields whose value is not among the allowed ones; absent fields count as None.

    `prefix` is put before the field's name in the error message.

    Raises:
        ModelError: a field has another value.
    """
    for field, values in allowed.items():
        if raw.get(field) not in values:
            raise ModelError(f"{prefix}{field} must be {values[0]}, got {raw.get(field)!s:.60}")
