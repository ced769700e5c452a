# SPDX-License-Identifier: Apache-2.0
"""Parsers of a server's error messages and model list. Uses only the standard library."""

import json
from typing import Any


def error_message(text: str) -> str:
    """Return a server's error message, from OpenAI's JSON or else from the plain text."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, TypeError, KeyError):
        return " ".join(text.split())[:200]


def model_cards(text: str) -> list[dict[str, Any]]:
    """Return the models that /v1/models lists.

    Raises:
        ValueError: it lists none.
    """
    try:
        cards = [dict(card, id=str(card["id"])) for card in json.loads(text)["data"]]
    except (ValueError, TypeError, KeyError):
        cards = []
    if not cards:
        raise ValueError("it must list a model at /v1/models, got none")
    return cards
