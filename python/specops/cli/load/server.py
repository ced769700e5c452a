# SPDX-License-Identifier: Apache-2.0
"""What a server says of itself: its models, and its counters of drafts."""

import httpx
from prometheus_client.parser import text_string_to_metric_families

from specops.cli.load.answers import error_message
from specops.cli.load.figures import DraftCounts

# As vLLM calls them, behind a prefix such as vllm: or specops:.
_COUNTERS = {
    "num_drafts": "spec_decode_num_drafts",
    "num_draft_tokens": "spec_decode_num_draft_tokens",
    "num_accepted_tokens": "spec_decode_num_accepted_tokens",
}


async def first_model(client: httpx.AsyncClient) -> str:
    """The name of the first model that the server has.

    Raises:
        ValueError: there is no such server, or it has none.
    """
    try:
        response = await client.get("/v1/models")
    except httpx.HTTPError as error:
        raise ValueError(_wrong(client, str(error) or type(error).__name__)) from None
    if response.status_code != 200:
        raise ValueError(_wrong(client, f"{response.status_code}: {error_message(response)}"))
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, TypeError, KeyError, IndexError):
        raise ValueError(_wrong(client, "it lists no model at /v1/models")) from None


def _wrong(client: httpx.AsyncClient, reason: str) -> str:
    url = str(client.base_url).rstrip("/")
    return f"--url must be an OpenAI-compatible server, got {url}: {reason}"


async def draft_counts(client: httpx.AsyncClient) -> DraftCounts | None:
    """What the server's metrics say of drafts so far; None: it has no such metrics."""
    try:
        response = await client.get("/metrics")
        if response.status_code != 200:
            return None
        return _parse(response.text)
    except (httpx.HTTPError, ValueError):
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
