# SPDX-License-Identifier: Apache-2.0
"""Defaults of sampling parameters from generation_config.json, read as vLLM's server does."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from specops.api.errors import ModelError
from specops.api.sampling_params import SamplingParams
from specops.api.tokenizer import read_json_object
from specops.server.protocol import Sampling

AUTO, NONE = "auto", "none"
_FILE = "generation_config.json"
# The fields that vLLM reads except max_new_tokens: a request without a limit may fill the context.
_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")

B = TypeVar("B")
logger = logging.getLogger(__name__)


def sampling_defaults(choice: str, model_dir: Path) -> dict[str, Any]:
    """Return the sampling parameters of requests that do not set them, by name.

    Args:
        choice: "auto" reads the model's file, "none" no file; otherwise a directory, whose file
            must exist.
        model_dir: directory of the model.

    Raises:
        ModelError: the file is missing or damaged, or a field has an invalid value.
    """
    if choice == NONE:
        return {}
    file = (model_dir if choice == AUTO else Path(choice)) / _FILE
    if choice != AUTO and not file.is_file():
        raise ModelError(
            f"generation_config must be {AUTO}, {NONE} or a directory with {_FILE}, got {choice}"
        )
    try:
        said = read_json_object(file)
        found = {name: said[name] for name in _FIELDS if said.get(name) is not None}
        if found.get("top_k") == -1:  # -1 means off, as 0 does
            found["top_k"] = 0
        SamplingParams(max_tokens=1, **found)
    except ValueError as error:
        message = str(error)
        raise ModelError(
            message if message.startswith(str(file)) else f"{file}: {message}"
        ) from None
    if found:
        logger.info("defaults of requests from %s: %s", file, found)
    return found


def with_defaults(body: B, defaults: Mapping[str, Any]) -> B:
    """Return a copy of a body in which defaults fill the sampling parameters that it lacks."""
    if not defaults or not isinstance(body, Sampling):
        return body
    return body.model_copy(
        update={name: one for name, one in defaults.items() if name not in body.model_fields_set}
    )
