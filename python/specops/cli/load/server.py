# SPDX-License-Identifier: Apache-2.0
"""A server's first model and its draft counters, from its API."""

import aiohttp

from specops.cli.load.answers import reason
from specops.cli.load.drafts import DraftCounts, read_counters
from specops.cli.load.replies import error_message, model_cards


async def first_model(session: aiohttp.ClientSession, url: str) -> str:
    """Return the name of the first model that the server lists.

    Raises:
        ValueError: the server does not answer, or lists no model.
    """
    wrong = f"--url must be an OpenAI-compatible server, got {url}: "
    try:
        async with session.get(f"{url}/v1/models") as response:
            text = await response.text()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ValueError(wrong + reason(error)) from None
    if response.status != 200:
        raise ValueError(f"{wrong}{response.status}: {error_message(text)}")
    try:
        return str(model_cards(text)[0]["id"])
    except ValueError as error:
        raise ValueError(f"{wrong}{error}") from None


async def draft_counts(session: aiohttp.ClientSession, url: str) -> DraftCounts | None:
    """Return the server's draft counters so far; None if it has no such metrics."""
    try:
        async with session.get(f"{url}/metrics") as response:
            return read_counters(await response.text()) if response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return None
