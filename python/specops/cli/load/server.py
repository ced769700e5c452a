# SPDX-License-Identifier: Apache-2.0
"""A server's models and its counters of drafts, from its API."""

import json

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from specops.cli.load.answers import error_message, reason
from specops.cli.load.figures import DraftCounts

# vLLM's names, after a prefix such as vllm: or specops:.
_COUNTERS = {
    "num_drafts": "spec_decode_num_drafts",
    "num_draft_tokens": "spec_decode_num_draft_tokens",
    "num_accepted_tokens": "spec_decode_num_accepted_tokens",
}


async def first_model(session: aiohttp.ClientSession, url: str) -> str:
    """The name of the first model that the server has.

    Raises:
        ValueError: there is no such server, or it has none.
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
        return str(json.loads(text)["data"][0]["id"])
    except (ValueError, TypeError, KeyError, IndexError):
        raise ValueError(wrong + "it lists no model at /v1/models") from None


async def draft_counts(session: aiohttp.ClientSession, url: str) -> DraftCounts | None:
    """The server's draft counters so far; None: it has no such metrics."""
    try:
        async with session.get(f"{url}/metrics") as response:
            return _parse(await response.text()) if response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return None


def _parse(text: str) -> DraftCounts | None:
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.rpartition(":")[2].removesuffix("_total")
            sums[name] = sums.get(name, 0.0) + sample.value
    if _COUNTERS["num_draft_tokens"] not in sums:
        return None
    counts = {field: int(sums.get(name, 0)) for field, name in _COUNTERS.items()}
    return DraftCounts(**counts)
