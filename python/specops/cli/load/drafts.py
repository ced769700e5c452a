# SPDX-License-Identifier: Apache-2.0
"""Draft counts of a server, read from replies and from /metrics; standard library only."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# vLLM's metric names, without a prefix such as vllm: or specops:.
_COUNTERS = {
    "num_drafts": "spec_decode_num_drafts",
    "num_draft_tokens": "spec_decode_num_draft_tokens",
    "num_accepted_tokens": "spec_decode_num_accepted_tokens",
}
_SAMPLE = re.compile(r"^(?:\w+:)?(\w+?)(?:_total)?(?:\{.*\})? (\S+)", re.MULTILINE | re.ASCII)


@dataclass(frozen=True)
class DraftCounts:
    """A server's counts of drafts.

    Attributes:
        num_drafts: steps with drafts; None if not reported.
        num_draft_tokens: drafts that were verified.
        num_accepted_tokens: drafts that were accepted.
    """

    num_drafts: int | None
    num_draft_tokens: int
    num_accepted_tokens: int

    def since(self, before: "DraftCounts") -> "DraftCounts":
        """Return the counts since `before`."""
        steps = None
        if self.num_drafts is not None and before.num_drafts is not None:
            steps = self.num_drafts - before.num_drafts
        return DraftCounts(
            steps,
            self.num_draft_tokens - before.num_draft_tokens,
            self.num_accepted_tokens - before.num_accepted_tokens,
        )


def counts_in(reply: Mapping[str, Any]) -> DraftCounts | None:
    """Return the draft counts of a request from its response or its stream's last event.

    The fields are `metrics` of vLLM and specops, OpenAI's `usage` of predicted outputs, and
    `timings` of llama.cpp, tried in this order.

    Returns:
        The counts; None if none of these fields has them.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: the reply is malformed.
    """
    counts = (reply.get("metrics") or {}).get("speculative_decoding")
    if counts:
        return DraftCounts(
            int(counts["num_spec_steps"]),
            int(counts["num_draft_tokens"]),
            int(counts["num_accepted_draft_tokens"]),
        )
    details = (reply.get("usage") or {}).get("completion_tokens_details") or {}
    accepted = details.get("accepted_prediction_tokens")
    rejected = details.get("rejected_prediction_tokens")
    if accepted is not None and rejected is not None:
        return DraftCounts(None, int(accepted) + int(rejected), int(accepted))
    timings = reply.get("timings") or {}
    if "draft_n" in timings:
        return DraftCounts(None, int(timings["draft_n"]), int(timings["draft_n_accepted"]))
    return None


def read_counters(text: str) -> DraftCounts | None:
    """Return the counts of all requests so far from the text of /metrics; None without counts."""
    sums: dict[str, float] = {}
    for name, value in _SAMPLE.findall(text):
        if name in _COUNTERS.values():
            sums[name] = sums.get(name, 0.0) + float(value)
    if _COUNTERS["num_draft_tokens"] not in sums:
        return None
    return DraftCounts(**{field: int(sums.get(name, 0)) for field, name in _COUNTERS.items()})
