# SPDX-License-Identifier: Apache-2.0
"""What a server's replies say about itself. Standard library only."""

import json
from typing import Any


def error_message(text: str) -> str:
    """A server's error message, in OpenAI's form or any other."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, TypeError, KeyError):
        return " ".join(text.split())[:200]


def model_cards(text: str) -> list[dict[str, Any]]:
    """The models that /v1/models lists.

    Raises:
        ValueError: it lists none.
    """
    try:
        cards = [dict(card, id=str(card["id"])) for card in json.loads(text)["data"]]
    except (ValueError, TypeError, KeyError):
        cards = []
    if not cards:
        raise ValueError("it lists no model at /v1/models")
    return cards
